//! Writes rows as CSV.
//!
//! The writer thread must keep up with the fastest program, and most of a row is integers. `csv` with `serde`
//! formats each field through three layers; these plain loops take a fraction of the time. Rare rows are left to
//! `csv`: those with long texts or huge numbers. Tests compare the output byte by byte with the output of `csv`,
//! which also reads all traces.

use std::io::{self, Write};

use super::field_cache::{self, CachedWord, FieldCache};
use super::line::{LineBuffer, SPACE};
use crate::columns::{COLUMNS, Row};
use crate::text::NONE;
use crate::{Category, EventName};

/// The number of bytes collected before a write to the sink. The buffer always contains complete rows.
const BUFFER: usize = 256 << 10;

/// Writes the header before the first row, then complete lines.
pub struct RowWriter<W: Write> {
    sink: W,
    /// [`BUFFER`] bytes and space for one line.
    buffer: Vec<u8>,
    filled: usize,
    header: bool,
    cache: FieldCache,
}

impl<W: Write> RowWriter<W> {
    /// Creates a buffered writer to `sink`; see [`RowWriter::flush`].
    pub fn new(sink: W) -> Self {
        let (buffer, cache) = (vec![0; BUFFER + SPACE], FieldCache::default());
        RowWriter { sink, buffer, filled: 0, header: true, cache }
    }

    /// Same as [`RowWriter::new`], for a `sink` that already contains rows.
    pub fn without_header(sink: W) -> Self {
        RowWriter { header: false, ..RowWriter::new(sink) }
    }

    /// Adds a row. Clamps each number to the bound of its column, so that readers accept every written row.
    ///
    /// # Errors
    /// Returns the sink's error if the buffer had to be written.
    #[inline(never)]
    pub fn write(&mut self, row: &Row<'_>) -> io::Result<()> {
        if std::mem::take(&mut self.header) {
            let mut line = LineBuffer::new(&mut self.buffer, self.filled);
            COLUMNS.iter().for_each(|column| line.text(column.name));
            self.filled += line.end();
        }
        if self.write_line::<false>(row) { self.write_full_buffer() } else { self.write_rare(row) }
    }

    /// Same as [`RowWriter::write`]. `with_texts` fills in the columns of the row's keys
    /// ([`TextKeys`](crate::columns::TextKeys)); it is called only if no recent row had these keys. This function is
    /// compiled into its caller, so the numbers of the row need not be stored.
    ///
    /// # Errors
    /// Returns the sink's error if the buffer had to be written.
    #[inline(always)]
    pub fn write_keyed<'a>(
        &mut self,
        row: Row<'a>,
        with_texts: impl Fn(Row<'a>) -> Row<'a>,
    ) -> io::Result<()> {
        if self.header || !self.cache.blocks.have(&row.keys) {
            return self.write(&with_texts(row));
        }
        if self.write_line::<true>(&row) {
            self.write_full_buffer()
        } else {
            self.write_rare(&with_texts(row))
        }
    }

    /// Adds the line of a row; see [`write_row`]. Adds nothing and returns false if the line is rare.
    #[inline(always)]
    fn write_line<const KEYS_ARE_CACHED: bool>(&mut self, row: &Row<'_>) -> bool {
        let mut line = LineBuffer::new(&mut self.buffer, self.filled);
        write_row::<KEYS_ARE_CACHED>(&mut line, &mut self.cache, row);
        if line.is_rare() {
            return false;
        }
        self.filled += line.end();
        true
    }

    /// Writes the buffer to the sink if it is full.
    #[inline(always)]
    fn write_full_buffer(&mut self) -> io::Result<()> {
        if self.filled >= BUFFER { self.write_buffer() } else { Ok(()) }
    }

    /// Writes the line of `row` with `csv`, with its numbers clamped to their bounds.
    #[cold]
    #[inline(never)]
    fn write_rare(&mut self, row: &Row<'_>) -> io::Result<()> {
        // So that no huge number stays in a cache.
        self.cache = FieldCache::default();
        let mut line = csv::WriterBuilder::new().has_headers(false).from_writer(Vec::new());
        line.serialize(row.bounded()).map_err(io::Error::other)?;
        let line = line.into_inner().map_err(|error| error.into_error())?;
        if self.filled + line.len() > BUFFER {
            self.write_buffer()?;
        }
        if line.len() > BUFFER {
            return self.sink.write_all(&line);
        }
        self.buffer[self.filled..self.filled + line.len()].copy_from_slice(&line);
        self.filled += line.len();
        Ok(())
    }

    /// Writes all buffered rows to the sink.
    ///
    /// # Errors
    /// Returns the sink's error.
    pub fn flush(&mut self) -> io::Result<()> {
        self.write_buffer()?;
        self.sink.flush()
    }

    /// Returns the sink, which does not have the buffered rows yet.
    pub fn get_ref(&self) -> &W {
        &self.sink
    }

    /// Writes all buffered rows, and returns the sink.
    ///
    /// # Errors
    /// Returns the sink's error.
    pub fn into_inner(mut self) -> io::Result<W> {
        self.flush()?;
        Ok(self.sink)
    }

    #[inline(never)]
    fn write_buffer(&mut self) -> io::Result<()> {
        let result = self.sink.write_all(&self.buffer[..self.filled]);
        // After an error, the buffered rows are dropped, because some of them may already be in the sink, and
        // writing them again would repeat these rows.
        self.filled = 0;
        result
    }
}

/// The value of a column.
trait Field: Copy {
    /// Writes the value.
    fn write(self, line: &mut LineBuffer<'_>);
}

impl Field for i64 {
    #[inline(always)]
    fn write(self, line: &mut LineBuffer<'_>) {
        line.int(self);
    }
}

impl Field for i32 {
    #[inline(always)]
    fn write(self, line: &mut LineBuffer<'_>) {
        line.int(i64::from(self));
    }
}

impl Field for EventName {
    #[inline(always)]
    fn write(self, line: &mut LineBuffer<'_>) {
        line.word(field_cache::event(self));
    }
}

impl Field for Category {
    #[inline(always)]
    fn write(self, line: &mut LineBuffer<'_>) {
        line.word(field_cache::category(self));
    }
}

impl Field for &str {
    #[inline(always)]
    fn write(self, line: &mut LineBuffer<'_>) {
        line.apart(|line| line.text(self));
    }
}

/// Writes a column according to its declaration; see [`crate::columns!`].
macro_rules! write_column {
    ($line:ident $cache:ident $row:ident $name:ident plain) => {
        $row.$name.write($line)
    };
    ($line:ident $cache:ident $row:ident $name:ident counter) => {
        $line.counter($row.$name, &mut $cache.columns.$name)
    };
    ($line:ident $cache:ident $row:ident $name:ident near) => {
        $line.near($row.$name, &mut $cache.columns.$name)
    };
    ($line:ident $cache:ident $row:ident $name:ident near_recent) => {
        $line.near_recent($row.$name, &mut $cache.columns.$name)
    };
    ($line:ident $cache:ident $row:ident $name:ident same_as $of:ident) => {
        if $row.$name == $row.$of {
            $line.put(&$cache.columns.$of.text, $cache.columns.$of.length);
        } else {
            $line.id($row.$name);
        }
    };
    ($line:ident $cache:ident $row:ident $name:ident mostly_none) => {
        if $row.$name == NONE {
            $line.word(&const { CachedWord::new(NONE) })
        } else {
            $row.$name.write($line)
        }
    };
}

/// Writes a block of columns according to its declaration.
macro_rules! write_block {
    ($line:ident $cache:ident $row:ident each() { $(
        $(#[$doc:meta])+
        $name:ident: $type:ident = $default:expr, $shape:ident, $reading:ident, $writing:ident $(($of:ident))?;
    )+ }) => {
        $(write_column!($line $cache $row $name $writing $($of)?);)+
    };
    ($line:ident $cache:ident $row:ident group($group:ident) { $(
        $(#[$doc:meta])+
        $name:ident: $type:ident = $default:expr, $shape:ident, $reading:ident, plain;
    )+ }) => {
        $line.numbers([$(i64::from($row.$name)),+], &mut $cache.blocks.$group);
    };
    ($line:ident $cache:ident $row:ident recurring($group:ident) { $(
        $(#[$doc:meta])+
        $name:ident: $type:ident = $default:expr, $shape:ident, $reading:ident, plain;
    )+ }) => {
        let numbers = [$(i64::from($row.$name)),+];
        $line.numbers(numbers, $cache.blocks.$group.of(numbers));
    };
    ($line:ident $cache:ident $row:ident $key:ident($texts:ident) { $(
        $(#[$doc:meta])+
        $name:ident: $type:ident = $default:expr, $shape:ident, $reading:ident, plain;
    )+ }) => {
        if KEYS_ARE_CACHED {
            $cache.blocks.$texts.copy($line, $row.keys.$key);
        } else {
            $cache.blocks.$texts.write($line, $row.keys.$key, |line| {
                $($row.$name.write(line);)+
            });
        }
    };
}

macro_rules! write_row {
    ($($block:ident($($cache:ident)?) $columns:tt)+) => {
        /// Writes the fields of a row. With `KEYS_ARE_CACHED`, the cache has the texts of all its keys.
        #[inline(always)]
        fn write_row<const KEYS_ARE_CACHED: bool>(
            line: &mut LineBuffer<'_>,
            cache: &mut FieldCache,
            row: &Row<'_>,
        ) {
            $(write_block!(line cache row $block($($cache)?) $columns);)+
        }
    };
}

crate::columns!(write_row);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::columns::TextKeys;
    use crate::{Category, EventName};

    #[test]
    fn texts_of_every_length_are_quoted_where_they_must_be() {
        for length in 1..40_usize {
            for (index, byte) in (0..length).flat_map(|index| b"x #,\"\n\r(".map(|byte| (index, byte))) {
                let mut text = vec![b'x'; length];
                text[index] = byte;
                let text = String::from_utf8(text).unwrap();
                let row = Row { name: &text, op: &text, ..Row::default() };
                let (mut ours, mut theirs) =
                    (RowWriter::new(Vec::new()), csv::Writer::from_writer(Vec::new()));
                ours.write(&row).unwrap();
                ours.flush().unwrap();
                theirs.serialize(row).unwrap();
                assert_eq!(*ours.get_ref(), theirs.into_inner().unwrap(), "{text}");
            }
        }
    }

    #[test]
    fn every_byte_is_what_csv_and_serde_write() {
        // `long` fits in a cache of texts, but not in one with two others, and `longer` never fits.
        let (long, longer) = ("h.".repeat(40), "h.".repeat(60));
        let texts = [
            "(none)",
            "GPT.h.0",
            "a,b",
            "say \"hi\"",
            "{\"a\":1}",
            "two\nlines",
            "é",
            " x ",
            &long,
            &longer,
            "fc",
        ];
        let numbers = [0, 1, -1, 512, i64::MAX, i64::MIN, 1 << 46];
        let mut ours = RowWriter::new(Vec::new());
        let mut theirs = csv::Writer::from_writer(Vec::new());
        for seq in 1..=1000 {
            // Each row occurs twice in a row, so that the second one hits the caches. Every third row is written
            // without its texts if they are cached.
            let index = seq as usize / 2;
            let text = |shift: usize| texts[(index * 7 + shift) % texts.len()];
            let number = |shift: usize| numbers[(index * 5 + shift) % numbers.len()];
            let key = |shift: usize| {
                ((index * 7 + shift) % texts.len() + 1 + (index & 1) * texts.len() + (index & 2) * 512) as u64
            };
            let row = Row {
                // Each text has four keys. Keys that differ by 1024 share a slot of the cache, so slots are also
                // replaced.
                keys: TextKeys { owner: key(2), call: index as u64 + 1, form: key(6) },
                seq,
                ts_ns: number(0),
                device: -1,
                event: EventName::ALL[index % EventName::ALL.len()],
                api: text(0),
                source: text(1),
                alloc_id: number(1),
                addr: number(2),
                requested_bytes: number(3),
                delta_bytes: number(4),
                active_bytes: number(5),
                op: text(2),
                module: text(3),
                phase: text(4),
                category: Category::ALL[index % Category::ALL.len()],
                latency_ns: number(6),
                name: text(5),
                dtype: text(6),
                shape: text(7),
                ..Row::default()
            };
            if seq % 3 == 0 {
                let keyed = Row { event: EventName::Mark, status: 9, ..row };
                let keyed =
                    Row { api: "", source: "", op: "", module: "", phase: "", dtype: "", shape: "", ..keyed };
                let with_texts = |keyed: Row<'_>| {
                    assert_eq!(keyed.seq, row.seq);
                    row
                };
                ours.write_keyed(keyed, with_texts).unwrap();
            } else {
                ours.write(&row).unwrap();
            }
            // memtrace's writer clamps numbers beyond the bound of their column, so the expected rows are
            // clamped, too.
            theirs.serialize(row.bounded()).unwrap();
        }
        ours.flush().unwrap();
        let theirs = theirs.into_inner().unwrap();
        assert_eq!(String::from_utf8(ours.get_ref().clone()).unwrap(), String::from_utf8(theirs).unwrap());
    }

    #[test]
    fn rows_with_long_texts_are_whole_and_in_order() {
        let mut ours = RowWriter::new(Vec::new());
        let mut theirs = csv::Writer::from_writer(Vec::new());
        for (seq, length) in (1..).zip([1, 1_500, 1_600, 7, 5_000, 5_000, BUFFER, BUFFER + 1, 3 * BUFFER, 1])
        {
            let name = "\"".repeat(length);
            // An empty text is written as the placeholder.
            let row = Row { seq, ts_ns: 1 << 40, name: &name, op: "", ..Row::default() };
            ours.write(&row).unwrap();
            theirs.serialize(Row { op: NONE, ..row }).unwrap();
        }
        ours.flush().unwrap();
        assert!(*ours.get_ref() == theirs.into_inner().unwrap());
    }

    /// Writes numbers around the bounds, into one column at a time. Some numbers come twice in a row, and
    /// some share all digits but the last eight with the previous number -> clamped, as by the reference
    /// writer.
    #[test]
    fn numbers_beyond_their_bounds_are_cut_also_where_a_cache_has_their_digits() {
        let edges = [1 << 62, 1 << 56, 10_i64.pow(16), 10_i64.pow(8), i64::MAX - 12_345_678];
        let near = |edge: i64| [-1, 0, 0, 1, 12_345_678, 12_345_678].map(|more| edge + more);
        let numbers = edges.into_iter().flat_map(near).flat_map(|number| [number, -number]);
        let numbers: Vec<i64> = numbers.collect();
        let (mut ours, mut theirs) = (RowWriter::new(Vec::new()), csv::Writer::from_writer(Vec::new()));
        for column in 0..12 {
            for index in 0..4 * numbers.len() {
                // The first pass uses every second number: the numbers of one sign.
                let index = if index < numbers.len() { index * 2 } else { index };
                let number = numbers[index % numbers.len()];
                let in_column = |this: usize| if this == column { number } else { 0 };
                let row = Row {
                    seq: in_column(0),
                    ts_ns: in_column(1),
                    alloc_id: in_column(2),
                    addr: in_column(3),
                    requested_bytes: in_column(4),
                    rounded_bytes: in_column(5),
                    delta_bytes: in_column(6),
                    allocated_bytes: in_column(7),
                    active_bytes: in_column(8),
                    reserved_bytes: in_column(9),
                    step: in_column(10),
                    latency_ns: in_column(11),
                    ..Row::default()
                };
                ours.write(&row).unwrap();
                theirs.serialize(row.bounded()).unwrap();
            }
        }
        ours.flush().unwrap();
        let theirs = theirs.into_inner().unwrap();
        assert_eq!(String::from_utf8(ours.get_ref().clone()).unwrap(), String::from_utf8(theirs).unwrap());
    }
}
