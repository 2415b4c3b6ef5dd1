//! Exchanges small messages between the ranks of a communicator, through shared memory.
//!
//! A rank publishes its contribution to its n-th operation and waits until the other ranks have published
//! theirs. So object collectives, barriers and reductions of metrics give their real results. Large data is
//! never exchanged, so training never waits. If a rank waits for another one longer than [`PATIENCE`], it
//! prints one line on stderr and then never waits for a rank of this communicator again.

use std::ffi::CString;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::core::values::SMALL;

/// The maximum time for which a rank waits for another rank.
const PATIENCE: Duration = Duration::from_secs(60);
/// The size of a cache line in bytes. Each control block has a cache line of its own, so that ranks do not
/// slow each other down.
const CACHE_LINE: usize = 64;
/// The bytes before the control blocks. The first word counts the attached ranks.
const HEADER: usize = 4096;

/// The contribution of one rank to an operation: as many of its first bytes as are known. `None` if the first
/// byte is unknown, or if the rank contributes nothing.
pub(crate) type Contribution = Option<Vec<u8>>;

/// One rank's view of the memory that the ranks of a communicator share.
///
/// The memory has a header, then the control blocks, then the payloads. Both are indexed by mailbox: the
/// ranks' own come first, then one for each ordered pair of ranks.
#[derive(Debug)]
pub(crate) struct RankMailbox {
    base: NonNull<u8>,
    ranks: usize,
    rank: usize,
    /// The number of collective operations so far.
    operations: AtomicU64,
    given_up: AtomicBool,
}

// SAFETY: the memory is mapped for ever and shared between processes. It is accessed through atomics, and a
// payload only by the side that the control block gives it to.
unsafe impl Send for RankMailbox {}
// SAFETY: as above.
unsafe impl Sync for RankMailbox {}

/// The state of one mailbox.
#[repr(C)]
struct Control {
    /// The number of the last message.
    written: AtomicU64,
    /// The number of operations that the rank has finished. In the mailbox of a pair, it is the
    /// number of messages received.
    read: AtomicU64,
    /// 1 if the content of the message is known, or else 0.
    known: AtomicU64,
    /// The length of the message, in bytes.
    length: AtomicU64,
}

impl RankMailbox {
    /// Attaches to the shared memory of this name. The first rank creates the memory,
    /// and the last one unlinks it.
    pub(crate) fn attach(name: &str, ranks: usize, rank: usize) -> Option<Self> {
        let name = CString::new(name).ok()?;
        let size = HEADER + ranks * (CACHE_LINE + SMALL) + ranks * ranks * (CACHE_LINE + SMALL);
        // SAFETY: opens or creates a file in shared memory that only this user can open.
        let file = unsafe { libc::shm_open(name.as_ptr(), libc::O_CREAT | libc::O_RDWR, 0o600) };
        if file < 0 {
            return None;
        }
        // The kernel allocates a page when it is touched, and most pages never are.
        // SAFETY: the descriptor was opened above. Every rank sets the same size.
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
        // SAFETY: the mapping keeps the file open, and the descriptor is ours.
        unsafe { libc::close(file) };
        if !sized || base == libc::MAP_FAILED {
            return None;
        }
        let base = NonNull::new(base.cast::<u8>())?;
        // SAFETY: the mapping is longer than the header, zero when new, and never unmapped. Other processes
        // use the word as this type, too.
        let attached = unsafe { base.cast::<AtomicU32>().as_ref() };
        if attached.fetch_add(1, Ordering::AcqRel) as usize + 1 == ranks {
            // SAFETY: removes the name. The mappings stay.
            unsafe { libc::shm_unlink(name.as_ptr()) };
        }
        let (operations, given_up) = (AtomicU64::new(0), AtomicBool::new(false));
        Some(Self { base, ranks, rank, operations, given_up })
    }

    /// Returns the number of mailboxes: one for each rank, and one for each ordered pair of ranks.
    fn mailboxes(&self) -> usize {
        self.ranks + self.ranks * self.ranks
    }

    fn control(&self, mailbox: usize) -> &Control {
        assert!(mailbox < self.mailboxes());
        // SAFETY: inside the mapping, aligned to a cache line, zero at first, and only used as this type.
        unsafe { self.base.add(HEADER + mailbox * CACHE_LINE).cast::<Control>().as_ref() }
    }

    fn payload(&self, mailbox: usize) -> *mut u8 {
        assert!(mailbox < self.mailboxes());
        // SAFETY: inside the mapping.
        unsafe { self.base.add(HEADER + self.mailboxes() * CACHE_LINE + mailbox * SMALL) }.as_ptr()
    }

    /// Returns the index of the mailbox for messages from one rank to another.
    fn pair(&self, from: usize, to: usize) -> usize {
        self.ranks + from * self.ranks + to
    }

    /// Writes a message. The caller has waited until its readers have received the last one.
    fn write(&self, mailbox: usize, bytes: Option<&[u8]>, number: u64) {
        let control = self.control(mailbox);
        if let Some(bytes) = bytes {
            let length = bytes.len().min(SMALL);
            // SAFETY: at most SMALL bytes into a payload of that size, which nobody reads now.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.payload(mailbox), length) };
        }
        control.known.store(u64::from(bytes.is_some()), Ordering::Relaxed);
        control.length.store(bytes.map_or(0, <[u8]>::len).min(SMALL) as u64, Ordering::Relaxed);
        control.written.store(number, Ordering::Release);
    }

    /// Reads the last message of a mailbox. The caller has waited for the message, and its writer does not
    /// overwrite it until this rank has received it.
    fn read(&self, mailbox: usize) -> Contribution {
        let control = self.control(mailbox);
        if control.known.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let length = (control.length.load(Ordering::Relaxed) as usize).min(SMALL);
        let mut bytes = vec![0; length];
        // SAFETY: at most SMALL bytes from a payload of that size, which nobody writes now.
        unsafe { std::ptr::copy_nonoverlapping(self.payload(mailbox), bytes.as_mut_ptr(), length) };
        Some(bytes)
    }

    /// Waits until a condition on another rank holds. Returns false if the wait took longer than
    /// [`PATIENCE`], or if an earlier one did.
    fn wait_until(&self, condition: impl Fn() -> bool) -> bool {
        let started = Instant::now();
        let mut rounds = 0u32;
        while !condition() {
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
                        "memtrace: the phantom NCCL of rank {} of {} waited {} s for another rank and \
                         continues alone: from now on, it uses its own data instead of the other ranks' data",
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

    /// Publishes this rank's contribution to the next operation and returns all ranks' contributions, in
    /// order. Returns `None` if this process has stopped waiting for other ranks.
    pub(crate) fn exchange(&self, mine: Option<&[u8]>) -> Option<Vec<Contribution>> {
        if self.given_up.load(Ordering::Relaxed) {
            return None;
        }
        let number = self.operations.fetch_add(1, Ordering::Relaxed) + 1;
        let finished = |rank: usize| self.control(rank).read.load(Ordering::Acquire) + 1 >= number;
        if !self.wait_until(|| (0..self.ranks).all(finished)) {
            return None;
        }
        self.write(self.rank, mine, number);
        let published = |rank: usize| self.control(rank).written.load(Ordering::Acquire) >= number;
        if !self.wait_until(|| (0..self.ranks).all(published)) {
            return None;
        }
        let all = (0..self.ranks).map(|rank| self.read(rank)).collect();
        self.control(self.rank).read.store(number, Ordering::Release);
        Some(all)
    }

    /// Sends a message to one rank. Waits while that rank has not received the last message, and drops the
    /// message if this process has stopped waiting for other ranks.
    pub(crate) fn send(&self, to: usize, bytes: Option<&[u8]>) {
        let mailbox = self.pair(self.rank, to);
        let control = self.control(mailbox);
        let number = control.written.load(Ordering::Relaxed) + 1;
        if self.wait_until(|| control.read.load(Ordering::Acquire) + 1 >= number) {
            self.write(mailbox, bytes, number);
        }
    }

    /// Receives a message from one rank. Returns `None` if this process has stopped waiting for other ranks.
    pub(crate) fn receive(&self, from: usize) -> Option<Contribution> {
        let mailbox = self.pair(from, self.rank);
        let control = self.control(mailbox);
        let number = control.read.load(Ordering::Relaxed) + 1;
        if !self.wait_until(|| control.written.load(Ordering::Acquire) >= number) {
            return None;
        }
        let bytes = self.read(mailbox);
        control.read.store(number, Ordering::Release);
        Some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_exchange_messages_in_order_many_times() {
        let name = format!("/memtrace-phantom-test-{}", std::process::id());
        let rank = |rank: usize| {
            let mailbox = RankMailbox::attach(&name, 3, rank).unwrap();
            for round in 0..200u8 {
                let mine = [rank as u8, round];
                let known = (round % 5 != rank as u8).then_some(&mine[..]);
                let all = mailbox.exchange(known).unwrap();
                for (other, bytes) in all.into_iter().enumerate() {
                    let expected = (round % 5 != other as u8).then(|| vec![other as u8, round]);
                    assert_eq!(bytes, expected);
                }
                mailbox.send((rank + 1) % 3, Some(&mine));
                let before = (rank + 2) % 3;
                assert_eq!(mailbox.receive(before), Some(Some(vec![before as u8, round])));
            }
        };
        std::thread::scope(|scope| {
            for index in 0..3 {
                scope.spawn(move || rank(index));
            }
        });
    }
}
