//! The parts of a model in the stacked curve: the tree of modules, cut where the memory is.

use std::collections::{BTreeMap, BTreeSet};

use rustc_hash::FxHashMap;

use crate::read::symbols::{NO_MODULE, Symbol, SymbolTable};

/// The most parts; all other modules form one more.
const MOST: usize = 12;
/// The numbered children of a level are merged when they are more than this: `h.*.mlp`.
const MOST_LAYERS: usize = 8;

/// The name of the part of all other modules.
pub(super) const REST: &str = "(other)";

/// A cut through the tree of modules.
pub(super) struct ModuleCut {
    /// The parts, largest first, and [`REST`] as the last.
    pub(super) names: Vec<String>,
    /// Modules, and whether their submodules belong to the part too.
    parts: BTreeMap<String, (usize, bool)>,
    known: FxHashMap<Symbol, usize>,
    /// The levels with merged children: `GPT.h`.
    layers: BTreeSet<String>,
}

impl ModuleCut {
    /// Splits the part with the most bytes repeatedly, while there are few parts. `bytes` are the bytes of
    /// each module at the peak.
    pub(super) fn new(bytes: &[(String, i64)]) -> ModuleCut {
        let layers = layers(bytes);
        let mut joined: BTreeMap<String, i64> = BTreeMap::new();
        for (path, held) in bytes {
            *joined.entry(starred(path, &layers)).or_default() += held;
        }
        let bytes: &[(String, i64)] = &joined.into_iter().collect::<Vec<_>>();
        // The path, whether it includes its submodules, and the bytes.
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

    /// The index of the part of a module.
    pub(super) fn index_of(&mut self, module: Symbol, symbols: &SymbolTable) -> usize {
        if let Some(place) = self.known.get(&module) {
            return *place;
        }
        let place = self.find(&starred(&symbols.or(module, NO_MODULE), &self.layers));
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

fn is_number(name: &str) -> bool {
    name.bytes().all(|byte| byte.is_ascii_digit())
}

/// The levels with many numbered children, as paths with stars at upper levels.
fn layers(bytes: &[(String, i64)]) -> BTreeSet<String> {
    let mut layers = BTreeSet::new();
    loop {
        let mut numbers: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
        for (path, _) in bytes {
            let mut upper = String::new();
            for name in path.split('.') {
                if is_number(name) && !layers.contains(&upper) {
                    numbers.entry(upper.clone()).or_default().insert(name);
                }
                let name = if is_number(name) && layers.contains(&upper) { "*" } else { name };
                push(&mut upper, name);
            }
        }
        let before = layers.len();
        layers.extend(numbers.into_iter().filter(|(_, all)| all.len() > MOST_LAYERS).map(|(upper, _)| upper));
        if layers.len() == before {
            return layers;
        }
    }
}

/// `path` with a star for each number at a level of `layers`.
fn starred(path: &str, layers: &BTreeSet<String>) -> String {
    let mut whole = String::new();
    for name in path.split('.') {
        let name = if is_number(name) && layers.contains(&whole) { "*" } else { name };
        push(&mut whole, name);
    }
    whole
}

fn push(path: &mut String, name: &str) {
    if !path.is_empty() {
        path.push('.');
    }
    path.push_str(name);
}

/// The parts of `path`: itself alone if it has bytes, and each child with its submodules. `None` without
/// children.
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
        let cut = ModuleCut::new(&bytes);
        assert_eq!(cut.names, ["GPT.h.0.mlp", "GPT.h.1.mlp", "GPT.head", "GPT", REST]);
        assert_eq!(cut.find("GPT.h.1.mlp.fc"), 1);
        assert_eq!(cut.find("GPT"), 3);
        assert_eq!(cut.find("GPT.other"), 4);
        assert_eq!(cut.find(NO_MODULE), 4);
    }

    #[test]
    fn the_page_merges_many_layers() {
        let bytes: Vec<(String, i64)> = (0..48)
            .flat_map(|n| [(format!("GPT.h.{n}.attn"), 3), (format!("GPT.h.{n}.mlp"), 4)])
            .chain([("GPT.head".to_owned(), 9)])
            .collect();
        let cut = ModuleCut::new(&bytes);
        assert_eq!(cut.names, ["GPT.h.*.mlp", "GPT.h.*.attn", "GPT.head", REST]);
        assert_eq!(cut.find(&starred("GPT.h.47.mlp.fc", &cut.layers)), 0);
    }

    #[test]
    fn the_page_keeps_a_wide_level_whole() {
        let bytes: Vec<(String, i64)> = (0..40).map(|n| (format!("Net.layer.x{n}"), 1)).collect();
        assert_eq!(ModuleCut::new(&bytes).names, ["Net.layer", REST]);
    }
}
