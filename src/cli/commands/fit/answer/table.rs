//! The answer of several searches, as a table: a row for each card and number of GPUs.

use memtrace_analysis::render::numbers::{duration, percent, share};
use memtrace_analysis::render::printer::{Cell, Printer, Side, Style, Table};

use super::single_search::{Answer, print_failure, range_doubt, show};
use crate::commands::fit::request::mode::Goal;
use crate::commands::fit::request::plan::Plan;
use crate::commands::fit::request::prices::price_text;
use crate::commands::fit::search::row_search::RowSearch;
use crate::commands::fit::trial::outcome::{Trial, TrialOutcome, note};
use crate::commands::fit::trial::peak::PeakUse;
use crate::terminal;

/// Returns the answer as text for stdout.
pub(crate) fn text(plan: &Plan, searches: &[RowSearch<'_>]) -> String {
    let stdout = std::io::stdout();
    let mut page = Printer::new(terminal::use_colour("auto", &stdout), terminal::width(&stdout));
    let begun = shown(plan, searches);
    if plan.is_grid {
        grid(&mut page, plan, &begun);
    } else {
        limits(&mut page, plan, &begun);
    }
    for search in &begun {
        notes(&mut page, plan, search);
    }
    if searches.len() > begun.len() {
        page.plain("the other rows were not tried".to_owned());
    }
    let answers = || begun.iter().map(|search| Answer { search, plan });
    if answers().filter_map(|answer| answer.device()).any(|peak| peak.phantom) {
        page.gap();
        page.line([Cell::new(note(answers().flat_map(|answer| answer.trials()), "GPUs"), Style::Faint)]);
    }
    page.text().to_owned()
}

/// Returns the searches with a trial or a result, the cheapest first if there are prices. Cards without a price follow.
pub(crate) fn shown<'l, 'p>(plan: &Plan, searches: &'l [RowSearch<'p>]) -> Vec<&'l RowSearch<'p>> {
    let mut begun: Vec<&RowSearch<'_>> = searches.iter().filter(|search| is_begun(search)).collect();
    let price = |search: &RowSearch<'_>| Answer { search, plan }.price().unwrap_or(f64::INFINITY);
    begun.sort_by(|one, other| price(one).total_cmp(&price(other)));
    begun
}

/// Returns true if the search has a trial or a result. A result may come from the trials of other searches.
fn is_begun(search: &RowSearch<'_>) -> bool {
    !search.trials.is_empty() || search.limit.fits.is_some() || search.limit.too_big.is_some()
}

/// Returns the name of a row for notes, such as `8xh100-80g at 2048 tokens`.
fn name(plan: &Plan, search: &RowSearch<'_>) -> String {
    let card = Answer { search, plan }.card();
    let name = search.row.gpus.map_or_else(|| card.to_owned(), |gpus| format!("{gpus}x{card}"));
    search
        .row
        .length
        .map_or_else(|| name.clone(), |length| format!("{name} at {length} {}", plan.length_unit))
}

/// A column of a table with a row for each search.
struct Column<'a> {
    head: String,
    side: Side,
    /// Returns the cell of a search.
    cell: Box<dyn Fn(&RowSearch<'_>) -> Cell + 'a>,
}

impl<'a> Column<'a> {
    fn new(head: &str, side: Side, cell: impl Fn(&RowSearch<'_>) -> Cell + 'a) -> Column<'a> {
        Column { head: head.to_owned(), side, cell: Box::new(cell) }
    }

    /// Returns a column of what is known of the trial that a row shows; `-` if it did not fit.
    fn of_peak(head: &str, side: Side, text: impl Fn(&PeakUse) -> String + 'a) -> Column<'a> {
        Column::new(head, side, move |search| {
            // A trial that did not fit ended early, so its peak does not show how much it needs.
            let fitted = trial_of(search).filter(|trial| trial.outcome == TrialOutcome::Fits);
            fitted.map_or("-".to_owned(), |trial| text(&trial.peak)).into()
        })
    }
}

/// Prints a table with these columns.
fn print(page: &mut Printer, columns: &[Column<'_>], searches: &[&RowSearch<'_>]) {
    let heads: Vec<(&str, Side)> = columns.iter().map(|column| (column.head.as_str(), column.side)).collect();
    let mut table = Table::new(&heads);
    for search in searches {
        table.row(columns.iter().map(|column| (column.cell)(search)));
    }
    page.table(&table);
}

/// Returns the columns that tell the searches apart: card, number of GPUs and length, and the price.
fn row_names<'a>(plan: &'a Plan, searches: &[&RowSearch<'_>]) -> Vec<Column<'a>> {
    let number = |number: Option<u64>| number.map(|number| number.to_string()).unwrap_or_default();
    let mut columns =
        vec![Column::new("card", Side::Left, move |search| Answer { search, plan }.card().into())];
    if plan.has_prices() {
        columns.push(Column::new("price", Side::Right, move |search| {
            Answer { search, plan }.price().map_or("-".to_owned(), price_text).into()
        }));
    }
    if searches.iter().any(|search| search.row.gpus.is_some()) {
        columns.push(Column::new("GPUs", Side::Right, move |search| number(search.row.gpus).into()));
    }
    if has_lengths(searches) {
        columns
            .push(Column::new(plan.length_unit, Side::Right, move |search| number(search.row.length).into()));
    }
    columns
}

/// Returns true if the searches are for lengths of a recipe.
fn has_lengths(searches: &[&RowSearch<'_>]) -> bool {
    searches.iter().any(|search| search.row.length.is_some())
}

/// Returns the trial that a row of [`limits`] shows: at the limit, or else the last one.
fn trial_of<'l>(search: &'l RowSearch<'_>) -> Option<&'l Trial> {
    search.fits().or(search.too_big()).or(search.trials.last().map(|(_, trial)| trial))
}

/// Prints a row for each search, with the limit that it found.
fn limits(page: &mut Printer, plan: &Plan, searches: &[&RowSearch<'_>]) {
    let mut columns = row_names(plan, searches);
    let value = |trial: Option<&Trial>| trial.map_or("-".to_owned(), |trial| trial.value.clone());
    let best = |extreme: &str| format!("{extreme} {}", plan.value_name);
    let heads = match plan.goal {
        Goal::Largest => Some((best("largest"), "does not fit")),
        Goal::Smallest => Some((best("smallest"), "does not fit")),
        Goal::FewestGpus => Some(("fewest GPUs".to_owned(), "too few")),
        Goal::YesOrNo => None,
    };
    match heads {
        None => columns.push(Column::new("", Side::Right, |search| {
            let outcome = trial_of(search).map_or("-", |trial| trial.outcome.word());
            Cell::new(outcome, if search.fits().is_some() { Style::Strong } else { Style::Alarm })
        })),
        Some((limit, other)) => {
            columns.push(Column::new(&limit, Side::Right, move |search| {
                Cell::new(value(search.fits()), Style::Strong)
            }));
            columns.push(Column::new(other, Side::Right, move |search| value(search.too_big()).into()));
        }
    }
    columns.extend([
        Column::of_peak("peak allocated", Side::Right, |peak| show(peak.allocated)),
        Column::of_peak("reserved", Side::Right, |peak| show(peak.reserved)),
        Column::of_peak("of device", Side::Right, |peak| percent(share(peak.used, peak.capacity))),
    ]);
    if has_lengths(searches) {
        columns.extend([
            Column::of_peak("free", Side::Right, |peak| show((peak.capacity - peak.used).max(0))),
            Column::of_peak("peak host", Side::Right, |peak| show(peak.host)),
            Column::of_peak("largest part", Side::Left, |peak| match peak.by_category.first() {
                Some((name, bytes)) => format!("{name} {}", percent(share(*bytes, peak.allocated))),
                None => "-".to_owned(),
            }),
        ]);
    }
    columns.push(Column::new("trials", Side::Right, |search| search.trials.len().to_string().into()));
    columns.push(Column::new("took", Side::Right, |search| {
        let took: u128 = search.trials.iter().map(|(_, trial)| trial.took.as_nanos()).sum();
        duration(took as i64).into()
    }));
    print(page, &columns, searches);
}

/// Prints a table with a row for each card, number of GPUs and sequence length, and a column for each value.
fn grid(page: &mut Printer, plan: &Plan, searches: &[&RowSearch<'_>]) {
    let Some(values) = searches.first().map(|search| &search.values) else { return };
    let mut columns = row_names(plan, searches);
    for index in 0..=values.last() {
        columns.push(Column::new(&values.text(index), Side::Right, move |search| {
            let (word, style) = match search.trial(index).map(|trial| (&trial.outcome, trial)) {
                Some((TrialOutcome::Fits, trial)) => (show(trial.peak.used), Style::Plain),
                Some((TrialOutcome::TooBig(_) | TrialOutcome::TooBigForHost(_), _)) => {
                    ("no".to_owned(), Style::Alarm)
                }
                Some((TrialOutcome::Failed(..), _)) => ("failed".to_owned(), Style::Alarm),
                None if search.limit.fits.is_some_and(|fits| index <= fits) => {
                    ("fits".to_owned(), Style::Faint)
                }
                None if search.limit.too_big.is_some_and(|too_big| index >= too_big) => {
                    ("no".to_owned(), Style::Faint)
                }
                None => ("-".to_owned(), Style::Faint),
            };
            Cell::new(word, style)
        }));
    }
    print(page, &columns, searches);
    page.gap();
    page.plain(
        "device memory used at the peak, for each value; fits: it needs less than a trial that fits, and was not \
         tried; no: it does not fit"
            .to_owned(),
    );
}

/// Prints the reason why a search has no answer, the end of the stderr of its failed trials, and doubts about
/// the limit that it found.
fn notes(page: &mut Printer, plan: &Plan, search: &RowSearch<'_>) {
    let name = name(plan, search);
    if let Some(why) = &search.stopped {
        page.gap();
        page.line([Cell::new(format!("{name}: no answer: "), Style::Alarm), why.as_str().into()]);
    }
    for (_, trial) in &search.trials {
        print_failure(page, &format!("{}: ", trial.label), trial);
    }
    if let Some(Trial { value, outcome: TrialOutcome::TooBigForHost(had), .. }) = search.too_big() {
        page.plain(format!("{name}: with {value} the program {had}"));
    }
    if let Some(line) = search.disorder() {
        page.plain(format!("{name}: {line}"));
    }
    if let Some(trial) = (Answer { search, plan }).inside_range().first() {
        page.plain(range_doubt(&format!("{name}: the value at the limit"), trial));
    }
}

/// Returns the exit status: 1 if a search has no answer, 3 if nothing fits anywhere, otherwise 0.
pub(crate) fn status(plan: &Plan, searches: &[RowSearch<'_>]) -> u8 {
    let statuses: Vec<u8> = searches
        .iter()
        .filter(|search| is_begun(search))
        .map(|search| match search.limit.fits {
            Some(_) if search.stopped.is_none() => 0,
            _ => Answer { search, plan }.status(),
        })
        .collect();
    match () {
        () if statuses.contains(&1) || statuses.is_empty() => 1,
        () if statuses.contains(&0) => 0,
        () => 3,
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::Duration;

    use super::*;
    use crate::commands::fit::request::plan::plan;
    use crate::commands::fit::search::scheduler::SearchScheduler;

    #[test]
    fn a_table_names_the_gpu_of_the_machine_and_says_only_of_others_that_they_are_simulated() {
        for (words, card, phantom) in [
            ("fit -- python t.py {}", "NVIDIA H200", false),
            ("fit --phantom h200 -- python t.py {}", "h200", true),
        ] {
            let plan = plan(words).unwrap();
            let mut searches = SearchScheduler::new(&plan).searches;
            let device = "NVIDIA H200".to_owned();
            searches[0].trials.push((
                "1".to_owned(),
                Trial {
                    label: "1".to_owned(),
                    value: "1".to_owned(),
                    outcome: TrialOutcome::Fits,
                    took: Duration::ZERO,
                    folder: PathBuf::new(),
                    files: PathBuf::new(),
                    peak: PeakUse { processes: 1, device, phantom, ..PeakUse::default() },
                },
            ));
            let page = text(&plan, &searches);
            assert!(page.lines().any(|line| line.starts_with(card)), "{page}");
            assert_eq!(page.contains("simulated"), phantom, "{page}");
        }
    }
}
