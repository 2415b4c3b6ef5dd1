//! `memtrace export --to digest`: a small Parquet file per process, with the data that the queries about a
//! whole job need.
//!
//! A trace is large and stays on the machine where it was written. Its digest has the results of `summary`,
//! `peak`, `frag` and `leaks`, computed by the same functions as in those reports. It also has the four parts
//! of the memory in use after each step, and a row for each step on each device. DuckDB, Ray or Spark can
//! read the digests of ten thousand ranks in one query.

mod columns;
mod steps;
mod table;

use memtrace_trace::EventName;
use parquet::errors::ParquetError;
use rustc_hash::FxHashMap;

use columns::DigestColumn as C;
pub use columns::{ColumnType, DigestColumn, RowKind};
use steps::{StepMemory, Steps};
use table::DigestRow;

use super::export::{Export, Job, OutputKind, trace_stem};
use crate::error::{Error, Result};
use crate::options::Options;
use crate::profile::flow_categories;
use crate::read::stream::TraceFile;
use crate::read::symbols::{NO_MODULE, Symbol, SymbolTable};
use crate::render::numbers::counted;
use crate::reports::frag::{Fragmentation, fragmentation};
use crate::reports::growth::DeviceParts;
use crate::reports::leaks::{Findings, Leak, Reading, findings};
use crate::state::group::block_category;
use crate::state::host_memory::HostMemory;
use crate::state::moment::NamedMoment;
use crate::state::problems::Retries;
use crate::state::replay::{Block, Device, Metric, Owner};
use crate::state::replay_trace::Replayed;

/// The export `--to digest`.
pub(super) struct Digest;

impl Export for Digest {
    fn name(&self) -> &'static str {
        "digest"
    }

    fn about(&self) -> &'static str {
        "A small Parquet file per process, for jobs of many ranks: peaks by step, owners, fragmentation, \
         growth"
    }

    fn output_kind(&self, _: &Options) -> OutputKind {
        OutputKind::FilePerTrace(".digest.parquet")
    }

    fn open_with(&self) -> &'static str {
        "duckdb -c \"from 'FILE'\""
    }

    fn write(&self, job: &mut Job<'_>) -> Result<()> {
        let trace = job.trace()?;
        let failed = |error: ParquetError| -> Error {
            memtrace_trace::Error::Io { path: job.place.to_owned(), source: std::io::Error::other(error) }
                .into()
        };
        let mut steps = Steps::default();
        let flow = flow_categories(trace, job.options)?;
        let symbols = SymbolTable::default();
        let mut host = HostMemory::new(&symbols);
        let Reading { whole: replayed, found, levels, .. } =
            findings(trace, job.options, flow.clone(), &symbols, &mut [&mut host], |row, replay| {
                steps.feed(row, replay, job.options);
            })?;
        let at_peak = NamedMoment::Peak(Metric::Reserved);
        let held = fragmentation(trace, &at_peak, job.options, flow)?.map_or_else(Vec::new, |(_, held)| held);
        let mut rows = vec![with_host(process(&replayed, &found), &host)];
        let parts = DeviceParts::all(&levels, job.options);
        let no_parts = DeviceParts::default();
        for device in replayed.gpus(job.options) {
            let row = device_row(trace, &replayed, device, &held, &steps);
            rows.push(match parts.get(&device.ordinal).and_then(|parts| parts.growth) {
                Some(growth) => with_parts(row, growth),
                None => row,
            });
            rows.extend(owners(&replayed, device));
        }
        rows.extend(found.leaks.iter().map(leak));
        let steps = steps.list.iter().map(|((device, step), held)| {
            let row = step_row(trace, &replayed, *device, *step, held);
            match parts.get(device).unwrap_or(&no_parts).by_step.get(step) {
                Some(parts) => with_parts(row, *parts),
                None => row,
            }
        });
        let file = trace_stem(&trace.path);
        let named = |row: DigestRow| {
            row.int(C::Rank, trace.meta.rank.into())
                .int(C::WorldSize, trace.meta.world_size.into())
                .text(C::Host, &trace.meta.host)
                .text(C::RunId, &trace.meta.run_id)
                .text(C::File, &file)
        };
        let out = job.create()?;
        let meta = serde_json::to_string(&trace.meta).unwrap_or_default();
        let (out, count) =
            table::write(rows.into_iter().chain(steps).map(named), meta, out).map_err(failed)?;
        job.add_to_footer(trace, &replayed);
        job.finish_file(out, counted(count, "row"))
    }
}

fn process(replayed: &Replayed, found: &Findings) -> DigestRow {
    let counts = &replayed.replay.counts;
    let ooms = counts.of(EventName::Oom);
    DigestRow::new(RowKind::Process)
        .count(C::Rows, counts.rows)
        .count(C::Lost, counts.lost)
        .int(C::Complete, i64::from(!replayed.replay.problems.unfinished))
        .int(C::ToNs, replayed.replay.ts_ns)
        .count(C::Ooms, ooms)
        .count(C::Retries, counts.retries.count())
        .count(C::Steps, found.steps as u64)
        .float(C::BytesPerStep, found.growth.slope)
        .float(C::R2, found.growth.r2)
        .count(C::Blocks, found.held.blocks)
        .int(C::Bytes, found.held.bytes)
}

fn with_host(row: DigestRow, host: &HostMemory) -> DigestRow {
    let Some(peak) = host.quick_at(&NamedMoment::Peak(Metric::Used)) else { return row };
    let row = row.int(C::HostPeak, peak.rss).int(C::HostPeakStep, peak.when.step);
    if peak.container.limit < 0 { row } else { row.int(C::HostLimit, peak.container.limit) }
}

fn device_row(
    trace: &TraceFile,
    replayed: &Replayed,
    device: &Device,
    held: &[Fragmentation],
    steps: &Steps,
) -> DigestRow {
    let peak = device.peak(Metric::Allocated);
    let own =
        || steps.list.iter().filter(|((ordinal, _), _)| *ordinal == device.ordinal).map(|(_, step)| step);
    let retries = own().fold(Retries::default(), |sum, step| sum + step.retries);
    let mut row = with_owner(DigestRow::new(RowKind::Device), replayed, &peak.owner)
        .int(C::Device, device.ordinal.into())
        .int(C::Step, peak.owner.step)
        .int(C::PeakAllocated, peak.bytes)
        .int(C::PeakNs, peak.ts_ns)
        .int(C::PeakReserved, device.peak(Metric::Reserved).bytes)
        .int(C::PeakUsed, device.peak(Metric::Used).bytes)
        .int(C::EndAllocated, device.totals.allocated)
        .int(C::EndReserved, device.totals.reserved)
        .int(C::Capacity, trace.meta.total_bytes(device.ordinal))
        .count(C::Allocations, own().map(|step| step.allocations).sum())
        .int(C::AllocatedSum, own().fold(0, |sum: i64, step| sum.wrapping_add(step.allocated_sum)))
        .count(C::Ooms, retries.ooms)
        .count(C::Retries, retries.count())
        .int(C::Detailed, i64::from(replayed.replay.detail.has(peak.owner.step, &trace.meta)));
    if let Some(held) = held.iter().find(|held| held.ordinal == device.ordinal) {
        row = row
            .int(C::FragReserved, held.reserved)
            .int(C::FragRequested, held.requested)
            .int(C::FragRounding, held.allocated - held.requested)
            .int(C::FragPending, held.pending)
            .int(C::FragHoles, held.holes)
            .int(C::FragEmpty, held.empty)
            .int(C::FragLargest, held.largest);
    }
    row
}

/// Returns a row for each group of blocks at the peak of a device, by category and module, the largest first.
fn owners(replayed: &Replayed, device: &Device) -> Vec<DigestRow> {
    let mut groups: FxHashMap<(&'static str, Symbol), (u64, i64)> = FxHashMap::default();
    let blocks: Vec<Block> = replayed.replay.at_peak(device.ordinal, false);
    for block in &blocks {
        let (blocks, bytes) = groups.entry((block_category(block), block.owner.module)).or_default();
        *blocks += 1;
        *bytes += block.bytes;
    }
    let step = device.peak(Metric::Allocated).owner.step;
    let named = |((category, module), group)| (replayed.symbols.or(module, NO_MODULE), category, group);
    let mut groups: Vec<(String, &'static str, (u64, i64))> = groups.into_iter().map(named).collect();
    groups.sort_by(|a, b| b.2.1.cmp(&a.2.1).then_with(|| (&a.0, a.1).cmp(&(&b.0, b.1))));
    let row = |(module, category, (blocks, bytes)): (String, &'static str, (u64, i64))| {
        DigestRow::new(RowKind::Owner)
            .int(C::Device, device.ordinal.into())
            .int(C::Step, step)
            .text(C::Module, module)
            .text(C::Category, category)
            .int(C::Bytes, bytes)
            .count(C::Blocks, blocks)
    };
    groups.into_iter().map(row).collect()
}

fn step_row(
    trace: &TraceFile,
    replayed: &Replayed,
    device: i32,
    step: i64,
    memory: &StepMemory,
) -> DigestRow {
    with_owner(DigestRow::new(RowKind::Step), replayed, &memory.owner)
        .int(C::Device, device.into())
        .int(C::Step, step)
        .int(C::FromNs, memory.from_ns)
        .int(C::ToNs, memory.to_ns)
        .int(C::PeakAllocated, memory.peaks[Metric::Allocated as usize])
        .int(C::PeakReserved, memory.peaks[Metric::Reserved as usize])
        .int(C::PeakUsed, memory.peaks[Metric::Used as usize])
        .int(C::PeakNs, memory.peak_ns)
        .int(C::EndAllocated, memory.end_allocated)
        .int(C::EndReserved, memory.end_reserved)
        .count(C::Allocations, memory.allocations)
        .int(C::AllocatedSum, memory.allocated_sum)
        .count(C::Ooms, memory.retries.ooms)
        .count(C::Retries, memory.retries.count())
        .int(C::Detailed, i64::from(replayed.replay.detail.has(step, &trace.meta)))
}

/// Sets the columns `kept_bytes`, `larger_steps_bytes`, `cached_bytes` and `outside_bytes` to `parts`, in
/// this order.
fn with_parts(row: DigestRow, parts: [i64; 4]) -> DigestRow {
    let columns = [C::Kept, C::LargerSteps, C::Cached, C::Outside];
    columns.into_iter().zip(parts).fold(row, |row, (column, bytes)| row.int(column, bytes))
}

fn leak(leak: &Leak) -> DigestRow {
    let row = DigestRow::new(RowKind::Leak)
        .text(C::Phase, &leak.phase)
        .text(C::Op, &leak.op)
        .text(C::Module, &leak.module)
        .text(C::Category, leak.category)
        .int(C::Bytes, leak.bytes)
        .count(C::Blocks, leak.blocks)
        .float(C::BytesPerStep, leak.fit.slope)
        .float(C::R2, leak.fit.r2)
        .int(C::FirstStep, leak.first)
        .int(C::LastStep, leak.last)
        .count(C::Steps, leak.steps as u64);
    match &leak.code {
        Some(line) => row.text(C::Line, line),
        None => row,
    }
}

/// Sets the phase, the op and the module, except those that are unknown, which stay null.
fn with_owner(mut row: DigestRow, replayed: &Replayed, owner: &Owner) -> DigestRow {
    for (column, symbol) in [(C::Phase, owner.phase), (C::Op, owner.op), (C::Module, owner.module)] {
        if symbol != Symbol::NONE {
            row = row.text(column, &*replayed.symbols.get(symbol));
        }
    }
    row
}
