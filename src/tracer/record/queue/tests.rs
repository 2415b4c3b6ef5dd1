//! Tests the queue as a whole, with several threads that record events while another thread drains the queue.
//! `scripts/miri` runs these tests under Miri, which finds data races and undefined behaviour, with an
//! emulation of stores that other cores see late.

use std::collections::HashMap;
use std::convert::Infallible;
use std::time::Duration;

use memtrace_trace::journal::{CHUNK_BYTES, Run, SLOTS, Written};
use memtrace_trace::{Api, Event, Header, Payload};

use super::chunk_pool::ChunkPool;
use super::event_queue::EventQueue;
use super::merge::{Merge, Taken};
use crate::control::Control;

const THREADS: usize = 3;
/// The number of events of each thread. All threads together record more events than the pool holds, also
/// under Miri, which is slow.
const EVENTS: u64 = if cfg!(miri) { 5 * SLOTS as u64 } else { 200 * SLOTS as u64 };
/// The number of chunks of the smallest pool.
const CHUNKS: usize = 8;

/// The events that were drained: the numbers of each thread in the order of arrival, and the number of lost
/// events that `Lost` events report.
#[derive(Default)]
struct Drained {
    numbers: HashMap<u32, Vec<u64>>,
    lost: u64,
    clock: u64,
    back_in_time: u64,
}

impl Drained {
    fn drain(&mut self, merge: &mut Merge, queue: &'static EventQueue, watermark: Option<u64>) {
        let collected = merge.collect(queue, &mut |_: &Event, _: &[u8]| {});
        let drained = merge.drain(watermark.unwrap_or(collected), usize::MAX, &mut |tid, event| {
            self.back_in_time += u64::from(event.clock_ns < self.clock);
            self.clock = event.clock_ns;
            match event.unpack() {
                Some((_, Payload::Lost { events })) => self.lost += events,
                Some((_, Payload::FreeCompleted { address })) => {
                    self.numbers.entry(tid).or_default().push(address);
                }
                other => panic!("an event that no thread recorded: {other:?}"),
            }
            Ok::<Taken, Infallible>(Taken::Yes)
        });
        let Ok(_) = drained;
        merge.release(queue, Written::default(), 1);
    }
}

fn queue() -> &'static EventQueue {
    let pool = ChunkPool::new(CHUNKS * CHUNK_BYTES, &[], "none", Run::default()).unwrap();
    Box::leak(Box::new(EventQueue::new(pool, Box::leak(Box::new(Control::new())))))
}

/// Returns an event that carries `number`.
fn numbered(clock_ns: u64, number: u64) -> Event {
    Payload::FreeCompleted { address: number }.pack(Header::new(clock_ns, Api::CachingAllocator, 0))
}

/// Runs `THREADS` threads, each of which calls `each` with its index and with each number from 1 to `EVENTS`.
/// Drains the queue at the same time.
fn filled(queue: &'static EventQueue, each: impl Fn(usize, u64) + Sync) -> (Drained, Merge) {
    let (mut drained, mut merge) = (Drained::default(), Merge::default());
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let each = &each;
                scope.spawn(move || (1..=EVENTS).for_each(|event| each(thread, event)))
            })
            .collect();
        while threads.iter().any(|thread| !thread.is_finished()) {
            drained.drain(&mut merge, queue, None);
            std::thread::sleep(Duration::from_micros(200));
        }
        // Joining each thread waits for the destructors of its thread-locals, which hand over the last chunk.
        // The end of the scope does not wait for them.
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
    drained.drain(&mut merge, queue, Some(u64::MAX));
    drained.drain(&mut merge, queue, Some(u64::MAX));
    (drained, merge)
}

#[test]
fn each_event_of_each_thread_is_drained_in_its_order_or_counted_as_lost() {
    let queue = queue();
    let (drained, merge) = filled(queue, |_, event| {
        queue.record(|clock_ns| numbered(clock_ns, event));
    });
    // On a busy machine, a thread may find no chunk and lose all its events, so fewer than `THREADS` threads
    // may have events.
    assert!((1..=THREADS).contains(&drained.numbers.len()));
    for numbers in drained.numbers.values() {
        assert!(numbers.is_sorted_by(|before, after| before < after), "the order of a thread changed");
    }
    let kept: usize = drained.numbers.values().map(Vec::len).sum();
    assert_eq!(kept as u64 + merge.lost(queue), THREADS as u64 * EVENTS);
    assert!(drained.lost <= merge.lost(queue));
    // In Miri's emulation, a store may become visible later than `SLACK_NS`, so events may be out of order.
    assert!(drained.back_in_time == 0 || cfg!(miri), "{} times", drained.back_in_time);
}

#[test]
fn an_announced_event_and_those_recorded_meanwhile_are_all_drained() {
    let queue = queue();
    let (drained, merge) = filled(queue, |thread, event| {
        if thread == 0 && event % 3 == 0 {
            let clock_ns = queue.begin();
            queue.commit(numbered(clock_ns, event));
        } else {
            queue.record(|clock_ns| numbered(clock_ns, event));
        }
    });
    let kept: usize = drained.numbers.values().map(Vec::len).sum();
    assert_eq!(kept as u64 + merge.lost(queue), THREADS as u64 * EVENTS);
}

/// Events that are drained while the merge holds them stay in the journal: their chunks are not recycled, also
/// those of a thread that began later. After the hold, they are.
#[test]
fn held_events_stay_in_the_journal() {
    let queue = queue();
    let (mut drained, mut merge) = (Drained::default(), Merge::default());
    let record = |events: u64| {
        std::thread::spawn(move || {
            for number in 1..=events {
                queue.record(|clock_ns| numbered(clock_ns, number));
            }
        })
        .join()
        .unwrap();
    };
    let full = 2 * SLOTS as u64;
    record(1);
    drained.drain(&mut merge, queue, Some(u64::MAX));
    assert_eq!(queue.pool().percent_free(), 100);
    merge.hold();
    record(full);
    for _ in 0..3 {
        drained.drain(&mut merge, queue, Some(u64::MAX));
    }
    assert!(queue.pool().percent_free() <= 75, "{}", queue.pool().percent_free());
    merge.let_go();
    drained.drain(&mut merge, queue, Some(u64::MAX));
    assert_eq!(queue.pool().percent_free(), 100);
    assert_eq!(drained.numbers.values().map(Vec::len).sum::<usize>() as u64, full + 1);
}
