//! Tests of the conversion of rows into operations.

use memtrace_trace::EventName;
use memtrace_trace::meta::Meta;

use super::collector::Collector;
use super::{Operation, OperationKind, Requests};
use crate::read::record::Record;

/// Returns a row about a block of `bytes`, with the active and reserved bytes after the row.
fn block(event: EventName, alloc_id: i64, bytes: i64, active: i64, reserved: i64) -> Record {
    Record {
        event,
        device: 0,
        alloc_id,
        requested_bytes: bytes.abs(),
        rounded_bytes: bytes.abs(),
        delta_bytes: bytes,
        active_bytes: active,
        allocated_bytes: active,
        reserved_bytes: reserved,
        ..Record::default()
    }
}

fn segment(event: EventName, status: i32, pool: i64) -> Record {
    Record { event, device: 0, status, pool, ..Record::default() }
}

fn requests(conf: &str, rows: &[Record]) -> Requests {
    let mut meta = Meta::default();
    meta.allocator.conf = conf.to_owned();
    let mut collector = Collector::new(&meta);
    rows.iter().for_each(|row| collector.feed(row));
    collector.finish(None).unwrap()
}

fn kinds(requests: &Requests) -> Vec<i64> {
    requests.operations.iter().map(|operation| operation[0]).collect()
}

const fn operation(kind: OperationKind, a: i64, b: i64, c: i64) -> Operation {
    [kind as i64, a, b, c]
}

#[test]
fn requests_reuse_slots_and_say_where_reserved_memory_changed() {
    use EventName::{Alloc, Free};
    let got = requests(
        "",
        &[block(Alloc, 1, 512, 512, 2048), block(Free, 1, -512, 0, 2048), block(Alloc, 3, 100, 512, 2048)],
    );
    let expected = [
        operation(OperationKind::Step, -1, 0, 0),
        operation(OperationKind::Alloc, 0, 512, 0),
        operation(OperationKind::Reserved, 2048, 0, 0),
        operation(OperationKind::Free, 0, 0, 0),
        operation(OperationKind::Alloc, 0, 100, 0),
    ];
    assert_eq!(got.operations, expected);
    assert_eq!((got.requests, got.slots, got.peak_index), (2, 1, 2));
}

#[test]
fn requests_free_a_block_when_its_last_stream_has_passed() {
    use EventName::{Alloc, Free, FreeCompleted};
    let freed = Record { active_bytes: 512, allocated_bytes: 0, ..block(Free, 1, -512, 0, 512) };
    let got = requests("", &[block(Alloc, 1, 512, 512, 512), freed]);
    assert!(!kinds(&got).contains(&(OperationKind::Free as i64)));
    let completed = block(FreeCompleted, 1, -512, 0, 512);
    let got = requests("", &[block(Alloc, 1, 512, 512, 512), freed, completed]);
    assert_eq!(got.operations.last(), Some(&operation(OperationKind::Free, 0, 0, 0)));
}

#[test]
fn requests_distinguish_empty_cache_from_a_retry_and_from_garbage_collection() {
    use EventName::{Alloc, SegmentAlloc, SegmentFree};
    let first = block(Alloc, 1, 512, 512, 512);
    let last = block(Alloc, 2, 512, 1024, 1024);
    let (freed, taken, refused) =
        (segment(SegmentFree, 0, 0), segment(SegmentAlloc, 0, 0), segment(SegmentAlloc, 2, 0));
    let empties = |conf: &str, between: &[Record]| {
        let rows: Vec<Record> = [&[first], between, &[last]].concat();
        kinds(&requests(conf, &rows)).contains(&(OperationKind::EmptyCache as i64))
    };
    assert!(empties("", &[freed]));
    assert!(empties("", &[freed, taken]));
    assert!(!empties("", &[refused, freed, taken]), "the allocator's own retry");
    assert!(!empties("garbage_collection_threshold:0.8", &[freed, taken]));
    assert!(empties("garbage_collection_threshold:0.8", &[freed]));
}

#[test]
fn requests_release_a_pool_whose_segments_go() {
    use EventName::{Alloc, SegmentFree};
    let inside = Record { pool: 3, ..block(Alloc, 1, 512, 512, 512) };
    let got = requests("", &[inside, segment(SegmentFree, 0, 3), block(Alloc, 2, 512, 512, 512)]);
    let wanted =
        [OperationKind::Pool as i64, OperationKind::Release as i64, OperationKind::EmptyCache as i64];
    let kinds = kinds(&got);
    assert!(wanted.iter().all(|kind| kinds.contains(kind)), "{kinds:?}");
}

#[test]
fn requests_of_a_trace_without_any_are_empty() {
    let meta = Meta::default();
    let mut collector = Collector::new(&meta);
    collector.feed(&segment(EventName::SegmentAlloc, 0, 0));
    assert!(collector.finish(None).is_none());
}
