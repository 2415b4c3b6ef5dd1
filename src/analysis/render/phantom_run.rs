//! The notes of a report about runs on a simulated GPU (`memtrace run --phantom`).
//!
//! The meta row of the trace of such a run has the simulated card and the assumptions. The end row has the
//! counts of the run: reads of values that no kernel computed, calls that were answered with a guess, and
//! calls that were refused.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use memtrace_trace::end_row;
use memtrace_trace::key_values::key_values;
use memtrace_trace::units::Unit;
use serde_json::{Value, json};

use crate::read::input::Input;
use crate::render::numbers::{count, counted};

/// The runs on a simulated GPU among the traces of a report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PhantomRun {
    /// The simulated cards, such as `h100-80g`.
    pub cards: BTreeSet<String>,
    /// The assumptions about sizes that depend on values, such as `full`.
    pub dynamic: BTreeSet<String>,
    /// The number of reads of values that no kernel computed; `None` if no trace has an end row.
    pub invented_reads: Option<u64>,
    /// The lines, such as `train.py:12`, at which the program acted on values that no kernel computed.
    pub acted_at: BTreeSet<String>,
    /// The calls that were answered with a guess.
    pub guessed: BTreeSet<String>,
    /// The calls that were refused, such as `cuGetExportTable by libfoo.so` with the library that called.
    pub refused: BTreeSet<String>,
    /// The requested faults that happened.
    pub injected: BTreeSet<String>,
    /// The requested faults that did not happen.
    pub not_injected: BTreeSet<String>,
    /// The ranks that ran in a job with stand-ins, by the job's number of ranks. Each entry is a piece such
    /// as `0` or `2-4`, preceded by its first rank, for sorting. Empty if no rank had stand-ins.
    pub ranks: BTreeMap<u64, BTreeSet<(u64, String)>>,
    /// The number of operations answered for stand-ins; `None` if no trace of a job with stand-ins has an end
    /// row.
    pub stand_in_answers: Option<u64>,
    /// The pinned memory in bytes that was not made resident, mostly because this machine had too little room
    /// for it. Sum over the processes of the highest value.
    pub pinned_not_resident: u64,
    /// True if a program ran with `--no-host-values`.
    pub lost_host_values: bool,
}

impl PhantomRun {
    /// Adds the traces of `input` that were recorded on a simulated GPU.
    pub fn add(&mut self, input: &Input) {
        for trace in input.traces.iter().filter(|trace| !trace.meta.phantom.is_null()) {
            let about = &trace.meta.phantom;
            let text = |value: &Value| value.as_str().unwrap_or("unknown").to_owned();
            self.cards.insert(text(&about["card"]));
            self.dynamic.insert(text(&about["assumptions"]["dynamic"]));
            self.lost_host_values |= about["host_values_kept"] == false;
            if let (Some(ranks), Some(world)) = (about["ranks"].as_str(), about["ranks_of"].as_u64()) {
                // With `one-per-stage`, each rank is started separately, and its trace names only itself.
                let first = |piece: &str| piece.split('-').next().and_then(|rank| rank.parse().ok());
                let pieces =
                    ranks.split(',').map(|piece| (first(piece).unwrap_or(u64::MAX), piece.to_owned()));
                self.ranks.entry(world).or_default().extend(pieces);
            }
            for (name, value) in key_values(&trace.ending().unwrap_or_default()) {
                let names = value.split(';').filter(|name| !name.is_empty()).map(str::to_owned);
                match name {
                    "invented_reads" => {
                        let more: u64 = value.parse().unwrap_or(0);
                        self.invented_reads = Some(self.invented_reads.unwrap_or(0) + more);
                    }
                    "stand_in_answers" => {
                        let more: u64 = value.parse().unwrap_or(0);
                        self.stand_in_answers = Some(self.stand_in_answers.unwrap_or(0) + more);
                    }
                    "pinned_not_resident" => self.pinned_not_resident += value.parse().unwrap_or(0),
                    "acted_at" => self.acted_at.extend(names),
                    "guessed" => self.guessed.extend(names),
                    "refused" => self.refused.extend(names.map(|name| name.replace('@', " by "))),
                    "injected" => self.injected.extend(names),
                    "not_injected" => self.not_injected.extend(names),
                    _ => {}
                }
            }
        }
    }

    /// Returns one pair for each size of a job with stand-ins: the ranks that ran, such as `0,2-4`, and the
    /// job's number of ranks.
    fn ranks(&self) -> impl Iterator<Item = (String, u64)> {
        self.ranks.iter().map(|(world, pieces)| {
            let pieces: Vec<&str> = pieces.iter().map(|(_, piece)| piece.as_str()).collect();
            (pieces.join(","), *world)
        })
    }

    /// Returns true if a trace was recorded on a simulated GPU.
    #[must_use]
    pub fn is_any(&self) -> bool {
        !self.cards.is_empty()
    }

    /// Returns a note if the program chose a branch, a loop or a size by values that no kernel computed.
    #[must_use]
    pub fn warning(&self) -> Option<String> {
        /// The number of lines that the note names.
        const MOST: usize = 3;
        if self.acted_at.is_empty() {
            return None;
        }
        let shown: Vec<&str> = self.acted_at.iter().take(MOST).map(String::as_str).collect();
        let more = match self.acted_at.len().saturating_sub(MOST) {
            0 => String::new(),
            more => format!(" and {}", counted(more as u64, "more line")),
        };
        Some(format!(
            "the simulated GPU made up values that decide a branch, a loop or a size at {}{more}: a real GPU may \
             run other code or other sizes there, and have another peak",
            shown.join(", ")
        ))
    }

    /// Returns the one-line note for a report's footer.
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
        let gpus = if self.cards.len() == 1 { "GPU" } else { "GPUs" };
        let mut text = format!("simulated {gpus} {}: kernels did not run", list(&self.cards, 9));
        for (ranks, world) in self.ranks() {
            let (rank, rest) = if ranks.contains([',', '-']) {
                ("; ranks", "ran, each with stand-ins for all others")
            } else {
                ("; only rank", "ran, the others were stand-ins")
            };
            let _ = write!(text, "{rank} {ranks} of {} {rest}", count(world));
        }
        match self.stand_in_answers {
            Some(1) => text.push_str(" (1 operation was answered for them)"),
            Some(answers) => {
                let _ = write!(text, " ({} operations were answered for them)", count(answers));
            }
            None => {}
        }
        if !self.ranks.is_empty() {
            text.push_str("; the memory of a card is without the contexts of the other ranks on it");
        }
        if self.guessed.contains(end_row::OLD_CUDNN) {
            text.push_str(
                "; this cuDNN is older than 9.8, so convolutions take no workspace: a large one needs gigabytes",
            );
        }
        if self.lost_host_values {
            text.push_str("; values of CPU tensors of 1 MiB or more were not kept");
        }
        if self.pinned_not_resident > 0 {
            let bytes = Unit::Auto.show(i64::try_from(self.pinned_not_resident).unwrap_or(i64::MAX));
            let _ = write!(
                text,
                "; up to {bytes} of pinned memory was not made resident, so host memory may be too low"
            );
        }
        match self.invented_reads {
            Some(0) => text.push_str("; no computed value was read"),
            Some(1) => text.push_str("; 1 value that no kernel computed was read"),
            Some(reads) => {
                let _ = write!(text, "; {} values that no kernel computed were read", count(reads));
            }
            None => {}
        }
        if self.invented_reads.is_some() {
            let _ = write!(text, "; data-dependent sizes: {}", list(&self.dynamic, 9));
        }
        for (answer, names) in
            [("injected faults", &self.injected), ("faults that did not happen", &self.not_injected)]
        {
            if !names.is_empty() {
                let _ = write!(text, "; {answer}: {}", list(names, 9));
            }
        }
        for (answer, names) in [("estimated results", &self.guessed), ("refused calls", &self.refused)] {
            if !names.is_empty() {
                let _ = write!(text, "; {answer}: {}", counted(names.len() as u64, "function"));
            }
        }
        if !(self.guessed.is_empty() && self.refused.is_empty()) {
            text.push_str(" (--json names them)");
        }
        text
    }

    /// Returns the content of the note for `--json`, or null if no trace is from a simulated GPU.
    #[must_use]
    pub fn json(&self) -> Value {
        if !self.is_any() {
            return Value::Null;
        }
        json!({
            "cards": self.cards,
            "dynamic": self.dynamic,
            "invented_reads": self.invented_reads,
            "acted_at": self.acted_at,
            "guessed_calls": self.guessed,
            "refused_calls": self.refused,
            "injected_faults": self.injected,
            "faults_that_did_not_happen": self.not_injected,
            "ranks": self.ranks().map(|(ranks, world)| json!({"ran": ranks, "of": world})).collect::<Vec<_>>(),
            "stand_in_answers": self.stand_in_answers,
            "pinned_not_resident_bytes": self.pinned_not_resident,
            "host_values_kept": !self.lost_host_values,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_note_names_an_old_cudnn_and_the_contexts_that_are_missing() {
        let mut run =
            PhantomRun { cards: BTreeSet::from(["8xh100-80g".to_owned()]), ..PhantomRun::default() };
        assert_eq!(run.note(), "simulated GPU 8xh100-80g: kernels did not run");
        run.guessed.insert(end_row::OLD_CUDNN.to_owned());
        assert!(run.note().contains("older than 9.8, so convolutions take no workspace"), "{}", run.note());
        run.ranks.insert(8, BTreeSet::from([(0, "0".to_owned())]));
        assert!(run.note().contains("without the contexts of the other ranks"), "{}", run.note());
    }
}
