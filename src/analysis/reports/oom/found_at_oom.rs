//! What a traced process found after its OOM: the optimizers and the state that they will allocate, and the
//! parameters that are still on the CPU.

use std::collections::BTreeMap;

use memtrace_trace::EventName;
use memtrace_trace::model_fact::ModelFact;

use super::evidence::StateToCome;
use crate::read::record::{Columns, Record, Wanted};
use crate::read::symbols::SymbolTable;
use crate::read::together::RowReader;
use crate::state::model_facts::{name_of_fact, root_of};

/// The class of the optimizer of each root, and the bytes of its parameters on the CPU.
#[derive(Default)]
pub(super) struct FoundAtOom {
    optimizers: BTreeMap<String, String>,
    on_cpu: BTreeMap<String, i64>,
    /// By the path of a module: the bytes of its parameters that require a gradient but that no optimizer has.
    without_optimizer: BTreeMap<String, i64>,
}

/// Reads the marks of a whole trace, because they follow the row of the OOM.
impl RowReader for FoundAtOom {
    fn wanted(&self) -> Wanted {
        let columns = Columns::of(&["event", "api", "name"]);
        Wanted::all_events(Columns::of(&["seq"])).plus(EventName::Mark, columns)
    }

    fn feed(&mut self, row: &Record, symbols: &SymbolTable) {
        if let Some(name) = name_of_fact(row, symbols) {
            self.note(&name);
        }
    }
}

impl FoundAtOom {
    pub(super) fn note(&mut self, mark: &str) {
        match ModelFact::parse(mark) {
            Some((ModelFact::Optimizer(class), root)) => {
                self.optimizers.insert(root.to_owned(), class.to_owned());
            }
            Some((ModelFact::OnCpu(bytes), root)) => {
                self.on_cpu.insert(root.to_owned(), bytes);
            }
            Some((ModelFact::NoOptimizer(bytes), path)) => {
                self.without_optimizer.insert(path.to_owned(), bytes);
            }
            _ => {}
        }
    }

    /// Returns the modules with parameters that require a gradient but that no optimizer has, and the bytes of these
    /// parameters.
    pub(super) fn without_optimizer(&self) -> impl Iterator<Item = (&str, i64)> {
        self.without_optimizer
            .iter()
            .map(|(path, bytes)| (path.as_str(), *bytes))
            .filter(|(_, bytes)| *bytes > 0)
    }

    /// Returns true if an optimizer has parameters of this root.
    pub(super) fn has_optimizer(&self, root: &str) -> bool {
        self.optimizers.contains_key(root)
    }

    /// Returns true if an optimizer is an Adam of torch whose step makes temporary results for all
    /// parameters at once.
    pub(super) fn has_foreach_adam(&self) -> bool {
        self.optimizers.values().any(|class| is_foreach_adam(class))
    }

    /// Returns the classes of the optimizers with their options, such as `AdamW,fused`.
    pub(super) fn optimizers(&self) -> Vec<&str> {
        self.optimizers.values().map(String::as_str).collect()
    }

    /// Returns the model with the most parameters that were still on the CPU while others were on a GPU, and
    /// the bytes of these parameters.
    pub(super) fn being_moved(&self) -> Option<(&str, i64)> {
        let most = self.on_cpu.iter().max_by_key(|(_, bytes)| **bytes);
        most.map(|(root, bytes)| (root.as_str(), *bytes)).filter(|(_, bytes)| *bytes > 0)
    }

    /// Returns the state that the optimizer of a root will allocate for this many bytes of trained parameters.
    /// Without a known optimizer, returns the state of Adam.
    pub(super) fn state_of(&self, root: &str, trained: i64) -> StateToCome {
        let without: i64 = self
            .without_optimizer()
            .filter(|(path, _)| root_of(path) == root)
            .fold(0, |sum, (_, bytes)| sum.saturating_add(bytes));
        if without > 0 && !self.has_optimizer(root) {
            return StateToCome::default();
        }
        let held = (trained - without).max(0);
        let known = self.optimizers.get(root).and_then(|class| Some((class, halves_per_parameter(class)?)));
        StateToCome {
            root: root.to_owned(),
            bytes: held / 2 * known.map_or(4, |(_, halves)| halves),
            gradients: trained,
            temporaries: known.filter(|(class, _)| is_foreach_adam(class)).map_or(0, |_| held),
            class: known.map(|(class, _)| class.split(',').next().unwrap_or(class).to_owned()),
        }
    }
}

/// Returns true for an Adam of torch whose step computes the roots of the second moments of all parameters at once, and
/// would not with `fused=True`.
fn is_foreach_adam(class: &str) -> bool {
    let (name, options) = class.split_once(',').unwrap_or((class, ""));
    ["Adam", "AdamW"].contains(&name)
        && !options.split(',').any(|option| option == "fused" || option == "foreach=False")
}

/// Returns the state of an optimizer in halves of its parameters' float32 bytes. Returns `None` for an unknown
/// class. `class` ends with the options that add state, such as `SGD,momentum`.
fn halves_per_parameter(class: &str) -> Option<i64> {
    let (class, option) = class.split_once(',').unwrap_or((class, ""));
    let name = class.trim_start_matches("Paged");
    let is_small = name.ends_with("8bit");
    let blocks = match name.trim_end_matches("8bit") {
        "SGD" => i64::from(option.contains("momentum")),
        "RMSprop" => 1 + i64::from(option.contains("momentum")) + i64::from(option.contains("centered")),
        "Lion" | "Adagrad" => 1,
        "Adam" | "AdamW" | "NAdam" | "RAdam" | "Adamax" => 2 + i64::from(option.contains("amsgrad")),
        _ => return None,
    };
    // Each block of an 8-bit optimizer is a quarter as large as one of float32.
    Some(if is_small { (blocks + 1) / 2 } else { 2 * blocks })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oom_names_the_optimizer_whose_state_is_to_come() {
        let mut found = FoundAtOom::default();
        for mark in [
            "optimizer=SGD Net",
            "optimizer=SGD,momentum Critic",
            "optimizer=AdamW8bit GPT",
            "optimizer=Muon Other",
            "mode=eval Net",
            "on_cpu=0 Net",
            "on_cpu=300 Unet",
            "on_cpu=200 Other",
        ] {
            found.note(mark);
        }
        assert_eq!(found.being_moved(), Some(("Unet", 300)));
        assert_eq!(FoundAtOom::default().being_moved(), None);
        let state = |root: &str| {
            let state = found.state_of(root, 400);
            (state.bytes, state.class)
        };
        assert_eq!(state("Net"), (0, Some("SGD".to_owned())));
        assert_eq!(state("Critic"), (400, Some("SGD".to_owned())));
        assert_eq!(state("GPT"), (200, Some("AdamW8bit".to_owned())));
        // A class whose state is unknown, and a model without an optimizer.
        assert_eq!(state("Other"), (800, None));
        assert_eq!(state("Unet"), (800, None));
        // Adam's temporary results, which neither a fused Adam, nor one of 8 bits, nor one without `foreach` has.
        found.note("optimizer=AdamW Vae");
        found.note("optimizer=AdamW,fused Head");
        found.note("optimizer=AdamW,foreach=False Body");
        let temporaries =
            ["Vae", "Head", "GPT", "Net", "Body"].map(|root| found.state_of(root, 400).temporaries);
        assert_eq!(temporaries, [400, 0, 0, 0, 0]);
        assert!(found.has_optimizer("Vae") && !found.has_optimizer("Unet"));
        assert_eq!(halves_per_parameter("Adam,amsgrad"), Some(6));
        assert_eq!(halves_per_parameter("PagedAdamW8bit"), Some(1));
        assert_eq!(halves_per_parameter("Lion"), Some(2));
    }
}
