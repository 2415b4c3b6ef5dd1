//! The writer's side: finds rows that repeat earlier ones, and replaces them by one row.
//!
//! A run is a sequence of consecutive rows that equal earlier consecutive rows. It grows as rows arrive, and
//! rows are held back only while their run lasts. [`RepeatFinder::end_run`] ends the run and writes its row
//! at any time, for example before a checkpoint. The next row can then begin a new run that continues where
//! the old run stopped.

use std::collections::VecDeque;
use std::hash::Hasher;

use rustc_hash::{FxHashMap, FxHasher};

use super::{Born, Numbers, Repeat, Shift, StoredRow, WINDOW, is_repeatable};
use crate::columns::{MAX_BYTES, MAX_NUMBER, Row};
use crate::detail::DetailMark;
use crate::{Api, EventName};

/// The minimum number of rows in a run. The rows of a shorter run are written as plain rows, because a
/// `repeat` row would save little.
const LEAST_ROWS: i64 = 4;
/// The maximum number of stored rows in one chain with which the first row of a run is compared.
const MOST_COMPARED: usize = 24;
/// The maximum number of earlier runs with which the current run is compared at once.
const MOST_PLACES: usize = 3;
/// The number of rows in a trial. If fewer than one in `LEAST_SHARE` of these rows were written as repeats,
/// the search pauses for `PAUSE` rows, because storing and comparing rows costs as much as writing them.
const TRIAL: i64 = 1 << 14;
const LEAST_SHARE: i64 = 8;
const PAUSE: i64 = 1 << 16;
/// After this number of rows, all stored rows are forgotten, so that a damaged line never affects more rows
/// than this. Each time, one step of a loop is written in full. With steps of 1,570 rows and 348 KB, this
/// adds 2 KB per step.
const FRESH_START: i64 = 1 << 18;

/// Finds repeats in the rows of a file.
pub struct RepeatFinder {
    /// The latest rows, with consecutive `seq` numbers.
    slots: VecDeque<Slot>,
    born: Born,
    /// The newest slot with each hash.
    newest: FxHashMap<u64, i64>,
    run: Option<Run>,
    /// The earlier runs that the last run matched. The start of each is the row after its last matching row.
    stopped: Places,
    /// The `seq` at which all stored rows are forgotten next.
    fresh_at: i64,
    /// The number of rows in the current trial.
    tried: i64,
    /// The number of rows in the current trial that were written as repeats.
    repeated: i64,
    /// The number of rows that are still written without a search.
    pause: i64,
    /// The step of the last row that begins a block or a range.
    step: i64,
    /// True in a detailed step, whose rows are written as they are.
    detailed: bool,
}

/// A stored row, with which later rows are compared.
struct Slot {
    numbers: Numbers,
    /// The row; `None` if it cannot be repeated.
    row: Option<StoredRow>,
    /// The `seq` of the row that is in the file in full: this row itself or, if this row is in a run, the row
    /// that it repeats.
    origin: i64,
    /// Two links to earlier rows with the same content. The first is in the chain of all such rows. The
    /// second is in the chain of those that begin a step, and is used only by such a row.
    links: [Link; 2],
}

/// A link in a chain of rows with the same hash.
#[derive(Clone, Copy, Default)]
struct Link {
    /// The hash; 0 if the row is in no chain.
    hash: u64,
    /// The `seq` of the previous row with this hash; 0 if no earlier row has it.
    before: i64,
}

/// Rows that repeat earlier ones and are not yet written.
#[derive(Clone, Copy)]
struct Run {
    /// The earlier runs that have matched every row of this run so far.
    places: Places,
    /// The `seq` of the first row of the earlier run that the `repeat` row will name.
    of: i64,
    first: Numbers,
    last_ns: i64,
    /// The latest totals of the first row's device.
    totals: [i64; 3],
    /// The step of the run; -1 while no row has determined it.
    step: i64,
    rows: i64,
    rank: i32,
    pid: i32,
}

/// A run of earlier rows that has matched the current run so far.
#[derive(Clone, Copy, Default)]
struct EarlierRun {
    /// The `seq` of its first row.
    start: i64,
    /// The totals of the current run minus the totals of the earlier run.
    shift: [i64; 3],
}

/// A small set of earlier runs.
#[derive(Clone, Copy, Default)]
struct Places {
    places: [EarlierRun; MOST_PLACES],
    count: usize,
}

impl Places {
    fn all(&self) -> &[EarlierRun] {
        &self.places[..self.count]
    }

    fn all_mut(&mut self) -> &mut [EarlierRun] {
        &mut self.places[..self.count]
    }

    fn first(&self) -> Option<EarlierRun> {
        self.all().first().copied()
    }

    /// Adds an earlier run if there is room.
    fn add(&mut self, place: EarlierRun) {
        if let Some(free) = self.places.get_mut(self.count) {
            *free = place;
            self.count += 1;
        }
    }
}

impl Link {
    fn new(hash: u64) -> Link {
        Link { hash, before: 0 }
    }
}

impl RepeatFinder {
    /// Creates a finder for a new file. The argument is true if the first step of the file is detailed.
    #[must_use]
    pub fn new(detailed: bool) -> RepeatFinder {
        RepeatFinder {
            slots: VecDeque::new(),
            born: Born::default(),
            newest: FxHashMap::default(),
            run: None,
            stopped: Places::default(),
            fresh_at: i64::MIN,
            tried: 0,
            repeated: 0,
            pause: 0,
            step: -1,
            detailed,
        }
    }

    /// Returns true if the last row belongs to a detailed step.
    #[must_use]
    pub fn is_detailed(&self) -> bool {
        self.detailed
    }

    /// Stores a row that is written as it is and that no other row repeats.
    pub fn note(&mut self, row: &Row<'_>) {
        self.push(Numbers::of(row), None, row.seq, [Link::default(); 2]);
    }

    /// Adds the next row, and passes to `write` the rows that can be written by now: none while a run lasts.
    ///
    /// # Errors
    /// Returns the error of `write`.
    pub fn row<E>(
        &mut self,
        row: &Row<'_>,
        write: &mut impl FnMut(&Row<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let is_mark = row.event == EventName::Mark && row.api == Api::Detail.as_str();
        let detail = if is_mark { DetailMark::parse(row.name) } else { None };
        if let Some(mark) = detail {
            self.detailed = mark != DetailMark::Off;
        }
        if self.detailed || detail.is_some() || !is_repeatable(row.event) || is_huge(row) || self.is_paused()
        {
            self.end_run(write)?;
            self.note(row);
            return write(row);
        }
        let numbers = Numbers::of(row);
        let born = self.born.find(&numbers);
        let has_step = born.is_none() && row.step >= 0;
        let begins_step = has_step && self.step != row.step;
        if has_step {
            self.step = row.step;
        }
        if let Some(run) = self.run
            && let Some(run) = self.with_row(run, row, &numbers, born)
        {
            let of = run.of + run.rows - 1;
            self.run = Some(run);
            self.push_repeat(numbers, of, begins_step);
            return Ok(());
        }
        self.end_run(write)?;
        if row.seq >= self.fresh_at {
            self.forget();
            self.fresh_at = row.seq.saturating_add(FRESH_START);
        }
        let hash = hash(row);
        let links = [hash, if begins_step { first_of_step(hash) } else { 0 }].map(Link::new);
        let places = self.places(row, &numbers, links, born);
        let Some(of) = places.first().map(|place| place.start) else {
            let before = self.slots.back().and_then(|slot| slot.row.as_ref());
            let stored = StoredRow::new(row, before);
            self.push(numbers, Some(stored), row.seq, links);
            return write(row);
        };
        self.run = Some(Run {
            places,
            of,
            first: numbers,
            last_ns: row.ts_ns,
            totals: numbers.totals,
            step: if has_step { row.step } else { -1 },
            rows: 1,
            rank: row.rank,
            pid: row.pid,
        });
        self.push_repeat(numbers, of, begins_step);
        Ok(())
    }

    /// Counts a row. Returns true if the search is paused, because too few rows of the last trial were
    /// repeats.
    fn is_paused(&mut self) -> bool {
        if self.pause > 0 {
            self.pause -= 1;
            return true;
        }
        self.tried += 1;
        if self.tried > TRIAL {
            let few = self.repeated * LEAST_SHARE < TRIAL;
            (self.tried, self.repeated) = (0, 0);
            self.pause = if few { PAUSE } else { 0 };
        }
        false
    }

    /// Returns `run` with one more row. Returns `None` if the row matches the next row of no earlier run, or
    /// if its time is before the previous row's.
    fn with_row(
        &self,
        mut run: Run,
        row: &Row<'_>,
        numbers: &Numbers,
        born: Option<(i64, i64)>,
    ) -> Option<Run> {
        if row.ts_ns < run.last_ns {
            return None;
        }
        let step = if run.step < 0 { row.step } else { run.step };
        let mut places = Places::default();
        for place in run.places.all() {
            let at = place.start + run.rows;
            // A run must not match its own rows, because the reader has only the rows before the run.
            if at < run.first.seq && self.fits(row, numbers, at, (run.first.device, place.shift, step), born)
            {
                places.add(*place);
            }
        }
        run.of = places.first()?.start;
        run.places = places;
        run.rows += 1;
        run.last_ns = row.ts_ns;
        if born.is_none() && row.step >= 0 {
            run.step = row.step;
        }
        if row.device == run.first.device {
            run.totals = numbers.totals;
        }
        Some(run)
    }

    /// Ends the current run, if any, and writes its row. Afterwards, every row added so far has been written.
    ///
    /// # Errors
    /// Returns the error of `write`.
    pub fn end_run<E>(&mut self, write: &mut impl FnMut(&Row<'_>) -> Result<(), E>) -> Result<(), E> {
        let Some(run) = self.run.take() else { return Ok(()) };
        // The last run ends because a single row was added, left out or changed, as often happens within an
        // otherwise equal step. So the next run is searched for near these rows, too.
        self.stopped = run.places;
        self.stopped.all_mut().iter_mut().for_each(|place| place.start += run.rows);
        if run.rows < LEAST_ROWS {
            return self.write_rows(&run, write);
        }
        self.repeated += run.rows;
        let Numbers { seq, ts_ns, device, .. } = run.first;
        let repeat = Repeat {
            seq,
            ts_ns,
            duration_ns: run.last_ns - ts_ns,
            of: run.of,
            rows: run.rows,
            device,
            totals: run.totals,
            step: run.step,
        };
        write(&repeat.row(run.rank, run.pid))
    }

    /// Forgets all stored rows.
    fn forget(&mut self) {
        self.slots.clear();
        self.newest.clear();
    }

    /// Writes the rows of a run as plain rows.
    fn write_rows<E>(&self, run: &Run, write: &mut impl FnMut(&Row<'_>) -> Result<(), E>) -> Result<(), E> {
        for seq in run.first.seq..run.first.seq + run.rows {
            if let Some(row) = self.slot(seq).and_then(|slot| slot.row.as_ref()) {
                write(&row.row())?;
            }
        }
        Ok(())
    }

    fn slot(&self, seq: i64) -> Option<&Slot> {
        let first = self.slots.front()?.numbers.seq;
        self.slots.get(usize::try_from(seq.checked_sub(first)?).ok()?)
    }

    /// Returns true if the stored row `at` (a `seq`), changed by the given shift of a device's totals and the
    /// step, equals `row`.
    fn fits(
        &self,
        row: &Row<'_>,
        numbers: &Numbers,
        at: i64,
        (device, totals, step): (i32, [i64; 3], i64),
        born: Option<(i64, i64)>,
    ) -> bool {
        let Some(of) = self.slot(at).and_then(|slot| slot.row.as_ref()) else { return false };
        let shift = Shift { device, totals, step };
        let made = shift.apply(&of.numbers, numbers.seq, born);
        (made.alloc_id, made.totals, made.step) == (numbers.alloc_id, numbers.totals, numbers.step)
            // A row without a step repeats only rows without a step.
            && (born.is_some() || (of.numbers.step < 0) == (numbers.step < 0))
            && of.fits(row)
    }

    /// Returns the earlier runs that may be repeated by a run that starts with `row`. At the start of a step,
    /// these are first the recent steps that start with such a row, then other rows with the same content.
    /// Several steps are needed, because two patterns often alternate: a variable such as `loss` keeps a
    /// block until it is assigned again. Elsewhere, these are first the rows where the last run stopped, then
    /// rows with the same content. There, if several rows repeat the same row, only the first one found
    /// counts.
    fn places(&self, row: &Row<'_>, numbers: &Numbers, links: [Link; 2], born: Option<(i64, i64)>) -> Places {
        let mut places = Places::default();
        let mut origins = [0; MOST_PLACES];
        let begins_step = links[1].hash != 0;
        let mut add = |seq: i64| {
            let Some(slot) = self.slot(seq) else { return };
            let is_known = !begins_step && origins[..places.count].contains(&slot.origin);
            if places.count == MOST_PLACES || is_known || places.all().iter().any(|place| place.start == seq)
            {
                return;
            }
            let mut shift = numbers.totals;
            shift
                .iter_mut()
                .zip(slot.numbers.totals)
                .for_each(|(total, of)| *total = total.saturating_sub(of));
            if self.fits(row, numbers, seq, (row.device, shift, row.step), born) {
                origins[places.count] = slot.origin;
                places.add(EarlierRun { start: seq, shift });
            }
        };
        // The last run ended because a row was added, left out or changed. So this row may equal the row
        // after that run's last matching row, or one of the two rows after it.
        if !begins_step {
            let around = |place: &EarlierRun| [0, 1, 2].map(|more| place.start + more);
            self.stopped.all().iter().flat_map(around).for_each(&mut add);
        }
        for (chain, Link { hash, .. }) in links.iter().enumerate().rev().filter(|(_, link)| link.hash != 0) {
            let mut next = self.newest.get(hash).copied();
            for _ in 0..MOST_COMPARED {
                let Some(slot) = next.and_then(|seq| self.slot(seq)) else { break };
                add(slot.numbers.seq);
                next = Some(slot.links[chain].before);
            }
        }
        places
    }

    /// Stores a row that repeats the row with `seq` `of`.
    fn push_repeat(&mut self, numbers: Numbers, of: i64, begins_step: bool) {
        let Some(slot) = self.slot(of) else { return };
        let row = slot.row.as_ref().map(|row| StoredRow { numbers, ..row.clone() });
        let (origin, hash) = (slot.origin, slot.links[0].hash);
        let links = [hash, if begins_step { first_of_step(hash) } else { 0 }].map(Link::new);
        self.push(numbers, row, origin, links);
    }

    fn push(&mut self, numbers: Numbers, row: Option<StoredRow>, origin: i64, mut links: [Link; 2]) {
        self.born.note(&numbers);
        // A gap in the numbers means that rows were removed, such as the end row of a trace that continues.
        // The stored rows are then forgotten, because a run needs consecutive numbers.
        if self.slots.back().is_some_and(|slot| slot.numbers.seq + 1 != numbers.seq) {
            self.forget();
        }
        if self.slots.len() >= WINDOW
            && let Some(old) = self.slots.pop_front()
        {
            for link in old.links.iter().filter(|link| link.hash != 0) {
                if self.newest.get(&link.hash) == Some(&old.numbers.seq) {
                    self.newest.remove(&link.hash);
                }
            }
        }
        for link in links.iter_mut().filter(|link| link.hash != 0) {
            link.before = self.newest.insert(link.hash, numbers.seq).unwrap_or(0);
        }
        self.slots.push_back(Slot { numbers, row, origin, links });
    }
}

/// Returns true if a number in the row is clamped when it is written. The reader would then get a different
/// number than the writer compared.
fn is_huge(row: &Row<'_>) -> bool {
    let bytes =
        [row.delta_bytes, row.allocated_bytes, row.active_bytes, row.reserved_bytes, row.device_free_bytes];
    let others =
        [row.ts_ns, row.addr, row.alloc_id, row.requested_bytes, row.rounded_bytes, row.step, row.latency_ns];
    bytes.iter().any(|number| number.unsigned_abs() > MAX_BYTES)
        || others.iter().any(|number| number.unsigned_abs() > MAX_NUMBER)
}

/// Returns the hash for the chain of rows that begin a step, from the hash of the row's content.
fn first_of_step(hash: u64) -> u64 {
    !hash | 1
}

/// Returns a hash of the columns that a repeat does not change. It is never 0.
fn hash(row: &Row<'_>) -> u64 {
    let mut hasher = FxHasher::default();
    hasher.write_u64(row.event as u64);
    for number in [row.addr, row.delta_bytes, row.requested_bytes, row.stream, row.pool] {
        hasher.write_i64(number);
    }
    hasher.write_i32(row.tid);
    hasher.write_i32(row.device);
    hasher.write(row.name.as_bytes());
    hasher.finish() | 1 << 63
}
