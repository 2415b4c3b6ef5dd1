//! Exchanges small messages between the ranks of a communicator, through shared memory.
//!
//! A rank publishes its contribution to its n-th operation and waits until the other ranks have published
//! theirs. So object collectives, barriers and reductions of metrics give their real results. Large data is
//! never exchanged, so training never waits. If a rank waits for another one longer than [`PATIENCE`], it
//! prints one line on stderr and then never waits for a rank of this communicator again.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use memtrace_machine::files;

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
    /// The file of the memory, with a shared lock.
    file: File,
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
    /// Attaches to the shared memory at `path`. The first rank creates the file, and the last one removes it.
    /// If a rank never attaches, [`files::sweep`] removes the file later: every rank holds a
    /// shared lock on it.
    ///
    /// Returns `None` if the file cannot be made or is not a private file of this user, or if the folder has no
    /// room for the control blocks.
    pub(crate) fn attach(path: &Path, ranks: usize, rank: usize) -> Option<Self> {
        let mailboxes = ranks + ranks * ranks;
        let controls = HEADER + mailboxes * CACHE_LINE;
        let size = controls + mailboxes * SMALL;
        let file = files::open_locked(path, |_| Ok(())).ok()?;
        // Every rank sets the same size. Most payloads are never used, so only the control blocks get pages
        // now. Without pages, a store would end the program with SIGBUS where the folder is full.
        file.set_len(size as u64).ok()?;
        Self::reserve(&file, 0, controls)?;
        // SAFETY: a new shared mapping of that file.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return None;
        }
        let base = NonNull::new(base.cast::<u8>())?;
        // SAFETY: the mapping is longer than the header, zero when new, and never unmapped. Other processes
        // use the word as this type, too.
        let attached = unsafe { base.cast::<AtomicU32>().as_ref() };
        if attached.fetch_add(1, Ordering::AcqRel) as usize + 1 == ranks {
            fs::remove_file(path).ok();
        }
        let (operations, given_up) = (AtomicU64::new(0), AtomicBool::new(false));
        Some(Self { base, file, ranks, rank, operations, given_up })
    }

    /// Gives pages to a range of the file. Returns `None` if the folder has no room.
    fn reserve(file: &File, from: usize, bytes: usize) -> Option<()> {
        // SAFETY: changes nothing but the pages of this file.
        let error =
            unsafe { libc::posix_fallocate(file.as_raw_fd(), from as libc::off_t, bytes as libc::off_t) };
        (error == 0).then_some(())
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

    fn payload_offset(&self, mailbox: usize) -> usize {
        assert!(mailbox < self.mailboxes());
        HEADER + self.mailboxes() * CACHE_LINE + mailbox * SMALL
    }

    fn payload(&self, mailbox: usize) -> *mut u8 {
        // SAFETY: inside the mapping.
        unsafe { self.base.add(self.payload_offset(mailbox)) }.as_ptr()
    }

    /// Returns the index of the mailbox for messages from one rank to another.
    fn pair(&self, from: usize, to: usize) -> usize {
        self.ranks + from * self.ranks + to
    }

    /// Writes a message. The caller has waited until its readers have received the last one. If there is no
    /// room for its bytes, they are unknown to the readers.
    fn write(&self, mailbox: usize, bytes: Option<&[u8]>, number: u64) {
        let control = self.control(mailbox);
        let bytes = bytes.filter(|bytes| {
            let length = bytes.len().min(SMALL);
            length == 0 || Self::reserve(&self.file, self.payload_offset(mailbox), length).is_some()
        });
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
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn ranks_exchange_messages_in_order_many_times() {
        let path = files::path_of_mailbox(u64::from(std::process::id()));
        let rank = |rank: usize| {
            let mailbox = RankMailbox::attach(&path, 3, rank).unwrap();
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
        assert!(!path.exists());
    }

    #[test]
    fn a_mailbox_that_not_all_ranks_reach_is_swept_after_they_end() {
        let path = files::path_of_mailbox(u64::MAX - u64::from(std::process::id()));
        // Only the file: a mapping keeps the lock until the process ends.
        let file = files::open_locked(&path, |_| Ok(())).unwrap();
        files::sweep();
        assert!(path.exists());
        drop(file);
        files::sweep();
        assert!(!path.exists());
    }

    #[test]
    fn a_mailbox_that_other_users_can_open_is_refused() {
        let path = files::path_of_mailbox(u64::MAX / 4 - u64::from(std::process::id()));
        // Renamed when it has its mode, because other tests remove private files without a process.
        let new = path.with_extension("new");
        File::create(&new).unwrap().set_permissions(fs::Permissions::from_mode(0o666)).unwrap();
        fs::rename(new, &path).unwrap();
        assert!(RankMailbox::attach(&path, 2, 0).is_none());
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_message_without_room_for_its_bytes_is_unknown() {
        let path = files::path_of_mailbox(u64::MAX / 2 - u64::from(std::process::id()));
        let mailbox = RankMailbox::attach(&path, 1, 0).unwrap();
        assert!(RankMailbox::reserve(&mailbox.file, 0, usize::MAX >> 1).is_none());
        // A file that is open for reading alone gets no pages, as in a full folder.
        let full = RankMailbox { file: File::open("/dev/null").unwrap(), ..mailbox };
        assert_eq!(full.exchange(Some(&[1])).unwrap(), [None]);
    }
}
