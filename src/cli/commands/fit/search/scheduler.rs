//! The searches of one request. Each search also uses the results of the trials of the other searches.

use std::collections::HashSet;
use std::fs;
use std::path::PathBuf;

use anyhow::Result;

use super::estimate::{full_by, full_elsewhere};
use super::limit_search::Guess;
use super::row_search::{HOPELESS, RowSearch, has_failed};
use crate::commands::fit::request::plan::{Plan, Row};
use crate::commands::fit::trial::outcome::Trial;
use crate::commands::fit::trial::runner::TrialRunner;

/// The maximum number of concurrent trials of one search. Further trials would only confirm the results of the
/// first two.
const BATCH: usize = 2;

/// All searches of a request.
pub(crate) struct SearchScheduler<'a> {
    plan: &'a Plan,
    pub(crate) searches: Vec<RowSearch<'a>>,
}

impl<'a> SearchScheduler<'a> {
    pub(crate) fn new(plan: &'a Plan) -> SearchScheduler<'a> {
        SearchScheduler {
            plan,
            searches: plan.rows.iter().map(|row| RowSearch::new(row, plan.within)).collect(),
        }
    }

    /// Makes the trials of all searches. Before each trial, calls `prepare` with its candidate.
    ///
    /// # Errors
    /// When the program cannot be run, or a trace cannot be read.
    pub(crate) fn run(
        &mut self,
        trials: &mut TrialRunner<'_, usize>,
        prepare: impl Fn(&str) -> Result<()>,
    ) -> Result<()> {
        loop {
            while trials.room() > 0
                && let Some((search_index, text)) = self.next(trials.room())
            {
                let search = &mut self.searches[search_index];
                let Some(candidate) = search.index_of(&text) else { continue };
                search.in_progress += 1;
                prepare(&text)?;
                trials.start(search_index, self.plan.planned(search.row, &search.values, candidate))?;
            }
            let Some((search_index, trial)) = trials.next_ended()? else { break };
            self.record(search_index, trial);
            if self.searches[search_index].stopped.is_some() {
                trials.cancel(|other| other == search_index)?;
                self.searches[search_index].in_progress = 0;
            }
        }
        for search in &mut self.searches {
            let over_host =
                |index: &usize| search.trial(*index).is_some_and(|trial| trial.outcome.exceeds_host());
            if let Some(index) = search.limit.fits.filter(over_host) {
                search.limit.fits = None;
                search.limit.too_big = Some(index);
            }
        }
        if let Some(signal) = trials.ended_by() {
            let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
            for search in
                self.searches.iter_mut().filter(|search| !search.is_over && search.stopped.is_none())
            {
                search.stopped = Some(format!("ended by {name}; so far {}", search.known()));
            }
        }
        Ok(())
    }

    /// Returns the next trial, from the first search that has one: the index of the search and the text of the
    /// candidate. Returns `None` if no search has a trial to start now.
    fn next(&mut self, room: usize) -> Option<(usize, String)> {
        for search_index in 0..self.searches.len() {
            let search = &self.searches[search_index];
            if search.is_over || search.stopped.is_some() {
                continue;
            }
            if search.queue.is_empty() && search.in_progress == 0 {
                if self.plan.is_grid {
                    self.record_implied(search_index);
                }
                let guess = self.guess(search_index);
                let search = &mut self.searches[search_index];
                let batch = search.limit.next(guess, room.min(BATCH));
                search.is_over = batch.is_empty();
                search.queue = batch.into_iter().map(|index| search.values.text(index)).collect();
            }
            if let Some(text) = self.searches[search_index].queue.pop_front() {
                return Some((search_index, text));
            }
        }
        None
    }

    /// Records the results for this row that follow from rows with other numbers of GPUs, on the same card and with
    /// the same sequence length. A value that fits on fewer GPUs fits here, and a value that does not fit on more
    /// GPUs does not fit here.
    fn record_implied(&mut self, search_index: usize) {
        let (here, rest) = (&self.searches[search_index], &self.searches);
        let card = self.plan.card_of(here.row);
        let others = rest
            .iter()
            .filter(|search| self.plan.card_of(search.row) == card && search.row.length == here.row.length);
        let (mut fits, mut too_big) = (None, None);
        for search in others {
            if search.row.gpus < here.row.gpus {
                fits = fits.max(search.limit.fits);
            } else if search.row.gpus > here.row.gpus {
                too_big = search.limit.too_big.into_iter().chain(too_big).min();
            }
        }
        let limit = &mut self.searches[search_index].limit;
        fits.into_iter().for_each(|index| limit.record(index, true));
        too_big.into_iter().for_each(|index| limit.record(index, false));
    }

    /// Estimates the last candidate that fits from the trials of this search. If none of them fitted, uses the
    /// trials of another search.
    fn guess(&self, search_index: usize) -> Option<Guess> {
        let search = &self.searches[search_index];
        let are_gpus = search.values.are_gpus();
        let own = search.points();
        let (position, points) = if own.is_empty() {
            let others = self.searches.iter().map(|other| (other, other.points()));
            let (other, points) = others.max_by_key(|(_, points)| points.len().min(2))?;
            let gpus = |search: &RowSearch<'_>| search.row.gpus.unwrap_or(1) as f64;
            let shrunk = gpus(search) / gpus(other);
            let position = full_elsewhere(&points, are_gpus, search.row.capacity, shrunk)?;
            // The memory that grows with the batch also grows with the sequence length, so divide by the
            // ratio of the lengths.
            let length = |search: &RowSearch<'_>| search.row.length.unwrap_or(1) as f64;
            (position * length(other) / length(search), points.len())
        } else {
            (full_by(&own, are_gpus)?, own.len())
        };
        let index = search.values.index_at(position).min(search.values.last());
        Some(Guess { index, is_rough: points < 2 })
    }

    /// Records a trial that has ended.
    fn record(&mut self, search_index: usize, trial: Trial) {
        let search = &mut self.searches[search_index];
        search.record(trial, self.plan);
        if search.stopped.is_some() {
            search.queue.clear();
            self.end_hopeless();
        }
    }

    /// Ends all searches if no trial of any of them has worked, because the program would also fail in the others. Does
    /// nothing if the reason may be the card or the number of GPUs, and other rows have other ones.
    fn end_hopeless(&mut self) {
        let worked = |search: &RowSearch<'_>| {
            search.trials.iter().any(|(_, trial)| trial.peak.processes > 0 && !has_failed(trial))
        };
        let (cards, numbers) = self.different(|_| true);
        let (failed_cards, failed_numbers) = self.different(|search| search.stopped.is_some());
        let is_general = failed_cards >= cards.min(HOPELESS) && failed_numbers >= numbers.min(HOPELESS);
        if is_general && !self.searches.iter().any(worked) {
            self.searches.iter_mut().for_each(|search| {
                search.is_over = true;
                search.queue.clear();
            });
        }
    }

    /// Returns how many cards and how many numbers of GPUs the searches have for which `counts` is true.
    fn different(&self, counts: impl Fn(&RowSearch<'_>) -> bool) -> (usize, usize) {
        let rows: Vec<&Row> =
            self.searches.iter().filter(|search| counts(search)).map(|search| search.row).collect();
        let cards: HashSet<&str> = rows.iter().map(|row| self.plan.card_of(row)).collect();
        let numbers: HashSet<Option<u64>> = rows.iter().map(|row| row.gpus).collect();
        (cards.len(), numbers.len())
    }

    /// Removes the traces of the trials that the answer does not name. The traces of failed trials stay.
    pub(crate) fn remove_unnamed(&self) {
        for search in &self.searches {
            let named: Vec<&PathBuf> = search.named().into_iter().map(|trial| &trial.files).collect();
            for (_, trial) in &search.trials {
                if !named.contains(&&trial.files) && !has_failed(trial) {
                    fs::remove_dir_all(&trial.files).ok();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::commands::fit::request::plan::plan;
    use crate::commands::fit::trial::outcome::TrialOutcome;
    use crate::commands::fit::trial::peak::PeakUse;

    #[test]
    fn a_failure_ends_the_searches_of_other_cards_only_after_a_second_card() {
        for (words, over) in [
            ("fit --phantom t4,l4,a100-40g -- python t.py {}", [false, true]),
            ("fit --phantom {gpus}xl4 --gpus 1,2,4 -- python t.py {gpus} {}", [false, true]),
            ("fit --phantom {gpus}xt4,{gpus}xl4 --gpus 1,2 -- python t.py {gpus} {}", [false, false]),
        ] {
            let plan = plan(words).unwrap();
            let mut searches = SearchScheduler::new(&plan);
            for (search_index, is_over) in over.into_iter().enumerate() {
                let failed = Trial {
                    label: String::new(),
                    value: "1".to_owned(),
                    outcome: TrialOutcome::Failed("status 1".to_owned(), Vec::new()),
                    took: Duration::ZERO,
                    folder: PathBuf::new(),
                    files: PathBuf::new(),
                    peak: PeakUse::default(),
                };
                searches.record(search_index, failed);
                assert_eq!(searches.searches[2].is_over, is_over, "{words:?}");
            }
        }
    }

    #[test]
    fn results_follow_for_other_numbers_of_gpus_of_the_same_length_alone() {
        let words = "fit --phantom {gpus}xh100-80g --gpus 8,16 --values 1,2,4 -- python t.py {gpus} {}";
        for (length, expected) in [(2048, Some(1)), (8192, None)] {
            let mut plan = plan(words).unwrap();
            plan.rows[0].length = Some(2048);
            plan.rows[1].length = Some(length);
            let mut searches = SearchScheduler::new(&plan);
            searches.searches[0].limit.record(1, true);
            searches.record_implied(1);
            assert_eq!(searches.searches[1].limit.fits, expected, "{length}");
            let page = crate::commands::fit::answer::table::text(&plan, &searches.searches);
            assert!(page.lines().next().unwrap().contains("tokens"), "{page}");
            let json = crate::commands::fit::answer::json::of_several(&plan, &searches.searches, None);
            assert_eq!(
                (&json["rows"][0]["length"], &json["rows"][0]["tokens"]),
                (&2048.into(), &2048.into())
            );
        }
    }
}
