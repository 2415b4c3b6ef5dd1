//! The texts of a trace, each kept once: a row carries small numbers instead.
//!
//! One table per file that is read. Readers on several threads add to it; the order of the numbers
//! therefore means nothing, and nothing may sort by them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use memtrace_trace::text::{NONE, SCRIPT};

/// A text of the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Symbol(u32);

impl Symbol {
    /// `(none)`: nobody.
    pub const NONE: Symbol = Symbol(0);
    /// `(script)`: an op outside every module.
    pub const SCRIPT: Symbol = Symbol(1);
    /// What stands for every text behind the first [`MOST_BYTES`] of them.
    pub const REST: Symbol = Symbol(2);

    /// Its place in a table of all symbols.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A trace whose texts take more than this many bytes is hostile or broken: what comes later is
/// counted under one name, so that memory stays bounded.
pub const MOST_BYTES: usize = 64 << 20;

const REST: &str = "(other names)";

/// The table. Clones share it.
#[derive(Clone)]
pub struct SymbolTable {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Default)]
struct Inner {
    ids: HashMap<Arc<str>, Symbol>,
    symbols: Vec<Arc<str>>,
    bytes: usize,
}

impl Default for SymbolTable {
    fn default() -> Self {
        let mut inner = Inner::default();
        for text in [NONE, SCRIPT, REST] {
            inner.intern(text);
        }
        SymbolTable { inner: Arc::new(Mutex::new(inner)) }
    }
}

impl SymbolTable {
    /// The symbol of `text`, new or known.
    #[must_use]
    pub fn intern(&self, text: &str) -> Symbol {
        self.lock().intern(text)
    }

    /// The text of `symbol`.
    #[must_use]
    pub fn get(&self, symbol: Symbol) -> Arc<str> {
        let inner = self.lock();
        inner.symbols.get(symbol.index()).or(inner.symbols.first()).map_or_else(|| NONE.into(), Arc::clone)
    }

    /// The text of an owner as reports show it: `(unattributed)` for [`Symbol::NONE`].
    #[must_use]
    pub fn or_unattributed(&self, symbol: Symbol) -> String {
        if symbol == Symbol::NONE { "(unattributed)".to_owned() } else { self.get(symbol).to_string() }
    }

    /// The text of `symbol` as a table cell: `-` for [`Symbol::NONE`].
    #[must_use]
    pub fn or_dash(&self, symbol: Symbol) -> String {
        if symbol == Symbol::NONE { "-".to_owned() } else { self.get(symbol).to_string() }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn intern(&mut self, text: &str) -> Symbol {
        if let Some(symbol) = self.ids.get(text) {
            return *symbol;
        }
        // What the two tables hold per text, beside its bytes.
        const ENTRY: usize = 64;
        if self.bytes > MOST_BYTES {
            return Symbol::REST;
        }
        self.bytes += text.len() + ENTRY;
        let text: Arc<str> = text.into();
        let symbol = Symbol(self.symbols.len() as u32);
        self.symbols.push(Arc::clone(&text));
        self.ids.insert(text, symbol);
        symbol
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_has_one_symbol_and_comes_back() {
        let symbols = SymbolTable::default();
        let mm = symbols.intern("aten::mm");
        assert_eq!(symbols.clone().intern("aten::mm"), mm);
        assert_eq!(&*symbols.get(mm), "aten::mm");
        assert_eq!(symbols.intern("(none)"), Symbol::NONE);
        assert_eq!(symbols.intern("(script)"), Symbol::SCRIPT);
    }

    #[test]
    fn memory_for_texts_is_bounded() {
        let symbols = SymbolTable::default();
        let long = "x".repeat(1 << 20);
        let mut last = Symbol::NONE;
        for n in 0..80 {
            last = symbols.intern(&format!("{n}{long}"));
        }
        assert_eq!(last, Symbol::REST);
    }
}
