//! The classes of modules, and repeated layers: modules that differ only in a number, such as `GPT.h.0`,
//! `GPT.h.1`, ... A report joins them as `GPT.h.*`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use memtrace_trace::{Api, EventName};
use rustc_hash::FxHashMap;

use crate::read::record::{Columns, Record};
use crate::read::symbols::{Symbol, SymbolTable};

/// The minimum number of numbered children of one class that count as layers.
const FEWEST_OF_ONE_CLASS: usize = 2;
/// More numbered children than this count as layers even if classes are unknown, provided that no two of the
/// known classes differ.
const MOST_APART: usize = 8;
/// The `source` of ranges in traces without classes.
const NO_CLASS: &str = "libmemtrace.so";

/// The columns that [`ModuleClasses::feed`] needs from a `range_begin` row.
pub const RANGE_COLUMNS: Columns = Columns::of(&["api", "source", "name"]);

/// The called modules of a trace, with the class of each.
#[derive(Clone, Debug, Default)]
pub struct ModuleClasses {
    of_path: FxHashMap<Symbol, Symbol>,
    module_api: Option<Symbol>,
}

impl ModuleClasses {
    /// Records the class of a module from a `range_begin` row, with [`RANGE_COLUMNS`].
    pub fn feed(&mut self, row: &Record, symbols: &SymbolTable) {
        let module_api = *self.module_api.get_or_insert_with(|| symbols.intern(Api::Module.as_str()));
        if row.event == EventName::RangeBegin && row.api == module_api {
            self.of_path.insert(row.name, row.source);
        }
    }

    /// Returns the class of a called module, or `None` if the module was not called or the trace has no
    /// classes.
    #[must_use]
    pub fn class_at(&self, path: Symbol, symbols: &SymbolTable) -> Option<Arc<str>> {
        let class = symbols.get(*self.of_path.get(&path)?);
        (*class != *NO_CLASS && !class.starts_with('(')).then_some(class)
    }

    /// Returns true if the class of some module is known.
    #[must_use]
    pub fn has_classes(&self, symbols: &SymbolTable) -> bool {
        self.of_path.keys().any(|path| self.class_at(*path, symbols).is_some())
    }

    /// Returns the repeated layers among the called modules and `others`.
    #[must_use]
    pub fn layers(&self, others: impl IntoIterator<Item = Symbol>, symbols: &SymbolTable) -> Layers {
        let mut paths: BTreeMap<Arc<str>, Option<Arc<str>>> =
            others.into_iter().map(|path| (symbols.get(path), None)).collect();
        paths.extend(self.of_path.keys().map(|path| (symbols.get(*path), self.class_at(*path, symbols))));
        Layers::find(&paths.iter().map(|(path, class)| (&**path, class.as_deref())).collect::<Vec<_>>())
    }
}

/// The levels of a model whose numbered children are repeated layers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layers {
    /// The paths of these levels, such as `GPT.h`, with a star for each number of an outer layer.
    levels: BTreeSet<String>,
}

/// The numbered children of one level, such as `0` and `1` of `GPT.h`, and their classes (`None` if unknown).
#[derive(Default)]
struct Numbered<'a> {
    numbers: BTreeSet<&'a str>,
    classes: BTreeSet<Option<&'a str>>,
}

impl Numbered<'_> {
    fn are_layers(&self) -> bool {
        let known = self.classes.iter().flatten().count();
        let is_one_class = known == 1 && self.classes.len() == 1;
        self.numbers.len() >= FEWEST_OF_ONE_CLASS && is_one_class
            || self.numbers.len() > MOST_APART && known <= 1
    }
}

impl Layers {
    /// Finds the layers among `modules`, each given by its path and its class.
    #[must_use]
    pub fn find(modules: &[(&str, Option<&str>)]) -> Layers {
        let class_of: BTreeMap<&str, Option<&str>> = modules.iter().copied().collect();
        let mut found = Layers::default();
        loop {
            let mut children: BTreeMap<String, Numbered<'_>> = BTreeMap::new();
            for (path, _) in modules {
                let (mut upper, mut end) = (String::new(), 0);
                for name in path.split('.') {
                    end += name.len();
                    if is_number(name) && !upper.is_empty() && !found.levels.contains(&upper) {
                        let of_level = children.entry(upper.clone()).or_default();
                        of_level.numbers.insert(name);
                        of_level.classes.insert(class_of.get(&path[..end]).copied().flatten());
                    }
                    end += 1;
                    found.push(&mut upper, name);
                }
            }
            let before = found.levels.len();
            let layers = children.into_iter().filter(|(_, numbered)| numbered.are_layers());
            found.levels.extend(layers.map(|(level, _)| level));
            if found.levels.len() == before {
                return found;
            }
        }
    }

    /// Adds the layers of another trace, so that both traces use the same names.
    pub fn extend(&mut self, other: &Layers) {
        self.levels.extend(other.levels.iter().cloned());
    }

    /// Returns the levels, for the HTML page.
    pub fn levels(&self) -> impl Iterator<Item = &str> {
        self.levels.iter().map(String::as_str)
    }

    /// Returns the path with a star for each number of a repeated layer.
    #[must_use]
    pub fn joined(&self, path: &str) -> String {
        let mut whole = String::with_capacity(path.len());
        for name in path.split('.') {
            self.push(&mut whole, name);
        }
        whole
    }

    /// Appends a level to a joined path.
    fn push(&self, upper: &mut String, name: &str) {
        let is_layer = is_number(name) && self.levels.contains(upper);
        if !upper.is_empty() {
            upper.push('.');
        }
        upper.push_str(if is_layer { "*" } else { name });
    }
}

/// Returns true if a part of a module's path is a number, as in `blocks.3`.
pub(crate) fn is_number(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn joined(modules: &[(&str, Option<&str>)], path: &str) -> String {
        Layers::find(modules).joined(path)
    }

    #[test]
    fn modules_of_one_class_join_and_the_parts_of_a_sequence_do_not() {
        let block = Some("Block");
        let modules = [
            ("GPT", Some("GPT")),
            ("GPT.h.0", block),
            ("GPT.h.0.mlp.0", Some("Linear")),
            ("GPT.h.0.mlp.1", Some("GELU")),
            ("GPT.h.1", block),
            ("GPT.h.1.mlp.0", Some("Linear")),
            ("GPT.h.1.mlp.1", Some("GELU")),
            ("GPT.h.1.norm", None),
        ];
        assert_eq!(joined(&modules, "GPT.h.1.mlp.1"), "GPT.h.*.mlp.1");
        assert_eq!(joined(&modules, "GPT.h.7"), "GPT.h.*");
        assert_eq!(joined(&modules, "GPT"), "GPT");
        assert_eq!(joined(&modules, "(script)"), "(script)");
        // A single numbered child is not a repeated layer.
        assert_eq!(joined(&modules[..3], "GPT.h.0"), "GPT.h.0");
    }

    #[test]
    fn modules_without_a_known_class_join_when_they_are_many() {
        let paths = |count| (0..count).map(|n| format!("GPT.h.{n}.mlp")).collect::<Vec<_>>();
        let of = |count| {
            let paths = paths(count);
            joined(&paths.iter().map(|path| (path.as_str(), None)).collect::<Vec<_>>(), "GPT.h.3.mlp.fc")
        };
        assert_eq!(of(8), "GPT.h.3.mlp.fc");
        assert_eq!(of(9), "GPT.h.*.mlp.fc");
    }

    #[test]
    fn many_modules_of_several_classes_stay_apart() {
        let classes = [Some("Conv2d"), Some("BatchNorm2d"), Some("LeakyReLU")];
        let paths: Vec<String> = (0..12).map(|n| format!("Discriminator.main.{n}")).collect();
        let modules: Vec<_> = paths.iter().map(String::as_str).zip(classes.into_iter().cycle()).collect();
        assert_eq!(joined(&modules, "Discriminator.main.8"), "Discriminator.main.8");
    }

    #[test]
    fn modules_of_lists_in_lists_join_at_the_level_that_is_called() {
        let block = Some("Block");
        let modules = [
            ("N.x.0.0", block),
            ("N.x.0.1", block),
            ("N.x.1.0", block),
            ("N.x.1.1", block),
            ("7", None),
            ("", None),
        ];
        assert_eq!(joined(&modules, "N.x.1.0"), "N.x.1.*");
        assert_eq!(joined(&modules, "7.8"), "7.8");
    }
}
