//! The state of a running program, updated from the trace that it writes.
//!
//! The trace may not exist yet, may end in the middle of a line, may continue in another part, may be
//! compressed while it is read, and may end. An update waits for none of these events: it reads what the
//! files contain and returns.

use std::path::{Path, PathBuf};

use memtrace_trace::EventName;
use memtrace_trace::end_row::Ending;
use memtrace_trace::meta::Meta;
use rustc_hash::FxHashSet;

use crate::read::input::{newest_run, trace_files};
use crate::read::record::{Columns, Wanted};
use crate::read::stream::{ProcessKey, TraceFile, process_key, same_process};
use crate::read::symbols::SymbolTable;
use crate::read::tail::PartTail;
use crate::state::levels::Levels;
use crate::state::replay::{self, Metric, Replay, Window, is_gpu};
use crate::state::series::GrowingSeries;

/// A run that is read while it is still writing its trace.
pub struct LiveRun {
    path: PathBuf,
    /// The processes of the run, in order of rank and start time.
    pub processes: Vec<LiveProcess>,
    /// The files that were already found and whose meta row was read.
    known: FxHashSet<PathBuf>,
    /// The keys of the known processes.
    keys: FxHashSet<ProcessKey>,
}

/// One process of a live run.
pub struct LiveProcess {
    /// The meta row.
    pub meta: Meta,
    /// The file that is being read or, after the end of the trace, was read last.
    pub path: PathBuf,
    /// The state after the last update.
    pub replay: Replay,
    /// The symbols of the process's rows.
    pub symbols: SymbolTable,
    /// For each device in use: its ordinal, and its allocated and used bytes over time.
    pub history: Vec<(i32, GrowingSeries, GrowingSeries)>,
    /// The memory from step to step.
    pub levels: Levels,
    /// The number of lines that are not rows.
    pub skipped: u64,
    /// True if the last row read is the `end` row of the process, not of a part.
    pub ended: bool,
    /// The part being read. `None` before the first part and after the end of the last one, to limit the
    /// number of open files in a run with many processes.
    reading: Option<PartTail>,
    /// The parts after the part that is being read, by number.
    later: Vec<TraceFile>,
    /// The number of the part being read or, before the first part is opened, the number before it.
    part: u32,
}

impl LiveRun {
    /// Creates the run at `path`: a file, or a folder, which may not exist yet.
    #[must_use]
    pub fn new(path: &Path) -> LiveRun {
        LiveRun {
            path: path.to_owned(),
            processes: Vec::new(),
            known: FxHashSet::default(),
            keys: FxHashSet::default(),
        }
    }

    /// Reads the new rows of all processes. Returns the number of rows.
    pub fn update(&mut self) -> u64 {
        let rows = self.read(false);
        // A missing part may have been compressed between the listing of the folder and the opening of the
        // part. So list the folder again: if the part is still missing, it is lost, and the reading continues
        // after it.
        if self.processes.iter().any(LiveProcess::is_at_gap) { rows + self.read(true) } else { rows }
    }

    /// Lists the folder once and reads the new rows.
    fn read(&mut self, over_gaps: bool) -> u64 {
        for file in self.files() {
            // A file without a complete first row cannot be opened yet. The next update tries again.
            if !self.known.contains(&file)
                && let Ok(part) = TraceFile::open(&file)
            {
                self.add_part(part);
                self.known.insert(file);
            }
        }
        self.processes.sort_by_key(|process| (process.meta.rank, process.meta.start_unix_ns));
        self.processes.iter_mut().map(|process| process.update(over_gaps)).sum()
    }

    /// Returns the files of the run.
    #[must_use]
    pub fn files(&self) -> Vec<PathBuf> {
        if self.path.is_file() {
            return vec![self.path.clone()];
        }
        let files = trace_files(&self.path).unwrap_or_default();
        if files.is_empty()
            && let Ok(Some(newest)) = newest_run(&self.path)
        {
            return trace_files(&newest).unwrap_or_default();
        }
        files
    }

    /// Adds a new part to its process, which may be new.
    fn add_part(&mut self, part: TraceFile) {
        let key = process_key(&part.meta);
        if self.keys.contains(&key)
            && let Some(known) = self.processes.iter_mut().find(|known| same_process(&known.meta, &part.meta))
        {
            known.add_part(part);
            return;
        }
        // If the folder also has another run, show only the newer of both.
        if let Some(first) = self.processes.first()
            && first.meta.run_id != part.meta.run_id
        {
            if first.meta.start_unix_ns > part.meta.start_unix_ns {
                return;
            }
            self.processes.clear();
            self.keys.clear();
        }
        self.keys.insert(key);
        self.processes.push(LiveProcess::new(part));
    }
}

impl LiveProcess {
    fn new(part: TraceFile) -> LiveProcess {
        let symbols = SymbolTable::default();
        LiveProcess {
            part: number_of(&part) - 1,
            replay: Replay::new(&symbols, Window::default(), Metric::Allocated),
            meta: part.meta.clone(),
            path: part.path.clone(),
            symbols,
            history: Vec::new(),
            levels: Levels::new(None),
            skipped: 0,
            ended: false,
            reading: None,
            later: vec![part],
        }
    }

    /// Adds a part, unless it was read already.
    fn add_part(&mut self, part: TraceFile) {
        let number = number_of(&part);
        let is_unread = self.reading.is_none() && !self.ended;
        if number <= self.part && !is_unread {
            return;
        }
        // If the part was found before, forget the earlier file: the part may have been compressed since, and
        // then only the new name exists.
        self.later.retain(|later| number_of(later) != number);
        self.later.push(part);
        self.later.sort_by_key(number_of);
        if is_unread {
            // Nothing was read yet, so start with the earliest part found so far. It may be found late,
            // because a folder lists part 10 before part 2.
            (self.part, self.path) = (number_of(&self.later[0]) - 1, self.later[0].path.clone());
        }
    }

    /// Returns the GPU with the highest peak of used memory.
    #[must_use]
    pub fn device(&self) -> Option<&replay::Device> {
        let gpus = self.replay.devices().iter().filter(|device| is_gpu(device.ordinal));
        gpus.max_by_key(|device| (device.peak(Metric::Used).bytes, -device.ordinal))
    }

    /// Returns true if the next part is missing and a later part exists.
    fn is_at_gap(&self) -> bool {
        self.later.first().is_some_and(|next| number_of(next) != self.part + 1)
    }

    /// Reads to the last complete row. Without `over_gaps`, stops at a missing part. Returns the number of
    /// rows.
    fn update(&mut self, over_gaps: bool) -> u64 {
        let mut rows = 0;
        loop {
            let got = self.read_block();
            rows += got.unwrap_or(0);
            if got.is_some() {
                continue;
            }
            // This part is read to its current end. If there is a next part, this part is complete, so
            // continue there.
            let Some(next) = self.later.first() else { return rows };
            let follows = !self.is_at_gap();
            if !follows && !over_gaps {
                return rows;
            }
            // The opening rows repeat what earlier parts showed, so they are skipped. In the first part that
            // is read, and after a gap, the opening rows are the only record of earlier memory and are kept.
            let again =
                if follows && self.reading.is_some() { next.meta.opening_rows.saturating_add(1) } else { 0 };
            let reading = match PartTail::open(next, wanted(), &self.symbols, again) {
                Ok(reading) => reading,
                // The part was removed (`MEMTRACE_KEEP`), so a gap precedes the next part. If the part was
                // compressed instead, the next listing has it again.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                    self.later.remove(0);
                    continue;
                }
                Err(_) => return rows,
            };
            let next = self.later.remove(0);
            if !follows {
                // A part is missing. The opening rows of this part list the live memory, so the state
                // restarts here.
                self.replay = Replay::new(&self.symbols, Window::default(), Metric::Allocated);
                self.levels = Levels::new(None);
            }
            (self.reading, self.part, self.path) = (Some(reading), number_of(&next), next.path);
        }
    }

    /// Reads the next block of rows. Returns the number of rows, or `None` if nothing new was written.
    fn read_block(&mut self) -> Option<u64> {
        let LiveProcess { reading, replay, symbols, history, levels, ended, .. } = self;
        let mut ending = None;
        let read = reading.as_mut()?.read_block(|row| {
            replay.feed(row);
            levels.feed(row, replay);
            let is_end = row.event == EventName::End;
            ending = is_end.then(|| Ending::from_text(&symbols.get(row.name)));
            *ended = ending.is_some_and(|ending| ending != Some(Ending::Rotated));
            if !is_gpu(row.device) {
                return;
            }
            let Some(device) = replay.find(row.device) else { return };
            let at = match history.iter().position(|known| known.0 == row.device) {
                Some(at) => at,
                None => {
                    history.push((row.device, GrowingSeries::default(), GrowingSeries::default()));
                    history.len() - 1
                }
            };
            let (_, allocated, used) = &mut history[at];
            allocated.set(replay.ts_ns, device.totals.allocated);
            used.set(replay.ts_ns, device.totals.get(Metric::Used));
        })?;
        self.skipped += read.skipped;
        // Keep the file open after the end row of an `exec`, because the process continues if the `exec`
        // fails.
        if self.ended && ending != Some(Some(Ending::Exec)) {
            self.reading = None;
        }
        Some(read.rows)
    }
}

/// Returns the number of a part; the first part is 1.
fn number_of(part: &TraceFile) -> u32 {
    part.meta.part.max(1)
}

/// Returns the columns that the state of a live run needs.
fn wanted() -> Wanted {
    replay::COLUMNS.and(Columns::of(&["ts_ns"])).plus(EventName::End, Columns::of(&["name"]))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use memtrace_trace::Row;

    use super::*;
    use crate::testing::TraceBuilder;

    #[test]
    fn a_live_run_is_followed_from_before_its_file_exists_to_its_end() {
        let folder = std::env::temp_dir().join(format!("memtrace-follow-{}", std::process::id()));
        std::fs::remove_dir_all(&folder).ok();
        let mut run = LiveRun::new(&folder);
        assert_eq!(run.update(), 0);
        std::fs::create_dir(&folder).unwrap();
        assert_eq!(run.update(), 0);
        let mut trace = TraceBuilder::default();
        let block = trace.alloc(4096, Row { step: 3, ..Row::default() });
        trace.alloc(512, Row::default());
        trace.free(block, 4096, Row::default());
        let bytes = trace.finish();
        let mut file = std::fs::File::create(folder.join("host.r0.1.csv")).unwrap();
        let mut rows = 0;
        // The pieces end anywhere, also within the header, a line or a number.
        for piece in bytes.chunks(37) {
            file.write_all(piece).unwrap();
            rows += run.update();
        }
        assert_eq!(rows, 5);
        let process = &run.processes[0];
        assert!(process.ended);
        assert_eq!(process.skipped, 0);
        let device = process.device().unwrap();
        assert_eq!((device.totals.allocated, device.peak(Metric::Allocated).bytes), (512, 4608));
        assert_eq!(run.update(), 0);
        std::fs::remove_dir_all(&folder).ok();
    }

    /// Writes a part of a rotated trace that allocates 512 bytes. A later part begins with one opening row
    /// that lists the live memory.
    fn part(number: u32, ends: bool) -> Vec<u8> {
        let meta = Meta { part: number, opening_rows: u64::from(number > 1), ..Meta::default() };
        let mut trace = TraceBuilder::new(meta);
        if number > 1 {
            trace.alloc(512 * i64::from(number - 1), Row::default());
        }
        trace.alloc(512, Row::default());
        if ends {
            trace.raw(Row {
                event: EventName::End,
                api: "memtrace",
                name: "rotated lost=0",
                ..Row::default()
            });
        }
        trace.unfinished()
    }

    #[test]
    fn a_live_run_follows_parts_that_are_compressed_meanwhile() {
        let folder = std::env::temp_dir().join(format!("memtrace-parts-{}", std::process::id()));
        std::fs::remove_dir_all(&folder).ok();
        std::fs::create_dir(&folder).unwrap();
        let place = |number: u32| folder.join(format!("host.r0.1.{number}.csv"));
        let packed = |number: u32, bytes: &[u8]| {
            let path = folder.join(format!("host.r0.1.{number}.csv.gz"));
            let file = std::fs::File::create(path).unwrap();
            let mut packer = flate2::write::GzEncoder::new(file, flate2::Compression::fast());
            packer.write_all(bytes).unwrap();
            packer.finish().unwrap();
        };
        packed(1, &part(1, true));
        let mut run = LiveRun::new(&folder);
        run.update();
        assert!(!run.processes[0].ended);
        // Part 2 is found, and compressed before it is opened. Part 3 is still being written. The update
        // reads both.
        std::fs::write(place(2), part(2, true)).unwrap();
        run.add_part(TraceFile::open(&place(2)).unwrap());
        std::fs::remove_file(place(2)).unwrap();
        packed(2, &part(2, true));
        std::fs::write(place(3), part(3, false)).unwrap();
        run.update();
        let process = &run.processes[0];
        assert_eq!((run.processes.len(), process.path.clone()), (1, place(3)));
        assert!(!process.ended && process.later.is_empty());
        assert_eq!(process.device().unwrap().totals.allocated, 3 * 512);
        // Part 4 is missing from one listing: the update waits for it. Later, part 6 is lost: the update
        // skips it.
        std::fs::write(place(5), part(5, false)).unwrap();
        run.add_part(TraceFile::open(&place(5)).unwrap());
        assert_eq!(run.processes[0].update(false), 0);
        packed(4, &part(4, true));
        run.update();
        assert_eq!((run.processes[0].part, run.processes[0].replay.counts.rows), (5, 9));
        std::fs::write(place(7), part(7, false)).unwrap();
        run.update();
        assert_eq!(run.processes[0].part, 7);
        std::fs::remove_dir_all(&folder).ok();
    }
}
