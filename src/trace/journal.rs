//! The layout of a journal on disk, and the identity of the process that writes it.
//!
//! A journal is a mapped file: a [`JournalHeader`], then the chunks that threads fill with events. The recorder maps it and stores through these types. Recovery reads its bytes at the offsets in
//! [`layout`] and maps nothing, because the file may be cut off or may be no journal at all.

use std::cell::UnsafeCell;
use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64};

use crate::Event;

/// The size of a chunk in bytes. It is small, so that a process of hundreds of threads has one for each.
pub const CHUNK_BYTES: usize = 16 << 10;
/// Events in a chunk; its header takes the place of one.
pub const SLOTS: usize = CHUNK_BYTES / size_of::<Event>() - 1;

/// The first bytes of a journal; the digits are the version of its layout.
pub const MAGIC: [u8; 8] = *b"MEMTRJ04";

/// The size of a journal's header in bytes: a number of whole chunks.
pub const HEADER_BYTES: usize = 2 * CHUNK_BYTES;

/// The longest path that a journal stores, in bytes; Linux has no longer ones.
pub const MAX_PATH: usize = 4096;

/// The longest JSON of a meta row that a journal stores, in bytes.
pub const MAX_META: usize = 8 << 10;

/// The longest text of [`JournalHeader::words`], in bytes.
pub const MAX_WORDS: usize = 2 << 10;

/// The number of [`Losses`] in a journal.
pub const LOSS_SHARDS: usize = 64;

/// The header of a chunk, before its events.
#[repr(C, align(64))]
pub struct ChunkHeader {
    /// The number of complete slots. The filling thread stores it with `Release`.
    pub committed: AtomicU32,
    /// The thread that fills the chunk.
    pub tid: AtomicU32,
    /// The lane of that thread, unique in the process.
    pub lane: AtomicU32,
    /// The position of the chunk in its lane: 0, 1, 2, ...
    pub index: AtomicU32,
    /// 1 while the chunk holds events that the trace does not have yet.
    pub in_use: AtomicU32,
    /// The number of events that the trace has, at each of the last two checkpoints.
    pub consumed: [AtomicU32; 2],
}

/// A chunk: its header and its events.
#[repr(C)]
pub struct Chunk {
    /// The header.
    pub header: ChunkHeader,
    /// The events. One thread writes those from `committed` on; the others are complete.
    pub slots: [UnsafeCell<Event>; SLOTS],
}

const _: () = assert!(size_of::<Chunk>() == CHUNK_BYTES);

/// Counts of events that are in no chunk. Each lane counts in one of [`LOSS_SHARDS`], so that threads do not
/// contend for a cache line.
#[repr(C, align(64))]
pub struct Losses {
    /// Events that were dropped. No event is dropped before it is counted here.
    pub dropped: AtomicU64,
    /// Events that were put on the overflow list. The list is on the heap, so a kill loses the events on it
    /// that are not yet in the trace.
    pub overflowed: AtomicU64,
}

/// The header of a journal.
///
/// A checkpoint stores how much of the trace is whole and which events are in it. There are two, and
/// `checkpoints` selects the valid one, so a process can be killed between any two stores.
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
    /// The clock at which the trace starts, ns of `CLOCK_MONOTONIC`.
    pub start_ns: AtomicU64,
    /// When the process started, in the kernel's ticks: another process may have the same id by now.
    pub process_start: AtomicU64,
    /// The allocator's `roundup_power2_divisions`.
    pub power2_divisions: AtomicU64,
    /// Bit 0: the allocator caches; bit 1: its reports are the blocks.
    pub rules: AtomicU64,
    /// The number of checkpoints so far; the lowest bit is the index of the last one.
    pub checkpoints: AtomicU64,
    /// The length of the whole part of the trace at each checkpoint, in bytes.
    pub csv_len: [AtomicU64; 2],
    /// The length of the whole part of the file of definitions at each checkpoint, in bytes.
    pub names_len: [AtomicU64; 2],
    /// The number of the part of the trace that is being written at each checkpoint.
    pub part: [AtomicU64; 2],
    /// The number of events of the overflow list that are in the trace, at each checkpoint.
    pub overflow_written: [AtomicU64; 2],
    /// The number of dropped events that the `lost` rows of the trace report, at each checkpoint, over all
    /// parts.
    pub reported_lost: [AtomicU64; 2],
    /// The lengths of the two texts in `words` in bytes.
    pub words_len: [AtomicU64; 2],
    /// The number of texts that were stored in `words` so far; the lowest bit is the index of the last one.
    pub words_stored: AtomicU64,
    /// The length of the trace's path in bytes; 0 until it is known.
    pub trace_len: AtomicU64,
    /// The lengths of the two texts in `meta` in bytes; 0 for none.
    pub meta_len: [AtomicU64; 2],
    /// The trace's path.
    pub trace: UnsafeCell<[u8; MAX_PATH]>,
    /// The JSON of the meta row, for a process that is killed before its trace has that row: first a short one, then
    /// the one with what only a running CUDA knows.
    pub meta: [UnsafeCell<[u8; MAX_META]>; 2],
    /// The `key=value` words that the end row would have now. A process can be killed while it stores one of the two.
    pub words: [UnsafeCell<[u8; MAX_WORDS]>; 2],
    /// Events that are in no chunk.
    pub losses: [Losses; LOSS_SHARDS],
    /// The [`mount_namespace`] of the process; 0 when unknown.
    pub mount_namespace: AtomicU64,
    /// 1 once the process could not write its trace any further.
    pub is_stopped: AtomicU64,
    /// A request for detail, which a command writes: see [`DetailRequest`].
    pub detail_asked: AtomicU64,
    /// The last request that the process has taken.
    pub detail_taken: AtomicU64,
    /// The answer to it: see [`DetailAnswer`].
    pub detail_answer: AtomicU64,
}

const _: () = assert!(size_of::<JournalHeader>() <= HEADER_BYTES);

/// The byte offsets of fields in a journal's header and in a chunk's.
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

/// A request for the detail of the next steps, as it stands in a journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DetailRequest {
    /// The number of the request, counted from the first one. It distinguishes two requests for the same steps.
    pub number: u32,
    /// The number of steps.
    pub steps: u32,
}

impl DetailRequest {
    /// The number of steps that asks for a search for what holds memory instead (`memtrace leaks --holders --pid`).
    pub const SEARCH: u32 = u32::MAX;

    /// The request in one word; 0 if there is no request.
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
    /// The step that began when the process took the request, the first of those in detail.
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

/// The part of a process's events that the files have, at a checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// The length of the whole part of the trace in bytes.
    pub csv_len: u64,
    /// The length of the whole part of the file of definitions in bytes.
    pub names_len: u64,
    /// The number of dropped events that the `lost` rows report, over all parts.
    pub reported_lost: u64,
}

/// The facts about a process that recovery needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Run {
    /// The process id.
    pub pid: u32,
    /// The distributed rank.
    pub rank: u32,
    /// The clock at which the trace starts, ns of `CLOCK_MONOTONIC`.
    pub start_ns: u64,
    /// When the process started, in the kernel's ticks since boot.
    pub process_start: u64,
    /// The allocator's `roundup_power2_divisions`.
    pub power2_divisions: u64,
    /// Bit 0: the allocator caches; bit 1: its reports are the blocks.
    pub rules: u64,
}

/// The folders that may hold journals: memory first, then the folder of temporary files.
#[must_use]
pub fn folders() -> Vec<PathBuf> {
    vec![PathBuf::from("/dev/shm"), std::env::temp_dir()]
}

/// The name of the journal of process `pid`, the recorder of which starts at `start_ns`.
#[must_use]
pub fn journal_name(pid: u32, start_ns: u64) -> String {
    format!("memtrace-{pid}-{start_ns}.journal")
}

/// A file in [`folders`], by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JournalName {
    /// The journal of the process with this id.
    Journal(u32),
    /// The file of definitions of a journal.
    Definitions,
}

impl JournalName {
    /// The kind of file that has this name; `None` for a file that is not memtrace's.
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

/// The mount namespace of this process; 0 when unknown. The paths of another one mean other files.
#[must_use]
pub fn mount_namespace() -> u64 {
    std::fs::metadata("/proc/self/ns/mnt").map_or(0, |namespace| namespace.ino())
}

/// The file of definitions of a journal. The writer thread appends definitions to it before it recycles the
/// chunk that held them.
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
