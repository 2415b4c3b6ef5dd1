//! The overflow list, for events while the chunk pool is empty. The pool is empty if more threads record than
//! there are chunks, or if the writer thread falls behind.
//!
//! The list is a lock-free stack. With a lock, a descheduled holder would make the other threads wait. With a
//! thousand threads on two cores, the holder would be descheduled for longer than a hook may wait. If the
//! process is killed, the events on the list are lost, but the journal has the count of these events.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use memtrace_trace::Event;

/// The maximum number of events on the list.
pub(crate) const MAX_OVERFLOW: usize = 32 << 10;

/// An event and its thread.
pub(crate) struct OverflowEvent {
    pub(crate) lane: u32,
    pub(crate) tid: u32,
    pub(crate) event: Event,
}

struct Node {
    kept: OverflowEvent,
    below: *mut Node,
}

/// The overflow list.
pub(crate) struct Overflow {
    top: AtomicPtr<Node>,
    count: AtomicUsize,
}

impl Overflow {
    pub(crate) const fn new() -> Overflow {
        Overflow { top: AtomicPtr::new(null_mut()), count: AtomicUsize::new(0) }
    }

    /// Reserves room for an event. Returns false if the list is full.
    pub(crate) fn reserve(&self) -> bool {
        let has_room = self.count.fetch_add(1, Ordering::Relaxed) < MAX_OVERFLOW;
        if !has_room {
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
        has_room
    }

    /// Adds an event, after [`Overflow::reserve`].
    pub(crate) fn keep(&self, kept: OverflowEvent) {
        let node = Box::into_raw(Box::new(Node { kept, below: null_mut() }));
        let push = |top: *mut Node| {
            // SAFETY: `node` was created above, and no other thread has it until it is on the stack.
            unsafe { (*node).below = top };
            Some(node)
        };
        // `push` always returns a new top, so this never fails.
        let _ = self.top.fetch_update(Ordering::AcqRel, Ordering::Acquire, push);
    }

    /// Takes all events, oldest first.
    pub(crate) fn take(&self) -> Vec<OverflowEvent> {
        let mut taken = Vec::new();
        let mut next = self.top.swap(null_mut(), Ordering::AcqRel);
        while !next.is_null() {
            // SAFETY: `keep` created the node with `Box::into_raw`, and after the swap no other thread has
            // it.
            let node = unsafe { Box::from_raw(next) };
            next = node.below;
            taken.push(node.kept);
        }
        self.count.fetch_sub(taken.len(), Ordering::Relaxed);
        taken.reverse();
        taken
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.top.load(Ordering::Acquire).is_null()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_trace::{Api, Header, Payload};

    fn event(clock_ns: u64) -> Event {
        Payload::FreeCompleted { address: 0 }.pack(Header::new(clock_ns, Api::CachingAllocator, 0))
    }

    fn add(events: &Overflow, lane: u32, clock_ns: u64) -> bool {
        let has_room = events.reserve();
        if has_room {
            events.keep(kept(lane, clock_ns));
        }
        has_room
    }

    fn kept(lane: u32, clock_ns: u64) -> OverflowEvent {
        OverflowEvent { lane, tid: lane, event: event(clock_ns) }
    }

    #[test]
    fn the_overflow_list_keeps_the_order_of_each_thread() {
        let events = Overflow::new();
        let mut taken = Vec::new();
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|lane| {
                    let events = &events;
                    scope.spawn(move || (0..2000).all(|clock| add(events, lane, clock)))
                })
                .collect();
            while threads.iter().any(|thread| !thread.is_finished()) {
                taken.append(&mut events.take());
            }
            assert!(threads.into_iter().all(|thread| thread.join().unwrap()));
        });
        taken.append(&mut events.take());
        assert!(events.is_empty());
        for lane in 0..8 {
            let clocks = taken.iter().filter(|kept| kept.lane == lane).map(|kept| kept.event.clock_ns);
            assert!(clocks.eq(0..2000), "{lane}");
        }
    }

    #[test]
    fn the_overflow_list_is_bounded_and_has_room_again_when_emptied() {
        let events = Overflow::new();
        assert!((0..MAX_OVERFLOW as u64).all(|clock| add(&events, 0, clock)));
        assert!(!add(&events, 0, 0));
        assert_eq!(events.take().len(), MAX_OVERFLOW);
        assert!(add(&events, 0, 0));
        events.take();
    }
}
