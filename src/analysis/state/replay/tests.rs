//! Tests of the replay, on traces of a few rows.

use memtrace_trace::Category;
use memtrace_trace::memory::LiveMemory;
use memtrace_trace::{EventName, Row};
use rustc_hash::FxHashMap;

use super::*;
use crate::read::scan::{Chunk, Scanner};
use crate::state::block::Death;
use crate::testing::TraceBuilder;

fn replay(trace: &[u8], window: Window, tracked: Metric) -> (Replay, SymbolTable) {
    let symbols = SymbolTable::default();
    let header = trace.iter().position(|byte| *byte == b'\n').unwrap();
    let mut chunk = Chunk::default();
    let width = memtrace_trace::columns::COLUMNS.len();
    Scanner::new(Wanted::all_events(Columns::ALL), width, false, symbols.clone())
        .scan(&trace[header + 1..], &mut chunk);
    assert_eq!(chunk.faults, []);
    let mut replay = Replay::new(&symbols, window, tracked).checking();
    for record in &chunk.records {
        replay.feed(record);
    }
    (replay, symbols)
}

fn allocated(trace: &[u8]) -> Replay {
    replay(trace, Window::default(), Metric::Allocated).0
}

fn clean(replay: &Replay) {
    let Problems { seq_gaps, missing_rows, first_gap, totals, unmatched_frees, .. } = &replay.problems;
    let Problems { double_allocs, wrong_sizes, unfinished, examples, .. } = &replay.problems;
    assert_eq!((*missing_rows, *first_gap), (0, None));
    assert_eq!((*seq_gaps, *totals, *unmatched_frees, *double_allocs, *wrong_sizes), (0, 0, 0, 0, 0));
    assert!(!unfinished);
    assert!(examples.is_empty());
}

fn step(step: i64) -> Row<'static> {
    Row { step, ..Row::default() }
}

#[test]
fn a_freed_block_is_available_until_the_next_row() {
    let freed_block = |more: bool| {
        let mut trace = TraceBuilder::default();
        let a = trace.alloc(512, Row { op: "aten::mm", ..step(3) });
        let b = trace.alloc(1024, step(3));
        trace.free(a, 512, step(3));
        if more {
            trace.alloc(2048, step(4));
        }
        (allocated(&trace.unfinished()), a, b)
    };
    let (replay, a, b) = freed_block(false);
    let block = replay.freed().unwrap();
    assert_eq!((block.id, block.bytes, block.owner.step), (a, 512, 3));
    assert!(block.died.is_some());
    assert_eq!(replay.live().values().map(|block| block.id).collect::<Vec<_>>(), [b]);
    assert!(!replay.live().contains(a));
    assert!(freed_block(true).0.freed().is_none());
}

#[test]
fn a_run_ended_in_an_oom_unless_a_later_step_allocates() {
    let ended = |rows: &dyn Fn(&mut TraceBuilder, i64)| {
        let mut trace = TraceBuilder::default();
        trace.segment(2 << 20);
        let a = trace.alloc(512, step(0));
        trace.raw(Row { event: EventName::Oom, ..step(0) });
        rows(&mut trace, a);
        allocated(&trace.finish()).ended_in_oom()
    };
    assert!(ended(&|_, _| {}));
    // The next step has only an op and a free, as in a trainer that cleans up: the run still ended in the
    // OOM.
    assert!(ended(&|trace, a| {
        trace.raw(Row { event: EventName::Op, ..step(1) });
        trace.free(a, 512, step(1));
    }));
    assert!(!ended(&|trace, _| {
        trace.alloc(512, step(1));
    }));
    // A second attempt in the same step allocates: the run still ended in the OOM.
    assert!(ended(&|trace, _| {
        trace.alloc(512, step(0));
    }));
}

#[test]
fn the_peak_is_the_first_row_with_the_highest_total() {
    let mut trace = TraceBuilder::default();
    trace.segment(2 << 20);
    let a = trace.alloc(512, step(0));
    let b = trace.alloc(1024, Row { op: "aten::mm", ..step(1) });
    let at = b;
    trace.free(a, 512, step(0));
    let c = trace.alloc(512, step(2));
    trace.free(b, 1024, Row { op: "aten::mm", ..step(1) });
    let replay = allocated(&trace.finish());
    clean(&replay);
    let device = replay.find(0).unwrap();
    let peak = device.peak(Metric::Allocated);
    assert_eq!((peak.bytes, peak.seq, peak.owner.step), (1536, at, 1));
    assert_eq!(device.peak(Metric::Reserved).bytes, 2 << 20);
    let mut ids: Vec<i64> = replay.at_peak(0, false).iter().map(|block| block.id).collect();
    ids.sort_unstable();
    assert_eq!(ids, [a, b]);
    assert_eq!(replay.live().values().map(|block| block.id).collect::<Vec<_>>(), [c]);
}

#[test]
fn a_block_at_the_peak_has_its_last_owner_or_its_owner_at_the_peak() {
    let temporary = Row { category: Category::Temporary, ..step(0) };
    let gradient = Row { category: Category::Gradient, module: "GPT.h.0", ..step(0) };
    let mut trace = TraceBuilder::default();
    trace.segment(2 << 20);
    let kept = trace.alloc(512, temporary);
    let freed = trace.alloc(512, temporary);
    trace.tag(kept, 512, temporary, gradient);
    trace.tag(freed, 512, temporary, gradient);
    trace.tag(freed, 512, gradient, Row { category: Category::Other, ..step(0) });
    trace.free(freed, 512, Row { category: Category::Other, ..step(0) });
    let replay = allocated(&trace.finish());
    clean(&replay);
    let categories = |as_of| {
        let mut blocks = replay.at_peak(0, as_of);
        blocks.sort_by_key(|block| block.id);
        blocks.iter().map(|block| block.owner.category).collect::<Vec<_>>()
    };
    assert_eq!(categories(false), [Category::Gradient, Category::Other]);
    assert_eq!(categories(true), [Category::Temporary, Category::Temporary]);
}

#[test]
fn allocated_bytes_count_under_the_last_owner_of_each_block() {
    let mut trace = TraceBuilder::default();
    trace.segment(2 << 20);
    let named = Row { op: "aten::mm", module: "GPT", phase: "forward", ..step(0) };
    let [claimed, stranger, born_named] =
        [(512, step(0)), (1024, step(0)), (2048, named)].map(|(bytes, row)| trace.alloc(bytes, row));
    trace.tag(claimed, 512, step(0), Row { category: Category::Parameter, ..step(0) });
    trace.free(claimed, 512, step(0));
    trace.free(stranger, 1024, step(0));
    trace.alloc(4096, step(1));
    trace.free(born_named, 2048, step(0));
    let trace = trace.finish();
    assert_eq!(allocated(&trace).unowned_and_total(0), (1024 + 4096, 512 + 1024 + 2048 + 4096));
    let window = Window { from_step: 1, ..Window::default() };
    assert_eq!(replay(&trace, window, Metric::Allocated).0.unowned_and_total(0), (4096, 4096));
}

#[test]
fn a_freed_block_with_an_inferred_category_is_not_unowned() {
    let mut trace = TraceBuilder::default();
    trace.segment(2 << 20);
    let parameter = trace.alloc(512, step(0));
    let batch = trace.alloc(1024, step(0));
    trace.alloc(2048, Row { phase: "forward", ..step(0) });
    trace.free(batch, 1024, step(0));
    trace.alloc(4096, Row { phase: "forward", op: "aten::mm", ..step(2) });
    trace.free(parameter, 512, step(0));
    let replay = allocated(&trace.finish());
    assert!(replay.infers());
    assert_eq!(replay.unowned_and_total(0), (1024 + 2048, 512 + 1024 + 2048 + 4096));
}

#[test]
fn memory_outside_torch_counts_as_used_and_never_as_allocated() {
    let mut trace = TraceBuilder::default();
    trace.segment(2 << 20);
    let block = trace.alloc(512, step(0));
    let ext = Row { device: 0, event: EventName::ExtAlloc, api: "cudaMalloc", ..Row::default() };
    let id = block + 1;
    trace.change(Row { alloc_id: id, delta_bytes: 4096, ..ext }, [0; 3]);
    trace.change(
        Row { event: EventName::ExtFree, api: "cudaFree", alloc_id: id, delta_bytes: -4096, ..ext },
        [0; 3],
    );
    let (replay, _) = replay(&trace.finish(), Window::default(), Metric::Used);
    clean(&replay);
    let device = replay.find(0).unwrap();
    assert_eq!(device.peak(Metric::Allocated).bytes, 512);
    assert_eq!(device.peak(Metric::Used).bytes, (2 << 20) + 4096);
    assert_eq!(replay.at_peak(0, false).len(), 2);
}

#[test]
fn pinned_memory_and_blocks_without_a_cache_are_their_own_segments() {
    let mut trace = TraceBuilder::default();
    let plain = Row { device: 0, event: EventName::Alloc, api: "cudaMalloc", ..Row::default() };
    trace.change(Row { alloc_id: 2, delta_bytes: 100, ..plain }, [100; 3]);
    let host = Row { event: EventName::HostAlloc, api: "cudaHostAlloc", ..Row::default() };
    trace.change(Row { alloc_id: 3, delta_bytes: 64, ..host }, [64; 3]);
    let failed = Row { event: EventName::SegmentAlloc, status: 2, requested_bytes: 1 << 40, ..plain };
    trace.change(failed, [0; 3]);
    let replay = allocated(&trace.finish());
    clean(&replay);
    assert_eq!(replay.find(0).unwrap().peak(Metric::Reserved).bytes, 100);
    assert_eq!(replay.find(HOST).unwrap().totals.allocated, 64);
    assert_eq!(replay.counts.failed, 1);
}

#[test]
fn a_contradiction_between_rows_is_counted_once() {
    let mut trace = TraceBuilder::default();
    trace.segment(2 << 20);
    let a = trace.alloc(512, step(0));
    // From this row on, the totals are 512 bytes more than the sum of the deltas: one problem.
    let b = trace.change(
        Row {
            device: 0,
            event: EventName::Alloc,
            api: "caching_allocator",
            alloc_id: a + 1,
            delta_bytes: 512,
            ..step(0)
        },
        [1024, 1024, 0],
    );
    trace.free(b, 512, step(0));
    trace.free(a, 100, step(0));
    trace.free(77, 512, step(0));
    let replay = allocated(&trace.unfinished());
    let problems = &replay.problems;
    assert_eq!(problems.totals, 1, "{:?}", problems.examples);
    assert_eq!((problems.wrong_sizes, problems.unmatched_frees), (1, 1));
    assert!(problems.unfinished);
    assert_eq!(problems.examples.len(), 3);
}

/// Rows without a step, such as a sample, come between the backward and the tags of its gradients: the window
/// of steps continues after them.
#[test]
fn a_window_of_steps_continues_after_rows_without_a_step() {
    for event in [EventName::Sample, EventName::Lost, EventName::Meta] {
        let mut trace = TraceBuilder::default();
        trace.segment(2 << 20);
        let block = trace.alloc(512, step(3));
        trace.raw(Row { event, ..step(-1) });
        trace.tag(block, 512, step(3), Row { category: Category::Gradient, ..step(3) });
        let only = Window { from_step: 3, to_step: 3, ..Window::default() };
        let (replay, _) = replay(&trace.unfinished(), only, Metric::Allocated);
        assert!(replay.in_window(), "{event}");
        assert_eq!(replay.at_peak(0, false)[0].owner.category, Category::Gradient);
    }
}

#[test]
fn a_meta_row_in_the_middle_hides_no_missing_rows() {
    let symbols = SymbolTable::default();
    for (follows_removed_parts, missing) in [(false, 7), (true, 0)] {
        let mut replay = Replay::new(&symbols, Window::default(), Metric::Allocated);
        replay.feed(&Record { event: EventName::Meta, seq: 1, ..Record::default() });
        replay.feed(&Record { event: EventName::Meta, seq: 9, follows_removed_parts, ..Record::default() });
        assert_eq!(replay.problems.missing_rows, missing);
    }
}

#[test]
fn a_window_begins_with_the_totals_before_it() {
    let mut trace = TraceBuilder::default();
    trace.segment(2 << 20);
    let a = trace.alloc(2048, step(0));
    let b = trace.alloc(1024, step(1));
    trace.free(a, 2048, step(0));
    trace.free(b, 1024, step(1));
    let bytes = trace.finish();
    let only = |step| Window { from_step: step, to_step: step, ..Window::default() };
    let (first, _) = replay(&bytes, only(1), Metric::Allocated);
    assert_eq!(first.find(0).unwrap().peak(Metric::Allocated).bytes, 3072);
    assert_eq!(first.at_peak(0, false).len(), 2);
    let late = Window { from_ns: 4500, ..Window::default() };
    let (late, _) = replay(&bytes, late, Metric::Allocated);
    assert_eq!(late.find(0).unwrap().peak(Metric::Allocated).bytes, 1024);
    assert_eq!(late.at_peak(0, false).iter().map(|block| block.id).collect::<Vec<_>>(), [b]);
}

#[test]
fn a_live_block_is_found_at_any_age() {
    let owner = Peak::default().owner;
    let block = |id, bytes| Block {
        kind: MemoryKind::Block,
        device: 0,
        id,
        born_ns: 0,
        bytes,
        requested: -1,
        rounded: 0,
        addr: 0,
        stream: 0,
        pool: 0,
        stack: 0,
        dtype: Symbol::UNKNOWN,
        shape: Symbol::UNKNOWN,
        owner,
        then: None,
        pass: 0,
        died: None,
        managed: false,
        inferred: false,
        predates: false,
        in_window: false,
    };
    let death = Death { seq: 0, step: 0, phase: Symbol::NONE, pass: 0 };
    let (mut live, mut expected) = (LiveBlocks::default(), FxHashMap::default());
    let (mut state, mut freed) = (0x9E37_79B9_u64, 0);
    for round in 0..200_000 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let random = (state >> 33).cast_signed();
        // Most ids are row numbers, as in a trace. The others are arbitrary, also negative or repeated.
        let id = if random % 8 > 0 { round } else { random / 8 % (1 << 17) - 1000 };
        if random % 3 == 0 {
            let id = if random % 2 == 0 { id } else { round - random / 2 % 50 };
            let left = live.remove(id, death);
            let found = left.and_then(|left| live.removed(left)).map(|block| (block.id, block.bytes));
            assert_eq!(found, expected.remove(&id).map(|bytes| (id, bytes)), "round {round}");
            freed += i32::from(found.is_some());
        } else {
            let known = live.insert(id, block(id, round));
            assert_eq!(known, expected.insert(id, round).is_some(), "round {round}");
        }
        assert_eq!(live.contains(id), expected.contains_key(&id), "round {round}");
        assert_eq!(live.get_mut(id).map(|block| block.bytes), expected.get(&id).copied(), "round {round}");
    }
    assert!(freed > 20_000 && expected.len() > 50_000, "{freed} freed, {} live", expected.len());
    assert_eq!(live.values().count(), expected.len());
    assert!(live.values().all(|block| expected.get(&block.id) == Some(&block.bytes)));
}
