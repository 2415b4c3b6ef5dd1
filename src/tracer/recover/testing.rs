//! Builds valid and damaged journals for tests and fuzzers.

use std::path::Path;

use memtrace_trace::Event;
use memtrace_trace::event::bytes::{bytes_of, event_of};
use memtrace_trace::journal::{CHUNK_BYTES, HEADER_BYTES, MAGIC, MAX_META, Run, SLOTS, layout};

/// A chunk of a journal, as a killed process left it.
#[derive(Clone, Debug, Default)]
pub struct Left {
    /// The thread, the lane of the thread, and the index of the chunk in the lane.
    pub owner: [u32; 3],
    /// True if the header marks the chunk as in use.
    pub in_use: bool,
    /// The number of committed events in the header, which may differ from the number of `slots`.
    pub committed: u32,
    /// For each of the two checkpoints, the number of the chunk's events that are in the trace.
    pub consumed: [u32; 2],
    /// The events in the first slots. The other slots are zero.
    pub slots: Vec<Event>,
}

/// The last two checkpoints of a journal. Each pair has the values of both.
#[derive(Clone, Copy, Debug, Default)]
pub struct Checkpoints {
    /// The number of checkpoints so far.
    pub count: u64,
    /// The number of the trace's part.
    pub parts: [u64; 2],
    /// The length of the trace in bytes.
    pub csv: [u64; 2],
    /// The length of the definitions file in bytes.
    pub names: [u64; 2],
    /// The number of events from the overflow list that are in the trace.
    pub overflow_written: [u64; 2],
    /// The number of lost events that the rows of the trace report.
    pub reported_lost: [u64; 2],
}

/// Additional data in a journal's header.
#[derive(Clone, Copy, Debug, Default)]
pub struct Head<'a> {
    /// The number of dropped events, and the number of events put on the overflow list.
    pub losses: [u64; 2],
    /// The JSON of the meta row.
    pub meta: &'a str,
}

/// Returns the bytes of a journal without losses and without a meta row.
#[must_use]
pub fn journal(run: &Run, at: &Checkpoints, chunks: &[Left]) -> Vec<u8> {
    journal_with(&Head::default(), run, at, chunks)
}

/// Returns the bytes of a journal with this header data.
#[must_use]
pub fn journal_with(head: &Head<'_>, run: &Run, at: &Checkpoints, chunks: &[Left]) -> Vec<u8> {
    let mut bytes = vec![0; HEADER_BYTES + chunks.len() * CHUNK_BYTES];
    let mut put = |place: usize, value: &[u8]| bytes[place..place + value.len()].copy_from_slice(value);
    put(0, &MAGIC);
    put(layout::PID, &run.pid.to_le_bytes());
    put(layout::RANK, &run.rank.to_le_bytes());
    put(layout::CHUNKS, &(chunks.len() as u64).to_le_bytes());
    put(layout::START_NS, &run.start_ns.to_le_bytes());
    put(layout::PROCESS_START, &run.process_start.to_le_bytes());
    put(layout::POWER2_DIVISIONS, &run.power2_divisions.to_le_bytes());
    put(layout::RULES, &run.rules.to_le_bytes());
    put(layout::CHECKPOINTS, &at.count.to_le_bytes());
    for place in 0..2 {
        put(layout::CSV_LEN + 8 * place, &at.csv[place].to_le_bytes());
        put(layout::NAMES_LEN + 8 * place, &at.names[place].to_le_bytes());
        put(layout::PART + 8 * place, &at.parts[place].to_le_bytes());
        put(layout::OVERFLOW_WRITTEN + 8 * place, &at.overflow_written[place].to_le_bytes());
        put(layout::REPORTED_LOST + 8 * place, &at.reported_lost[place].to_le_bytes());
    }
    put(layout::LOSSES + layout::DROPPED, &head.losses[0].to_le_bytes());
    put(layout::LOSSES + layout::OVERFLOWED, &head.losses[1].to_le_bytes());
    let meta = &head.meta.as_bytes()[..head.meta.len().min(MAX_META)];
    put(layout::META_LEN, &(meta.len() as u64).to_le_bytes());
    put(layout::META, meta);
    for (index, chunk) in chunks.iter().enumerate() {
        let start = HEADER_BYTES + index * CHUNK_BYTES;
        put(start + layout::COMMITTED, &chunk.committed.to_le_bytes());
        put(start + layout::TID, &chunk.owner[0].to_le_bytes());
        put(start + layout::LANE, &chunk.owner[1].to_le_bytes());
        put(start + layout::INDEX, &chunk.owner[2].to_le_bytes());
        put(start + layout::IN_USE, &u32::from(chunk.in_use).to_le_bytes());
        for place in 0..2 {
            put(start + layout::CONSUMED + 4 * place, &chunk.consumed[place].to_le_bytes());
        }
        for (slot, event) in chunk.slots.iter().take(SLOTS).enumerate() {
            put(start + (slot + 1) * size_of::<Event>(), &bytes_of(event));
        }
    }
    bytes
}

/// Returns the journal `bytes` with the path of a trace added.
#[must_use]
pub fn of_trace(mut bytes: Vec<u8>, trace: &Path) -> Vec<u8> {
    let path = trace.as_os_str().as_encoded_bytes();
    let mut put = |place: usize, value: &[u8]| bytes[place..place + value.len()].copy_from_slice(value);
    put(layout::TRACE_LEN, &(path.len() as u64).to_le_bytes());
    put(layout::TRACE, path);
    bytes
}

/// Returns the event with these bytes.
#[must_use]
pub fn event(bytes: &[u8]) -> Event {
    event_of(&bytes[..bytes.len().min(size_of::<Event>())])
}

/// Returns the bytes of an event as in the definitions file.
#[must_use]
pub fn bytes(event: &Event) -> [u8; 64] {
    bytes_of(event)
}
