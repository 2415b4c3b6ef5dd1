//! The predictions of `memtrace advise` for one process. The report about an OOM shows them, too.

use crate::error::Result;
use crate::options::Options;
use crate::read::stream::TraceFile;
use crate::state::replay_trace::Replayed;
use crate::whatif::{self, Change, Outcome, Prediction, advice};

/// The maximum number of changes in one set that `--fit` tries.
pub(in crate::reports) const MOST_CHANGES: usize = 3;

/// The report about an OOM does not suggest a change that saves at most this fraction of the peak: one part
/// in 20.
const FEWEST_OF_PEAK: i64 = 20;
/// The maximum number of changes in the report about an OOM.
const MOST_ADVISED: usize = 5;

/// A change that lowers the peak, for the report about an OOM.
#[derive(Clone, Debug)]
pub(in crate::reports) struct FirstAdvice {
    pub(in crate::reports) change: Change,
    /// The number of bytes that the change saves.
    pub(in crate::reports) saved: i64,
    /// True if the change saves at least `saved` bytes; false if `saved` is the expected value.
    pub(in crate::reports) is_least: bool,
    pub(in crate::reports) costs: String,
}

impl FirstAdvice {
    /// Returns the changes with the largest savings, from the prediction for each of `changes` alone. `ended_in_oom` says
    /// whether the trace ended in an OOM, so that the savings are lower bounds.
    pub(in crate::reports) fn of(
        prediction: &Prediction,
        changes: &[Change],
        ended_in_oom: bool,
    ) -> Vec<FirstAdvice> {
        let least = prediction.before.bytes / FEWEST_OF_PEAK;
        let one = |(index, outcome, saved): (usize, &Outcome, i64)| FirstAdvice {
            change: changes[index].clone(),
            saved,
            is_least: ended_in_oom,
            costs: advice(&changes[index], &outcome.again).costs,
        };
        let ranked = prediction.ranked(changes.iter()).into_iter();
        ranked.filter(|(.., saved)| *saved > least).take(MOST_ADVISED).map(one).collect()
    }
}

/// The predictions for one process.
pub(in crate::reports) struct Advised {
    pub(in crate::reports) replayed: Replayed,
    /// The prediction for the device with the highest peak; `None` if no device has an allocated block.
    pub(in crate::reports) prediction: Option<Prediction>,
    pub(in crate::reports) changes: Vec<Change>,
    /// The sets of changes that were tried, as indices of `changes`: first each change alone, in order, then
    /// the larger sets.
    pub(in crate::reports) sets: Vec<Vec<usize>>,
    /// True if the trace has `tag` rows, from which the categories of blocks are known.
    pub(in crate::reports) tags: bool,
}

impl Advised {
    /// Predicts the effect of each change alone for `trace`. With `in_sets`, also predicts the effect of sets
    /// of several changes.
    pub(in crate::reports) fn new(trace: &TraceFile, options: &Options, in_sets: bool) -> Result<Advised> {
        let (changes, tags) = whatif::candidates_for(trace, options)?;
        let sets = whatif::sets(&changes, if in_sets { MOST_CHANGES } else { 1 });
        let lists: Vec<Vec<Change>> =
            sets.iter().map(|set| set.iter().map(|index| changes[*index].clone()).collect()).collect();
        let (replayed, predictions) = whatif::predict(trace, &lists, options)?;
        let prediction = predictions.into_iter().max_by_key(|each| (each.before.bytes, -each.device));
        Ok(Advised { replayed, prediction, changes, sets, tags })
    }

    /// Returns the changes that save memory, the largest savings first: the index in `changes`, the outcome,
    /// and the saved bytes.
    pub(in crate::reports) fn ranked<'a>(
        &self,
        prediction: &'a Prediction,
    ) -> Vec<(usize, &'a Outcome, i64)> {
        prediction.ranked(self.changes.iter())
    }

    pub(in crate::reports) fn ended_in_oom(&self) -> bool {
        self.replayed.replay.ended_in_oom()
    }
}
