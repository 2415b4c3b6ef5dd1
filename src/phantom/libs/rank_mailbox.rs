//! What the ranks of a communicator tell each other: small data, through shared memory.
//!
//! A rank publishes what it contributes to its n-th operation and waits until the others published
//! theirs, as the operation's result needs them. So object collectives, barriers and the reduction of
//! a metric mean what they say. Large data is never exchanged, so training waits for nobody. A peer
//! that does not come within [`PATIENCE`] is given up, with one line: no rank hangs for ever.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::core::values::SMALL;

/// How long a peer is waited for.
const PATIENCE: Duration = Duration::from_secs(60);
/// A cache line, so that ranks do not slow each other down.
const LINE: usize = 64;
/// Where the count of attached ranks lies.
const HEADER: usize = 4096;

/// What one rank contributed: its bytes as far as they are known from the beginning on, or `None`.
pub(crate) type Contribution = Option<Vec<u8>>;

/// One rank's view of the memory that a communicator's ranks share.
#[derive(Debug)]
pub(crate) struct Peers {
    base: usize,
    ranks: usize,
    rank: usize,
    /// Operations done so far.
    done: AtomicU64,
    given_up: AtomicBool,
}

/// One mailbox: how many messages were put in and taken out, and what the last one is.
#[repr(C)]
struct Control {
    written: AtomicU64,
    /// Of a rank's own box, how many operations the rank is through with; of a pair's, messages taken.
    read: AtomicU64,
    known: AtomicU64,
    length: AtomicU64,
}

impl Peers {
    /// Attaches to the memory of that name, made by whoever comes first and unlinked by the last.
    pub(crate) fn attach(name: &str, ranks: usize, rank: usize) -> Option<Self> {
        let name = std::ffi::CString::new(name).ok()?;
        let size = HEADER + ranks * (LINE + SMALL) + ranks * ranks * (LINE + SMALL);
        // SAFETY: opens or makes a file in shared memory that only this user can reach.
        let file = unsafe { libc::shm_open(name.as_ptr(), libc::O_CREAT | libc::O_RDWR, 0o600) };
        if file < 0 {
            return None;
        }
        // Pages come into being when touched: most of it never is.
        // SAFETY: the descriptor was opened above; every rank sets the same size.
        let sized = unsafe { libc::ftruncate(file, size as libc::off_t) } == 0;
        // SAFETY: a new shared mapping of that file.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file,
                0,
            )
        };
        // SAFETY: the mapping keeps the file; the descriptor is ours.
        unsafe { libc::close(file) };
        if !sized || base == libc::MAP_FAILED {
            return None;
        }
        // SAFETY: the mapping is longer than the header, zeroed when new, and never unmapped; other
        // processes only use it as this type.
        let attached = unsafe { &*base.cast::<AtomicU32>() };
        if attached.fetch_add(1, Ordering::AcqRel) as usize + 1 == ranks {
            // SAFETY: takes the name away; the mappings stay.
            unsafe { libc::shm_unlink(name.as_ptr()) };
        }
        let (done, given_up) = (AtomicU64::new(0), AtomicBool::new(false));
        Some(Self { base: base as usize, ranks, rank, done, given_up })
    }

    /// A box: `0..ranks` are the ranks' own, then one for each pair.
    fn control(&self, index: usize) -> &Control {
        // SAFETY: within the mapping, aligned to a line, zero at first, and used as this type alone.
        unsafe { &*((self.base + HEADER + index * LINE) as *const Control) }
    }

    fn payload(&self, index: usize) -> *mut u8 {
        let boxes = self.ranks + self.ranks * self.ranks;
        (self.base + HEADER + boxes * LINE + index * SMALL) as *mut u8
    }

    fn pair(&self, from: usize, to: usize) -> usize {
        self.ranks + from * self.ranks + to
    }

    fn put(&self, index: usize, bytes: Option<&[u8]>, number: u64) {
        let control = self.control(index);
        if let Some(bytes) = bytes {
            // SAFETY: at most SMALL bytes into a box of that size, which its readers have left:
            // the caller waited for that.
            unsafe {
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.payload(index), bytes.len().min(SMALL))
            };
        }
        control.known.store(u64::from(bytes.is_some()), Ordering::Relaxed);
        control.length.store(bytes.map_or(0, <[u8]>::len).min(SMALL) as u64, Ordering::Relaxed);
        control.written.store(number, Ordering::Release);
    }

    fn take(&self, index: usize) -> Contribution {
        let control = self.control(index);
        if control.known.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let length = (control.length.load(Ordering::Relaxed) as usize).min(SMALL);
        let mut bytes = vec![0; length];
        // SAFETY: at most SMALL bytes out of a box of that size; its writer waits until we are through.
        unsafe { std::ptr::copy_nonoverlapping(self.payload(index), bytes.as_mut_ptr(), length) };
        Some(bytes)
    }

    /// Waits for something another rank does. False when it is given up.
    fn until(&self, what: impl Fn() -> bool) -> bool {
        let started = Instant::now();
        let mut rounds = 0u32;
        while !what() {
            if self.given_up.load(Ordering::Relaxed) {
                return false;
            }
            rounds += 1;
            if rounds < 100 {
                std::thread::yield_now();
                continue;
            }
            std::thread::sleep(Duration::from_micros(100));
            if started.elapsed() > PATIENCE {
                if !self.given_up.swap(true, Ordering::Relaxed) {
                    eprintln!(
                        "memtrace: the phantom NCCL of rank {} of {} waited {} s for another rank and goes on alone: \
                         what it exchanges with the others from here on is its own data",
                        self.rank,
                        self.ranks,
                        PATIENCE.as_secs()
                    );
                }
                return false;
            }
        }
        true
    }

    /// Gives this rank's contribution to the next operation and gets everyone's, in order of rank.
    /// `None` when the others are given up.
    pub(crate) fn exchange(&self, mine: Option<&[u8]>) -> Option<Vec<Contribution>> {
        if self.given_up.load(Ordering::Relaxed) {
            return None;
        }
        let number = self.done.fetch_add(1, Ordering::Relaxed) + 1;
        let through = |rank: usize| self.control(rank).read.load(Ordering::Acquire) + 1 >= number;
        if !self.until(|| (0..self.ranks).all(through)) {
            return None;
        }
        self.put(self.rank, mine, number);
        let published = |rank: usize| self.control(rank).written.load(Ordering::Acquire) >= number;
        if !self.until(|| (0..self.ranks).all(published)) {
            return None;
        }
        let all = (0..self.ranks).map(|rank| self.take(rank)).collect();
        self.control(self.rank).read.store(number, Ordering::Release);
        Some(all)
    }

    /// Sends to one rank. Waits only while the last message to it has not been taken.
    pub(crate) fn send(&self, to: usize, bytes: Option<&[u8]>) {
        let index = self.pair(self.rank, to);
        let control = self.control(index);
        let number = control.written.load(Ordering::Relaxed) + 1;
        if self.until(|| control.read.load(Ordering::Acquire) + 1 >= number) {
            self.put(index, bytes, number);
        }
    }

    /// Receives from one rank. `None` when it is given up.
    pub(crate) fn receive(&self, from: usize) -> Option<Contribution> {
        let index = self.pair(from, self.rank);
        let control = self.control(index);
        let number = control.read.load(Ordering::Relaxed) + 1;
        if !self.until(|| control.written.load(Ordering::Acquire) >= number) {
            return None;
        }
        let bytes = self.take(index);
        control.read.store(number, Ordering::Release);
        Some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_hear_each_other_in_order_many_times() {
        let name = format!("/memtrace-phantom-test-{}", std::process::id());
        let rank = |rank: usize| {
            let peers = Peers::attach(&name, 3, rank).unwrap();
            for round in 0..200u8 {
                let mine = [rank as u8, round];
                let known = (round % 5 != rank as u8).then_some(&mine[..]);
                let all = peers.exchange(known).unwrap();
                for (other, bytes) in all.into_iter().enumerate() {
                    let expected = (round % 5 != other as u8).then(|| vec![other as u8, round]);
                    assert_eq!(bytes, expected);
                }
                peers.send((rank + 1) % 3, Some(&mine));
                let before = (rank + 2) % 3;
                assert_eq!(peers.receive(before), Some(Some(vec![before as u8, round])));
            }
        };
        std::thread::scope(|scope| {
            for index in 0..3 {
                scope.spawn(move || rank(index));
            }
        });
    }
}
