//! The chunk pool: preallocated, prefaulted and recycled chunks that threads fill with events.
//!
//! The pool is a mapped file, the journal, in local memory or on a local disk, so the events of a killed
//! process survive. If no such place exists, the pool is anonymous memory, and the meta row has no name of a
//! journal. The pool never grows, and every page is present before the first event, so a store can neither
//! fault nor raise SIGBUS.
//!
//! The rest of the crate uses [`ChunkWriter`] and [`ChunkReader`]. One thread fills a chunk through the
//! writer. The writer thread drains it through the reader, also while it is being filled. Neither of the two
//! gives access to an incomplete slot.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};
use memmap2::{Advice, MmapOptions, MmapRaw};
use memtrace_trace::journal::{
    CHUNK_BYTES, Chunk, ChunkHeader, HEADER_BYTES, JournalHeader, MAGIC, Run, SLOTS, mount_namespace,
    names_path,
};
use memtrace_trace::{Event, private_file};

use crate::control::polled;
use crate::intern::with_tables;
use crate::own_page;

/// The pool is short if fewer than this percentage of its chunks are free.
const SHORT_PERCENT: usize = 25;

/// The chunk pool of a process.
pub(crate) struct ChunkPool {
    memory: MmapRaw,
    chunks: usize,
    path: Option<PathBuf>,
    /// The owners of the chunks. The copies in the mapping are for recovery only, because another process may
    /// write to the mapping.
    owners: Box<[Owner]>,
    /// The open file, if it holds the lock of the journal. Usually the mapping holds the lock and there is no
    /// open file.
    _lock: Option<File>,
    short: AtomicBool,
    free: (Sender<u32>, Receiver<u32>),
    full: (Sender<u32>, Receiver<u32>),
}

/// The thread that fills or filled a chunk, its lane, and the position of the chunk in the lane.
#[derive(Default)]
struct Owner {
    tid: AtomicU32,
    /// The lane (upper half) and the position in it (lower half). One word, because the writer thread may
    /// find a chunk through an old [`LaneShared::chunk`](super::event_queue::LaneShared) while another lane
    /// takes the chunk, and must not mix the two.
    place: AtomicU64,
}

impl ChunkPool {
    /// Creates a pool of about `bytes` bytes. Its file, `name`, is in the first of `folders` with enough
    /// room. If no folder has enough room, the pool is anonymous memory.
    ///
    /// # Errors
    /// Returns an error if there is not enough memory.
    pub(crate) fn new(bytes: usize, folders: &[&Path], name: &str, run: Run) -> io::Result<ChunkPool> {
        let chunks = (bytes / CHUNK_BYTES).max(8);
        let length = HEADER_BYTES + chunks * CHUNK_BYTES;
        let is_wiped = own_page::is_wiped_in_children();
        let on_file = folders.iter().find_map(|folder| map_file(&folder.join(name), length, is_wiped).ok());
        let (memory, path, lock) = match on_file {
            Some((memory, path, lock)) => (memory, Some(path), lock),
            None => (anonymous(length)?, None, None),
        };
        let pool = ChunkPool {
            memory,
            chunks,
            path,
            owners: (0..chunks).map(|_| Owner::default()).collect(),
            _lock: lock,
            short: AtomicBool::new(false),
            free: bounded(chunks),
            full: bounded(chunks),
        };
        pool.start(run);
        Ok(pool)
    }

    /// Returns the file of the chunks, or `None` for anonymous memory.
    #[must_use]
    pub(crate) fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Returns true if few chunks are free, so that events of low value should be skipped.
    #[inline]
    #[must_use]
    pub(crate) fn is_short(&self) -> bool {
        self.short.load(Ordering::Relaxed)
    }

    /// Stores whether few chunks are free. The writer thread calls this after it has returned chunks, so that
    /// the answer of a thread that was interrupted here does not stay.
    pub(super) fn note_shortness(&self) {
        self.short.store(self.percent_free() < SHORT_PERCENT, Ordering::Relaxed);
    }

    /// Returns the number of chunks in the pool, free or not.
    #[must_use]
    pub(crate) fn chunks(&self) -> usize {
        self.chunks
    }

    /// Returns the percentage of chunks that are free.
    #[must_use]
    pub(crate) fn percent_free(&self) -> usize {
        self.free.1.len() * 100 / self.chunks
    }

    /// Returns true if no chunk is free.
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.free.1.is_empty()
    }

    /// Takes a free chunk to fill. If no chunk is free, waits for one up to `patience`.
    #[must_use]
    pub(crate) fn take(
        &'static self,
        tid: u32,
        lane: u32,
        index: u32,
        patience: Duration,
    ) -> Option<ChunkWriter> {
        let chunk = polled(&self.free.1, patience)?;
        let header = &self.chunk(chunk).header;
        header.committed.store(0, Ordering::Relaxed);
        let owner = &self.owners[chunk as usize];
        owner.tid.store(tid, Ordering::Relaxed);
        // `Release`: a reader that finds this place finds that no slot is complete, too.
        owner.place.store(u64::from(lane) << 32 | u64::from(index), Ordering::Release);
        header.tid.store(tid, Ordering::Relaxed);
        header.lane.store(lane, Ordering::Relaxed);
        header.index.store(index, Ordering::Relaxed);
        header.consumed.iter().for_each(|consumed| consumed.store(0, Ordering::Relaxed));
        header.in_use.store(1, Ordering::Release);
        self.chunk(chunk).slots[..AHEAD].iter().for_each(|slot| prefetch(slot.get()));
        self.note_shortness();
        Some(ChunkWriter { pool: self, number: chunk, chunk: self.chunk(chunk), len: 0 })
    }

    /// Returns the channel of the chunks that are full or whose thread has ended. The chunks of a lane are in
    /// order.
    #[must_use]
    pub(crate) fn full(&self) -> &Receiver<u32> {
        &self.full.1
    }

    /// Returns the reader of the chunk with this number.
    #[must_use]
    pub(crate) fn reader(&'static self, chunk: u32) -> ChunkReader {
        ChunkReader { pool: self, number: chunk, chunk: self.chunk(chunk) }
    }

    /// Returns the header of the journal.
    pub(super) fn header(&self) -> &JournalHeader {
        // SAFETY: the mapping begins with the header and lives as long as `self`; everything in it that
        // changes is atomic or in a cell.
        unsafe { &*self.memory.as_ptr().cast::<JournalHeader>() }
    }

    /// Stores in the journal that the trace ends here because it cannot be written any further, so that
    /// recovery will finish the trace. Returns false if there is no journal.
    pub(crate) fn stop_trace(&self) -> bool {
        self.header().is_stopped.store(1, Ordering::Release);
        self.path.is_some()
    }

    /// Returns a drained chunk to the pool.
    pub(crate) fn recycle(&self, reader: ChunkReader) {
        self.chunk(reader.number).header.in_use.store(0, Ordering::Release);
        // The channel has room for every chunk.
        let _ = self.free.0.try_send(reader.number);
        self.note_shortness();
    }

    /// Removes the journal and the file of definitions next to it. Called when recovery does not need them.
    pub(crate) fn remove_file(&self) {
        if let Some(path) = &self.path {
            let _ = std::fs::remove_file(path);
            let _ = std::fs::remove_file(names_path(path));
        }
    }

    /// Sets the journal's time of change to now.
    pub(crate) fn mark_alive(&self) {
        if let Some(path) = &self.path {
            let _ = private_file::touch(path);
        }
    }

    fn start(&self, run: Run) {
        // SAFETY: the mapping begins with the header and is page aligned, and nothing else has it yet.
        let header = unsafe { &mut *self.memory.as_mut_ptr().cast::<JournalHeader>() };
        header.pid = AtomicU32::new(run.pid);
        header.rank = AtomicU32::new(run.rank);
        header.chunks = AtomicU64::new(self.chunks as u64);
        header.start_ns = AtomicU64::new(run.start_ns);
        header.process_start = AtomicU64::new(run.process_start);
        header.power2_divisions = AtomicU64::new(run.power2_divisions);
        header.rules = AtomicU64::new(run.rules);
        header.mount_namespace = AtomicU64::new(mount_namespace());
        header.part = [AtomicU64::new(1), AtomicU64::new(1)];
        // The magic bytes are stored last, because recovery ignores a file without them.
        std::sync::atomic::fence(Ordering::Release);
        header.magic = MAGIC;
        for chunk in 0..self.chunks {
            let _ = self.free.0.try_send(chunk as u32);
        }
    }

    pub(super) fn chunk(&self, chunk: u32) -> &Chunk {
        assert!((chunk as usize) < self.chunks, "no such chunk");
        // SAFETY: the mapping holds `chunks` chunks after the header of the journal and lives as long as
        // `self`. A chunk's header consists of atomics and a slot is in a cell, so sharing them is sound.
        unsafe { &*self.memory.as_ptr().add(HEADER_BYTES + chunk as usize * CHUNK_BYTES).cast::<Chunk>() }
    }
}

// SAFETY: only slots are not atomic. The one `ChunkWriter` of a chunk writes slots at `committed` and after
// it, and readers read only slots before `committed`, after an `Acquire` load of it.
unsafe impl Sync for ChunkPool {}
// SAFETY: as above; no part of the pool belongs to a thread.
unsafe impl Send for ChunkPool {}

/// The number of slots that a thread prefetches ahead of an event. A slot was last in the cache of the writer
/// thread, or in no cache, and a cache miss takes longer than recording an event.
const AHEAD: usize = 8;

/// Prefetches a slot for writing.
#[inline(always)]
fn prefetch(slot: *const Event) {
    #[cfg(miri)]
    let _ = slot;
    // SAFETY: PREFETCHW has no visible effect and faults at no address; x86-64 processors without it execute
    // it as a no-op.
    #[cfg(all(not(miri), target_arch = "x86_64"))]
    unsafe {
        std::arch::asm!("prefetchw [{slot}]", slot = in(reg) slot, options(nostack, preserves_flags, readonly));
    }
    // SAFETY: PRFM has no visible effect and faults at no address.
    #[cfg(all(not(miri), target_arch = "aarch64"))]
    unsafe {
        std::arch::asm!("prfm pstl1keep, [{slot}]", slot = in(reg) slot, options(nostack, preserves_flags, readonly));
    }
}

/// Creates, maps and locks a journal. `is_wiped` is true if the kernel can keep children away from memory. The
/// last value is as in [`ChunkPool::_lock`].
fn map_file(path: &Path, length: usize, is_wiped: bool) -> io::Result<(MmapRaw, PathBuf, Option<File>)> {
    let file = private_file::create(path)?;
    let open_again = || private_file::reopen(path, OpenOptions::new().read(true).write(true));
    let reserved = reserve(&file, length);
    // Closed before the file is locked: if the lock belongs to the process, closing any descriptor of the file
    // releases the lock.
    drop(file);
    // `with_tables` holds a lock that a fork takes, so no child is forked before the new descriptor is
    // closed. Such a child would share the open file, and thereby the lock.
    let mapped = reserved
        .and_then(|()| with_tables(|_| open_again().and_then(|file| map_and_lock(file, length, is_wiped))));
    match mapped {
        Ok((memory, lock)) => {
            populate(&memory);
            Ok((memory, path.to_owned(), lock))
        }
        Err(error) => {
            let _ = std::fs::remove_file(path);
            Err(error)
        }
    }
}

/// Maps the journal and locks it for this process. Must be called before the file has the magic bytes of a
/// journal.
///
/// The lock belongs to the open file, which the mapping keeps open, so no descriptor is left that the program
/// could close. No child has the mapping, so the lock is released when the process ends or calls `exec`. On a
/// kernel that cannot keep children away from the mapping, the lock belongs to the process and to a
/// descriptor that stays open.
fn map_and_lock(file: File, length: usize, is_wiped: bool) -> io::Result<(MmapRaw, Option<File>)> {
    let memory = MmapOptions::new().len(length).map_raw(&file)?;
    let is_private = is_wiped && memory.advise(Advice::DontFork).is_ok();
    if is_private && lock(&file, libc::F_OFD_SETLK).is_ok() {
        return Ok((memory, None));
    }
    let _ = lock(&file, libc::F_SETLK);
    Ok((memory, Some(file)))
}

/// Locks the whole file with the `fcntl` command `command`.
fn lock(file: &File, command: libc::c_int) -> io::Result<()> {
    let whole = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    // SAFETY: the descriptor is open and the lock is initialized.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, &whole) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Makes every page of a new journal present, so that no hook takes a page fault.
fn populate(memory: &MmapRaw) {
    if memory.advise(Advice::PopulateWrite).is_ok() {
        return;
    }
    // Linux before 5.14 has no `MADV_POPULATE_WRITE`, so each page is written.
    for at in (0..memory.len()).step_by(4096) {
        // SAFETY: the address is inside the mapping, which nothing else uses yet. A new file is all zero.
        unsafe { memory.as_mut_ptr().add(at).write_volatile(0) };
    }
}

/// Reserves space for the whole file, because a store into a hole of a full tmpfs would raise SIGBUS.
fn reserve(file: &File, length: usize) -> io::Result<()> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is valid for the answer.
    unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) };
    // Beyond the limit, the call below would raise SIGXFSZ, which ends the program, although the program
    // itself wrote nothing.
    if limit.rlim_cur < length as libc::rlim_t {
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    // SAFETY: the descriptor is open for writing as long as `file` lives.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, length as libc::off_t) } {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

fn anonymous(length: usize) -> io::Result<MmapRaw> {
    let mut options = MmapOptions::new();
    options.len(length);
    // Miri does not support `MAP_POPULATE`.
    if !cfg!(miri) {
        options.populate();
    }
    options.map_anon().map(MmapRaw::from)
}

/// The writing end of a chunk. Only one thread has the writer of a chunk.
pub(crate) struct ChunkWriter {
    pool: &'static ChunkPool,
    number: u32,
    /// The chunk itself, so that an event needs no lookup.
    chunk: &'static Chunk,
    len: u32,
}

impl ChunkWriter {
    /// Returns the index of the chunk in the pool, for [`ChunkPool::reader`].
    #[must_use]
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Returns the number of events that still fit.
    #[must_use]
    pub(crate) fn room(&self) -> usize {
        SLOTS - self.len as usize
    }

    /// Adds an event. The caller must check [`ChunkWriter::room`] first.
    #[inline(always)]
    pub(crate) fn push(&mut self, event: Event) {
        let chunk = self.chunk;
        let slot = chunk.slots[self.len as usize].get();
        // SAFETY: this is the chunk's only writer, and no reader reads slots at `committed` or after it.
        unsafe { slot.write(event) };
        prefetch(slot.wrapping_add(AHEAD));
        self.len += 1;
        chunk.header.committed.store(self.len, Ordering::Release);
    }

    /// Adds several events. Readers see none of these events until all are stored.
    pub(crate) fn push_all(&mut self, events: &[Event]) {
        let chunk = self.chunk;
        for event in events {
            let slot = chunk.slots[self.len as usize].get();
            // SAFETY: as in `push`.
            unsafe { slot.write(*event) };
            self.len += 1;
        }
        chunk.header.committed.store(self.len, Ordering::Release);
    }

    /// Hands the chunk to the writer thread.
    pub(crate) fn finish(self) {
        // The channel has room for every chunk.
        let _ = self.pool.full.0.try_send(self.number);
    }
}

/// The reading end of a chunk.
#[derive(Clone, Copy)]
pub(crate) struct ChunkReader {
    pool: &'static ChunkPool,
    number: u32,
    chunk: &'static Chunk,
}

impl ChunkReader {
    /// Returns the index of the chunk in the pool.
    #[must_use]
    pub(crate) fn number(self) -> u32 {
        self.number
    }

    /// Returns the number of complete events, at most [`SLOTS`].
    #[must_use]
    pub(crate) fn committed(self) -> usize {
        (self.header().committed.load(Ordering::Acquire) as usize).min(SLOTS)
    }

    /// Returns the complete event in slot `index`, which must be less than an earlier result of `committed`.
    #[must_use]
    pub(crate) fn event(self, index: usize) -> Event {
        debug_assert!(index < self.committed());
        // SAFETY: the slot is complete (its count was read with `Acquire`), and a complete slot does
        // not change until the chunk is recycled, which only the caller's thread does.
        unsafe { self.chunk.slots[index].get().read() }
    }

    /// Returns the index of the first definition in these slots, which must be below an earlier result of `committed`.
    #[must_use]
    pub(crate) fn find_definition(self, slots: Range<usize>) -> Option<usize> {
        debug_assert!(slots.end <= self.committed());
        let first = slots.start;
        let mut slots = self.chunk.slots[slots].iter();
        // SAFETY: as in `event`.
        slots.position(|slot| unsafe { slot.get().read() }.is_definition()).map(|index| first + index)
    }

    /// Returns the id of the thread that fills or filled the chunk.
    #[must_use]
    pub(crate) fn tid(self) -> u32 {
        self.owner().tid.load(Ordering::Relaxed)
    }

    /// Returns the number of the lane that the chunk belongs to, and the position of the chunk in the lane.
    #[must_use]
    pub(crate) fn place(self) -> (u32, u32) {
        let place = self.owner().place.load(Ordering::Acquire);
        ((place >> 32) as u32, place as u32)
    }

    fn owner(&self) -> &Owner {
        &self.pool.owners[self.number as usize]
    }

    fn header(&self) -> &ChunkHeader {
        &self.chunk.header
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_trace::{Api, Header, Payload};

    #[test]
    fn a_chunk_reader_sees_complete_events_and_a_recycled_chunk_starts_empty() {
        let pool: &'static ChunkPool =
            Box::leak(Box::new(ChunkPool::new(8 * CHUNK_BYTES, &[], "none", Run::default()).unwrap()));
        assert!(pool.path().is_none());
        let mut writer = pool.take(7, 1, 0, Duration::ZERO).unwrap();
        let reader = pool.reader(writer.number());
        assert_eq!(reader.committed(), 0);
        let event = Payload::FreeCompleted { address: 42 }.pack(Header::new(0, Api::CachingAllocator, 0));
        writer.push(event);
        assert_eq!((reader.committed(), reader.event(0), reader.tid()), (1, event, 7));
        writer.finish();
        assert_eq!(pool.full().try_recv(), Ok(reader.number()));
        pool.recycle(reader);
        assert_eq!(pool.percent_free(), 100);
    }

    #[test]
    fn an_empty_chunk_pool_returns_no_chunk_after_the_patience() {
        let pool: &'static ChunkPool =
            Box::leak(Box::new(ChunkPool::new(8 * CHUNK_BYTES, &[], "none", Run::default()).unwrap()));
        let taken: Vec<_> = (0..8).filter_map(|i| pool.take(1, 1, i, Duration::ZERO)).collect();
        assert_eq!(taken.len(), 8);
        assert!(pool.take(1, 1, 8, Duration::from_millis(1)).is_none());
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri maps no files")]
    fn the_journal_is_private_and_never_replaces_another_file() {
        use std::os::unix::fs::PermissionsExt;
        let folder = std::env::temp_dir().join(format!("memtrace-journal-test-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let pool = ChunkPool::new(1 << 20, &[&folder], "j", Run::default()).unwrap();
        let path = pool.path().unwrap();
        assert_eq!(std::fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(ChunkPool::new(1 << 20, &[&folder], "j", Run::default()).unwrap().path().is_none());
        pool.remove_file();
        assert!(!folder.join("j").exists());
        std::fs::remove_dir(&folder).unwrap();
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri maps no files")]
    fn a_journal_is_locked_where_the_kernel_cannot_keep_children_away_from_it() {
        let folder = std::env::temp_dir().join(format!("memtrace-old-lock-test-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("j");
        let (_memory, _, kept) = map_file(&path, 1 << 20, false).unwrap();
        assert!(kept.is_some(), "a descriptor holds the lock");
        // The lock of an open file conflicts with the lock of a process, even of the same process.
        let other = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        assert!(lock(&other, libc::F_OFD_SETLK).is_err());
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri maps no files")]
    fn the_lock_of_a_journal_needs_no_descriptor_and_goes_to_no_child() {
        own_page::claim();
        let folder = std::env::temp_dir().join(format!("memtrace-lock-test-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let pool = ChunkPool::new(1 << 20, &[&folder], "j", Run::default()).unwrap();
        if pool.memory.advise(Advice::DontFork).is_err() {
            eprintln!("skipped: no `MADV_DONTFORK` here");
            return std::fs::remove_dir_all(&folder).unwrap();
        }
        assert!(pool._lock.is_none(), "no descriptor is left to be closed");
        // Like recovery, request the lock through another opening of the file -> refused, because the pool
        // holds the lock.
        let other = OpenOptions::new().read(true).write(true).open(folder.join("j")).unwrap();
        assert!(lock(&other, libc::F_OFD_SETLK).is_err());
        // A child that lives longer than the pool must not keep the lock.
        // SAFETY: the child only sleeps.
        let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } as libc::pid_t;
        if child == 0 {
            // SAFETY: the child only sleeps.
            unsafe { libc::sleep(20) };
            // SAFETY: ends the child.
            unsafe { libc::_exit(0) };
        }
        drop(pool);
        let free = lock(&other, libc::F_OFD_SETLK);
        // SAFETY: `child` is the child of this test, and the call only ends it.
        unsafe { libc::kill(child, libc::SIGKILL) };
        // SAFETY: as above; no status is wanted.
        unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
        free.unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
