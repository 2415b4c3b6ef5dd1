//! The reader's side: expands a `repeat` row into the rows that it replaces.

use std::collections::VecDeque;

use super::{Born, Numbers, Repeat, Repeatable, Shift, WINDOW, is_repeatable};
use crate::columns::MAX_NUMBER;

/// The last [`WINDOW`] rows of a file, and the last allocations in it. Each file has its own window, because
/// a `repeat` row never refers to another part. The memory grows with the rows up to that bound.
pub struct Window<T> {
    pub(super) rows: VecDeque<T>,
    born: Born,
}

/// A `repeat` row that is being expanded.
#[derive(Clone, Copy, Debug)]
pub struct Expansion {
    repeat: Repeat,
    shift: Shift,
    /// The index of the next repeated row.
    at: usize,
    /// The number of rows returned so far.
    done: i64,
    /// The time of the first repeated row.
    from_ns: i64,
    /// The time of the last repeated row.
    to_ns: i64,
}

impl<T: Repeatable> Default for Window<T> {
    fn default() -> Self {
        Window { rows: VecDeque::new(), born: Born::default() }
    }
}

impl<T: Repeatable> Window<T> {
    /// Adds a row of the file that is not a `repeat` row.
    pub fn add(&mut self, row: T) {
        if self.rows.len() >= WINDOW {
            self.rows.pop_front();
        }
        self.born.note(&row.numbers());
        self.rows.push_back(row);
    }

    /// Returns the last row, whether it was read or expanded.
    #[must_use]
    pub fn last(&self) -> Option<&T> {
        self.rows.back()
    }

    /// Begins the expansion of a `repeat` row; [`Window::next_row`] returns its rows.
    ///
    /// # Errors
    /// Returns the reason if the row cannot be expanded: it is damaged, or the repeated rows are missing.
    pub fn begin(&self, repeat: Repeat) -> Result<Expansion, String> {
        let Repeat { seq, of, rows, device, duration_ns, .. } = repeat;
        let most = WINDOW as i64;
        if !(1..=most).contains(&rows) || duration_ns < 0 {
            return Err(format!(
                "repeat: expected 1 to {most} rows and a time of at least 0, found {rows} \
                                rows"
            ));
        }
        if of <= 0 || of.saturating_add(rows) > seq {
            return Err(format!(
                "repeat: the {rows} rows that start at seq {of} do not all come before seq \
                                {seq}"
            ));
        }
        let missing = || {
            let (first, last) = (of, of + rows - 1);
            format!(
                "repeat: the rows that it repeats, {first} to {last} of this file, are missing or further \
                 back than {most} rows"
            )
        };
        let numbers = |index: usize| self.rows.get(index).map(T::numbers);
        let at = self.rows.partition_point(|row| row.numbers().seq < of);
        let last_at = at + rows as usize - 1;
        let (first, last) = numbers(at).zip(numbers(last_at)).ok_or_else(missing)?;
        if (first.seq, last.seq) != (of, of + rows - 1) {
            return Err(missing());
        }
        let mut end = None;
        for Numbers { event, device: on, totals, .. } in (at..=last_at).filter_map(numbers) {
            if !is_repeatable(event) {
                return Err(format!("repeat: a row `{}` cannot be repeated", event.as_str()));
            }
            if on == device {
                end = Some(totals);
            }
        }
        let end = end.ok_or_else(|| format!("repeat: none of its rows belongs to device {device}"))?;
        let mut totals = repeat.totals;
        totals.iter_mut().zip(end).for_each(|(total, end)| *total = total.saturating_sub(end));
        let shift = Shift { device, totals, step: repeat.step };
        Ok(Expansion { repeat, shift, at, done: 0, from_ns: first.ts_ns, to_ns: last.ts_ns })
    }

    /// Returns the next row of a `repeat` row, or `None` after the last one.
    pub fn next_row(&mut self, expansion: &mut Expansion) -> Option<&T> {
        let seq = expansion.repeat.seq;
        if expansion.is_done() {
            return None;
        }
        let mut row = self.rows.get(expansion.at)?.clone();
        let of = row.numbers();
        let mut numbers = expansion.shift.apply(&of, seq.saturating_add(expansion.done), self.born.find(&of));
        numbers.ts_ns = expansion.time(of.ts_ns);
        row.set_numbers(&numbers);
        expansion.done += 1;
        // The next repeated row has the next index, unless the window is full. Then adding this row removes
        // the first row, so the next repeated row moves to this index.
        expansion.at += usize::from(self.rows.len() < WINDOW);
        self.add(row);
        self.rows.back()
    }
}

impl Expansion {
    /// Returns true if all rows were returned.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.done >= self.repeat.rows
    }

    /// Returns the time of the next row, which repeats a row with the time `of`.
    fn time(&self, of: i64) -> i64 {
        let Repeat { ts_ns, duration_ns, rows, .. } = self.repeat;
        let (span, into) = (self.to_ns.saturating_sub(self.from_ns), of.saturating_sub(self.from_ns));
        let into = match () {
            () if self.done == 0 => 0,
            () if self.done + 1 == rows => duration_ns,
            () if span <= 0 => 0,
            () => (i128::from(into.clamp(0, span)) * i128::from(duration_ns) / i128::from(span)) as i64,
        };
        let most = MAX_NUMBER.cast_signed();
        ts_ns.saturating_add(into).clamp(-most, most)
    }
}
