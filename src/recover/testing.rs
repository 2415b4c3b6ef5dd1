//! Journals as a killed process may leave them, made of what a test or a fuzzer says.

use memtrace_trace::Event;
use memtrace_trace::event::bytes::{bytes_of, event_of};
use memtrace_trace::journal::{CHUNK_BYTES, MAGIC, Run, SLOTS, layout};

/// A chunk of such a journal.
#[derive(Clone, Debug, Default)]
pub struct Left {
    /// The thread, its lane, and the chunk's place in it.
    pub owner: [u32; 3],
    /// Does the header say that it is in use?
    pub in_use: bool,
    /// How many events are complete, as the header says.
    pub committed: u32,
    /// How many of them the trace has, at each checkpoint.
    pub consumed: [u32; 2],
    /// The slots from the first on.
    pub slots: Vec<Event>,
}

/// The last checkpoints of such a journal.
#[derive(Clone, Copy, Debug, Default)]
pub struct Checkpoints {
    /// How many there were.
    pub count: u64,
    /// The part of the trace, its length and that of the definitions, in bytes, at each of the last two.
    pub parts: [u64; 2],
    /// See `parts`.
    pub csv: [u64; 2],
    /// See `parts`.
    pub names: [u64; 2],
}

/// The bytes of a journal.
#[must_use]
pub fn journal(run: &Run, at: &Checkpoints, chunks: &[Left]) -> Vec<u8> {
    let mut bytes = vec![0; (chunks.len() + 1) * CHUNK_BYTES];
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
    }
    for (index, chunk) in chunks.iter().enumerate() {
        let start = (index + 1) * CHUNK_BYTES;
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

/// An event of any 64 bytes.
#[must_use]
pub fn event(bytes: &[u8]) -> Event {
    event_of(&bytes[..bytes.len().min(size_of::<Event>())])
}

/// The bytes of an event, as the file of definitions has them.
#[must_use]
pub fn bytes(event: &Event) -> [u8; 64] {
    bytes_of(event)
}
