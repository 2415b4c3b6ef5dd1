//! `memtrace advise`: the changes that lower the peak most, with their costs and their code.

pub(super) mod predictions;
mod requested_change;

use memtrace_trace::units::parse_bytes;
use serde_json::{Value, json};

use super::oom::KeptMemory;
use super::report::{Answer, Report, Verdict, View, next};
use crate::error::{Error, Result};
use crate::options::{Flag, Options};
use crate::read::input::Input;
use crate::render::footer::Footer;
use crate::render::heading::process_heading;
use crate::render::numbers::{percent, share, upper_first};
use crate::render::printer::{Cell, Printer, Side, Style, Table};
use crate::state::replay::Metric;
use crate::state::replay_trace::Replayed;
use crate::whatif::{Advice, Change, ENDED_IN_OOM, Outcome, Prediction, advice, sureness, sureness_in};
use predictions::{Advised, MOST_CHANGES};
use requested_change::{AdviseChange, CHANGES};

/// `memtrace advise`.
pub(super) struct Advise;

impl Report for Advise {
    fn name(&self) -> &'static str {
        "advise"
    }

    fn about(&self) -> &'static str {
        "List the changes that lower the peak most, their cost and code; or predict the peak with a change"
    }

    fn examples(&self) -> &'static [(&'static str, &'static str)] {
        &[
            ("advise out", "the changes that save most"),
            ("advise --fit 24g out", "the fewest changes that make the run fit"),
            ("advise --checkpoint 'GPT.h.*' out", "the peak with these modules checkpointed"),
            (
                "advise --batch x2 --reserved out",
                "twice the batch, with the memory that the allocator reserves",
            ),
        ]
    }

    fn flags(&self) -> &'static [Flag] {
        const {
            &[Flag {
                name: "fit",
                value: Some("SIZE"),
                default: "",
                choices: &[],
                help: "Find the fewest changes that make the run fit in this much memory per device, such \
                       as 24g",
            }]
        }
    }

    fn views(&self) -> &'static [View] {
        const { &[View { asked_by: CHANGES, report: &AdviseChange }] }
    }

    fn run(&self, inputs: &[Input], options: &Options) -> Result<Answer> {
        let input = &inputs[0];
        let target = target(options)?;
        let mut printer = options.printer();
        let mut footer = Footer::of([input]);
        let mut json = Vec::new();
        let mut verdict = Verdict::Fine;
        for (index, trace) in input.traces.iter().enumerate() {
            let found = Advised::new(trace, options, target.is_some())?;
            footer.add_with_device(
                trace,
                &found.replayed,
                found.prediction.as_ref().map(|found| found.device),
            );
            process_heading(&mut printer, input, index);
            let Some(prediction) = &found.prediction else {
                printer.plain("No block was allocated on a device.");
                continue;
            };
            footer.notes.extend(prediction.cut_note());
            let kept = KeptMemory::find(trace, found.ended_in_oom(), prediction.before.bytes, options)?;
            if let Some(kept) = &kept {
                kept.print(&mut printer);
            }
            found.print(&mut printer, prediction, options);
            let mut value = found.json(prediction);
            value["kept"] = kept.as_ref().map(KeptMemory::json).into();
            value["file"] = trace.path.display().to_string().into();
            value["rank"] = trace.meta.rank.into();
            if let Some(target) = target {
                let fit = found.fit(prediction, target);
                fit.print(&mut printer, &found, options);
                value["fit"] = fit.json(&found);
                // After an OOM, the predicted need is only a lower bound, so a need below the limit does not
                // prove that the run fits.
                if found.ended_in_oom() || fit.needs.is_none_or(|needs| needs > target) {
                    verdict = Verdict::OverLimit;
                }
            }
            json.push(value);
        }
        Ok(Answer {
            next: vec![next("peak", input, "--by category")],
            verdict,
            ..Answer::new(printer, json!({ "devices": json }), footer)
        })
    }
}

/// Returns the value of `--fit` in bytes, or `None` if it is not given.
fn target(options: &Options) -> Result<Option<i64>> {
    match options.text("fit") {
        "" => Ok(None),
        text if text.trim().ends_with(|c: char| c.is_ascii_digit() || c == '.') => {
            Err(Error::usage(format!("--fit {text}: add a unit, such as 24g (24b is 24 bytes)")))
        }
        text => match parse_bytes(text) {
            Ok(bytes) if bytes > 0 => Ok(Some(bytes)),
            Ok(_) => Err(Error::usage(format!("--fit {text}: expected a size above 0, such as 24g"))),
            Err(why) => Err(Error::usage(format!("--fit {text}: {why}"))),
        },
    }
}

/// Returns the size of the failed request, or `None` if [`Prediction::before`] does not include it. Every
/// other report shows the peak without this request.
pub(super) fn failed_request(replayed: &Replayed, prediction: &Prediction) -> Option<i64> {
    let allocated = replayed.replay.find(prediction.device)?.peak(Metric::Allocated).bytes;
    Some(prediction.before.bytes - allocated).filter(|bytes| *bytes > 0 && replayed.replay.ended_in_oom())
}

impl Advised {
    fn print(&self, printer: &mut Printer, prediction: &Prediction, options: &Options) {
        let ranked = self.ranked(prediction);
        let units = options.units;
        let failed = failed_request(&self.replayed, prediction);
        let with_failed =
            failed.map(|_| format!(", {} with the request that failed", units.show(prediction.before.bytes)));
        printer.line([
            format!("device {}: peak of allocated memory ", prediction.device).into(),
            Cell::new(units.show(prediction.before.bytes - failed.unwrap_or(0)).to_string(), Style::Strong),
            with_failed.unwrap_or_default().into(),
        ]);
        if self.ended_in_oom() {
            printer.plain(format!("{}.", upper_first(ENDED_IN_OOM)));
        }
        match (self.replayed.replay.is_snapshot(), self.tags) {
            (true, true) => printer.plain(
                "A PyTorch snapshot has no calls of ops and modules and no types, so checkpoints, a chunked loss, autocast, 16-bit \
                 parameters and optimizer steps in the backward are not tried. memtrace run records them.",
            ),
            (true, false) => printer.plain(
                "No change is tried: the stacks show no parameters. Record from the start of the program with context=\"all\", or \
                 trace the program with memtrace run.",
            ),
            (false, true) => {}
            (false, false) => printer.plain(
                "Only checkpointing and a chunked loss are tried: the trace does not show which blocks are parameters, \
                 gradients or optimizer state (it has no tags).",
            ),
        }
        printer.gap();
        if ranked.is_empty() {
            printer.plain("No known change lowers this peak.");
            return;
        }
        let mut table = Table::new(&[
            ("saved", Side::Right),
            ("share", Side::Right),
            ("peak", Side::Right),
            ("sure", Side::Left),
            ("change", Side::Left),
            ("costs", Side::Left),
        ]);
        for (index, outcome, saved) in &ranked {
            let change = &self.changes[*index];
            table.row([
                Cell::new(units.show(*saved).to_string(), Style::Strong),
                percent(share(*saved, prediction.before.bytes)).into(),
                units.show(outcome.peak.bytes).to_string().into(),
                sureness_in(change, &self.replayed.replay).word.into(),
                change.option().into(),
                advice(change, &outcome.again).costs.into(),
            ]);
        }
        printer.table(&table);
        for (index, outcome, _) in ranked.iter().take(options.top.unwrap_or(3)) {
            print_code(printer, &self.changes[*index], &advice(&self.changes[*index], &outcome.again));
        }
    }

    fn json(&self, prediction: &Prediction) -> Value {
        let changes: Vec<Value> = self
            .ranked(prediction)
            .into_iter()
            .map(|(index, outcome, saved)| {
                let change = &self.changes[index];
                let (about, advice) =
                    (sureness_in(change, &self.replayed.replay), advice(change, &outcome.again));
                json!({
                    "change": change.option(),
                    "saved_bytes": saved,
                    "after": self.replayed.moment(&outcome.peak),
                    "assumes": about.assumes,
                    "sure": about.word,
                    "because": about.because,
                    "costs": advice.costs,
                    "code": advice.code,
                })
            })
            .collect();
        json!({
            "device": prediction.device,
            "before": self.replayed.moment(&prediction.before),
            "ended_in_oom": self.ended_in_oom(),
            "changes": changes,
            "fit": Value::Null,
        })
    }

    /// Returns the bytes of the device that the run needed in addition to its allocated blocks: cached and
    /// split memory, the context, libraries.
    fn beside(&self, prediction: &Prediction) -> i64 {
        let device = self.replayed.replay.find(prediction.device);
        let peak = |metric| device.map_or(0i64, |device| device.peak(metric).bytes);
        // None of these peaks includes a failed request. `Prediction::before` may include one, so do not use
        // it here.
        peak(Metric::Used).max(peak(Metric::Reserved)).saturating_sub(peak(Metric::Allocated)).max(0)
    }

    fn fit(&self, prediction: &Prediction, target: i64) -> Fit {
        let beside = self.beside(prediction);
        let now = prediction.before.bytes.saturating_add(beside);
        if now <= target {
            return Fit { target, beside, now, needs: Some(now), set: Some(Vec::new()) };
        }
        let needs = |outcome: &Outcome| outcome.peak.bytes.saturating_add(beside);
        let all = || self.sets.iter().zip(&prediction.outcomes);
        // Of the sets that fit, prefer the fewest changes, then the most certain prediction, then the lowest
        // need.
        let fits = all().filter(|(_, outcome)| needs(outcome) <= target);
        let doubt =
            |set: &[usize]| set.iter().map(|index| sureness(&self.changes[*index], false).doubt()).max();
        let best = fits.min_by_key(|(set, outcome)| (set.len(), doubt(set), needs(outcome)));
        let lowest = all().map(|(_, outcome)| needs(outcome)).min();
        Fit {
            target,
            beside,
            now,
            needs: best.map(|(_, outcome)| needs(outcome)).or(lowest),
            set: best.map(|(set, _)| set.clone()),
        }
    }
}

/// Prints the lines of code that make a change.
pub(super) fn print_code(printer: &mut Printer, change: &Change, advice: &Advice) {
    printer.gap();
    printer.line([Cell::new(change.option(), Style::Strong)]);
    for line in &advice.code {
        printer.line([Cell::new(format!("  {line}"), Style::Command)]);
    }
}

/// The answer to `--fit`: the fewest changes with which the run fits into `target`. All sizes are in bytes.
struct Fit {
    target: i64,
    /// The bytes that the run needs in addition to its allocated blocks.
    beside: i64,
    /// The bytes that the run needs without a change.
    now: i64,
    /// The bytes that the run needs with the changes. If no tried set fits, this is the lowest need of all
    /// tried sets; `None` if no set was tried.
    needs: Option<i64>,
    /// The indices of the changes that make the run fit; `None` if no tried set does.
    set: Option<Vec<usize>>,
}

impl Fit {
    fn print(&self, printer: &mut Printer, found: &Advised, options: &Options) {
        let units = options.units;
        printer.gap();
        let (target, now) = (units.show(self.target), units.show(self.now));
        let needs = units.show(self.needs.unwrap_or(self.now));
        let options_of = |set: &[usize]| {
            let all: Vec<String> = set.iter().map(|index| found.changes[*index].option()).collect();
            all.join(" ")
        };
        match &self.set {
            Some(set) if found.ended_in_oom() => printer.plain(format!(
                "Whether it fits in {target}{} is unknown: it needs at least {needs}, {ENDED_IN_OOM}. memtrace run --past-oom shows \
                 what the run needs.",
                if set.is_empty() { String::new() } else { format!(" with {}", options_of(set)) }
            )),
            Some(set) if set.is_empty() => {
                printer.plain(format!("It fits in {target} without changes: it needs {now}."));
            }
            Some(set) => printer.line([
                format!("Fits in {target} with ").into(),
                Cell::new(options_of(set), Style::Strong),
                format!(": {needs} instead of {now}").into(),
            ]),
            None => printer.line([
                Cell::new(
                    format!("No set of up to {MOST_CHANGES} of these changes reaches {target}"),
                    Style::Alarm,
                ),
                format!(": it needs at least {needs}, instead of {now}").into(),
            ]),
        }
        printer.plain(format!(
            "The needed memory includes {} beyond the allocated blocks, as in this run: the allocator's \
             cache, the CUDA context, libraries",
            units.show(self.beside)
        ));
    }

    fn json(&self, found: &Advised) -> Value {
        let options = |set: &Vec<usize>| -> Vec<String> {
            set.iter().map(|index| found.changes[*index].option()).collect()
        };
        json!({
            "target_bytes": self.target,
            "beside_bytes": self.beside,
            "now_bytes": self.now,
            "needs_bytes": self.needs,
            "changes": self.set.as_ref().map(options),
        })
    }
}
