//! What a run on the phantom device says of itself: every report passes it on.
//!
//! The meta row has the card and the assumptions. The end row has what the run met on the way: how many
//! values were read that no kernel computed, and which calls were answered by a guess or refused.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use memtrace_trace::end_row;
use serde_json::{Value, json};

use crate::read::input::Input;
use crate::render::numbers::count;

/// So many names are shown; the JSON has all.
const SHOWN: usize = 4;

/// The phantom runs among the traces of a report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PhantomRun {
    /// The cards that were played.
    pub cards: BTreeSet<String>,
    /// What was assumed of sizes that depend on values.
    pub dynamic: BTreeSet<String>,
    /// Reads of values that no kernel computed; `None` when no trace has an end row.
    pub invented_reads: Option<u64>,
    /// Calls answered by a guess.
    pub guessed: BTreeSet<String>,
    /// Calls that were refused.
    pub refused: BTreeSet<String>,
}

impl PhantomRun {
    /// Takes in the traces of `input` that were made on the phantom device.
    pub fn add(&mut self, input: &Input) {
        for trace in input.traces.iter().filter(|trace| !trace.meta.phantom.is_null()) {
            let about = &trace.meta.phantom;
            let text = |value: &Value| value.as_str().unwrap_or("unknown").to_owned();
            self.cards.insert(text(&about["card"]));
            self.dynamic.insert(text(&about["assumptions"]["dynamic"]));
            for (name, value) in end_row::values(&trace.ending().unwrap_or_default()) {
                let names = value.split(';').filter(|name| !name.is_empty()).map(str::to_owned);
                match name {
                    "invented_reads" => {
                        let more: u64 = value.parse().unwrap_or(0);
                        self.invented_reads = Some(self.invented_reads.unwrap_or(0) + more);
                    }
                    "guessed" => self.guessed.extend(names),
                    "refused" => self.refused.extend(names),
                    _ => {}
                }
            }
        }
    }

    /// Was there one?
    #[must_use]
    pub fn is_any(&self) -> bool {
        !self.cards.is_empty()
    }

    /// One line for people.
    #[must_use]
    pub fn note(&self) -> String {
        let list = |names: &BTreeSet<String>, most: usize| {
            let shown: Vec<&str> = names.iter().take(most).map(String::as_str).collect();
            let mut text = shown.join(", ");
            if names.len() > most {
                let _ = write!(text, " and {} more", names.len() - most);
            }
            text
        };
        let mut text =
            format!("phantom run: {} is not there, kernels computed nothing", list(&self.cards, 9));
        if let Some(reads) = self.invented_reads {
            let _ = write!(text, "; {} invented values were read", count(reads));
            let _ = write!(text, " (sizes that depend on values: {})", list(&self.dynamic, 9));
        }
        for (what, names) in [("guessed", &self.guessed), ("refused", &self.refused)] {
            if !names.is_empty() {
                let _ = write!(text, "; {what}: {}", list(names, SHOWN));
            }
        }
        text
    }

    /// For programs; null when there was none.
    #[must_use]
    pub fn json(&self) -> Value {
        if !self.is_any() {
            return Value::Null;
        }
        json!({
            "cards": self.cards,
            "dynamic": self.dynamic,
            "invented_reads": self.invented_reads,
            "guessed_calls": self.guessed,
            "refused_calls": self.refused,
        })
    }
}
