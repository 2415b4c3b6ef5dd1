//! The string table of a page, which stores each name once.

use rustc_hash::FxHashMap;

use crate::read::symbols::{Symbol, SymbolTable};

/// The string table of one page.
#[derive(Default)]
pub(super) struct Strings {
    places: FxHashMap<String, i64>,
    /// The names, by index.
    pub(super) names: Vec<String>,
}

impl Strings {
    /// Returns the index of a symbol's text as reports print it, or of `missing` if the symbol is
    /// [`Symbol::NONE`].
    pub(super) fn index_of(&mut self, symbol: Symbol, missing: &str, symbols: &SymbolTable) -> i64 {
        let name = symbols.or(symbol, missing);
        let next = self.names.len() as i64;
        *self.places.entry(name).or_insert_with_key(|name| {
            self.names.push(name.clone());
            next
        })
    }
}
