//! Reads the file of `torch.cuda.memory._dump_snapshot()` as a trace.
//!
//! The file is parsed once and kept in a compact form. For each reading, a thread makes the rows from this
//! form, a few chunks ahead of the reader. Thus every command reads a snapshot with the same scanner and
//! replay as a trace.

mod history;
mod model;
mod modules;
mod owners;
mod pickle;
mod rows;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{self, Cursor, Read, Write};
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use memtrace_trace::SCHEMA_VERSION;
use memtrace_trace::counts::counted;
use memtrace_trace::files;
use memtrace_trace::meta::{Allocator, Meta, SNAPSHOT_RUN};
use memtrace_trace::rounding::Rounding;
use memtrace_trace::units::Unit;

use super::packed_file::{FileKey, file_key, open_file, start, unpacked};
use history::Beginning;
use model::Model;

/// The number of chunks of rows that the thread may make ahead of the reader.
const AHEAD: usize = 4;
/// The maximum number of events of all cached snapshots together. The newest snapshot is always kept.
const MOST_EVENTS: usize = 4 << 20;

/// A snapshot.
struct Snapshot {
    model: Model,
    meta: Meta,
    /// The time of the first event in microseconds since the Unix epoch.
    start_us: i64,
    /// The memory of each device at that time.
    beginnings: Vec<(i32, Beginning)>,
    /// The text of the `end` row, once the rows have been written to their end.
    ending: OnceLock<String>,
}

static KEPT: Mutex<Vec<(FileKey, Arc<Snapshot>)>> = Mutex::new(Vec::new());

/// Returns true if a file begins like a pickle of protocol 2 to 5.
pub(super) fn is_pickle(start: &[u8]) -> bool {
    matches!(start, [0x80, 2..=5, ..])
}

/// Returns the rows of a snapshot, in CSV.
///
/// # Errors
/// When the file cannot be read or is not a snapshot.
pub(super) fn rows(file: File, path: &Path) -> io::Result<impl Read + Send + use<>> {
    let snapshot = snapshot(file, path)?;
    let (sender, receiver) = sync_channel(AHEAD);
    std::thread::Builder::new().name("snapshot".to_owned()).spawn(move || {
        // Writing fails only if the reader has stopped.
        let _ = rows::write(&snapshot, Chunks(sender));
    })?;
    Ok(RowReader { receiver, chunk: Cursor::default() })
}

/// Returns the stacks of a snapshot, in the form of a `.stacks` file, or `None` if the file is not a
/// snapshot.
pub(crate) fn stacks(path: &Path) -> Option<impl Read + use<>> {
    let file = open_file(path).ok()?;
    let snapshot = snapshot(file, path).ok()?;
    snapshot.model.owners.stacks_file().ok().map(Cursor::new)
}

/// Returns the text of the `end` row of a snapshot whose rows have already been read to their end, or `None`.
pub(super) fn ending(path: &Path) -> Option<String> {
    let key = file_key(&std::fs::metadata(path).ok()?);
    let kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    kept.iter().find(|(known, _)| *known == key)?.1.ending.get().cloned()
}

/// Returns true if a file in a folder counts as a snapshot by its name: `*.pickle` or `*.pkl`, or a
/// compressed one.
pub(super) fn is_snapshot_name(path: &Path) -> bool {
    let plain = files::uncompressed(path);
    let extension = plain.as_deref().unwrap_or(path).extension();
    extension.is_some_and(|extension| extension == "pickle" || extension == "pkl")
}

fn snapshot(file: File, path: &Path) -> io::Result<Arc<Snapshot>> {
    let key = file_key(&file.metadata()?);
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, snapshot)) = kept.iter().find(|(known, _)| *known == key) {
        return Ok(Arc::clone(snapshot));
    }
    let (compression, start) = start(&file)?;
    if !is_pickle(&start) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let bytes = unpacked(file, compression)?;
    let model = Model::read(bytes).map_err(|why| {
        let what = format!("not a memory snapshot of PyTorch that memtrace can read: {why}");
        io::Error::new(io::ErrorKind::InvalidData, what)
    })?;
    let snapshot = Arc::new(Snapshot::new(model, path));
    kept.push((key, Arc::clone(&snapshot)));
    let mut events = 0;
    let fits = kept.iter().rev().take_while(|(_, snapshot)| {
        events += snapshot.model.event_count();
        events <= MOST_EVENTS
    });
    let surplus = kept.len() - fits.count().max(1);
    kept.drain(..surplus);
    Ok(snapshot)
}

impl Snapshot {
    fn new(model: Model, path: &Path) -> Snapshot {
        let allocator = Allocator { conf: model.settings.conf.clone(), ..Allocator::default() };
        let rounding = allocator.rounding();
        let devices = model.devices();
        let first = devices.iter().filter_map(|device| model.events(*device).first());
        let start_us = first.map(|event| event.time_us).min().unwrap_or(0);
        let beginnings: Vec<(i32, Beginning)> =
            devices.iter().map(|device| (*device, history::beginning(&model, *device, rounding))).collect();
        let meta = Meta {
            schema: SCHEMA_VERSION.to_owned(),
            memtrace: env!("CARGO_PKG_VERSION").to_owned(),
            start_unix_ns: start_us.saturating_mul(1000),
            run_id: SNAPSHOT_RUN.to_owned(),
            rank: rank_of(path),
            world_size: 1,
            allocator,
            part: 1,
            degraded: notes(&model, &beginnings),
            ..Meta::default()
        };
        Snapshot { model, meta, start_us, beginnings, ending: OnceLock::new() }
    }

    fn rounding(&self) -> Rounding {
        self.meta.allocator.rounding()
    }
}

/// Returns the rank in a name such as `rank3.pickle` or `snapshot_rank_3.pickle`, which is the number after
/// the last `rank`, or 0 without such a number.
fn rank_of(path: &Path) -> i32 {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
    let Some((_, after)) = name.rsplit_once("rank") else { return 0 };
    let after = after.trim_start_matches(['_', '-', '.', '=']);
    let digits = after.bytes().take_while(u8::is_ascii_digit).count();
    after[..digits].parse().unwrap_or(0)
}

/// Returns notes that name the information that the file lacks and say how to record it.
fn notes(model: &Model, beginnings: &[(i32, Beginning)]) -> Vec<String> {
    let events = model.event_count();
    let mut notes = Vec::new();
    let mut add = |note: String| notes.push(format!("PyTorch snapshot: {note}"));
    if events == 0 {
        add("it has no history, only the memory at its end; call torch.cuda.memory._record_memory_history() at the \
             start of the program"
            .to_owned());
    } else {
        let earlier: i64 = beginnings
            .iter()
            .flat_map(|(_, beginning)| beginning.memory.blocks.values())
            .fold(0, |sum, held| held.bytes.saturating_add(sum));
        if earlier > 0 {
            add(format!(
                "its {} start after {} were already allocated; record from the start of the program, with a \
                 larger max_entries",
                counted(events as u64, "event"),
                Unit::Auto.show(earlier)
            ));
        }
    }
    if model.unknown_actions > 0 {
        let unknown = counted(model.unknown_actions as u64, "event");
        add(format!("{unknown} of a kind that this version of memtrace does not know, left out"));
    }
    let wrong = model.segments.iter().filter(|segment| !segment.has_right_sums).count();
    if wrong > 0 {
        let (segments, verb) = (counted(wrong as u64, "segment"), if wrong == 1 { "has" } else { "have" });
        add(format!(
            "{segments} {verb} totals that differ from the sum of their blocks; the sum of the \
                     blocks is used"
        ));
    }
    let uncertain: u64 = beginnings.iter().map(|(_, beginning)| beginning.uncertain).sum();
    if uncertain > 0 {
        let blocks = counted(uncertain, "block");
        add(format!("{blocks} from before its history may have been up to 1 MiB larger each"));
    }
    let mut about = Vec::new();
    if !model.owners.has_lines() {
        about.push("it has no Python stacks; record with context=\"all\"");
    } else if !model.owners.has_ops() {
        about.push(
            "phases, categories (*) and modules are inferred from its Python stacks; ops need stacks=\"all\"",
        );
    } else {
        about.push("ops come from its stacks; phases, categories (*) and modules are inferred from them");
    }
    if model.owners.module_count() > 0 {
        about.push("a module is the file of its forward, and after @ the line of the call");
    }
    about.push("only memtrace run records names of modules and memory outside PyTorch");
    add(about.join("; "));
    if model.has_no_times {
        add("its events have no times; a time is the number of the event in microseconds".to_owned());
    }
    notes
}

/// Sends rows in chunks.
struct Chunks(SyncSender<Vec<u8>>);

impl Write for Chunks {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !bytes.is_empty() {
            self.0.send(bytes.to_owned()).map_err(|_| io::ErrorKind::BrokenPipe)?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads the rows that another thread makes.
struct RowReader {
    receiver: Receiver<Vec<u8>>,
    chunk: Cursor<Vec<u8>>,
}

impl Read for RowReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let got = self.chunk.read(buffer)?;
            if got > 0 || buffer.is_empty() {
                return Ok(got);
            }
            let Ok(chunk) = self.receiver.recv() else { return Ok(0) };
            self.chunk = Cursor::new(chunk);
        }
    }
}
