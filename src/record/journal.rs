//! The chunks that hot paths fill: one pool per process, preallocated, prefaulted and recycled.
//!
//! The pool is a mapped file in local memory or on a local disk, so that the events of a process that
//! is killed stay behind; where there is no such place it is anonymous memory, and the meta row says
//! so. It never grows, so a store can neither fault nor raise SIGBUS: every page was there before the
//! first event.
//!
//! The rest of the crate sees [`ChunkWriter`] (one thread fills it) and [`ChunkReader`] (the writer
//! thread drains it, also while it is being filled); neither can see a slot that is not complete.

use std::cell::UnsafeCell;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};
use memmap2::{MmapOptions, MmapRaw};
use memtrace_trace::Event;

/// The size of a chunk: small, so that a process of hundreds of threads has one for each.
pub const CHUNK_BYTES: usize = 16 << 10;
/// Events in a chunk; its header takes the place of one.
pub const SLOTS: usize = CHUNK_BYTES / size_of::<Event>() - 1;

/// What stands before a chunk's events.
#[repr(C, align(64))]
struct Header {
    /// How many slots are complete. The filling thread stores it with `Release`.
    committed: AtomicU32,
    /// The thread that fills the chunk.
    tid: AtomicU32,
    /// The lane of that thread, unique in the process.
    lane: AtomicU32,
    /// The place of the chunk in its lane: 0, 1, 2, ...
    index: AtomicU32,
    /// 1 while the chunk holds events that the trace does not have yet.
    in_use: AtomicU32,
}

#[repr(C)]
struct Chunk {
    header: Header,
    slots: [UnsafeCell<Event>; SLOTS],
}

const _: () = assert!(size_of::<Chunk>() == CHUNK_BYTES);

/// What stands before the chunks of a journal; takes a chunk's place.
#[repr(C, align(64))]
struct JournalHeader {
    magic: [u8; 8],
    pid: AtomicU32,
    chunk_bytes: AtomicU32,
    chunks: AtomicU64,
}

const MAGIC: [u8; 8] = *b"MEMTRJ01";

/// The chunks of a process.
pub struct Pool {
    memory: MmapRaw,
    chunks: usize,
    path: Option<PathBuf>,
    free: (Sender<u32>, Receiver<u32>),
    full: (Sender<u32>, Receiver<u32>),
}

impl Pool {
    /// A pool of about `bytes`, its file in the first of `folders` that has the room; in anonymous
    /// memory when none does.
    ///
    /// # Errors
    /// When the system has no memory for it.
    pub fn new(bytes: usize, folders: &[&Path], name: &str) -> io::Result<Pool> {
        let chunks = (bytes / CHUNK_BYTES).max(8);
        let length = (chunks + 1) * CHUNK_BYTES;
        let on_file = folders.iter().find_map(|folder| map_file(&folder.join(name), length).ok());
        let (memory, path) = match on_file {
            Some((memory, path)) => (memory, Some(path)),
            None => (anonymous(length)?, None),
        };
        let pool = Pool { memory, chunks, path, free: bounded(chunks), full: bounded(chunks) };
        pool.start();
        Ok(pool)
    }

    /// The file behind the chunks; `None` for anonymous memory.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// How many chunks are free, in percent.
    #[must_use]
    pub fn percent_free(&self) -> usize {
        self.free.1.len() * 100 / self.chunks
    }

    /// A free chunk to fill; waits for one up to `patience`.
    #[must_use]
    pub fn take(&'static self, tid: u32, lane: u32, index: u32, patience: Duration) -> Option<ChunkWriter> {
        let chunk =
            self.free.1.try_recv().ok().or_else(|| {
                if patience.is_zero() { None } else { self.free.1.recv_timeout(patience).ok() }
            })?;
        let header = &self.chunk(chunk).header;
        header.committed.store(0, Ordering::Relaxed);
        header.tid.store(tid, Ordering::Relaxed);
        header.lane.store(lane, Ordering::Relaxed);
        header.index.store(index, Ordering::Relaxed);
        header.in_use.store(1, Ordering::Release);
        Some(ChunkWriter { pool: self, chunk, len: 0 })
    }

    /// Full chunks and those of ended threads, in the order of their lanes.
    #[must_use]
    pub fn full(&self) -> &Receiver<u32> {
        &self.full.1
    }

    /// The reader of the chunk with this number.
    #[must_use]
    pub fn reader(&'static self, chunk: u32) -> ChunkReader {
        ChunkReader { pool: self, chunk }
    }

    /// Gives a drained chunk back.
    pub fn recycle(&self, reader: ChunkReader) {
        self.chunk(reader.chunk).header.in_use.store(0, Ordering::Release);
        // The channel has room for every chunk there is.
        let _ = self.free.0.try_send(reader.chunk);
    }

    /// Removes the file: everything in it is in the trace.
    pub fn remove_file(&self) {
        if let Some(path) = &self.path {
            let _ = std::fs::remove_file(path);
        }
    }

    fn start(&self) {
        // SAFETY: the mapping is at least a chunk long, page aligned, and no one else has it yet.
        let header = unsafe { &mut *self.memory.as_mut_ptr().cast::<JournalHeader>() };
        header.magic = MAGIC;
        header.pid = AtomicU32::new(std::process::id());
        header.chunk_bytes = AtomicU32::new(CHUNK_BYTES as u32);
        header.chunks = AtomicU64::new(self.chunks as u64);
        for chunk in 0..self.chunks {
            let _ = self.free.0.try_send(chunk as u32);
        }
    }

    fn chunk(&self, chunk: u32) -> &Chunk {
        assert!((chunk as usize) < self.chunks, "no such chunk");
        // SAFETY: the mapping holds `chunks` chunks behind the journal's header and lives as long as
        // `self`; a header is made of atomics and a slot is in a cell, so sharing them is sound.
        unsafe { &*self.memory.as_ptr().add((chunk as usize + 1) * CHUNK_BYTES).cast::<Chunk>() }
    }
}

// SAFETY: slots are the only part that is not atomic. The one `ChunkWriter` of a chunk writes slots from
// `committed` on and readers read slots before it, after an `Acquire` of the count.
unsafe impl Sync for Pool {}
// SAFETY: as above; nothing in it belongs to a thread.
unsafe impl Send for Pool {}

fn map_file(path: &Path, length: usize) -> io::Result<(MmapRaw, PathBuf)> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(path)?;
    let mapped =
        reserve(&file, length).and_then(|()| MmapOptions::new().len(length).populate().map_raw(&file));
    match mapped {
        Ok(memory) => Ok((memory, path.to_owned())),
        Err(error) => {
            let _ = std::fs::remove_file(path);
            Err(error)
        }
    }
}

/// Takes the room on the file system now: a store into a hole of a full tmpfs would be SIGBUS.
fn reserve(file: &File, length: usize) -> io::Result<()> {
    // SAFETY: the descriptor is open for writing as long as `file` lives.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, length as libc::off_t) } {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

fn anonymous(length: usize) -> io::Result<MmapRaw> {
    MmapOptions::new().len(length).populate().map_anon().map(MmapRaw::from)
}

/// The filling end of a chunk: there is one, on one thread.
pub struct ChunkWriter {
    pool: &'static Pool,
    chunk: u32,
    len: u32,
}

impl ChunkWriter {
    /// The chunk's number.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.chunk
    }

    /// How many more events fit.
    #[must_use]
    pub fn room(&self) -> usize {
        SLOTS - self.len as usize
    }

    /// Adds an event; the caller saw that there is [`ChunkWriter::room`].
    #[inline]
    pub fn push(&mut self, event: Event) {
        let chunk = self.pool.chunk(self.chunk);
        let slot = chunk.slots[self.len as usize].get();
        // SAFETY: this is the chunk's only writer, and no reader looks at slots from `committed` on.
        unsafe { slot.write(event) };
        self.len += 1;
        chunk.header.committed.store(self.len, Ordering::Release);
    }

    /// Adds several events that readers see at once or not at all.
    pub fn push_all(&mut self, events: &[Event]) {
        let chunk = self.pool.chunk(self.chunk);
        for event in events {
            let slot = chunk.slots[self.len as usize].get();
            // SAFETY: as in `push`.
            unsafe { slot.write(*event) };
            self.len += 1;
        }
        chunk.header.committed.store(self.len, Ordering::Release);
    }

    /// Hands the chunk to the writer thread.
    pub fn finish(self) {
        // The channel has room for every chunk there is.
        let _ = self.pool.full.0.try_send(self.chunk);
    }
}

/// The draining end of a chunk.
#[derive(Clone, Copy)]
pub struct ChunkReader {
    pool: &'static Pool,
    chunk: u32,
}

impl ChunkReader {
    /// The chunk's number.
    #[must_use]
    pub fn number(self) -> u32 {
        self.chunk
    }

    /// How many events are complete.
    #[must_use]
    pub fn committed(self) -> usize {
        (self.header().committed.load(Ordering::Acquire) as usize).min(SLOTS)
    }

    /// The complete event in slot `index`, which must be below a count that `committed` gave.
    #[must_use]
    pub fn event(self, index: usize) -> Event {
        debug_assert!(index < self.committed());
        // SAFETY: the slot is complete (its count was read with `Acquire`), and a complete slot does
        // not change until the chunk is recycled, which only the caller's thread does.
        unsafe { self.pool.chunk(self.chunk).slots[index].get().read() }
    }

    /// The thread that fills the chunk.
    #[must_use]
    pub fn tid(self) -> u32 {
        self.header().tid.load(Ordering::Relaxed)
    }

    /// The lane that the chunk belongs to.
    #[must_use]
    pub fn lane(self) -> u32 {
        self.header().lane.load(Ordering::Relaxed)
    }

    /// The place of the chunk in its lane.
    #[must_use]
    pub fn index(self) -> u32 {
        self.header().index.load(Ordering::Relaxed)
    }

    fn header(&self) -> &Header {
        &self.pool.chunk(self.chunk).header
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_sees_what_is_complete_and_a_recycled_chunk_starts_empty() {
        let pool: &'static Pool = Box::leak(Box::new(Pool::new(8 * CHUNK_BYTES, &[], "none").unwrap()));
        assert!(pool.path().is_none());
        let mut writer = pool.take(7, 1, 0, Duration::ZERO).unwrap();
        let reader = pool.reader(writer.number());
        assert_eq!(reader.committed(), 0);
        writer.push(Event { addr: 42, ..Event::default() });
        assert_eq!((reader.committed(), reader.event(0).addr, reader.tid()), (1, 42, 7));
        writer.finish();
        assert_eq!(pool.full().try_recv(), Ok(reader.number()));
        pool.recycle(reader);
        assert_eq!(pool.percent_free(), 100);
    }

    #[test]
    fn an_empty_pool_gives_none_after_its_patience() {
        let pool: &'static Pool = Box::leak(Box::new(Pool::new(8 * CHUNK_BYTES, &[], "none").unwrap()));
        let taken: Vec<_> = (0..8).filter_map(|i| pool.take(1, 1, i, Duration::ZERO)).collect();
        assert_eq!(taken.len(), 8);
        assert!(pool.take(1, 1, 8, Duration::from_millis(1)).is_none());
    }

    #[test]
    fn the_file_is_private_and_never_replaces_another() {
        use std::os::unix::fs::PermissionsExt;
        let folder = std::env::temp_dir().join(format!("memtrace-journal-test-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let pool = Pool::new(1 << 20, &[&folder], "j").unwrap();
        let path = pool.path().unwrap();
        assert_eq!(std::fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(Pool::new(1 << 20, &[&folder], "j").unwrap().path().is_none());
        pool.remove_file();
        assert!(!folder.join("j").exists());
        std::fs::remove_dir(&folder).unwrap();
    }
}
