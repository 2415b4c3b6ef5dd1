//! The exports `speedscope` and `collapsed`: the live bytes at the peak, as stacks of their owners. A stack
//! has the phase, the levels of the module path, the program's own Python lines if the trace has them, and
//! the op.

use std::collections::BTreeMap;
use std::io::Write;

use memtrace_trace::text::printable;
use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use super::export::{Export, Job, OutputKind, no_gpu};
use crate::error::Result;
use crate::profile::flow_categories;
use crate::read::record::Columns;
use crate::read::symbols::{NO_OWNER, Symbol, SymbolTable};
use crate::render::numbers::{counted, duration};
use crate::state::replay::{HOST, Metric, Owner};
use crate::state::replay_trace::{Replayed, replay_trace};
use crate::state::stacks::Stacks;

/// The export `--to speedscope`.
pub(super) struct Speedscope;
/// The export `--to collapsed`.
pub(super) struct Collapsed;

impl Export for Speedscope {
    fn name(&self) -> &'static str {
        "speedscope"
    }

    fn about(&self) -> &'static str {
        "Live memory at the peak by phase, module and op, for speedscope.app"
    }

    fn takes_host(&self) -> bool {
        true
    }

    fn output_kind(&self, _: &crate::options::Options) -> OutputKind {
        OutputKind::OneFile(".speedscope.json")
    }

    fn open_with(&self) -> &'static str {
        "drop the file on https://www.speedscope.app and choose Left Heavy"
    }

    fn write(&self, job: &mut Job<'_>) -> Result<()> {
        let mut places: BTreeMap<String, usize> = BTreeMap::new();
        let mut frames: Vec<Value> = Vec::new();
        let mut profiles = Vec::new();
        let mut stacks = 0;
        for profile in profiles_of(job)? {
            let mut samples: Vec<Vec<usize>> = Vec::new();
            let mut weights = Vec::new();
            for (stack, bytes) in &profile.stacks {
                let mut sample = Vec::new();
                for frame in stack {
                    let place = *places.entry(frame.clone()).or_insert_with(|| {
                        frames.push(json!({ "name": frame }));
                        frames.len() - 1
                    });
                    sample.push(place);
                }
                samples.push(sample);
                weights.push(*bytes);
            }
            stacks += samples.len();
            profiles.push(json!({
                "type": "sampled",
                "name": profile.title,
                "unit": "bytes",
                "startValue": 0,
                "endValue": weights.iter().fold(0, |sum: i64, weight| sum.saturating_add(*weight)),
                "samples": samples,
                "weights": weights,
            }));
        }
        let file = json!({
            "$schema": "https://www.speedscope.app/file-format-schema.json",
            "exporter": concat!("memtrace ", env!("CARGO_PKG_VERSION")),
            "name": job.input.path.display().to_string(),
            "activeProfileIndex": 0,
            "shared": { "frames": frames },
            "profiles": profiles,
        });
        let mut out = job.create()?;
        write!(out, "{file}").ok();
        job.finish_file(out, counted(stacks as u64, "stack"))
    }
}

impl Export for Collapsed {
    fn name(&self) -> &'static str {
        "collapsed"
    }

    fn about(&self) -> &'static str {
        "Live memory at the peak as collapsed stacks, for flamegraph.pl, inferno and others"
    }

    fn takes_host(&self) -> bool {
        true
    }

    fn output_kind(&self, _: &crate::options::Options) -> OutputKind {
        OutputKind::OneFile(".collapsed.txt")
    }

    fn open_with(&self) -> &'static str {
        "flamegraph.pl --countname bytes FILE > flame.svg"
    }

    fn write(&self, job: &mut Job<'_>) -> Result<()> {
        let profiles = profiles_of(job)?;
        let several = profiles.len() > 1;
        let mut out = job.create()?;
        let mut stacks = 0;
        for profile in &profiles {
            let root = several.then(|| format!("rank {} device {}", profile.rank, profile.ordinal));
            for (stack, bytes) in &profile.stacks {
                // Replace the semicolons in a frame, because a semicolon separates frames. Spaces are valid:
                // only the last space on a line separates the frames from the number.
                let frames: Vec<String> = root
                    .iter()
                    .chain(stack)
                    .map(|frame| printable(&frame.replace(';', ":")).into_owned())
                    .collect();
                writeln!(out, "{} {bytes}", frames.join(";")).ok();
                stacks += 1;
            }
        }
        job.finish_file(out, counted(stacks, "stack"))
    }
}

/// The live memory at the peak of one device.
struct Profile {
    rank: i32,
    ordinal: i32,
    title: String,
    /// The bytes of each stack. A stack starts with its outermost frame.
    stacks: BTreeMap<Vec<String>, i64>,
}

fn profiles_of(job: &mut Job<'_>) -> Result<Vec<Profile>> {
    let mut profiles = Vec::new();
    let mut has_host = false;
    for trace in &job.input.traces {
        let lines = Stacks::read(trace);
        let columns = if lines.has_lines() { Columns::of(&["stack_id"]) } else { Columns::of(&[]) };
        let replayed = replay_trace(
            trace,
            columns,
            job.options,
            Metric::Allocated,
            flow_categories(trace, job.options)?,
            |_, _| {},
        )?;
        job.add_to_footer(trace, &replayed);
        has_host |= replayed.replay.find(HOST).is_some();
        for device in replayed.gpus(job.options) {
            let peak = device.peak(Metric::Allocated);
            if peak.bytes > 0 {
                let rank = trace.meta.rank;
                let when = duration(peak.ts_ns);
                let title = format!("rank {rank}, device {}: live at the peak, {when}", device.ordinal);
                let stacks = stacks(&replayed, &lines, device.ordinal);
                profiles.push(Profile { rank, ordinal: device.ordinal, title, stacks });
            }
        }
    }
    if profiles.is_empty() {
        return Err(no_gpu(&job.input.path, has_host));
    }
    Ok(profiles)
}

fn stacks(replayed: &Replayed, lines: &Stacks, ordinal: i32) -> BTreeMap<Vec<String>, i64> {
    let mut owners: FxHashMap<(Owner, i64), i64> = FxHashMap::default();
    for block in replayed.replay.at_peak(ordinal, false) {
        let sum = owners.entry((block.owner, block.stack)).or_default();
        *sum = sum.saturating_add(block.bytes);
    }
    let mut stacks: BTreeMap<Vec<String>, i64> = BTreeMap::new();
    for ((owner, id), bytes) in owners {
        let sum = stacks.entry(stack(&owner, &replayed.symbols, &lines.lines(id))).or_default();
        *sum = sum.saturating_add(bytes);
    }
    // A trace that contradicts itself can have negative sums, which the formats do not allow.
    stacks.retain(|_, bytes| *bytes > 0);
    stacks
}

/// Returns the frames of an owner: `forward`, `GPT`, `h`, `0`, `mlp`, `train.py:9 <module>`, `aten::mm`.
fn stack(owner: &Owner, symbols: &SymbolTable, lines: &[&str]) -> Vec<String> {
    let mut frames = Vec::new();
    if owner.phase != Symbol::NONE {
        frames.push(symbols.get(owner.phase).to_string());
    }
    if owner.module != Symbol::NONE {
        frames.extend(symbols.get(owner.module).split('.').map(str::to_owned));
    }
    frames.extend(lines.iter().rev().map(|line| (*line).to_owned()));
    if owner.op != Symbol::NONE {
        frames.push(symbols.get(owner.op).to_string());
    }
    if frames.is_empty() {
        frames.push(NO_OWNER.to_owned());
    }
    frames
}
