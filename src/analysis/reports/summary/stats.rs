//! `memtrace summary --stats`: distributions of block sizes, lifetimes and call latencies.

use std::collections::BTreeMap;

use hdrhistogram::Histogram;
use memtrace_trace::EventName;
use memtrace_trace::columns::MAX_BYTES;
use memtrace_trace::memory::Effect;
use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use super::super::report::{Answer, Report, for_each_process, next};
use crate::error::Result;
use crate::options::{Flag, Options};
use crate::profile::flow_categories;
use crate::read::input::Input;
use crate::read::record::{Columns, Record};
use crate::read::stream::TraceFile;
use crate::read::symbols::{Symbol, SymbolTable};
use crate::render::heading::process_heading;
use crate::render::numbers::{bar, count, counted, share};
use crate::render::printer::{Cell, Printer, Side, Style, Table};
use crate::state::problems::Retries;
use crate::state::replay::{Metric, is_gpu};
use crate::state::replay_trace::replay_trace;

/// `memtrace summary --stats`.
pub(super) struct Stats;

/// The option that selects this report.
pub(super) const STATS: Flag = Flag::switch(
    "stats",
    "Show distributions of sizes, lifetimes and latencies, temporaries and retries instead",
);

impl Report for Stats {
    fn name(&self) -> &'static str {
        "summary --stats"
    }

    fn about(&self) -> &'static str {
        "Show distributions of sizes, lifetimes and latencies; temporaries; retries"
    }

    fn takes_host(&self) -> bool {
        true
    }

    fn run(&self, inputs: &[Input], options: &Options) -> Result<Answer> {
        let input = &inputs[0];
        let answer = for_each_process(input, options, |index, trace, printer, footer| {
            let mut numbers = RunStats::default();
            let replayed = replay_trace(
                trace,
                Columns::of(&["latency_ns", "requested_bytes", "api", "ts_ns"]),
                options,
                Metric::Allocated,
                flow_categories(trace, options)?,
                |row, replay| {
                    if replay.in_window() && options.device.is_none_or(|only| only == row.device) {
                        let counts_host = options.device.is_some();
                        let now = (replay.step, replay.phase);
                        numbers.feed(row, now, counts_host || is_gpu(row.device));
                    }
                },
            )?;
            footer.add(trace, &replayed, options);
            process_heading(printer, input, index);
            numbers.print(printer, &replayed.symbols, options);
            Ok(numbers.json(trace, &replayed.symbols))
        })?;
        let hints = vec![next("peak", input, "--by size"), next("ops", input, "")];
        Ok(Answer { next: hints, ..answer })
    }
}

/// The maximum number of distinct values that a [`Distribution`] counts one by one.
const MOST_DISTINCT: usize = 1 << 16;
/// The error of a quantile of a histogram with three digits, as a share of the quantile.
const HISTOGRAM_ERROR: f64 = 0.0005;

/// A distribution. It is exact for up to [`MOST_DISTINCT`] distinct values; with more, it becomes a
/// histogram, so that its memory is bounded. The maximum is always exact.
#[derive(Default)]
struct Distribution {
    /// The number of times that each value occurred; unused once there is a histogram.
    exact: FxHashMap<i64, u64>,
    histogram: Option<Histogram<u64>>,
    count: u64,
    max: i64,
}

/// The quantiles of a distribution.
struct Quantiles {
    p50: i64,
    p90: i64,
    p99: i64,
}

impl Distribution {
    fn add(&mut self, value: i64) {
        let value = value.max(0);
        self.count += 1;
        self.max = self.max.max(value);
        match &mut self.histogram {
            Some(histogram) => {
                // The histogram holds every value of up to 63 bits.
                histogram.record(value.cast_unsigned()).ok();
            }
            None => {
                *self.exact.entry(value).or_default() += 1;
                if self.exact.len() > MOST_DISTINCT {
                    self.histogram = histogram_of(&self.exact);
                    self.exact = FxHashMap::default();
                }
            }
        }
    }

    /// Returns the quantiles p50, p90 and p99: the smallest value at or below which at least 50, 90 or 99% of
    /// all values are.
    fn quantiles(&self) -> Quantiles {
        if let Some(histogram) = &self.histogram {
            let at = |quantile| {
                let value = histogram.value_at_quantile(quantile);
                histogram.median_equivalent(value).cast_signed().min(self.max)
            };
            return Quantiles { p50: at(0.5), p90: at(0.9), p99: at(0.99) };
        }
        let mut values: Vec<(i64, u64)> = self.exact.iter().map(|(value, times)| (*value, *times)).collect();
        values.sort_unstable();
        let at = |quantile: f64| {
            let rank = ((self.count as f64 * quantile).ceil() as u64).max(1);
            let mut seen = 0;
            let found = values.iter().find(|(_, times)| {
                seen += times;
                seen >= rank
            });
            found.map_or(0, |(value, _)| *value)
        };
        Quantiles { p50: at(0.5), p90: at(0.9), p99: at(0.99) }
    }

    /// Returns the maximum error of the quantiles, as a share of each quantile.
    fn error(&self) -> f64 {
        if self.histogram.is_some() { HISTOGRAM_ERROR } else { 0.0 }
    }

    fn json(&self) -> Value {
        let Quantiles { p50, p90, p99 } = self.quantiles();
        json!({
            "count": self.count,
            "p50": p50,
            "p90": p90,
            "p99": p99,
            "max": self.max,
            "quantile_error": self.error(),
        })
    }
}

/// Returns a histogram of values and their counts, with three significant digits.
fn histogram_of(values: &FxHashMap<i64, u64>) -> Option<Histogram<u64>> {
    // Three digits with automatic growth: this cannot fail.
    let mut histogram = Histogram::new(3).ok()?;
    histogram.auto(true);
    for (value, times) in values {
        histogram.record_n(value.cast_unsigned(), *times).ok();
    }
    Some(histogram)
}

/// The allocation of a block.
#[derive(Clone, Copy)]
struct Birth {
    ts_ns: i64,
    /// The step and phase of the allocation.
    during: (i64, Symbol),
}

#[derive(Default)]
struct RunStats {
    requested: Distribution,
    blocks: Distribution,
    lifetimes: Distribution,
    latencies: FxHashMap<(EventName, bool, Symbol), Distribution>,
    /// The number and bytes of blocks by size. The key is an exponent: blocks of at most that power of two
    /// that are larger than the next lower power.
    sizes: BTreeMap<u32, (u64, i64)>,
    born: FxHashMap<i64, Birth>,
    /// The number and bytes of blocks that were freed in the step and phase of their allocation.
    temporaries: (u64, i64),
    /// The difference between block size and requested size, in bytes, summed over the blocks whose requested
    /// size is known.
    rounding: i64,
    total: i64,
    retries: Retries,
}

impl RunStats {
    /// Adds a row. `now` is the current step and phase; a free row has its block's step and phase instead.
    /// `counts_blocks` is true if the blocks of the row's device count.
    fn feed(&mut self, row: &Record, now: (i64, Symbol), counts_blocks: bool) {
        let effect = row.counted_effect(Metric::Allocated).filter(|_| counts_blocks);
        match effect {
            // A `live` row repeats a block of an earlier part, so the block's age is unknown.
            Some(Effect::Alloc) if row.alloc_id != 0 && row.event != EventName::Live => {
                self.blocks.add(row.delta_bytes);
                self.total += row.delta_bytes;
                if row.requested_bytes >= 0 {
                    let requested = row.requested_bytes.min(MAX_BYTES.cast_signed());
                    self.requested.add(requested);
                    self.rounding += row.delta_bytes - requested;
                }
                let size = row.delta_bytes.max(1).cast_unsigned().next_power_of_two().ilog2();
                let (blocks, bytes) = self.sizes.entry(size).or_default();
                *blocks += 1;
                *bytes += row.delta_bytes;
                self.born.insert(row.alloc_id, Birth { ts_ns: row.ts_ns, during: now });
            }
            Some(Effect::Free) => {
                if let Some(birth) = self.born.remove(&row.alloc_id) {
                    self.lifetimes.add(row.ts_ns - birth.ts_ns);
                    if birth.during == now {
                        self.temporaries.0 += 1;
                        self.temporaries.1 -= row.delta_bytes;
                    }
                }
            }
            _ => {}
        }
        self.retries.feed(row);
        if row.latency_ns > 0 && row.event != EventName::Op {
            self.latencies.entry((row.event, row.status == 0, row.api)).or_default().add(row.latency_ns);
        }
    }

    /// Returns the latencies by call and event, in the order of the events.
    fn calls(&self, symbols: &SymbolTable) -> Vec<(String, &Distribution)> {
        let mut calls: Vec<_> = self
            .latencies
            .iter()
            .map(|((event, worked, api), spread)| {
                let failed = if *worked { "" } else { ", failed" };
                (*event, format!("{} ({event}{failed})", symbols.get(*api)), spread)
            })
            .collect();
        calls.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
        calls.into_iter().map(|(_, name, spread)| (name, spread)).collect()
    }

    fn print(&self, printer: &mut Printer, symbols: &SymbolTable, options: &Options) {
        let mut table = Table::new(&[
            ("", Side::Left),
            ("count", Side::Right),
            ("p50", Side::Right),
            ("p90", Side::Right),
            ("p99", Side::Right),
            ("max", Side::Right),
        ]);
        let bytes = |value| options.units.show(value).to_string();
        let size = |value| bytes(value).into();
        let mut is_estimated = false;
        let mut line = |name: String, spread: &Distribution, show: &dyn Fn(i64) -> Cell| {
            let Quantiles { p50, p90, p99 } = spread.quantiles();
            is_estimated |= spread.error() > 0.0;
            table.row([
                name.into(),
                Cell::new(count(spread.count), Style::Strong),
                show(p50),
                show(p90),
                show(p99),
                show(spread.max),
            ]);
        };
        line("requested size".to_owned(), &self.requested, &size);
        line("block size".to_owned(), &self.blocks, &size);
        line("lifetime".to_owned(), &self.lifetimes, &Cell::duration);
        for (name, spread) in self.calls(symbols) {
            line(name, spread, &Cell::duration);
        }
        printer.table(&table);
        if is_estimated {
            printer.line([Cell::new(
                format!(
                    "maxima are exact; a quantile of more than {} distinct values is within {:.2} %",
                    count(MOST_DISTINCT as u64),
                    HISTOGRAM_ERROR * 100.0
                ),
                Style::Faint,
            )]);
        }
        printer.gap();
        let mut table = Table::new(&[
            ("up to", Side::Right),
            ("blocks", Side::Right),
            ("", Side::Left),
            ("bytes", Side::Right),
        ]);
        let all = self.blocks.count.cast_signed();
        for (size, (blocks, sum)) in &self.sizes {
            table.row([
                bytes(1 << (*size).min(62)).into(),
                count(*blocks).into(),
                bar(share(blocks.cast_signed(), all), 24).into(),
                bytes(*sum).into(),
            ]);
        }
        printer.table(&table);
        printer.gap();
        printer.plain(format!(
            "temporaries (freed in the step and phase of their allocation): {}, {}",
            counted(self.temporaries.0, "block"),
            bytes(self.temporaries.1)
        ));
        printer.plain(format!(
            "rounding, beyond the requested sizes: {} of {}",
            bytes(self.rounding),
            bytes(self.total)
        ));
        printer.plain(format!(
            "{} (inferred), {}",
            counted(self.retries.count(), "allocation retry"),
            counted(self.retries.ooms, "OOM")
        ));
    }

    fn json(&self, trace: &TraceFile, symbols: &SymbolTable) -> Value {
        let mut calls = serde_json::Map::new();
        for (name, spread) in self.calls(symbols) {
            calls.insert(name, spread.json());
        }
        let sizes: Vec<Value> = self
            .sizes
            .iter()
            .map(|(size, (blocks, bytes))| {
                json!({ "up_to_bytes": 1_u64 << (*size).min(63), "blocks": blocks, "bytes": bytes })
            })
            .collect();
        json!({
            "file": trace.path.display().to_string(),
            "rank": trace.meta.rank,
            "requested_bytes": self.requested.json(),
            "block_bytes": self.blocks.json(),
            "lifetime_ns": self.lifetimes.json(),
            "latency_ns": calls,
            "sizes": sizes,
            "temporary_blocks": self.temporaries.0,
            "temporary_bytes": self.temporaries.1,
            "rounding_bytes": self.rounding,
            "allocated_bytes": self.total,
            "num_alloc_retries": self.retries.count(),
            "ooms": self.retries.ooms,
        })
    }
}

#[cfg(test)]
mod tests {
    use memtrace_trace::Row;

    use super::*;
    use crate::reports::{answer, find};
    use crate::state::replay::CPU;
    use crate::testing::TraceBuilder;

    /// Returns the JSON of the process of a trace.
    fn stats(trace: TraceBuilder) -> Value {
        let folder = std::env::temp_dir().join(format!("memtrace-stats-{:?}", std::thread::current().id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("a.csv"), trace.finish()).unwrap();
        let input = Input::open(&folder).unwrap();
        let answer = answer(find("summary --stats").unwrap(), &[input], &Options::default()).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        answer.json["processes"][0].clone()
    }

    #[test]
    fn a_block_that_is_freed_after_its_phase_is_no_temporary() {
        let mut trace = TraceBuilder::default();
        let row = |step, phase| Row { device: 0, step, phase, ..Row::default() };
        // No allocation follows the step and phase of each free.
        let kept = trace.alloc(512, row(0, "forward"));
        let scratch = trace.alloc(1024, row(0, "forward"));
        trace.free(scratch, 1024, row(0, "forward"));
        trace.raw(Row { event: EventName::Op, ..row(0, "backward") });
        trace.free(kept, 512, row(0, "forward"));
        let json = stats(trace);
        assert_eq!(
            (&json["temporary_blocks"], &json["temporary_bytes"]),
            (&json!(1), &json!(1024)),
            "{json}"
        );
    }

    #[test]
    fn summary_stats_count_cpu_tensors_if_the_trace_has_no_gpu() {
        let host = |trace: &mut TraceBuilder| {
            let row = Row { device: CPU, alloc_id: 2, requested_bytes: 4000, ..Row::default() };
            let alloc = Row { event: EventName::HostAlloc, delta_bytes: 4096, ..row };
            trace.change(alloc, [4096; 3]);
            trace.change(Row { alloc_id: 3, ..alloc }, [4096; 3]);
            trace.change(Row { event: EventName::HostFree, delta_bytes: -4096, ..row }, [-4096; 3]);
        };
        let mut trace = TraceBuilder::default();
        host(&mut trace);
        let json = stats(trace);
        let found = (&json["block_bytes"]["count"], &json["lifetime_ns"]["p50"], &json["rounding_bytes"]);
        assert_eq!(found, (&json!(2), &json!(2000), &json!(192)), "{json}");
        // Beside a GPU, they do not count.
        let mut trace = TraceBuilder::default();
        host(&mut trace);
        trace.alloc(512, Row::default());
        let json = stats(trace);
        let found = (&json["block_bytes"]["count"], &json["block_bytes"]["max"]);
        assert_eq!(found, (&json!(1), &json!(512)), "{json}");
    }

    #[test]
    fn summary_stats_quantiles_are_exact_for_few_values_and_close_for_many() {
        let mut few = Distribution::default();
        for value in [77_856_768, 512, 1024, 2048] {
            few.add(value);
        }
        let Quantiles { p50, p90, p99 } = few.quantiles();
        assert_eq!((p50, p90, p99, few.max, few.error()), (1024, 77_856_768, 77_856_768, 77_856_768, 0.0));

        let mut many = Distribution::default();
        let all = MOST_DISTINCT as i64 * 2;
        for value in 1..=all {
            many.add(value * 1_000_003);
        }
        assert_eq!((many.count, many.max), (all.cast_unsigned(), all * 1_000_003));
        assert!(many.exact.is_empty());
        let Quantiles { p50, p90, p99 } = many.quantiles();
        for (found, quantile) in [(p50, 0.5), (p90, 0.9), (p99, 0.99)] {
            let true_value = (all as f64 * quantile).ceil() * 1_000_003.0;
            assert!((found as f64 - true_value).abs() <= true_value * many.error(), "{quantile}: {found}");
        }
    }
}
