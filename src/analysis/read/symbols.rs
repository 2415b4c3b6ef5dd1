//! Interns the texts of a trace, so that a record holds a small number ([`Symbol`]) for each text.
//!
//! Each trace that is read has one table. Several threads add to it, so the order of the numbers has no
//! meaning. Sort by the texts: a [`Symbol`] has no order.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use memtrace_trace::text::{NO_CATEGORY, NO_LINE, NO_MODULE, NO_OP, NO_OWNER, NO_PHASE, NO_STACK};
use memtrace_trace::text::{NONE, SCRIPT, UNKNOWN, WITHOUT_DETAIL};

/// The number of an interned text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Symbol(u32);

impl Symbol {
    /// `(none)`: the column has no text.
    pub const NONE: Symbol = Symbol(0);
    /// `(script)`: code outside every module.
    pub const SCRIPT: Symbol = Symbol(1);
    /// `(other names)`: every text that was added after the table held [`MOST_BYTES`].
    pub const REST: Symbol = Symbol(2);
    /// `(without detail)`: the owner is unknown, see [`memtrace_trace::detail`].
    pub const WITHOUT_DETAIL: Symbol = Symbol(3);
    /// `?`: the type or the shape of a tensor is unknown.
    pub const UNKNOWN: Symbol = Symbol(4);

    /// Returns the symbol of the default of a column, which is [`NONE`] or [`UNKNOWN`].
    #[must_use]
    pub(crate) const fn of_placeholder(text: &str) -> Symbol {
        if text.len() == UNKNOWN.len() { Symbol::UNKNOWN } else { Symbol::NONE }
    }

    /// Returns the number of the symbol. The numbers start at 0 without gaps, so a list can have one element
    /// for each symbol.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// The limit for the bytes of the texts in a table. A trace that exceeds it is hostile or broken. Further
/// texts become [`Symbol::REST`], so that memory stays bounded.
pub const MOST_BYTES: usize = 64 << 20;

const REST: &str = "(other names)";

/// A table of symbols. Clones share one table.
#[derive(Clone)]
pub struct SymbolTable {
    inner: Arc<Mutex<Interned>>,
}

#[derive(Default)]
struct Interned {
    ids: HashMap<Arc<str>, Symbol>,
    symbols: Vec<Arc<str>>,
    bytes: usize,
}

impl Default for SymbolTable {
    fn default() -> Self {
        let mut inner = Interned::default();
        for text in [NONE, SCRIPT, REST, WITHOUT_DETAIL, UNKNOWN] {
            inner.intern(text);
        }
        SymbolTable { inner: Arc::new(Mutex::new(inner)) }
    }
}

impl SymbolTable {
    /// Returns the symbol of `text`, after adding the text if it is new.
    #[must_use]
    pub fn intern(&self, text: &str) -> Symbol {
        self.lock().intern(text)
    }

    /// Returns the text of `symbol`.
    #[must_use]
    pub fn get(&self, symbol: Symbol) -> Arc<str> {
        let inner = self.lock();
        inner.symbols.get(symbol.index()).or(inner.symbols.first()).map_or_else(|| NONE.into(), Arc::clone)
    }

    /// Returns the text of `symbol`, or `missing` for [`Symbol::NONE`]. `missing` is a text such as
    /// [`NO_MODULE`], [`NO_OP`] or [`NO_PHASE`].
    #[must_use]
    pub fn or(&self, symbol: Symbol, missing: &str) -> String {
        if symbol == Symbol::NONE { missing.to_owned() } else { self.get(symbol).to_string() }
    }

    /// Returns the text of `symbol` as a table cell, which is `-` for [`Symbol::NONE`].
    #[must_use]
    pub fn or_dash(&self, symbol: Symbol) -> String {
        if symbol == Symbol::NONE { "-".to_owned() } else { self.get(symbol).to_string() }
    }

    fn lock(&self) -> MutexGuard<'_, Interned> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Interned {
    fn intern(&mut self, text: &str) -> Symbol {
        if let Some(symbol) = self.ids.get(text) {
            return *symbol;
        }
        // The size of an entry in the map and the list without its text, in bytes.
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
    fn a_text_has_one_symbol() {
        let symbols = SymbolTable::default();
        let mm = symbols.intern("aten::mm");
        assert_eq!(symbols.clone().intern("aten::mm"), mm);
        assert_eq!(&*symbols.get(mm), "aten::mm");
        assert_eq!(symbols.intern("(none)"), Symbol::NONE);
        assert_eq!(symbols.intern("(script)"), Symbol::SCRIPT);
    }

    #[test]
    fn the_memory_of_symbols_is_bounded() {
        let symbols = SymbolTable::default();
        let long = "x".repeat(1 << 20);
        let mut last = Symbol::NONE;
        for n in 0..80 {
            last = symbols.intern(&format!("{n}{long}"));
        }
        assert_eq!(last, Symbol::REST);
    }
}
