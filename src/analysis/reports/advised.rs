//! The predictions of `memtrace advise` for one process, which the report about an OOM shows, too.

use crate::error::Result;
use crate::options::Options;
use crate::read::stream::TraceFile;
use crate::state::replay_trace::Replayed;
use crate::whatif::{self, Change, Outcome, Prediction, advice};

/// The most changes at once that `--fit` tries.
pub(super) const MOST_CHANGES: usize = 3;

/// A change that saves less than this part of the peak, one in 20, is no answer to an OOM.
const FEWEST_OF_PEAK: i64 = 20;

/// A change that helps, for the report about an OOM.
pub(super) struct FirstAdvice {
    /// The option of `memtrace advise` that predicts it.
    pub(super) option: String,
    /// The bytes that it saves.
    pub(super) saved: i64,
    /// True if `saved` is a lower bound.
    pub(super) is_least: bool,
    pub(super) costs: String,
}

/// The predictions for one process.
pub(super) struct Advised {
    pub(super) replayed: Replayed,
    /// Of the fullest device.
    pub(super) prediction: Option<Prediction>,
    pub(super) changes: Vec<Change>,
    /// The sets of changes that were tried: first the sets of one change, in the order of `changes`.
    pub(super) sets: Vec<Vec<usize>>,
    /// True if the trace has tags.
    pub(super) tags: bool,
}

impl Advised {
    /// Predicts each change for `trace` alone, and with `in_sets` sets of several.
    pub(super) fn new(trace: &TraceFile, options: &Options, in_sets: bool) -> Result<Advised> {
        let (changes, tags) = whatif::candidates_for(trace, options)?;
        let sets = whatif::sets(&changes, if in_sets { MOST_CHANGES } else { 1 });
        let lists: Vec<Vec<Change>> =
            sets.iter().map(|set| set.iter().map(|index| changes[*index].clone()).collect()).collect();
        let (replayed, predictions) = whatif::predict(trace, &lists, options)?;
        let prediction = predictions.into_iter().max_by_key(|each| each.before.bytes);
        Ok(Advised { replayed, prediction, changes, sets, tags })
    }

    /// The changes that save memory, those that save most first: index, outcome, saved bytes.
    pub(super) fn ranked<'a>(&self, prediction: &'a Prediction) -> Vec<(usize, &'a Outcome, i64)> {
        prediction.ranked(self.changes.iter())
    }

    /// The changes that save most, for the report about an OOM.
    pub(super) fn first(&self, count: usize) -> Vec<FirstAdvice> {
        let Some(prediction) = &self.prediction else { return Vec::new() };
        let one = |(index, outcome, saved): &(usize, &Outcome, i64)| FirstAdvice {
            option: self.changes[*index].option(),
            saved: *saved,
            costs: advice(&self.changes[*index], &outcome.again).costs,
            is_least: self.ended_in_oom(),
        };
        let least = prediction.before.bytes / FEWEST_OF_PEAK;
        self.ranked(prediction).iter().filter(|(.., saved)| *saved > least).take(count).map(one).collect()
    }

    pub(super) fn ended_in_oom(&self) -> bool {
        self.replayed.replay.ended_in_oom()
    }
}
