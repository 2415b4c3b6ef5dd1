//! `memtrace diff`: compares the peaks of two runs by owner. Runs are aligned by step and module, never by
//! time.

use std::collections::{BTreeMap, BTreeSet};

use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use super::device_peaks::{DevicePeaks, Place};
use super::report::{Answer, Report, Verdict, next, vouch};
use crate::error::{Error, Result};
use crate::options::{Flag, Options, Window};
use crate::profile::flow_categories;
use crate::read::input::Input;
use crate::read::stream::TraceFile;
use crate::render::footer::Footer;
use crate::render::heading::heading;
use crate::render::numbers::change;
use crate::render::printer::{Cell, Printer, Side, Style, Table};
use crate::render::process_names::{rank_or_name, several_ranks};
use crate::selection::select;
use crate::state::group::{self, Group, Key, KeyKind, without_mark};
use crate::state::module_layers::Layers;
use crate::state::replay::{Block, Device, Metric, is_gpu};
use crate::state::replay_trace::{Replayed, replay_trace};

/// `memtrace diff`.
pub(super) struct Diff;

impl Report for Diff {
    fn name(&self) -> &'static str {
        "diff"
    }

    fn about(&self) -> &'static str {
        "Compare the peaks of two runs by owner; --fail-over makes it a gate for CI"
    }

    fn examples(&self) -> &'static [(&'static str, &'static str)] {
        &[
            ("diff before after", "peak against peak, by owner"),
            ("diff --fail-over 2% before after", "exit 3 when the peak grew by more than 2%"),
            ("diff --steps 9:10 out", "two steps of one run"),
        ]
    }

    fn inputs(&self) -> &'static [&'static str] {
        &["BEFORE", "AFTER"]
    }

    fn only_first_with(&self) -> Option<&'static str> {
        Some(STEPS)
    }

    fn flags(&self) -> &'static [Flag] {
        &[
            Flag {
                name: STEPS,
                value: Some("A:B"),
                default: "",
                choices: &[],
                help: "Compare step B of one run with its step A, such as 9:10",
            },
            group::BY,
            group::DEPTH,
            group::APART,
            Flag {
                name: "fail-over",
                value: Some("LIMIT"),
                default: "",
                choices: &[],
                help: "Exit with status 3 when the peak grew by more than this: 2%, 100m",
            },
        ]
    }

    fn run(&self, inputs: &[Input], options: &Options) -> Result<Answer> {
        let limit = options.is_set("fail-over").then(|| limit(options.text("fail-over"))).transpose()?;
        let by = Key::from_options(options)?;
        let mut footer = Footer::of(inputs);
        let mut printer = options.printer();
        let pair = options.is_set(STEPS).then(|| two_steps(options)).transpose()?;
        let sides: Vec<(Input, Options)> = match &pair {
            Some(pair) => {
                let of_step = |options: &Options| -> Result<(Input, Options)> {
                    Ok((select(&inputs[0], options, false)?, options.clone()))
                };
                pair.iter().map(of_step).collect::<Result<_>>()?
            }
            None => inputs.iter().map(|input| (input.clone(), options.clone())).collect(),
        };
        let [(input_before, options_before), (input_after, options_after)] = &sides[..] else {
            return Err(Error::usage("expected two traces".to_owned()));
        };
        let mut before = DiffSide::new(input_before, options_before, &by, &mut footer, limit.is_some())?;
        let of_before = footer.clone();
        let mut after = DiffSide::new(input_after, options_after, &by, &mut footer, limit.is_some())?;
        if pair.is_some() {
            // Both steps are in one trace, whose lost events, damage and notes count once.
            let Footer { unattributed, unattributed_ever, .. } = footer;
            footer = Footer { unattributed, unattributed_ever, ..of_before };
        }
        // Join the layers of both runs, so that all layers get the same names even if only one run has an
        // additional layer.
        let mut layers = before.layers();
        layers.extend(&after.layers());
        before.group(&by, &layers);
        after.group(&by, &layers);
        heading(&mut printer, input_before, &before.trace.meta);
        if let Some([of_before, of_after]) = &pair {
            let (old, new) = (of_before.window.from_step, of_after.window.from_step);
            printer.plain(format!("compared: step {old} before, step {new} after"));
        } else {
            heading(&mut printer, input_after, &after.trace.meta);
        }
        if inputs.iter().any(|input| input.traces.len() > 1) {
            let another = if inputs.iter().any(several_ranks) { "; --rank compares another" } else { "" };
            printer.plain(format!(
                "compared: {} before, {} after, which have the highest peaks{another}",
                rank_or_name(before.trace, input_before),
                rank_or_name(after.trace, input_after)
            ));
        }
        printer.gap();
        totals(&mut printer, &before, &after, options);
        printer.gap();
        let changes = changes(&before, &after);
        if by.kind == KeyKind::Category {
            footer.note_inference(&before.replayed);
            footer.note_inference(&after.replayed);
        }
        owners(&mut printer, &changes, &by, options);
        steps(&mut printer, &before, &after, options);
        let grown = limit.map(|limit| grown(&before, &after, limit)).transpose()?.flatten();
        let broken = grown.is_some();
        if let Some((place, what, old, new)) = grown {
            printer.gap();
            let (old, new) = (options.units.show(old), options.units.show(new));
            let text = format!(
                "the peak grew by more than {}: {what}{place}, {old} before, {new} after",
                options.text("fail-over")
            );
            printer.line([Cell::new(text, Style::Alarm)]);
        }
        let json = json!({
            "by": by.name(),
            "before": before.json(),
            "after": after.json(),
            "changes": changes.iter().map(|(name, old, new)| json!({
                "key": name, "before_bytes": old.bytes, "after_bytes": new.bytes,
                "delta_bytes": new.bytes - old.bytes,
                "before_blocks": old.blocks, "after_blocks": new.blocks,
            })).collect::<Vec<Value>>(),
            "broken": broken,
        });
        let verdict = if broken { Verdict::OverLimit } else { Verdict::Fine };
        let of_step = pair
            .as_ref()
            .map_or_else(String::new, |[_, after]| format!(" --step {}", after.window.from_step));
        let hints = vec![next("peak", input_after, &format!("--by {}{of_step}", by.name()))];
        Ok(Answer { next: hints, verdict, ..Answer::new(printer, json, footer) })
    }
}

/// The option that compares two steps of one run.
const STEPS: &str = "steps";

/// Returns the options of each of the two steps that `--steps` names.
fn two_steps(options: &Options) -> Result<[Options; 2]> {
    let text = options.text(STEPS);
    let bad = || Error::usage(format!("--steps {text}: expected two steps, such as 9:10"));
    if options.window != Window::default() {
        return Err(Error::usage("--steps chooses the steps; leave out --step and --window".to_owned()));
    }
    let (before, after) = text.split_once(':').ok_or_else(bad)?;
    let of_step = |step: &str| -> Result<Options> {
        let step = step.trim().parse().map_err(|_| bad())?;
        let window = Window { from_step: step, to_step: step, ..Window::default() };
        Ok(Options { window, ..options.clone() })
    };
    Ok([of_step(before)?, of_step(after)?])
}

/// The names of the metrics that the gate compares: allocated memory, and the sum of reserved memory and the
/// memory of libraries. The second metric catches growth that bypasses PyTorch's allocator.
const METRICS: [&str; 2] = ["allocated", Metric::UNSAMPLED];

#[derive(Clone, Copy, Debug, PartialEq)]
enum GrowthLimit {
    Share(f64),
    Bytes(i64),
}

impl GrowthLimit {
    fn is_exceeded(self, old: i64, new: i64) -> bool {
        match self {
            GrowthLimit::Share(share) => new as f64 > old as f64 * (1.0 + share),
            GrowthLimit::Bytes(bytes) => new.saturating_sub(old) > bytes,
        }
    }
}

/// Returns the first device peak that grew by more than the limit: the device, the metric, and the bytes
/// before and after. A device that only the later run uses counts as 0 bytes before.
///
/// # Errors
/// If a rank occurs in only one of the runs.
fn grown(
    before: &DiffSide<'_>,
    after: &DiffSide<'_>,
    limit: GrowthLimit,
) -> Result<Option<(String, &'static str, i64, i64)>> {
    let ranks =
        |side: &DiffSide<'_>| -> BTreeSet<i32> { side.devices.keys().map(|(rank, _)| *rank).collect() };
    let (old, new) = (ranks(before), ranks(after));
    if let Some(rank) = old.symmetric_difference(&new).next() {
        let run = if old.contains(rank) { "first" } else { "second" };
        return Err(Error::usage(format!(
            "--fail-over: only the {run} run has rank {rank}; use --rank to compare a rank that both have"
        )));
    }
    let found = after.devices.iter().find_map(|(key, new)| {
        let old = before.devices.get(key).copied().unwrap_or_default();
        let place = || format!(" of rank {}, device {}", key.0, key.1);
        let grown = (0..METRICS.len()).find(|metric| limit.is_exceeded(old[*metric], new[*metric]))?;
        Some((place(), METRICS[grown], old[grown], new[grown]))
    });
    Ok(found)
}

fn limit(text: &str) -> Result<GrowthLimit> {
    if let Some(number) = text.strip_suffix('%') {
        return match number.trim().parse::<f64>() {
            // With an infinite share, no growth would exceed the limit.
            Ok(number) if number >= 0.0 && number.is_finite() => Ok(GrowthLimit::Share(number / 100.0)),
            _ => Err(Error::usage(format!("--fail-over {text}: expected a share such as 2%"))),
        };
    }
    match memtrace_trace::units::parse_bytes(text) {
        Ok(bytes) => Ok(GrowthLimit::Bytes(bytes)),
        Err(why) => {
            Err(Error::usage(format!("--fail-over {text}: not a share such as 2%, and not a size: {why}")))
        }
    }
}

/// One of the two runs, represented by its process with the highest peak.
struct DiffSide<'a> {
    trace: &'a TraceFile,
    replayed: Replayed,
    device: Device,
    groups: FxHashMap<String, Group>,
    /// The peak of each step on `device`.
    steps: BTreeMap<i64, i64>,
    /// For each device: the largest sum of the peaks of processes that ran at the same time, for each of
    /// [`METRICS`].
    devices: BTreeMap<Place, [i64; 2]>,
}

impl<'a> DiffSide<'a> {
    fn new(
        input: &'a Input,
        options: &Options,
        by: &Key,
        footer: &mut Footer,
        is_gate: bool,
    ) -> Result<Self> {
        let mut devices: DevicePeaks<2> = DevicePeaks::default();
        let mut best: Option<DiffSide<'a>> = None;
        for trace in &input.traces {
            let mut by_device: FxHashMap<i32, BTreeMap<i64, i64>> = FxHashMap::default();
            let replayed = replay_trace(
                trace,
                by.columns(),
                options,
                Metric::Allocated,
                flow_categories(trace, options)?,
                |row, replay| {
                    if is_gpu(row.device) && replay.in_window() {
                        let steps = by_device.entry(row.device).or_default();
                        let highest = steps.entry(replay.step).or_default();
                        *highest = row.allocated_bytes.max(*highest);
                    }
                },
            )?;
            if is_gate {
                vouch(trace, &replayed)?;
            }
            for device in replayed.gpus(options) {
                let used = device.peak(Metric::Used);
                let peaks = [device.peak_with_failed(Metric::Allocated), used.bytes - used.untraced];
                devices.add(trace, &replayed, device.ordinal, peaks);
            }
            footer.add(trace, &replayed, options);
            let Some(device) = replayed.fullest(Metric::Allocated, options).cloned() else { continue };
            let mut steps = by_device.remove(&device.ordinal).unwrap_or_default();
            steps.retain(|step, _| *step <= replayed.replay.last_step());
            let (groups, devices) = (FxHashMap::default(), BTreeMap::new());
            let new = DiffSide { trace, replayed, device, groups, steps, devices };
            if best.as_ref().is_none_or(|best| new.peak(Metric::Allocated) > best.peak(Metric::Allocated)) {
                best = Some(new);
            }
        }
        match best {
            Some(best) => {
                let devices = devices.sums().into_iter().map(|(place, (sums, _))| (place, sums)).collect();
                Ok(DiffSide { devices, ..best })
            }
            None => Err(Error::usage(format!("{}: no GPU memory in this trace", input.path.display()))),
        }
    }

    fn at_peak(&self) -> Vec<Block> {
        self.replayed.replay.at_peak(self.device.ordinal, false)
    }

    fn layers(&self) -> Layers {
        group::layers_of(&self.replayed.replay, &self.at_peak())
    }

    /// Groups the blocks at the peak. `layers` has the repeated layers of both runs.
    fn group(&mut self, by: &Key, layers: &Layers) {
        let blocks = self.at_peak();
        let by = by.on(self.trace).on_modules(&self.replayed.replay, &blocks).joining(layers);
        self.groups = by.groups(&blocks, &self.replayed.symbols);
    }

    fn peak(&self, metric: Metric) -> i64 {
        self.device.peak(metric).bytes
    }

    fn json(&self) -> Value {
        json!({
            "file": self.trace.path.display().to_string(),
            "rank": self.trace.meta.rank,
            "device": self.device.ordinal,
            "peak_allocated": self.replayed.moment(self.device.peak(Metric::Allocated)),
            "peak_reserved": self.replayed.moment(self.device.peak(Metric::Reserved)),
            "peak_used": self.replayed.moment(self.device.peak(Metric::Used)),
            "peak_allocated_bytes_by_step": self.steps.iter().filter(|(step, _)| **step >= 0)
                .map(|(step, bytes)| (step.to_string(), Value::from(*bytes)))
                .collect::<serde_json::Map<_, _>>(),
        })
    }
}

/// Formats a change in bytes; growth gets a plus sign.
fn signed(bytes: i64, options: &Options) -> String {
    let sign = if bytes > 0 { "+" } else { "" };
    format!("{sign}{}", options.units.show(bytes))
}

fn style(delta: i64) -> Style {
    match delta {
        1.. => Style::Alarm,
        0 => Style::Faint,
        _ => Style::Strong,
    }
}

fn totals(printer: &mut Printer, before: &DiffSide<'_>, after: &DiffSide<'_>, options: &Options) {
    let mut table = Table::new(&[
        ("peak", Side::Left),
        ("before", Side::Right),
        ("after", Side::Right),
        ("change", Side::Right),
        ("", Side::Right),
    ]);
    for metric in [Metric::Allocated, Metric::Reserved, Metric::Used] {
        let (old, new) = (before.peak(metric), after.peak(metric));
        let name = match (before.device.name_of(metric), after.device.name_of(metric)) {
            (old, new) if old == new => old,
            // One of the two runs has no samples, so its figure excludes the context and other processes.
            _ => "used, sampled in one",
        };
        table.row([
            name.into(),
            options.units.show(old).to_string().into(),
            options.units.show(new).to_string().into(),
            Cell::new(signed(new - old, options), style(new - old)),
            change(old, new).into(),
        ]);
    }
    printer.table(&table);
}

/// Returns every owner of memory at either peak, with the largest change first. A category that is inferred in one
/// run and recorded in the other is one owner.
fn changes(before: &DiffSide<'_>, after: &DiffSide<'_>) -> Vec<(String, Group, Group)> {
    let mut all: BTreeMap<&str, (&String, Group, Group)> = BTreeMap::new();
    for (is_after, side) in [(false, before), (true, after)] {
        for (name, group) in &side.groups {
            let (plain, is_inferred) = without_mark(name);
            let (shown, old, new) = all.entry(plain).or_insert((name, Group::default(), Group::default()));
            if is_inferred {
                *shown = name;
            }
            let sum = if is_after { new } else { old };
            sum.bytes += group.bytes;
            sum.blocks += group.blocks;
        }
    }
    let mut all: Vec<_> = all.into_values().map(|(name, old, new)| (name.clone(), old, new)).collect();
    // The sort is stable: equal changes keep the order of their names.
    all.sort_by_key(|(_, old, new)| -(new.bytes - old.bytes).abs());
    all
}

fn owners(printer: &mut Printer, changes: &[(String, Group, Group)], by: &Key, options: &Options) {
    let changed: Vec<_> =
        changes.iter().filter(|(_, old, new)| (old.bytes, old.blocks) != (new.bytes, new.blocks)).collect();
    if changed.is_empty() {
        printer.plain(format!("every {} has the same bytes at both peaks", by.name()));
        return;
    }
    let mut table = Table::new(&[
        ("change", Side::Right),
        ("before", Side::Right),
        ("after", Side::Right),
        ("blocks", Side::Right),
        (by.name(), Side::Left),
    ]);
    let top = options.top.unwrap_or(15);
    for (name, old, new) in changed.iter().take(top) {
        let delta = new.bytes - old.bytes;
        table.row([
            Cell::new(signed(delta, options), style(delta)),
            options.units.show(old.bytes).to_string().into(),
            options.units.show(new.bytes).to_string().into(),
            format!("{} -> {}", old.blocks, new.blocks).into(),
            name.as_str().into(),
        ]);
    }
    printer.table(&table);
    printer.more(changed.len().saturating_sub(top), "");
}

/// Prints the first step whose peak differs between the two runs, if there is one.
fn steps(printer: &mut Printer, before: &DiffSide<'_>, after: &DiffSide<'_>, options: &Options) {
    let first = before.steps.iter().filter(|(step, _)| **step >= 0).find_map(|(step, old)| {
        let new = after.steps.get(step)?;
        (new != old).then_some((*step, *old, *new))
    });
    if let Some((step, old, new)) = first {
        printer.gap();
        printer.plain(format!(
            "first step whose peak differs: step {step}, {} before, {} after ({})",
            options.units.show(old),
            options.units.show(new),
            change(old, new)
        ));
    }
}

#[cfg(test)]
mod tests {
    use memtrace_trace::{Category, Row};

    use super::*;
    use crate::testing::TraceBuilder;

    #[test]
    fn diff_compares_the_peak_of_a_step_on_the_device_with_the_highest_peak() {
        let folder = std::env::temp_dir().join(format!("memtrace-diff-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let mut trace = TraceBuilder::default();
        // In step 1, the other device has the higher peak.
        for (device, step, bytes) in [(0, 0, 100), (1, 0, 900), (1, 1, 0), (0, 1, 200)] {
            trace.alloc(bytes << 10, Row { device, step, ..Row::default() });
        }
        std::fs::write(folder.join("a.csv"), trace.finish()).unwrap();
        let run = Input::open(&folder).unwrap();
        let by_step = |device: Option<i32>| {
            let values = [("by", "category".to_owned())].into();
            let options = Options { device, values, ..Options::default() };
            let answer = Diff.run(&[run.clone(), run.clone()], &options).unwrap();
            answer.json["before"]["peak_allocated_bytes_by_step"].clone()
        };
        assert_eq!(by_step(Some(0)), json!({ "0": 100 << 10, "1": 300 << 10 }));
        assert_eq!(by_step(None), json!({ "0": 900 << 10, "1": 900 << 10 }));
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn diff_joins_a_category_that_one_run_infers_and_has_the_notes_of_both_runs() {
        let folder = std::env::temp_dir().join(format!("memtrace-diff-joined-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let run = |name: &str, has_tags: bool| {
            let mut trace = TraceBuilder::default();
            let init = Row { phase: "init", ..Row::default() };
            let id = trace.alloc(8192, init);
            if has_tags {
                trace.tag(id, 8192, init, Row { category: Category::Parameter, ..init });
            }
            trace.alloc(
                512,
                Row { phase: "forward", step: 0, category: Category::Activation, ..Row::default() },
            );
            std::fs::write(folder.join(name), trace.finish()).unwrap();
            let mut run = Input::open(&folder.join(name)).unwrap();
            run.notes.push(format!("about {name}"));
            run
        };
        let runs = [run("tagged.csv", true), run("untagged.csv", false)];
        let options = Options { values: [("by", "category".to_owned())].into(), ..Options::default() };
        let answer = Diff.run(&runs, &options).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        let changes = answer.json["changes"].as_array().unwrap();
        let of =
            |key: &str| changes.iter().find(|change| change["key"] == key).unwrap()["delta_bytes"].clone();
        assert_eq!((changes.len(), of("parameter *"), of("activation")), (2, json!(0), json!(0)));
        let notes: Vec<String> = answer.footer.all_notes().collect();
        for note in ["tagged.csv: about tagged.csv", "untagged.csv: about untagged.csv", "* inferred"] {
            assert!(notes.iter().any(|line| line.contains(note)), "{notes:?}");
        }
    }

    #[test]
    fn diff_reads_limits_as_shares_or_bytes_and_two_steps() {
        assert_eq!(limit("2%").unwrap(), GrowthLimit::Share(0.02));
        assert_eq!(limit("100m").unwrap(), GrowthLimit::Bytes(100 << 20));
        let of = |text: &str| {
            let values = [(STEPS, text.to_owned())].into_iter().collect();
            two_steps(&Options { values, ..Options::default() })
        };
        let [before, after] = of("10: 9").unwrap();
        assert_eq!((before.window.from_step, before.window.to_step), (10, 10));
        assert_eq!((after.window.from_step, after.window.to_step), (9, 9));
        for wrong in ["", "9", "9:", ":9", "9:10:11", "a:b"] {
            assert!(of(wrong).unwrap_err().to_string().contains("such as 9:10"), "{wrong:?}");
        }
        for wrong in ["", "much", "-1%", "inf%", "1e400%", "nan%", "%"] {
            assert!(limit(wrong).is_err(), "{wrong:?}");
        }
    }
}
