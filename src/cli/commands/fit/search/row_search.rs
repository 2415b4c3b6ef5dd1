//! The search of one row of the answer, with its trials.

use std::collections::VecDeque;

use super::estimate::Point;
use super::limit_search::LimitSearch;
use crate::commands::fit::request::candidates::{Candidates, gpus_text};
use crate::commands::fit::request::mode::Goal;
use crate::commands::fit::request::plan::{Plan, Row};
use crate::commands::fit::trial::outcome::{Trial, TrialOutcome};

/// If this many consecutive trials have the same peak and fit, the program is assumed not to use the value.
const UNCHANGED: usize = 5;
/// If the program failed on this many numbers of GPUs and worked on none, it is assumed to fail on every
/// number. The same holds for cards.
pub(super) const HOPELESS: usize = 2;

/// A search and its trials.
pub(crate) struct RowSearch<'a> {
    pub(crate) row: &'a Row,
    /// The candidates of the row that the program can use.
    pub(crate) values: Candidates,
    pub(crate) limit: LimitSearch,
    /// The trials that have ended, in the order of their ends, with the texts of their candidates.
    pub(crate) trials: Vec<(String, Trial)>,
    /// The candidates to run next.
    pub(super) queue: VecDeque<String>,
    /// The number of trials of this search in progress.
    pub(super) in_progress: usize,
    pub(crate) is_over: bool,
    /// The reason why the search ended without an answer; `None` if it did not.
    pub(crate) stopped: Option<String>,
}

impl<'a> RowSearch<'a> {
    pub(super) fn new(row: &'a Row, within: f64) -> RowSearch<'a> {
        let values = row.values.clone();
        let limit = new_search(&values, within);
        RowSearch {
            row,
            values,
            limit,
            trials: Vec::new(),
            queue: VecDeque::new(),
            in_progress: 0,
            is_over: false,
            stopped: None,
        }
    }

    pub(super) fn index_of(&self, text: &str) -> Option<usize> {
        match &self.values {
            Candidates::Numbers { first, step, .. } => {
                text.parse::<usize>().ok().map(|number| number.saturating_sub(*first) / step)
            }
            Candidates::List(list) => list.iter().position(|entry| entry == text),
            Candidates::Gpus(list) => list.iter().position(|gpus| gpus.to_string() == text),
        }
    }

    /// Returns the trial of the candidate `index`, or `None` if this search did not run it.
    pub(crate) fn trial(&self, index: usize) -> Option<&Trial> {
        let text = self.values.text(index);
        self.trials.iter().find(|(value, _)| *value == text).map(|(_, trial)| trial)
    }

    /// Returns the trial of the last candidate that fits. Returns `None` if no candidate is known to fit, or if
    /// the result follows from the trials of another search.
    pub(crate) fn fits(&self) -> Option<&Trial> {
        self.trial(self.limit.fits?)
    }

    /// Returns the trial of the first candidate that does not fit; `None` as for [`RowSearch::fits`].
    pub(crate) fn too_big(&self) -> Option<&Trial> {
        self.trial(self.limit.too_big?)
    }

    /// Returns the trials at the limit: the one that fits and the one that does not, as far as there are such trials.
    pub(crate) fn at_limit(&self) -> Vec<&Trial> {
        [self.fits(), self.too_big()].into_iter().flatten().collect()
    }

    /// Returns the trials whose traces stay for the answer: those at the limit, or the last trial if there are none.
    pub(crate) fn named(&self) -> Vec<&Trial> {
        let at_limit = self.at_limit();
        if at_limit.is_empty() {
            self.trials.last().map(|(_, trial)| trial).into_iter().collect()
        } else {
            at_limit
        }
    }

    /// Returns an explanation if a value fits although an earlier one does not. The search assumes the
    /// opposite: each value needs at least as much memory as the value before it.
    pub(crate) fn disorder(&self) -> Option<String> {
        let (fits, too_big) = self.limit.fits.zip(self.limit.too_big)?;
        let (fits_text, too_big_text) = (self.values.text(fits), self.values.text(too_big));
        (fits > too_big).then(|| match &self.values {
            Candidates::Gpus(_) => format!(
                "memory does not shrink with the number of GPUs here: {fits_text} {} enough, but \
                 {too_big_text}, which are more, are not",
                gpus_text(&fits_text).1
            ),
            Candidates::Numbers { .. } => format!(
                "memory does not grow with the value here: {fits_text} fits, but {too_big_text}, which is \
                 smaller, does not"
            ),
            Candidates::List(_) => format!(
                "memory does not grow with the value here: {fits_text} fits, but {too_big_text}, which \
                 comes first, does not; order --values by the memory that they need"
            ),
        })
    }

    /// Returns the trials that fitted, sorted by position.
    pub(super) fn points(&self) -> Vec<Point<'_>> {
        let fitted = self.trials.iter().filter(|(_, trial)| trial.outcome == TrialOutcome::Fits);
        let mut points: Vec<Point<'_>> = fitted
            .filter_map(|(text, trial)| Some((self.values.position(self.index_of(text)?), &trial.peak)))
            .collect();
        points.sort_by(|one, other| one.0.total_cmp(&other.0));
        points
    }

    /// Removes the number of GPUs `text` from the candidates, because the program cannot use it. The search
    /// starts anew with the trials so far.
    fn leave_out(&mut self, text: &str, within: f64) {
        let is_empty = self.values.leave_out(text);
        self.limit = new_search(&self.values, within);
        let known: Vec<(usize, bool)> = self
            .trials
            .iter()
            .filter_map(|(text, trial)| Some((self.index_of(text)?, trial.outcome == TrialOutcome::Fits)))
            .collect();
        known.into_iter().for_each(|(index, fits)| self.limit.record(index, fits));
        self.is_over |= is_empty;
    }

    /// Records a trial that has ended. Ends the search if it cannot have an answer.
    pub(super) fn record(&mut self, trial: Trial, plan: &Plan) {
        self.in_progress = self.in_progress.saturating_sub(1);
        let text = trial.value.clone();
        let with = match (text.as_str(), plan.searches_gpus) {
            ("", _) => String::new(),
            (value, true) => format!("on {} ", plan.described(value)),
            (value, false) => format!("with {} ", plan.described(value)),
        };
        let no_gpu = self.row.capacity == 0 && trial.peak.used == 0;
        let hint = if no_gpu { "; without a GPU, add --phantom h100-80g" } else { "" };
        let failure = format!("{with}the program failed for a reason other than memory");
        let failed = has_failed(&trial);
        let used_none = trial.outcome == TrialOutcome::Fits && trial.peak.processes == 0;
        // A smaller value of what saves the card's memory needs no more host memory. So the host decides only about
        // the smallest value that fits on the card.
        let wants_smallest = plan.goal == Goal::Smallest;
        let fits = trial.outcome == TrialOutcome::Fits || wants_smallest && trial.outcome.exceeds_host();
        self.trials.push((text.clone(), trial));
        if used_none {
            self.stopped = Some(format!("{with}the program allocated no GPU memory{hint}"));
        } else if failed && plan.searches_gpus {
            self.leave_out(&text, plan.within);
            let all_failed = self.trials.iter().all(|(_, trial)| has_failed(trial));
            if all_failed && (self.is_over || self.trials.len() >= HOPELESS) {
                self.stopped = Some(failure);
            }
        } else if failed {
            self.stopped = Some(failure + hint);
        } else if let Some(index) = self.index_of(&text) {
            self.limit.record(index, fits);
        }
        // With `--smallest`, the search ends when the last candidate fits, and needs no other reason.
        let is_found = wants_smallest && self.limit.fits == Some(self.values.last());
        let is_open = self.stopped.is_none() && self.limit.too_big.is_none() && !is_found;
        if is_open && !self.values.are_gpus() && self.is_unchanged() {
            self.stopped = Some(format!(
                "the peak is the same for the last {UNCHANGED} values: the program seems to ignore {{}}"
            ));
        }
    }

    /// Returns true if the last [`UNCHANGED`] trials have the same peak.
    fn is_unchanged(&self) -> bool {
        let last = self.trials.len().saturating_sub(UNCHANGED);
        let mut peaks = self.trials[last..].iter().map(|(_, trial)| (trial.peak.allocated, trial.peak.used));
        let first = peaks.next();
        self.trials.len() >= UNCHANGED && peaks.all(|peak| Some(peak) == first)
    }

    /// Returns a text with the results so far, for a search that a signal ends.
    pub(super) fn known(&self) -> String {
        let text = |index: usize| self.values.text(index);
        let are_gpus = self.values.are_gpus();
        match (self.limit.fits.map(text), self.limit.too_big.map(text)) {
            (Some(fits), Some(too_big)) if are_gpus => {
                let ((enough, are), (too_few, are_not)) = (gpus_text(&fits), gpus_text(&too_big));
                format!(
                    "{enough} {are} enough, {too_few} {are_not} not; the numbers in between were not tried"
                )
            }
            (Some(fits), None) if are_gpus => {
                let (enough, are) = gpus_text(&fits);
                format!("{enough} {are} enough; no number tried was too small")
            }
            (None, Some(too_big)) if are_gpus => {
                let (too_few, are) = gpus_text(&too_big);
                format!("even {too_few}, the largest number tried, {are} not enough")
            }
            (Some(fits), Some(too_big)) => {
                format!("{fits} fits and {too_big} does not; the values in between were not tried")
            }
            (Some(fits), None) => format!("{fits} fits; no value tried was too large"),
            (None, Some(too_big)) => format!("{too_big} does not fit; no value tried fits"),
            (None, None) => "no trial has finished".to_owned(),
        }
    }
}

/// Returns true if the program of a trial failed for another reason than memory.
pub(super) fn has_failed(trial: &Trial) -> bool {
    matches!(trial.outcome, TrialOutcome::Failed(..))
}

fn new_search(values: &Candidates, within: f64) -> LimitSearch {
    LimitSearch::new(values.last(), values.start(), values.first_in_steps(), within)
}
