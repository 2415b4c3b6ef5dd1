//! Which memory the rank with the highest peak has beyond the rank with the lowest peak, by owner.

use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use super::super::device_users::{UNEVEN, is_uneven};
use super::super::growth::owner_name;
use crate::options::Options;
use crate::read::input::Input;
use crate::read::stream::TraceFile;
use crate::read::symbols::NO_PHASE;
use crate::render::printer::{Cell, Printer, Style};
use crate::render::process_names::rank_or_name;
use crate::state::replay::Metric;
use crate::state::replay_trace::Replayed;

/// The maximum number of owners that are named.
const MOST_NAMED: usize = 4;

/// The memory of a rank at its peak.
pub(super) struct PeakOwners {
    rank: i32,
    /// `rank 1`, or the name of the process if the rank has several.
    name: String,
    bytes: i64,
    step: i64,
    phase: String,
    owners: FxHashMap<String, i64>,
}

impl PeakOwners {
    /// Adds the owners of a process of `input` to `all`, which has only the processes with the highest and the lowest
    /// peak.
    pub(super) fn add(
        all: &mut Vec<PeakOwners>,
        (trace, input): (&TraceFile, &Input),
        replayed: &Replayed,
        options: &Options,
    ) {
        let Some(device) = replayed.fullest(Metric::Allocated, options) else { return };
        let peak = *device.peak(Metric::Allocated);
        let is_between =
            |all: &[PeakOwners]| all.len() == 2 && (all[0].bytes..=all[1].bytes).contains(&peak.bytes);
        if peak.bytes <= 0 || is_between(all) {
            return;
        }
        let layers = replayed.replay.classes.layers([], &replayed.symbols);
        let mut owners = FxHashMap::default();
        for block in replayed.replay.at_peak(device.ordinal, false) {
            *owners.entry(owner_name(&replayed.symbols, &layers, &block)).or_default() += block.bytes;
        }
        let phase = replayed.symbols.or(peak.owner.phase, NO_PHASE);
        let (rank, name) = (trace.meta.rank, rank_or_name(trace, input));
        all.push(PeakOwners { rank, name, bytes: peak.bytes, step: peak.owner.step, phase, owners });
        all.sort_by_key(|owners| (owners.bytes, -owners.rank));
        if all.len() > 2 {
            all.remove(1);
        }
    }

    fn text(&self, options: &Options) -> String {
        let at = if self.step < 0 { String::new() } else { format!("step {}, ", self.step) };
        format!("{} at its peak ({at}{})", options.units.show(self.bytes), self.phase)
    }
}

/// The owners that have more memory on the rank with the highest peak.
pub(super) struct OwnerDifference<'a> {
    low: &'a PeakOwners,
    high: &'a PeakOwners,
    /// For each owner: its bytes on the highest and on the lowest rank. The largest difference first.
    owners: Vec<(&'a str, i64, i64)>,
}

impl OwnerDifference<'_> {
    /// Compares the lowest with the highest rank. Returns `None` if their peaks hardly differ.
    pub(super) fn between(all: &[PeakOwners]) -> Option<OwnerDifference<'_>> {
        let [low, high] = all else { return None };
        let more = high.bytes - low.bytes;
        if !is_uneven(low.bytes, high.bytes) {
            return None;
        }
        let of_low = |name: &str| low.owners.get(name).copied().unwrap_or(0);
        let mut owners: Vec<(&str, i64, i64)> =
            high.owners.iter().map(|(name, bytes)| (name.as_str(), *bytes, of_low(name))).collect();
        owners.retain(|(_, high, low)| (high - low).saturating_mul(UNEVEN) > more);
        owners.sort_by(|a, b| (b.1 - b.2, a.0).cmp(&(a.1 - a.2, b.0)));
        owners.truncate(MOST_NAMED);
        Some(OwnerDifference { low, high, owners })
    }

    pub(super) fn print(&self, printer: &mut Printer, options: &Options) {
        let OwnerDifference { low, high, owners } = self;
        let show = |bytes: i64| options.units.show(bytes);
        printer.line([
            Cell::new(
                format!("{} has {} more than {}", high.name, show(high.bytes - low.bytes), low.name),
                Style::Strong,
            ),
            format!(": {}, {} {}", high.text(options), low.name, low.text(options)).into(),
        ]);
        for (name, high, low) in owners {
            let before = if *low == 0 { "nothing".to_owned() } else { show(*low).to_string() };
            printer.plain(format!(
                "  {} more of {name}: {}, {} has {before}",
                show(high - low),
                show(*high),
                self.low.name
            ));
        }
    }

    pub(super) fn json(&self) -> Value {
        let owner = |(name, high, low): &(&str, i64, i64)| json!({ "what": name, "bytes": [high, low] });
        json!({
            "ranks": [self.high.rank, self.low.rank],
            "peak_bytes": [self.high.bytes, self.low.bytes],
            "owners": self.owners.iter().map(owner).collect::<Vec<Value>>(),
        })
    }
}
