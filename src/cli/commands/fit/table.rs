//! The answer of several searches of `memtrace fit`: a row for each card and number of GPUs.

use memtrace_analysis::render::numbers::{duration, percent, share};
use memtrace_analysis::render::printer::{Cell, Printer, Side, Style, Table};
use serde_json::{Value, json};

use super::answer::{Answer, show};
use super::plan::{Plan, Wanted};
use super::recipe::Request;
use super::searches::Lane;
use super::trial::{self, Trial, TrialOutcome};
use crate::terminal;

/// Returns the answer as text for stdout.
pub(super) fn text(plan: &Plan, lanes: &[Lane<'_>]) -> String {
    let stdout = std::io::stdout();
    let mut page = Printer::new(terminal::use_colour("auto", &stdout), terminal::width(&stdout));
    let begun = shown(plan, lanes);
    if plan.is_grid {
        grid(&mut page, plan, &begun);
    } else {
        limits(&mut page, plan, &begun);
    }
    for lane in &begun {
        notes(&mut page, plan, lane);
    }
    if lanes.len() > begun.len() {
        page.plain("the other rows were not tried".to_owned());
    }
    page.gap();
    let trials = begun.iter().flat_map(|lane| lane.trials.iter().map(|(_, trial)| trial));
    page.line([Cell::new(trial::note(trials, "GPUs"), Style::Faint)]);
    page.text().to_owned()
}

/// Returns the searches with a trial or a result, the cheapest first if there are prices. Cards without a price follow.
fn shown<'l, 'p>(plan: &Plan, lanes: &'l [Lane<'p>]) -> Vec<&'l Lane<'p>> {
    let mut begun: Vec<&Lane<'_>> = lanes.iter().filter(|lane| is_begun(lane)).collect();
    let price = |lane: &Lane<'_>| price(plan, lane).unwrap_or(f64::INFINITY);
    begun.sort_by(|one, other| price(one).total_cmp(&price(other)));
    begun
}

/// Returns the price of the GPUs of a row. A search for the fewest GPUs has one only if it has found them.
fn price(plan: &Plan, lane: &Lane<'_>) -> Option<f64> {
    let gpus = match plan.values_are_gpus {
        true => Some(lane.values.text(lane.search.fits?).parse().ok()?),
        false => None,
    };
    plan.price_of(lane.row, gpus)
}

/// Returns the text of a price, with at most two decimals.
fn price_text(price: Option<f64>) -> String {
    let Some(price) = price else { return "-".to_owned() };
    let text = format!("{price:.2}");
    text.strip_suffix(".00").unwrap_or(&text).to_owned()
}

/// Returns true if the search has a trial or a result. A result may come from the trials of other searches.
fn is_begun(lane: &Lane<'_>) -> bool {
    !lane.trials.is_empty() || lane.search.fits.is_some() || lane.search.too_big.is_some()
}

/// Returns the name of a row for notes, such as `8xh100-80g at 2048 tokens`.
fn name(plan: &Plan, lane: &Lane<'_>) -> String {
    let card = plan.card_of(lane.row);
    let name = lane.row.gpus.map_or_else(|| card.to_owned(), |gpus| format!("{gpus}x{card}"));
    lane.row.length.map_or_else(|| name.clone(), |length| format!("{name} at {length} {}", plan.length_unit))
}

/// Prints a row for each search, with the limit that it found.
fn limits(page: &mut Printer, plan: &Plan, lanes: &[&Lane<'_>]) {
    let by_gpus = lanes.iter().any(|lane| lane.row.gpus.is_some());
    let by_length = lanes.iter().any(|lane| lane.row.length.is_some());
    let side = if plan.wants_smallest { "smallest" } else { "largest" };
    let limit = format!("{side} {}", plan.value_name);
    let (limit, other) = match plan.wanted {
        Wanted::Value => (limit.as_str(), "does not fit"),
        Wanted::Gpus => ("fewest GPUs", "too few"),
        Wanted::YesOrNo => ("", ""),
    };
    let mut columns = vec![("card", Side::Left)];
    if plan.has_prices() {
        columns.push(("price", Side::Right));
    }
    if by_gpus {
        columns.push(("GPUs", Side::Right));
    }
    if by_length {
        columns.push((plan.length_unit, Side::Right));
    }
    columns.push((limit, Side::Right));
    if !other.is_empty() {
        columns.push((other, Side::Right));
    }
    columns.extend([("peak allocated", Side::Right), ("reserved", Side::Right), ("of device", Side::Right)]);
    if by_length {
        columns.extend([("free", Side::Right), ("peak host", Side::Right), ("largest part", Side::Left)]);
    }
    columns.extend([("trials", Side::Right), ("took", Side::Right)]);
    let mut table = Table::new(&columns);
    for lane in lanes {
        let mut row: Vec<Cell> = vec![plan.card_of(lane.row).into()];
        if plan.has_prices() {
            row.push(price_text(price(plan, lane)).into());
        }
        if by_gpus {
            row.push(lane.row.gpus.map(|gpus| gpus.to_string()).unwrap_or_default().into());
        }
        if by_length {
            row.push(lane.row.length.map(|length| length.to_string()).unwrap_or_default().into());
        }
        let shown = lane.fits().or(lane.too_big()).or(lane.trials.last().map(|(_, trial)| trial));
        if other.is_empty() {
            let outcome = shown.map_or("-", |trial| trial.outcome.word());
            let style = if lane.fits().is_some() { Style::Strong } else { Style::Alarm };
            row.push(Cell::new(outcome, style));
        } else {
            let text = |trial: Option<&Trial>| trial.map_or("-".to_owned(), |trial| trial.candidate.clone());
            row.push(Cell::new(text(lane.fits()), Style::Strong));
            row.push(text(lane.too_big()).into());
        }
        // A trial that did not fit ended early, so its peak does not show how much it needs.
        let peak = shown.filter(|trial| trial.outcome == TrialOutcome::Fits).map(|trial| &trial.peak);
        row.push(peak.map_or("-".to_owned(), |peak| show(peak.allocated)).into());
        row.push(peak.map_or("-".to_owned(), |peak| show(peak.reserved)).into());
        row.push(peak.map_or("-".to_owned(), |peak| percent(share(peak.used, peak.capacity))).into());
        if by_length {
            row.push(peak.map_or("-".to_owned(), |peak| show((peak.capacity - peak.used).max(0))).into());
            row.push(peak.map_or("-".to_owned(), |peak| show(peak.host)).into());
            let part = peak.and_then(|peak| peak.by_category.first().map(|part| (part, peak.allocated)));
            let part = part.map(|((name, bytes), all)| format!("{name} {}", percent(share(*bytes, all))));
            row.push(part.unwrap_or("-".to_owned()).into());
        }
        let took: u128 = lane.trials.iter().map(|(_, trial)| trial.took.as_nanos()).sum();
        row.push(lane.trials.len().to_string().into());
        row.push(duration(took as i64).into());
        table.row(row);
    }
    page.table(&table);
}

/// Prints a table with a row for each card, number of GPUs and sequence length, and a column for each value.
fn grid(page: &mut Printer, plan: &Plan, lanes: &[&Lane<'_>]) {
    let Some(values) = lanes.first().map(|lane| &lane.values) else { return };
    let heads: Vec<String> = (0..=values.last()).map(|index| values.text(index)).collect();
    let by_length = lanes.iter().any(|lane| lane.row.length.is_some());
    let mut columns = vec![("card", Side::Left), ("GPUs", Side::Right)];
    if plan.has_prices() {
        columns.push(("price", Side::Right));
    }
    if by_length {
        columns.push((plan.length_unit, Side::Right));
    }
    columns.extend(heads.iter().map(|head| (head.as_str(), Side::Right)));
    let mut table = Table::new(&columns);
    for lane in lanes {
        let gpus = lane.row.gpus.map(|gpus| gpus.to_string()).unwrap_or_default();
        let mut row: Vec<Cell> = vec![plan.card_of(lane.row).into(), Cell::new(gpus, Style::Strong)];
        if plan.has_prices() {
            row.push(price_text(price(plan, lane)).into());
        }
        if by_length {
            row.push(lane.row.length.map(|length| length.to_string()).unwrap_or_default().into());
        }
        for index in 0..heads.len() {
            let (word, style) = match lane.trial(index).map(|trial| (&trial.outcome, trial)) {
                Some((TrialOutcome::Fits, trial)) => (show(trial.peak.used), Style::Plain),
                Some((TrialOutcome::TooBig(_), _)) => ("no".to_owned(), Style::Alarm),
                Some((TrialOutcome::Failed(..), _)) => ("failed".to_owned(), Style::Alarm),
                None if lane.search.fits.is_some_and(|fits| index <= fits) => {
                    ("fits".to_owned(), Style::Faint)
                }
                None if lane.search.too_big.is_some_and(|too_big| index >= too_big) => {
                    ("no".to_owned(), Style::Faint)
                }
                None => ("-".to_owned(), Style::Faint),
            };
            row.push(Cell::new(word, style));
        }
        table.row(row);
    }
    page.table(&table);
    page.gap();
    page.plain(
        "device memory used at the peak, for each value; fits: it needs less than a trial that fits, and was not tried; \
         no: it does not fit"
            .to_owned(),
    );
}

/// Prints the reason why a search has no answer, the end of the stderr of its failed trials, and doubts about
/// the limit that it found.
fn notes(page: &mut Printer, plan: &Plan, lane: &Lane<'_>) {
    let name = name(plan, lane);
    if let Some(why) = &lane.stopped {
        page.gap();
        page.line([Cell::new(format!("{name}: no answer: "), Style::Alarm), why.as_str().into()]);
    }
    for (_, trial) in &lane.trials {
        let TrialOutcome::Failed(ended, tail) = &trial.outcome else { continue };
        page.plain(format!("{}: {ended}; the last lines of its stderr:", trial.value));
        for line in tail {
            page.line([Cell::new(format!("    {line}"), Style::Faint)]);
        }
    }
    if let Some(Trial { candidate, outcome: TrialOutcome::TooBig(asked), .. }) =
        lane.too_big().filter(|trial| trial.peak.exceeds_host)
    {
        page.plain(format!("{name}: with {candidate} the program {asked}"));
    }
    if let Some(line) = lane.disorder() {
        page.plain(format!("{name}: {line}"));
    }
    let near = lane.fits().filter(|trial| trial.peak.inside_range);
    let near = near
        .map(|_| "may not fit")
        .or(lane.too_big().filter(|trial| trial.peak.inside_range).map(|_| "may fit"));
    if let Some(answer) = near {
        page.plain(format!(
            "{name}: the value at the limit {answer} on a real card: free memory differs between real cards, \
             and the memory that it needs is within their range"
        ));
    }
}

/// Returns the answer as JSON.
pub(super) fn json(plan: &Plan, lanes: &[Lane<'_>], recipe: Option<&Request>) -> Value {
    let rows: Vec<Value> = shown(plan, lanes)
        .into_iter()
        .map(|lane| {
            let mut row = Answer::of_lane(lane, plan).json(lane, recipe);
            if let Some(fields) = row.as_object_mut() {
                ["report", "command", "wanted"].iter().for_each(|name| drop(fields.remove(*name)));
                fields.insert("card".to_owned(), plan.card_of(lane.row).into());
                fields.insert("gpus".to_owned(), lane.row.gpus.into());
                fields.insert("price".to_owned(), price(plan, lane).into());
                if let Some(length) = lane.row.length {
                    fields.insert("tokens".to_owned(), length.into());
                }
                let (fits, too_big) = limits_json(plan, lane);
                fields.insert("fits".to_owned(), fits);
                fields.insert("too_big".to_owned(), too_big);
            }
            row
        })
        .collect();
    let wanted = match plan.wanted {
        Wanted::Value if plan.wants_smallest => "smallest",
        Wanted::Value => "value",
        Wanted::Gpus => "gpus",
        Wanted::YesOrNo => "fits",
    };
    let command: Vec<String> = plan.words.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    json!({ "report": "fit", "command": command, "wanted": wanted, "rows": rows })
}

/// Returns the last value that fits and the first that does not, or null. They may follow from other rows. If
/// no value is searched for, returns whether the program fits (null if unknown), and null.
fn limits_json(plan: &Plan, lane: &Lane<'_>) -> (Value, Value) {
    let text = |index: Option<usize>| Value::from(index.map(|index| lane.values.text(index)));
    match (plan.wanted, lane.search.fits, lane.search.too_big) {
        (Wanted::YesOrNo, None, None) => (Value::Null, Value::Null),
        (Wanted::YesOrNo, fits, _) => (fits.is_some().into(), Value::Null),
        (_, fits, too_big) => (text(fits), text(too_big)),
    }
}

/// Returns the exit status: 1 if a search has no answer, 3 if nothing fits anywhere, otherwise 0.
pub(super) fn status(plan: &Plan, lanes: &[Lane<'_>]) -> u8 {
    let statuses: Vec<u8> = lanes
        .iter()
        .filter(|lane| is_begun(lane))
        .map(|lane| match lane.search.fits {
            Some(_) if lane.stopped.is_none() => 0,
            _ => Answer::of_lane(lane, plan).status(),
        })
        .collect();
    match () {
        () if statuses.contains(&1) || statuses.is_empty() => 1,
        () if statuses.contains(&0) => 0,
        () => 3,
    }
}
