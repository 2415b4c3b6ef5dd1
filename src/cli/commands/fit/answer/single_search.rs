//! The answer of one search, as text.

use std::path::Path;

use memtrace_analysis::render::heading::short_command;
use memtrace_analysis::render::margin::margin;
use memtrace_analysis::render::numbers::{counted, duration, percent, share};
use memtrace_analysis::render::printer::{Cell, Printer, Side, Style, Table};
use memtrace_trace::text::shell_word;
use memtrace_trace::units::Unit;

use crate::commands::fit::ask;
use crate::commands::fit::recipe::prepared::PreparedRecipe;
use crate::commands::fit::request::candidates::gpus_text;
use crate::commands::fit::request::mode::Goal;
use crate::commands::fit::request::plan::Plan;
use crate::commands::fit::request::prices::price_text;
use crate::commands::fit::search::row_search::RowSearch;
use crate::commands::fit::trial::outcome::{STDERR, Trial, TrialOutcome, note};
use crate::commands::fit::trial::peak::{PeakUse, card_name};
use crate::terminal;

pub(crate) fn show(bytes: i64) -> String {
    Unit::Auto.show(bytes).to_string()
}

/// Prints how a trial failed, after the text `start`, and the end of its stderr. Prints nothing for another outcome.
pub(crate) fn print_failure(page: &mut Printer, start: &str, trial: &Trial) {
    let TrialOutcome::Failed(ended, tail) = &trial.outcome else { return };
    page.plain(format!("{start}{ended}; the last lines of its stderr:"));
    for line in tail {
        page.line([Cell::new(format!("    {line}"), Style::Faint)]);
    }
}

/// Returns the doubt about a trial whose outcome may differ on a real card. `name` names its value.
pub(super) fn range_doubt(name: &str, trial: &Trial) -> String {
    let other = if trial.outcome == TrialOutcome::Fits { "not fit" } else { "fit" };
    format!(
        "{name} may {other} on a real card: free memory differs between real cards, and the memory that it needs \
         is within their range"
    )
}

/// The result of a search.
pub(crate) struct Answer<'a> {
    pub(crate) search: &'a RowSearch<'a>,
    pub(crate) plan: &'a Plan,
}

impl<'a> Answer<'a> {
    /// Returns the name of the value of a recipe, with a space after it; empty for another program.
    fn name(&self) -> String {
        self.recipe_value().map(|name| format!("{name} ")).unwrap_or_default()
    }

    /// Returns the name of the value of a recipe, or `None` for another program.
    pub(super) fn recipe_value(&self) -> Option<&str> {
        self.search.row.length.map(|_| self.plan.value_name.as_str())
    }

    /// Returns true if the search is for the smallest number of GPUs.
    fn wants_fewest_gpus(&self) -> bool {
        self.plan.goal == Goal::FewestGpus
    }

    fn wants_smallest(&self) -> bool {
        self.plan.goal == Goal::Smallest
    }

    /// Returns all trials, in the order in which they ended.
    pub(super) fn trials(&self) -> impl DoubleEndedIterator<Item = &'a Trial> + use<'a> {
        self.search.trials.iter().map(|(_, trial)| trial)
    }

    /// Returns those trials at the limit whose outcome may differ on a real card.
    pub(super) fn inside_range(&self) -> Vec<&'a Trial> {
        self.search.at_limit().into_iter().filter(|trial| trial.peak.inside_range).collect()
    }

    /// Returns true if candidates remain between the last one that fits and the first one that does not. They were
    /// not tried.
    pub(super) fn has_gap(&self) -> bool {
        let number = |index: usize| self.search.values.text(index).parse::<u64>().unwrap_or(0);
        let limits = self.search.limit.fits.zip(self.search.limit.too_big);
        limits.is_some_and(|(fits, too_big)| match self.wants_fewest_gpus() {
            true => number(fits).saturating_sub(number(too_big)) > 1,
            false => too_big.saturating_sub(fits) > 1,
        })
    }

    /// Returns the exit status: 0 if there is an answer, 1 if the search stopped without an answer, and 3 if
    /// nothing fits.
    pub(crate) fn status(&self) -> u8 {
        match (&self.search.stopped, self.search.fits()) {
            (Some(_), _) => 1,
            (None, Some(_)) => 0,
            (None, None) => 3,
        }
    }

    /// Returns the peaks of the first trial that left a trace, which has the name and size of the device.
    /// Returns `None` if no trial did.
    pub(super) fn device(&self) -> Option<&'a PeakUse> {
        self.trials().map(|trial| &trial.peak).find(|peak| peak.processes > 0)
    }

    /// Returns the name of the card of the search.
    pub(crate) fn card(&self) -> &'a str {
        card_name(self.plan.card_of(self.search.row), self.device().map_or("", |peak| &peak.device))
    }

    /// Returns the price of the GPUs. A search for the fewest GPUs has one only if it has found them.
    pub(super) fn price(&self) -> Option<f64> {
        let gpus = match self.plan.searches_gpus {
            true => Some(self.search.values.text(self.search.limit.fits?).parse().ok()?),
            false => None,
        };
        self.plan.price_of(self.search.row, gpus)
    }

    /// Returns the answer as text for stdout.
    pub(crate) fn text(&self) -> String {
        let stdout = std::io::stdout();
        let mut page = Printer::new(terminal::use_colour("auto", &stdout), terminal::width(&stdout));
        self.heading(&mut page);
        page.gap();
        self.print_trials(&mut page);
        page.gap();
        self.verdict(&mut page);
        self.categories(&mut page);
        let retries = self.search.fits().map_or(0, |trial| trial.peak.retries);
        if retries > 0 {
            page.gap();
            page.plain(format!(
                "note: it fits only because the allocator emptied its cache {}, which is slow on a real device; \
                 a slightly {} avoids that",
                counted(retries.max(0).cast_unsigned(), "time"),
                match (self.wants_fewest_gpus(), self.wants_smallest()) {
                    (true, _) => "larger number of GPUs",
                    (false, true) => "larger value",
                    (false, false) => "smaller value",
                }
            ));
        }
        if let Some(peak) = self.device().filter(|peak| peak.absent_ranks > 0) {
            // With a second rank, an extra of rank 0 counts once.
            let hint = match peak.ranks {
                1 => "; if rank 0 does more than the others, use --ranks 0,1",
                _ => "",
            };
            page.plain(format!(
                "note: host memory is for one node: {} did not run, and each counts as much as the smallest \
                 rank that ran{hint}",
                counted(peak.absent_ranks.cast_unsigned(), "rank")
            ));
        }
        let pinned = self.trials().map(|trial| trial.peak.pinned_absent).max().unwrap_or(0);
        if pinned > 0 {
            page.plain(format!(
                "note: up to {} of pinned memory was not made resident, so the host memory of a trial may be too \
                 low by as much",
                show(pinned)
            ));
        }
        if self.device().is_some_and(|peak| peak.phantom) {
            page.line([Cell::new(note(self.trials(), "GPU"), Style::Faint)]);
        }
        page.gap();
        for next in self.next() {
            page.line([Cell::new("next: ", Style::Faint), Cell::new(next, Style::Command)]);
        }
        page.text().to_owned()
    }

    fn heading(&self, page: &mut Printer) {
        let mut cells = vec![Cell::new(short_command(&self.plan.command_of(self.search.row)), Style::Strong)];
        if let Some(peak) = self.device() {
            let mut about = format!("  {}, {}", peak.device, show(peak.capacity));
            if peak.processes > 1 {
                about.push_str(&format!("  {}", counted(peak.processes as u64, "process")));
            }
            cells.push(Cell::new(about, Style::Faint));
            if peak.phantom {
                cells.push(Cell::new("  (simulated GPU)", Style::Alarm));
            }
        }
        page.line(cells);
        if let Some(free) = self.search.row.free_at_start {
            page.line([Cell::new(free.to_string(), Style::Faint)]);
        }
    }

    fn print_trials(&self, page: &mut Printer) {
        let mut trials: Vec<&Trial> = self.trials().collect();
        if trials.is_empty() {
            return;
        }
        let mut table = Table::new(&[
            (if self.wants_fewest_gpus() { "GPUs" } else { &self.plan.value_name }, Side::Right),
            ("", Side::Left),
            ("peak allocated", Side::Right),
            ("reserved", Side::Right),
            ("of device", Side::Right),
            ("host", Side::Right),
            ("retries", Side::Right),
            ("took", Side::Right),
        ]);
        // Sort numbers by size. All other values get the key 0, so they stay in the order of the trials.
        trials.sort_by_key(|trial| trial.label.parse::<u64>().unwrap_or(0));
        for trial in trials {
            let peak = &trial.peak;
            let style = if trial.outcome == TrialOutcome::Fits { Style::Plain } else { Style::Alarm };
            table.row([
                Cell::new(trial.label.clone(), Style::Strong),
                Cell::new(trial.outcome.word(), style),
                show(peak.allocated).into(),
                show(peak.reserved).into(),
                percent(share(peak.used, peak.capacity)).into(),
                (if peak.host > 0 { show(peak.host) } else { "-".to_owned() }).into(),
                peak.retries.to_string().into(),
                duration(trial.took.as_nanos() as i64).into(),
            ]);
        }
        page.table(&table);
    }

    fn verdict(&self, page: &mut Printer) {
        if let Some(why) = &self.search.stopped {
            page.line([Cell::new("no answer: ", Style::Alarm), why.as_str().into()]);
            for trial in self.trials() {
                print_failure(page, &format!("{}: ", self.plan.described(&trial.value)), trial);
            }
            return;
        }
        if self.wants_fewest_gpus() {
            self.verdict_of_gpus(page);
        } else {
            self.verdict_of_value(page);
        }
        for trial in self.trials() {
            let TrialOutcome::Failed(ended, tail) = &trial.outcome else { continue };
            let last = tail.iter().rev().find(|line| !line.trim().is_empty()).map_or("", |line| line.trim());
            page.plain(format!("the program does not run on {}: {ended}, {last}", gpus_text(&trial.value).0));
        }
        if let Some(line) = self.search.disorder() {
            page.line([Cell::new(line, Style::Alarm)]);
        }
        for trial in self.inside_range() {
            page.plain(range_doubt(&trial.label, trial));
        }
        let margin = self.search.fits().map(|Trial { label, peak, .. }| {
            margin(peak.used, peak.capacity, peak.phantom).map(|margin| format!("with {label}: {margin}"))
        });
        if let Some(line) = margin.flatten() {
            page.plain(line);
        }
        if self.plan.has_prices() && self.search.fits().is_some() {
            page.plain(format!("price: {}", self.price().map_or("unknown".to_owned(), price_text)));
        }
        match self.search.too_big().map(|trial| (&trial.label, &trial.outcome)) {
            Some((label, TrialOutcome::TooBig(asked))) if !asked.is_empty() => {
                page.plain(format!("with {label} memory ran out when the program {asked}"));
            }
            Some((label, TrialOutcome::TooBigForHost(had))) => {
                page.plain(format!("with {label} the program {had}"))
            }
            _ => {}
        }
    }

    fn verdict_of_gpus(&self, page: &mut Printer) {
        let last = if self.plan.last_is_given { "that you gave" } else { "tried" };
        let text = |trial: &Trial| gpus_text(&trial.value);
        match (self.search.fits().map(text), self.search.too_big().map(text)) {
            (Some((enough, are)), Some((too_few, are_not))) => {
                let text = format!(" {are} enough, {too_few} {are_not} not");
                page.line([Cell::new(enough, Style::Strong), text.into()]);
                if self.has_gap() {
                    page.plain("the numbers in between were not tried; list them with --gpus".to_owned());
                }
            }
            (Some((enough, are)), None) => {
                let text = format!(" {are} enough, the smallest number {last}");
                page.line([Cell::new(enough, Style::Strong), text.into()]);
            }
            (None, Some((too_few, are))) => {
                let text = format!("even {too_few}, the largest number {last}, {are} not enough");
                page.line([Cell::new(text, Style::Alarm)]);
            }
            (None, None) => {}
        }
        let fitted: Vec<&PeakUse> = self
            .trials()
            .filter(|trial| trial.outcome == TrialOutcome::Fits)
            .map(|trial| &trial.peak)
            .collect();
        if fitted.len() > 1 && fitted.iter().all(|peak| peak.allocated == fitted[0].allocated) {
            page.plain(
                "note: the peak is the same for every number of GPUs: nothing is divided among them"
                    .to_owned(),
            );
        }
    }

    fn verdict_of_value(&self, page: &mut Printer) {
        let name = self.name();
        match (self.search.fits(), self.search.too_big()) {
            (Some(fits), Some(too_big)) => {
                page.line([
                    Cell::new(format!("{name}{}", fits.label), Style::Strong),
                    format!(" fits, {} does not", too_big.label).into(),
                ]);
                if self.has_gap() {
                    page.plain(
                        "the values in between were not tried; --within 0 finds the largest".to_owned(),
                    );
                }
            }
            (Some(fits), None) => page.line([
                Cell::new(format!("{name}{}", fits.label), Style::Strong),
                format!(
                    " fits, the {} value {}",
                    if self.wants_smallest() { "smallest" } else { "largest" },
                    if self.plan.last_is_given { "that you gave" } else { "tried" }
                )
                .into(),
            ]),
            (None, Some(too_big)) if self.wants_smallest() && too_big.outcome.exceeds_host() => {
                let text = format!(
                    "{name}{}, the smallest that fits on the card, needs too much host memory",
                    too_big.label
                );
                page.line([Cell::new(text, Style::Alarm)]);
            }
            (None, Some(too_big)) => {
                page.line([Cell::new(
                    format!(
                        "even {name}{}, the {} value, does not fit",
                        too_big.label,
                        if self.wants_smallest() { "largest" } else { "smallest" }
                    ),
                    Style::Alarm,
                )]);
            }
            (None, None) => {}
        }
    }

    /// Prints the memory by category at the peak, for the two values around the limit.
    fn categories(&self, page: &mut Printer) {
        let sides = self.search.at_limit();
        let mut names: Vec<&str> = Vec::new();
        for (name, _) in sides.iter().rev().flat_map(|trial| &trial.peak.by_category) {
            if !names.contains(&name.as_str()) {
                names.push(name);
            }
        }
        if names.is_empty() {
            return;
        }
        page.gap();
        let heads: Vec<String> = sides.iter().map(|trial| trial.label.clone()).collect();
        let first =
            if self.wants_fewest_gpus() { "on GPUs" } else { &format!("with {}", self.plan.value_name) };
        let first = format!("at the peak {first}");
        let mut columns = vec![(first.as_str(), Side::Left)];
        for head in &heads {
            columns.extend([(head.as_str(), Side::Right), ("", Side::Right)]);
        }
        let mut table = Table::new(&columns);
        for name in names {
            let mut row: Vec<Cell> = vec![name.into()];
            for trial in &sides {
                let bytes = trial
                    .peak
                    .by_category
                    .iter()
                    .find(|(held, _)| held == name)
                    .map_or(0, |(_, bytes)| *bytes);
                row.push(show(bytes).into());
                row.push(percent(share(bytes, trial.peak.allocated)).into());
            }
            table.row(row);
        }
        page.table(&table);
    }

    pub(super) fn next(&self) -> Vec<String> {
        let mut next = Vec::new();
        let word = |path: &Path| shell_word(&path.to_string_lossy());
        if let Some(trial) = self.search.too_big().filter(|trial| trial.peak.processes > 0) {
            let question = if trial.outcome.exceeds_host() { "ledger --host" } else { "oom" };
            next.push(format!("memtrace {question} {}", word(&trial.folder)));
        }
        if let Some(trial) = self.search.fits() {
            next.push(format!("memtrace peak --by module {}", word(&trial.folder)));
        }
        if next.is_empty()
            && let Some(trial) = self.trials().rev().find(|trial| trial.existing_folder().is_some())
        {
            next.push(format!("less {}", word(&trial.folder.join(STDERR))));
        }
        next
    }
}

/// Returns vLLM's options for what a search found; `None` if nothing fits.
pub(crate) fn vllm_options(search: &RowSearch<'_>, recipe: &PreparedRecipe) -> Option<String> {
    let trial = search.fits().filter(|_| recipe.is_server())?;
    Some(recipe.flags(search.row.length?, ask::cache_tokens(trial)?, &trial.value))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::Duration;

    use serde_json::json;

    use super::*;
    use crate::commands::fit::request::plan::plan;

    #[test]
    fn an_answer_prints_labels_and_commands_to_paste_and_its_json_has_values() {
        let plan = plan("fit --phantom l4 --values 4,8 -- python t.py {}").unwrap();
        let mut searches = crate::commands::fit::search::scheduler::SearchScheduler::new(&plan);
        let search = &mut searches.searches[0];
        search.limit.record(0, true);
        search.trials.push((
            "4".to_owned(),
            Trial {
                label: "l4 2048 4".to_owned(),
                value: "4".to_owned(),
                outcome: TrialOutcome::Fits,
                took: Duration::ZERO,
                folder: PathBuf::from("my runs/l4_2048_4"),
                files: PathBuf::new(),
                peak: PeakUse { processes: 1, inside_range: true, ..PeakUse::default() },
            },
        ));
        let answer = Answer { search, plan: &plan };
        assert!(answer.text().contains("l4 2048 4 may not fit on a real card"), "{}", answer.text());
        let json = super::super::json::of_one(&answer, None);
        assert_eq!((&json["fits"], &json["inside_range"]), (&json!("4"), &json!(["4"])));
        assert_eq!(json["next"], json!(["memtrace peak --by module 'my runs/l4_2048_4'"]));
    }
}
