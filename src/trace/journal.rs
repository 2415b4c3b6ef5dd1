//! The layout of a journal on disk, and the identity of the process that writes it.
//!
//! A journal is a mapped file: a [`JournalHeader`], followed by the chunks that threads fill with events. The
//! recorder maps the file and stores through these types. Recovery reads the bytes at the offsets in
//! [`layout`] and does not map the file, because it may be truncated or not be a journal at all.

use std::cell::UnsafeCell;
use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64};

use crate::Event;

/// The size of a chunk in bytes. It is small so that each of a process's hundreds of threads can have one.
pub const CHUNK_BYTES: usize = 16 << 10;
/// The number of events in a chunk. The chunk's header uses the space of one event.
pub const SLOTS: usize = CHUNK_BYTES / size_of::<Event>() - 1;

/// The first bytes of a journal. The digits are the version of the layout.
pub const MAGIC: [u8; 8] = *b"MEMTRJ04";

/// The size of the journal header in bytes, a multiple of the chunk size.
pub const HEADER_BYTES: usize = 2 * CHUNK_BYTES;

/// The maximum length of a path in a journal, in bytes; Linux allows no longer paths.
pub const MAX_PATH: usize = 4096;

/// The maximum size of a meta row's JSON in a journal, in bytes.
pub const MAX_META: usize = 8 << 10;

/// The maximum size of a text in [`JournalHeader::words`], in bytes.
pub const MAX_WORDS: usize = 2 << 10;

/// The number of [`Losses`] counters in a journal, which the lanes share.
pub const LOSS_SHARDS: usize = 64;

/// The header of a chunk, before its events.
#[repr(C, align(64))]
pub struct ChunkHeader {
    /// The number of complete slots. The thread that fills the chunk stores it with `Release`.
    pub committed: AtomicU32,
    /// The id of the thread that fills the chunk.
    pub tid: AtomicU32,
    /// The lane of the thread, unique in the process.
    pub lane: AtomicU32,
    /// The position of the chunk in its lane: 0, 1, 2, ...
    pub index: AtomicU32,
    /// 1 while the chunk contains events that are not yet in the trace.
    pub in_use: AtomicU32,
    /// The number of slots of this chunk whose events are in the trace, at each of the last two checkpoints.
    pub consumed: [AtomicU32; 2],
}

/// A chunk: its header and its events.
#[repr(C)]
pub struct Chunk {
    /// The header.
    pub header: ChunkHeader,
    /// The events. Slots before `committed` are complete; one thread writes the others.
    pub slots: [UnsafeCell<Event>; SLOTS],
}

const _: () = assert!(size_of::<Chunk>() == CHUNK_BYTES);

/// Counts of events that are in no chunk. Each lane uses one of [`LOSS_SHARDS`] counters, so that threads do
/// not contend for a cache line.
#[repr(C, align(64))]
pub struct Losses {
    /// The number of dropped events. An event is counted before it is dropped.
    pub dropped: AtomicU64,
    /// The number of events put on the overflow list. The list is on the heap, so a kill loses the listed
    /// events that are not yet in the trace.
    pub overflowed: AtomicU64,
}

/// The header of a journal.
///
/// A checkpoint records how much of the trace is valid, and which events are in it. There are two, and
/// `checkpoints` selects the valid one, so the process can be killed between any two stores.
#[repr(C, align(64))]
pub struct JournalHeader {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// The process id.
    pub pid: AtomicU32,
    /// The distributed rank.
    pub rank: AtomicU32,
    /// The number of chunks that follow.
    pub chunks: AtomicU64,
    /// The time at which the trace starts, in ns of `CLOCK_MONOTONIC`.
    pub start_ns: AtomicU64,
    /// The start time of the process, in kernel ticks. It distinguishes the process from a later one with the
    /// same id.
    pub process_start: AtomicU64,
    /// The allocator's `roundup_power2_divisions`.
    pub power2_divisions: AtomicU64,
    /// Bit 0: the allocator caches. Bit 1: the allocator's reports are the blocks.
    pub rules: AtomicU64,
    /// The number of checkpoints so far. Its lowest bit is the index of the last one.
    pub checkpoints: AtomicU64,
    /// The length of the valid part of the trace at each checkpoint, in bytes.
    pub csv_len: [AtomicU64; 2],
    /// The length of the valid part of the definitions file at each checkpoint, in bytes.
    pub names_len: [AtomicU64; 2],
    /// The number of the trace part being written at each checkpoint.
    pub part: [AtomicU64; 2],
    /// The number of events from the overflow list that are in the trace at each checkpoint.
    pub overflow_written: [AtomicU64; 2],
    /// The number of lost events in the `lost` rows of all parts at each checkpoint.
    pub reported_lost: [AtomicU64; 2],
    /// The lengths in bytes of the two texts in `words`.
    pub words_len: [AtomicU64; 2],
    /// The number of texts stored in `words` so far. Its lowest bit is the index of the last one.
    pub words_stored: AtomicU64,
    /// The length in bytes of the path in `trace`; 0 until the path is known.
    pub trace_len: AtomicU64,
    /// The lengths in bytes of the two texts in `meta`; 0 if not stored.
    pub meta_len: [AtomicU64; 2],
    /// The path of the trace.
    pub trace: UnsafeCell<[u8; MAX_PATH]>,
    /// The JSON of the meta row, for a process that is killed before its trace has that row: first a short
    /// version, then one that includes the facts known only once CUDA runs.
    pub meta: [UnsafeCell<[u8; MAX_META]>; 2],
    /// The current `key=value` words for the end row, stored alternately: a process can be killed while it
    /// stores one of the two texts.
    pub words: [UnsafeCell<[u8; MAX_WORDS]>; 2],
    /// The counts of events that are in no chunk.
    pub losses: [Losses; LOSS_SHARDS],
    /// The [`mount_namespace`] of the process; 0 if unknown.
    pub mount_namespace: AtomicU64,
    /// 1 once the process can no longer write its trace.
    pub is_stopped: AtomicU64,
    /// A request for detail, which a command writes; see [`DetailRequest`].
    pub detail_asked: AtomicU64,
    /// The last request that the process has accepted.
    pub detail_taken: AtomicU64,
    /// The answer to that request; see [`DetailAnswer`].
    pub detail_answer: AtomicU64,
}

const _: () = assert!(size_of::<JournalHeader>() <= HEADER_BYTES);

/// The byte offsets of the fields of the journal header and the chunk header.
pub mod layout {
    use super::{ChunkHeader, JournalHeader, Losses};
    use std::mem::offset_of;

    /// See [`JournalHeader::pid`].
    pub const PID: usize = offset_of!(JournalHeader, pid);
    /// See [`JournalHeader::rank`].
    pub const RANK: usize = offset_of!(JournalHeader, rank);
    /// See [`JournalHeader::chunks`].
    pub const CHUNKS: usize = offset_of!(JournalHeader, chunks);
    /// See [`JournalHeader::start_ns`].
    pub const START_NS: usize = offset_of!(JournalHeader, start_ns);
    /// See [`JournalHeader::process_start`].
    pub const PROCESS_START: usize = offset_of!(JournalHeader, process_start);
    /// See [`JournalHeader::power2_divisions`].
    pub const POWER2_DIVISIONS: usize = offset_of!(JournalHeader, power2_divisions);
    /// See [`JournalHeader::rules`].
    pub const RULES: usize = offset_of!(JournalHeader, rules);
    /// See [`JournalHeader::checkpoints`].
    pub const CHECKPOINTS: usize = offset_of!(JournalHeader, checkpoints);
    /// See [`JournalHeader::csv_len`].
    pub const CSV_LEN: usize = offset_of!(JournalHeader, csv_len);
    /// See [`JournalHeader::names_len`].
    pub const NAMES_LEN: usize = offset_of!(JournalHeader, names_len);
    /// See [`JournalHeader::part`].
    pub const PART: usize = offset_of!(JournalHeader, part);
    /// See [`JournalHeader::overflow_written`].
    pub const OVERFLOW_WRITTEN: usize = offset_of!(JournalHeader, overflow_written);
    /// See [`JournalHeader::reported_lost`].
    pub const REPORTED_LOST: usize = offset_of!(JournalHeader, reported_lost);
    /// See [`JournalHeader::words_len`].
    pub const WORDS_LEN: usize = offset_of!(JournalHeader, words_len);
    /// See [`JournalHeader::words_stored`].
    pub const WORDS_STORED: usize = offset_of!(JournalHeader, words_stored);
    /// See [`JournalHeader::words`].
    pub const WORDS: usize = offset_of!(JournalHeader, words);
    /// See [`JournalHeader::trace_len`].
    pub const TRACE_LEN: usize = offset_of!(JournalHeader, trace_len);
    /// See [`JournalHeader::trace`].
    pub const TRACE: usize = offset_of!(JournalHeader, trace);
    /// See [`JournalHeader::meta_len`].
    pub const META_LEN: usize = offset_of!(JournalHeader, meta_len);
    /// See [`JournalHeader::meta`].
    pub const META: usize = offset_of!(JournalHeader, meta);
    /// See [`JournalHeader::losses`].
    pub const LOSSES: usize = offset_of!(JournalHeader, losses);
    /// See [`Losses::dropped`].
    pub const DROPPED: usize = offset_of!(Losses, dropped);
    /// See [`Losses::overflowed`].
    pub const OVERFLOWED: usize = offset_of!(Losses, overflowed);
    /// See [`JournalHeader::mount_namespace`].
    pub const MOUNT_NAMESPACE: usize = offset_of!(JournalHeader, mount_namespace);
    /// See [`JournalHeader::is_stopped`].
    pub const IS_STOPPED: usize = offset_of!(JournalHeader, is_stopped);

    /// See [`JournalHeader::detail_asked`].
    pub const DETAIL_ASKED: usize = offset_of!(JournalHeader, detail_asked);
    /// See [`JournalHeader::detail_taken`].
    pub const DETAIL_TAKEN: usize = offset_of!(JournalHeader, detail_taken);
    /// See [`JournalHeader::detail_answer`].
    pub const DETAIL_ANSWER: usize = offset_of!(JournalHeader, detail_answer);

    /// See [`ChunkHeader::committed`].
    pub const COMMITTED: usize = offset_of!(ChunkHeader, committed);
    /// See [`ChunkHeader::tid`].
    pub const TID: usize = offset_of!(ChunkHeader, tid);
    /// See [`ChunkHeader::lane`].
    pub const LANE: usize = offset_of!(ChunkHeader, lane);
    /// See [`ChunkHeader::index`].
    pub const INDEX: usize = offset_of!(ChunkHeader, index);
    /// See [`ChunkHeader::in_use`].
    pub const IN_USE: usize = offset_of!(ChunkHeader, in_use);
    /// See [`ChunkHeader::consumed`].
    pub const CONSUMED: usize = offset_of!(ChunkHeader, consumed);
}

/// A request for detail in the next steps, as stored in a journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DetailRequest {
    /// The sequence number of the request. It distinguishes two requests for the same number of steps.
    pub number: u32,
    /// The number of steps.
    pub steps: u32,
}

impl DetailRequest {
    /// The value of `steps` that requests a search for the holders of memory instead
    /// (`memtrace leaks --holders --pid`).
    pub const SEARCH: u32 = u32::MAX;

    /// Packs the request into one word. The word 0 means that there is no request.
    #[must_use]
    pub fn pack(self) -> u64 {
        u64::from(self.number) << 32 | u64::from(self.steps)
    }

    /// Unpacks a request from a word.
    #[must_use]
    pub fn unpack(word: u64) -> DetailRequest {
        DetailRequest { number: (word >> 32) as u32, steps: word as u32 }
    }
}

/// The answer of a process to a [`DetailRequest`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DetailAnswer {
    /// The step that began when the process accepted the request: the first detailed step.
    pub step: i32,
    /// True if every step of the process is detailed.
    pub is_full: bool,
}

impl DetailAnswer {
    /// Packs the answer into one word.
    #[must_use]
    pub fn pack(self) -> u64 {
        u64::from(self.is_full) << 32 | u64::from(self.step.cast_unsigned())
    }

    /// Unpacks an answer from a word.
    #[must_use]
    pub fn unpack(word: u64) -> DetailAnswer {
        DetailAnswer { step: (word as u32).cast_signed(), is_full: word >> 32 & 1 == 1 }
    }
}

/// The part of a process's events that is in the files, at a checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// The length of the valid part of the trace in bytes.
    pub csv_len: u64,
    /// The length of the valid part of the definitions file in bytes.
    pub names_len: u64,
    /// The number of lost events in the `lost` rows of all parts.
    pub reported_lost: u64,
}

/// The facts about a process that recovery needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Run {
    /// The process id.
    pub pid: u32,
    /// The distributed rank.
    pub rank: u32,
    /// The time at which the trace starts, in ns of `CLOCK_MONOTONIC`.
    pub start_ns: u64,
    /// The start time of the process, in kernel ticks since boot.
    pub process_start: u64,
    /// The allocator's `roundup_power2_divisions`.
    pub power2_divisions: u64,
    /// Bit 0: the allocator caches. Bit 1: the allocator's reports are the blocks.
    pub rules: u64,
}

/// Returns the folders that may contain journals: first `/dev/shm`, which is in memory, then the folder of
/// temporary files.
#[must_use]
pub fn folders() -> Vec<PathBuf> {
    vec![PathBuf::from("/dev/shm"), std::env::temp_dir()]
}

/// Returns the name of the journal of process `pid`, whose recorder starts at `start_ns`.
#[must_use]
pub fn journal_name(pid: u32, start_ns: u64) -> String {
    format!("memtrace-{pid}-{start_ns}.journal")
}

/// The kind of a file in [`folders`], from its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JournalName {
    /// The journal of the process with this id.
    Journal(u32),
    /// The definitions file of a journal.
    Definitions,
}

impl JournalName {
    /// Parses a file name. Returns `None` if the file is not memtrace's.
    #[must_use]
    pub fn parse(name: &OsStr) -> Option<JournalName> {
        let (stem, ending) = name.to_str()?.strip_prefix("memtrace-")?.split_once('.')?;
        let (pid, start_ns) = stem.split_once('-')?;
        start_ns.parse::<u64>().ok()?;
        let pid = pid.parse().ok()?;
        match ending {
            "journal" => Some(JournalName::Journal(pid)),
            "names" => Some(JournalName::Definitions),
            _ => None,
        }
    }
}

/// Returns the mount namespace of this process, or 0 if unknown. In another namespace, a path refers to
/// another file.
#[must_use]
pub fn mount_namespace() -> u64 {
    std::fs::metadata("/proc/self/ns/mnt").map_or(0, |namespace| namespace.ino())
}

/// Returns the path of a journal's definitions file. Before the writer thread reuses a chunk, it appends the
/// chunk's definitions to this file.
#[must_use]
pub fn names_path(journal: &Path) -> PathBuf {
    journal.with_extension("names")
}

pub use memtrace_util::process::start_of as process_start;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_of_journals_come_back_and_no_other_name_does() {
        let name = journal_name(7, 8);
        assert_eq!(JournalName::parse(OsStr::new(&name)), Some(JournalName::Journal(7)));
        let definitions = names_path(Path::new(&name));
        assert_eq!(JournalName::parse(definitions.as_os_str()), Some(JournalName::Definitions));
        for other in ["memtrace-7.journal", "memtrace-x-8.journal", "memtrace-7-8.csv", "7-8.journal", ""] {
            assert_eq!(JournalName::parse(OsStr::new(other)), None, "{other}");
        }
    }
}
