//! The searches of one request. Each search also uses the results of the trials of the other searches.

use std::collections::{HashSet, VecDeque};
use std::fs;

use anyhow::Result;

use super::guess::{Point, full_by, full_elsewhere};
use super::plan::{Plan, Row};
use super::search::{Guess, Search};
use super::trial::{Trial, TrialOutcome};
use super::trials::Trials;
use super::values::{Values, gpus_text};

/// If this many consecutive trials have the same peak and fit, the program is assumed not to use the value.
const UNCHANGED: usize = 5;
/// If the program failed on this many numbers of GPUs and worked on none, it is assumed to fail on every
/// number. The same holds for cards.
const HOPELESS: usize = 2;
/// The maximum number of concurrent trials of one search. Further trials would only confirm the results of the
/// first two.
const BATCH: usize = 2;

/// A search and its trials.
pub(super) struct Lane<'a> {
    pub(super) row: &'a Row,
    /// The candidates of the row that the program can use.
    pub(super) values: Values,
    pub(super) search: Search,
    /// The trials that have ended, in the order of their ends, with the texts of their candidates.
    pub(super) trials: Vec<(String, Trial)>,
    /// The candidates to run next.
    queue: VecDeque<String>,
    /// The number of trials of this search in progress.
    in_progress: usize,
    pub(super) is_over: bool,
    /// The reason why the search ended without an answer; `None` if it did not.
    pub(super) stopped: Option<String>,
}

impl<'a> Lane<'a> {
    fn new(row: &'a Row, within: f64) -> Lane<'a> {
        let values = row.values.clone();
        let search = new_search(&values, within);
        Lane {
            row,
            values,
            search,
            trials: Vec::new(),
            queue: VecDeque::new(),
            in_progress: 0,
            is_over: false,
            stopped: None,
        }
    }

    fn index_of(&self, text: &str) -> Option<usize> {
        match &self.values {
            Values::Numbers { first, step, .. } => {
                text.parse::<usize>().ok().map(|number| number.saturating_sub(*first) / step)
            }
            Values::List(list) => list.iter().position(|entry| entry == text),
            Values::Gpus(list) => list.iter().position(|gpus| gpus.to_string() == text),
        }
    }

    /// Returns the trial of the candidate `index`, or `None` if this search did not run it.
    pub(super) fn trial(&self, index: usize) -> Option<&Trial> {
        let text = self.values.text(index);
        self.trials.iter().find(|(value, _)| *value == text).map(|(_, trial)| trial)
    }

    /// Returns the trial of the last candidate that fits. Returns `None` if no candidate is known to fit, or if
    /// the result follows from the trials of another search.
    pub(super) fn fits(&self) -> Option<&Trial> {
        self.trial(self.search.fits?)
    }

    /// Returns the trial of the first candidate that does not fit; `None` as for [`Lane::fits`].
    pub(super) fn too_big(&self) -> Option<&Trial> {
        self.trial(self.search.too_big?)
    }

    /// Returns an explanation if a value fits although an earlier one does not. The search assumes the
    /// opposite: each value needs at least as much memory as the value before it.
    pub(super) fn disorder(&self) -> Option<String> {
        let (fits, too_big) = self.search.fits.zip(self.search.too_big)?;
        let (fits_text, too_big_text) = (self.values.text(fits), self.values.text(too_big));
        (fits > too_big).then(|| match &self.values {
            Values::Gpus(_) => format!(
                "memory does not shrink with the number of GPUs here: {fits_text} {} enough, but \
                 {too_big_text}, which are more, are not",
                gpus_text(&fits_text).1
            ),
            Values::Numbers { .. } => format!(
                "memory does not grow with the value here: {fits_text} fits, but {too_big_text}, which is \
                 smaller, does not"
            ),
            Values::List(_) => format!(
                "memory does not grow with the value here: {fits_text} fits, but {too_big_text}, which \
                 comes first, does not; order --values by the memory that they need"
            ),
        })
    }

    /// Returns the trials that fitted, sorted by position.
    fn points(&self) -> Vec<Point<'_>> {
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
        self.search = new_search(&self.values, within);
        let known: Vec<(usize, bool)> = self
            .trials
            .iter()
            .filter_map(|(text, trial)| Some((self.index_of(text)?, trial.outcome == TrialOutcome::Fits)))
            .collect();
        known.into_iter().for_each(|(index, fits)| self.search.record(index, fits));
        self.is_over |= is_empty;
    }

    /// Records a trial that has ended. Ends the search if it cannot have an answer.
    fn record(&mut self, trial: Trial, plan: &Plan) {
        self.in_progress = self.in_progress.saturating_sub(1);
        let text = trial.value.clone();
        let with = match (text.as_str(), plan.values_are_gpus) {
            ("", _) => String::new(),
            (value, true) => format!("on {} ", gpus_text(value).0),
            (value, false) => format!("with value {value} "),
        };
        let no_gpu = self.row.capacity == 0 && trial.peak.used == 0;
        let hint = if no_gpu { "; without a GPU, add --phantom h100-80g" } else { "" };
        let failure = format!("{with}the program failed for a reason other than memory");
        let failed = has_failed(&trial);
        let used_none = trial.outcome == TrialOutcome::Fits && trial.peak.processes == 0;
        // A smaller value of what saves the card's memory needs no more host memory. So the host decides only about
        // the smallest value that fits on the card.
        let fits = trial.outcome == TrialOutcome::Fits || plan.wants_smallest && trial.peak.exceeds_host;
        self.trials.push((text.clone(), trial));
        if used_none {
            self.stopped = Some(format!("{with}the program allocated no GPU memory{hint}"));
        } else if failed && plan.values_are_gpus {
            self.leave_out(&text, plan.within);
            let all_failed = self.trials.iter().all(|(_, trial)| has_failed(trial));
            if all_failed && (self.is_over || self.trials.len() >= HOPELESS) {
                self.stopped = Some(failure);
            }
        } else if failed {
            self.stopped = Some(failure + hint);
        } else if let Some(index) = self.index_of(&text) {
            self.search.record(index, fits);
        }
        // With `--smallest`, the search ends when the last candidate fits, and needs no other reason.
        let is_found = plan.wants_smallest && self.search.fits == Some(self.values.last());
        let is_open = self.stopped.is_none() && self.search.too_big.is_none() && !is_found;
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
    fn known(&self) -> String {
        let text = |index: usize| self.values.text(index);
        let are_gpus = self.values.are_gpus();
        let gpus = |number: &str| if number == "1" { "GPU" } else { "GPUs" };
        let does = |number: &str| if number == "1" { "does" } else { "do" };
        match (self.search.fits.map(text), self.search.too_big.map(text)) {
            // The number that fits is the larger one, so it is at least 2.
            (Some(fits), Some(too_big)) if are_gpus => {
                let does = does(&too_big);
                format!("{fits} GPUs fit and {too_big} {does} not; the numbers in between were not tried")
            }
            (Some(fits), Some(too_big)) => {
                format!("{fits} fits and {too_big} does not; the values in between were not tried")
            }
            (Some(fits), None) if are_gpus => {
                let are = if fits == "1" { "is" } else { "are" };
                format!("{fits} {} {are} enough; no number tried was too small", gpus(&fits))
            }
            (Some(fits), None) => format!("{fits} fits; no value tried was too large"),
            (None, Some(too_big)) if are_gpus => {
                format!("{too_big} {} {} not fit; no number tried is enough", gpus(&too_big), does(&too_big))
            }
            (None, Some(too_big)) => format!("{too_big} does not fit; no value tried fits"),
            (None, None) => "no trial has finished".to_owned(),
        }
    }
}

/// Returns true if the program of a trial failed for another reason than memory.
fn has_failed(trial: &Trial) -> bool {
    matches!(trial.outcome, TrialOutcome::Failed(..))
}

fn new_search(values: &Values, within: f64) -> Search {
    Search::new(values.last(), values.start(), values.first_in_steps(), within)
}

/// All searches of a request.
pub(super) struct Searches<'a> {
    plan: &'a Plan,
    pub(super) lanes: Vec<Lane<'a>>,
}

impl<'a> Searches<'a> {
    pub(super) fn new(plan: &'a Plan) -> Searches<'a> {
        Searches { plan, lanes: plan.rows.iter().map(|row| Lane::new(row, plan.within)).collect() }
    }

    /// Makes the trials of all searches. Before each trial, calls `prepare` with its candidate.
    ///
    /// # Errors
    /// When the program cannot be run, or a trace cannot be read.
    pub(super) fn run(
        &mut self,
        trials: &mut Trials<'_, usize>,
        prepare: impl Fn(&str) -> Result<()>,
    ) -> Result<()> {
        loop {
            while trials.room() > 0
                && let Some((number, text)) = self.next(trials.room())
            {
                let lane = &mut self.lanes[number];
                let Some(index) = lane.index_of(&text) else { continue };
                lane.in_progress += 1;
                prepare(&text)?;
                trials.start(number, self.plan.planned(lane.row, &lane.values, index))?;
            }
            let Some((number, trial)) = trials.next_ended()? else { break };
            self.record(number, trial);
            if self.lanes[number].stopped.is_some() {
                trials.cancel(|other| other == number)?;
                self.lanes[number].in_progress = 0;
            }
        }
        for lane in &mut self.lanes {
            let over_host = |index: &usize| lane.trial(*index).is_some_and(|trial| trial.peak.exceeds_host);
            if let Some(index) = lane.search.fits.filter(over_host) {
                lane.search.fits = None;
                lane.search.too_big = Some(index);
            }
        }
        if let Some(signal) = trials.ended_by() {
            let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
            for lane in self.lanes.iter_mut().filter(|lane| !lane.is_over && lane.stopped.is_none()) {
                lane.stopped = Some(format!("ended by {name}; so far {}", lane.known()));
            }
        }
        Ok(())
    }

    /// Returns the next trial, from the first search that has one: the number of the search and the text of the
    /// candidate. Returns `None` if no search has a trial to start now.
    fn next(&mut self, room: usize) -> Option<(usize, String)> {
        for number in 0..self.lanes.len() {
            let lane = &self.lanes[number];
            if lane.is_over || lane.stopped.is_some() {
                continue;
            }
            if lane.queue.is_empty() && lane.in_progress == 0 {
                if self.plan.is_grid {
                    self.record_implied(number);
                }
                let guess = self.guess(number);
                let lane = &mut self.lanes[number];
                let batch = lane.search.next(guess, room.min(BATCH));
                lane.is_over = batch.is_empty();
                lane.queue = batch.into_iter().map(|index| lane.values.text(index)).collect();
            }
            if let Some(text) = self.lanes[number].queue.pop_front() {
                return Some((number, text));
            }
        }
        None
    }

    /// Records the results for this row that follow from rows with other numbers of GPUs, on the same card and with
    /// the same sequence length. A
    /// value that fits on fewer GPUs fits here, and a value that does not fit on more GPUs does not fit here.
    fn record_implied(&mut self, number: usize) {
        let (here, rest) = (&self.lanes[number], &self.lanes);
        let card = self.plan.card_of(here.row);
        let others = rest
            .iter()
            .filter(|lane| self.plan.card_of(lane.row) == card && lane.row.length == here.row.length);
        let (mut fits, mut too_big) = (None, None);
        for lane in others {
            if lane.row.gpus < here.row.gpus {
                fits = fits.max(lane.search.fits);
            } else if lane.row.gpus > here.row.gpus {
                too_big = lane.search.too_big.into_iter().chain(too_big).min();
            }
        }
        let search = &mut self.lanes[number].search;
        fits.into_iter().for_each(|index| search.record(index, true));
        too_big.into_iter().for_each(|index| search.record(index, false));
    }

    /// Estimates the last candidate that fits from the trials of this search. If none of them fitted, uses the
    /// trials of another search.
    fn guess(&self, number: usize) -> Option<Guess> {
        let lane = &self.lanes[number];
        let are_gpus = lane.values.are_gpus();
        let own = lane.points();
        let (position, points) = if own.is_empty() {
            let others = self.lanes.iter().map(|other| (other, other.points()));
            let (other, points) = others.max_by_key(|(_, points)| points.len().min(2))?;
            let gpus = |lane: &Lane<'_>| lane.row.gpus.unwrap_or(1) as f64;
            let shrunk = gpus(lane) / gpus(other);
            let position = full_elsewhere(&points, are_gpus, lane.row.capacity, shrunk)?;
            // The memory that grows with the batch also grows with the sequence length, so divide by the
            // ratio of the lengths.
            let length = |lane: &Lane<'_>| lane.row.length.unwrap_or(1) as f64;
            (position * length(other) / length(lane), points.len())
        } else {
            (full_by(&own, are_gpus)?, own.len())
        };
        let index = lane.values.index_at(position).min(lane.values.last());
        Some(Guess { index, is_rough: points < 2 })
    }

    /// Records a trial that has ended.
    fn record(&mut self, number: usize, trial: Trial) {
        let lane = &mut self.lanes[number];
        lane.record(trial, self.plan);
        if lane.stopped.is_some() {
            lane.queue.clear();
            self.end_hopeless();
        }
    }

    /// Ends all searches if no trial of any of them has worked, because the program would also fail in the others. Does
    /// nothing if the reason may be the card or the number of GPUs, and other rows have other ones.
    fn end_hopeless(&mut self) {
        let worked = |lane: &Lane<'_>| {
            lane.trials.iter().any(|(_, trial)| trial.peak.processes > 0 && !has_failed(trial))
        };
        let (cards, numbers) = self.different(|_| true);
        let (failed_cards, failed_numbers) = self.different(|lane| lane.stopped.is_some());
        let is_general = failed_cards >= cards.min(HOPELESS) && failed_numbers >= numbers.min(HOPELESS);
        if is_general && !self.lanes.iter().any(worked) {
            self.lanes.iter_mut().for_each(|lane| {
                lane.is_over = true;
                lane.queue.clear();
            });
        }
    }

    /// Returns how many cards and how many numbers of GPUs the searches have for which `counts` is true.
    fn different(&self, counts: impl Fn(&Lane<'_>) -> bool) -> (usize, usize) {
        let rows: Vec<&Row> = self.lanes.iter().filter(|lane| counts(lane)).map(|lane| lane.row).collect();
        let cards: HashSet<&str> = rows.iter().map(|row| self.plan.card_of(row)).collect();
        let numbers: HashSet<Option<u64>> = rows.iter().map(|row| row.gpus).collect();
        (cards.len(), numbers.len())
    }

    /// Removes the traces of the trials that the answer does not name. The traces of failed trials stay.
    pub(super) fn remove_unnamed(&self) {
        for lane in &self.lanes {
            let named = [lane.fits(), lane.too_big()].map(|trial| trial.map(|trial| &trial.files));
            for (_, trial) in &lane.trials {
                if !named.contains(&Some(&trial.files)) && !has_failed(trial) {
                    fs::remove_dir_all(&trial.files).ok();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::Duration;

    use super::super::trial::PeakUse;
    use super::*;

    #[test]
    fn a_failure_ends_the_searches_of_other_cards_only_after_a_second_card() {
        for (words, over) in [
            ("fit --phantom t4,l4,a100-40g -- python t.py {}", [false, true]),
            ("fit --phantom {gpus}xl4 --gpus 1,2,4 -- python t.py {gpus} {}", [false, true]),
            ("fit --phantom {gpus}xt4,{gpus}xl4 --gpus 1,2 -- python t.py {gpus} {}", [false, false]),
        ] {
            let words = super::super::command().try_get_matches_from(words.split(' ')).unwrap();
            let plan = Plan::new(&words, None, None).unwrap();
            let mut searches = Searches::new(&plan);
            for (number, is_over) in over.into_iter().enumerate() {
                let failed = Trial {
                    label: String::new(),
                    value: "1".to_owned(),
                    outcome: TrialOutcome::Failed("status 1".to_owned(), Vec::new()),
                    took: Duration::ZERO,
                    folder: PathBuf::new(),
                    files: PathBuf::new(),
                    peak: PeakUse::default(),
                };
                searches.record(number, failed);
                assert_eq!(searches.lanes[2].is_over, is_over, "{words:?}");
            }
        }
    }

    #[test]
    fn results_follow_for_other_numbers_of_gpus_of_the_same_length_alone() {
        let words = "fit --phantom {gpus}xh100-80g --gpus 8,16 --values 1,2,4 -- python t.py {gpus} {}";
        let words = super::super::command().try_get_matches_from(words.split(' ')).unwrap();
        for (length, expected) in [(2048, Some(1)), (8192, None)] {
            let mut plan = Plan::new(&words, None, None).unwrap();
            plan.rows[0].length = Some(2048);
            plan.rows[1].length = Some(length);
            let mut searches = Searches::new(&plan);
            searches.lanes[0].search.record(1, true);
            searches.record_implied(1);
            assert_eq!(searches.lanes[1].search.fits, expected, "{length}");
            let page = super::super::table::text(&plan, &searches.lanes);
            assert!(page.lines().next().unwrap().contains("tokens"), "{page}");
            let json = super::super::table::json(&plan, &searches.lanes, None);
            assert_eq!(
                (&json["rows"][0]["length"], &json["rows"][0]["tokens"]),
                (&2048.into(), &2048.into())
            );
        }
    }
}
