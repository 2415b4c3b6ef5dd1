//! Jobs done on every core and handed back in order.
//!
//! The calling thread takes what is done, and does jobs too while there is nothing to take: there are no
//! more threads than cores. Only a few jobs are on the way at a time, and each is used again.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// How many jobs are on the way, for each thread.
const AHEAD: u64 = 4;

/// Makes jobs with `next` until that says `false`, does each on one of `threads` threads with what
/// `worker` makes for the thread, and gives them to `take` in the order in which they were made, until it
/// breaks off.
pub(crate) fn in_order<J: Default + Send, D: FnMut(&mut J), B>(
    threads: usize,
    next: impl FnMut(&mut J) -> bool + Send,
    worker: impl Fn() -> D + Sync,
    mut take: impl FnMut(&mut J) -> ControlFlow<B>,
) -> ControlFlow<B> {
    let belt = Belt {
        source: Mutex::new((0, next)),
        state: Mutex::new(State {
            most: AHEAD * threads as u64,
            under_way: 0,
            taken: 0,
            done: VecDeque::new(),
            spare: Vec::new(),
            end: None,
            over: false,
        }),
        ready: Condvar::new(),
        room: Condvar::new(),
    };
    std::thread::scope(|scope| {
        let _end = Close { belt: &belt, always: true };
        for _ in 1..threads {
            scope.spawn(|| {
                let _end = Close { belt: &belt, always: false };
                let mut work = worker();
                while let Some((number, mut job)) = belt.claim(true) {
                    work(&mut job);
                    belt.deliver(number, job);
                }
            });
        }
        let mut work = worker();
        loop {
            match belt.front() {
                Front::Ready(mut job) => {
                    take(&mut job)?;
                    belt.state().spare.push(job);
                }
                Front::End => return ControlFlow::Continue(()),
                Front::NotYet => match belt.claim(false) {
                    Some((number, mut job)) => {
                        work(&mut job);
                        belt.deliver(number, job);
                    }
                    None => belt.wait(),
                },
            }
        }
    })
}

struct Belt<J, N> {
    /// The number of the next job, and what makes it.
    source: Mutex<(u64, N)>,
    state: Mutex<State<J>>,
    /// The next job is done, or there is none.
    ready: Condvar,
    /// There is room for another job.
    room: Condvar,
}

struct State<J> {
    most: u64,
    /// How many jobs are being made, being done, or done and not taken.
    under_way: u64,
    /// How many were taken.
    taken: u64,
    /// Those that are done, from the next to be taken.
    done: VecDeque<Option<J>>,
    spare: Vec<J>,
    /// How many jobs there are, once that is known.
    end: Option<u64>,
    /// Nobody takes any more.
    over: bool,
}

/// What is to be taken next.
enum Front<J> {
    Ready(J),
    NotYet,
    End,
}

impl<J: Default, N: FnMut(&mut J) -> bool> Belt<J, N> {
    fn state(&self) -> MutexGuard<'_, State<J>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next job to be done, with its number. `None` when there is none, or, unless it waits, no room.
    fn claim(&self, wait: bool) -> Option<(u64, J)> {
        let mut state = self.state();
        loop {
            if state.over || state.end.is_some() {
                return None;
            }
            if state.under_way < state.most {
                break;
            }
            if !wait {
                return None;
            }
            state = self.room.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.under_way += 1;
        let mut job = state.spare.pop().unwrap_or_default();
        drop(state);
        let mut source = self.source.lock().unwrap_or_else(PoisonError::into_inner);
        let (number, next) = &mut *source;
        if next(&mut job) {
            *number += 1;
            return Some((*number - 1, job));
        }
        self.state().end = Some(*number);
        self.ready.notify_one();
        self.room.notify_all();
        None
    }

    fn deliver(&self, number: u64, job: J) {
        let mut state = self.state();
        let place = (number - state.taken) as usize;
        if state.done.len() <= place {
            state.done.resize_with(place + 1, || None);
        }
        state.done[place] = Some(job);
        if place == 0 {
            self.ready.notify_one();
        }
    }

    fn front(&self) -> Front<J> {
        let mut state = self.state();
        if let Some(Some(_)) = state.done.front()
            && let Some(Some(job)) = state.done.pop_front()
        {
            state.taken += 1;
            state.under_way -= 1;
            // Whoever waits for room does several jobs then: to be woken for each costs more than a job.
            if state.under_way <= state.most / 2 {
                self.room.notify_one();
            }
            return Front::Ready(job);
        }
        if state.over || state.end == Some(state.taken) { Front::End } else { Front::NotYet }
    }

    /// Waits until there is something to take, or it is known that nothing comes.
    fn wait(&self) {
        let nothing = |state: &mut State<J>| {
            let ready = matches!(state.done.front(), Some(Some(_)));
            !ready && !state.over && state.end != Some(state.taken)
        };
        drop(self.ready.wait_while(self.state(), nothing));
    }
}

/// Ends the others: when the thread that takes has what it wants, or one panics.
struct Close<'a, J: Default, N: FnMut(&mut J) -> bool> {
    belt: &'a Belt<J, N>,
    always: bool,
}

impl<J: Default, N: FnMut(&mut J) -> bool> Drop for Close<'_, J, N> {
    fn drop(&mut self) {
        if self.always || std::thread::panicking() {
            self.belt.state().over = true;
            self.belt.ready.notify_one();
            self.belt.room.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts to `jobs` on `threads` threads and takes up to `most` of them.
    fn count(threads: usize, jobs: u64, most: usize) -> Vec<u64> {
        let (mut made, mut taken) = (0, Vec::new());
        let next = |job: &mut (u64, u64)| {
            job.0 = made;
            made += 1;
            job.0 < jobs
        };
        let worker = || |job: &mut (u64, u64)| job.1 = job.0 * job.0;
        let end = in_order(threads, next, worker, |job| {
            if taken.len() == most {
                return ControlFlow::Break(());
            }
            assert_eq!(job.1, job.0 * job.0);
            taken.push(job.0);
            ControlFlow::Continue(())
        });
        assert_eq!(end.is_break(), taken.len() == most && (most as u64) < jobs);
        taken
    }

    #[test]
    fn what_is_done_on_any_thread_is_taken_in_order() {
        for threads in 1..5 {
            for jobs in [0, 1, 2, 7, 1000] {
                assert_eq!(count(threads, jobs, usize::MAX), (0..jobs).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn whoever_breaks_off_ends_the_other_threads() {
        for threads in 1..5 {
            assert_eq!(count(threads, 1 << 40, 10), (0..10).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_panic_on_any_thread_comes_out() {
        for threads in 1..5 {
            for at in [0, 3, 50] {
                let mut made = 0;
                let next = |job: &mut u64| {
                    (*job, made) = (made, made + 1);
                    true
                };
                let worker = || move |job: &mut u64| assert!(*job < at, "as asked for");
                let panics = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    in_order(threads, next, worker, |_| ControlFlow::<()>::Continue(()))
                }));
                assert!(panics.is_err());
            }
        }
    }
}
