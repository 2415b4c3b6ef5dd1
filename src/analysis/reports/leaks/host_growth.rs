//! The growth of host memory by part, measured over the samples of a trace.

use memtrace_trace::host::parts::CPU_TENSORS;
use serde_json::{Value, json};

use super::super::host_owners::{Allocated, HostOwners, allocated_at, allocated_json};
use super::super::ledger::host::part_about;
use crate::error::Result;
use crate::options::Options;
use crate::read::stream::TraceFile;
use crate::render::printer::{Cell, Printer, Side, Style, Table};
use crate::state::fitted_line::fit;
use crate::state::host_memory::{HostMemory, KINDS, WITHOUT_FILE, When};

/// The minimum number of samples that remain after the warm-up; see [`WARM_UP`].
const FEWEST: usize = 4;
/// The first part of the samples, one in `WARM_UP`, is left out because caches fill then.
const WARM_UP: usize = 4;
/// If at most one sample in `LAST_PART` follows the sample with the most memory, these samples are of the
/// program's end.
const LAST_PART: usize = 10;
/// Growth is ignored if it is less than this many bytes (the first number), or less than one part in this
/// many of the process's peak resident memory (the second number).
const LEAST: (i64, i64) = (16 << 20, 50);
/// The minimum coefficient of determination (R²) of the fitted line. Memory that rises once and then stays
/// does not reach it, so it does not count as growth.
const LEAST_R2: f64 = 0.8;

/// A part that grows.
pub(super) struct HostPartGrowth {
    what: String,
    /// The growth in bytes, from the first to the last sample that counts.
    bytes: i64,
    per_second: f64,
    /// The growth in bytes per step; `None` if too few samples were taken during steps, or if the growth does
    /// not follow the steps.
    per_step: Option<f64>,
    r2: f64,
    advice: &'static str,
    /// The code of the CPU tensors that grew; empty for other parts.
    owners: Vec<Allocated>,
}

/// The name of a part, the advice about it, and its bytes over time.
type Series = (String, &'static str, Vec<(When, i64)>);

/// The parts of host memory that grow.
pub(super) struct HostGrowth {
    /// The growing parts, fastest first.
    all: Vec<HostPartGrowth>,
    /// The growth of the container's page cache, in bytes; 0 if it is small or unknown. The kernel can
    /// reclaim the page cache, so it is not a leak.
    page_cache: i64,
    /// The length in seconds of the time that was examined. `samples` is the number of samples in it.
    seconds: f64,
    samples: usize,
    /// The first and the last moment of that time, in ns.
    ends_ns: (i64, i64),
}

impl HostGrowth {
    /// Finds the parts that grow. Returns `None` for a trace with too few samples.
    pub(super) fn new(memory: &HostMemory) -> Option<HostGrowth> {
        let samples: Vec<_> = memory.quick.iter().map(|sample| (sample.when.ts_ns, sample.rss)).collect();
        let end_ns = end_of_growth(&samples, memory.last.ts_ns);
        let full: Vec<_> = memory.whole().filter(|full| full.when.ts_ns <= end_ns).collect();
        let mut names: Vec<&str> =
            full.iter().flat_map(|full| full.parts.iter().map(|part| part.name.as_str())).collect();
        names.sort_unstable();
        names.dedup();
        let quick = within_run(&memory.quick, |sample| sample.when.ts_ns <= end_ns);
        if quick.len() < FEWEST {
            return None;
        }
        let mut series: Vec<Series> = Vec::new();
        let full = within_run(&full, |_| true);
        if full.len() >= FEWEST {
            for name in names {
                let bytes = |part: Option<i64>| part.unwrap_or(0);
                let points = full.iter().map(|full| {
                    let part = full.parts.iter().find(|part| part.name == name);
                    (full.when, bytes(part.map(|part| part.pss + part.swap)))
                });
                series.push((name.to_owned(), part_about(name, memory.has_tensors).1, points.collect()));
            }
        } else {
            for (at, name) in KINDS.into_iter().enumerate() {
                let points = quick.iter().map(|sample| (sample.when, sample.kinds[at])).collect();
                series.push((
                    name.to_owned(),
                    "trace a longer run: its samples show what this memory consists of",
                    points,
                ));
            }
        }
        let children: Vec<_> = memory.children_with_shares().collect();
        let children = within_run(&children, |sample| sample.when.ts_ns <= end_ns);
        if children.len() >= FEWEST {
            let points = children.iter().map(|sample| (sample.when, sample.pss.max(0))).collect();
            series.push((
                "child processes".to_owned(),
                "workers copy even Python objects that they only read: give them arrays instead",
                points,
            ));
        }
        let highest = memory.peak_rss();
        let least = LEAST.0.max(highest / LEAST.1);
        let mut all: Vec<HostPartGrowth> = series
            .into_iter()
            .filter_map(|(what, advice, points)| growth(what, advice, &points, least))
            .collect();
        all.sort_by(|a, b| b.per_second.total_cmp(&a.per_second));
        let (first, last) = (quick.first()?, quick.last()?);
        let page_cache = match (first.container.file, last.container.file) {
            (then, now) if then >= 0 && now >= 0 => now - then,
            _ => 0,
        };
        Some(HostGrowth {
            all,
            page_cache: if page_cache >= least { page_cache } else { 0 },
            seconds: (last.when.ts_ns - first.when.ts_ns) as f64 / 1e9,
            samples: quick.len(),
            ends_ns: (first.when.ts_ns, last.when.ts_ns),
        })
    }

    /// Names the code of the CPU tensors that grew, if this is known.
    ///
    /// # Errors
    /// When the trace cannot be read.
    pub(super) fn name_owners(
        &mut self,
        trace: &TraceFile,
        memory: &HostMemory,
        options: &Options,
    ) -> Result<()> {
        if self.all.is_empty() {
            return Ok(());
        }
        let owners = HostOwners::read(trace, memory, &[self.ends_ns.0, self.ends_ns.1], options)?;
        let is_of_tensors = |what: &str| what == WITHOUT_FILE || what.starts_with(CPU_TENSORS);
        for growth in self.all.iter_mut().filter(|growth| is_of_tensors(&growth.what)) {
            growth.owners = owners[1].tensors_since(&owners[0]).1;
        }
        Ok(())
    }

    pub(super) fn print(&self, printer: &mut Printer, options: &Options) {
        let show = |bytes: f64| options.units.show(bytes as i64).to_string();
        if self.all.is_empty() {
            printer.plain(format!("host memory: no growth over {:.0} s", self.seconds));
        } else {
            let sum: f64 = self.all.iter().map(|growth| growth.per_second).sum();
            printer.line([
                "host memory: ".into(),
                Cell::new(format!("{} a second", show(sum)), Style::Alarm),
                format!(" of growth over {:.0} s", self.seconds).into(),
            ]);
            let mut table = Table::new(&[
                ("a second", Side::Right),
                ("per step", Side::Right),
                ("fit", Side::Right),
                ("bytes", Side::Right),
                ("held by", Side::Left),
                ("advice", Side::Left),
            ]);
            for growth in self.all.iter().take(options.top.unwrap_or(10)) {
                table.row([
                    Cell::new(show(growth.per_second), Style::Strong),
                    growth.per_step.map_or("-".to_owned(), show).into(),
                    format!("{:.2}", growth.r2).into(),
                    options.units.show(growth.bytes).to_string().into(),
                    growth.what.as_str().into(),
                    Cell::new(growth.advice, Style::Faint),
                ]);
            }
            printer.table(&table);
            for growth in &self.all {
                if let Some(owners) = allocated_at(&growth.owners, options) {
                    printer.plain(format!("{}: of this, CPU tensors {owners}", growth.what));
                }
            }
        }
        if self.page_cache > 0 {
            printer.plain(format!(
                "the container's page cache grew by {}: files that were read or written. This is not a \
                 leak: the kernel frees it when memory runs short",
                options.units.show(self.page_cache)
            ));
        }
    }

    pub(super) fn json(&self) -> Value {
        let all: Vec<Value> = self
            .all
            .iter()
            .map(|growth| {
                json!({
                    "held_by": growth.what, "bytes": growth.bytes, "bytes_per_second": growth.per_second,
                    "bytes_per_step": growth.per_step, "r2": growth.r2,
                    "allocated_at": allocated_json(&growth.owners), "advice": growth.advice,
                })
            })
            .collect();
        json!({
            "growth": all, "page_cache_bytes": self.page_cache, "seconds": self.seconds, "samples": self.samples,
        })
    }
}

/// Returns the samples after the warm-up and before the end of the run.
fn within_run<T>(samples: &[T], is_before_end: impl Fn(&T) -> bool) -> &[T] {
    let samples = &samples[..samples.iter().rposition(is_before_end).map_or(0, |last| last + 1)];
    &samples[samples.len() / WARM_UP..]
}

/// Returns the time after which samples do not count, in ns. A program that ends frees its memory, which would
/// distort the trend: before its last work (at `worked_ns`) if the end takes long, or after it. `samples` has
/// times and resident bytes.
fn end_of_growth(samples: &[(i64, i64)], worked_ns: i64) -> i64 {
    // `max_by_key` returns the last of several equal peaks, so reverse the order to get the first.
    let highest = samples.iter().enumerate().rev().max_by_key(|(_, (_, rss))| *rss);
    let Some((at, (highest_ns, _))) = highest else { return worked_ns };
    let is_end = (samples.len() - 1 - at) * LAST_PART <= samples.len();
    if is_end { *highest_ns } else { worked_ns.max(*highest_ns) }
}

/// Returns the bytes at `ts_ns`, interpolated between the points before and after it. The points may be far
/// apart, because a large process is sampled seldom.
fn bytes_at(points: &[(When, i64)], ts_ns: i64) -> i64 {
    let next = points.partition_point(|(when, _)| when.ts_ns <= ts_ns);
    let Some((before, then)) = points.get(next.saturating_sub(1)) else { return 0 };
    let Some((after, later)) = points.get(next) else { return *then };
    let passed = (ts_ns - before.ts_ns) as f64 / (after.ts_ns - before.ts_ns).max(1) as f64;
    then + ((later - then) as f64 * passed.clamp(0.0, 1.0)) as i64
}

/// Returns the growth of a part, or `None` if the part does not grow steadily.
fn growth(what: String, advice: &'static str, points: &[(When, i64)], least: i64) -> Option<HostPartGrowth> {
    let (first, last) = (points.first()?, points.last()?);
    let bytes = last.1 - first.1;
    let by_time: Vec<(f64, f64)> =
        points.iter().map(|(when, bytes)| (when.ts_ns as f64 / 1e9, *bytes as f64)).collect();
    let line = fit(&by_time);
    // Growth must continue to the end: the second half of the time alone must grow, too.
    let middle = bytes_at(points, first.0.ts_ns + (last.0.ts_ns - first.0.ts_ns) / 2);
    if bytes < least || line.r2 < LEAST_R2 || line.slope <= 0.0 || last.1 - middle < bytes / 4 {
        return None;
    }
    let by_step: Vec<(f64, f64)> = points
        .iter()
        .filter(|(when, _)| when.step >= 0)
        .map(|(when, bytes)| (when.step as f64, *bytes as f64))
        .collect();
    let per_step = (by_step.len() >= FEWEST).then(|| fit(&by_step).slope).filter(|slope| *slope > 0.0);
    Some(HostPartGrowth {
        what,
        bytes,
        per_second: line.slope,
        per_step,
        r2: line.r2,
        advice,
        owners: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(levels: &[i64]) -> Vec<(When, i64)> {
        let when =
            |at: usize| When { ts_ns: at as i64 * 1_000_000_000, step: at as i64 * 2, ..When::default() };
        levels.iter().enumerate().map(|(at, level)| (when(at), level << 20)).collect()
    }

    #[test]
    fn leaks_of_the_host_end_before_the_program_frees_its_memory() {
        let rise: Vec<(i64, i64)> = (0..40).map(|at| (at, 100 + at)).collect();
        let with = |after: &[(i64, i64)], worked| end_of_growth(&[&rise[..], after].concat(), worked);
        // Memory falls at the end, before or after the last work.
        assert_eq!((with(&[(40, 90), (41, 90)], 45), with(&[(40, 90), (41, 90)], 39)), (39, 39));
        // Memory falls long before the end.
        let after: Vec<(i64, i64)> = (40..60).map(|at| (at, 90)).collect();
        assert_eq!((with(&after, 59), end_of_growth(&[], 7)), (59, 7));
    }

    #[test]
    fn leaks_of_the_host_are_lines_and_no_levels() {
        let of = |levels: &[i64]| growth("heap".to_owned(), "", &points(levels), 16 << 20);
        let line = of(&[100, 110, 120, 130, 140, 150]).unwrap();
        assert_eq!((line.bytes >> 20, line.per_second as i64 >> 20), (50, 10));
        assert_eq!(line.per_step.map(|step| step as i64 >> 20), Some(5));
        assert!(of(&[100, 200, 200, 200, 200, 200]).is_none(), "a cache that fills once");
        assert!(of(&[100, 120, 140, 160, 160, 160]).is_none(), "a cache that fills slowly");
        assert!(of(&[100, 150, 100, 150, 100, 150]).is_none() && of(&[100, 101, 102, 103]).is_none());
        assert!(of(&[]).is_none() && of(&[5]).is_none() && of(&[200, 150, 100]).is_none());
        // Samples at irregular times: the middle is the middle of the time, not of the list. A steady rise is
        // found, and a cache that fills early is not.
        let late = |levels: [(i64, i64); 4]| {
            let when = |seconds: i64| When { ts_ns: seconds * 1_000_000_000, ..When::default() };
            let points: Vec<_> = levels.iter().map(|(at, level)| (when(*at), level << 20)).collect();
            growth("heap".to_owned(), "", &points, 16 << 20)
        };
        let line = late([(10, 400), (35, 1290), (45, 1830), (49, 2050)]).unwrap();
        assert_eq!(line.bytes >> 20, 1650);
        assert!(late([(10, 400), (11, 1000), (12, 1050), (49, 1060)]).is_none(), "a cache that fills early");
    }
}
