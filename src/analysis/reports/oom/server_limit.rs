//! A server that limits itself to a share of the card in which it has no room: vLLM's
//! `gpu_memory_utilization`.
//!
//! vLLM takes this share of the whole card. It subtracts the memory that its weights and a trial forward
//! need, and the rest becomes the KV cache. If nothing is left, or if less than the share is free at the
//! start, vLLM raises an error. No request fails then, so the trace has no OOM. The traced process records
//! the share when it ends (`mark_share` in the tracer).

use memtrace_trace::EventName;
use memtrace_trace::server_mark::ServerMark;
use memtrace_trace::units::Unit;
use serde_json::{Value, json};

use crate::error::Result;
use crate::options::Options;
use crate::read::record::{Columns, Record, Wanted};
use crate::read::stream::TraceFile;
use crate::read::symbols::SymbolTable;
use crate::read::together::RowReader;
use crate::render::printer::{Cell, Printer, Style};
use crate::state::replay::Metric;
use crate::state::replay_trace::replay_trace;

/// The share of the card to which vLLM limits itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ServerPart {
    /// `gpu_memory_utilization`, from 0 to 1.
    part: f64,
    /// The number of blocks of vLLM's KV cache; 0 if it has no cache. If only the existence of a cache is
    /// known, the value is 1.
    blocks: i64,
}

impl ServerPart {
    /// Returns the remedy after an OOM in the trial forward, or `None` if the KV cache already exists,
    /// because the trial forward runs before.
    pub(super) fn smaller_trial(&self) -> Option<String> {
        (self.blocks == 0).then(|| {
            "vLLM: a smaller max_num_batched_tokens (and max_num_seqs), so that the trial forward needs less; \
             gpu_memory_utilization does not help, because it limits only the KV cache"
                .to_owned()
        })
    }

    /// Returns the remedy after an OOM for a server with a KV cache, or `None` without one. The cache takes
    /// all memory that the share allows, so a smaller share leaves room for the `lacking` bytes.
    pub(super) fn less_cache(&self, lacking: i64, capacity: i64) -> Option<String> {
        let lower = hundredths(self.part - lacking as f64 / capacity.max(1) as f64, f64::floor) - 0.01;
        (self.blocks > 0 && lower > 0.0).then(|| {
            format!(
                "vLLM: gpu_memory_utilization={lower:.2} or less, now {}: the KV cache takes the \
                 rest of this share of the card; or a smaller max_num_seqs",
                self.part
            )
        })
    }
}

/// Rounds a number to two decimals with `round`, such as `f64::floor`.
fn hundredths(value: f64, round: fn(f64) -> f64) -> f64 {
    round(value * 100.0) / 100.0
}

/// Reads the share that a process recorded at its end.
#[derive(Default)]
pub(super) struct ServerMarks {
    last: Option<ServerPart>,
    /// The recorded copy of the settings may lack the size of the cache, so other marks also show whether a cache
    /// exists.
    has_cache: bool,
}

impl ServerMarks {
    /// Returns the share of the server, if there is one.
    pub(super) fn part(&self) -> Option<ServerPart> {
        self.last.map(|server| ServerPart { blocks: server.blocks.max(self.has_cache.into()), ..server })
    }
}

impl RowReader for ServerMarks {
    fn wanted(&self) -> Wanted {
        Wanted::all_events(Columns::of(&["seq"])).plus(EventName::Mark, Columns::of(&["name"]))
    }

    fn feed(&mut self, row: &Record, symbols: &SymbolTable) {
        if row.event != EventName::Mark {
            return;
        }
        match ServerMark::parse(&symbols.get(row.name)) {
            Some(ServerMark::Cache { .. }) => self.has_cache = true,
            // Only the mark at the end of the process counts. After an earlier mark, the server may get a cache that
            // no further mark mentions.
            Some(ServerMark::Share { part, blocks, has_ended: true }) => {
                self.has_cache |= blocks > 0;
                self.last = Some(ServerPart { part, blocks });
            }
            _ => {}
        }
    }
}

/// A server that did not start because its share of the card was too small or was not free; sizes are in
/// bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Refused {
    part: f64,
    /// The memory of the card.
    capacity: i64,
    /// The free memory of the card when the process began to use it.
    free: i64,
    /// The memory of other processes.
    others: i64,
    /// The peak of torch's blocks: the weights and the trial forward.
    needed: i64,
}

impl Refused {
    /// Returns the server that ended without a KV cache; `None` if it got a cache or the card is unknown. `server` is
    /// the share that the trace records.
    ///
    /// # Errors
    /// When the trace cannot be read.
    pub(super) fn find(
        trace: &TraceFile,
        server: Option<ServerPart>,
        options: &Options,
    ) -> Result<Option<Refused>> {
        let Some(ServerPart { part, blocks: 0 }) = server else { return Ok(None) };
        let mut free = None;
        let columns = Columns::of(&["device_free_bytes"]);
        let replayed =
            replay_trace(trace, columns, options, Metric::Allocated, Default::default(), |row, replay| {
                if free.is_none() && row.device_free_bytes >= 0 {
                    let reserved = replay.find(row.device).map_or(0, |device| device.totals.reserved);
                    free = Some((row.device, row.device_free_bytes + reserved));
                }
            })?;
        let Some((ordinal, free)) = free else { return Ok(None) };
        let device = replayed.replay.find(ordinal);
        let capacity = trace.meta.total_bytes(ordinal);
        let found = Refused {
            part,
            capacity,
            free,
            others: device.and_then(|device| device.others()).unwrap_or(0),
            needed: device.map_or(0, |device| device.peak(Metric::Allocated).bytes),
        };
        Ok((capacity > 0).then_some(found))
    }

    fn allowed(&self) -> i64 {
        (self.part * self.capacity as f64).ceil() as i64
    }

    /// Returns true if the share is larger than the memory that was free at the start.
    fn is_too_large(&self) -> bool {
        self.allowed() > self.free
    }

    /// Returns the verdict in the terms of `memtrace oom`: another process, or a limit.
    fn verdict(&self) -> &'static str {
        let is_taken = self.is_too_large() && self.allowed() <= self.free + self.others;
        if is_taken { "another process" } else { "a limit" }
    }

    fn because(&self, units: Unit) -> String {
        let show = |bytes: i64| units.show(bytes).to_string();
        let (part, allowed) = (self.part, self.allowed());
        let asks =
            format!("vLLM's gpu_memory_utilization={part} is {} of {}", show(allowed), show(self.capacity));
        if self.is_too_large() {
            let others = match self.others {
                0 => String::new(),
                bytes => format!("; other processes hold {}", show(bytes)),
            };
            return format!("{asks}, and {} was free at the start{others}", show(self.free));
        }
        let left = allowed - self.needed;
        if left > 0 {
            return format!(
                "{asks}; weights and a trial forward took {}; the remaining {} cannot hold the KV cache of \
                 one sequence",
                show(self.needed),
                show(left)
            );
        }
        format!(
            "{asks}; weights and a trial forward took {}, so nothing is left for the KV cache",
            show(self.needed)
        )
    }

    fn missing(&self) -> i64 {
        (if self.is_too_large() { self.allowed() - self.free } else { self.needed - self.allowed() }).max(0)
    }

    fn tries(&self, units: Unit) -> Vec<String> {
        let capacity = self.capacity as f64;
        let most = hundredths(self.free as f64 / capacity, f64::floor);
        if self.is_too_large() {
            let mut all = vec![format!("gpu_memory_utilization={most:.2} or less")];
            if self.others > 0 {
                all.insert(
                    0,
                    "end the other process (nvidia-smi lists them), or choose another GPU: CUDA_VISIBLE_DEVICES"
                        .to_owned(),
                );
            }
            return all;
        }
        let least =
            hundredths(self.needed as f64 / capacity, f64::ceil).max(hundredths(self.part, f64::ceil));
        let mut all = Vec::new();
        if least + 0.01 <= most {
            all.push(format!(
                "gpu_memory_utilization above {least:.2}, at most {most:.2} here: each 0.01 more is {} of KV cache",
                units.show((capacity / 100.0) as i64)
            ));
        }
        all.push(
            "a smaller max_num_batched_tokens (less for the trial forward), or a smaller max_model_len (less KV \
             cache per sequence)"
                .to_owned(),
        );
        all
    }

    /// Prints the verdict, the reason and the remedies.
    pub(super) fn print(&self, printer: &mut Printer, options: &Options) {
        let missing = match self.missing() {
            0 => String::new(),
            bytes => format!(": {} missing", options.units.show(bytes)),
        };
        printer.line([Cell::new("the server did not start", Style::Alarm)]);
        printer.gap();
        printer.line([
            "verdict: ".into(),
            Cell::new(self.verdict(), Style::Strong),
            format!("{missing}. {}.", self.because(options.units)).into(),
        ]);
        for advice in self.tries(options.units) {
            printer.plain(format!("  try: {advice}"));
        }
    }

    pub(super) fn json(&self, trace: &TraceFile) -> Value {
        json!({
            "file": trace.path.display().to_string(),
            "rank": trace.meta.rank,
            "verdict": self.verdict(),
            "because": self.because(Unit::B),
            "try": self.tries(Unit::B),
            "gpu_memory_utilization": self.part,
            "allowed_bytes": self.allowed(),
            "free_bytes": self.free,
            "others_bytes": self.others,
            "needed_bytes": self.needed,
            "capacity_bytes": self.capacity,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: i64 = 1 << 30;

    #[test]
    fn oom_names_a_part_of_the_card_that_has_room() {
        let small = Refused {
            part: 0.15,
            capacity: 8 * GIB,
            free: 31 * GIB / 4,
            needed: 3 * GIB / 2,
            ..Refused::default()
        };
        assert_eq!(small.verdict(), "a limit");
        assert!(small.because(Unit::default()).ends_with("so nothing is left for the KV cache"));
        let first = |refused: &Refused| refused.tries(Unit::default()).remove(0);
        assert_eq!(
            first(&small),
            "gpu_memory_utilization above 0.19, at most 0.96 here: each 0.01 more is 81.92 MiB of KV cache"
        );
        // Some memory is left, but too little for a sequence: the reason names the memory that is left.
        assert!(Refused { part: 0.2, ..small }.because(Unit::default()).contains("remaining 102.40 MiB"));
        // The share is larger than the free memory. Without another process on the card, the verdict is a
        // limit.
        let large = Refused { part: 0.99, needed: 0, ..small };
        assert_eq!(
            (large.verdict(), first(&large).as_str()),
            ("a limit", "gpu_memory_utilization=0.96 or less")
        );
        let taken = Refused { part: 0.9, free: 5 * GIB, others: 3 * GIB, needed: 0, ..small };
        assert_eq!(taken.verdict(), "another process");
        assert_eq!(taken.tries(Unit::default()).len(), 2);
        // A larger share does not help: the first remedy is a smaller trial forward.
        let full = Refused { part: 0.9, needed: 8 * GIB - GIB / 3, ..small };
        assert!(first(&full).starts_with("a smaller max_num_batched_tokens"));
    }
}
