//! Parses the contents of a journal.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use memtrace_encode::Encoder;
use memtrace_trace::Event;
use memtrace_trace::event::bytes::{event_of, text_slots};
use memtrace_trace::event::tied::first_of_tied;
use memtrace_trace::journal::{
    CHUNK_BYTES, HEADER_BYTES, LOSS_SHARDS, Losses, MAGIC, MAX_META, MAX_WORDS, Run, SLOTS, layout,
    process_start,
};
use memtrace_trace::rounding::Rounding;
use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::io::Errno;

const SLOT: usize = size_of::<Event>();

/// The contents of a journal that recovery needs.
pub(crate) struct Journal {
    /// The identity and the settings of the process.
    pub(crate) run: Run,
    /// The length of the valid part of the trace at the last checkpoint; 0 before the first.
    pub(crate) csv_len: u64,
    /// The length of the valid part of the definitions file at the last checkpoint.
    names_len: u64,
    /// True if the process could no longer write its trace.
    pub(crate) is_stopped: bool,
    /// The number of the part whose length is `csv_len`.
    pub(crate) part: u64,
    /// The number of lost events: dropped, or on the overflow list but not in the trace.
    pub(crate) lost: u64,
    /// The number of lost events that the rows of all parts report.
    reported_lost: u64,
    /// The `key=value` words that the process would have added to its end row, as of its last flush.
    pub(crate) words: String,
    /// The size of the event buffer in bytes.
    buffer_bytes: u64,
    /// The lanes, in the order of their ids.
    lanes: Vec<Lane>,
    /// The definitions in the chunks, each with the bytes in the slots that follow it.
    definitions: Vec<(Event, Vec<u8>)>,
}

/// The events of one lane.
#[derive(Default)]
struct Lane {
    /// The timestamp of the last event that is in the trace; 0 if no chunk has it any more.
    last_ns: u64,
    /// The events that are not in the trace, in order. Each has the id of its thread.
    events: Vec<(u32, Event)>,
}

/// Reads a `u64` at an offset; returns 0 past the end.
fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).map_or(0, |value| u64::from_le_bytes(value.try_into().unwrap_or_default()))
}

/// Reads a `u32` at an offset; returns 0 past the end.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).map_or(0, |value| u32::from_le_bytes(value.try_into().unwrap_or_default()))
}

/// The header of a journal.
pub(crate) struct Header<'a>(Cow<'a, [u8]>);

impl Header<'static> {
    /// Reads the header of a journal. Returns `None` if the file is not a journal of this version.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read.
    pub(crate) fn read(mut journal: &File) -> io::Result<Option<Self>> {
        let mut header = Vec::new();
        journal.rewind()?;
        journal.take(HEADER_BYTES as u64).read_to_end(&mut header)?;
        Ok(header.starts_with(&MAGIC).then_some(Header(header.into())))
    }
}

impl<'a> Header<'a> {
    /// Returns the header at the start of a journal, or `None` if the bytes are not a journal of this version.
    fn at_start_of(journal: &'a [u8]) -> Option<Self> {
        journal.starts_with(&MAGIC).then(|| Header(journal[..journal.len().min(HEADER_BYTES)].into()))
    }

    /// Returns the identity and the settings of the process.
    pub(crate) fn run(&self) -> Run {
        Run {
            pid: u32_at(&self.0, layout::PID),
            rank: u32_at(&self.0, layout::RANK),
            start_ns: self.number(layout::START_NS),
            process_start: self.number(layout::PROCESS_START),
            power2_divisions: self.number(layout::POWER2_DIVISIONS),
            rules: self.number(layout::RULES),
        }
    }

    /// Returns the number of checkpoints so far.
    pub(crate) fn checkpoints(&self) -> u64 {
        self.number(layout::CHECKPOINTS)
    }

    /// Returns the number of the part that the process wrote at the last checkpoint.
    pub(crate) fn part(&self) -> u64 {
        self.at_checkpoint(layout::PART)
    }

    fn number(&self, at: usize) -> u64 {
        u64_at(&self.0, at)
    }

    /// Returns which of the two copies of a number belongs to the last checkpoint.
    fn copy(&self) -> usize {
        (self.checkpoints() & 1) as usize
    }

    /// Returns a number as of the last checkpoint.
    fn at_checkpoint(&self, at: usize) -> u64 {
        self.number(at + 8 * self.copy())
    }

    /// Returns the sum of a count over all threads.
    fn losses(&self, count: usize) -> u64 {
        let shards = (0..LOSS_SHARDS).map(|shard| layout::LOSSES + shard * size_of::<Losses>() + count);
        shards.fold(0, |sum, at| sum.saturating_add(self.number(at)))
    }

    /// Returns the `key=value` words for the end row. Control characters are removed, because the file may contain
    /// anything.
    fn words(&self) -> String {
        let place = (self.number(layout::WORDS_STORED) & 1) as usize;
        let length = (self.number(layout::WORDS_LEN + 8 * place) as usize).min(MAX_WORDS);
        let start = layout::WORDS + MAX_WORDS * place;
        let bytes = self.0.get(start..start + length).unwrap_or_default();
        String::from_utf8_lossy(bytes).replace(char::is_control, "")
    }

    /// Returns the mount namespace in which the path of the trace holds; 0 if it is not known.
    pub(crate) fn mount_namespace(&self) -> u64 {
        self.number(layout::MOUNT_NAMESPACE)
    }

    /// Returns the path of the trace, or `None` if the process has not named it yet.
    pub(crate) fn trace(&self) -> Option<&Path> {
        let length = usize::try_from(self.number(layout::TRACE_LEN)).ok()?;
        let path = self.0.get(layout::TRACE..layout::TRACE.checked_add(length)?)?;
        (!path.is_empty()).then(|| Path::new(OsStr::from_bytes(path)))
    }

    /// Returns the JSON of the meta row: the second, more complete one if the process wrote it.
    pub(crate) fn meta(&self) -> Option<&str> {
        [1, 0].into_iter().find_map(|place| {
            let length = usize::try_from(self.number(layout::META_LEN + 8 * place)).ok()?;
            let start = layout::META + MAX_META * place;
            let json = self.0.get(start..start + length.min(MAX_META)).filter(|json| !json.is_empty())?;
            std::str::from_utf8(json).ok()
        })
    }
}

/// Returns true if the process of this journal still runs. The lock also detects a process in another
/// container: the container may share `/dev/shm`, but its process ids differ. The process id detects a
/// process that has closed all its files.
pub(crate) fn is_running(journal: &File, run: &Run) -> bool {
    is_locked(journal) || process_start(run.pid).is_some_and(|start| start == run.process_start)
}

/// Returns true if another process holds the lock of this journal. A process must not call this for its own
/// journal, because closing any descriptor of a file releases its locks.
pub(crate) fn is_locked(journal: &File) -> bool {
    // If this call acquires the lock, closing the caller's `journal` releases it.
    matches!(fcntl_lock(journal, FlockOperation::NonBlockingLockShared), Err(Errno::AGAIN | Errno::ACCESS))
}

impl Journal {
    /// Parses a journal. Returns `None` if the bytes are not a journal.
    pub(crate) fn read(bytes: &[u8]) -> Option<Journal> {
        let header = Header::at_start_of(bytes)?;
        let on_overflow_list =
            header.losses(layout::OVERFLOWED).saturating_sub(header.at_checkpoint(layout::OVERFLOW_WRITTEN));
        let chunks = header.number(layout::CHUNKS);
        let mut journal = Journal {
            lost: header.losses(layout::DROPPED).saturating_add(on_overflow_list),
            reported_lost: header.at_checkpoint(layout::REPORTED_LOST),
            words: header.words(),
            buffer_bytes: chunks.saturating_mul(CHUNK_BYTES as u64),
            run: header.run(),
            csv_len: header.at_checkpoint(layout::CSV_LEN),
            names_len: header.at_checkpoint(layout::NAMES_LEN),
            is_stopped: header.number(layout::IS_STOPPED) == 1,
            part: header.part().max(1),
            lanes: Vec::new(),
            definitions: Vec::new(),
        };
        let mut chunks: Vec<&[u8]> = bytes
            .chunks_exact(CHUNK_BYTES)
            .skip(HEADER_BYTES / CHUNK_BYTES)
            .take(usize::try_from(chunks).unwrap_or(0))
            .filter(|chunk| u32_at(chunk, layout::IN_USE) == 1)
            .collect();
        chunks.sort_by_key(|chunk| (u32_at(chunk, layout::LANE), u32_at(chunk, layout::INDEX)));
        let mut lane = None;
        for chunk in chunks {
            if lane.replace(u32_at(chunk, layout::LANE)) != Some(u32_at(chunk, layout::LANE)) {
                journal.lanes.push(Lane::default());
            }
            journal.read_chunk(chunk, header.copy());
        }
        Some(journal)
    }

    fn read_chunk(&mut self, chunk: &[u8], checkpoint: usize) {
        let tid = u32_at(chunk, layout::TID);
        let committed = (u32_at(chunk, layout::COMMITTED) as usize).min(SLOTS);
        let consumed = u32_at(chunk, layout::CONSUMED + 4 * checkpoint) as usize;
        let slots = &chunk[SLOT..];
        let mut index = 0;
        while index < committed {
            let event = event_of(&slots[index * SLOT..(index + 1) * SLOT]);
            let following = text_slots(&event).min(committed - index - 1);
            if event.is_definition() {
                let text = &slots[(index + 1) * SLOT..(index + 1 + following) * SLOT];
                self.definitions.push((event, text.to_vec()));
            } else if !event.is_empty()
                && let Some(lane) = self.lanes.last_mut()
            {
                if index >= consumed {
                    lane.events.push((tid, event));
                } else {
                    lane.last_ns = lane.last_ns.max(event.clock_ns);
                }
            }
            index += 1 + following;
        }
    }

    /// Creates an encoder with the settings of the process.
    pub(crate) fn encoder(&self) -> Encoder {
        let Run { pid, rank, start_ns, power2_divisions, rules, .. } = self.run;
        let rounding = Rounding { caching: rules & 1 != 0, power2_divisions };
        let mut encoder = Encoder::new(start_ns, rank as i32, pid, rounding, rules & 2 != 0);
        encoder.set_buffer_bytes(self.buffer_bytes);
        encoder
    }

    /// Sets the number of lost events that `lost` rows already report, in an encoder that has restored the
    /// rows of the trace. Rows of earlier parts count, too.
    pub(crate) fn restore_reported_lost(&self, encoder: &mut Encoder) {
        encoder.set_reported_lost(self.reported_lost.min(self.lost).max(encoder.reported_lost()));
    }

    /// Passes every definition to an encoder. Starts with `written`, the bytes of the definitions file, which
    /// has the definitions whose chunks were reused.
    pub(crate) fn define(&self, written: &[u8], encoder: &mut Encoder) {
        let whole = written.len().min(self.names_len as usize) / SLOT * SLOT;
        let mut at = 0;
        while at < whole {
            let event = event_of(&written[at..at + SLOT]);
            let end = (at + SLOT).saturating_add(text_slots(&event).saturating_mul(SLOT)).min(whole);
            encoder.definitions_mut().define(&event, &written[at + SLOT..end]);
            at = end;
        }
        for (event, text) in &self.definitions {
            encoder.definitions_mut().define(event, text);
        }
    }

    /// Returns the events in the order in which the process would have written them: by timestamp, and at equal
    /// timestamps as [`first_of_tied`] says. The events of one lane keep their order.
    pub(crate) fn events(&self) -> Vec<(u32, Event)> {
        merged(&self.lanes)
    }
}

/// Returns the events of the lanes in the order of [`Journal::events`].
fn merged(lanes: &[Lane]) -> Vec<(u32, Event)> {
    let mut events = Vec::new();
    for (number, lane) in lanes.iter().enumerate() {
        let mut last = lane.last_ns;
        for (tid, event) in &lane.events {
            last = event.clock_ns.max(last);
            let mut event = *event;
            event.clock_ns = last;
            events.push((number, *tid, event));
        }
    }
    events.sort_by_key(|(_, _, event)| event.clock_ns);
    let ties = events.chunk_by(|(_, _, one), (_, _, next)| one.clock_ns == next.clock_ns);
    let mut ordered = Vec::with_capacity(events.len());
    for tied in ties {
        // Only the first few lanes are compared, so a lane near the front is removed: a damaged journal may have
        // many lanes with equal clocks, and a deque moves only the lanes before the removed one.
        let mut lanes: VecDeque<_> = tied.chunk_by(|(one, ..), (next, ..)| one == next).collect();
        while let Some(next) = first_of_tied(lanes.iter().map(|lane| &lane[0].2).enumerate()) {
            let (_, tid, event) = lanes[next][0];
            ordered.push((tid, event));
            lanes[next] = &lanes[next][1..];
            if lanes[next].is_empty() {
                lanes.remove(next);
            }
        }
    }
    ordered
}

#[cfg(test)]
mod tests {
    use memtrace_trace::{Api, Payload};

    use super::*;

    #[test]
    fn the_events_of_many_lanes_with_one_clock_follow_the_lanes() {
        let mark = |clock_ns, name| {
            Payload::Mark { name }.pack(memtrace_trace::Header::new(clock_ns, Api::Memtrace, 0))
        };
        // More lanes than `first_of_tied` compares. Each has two events at the same time, and one later.
        let lanes: Vec<Lane> = (0..50_000)
            .map(|tid| Lane {
                last_ns: 7,
                events: [(5, 0), (6, 1), (8, 2)].map(|(clock_ns, name)| (tid, mark(clock_ns, name))).into(),
            })
            .collect();
        let found: Vec<(u64, u32)> =
            merged(&lanes).iter().map(|(tid, event)| (event.clock_ns, *tid)).collect();
        let early = (0..50_000).flat_map(|tid| [(7, tid), (7, tid)]);
        let expected: Vec<(u64, u32)> = early.chain((0..50_000).map(|tid| (8, tid))).collect();
        assert!(found == expected);
    }
}
