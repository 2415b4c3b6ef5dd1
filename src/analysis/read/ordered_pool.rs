//! A thread pool that returns results in order.
//!
//! The calling thread takes finished jobs in order and, while the next one is not finished, works on jobs
//! itself, so that no more threads than cores are needed. Only a few jobs are in flight at a time, and their
//! buffers are reused.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// The maximum number of jobs in flight per thread.
const IN_FLIGHT: u64 = 4;

/// Fills jobs with `next` until it returns false. Each job is processed by one of `threads` threads, with the
/// function that `worker` makes for that thread. Passes the jobs to `take` in the order in which they were
/// filled, and ends early when `take` breaks.
pub(crate) fn in_order<J: Default + Send, D: FnMut(&mut J), B>(
    threads: usize,
    next: impl FnMut(&mut J) -> bool + Send,
    worker: impl Fn() -> D + Sync,
    mut take: impl FnMut(&mut J) -> ControlFlow<B>,
) -> ControlFlow<B> {
    let pool = OrderedPool {
        source: Mutex::new((0, next)),
        state: Mutex::new(PoolState {
            most: IN_FLIGHT * threads as u64,
            in_flight: 0,
            taken: 0,
            done: VecDeque::new(),
            spare: Vec::new(),
            end: None,
            stopped: false,
        }),
        ready: Condvar::new(),
        room: Condvar::new(),
    };
    std::thread::scope(|scope| {
        let _end = StopOnDrop { pool: &pool, always: true };
        for _ in 1..threads {
            scope.spawn(|| {
                let _end = StopOnDrop { pool: &pool, always: false };
                let mut work = worker();
                while let Some((number, mut job)) = pool.claim(true) {
                    work(&mut job);
                    pool.deliver(number, job);
                }
            });
        }
        let mut work = worker();
        loop {
            match pool.front() {
                Front::Ready(mut job) => {
                    take(&mut job)?;
                    pool.state().spare.push(job);
                }
                Front::End => return ControlFlow::Continue(()),
                Front::NotYet => match pool.claim(false) {
                    Some((number, mut job)) => {
                        work(&mut job);
                        pool.deliver(number, job);
                    }
                    None => pool.wait(),
                },
            }
        }
    })
}

struct OrderedPool<J, N> {
    /// The number of the next job, and the function that fills it.
    source: Mutex<(u64, N)>,
    state: Mutex<PoolState<J>>,
    /// Signaled when the next job to take is finished, or when no job is left.
    ready: Condvar,
    /// Signaled when another job may be started.
    room: Condvar,
}

struct PoolState<J> {
    /// The maximum number of jobs in flight.
    most: u64,
    /// The number of jobs in flight: jobs that are being filled or processed, or are finished but not taken.
    in_flight: u64,
    /// The number of jobs taken.
    taken: u64,
    /// The results in order, starting with the next job to take; `None` for a job that is not finished.
    done: VecDeque<Option<J>>,
    /// Jobs to reuse.
    spare: Vec<J>,
    /// The total number of jobs, once `next` has returned false.
    end: Option<u64>,
    /// True if no more jobs will be taken.
    stopped: bool,
}

/// The state of the next job to take. A job is finished, or not finished yet. After the last job there is
/// none.
enum Front<J> {
    Ready(J),
    NotYet,
    End,
}

impl<J: Default, N: FnMut(&mut J) -> bool> OrderedPool<J, N> {
    fn state(&self) -> MutexGuard<'_, PoolState<J>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the next job and returns its number and the job. Returns `None` if no job is left, or if too
    /// many are in flight and `wait` is false.
    fn claim(&self, wait: bool) -> Option<(u64, J)> {
        let mut state = self.state();
        loop {
            if state.stopped || state.end.is_some() {
                return None;
            }
            if state.in_flight < state.most {
                break;
            }
            if !wait {
                return None;
            }
            state = self.room.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.in_flight += 1;
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

    /// Stores a finished job, and wakes the taking thread if it waits for this job.
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

    /// Takes the next job in order, if it is finished.
    fn front(&self) -> Front<J> {
        let mut state = self.state();
        if let Some(Some(_)) = state.done.front()
            && let Some(Some(job)) = state.done.pop_front()
        {
            state.taken += 1;
            state.in_flight -= 1;
            // Wake a waiting thread only when several jobs can be started, because one wake-up per job costs
            // more than the job.
            if state.in_flight <= state.most / 2 {
                self.room.notify_one();
            }
            return Front::Ready(job);
        }
        if state.stopped || state.end == Some(state.taken) { Front::End } else { Front::NotYet }
    }

    /// Waits until the next job is finished, or no job is left.
    fn wait(&self) {
        let nothing = |state: &mut PoolState<J>| {
            let ready = matches!(state.done.front(), Some(Some(_)));
            !ready && !state.stopped && state.end != Some(state.taken)
        };
        drop(self.ready.wait_while(self.state(), nothing));
    }
}

/// Stops the other threads on drop. With `always`, each drop does so. Without it, only a drop during a panic
/// of the current thread does.
struct StopOnDrop<'a, J: Default, N: FnMut(&mut J) -> bool> {
    pool: &'a OrderedPool<J, N>,
    always: bool,
}

impl<J: Default, N: FnMut(&mut J) -> bool> Drop for StopOnDrop<'_, J, N> {
    fn drop(&mut self) {
        if self.always || std::thread::panicking() {
            self.pool.state().stopped = true;
            self.pool.ready.notify_one();
            self.pool.room.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `jobs` jobs on `threads` threads and returns the numbers of the first `most` of them.
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
    fn jobs_of_the_pool_are_taken_in_order() {
        for threads in 1..5 {
            for jobs in [0, 1, 2, 7, 1000] {
                assert_eq!(count(threads, jobs, usize::MAX), (0..jobs).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn breaking_off_stops_the_threads_of_the_pool() {
        for threads in 1..5 {
            assert_eq!(count(threads, 1 << 40, 10), (0..10).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_panic_on_a_thread_of_the_pool_reaches_the_caller() {
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
