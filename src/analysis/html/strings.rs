//! The names that a page shows, each once.

use rustc_hash::FxHashMap;

use crate::read::symbols::{Symbol, SymbolTable};

/// The table of one page.
#[derive(Default)]
pub(super) struct Strings {
    places: FxHashMap<String, i64>,
    /// In the order of their places.
    pub(super) names: Vec<String>,
}

impl Strings {
    /// The place of a symbol's text, as reports show it.
    pub(super) fn of(&mut self, symbol: Symbol, symbols: &SymbolTable) -> i64 {
        let name = symbols.or_unattributed(symbol);
        let next = self.names.len() as i64;
        *self.places.entry(name).or_insert_with_key(|name| {
            self.names.push(name.clone());
            next
        })
    }
}
