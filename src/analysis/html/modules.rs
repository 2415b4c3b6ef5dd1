//! The parts of a model in the stacked curve. The tree of modules is split further where modules hold more
//! memory.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

use crate::read::symbols::{NO_MODULE, Symbol, SymbolTable};
use crate::state::module_layers::Layers;

/// The maximum number of parts. All other modules form one more.
const MOST: usize = 12;

/// The name of the part of all other modules.
pub(super) const REST: &str = "(other)";

/// The division of a tree of modules into parts. A part is one module, with or without its submodules. All
/// modules outside these parts form the part [`REST`].
pub(super) struct ModuleCut {
    /// The parts, largest first, and [`REST`] as the last.
    pub(super) names: Vec<String>,
    /// The index of each part by its module, and whether the module's submodules also belong to it.
    parts: BTreeMap<String, (usize, bool)>,
    known: FxHashMap<Symbol, usize>,
    layers: Layers,
}

impl ModuleCut {
    /// Starts with the root modules and splits the largest part that can be split, until no split keeps the
    /// number of parts within [`MOST`]. `bytes` has the bytes of each module at the peak, with repeated
    /// layers joined.
    pub(super) fn new(bytes: &[(String, i64)], layers: Layers) -> ModuleCut {
        // For each part: the path, whether the part includes the submodules of the path, and the bytes.
        let mut parts: Vec<(String, bool, i64)> = Vec::new();
        for (path, held) in bytes {
            let root = path.split('.').next().unwrap_or(path);
            match parts.iter().position(|(part, ..)| part == root) {
                Some(known) => parts[known].2 += held,
                None if parts.len() < MOST => parts.push((root.to_owned(), true, *held)),
                None => {}
            }
        }
        loop {
            parts.sort_by(|a, b| b.2.cmp(&a.2).then_with(|| a.0.cmp(&b.0)));
            let opened = parts.iter().position(|(path, whole, _)| {
                *whole
                    && children(path, bytes).is_some_and(|children| parts.len() + children.len() <= MOST + 1)
            });
            let Some(opened) = opened else { break };
            let (path, ..) = parts.remove(opened);
            let children = children(&path, bytes).unwrap_or_default();
            parts.extend(children);
        }
        let mut names: Vec<String> = Vec::new();
        let mut places = BTreeMap::new();
        for (path, whole, _) in parts {
            places.insert(path.clone(), (names.len(), whole));
            names.push(path);
        }
        names.push(REST.to_owned());
        ModuleCut { names, parts: places, known: FxHashMap::default(), layers }
    }

    /// Returns the index of the part of a module.
    pub(super) fn index_of(&mut self, module: Symbol, symbols: &SymbolTable) -> usize {
        if let Some(place) = self.known.get(&module) {
            return *place;
        }
        let place = self.find(&self.layers.joined(&symbols.or(module, NO_MODULE)));
        self.known.insert(module, place);
        place
    }

    fn find(&self, path: &str) -> usize {
        let mut upper = path;
        loop {
            if let Some((place, whole)) = self.parts.get(upper)
                && (*whole || upper == path)
            {
                return *place;
            }
            match upper.rsplit_once('.') {
                Some((shorter, _)) => upper = shorter,
                None => return self.names.len() - 1,
            }
        }
    }
}

/// Returns the parts of `path`: the module alone if it has bytes of its own, and each child with its
/// submodules. Returns `None` if it has no children.
fn children(path: &str, bytes: &[(String, i64)]) -> Option<Vec<(String, bool, i64)>> {
    let mut own = 0;
    let mut below: BTreeMap<String, i64> = BTreeMap::new();
    for (module, held) in bytes {
        if module == path {
            own += held;
        } else if let Some(rest) = module.strip_prefix(path).and_then(|rest| rest.strip_prefix('.')) {
            let name = rest.split('.').next().unwrap_or(rest);
            *below.entry(format!("{path}.{name}")).or_default() += held;
        }
    }
    if below.is_empty() {
        return None;
    }
    let mut parts: Vec<_> = below.into_iter().map(|(name, held)| (name, true, held)).collect();
    if own > 0 {
        parts.push((path.to_owned(), false, own));
    }
    Some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_splits_the_modules_with_the_most_bytes() {
        let bytes: Vec<(String, i64)> =
            [("GPT", 5), ("GPT.h.0.mlp", 50), ("GPT.h.1.mlp", 40), ("GPT.head", 30)]
                .map(|(path, held)| (path.to_owned(), held))
                .into();
        let cut = ModuleCut::new(&bytes, Layers::default());
        assert_eq!(cut.names, ["GPT.h.0.mlp", "GPT.h.1.mlp", "GPT.head", "GPT", REST]);
        assert_eq!(cut.find("GPT.h.1.mlp.fc"), 1);
        assert_eq!(cut.find("GPT"), 3);
        assert_eq!(cut.find("GPT.other"), 4);
        assert_eq!(cut.find(NO_MODULE), 4);
    }

    #[test]
    fn the_page_merges_repeated_layers() {
        let bytes: Vec<(String, i64)> = [("GPT.h.*.attn", 3), ("GPT.h.*.mlp", 4), ("GPT.head", 9)]
            .map(|(path, held)| (path.to_owned(), held))
            .into();
        let layers = Layers::find(&[("GPT.h.0", Some("Block")), ("GPT.h.1", Some("Block"))]);
        let mut cut = ModuleCut::new(&bytes, layers);
        assert_eq!(cut.names, ["GPT.head", "GPT.h.*.mlp", "GPT.h.*.attn", REST]);
        let symbols = SymbolTable::default();
        assert_eq!(cut.index_of(symbols.intern("GPT.h.47.mlp.fc"), &symbols), 1);
    }

    #[test]
    fn the_page_keeps_a_wide_level_whole() {
        let bytes: Vec<(String, i64)> = (0..40).map(|n| (format!("Net.layer.x{n}"), 1)).collect();
        assert_eq!(ModuleCut::new(&bytes, Layers::default()).names, ["Net.layer", REST]);
    }
}
