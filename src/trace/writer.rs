//! Rows into a CSV.
//!
//! The writer thread must keep up with the fastest program, and most of a row is integers: `csv` with
//! `serde` formats each field through three layers, these plain loops take a fraction of the time. Tests hold
//! every byte against `csv`, which also reads all that is written.

use std::io::{self, Write};

use crate::schema::{COLUMNS, Row};

/// Bytes that are collected before the sink gets them: whole rows, always.
const BUFFER: usize = 256 << 10;

/// Writes the header with the first row, then whole lines.
pub struct RowWriter<W: Write> {
    sink: W,
    /// Longer than what is in it: room is made for a line, not for each field.
    buffer: Vec<u8>,
    filled: usize,
    header: bool,
}

impl<W: Write> RowWriter<W> {
    /// Rows go to `sink`, buffered; see [`RowWriter::flush`].
    pub fn new(sink: W) -> Self {
        RowWriter { sink, buffer: vec![0; BUFFER + 4096], filled: 0, header: true }
    }

    /// As [`RowWriter::new`], behind rows that `sink` has already.
    pub fn without_header(sink: W) -> Self {
        RowWriter { header: false, ..RowWriter::new(sink) }
    }

    /// Adds a row.
    ///
    /// # Errors
    /// The sink's, when the buffer had to be written.
    pub fn write(&mut self, row: &Row<'_>) -> io::Result<()> {
        if std::mem::take(&mut self.header) {
            let mut line = self.line(COLUMNS.iter().map(|column| column.name.len()).sum());
            COLUMNS.iter().for_each(|column| line.text(column.name));
            self.filled = line.end();
        }
        let Row { api, source, op, module, phase, name, .. } = row;
        let mut line =
            self.line([api, source, op, module, phase, name].into_iter().map(|text| text.len()).sum());
        append(&mut line, row);
        self.filled = line.end();
        if self.filled >= BUFFER { self.pass_on() } else { Ok(()) }
    }

    /// Gives the sink all rows added so far.
    ///
    /// # Errors
    /// The sink's.
    pub fn flush(&mut self) -> io::Result<()> {
        self.pass_on()?;
        self.sink.flush()
    }

    /// The sink.
    pub fn get_ref(&self) -> &W {
        &self.sink
    }

    /// The next line, which has texts of so many bytes beside its other fields.
    fn line(&mut self, texts: usize) -> Line<'_> {
        // Each byte may be a quote, which becomes two.
        let most = self.filled + 2 * texts + COLUMNS.len() * FIELD;
        if self.buffer.len() < most {
            self.buffer.resize(most, 0);
        }
        Line { bytes: &mut self.buffer, at: self.filled }
    }

    fn pass_on(&mut self) -> io::Result<()> {
        let result = self.sink.write_all(&self.buffer[..self.filled]);
        // After an error the rows are gone either way: half of them may be in the sink.
        self.filled = 0;
        result
    }
}

/// The fields of a row, in the order of [`COLUMNS`]; a missing one is an error of the compiler.
fn append(line: &mut Line<'_>, row: &Row<'_>) {
    let Row {
        seq,
        ts_ns,
        rank,
        pid,
        tid,
        device,
        event,
        status,
        api,
        source,
        alloc_id,
        addr,
        requested_bytes,
        rounded_bytes,
        delta_bytes,
        allocated_bytes,
        active_bytes,
        reserved_bytes,
        device_free_bytes,
        op,
        module,
        phase,
        category,
        step,
        stream,
        pool,
        latency_ns,
        stack_id,
        name,
    } = *row;
    line.int(seq);
    line.int(ts_ns);
    for number in [rank, pid, tid, device] {
        line.int(i64::from(number));
    }
    line.text(event.as_str());
    line.int(i64::from(status));
    line.text(api);
    line.text(source);
    for number in [
        alloc_id,
        addr,
        requested_bytes,
        rounded_bytes,
        delta_bytes,
        allocated_bytes,
        active_bytes,
        reserved_bytes,
        device_free_bytes,
    ] {
        line.int(number);
    }
    line.text(op);
    line.text(module);
    line.text(phase);
    line.text(category.as_str());
    for number in [step, stream, pool, latency_ns, stack_id] {
        line.int(number);
    }
    line.text(name);
}

/// More than a field takes beside the bytes of its text: a number has twenty bytes and a comma, and what is
/// written behind it for nothing; a word of the schema's own (an event, a category) has fewer.
const FIELD: usize = 32;

/// 10^8: what has fewer than nine digits is below it.
const NINE_DIGITS: u64 = 100_000_000;

/// A line that is being written.
struct Line<'a> {
    /// Has room for all of it.
    bytes: &'a mut [u8],
    at: usize,
}

impl Line<'_> {
    /// Writes these bytes, of which the first `count` mean something: a copy of a fixed length is no call.
    #[inline(always)]
    fn put<const N: usize>(&mut self, bytes: [u8; N], count: usize) {
        self.bytes[self.at..self.at + N].copy_from_slice(&bytes);
        self.at += count;
    }

    #[inline(always)]
    fn int(&mut self, number: i64) {
        match number {
            // Half of a row's numbers.
            0..=9 => self.put([b'0' + number as u8, b','], 2),
            -1 => self.put(*b"-1,", 3),
            _ => self.long(number),
        }
    }

    /// A number that is not 0.
    fn long(&mut self, number: i64) {
        if number < 0 {
            self.put([b'-'], 1);
        }
        let number = number.unsigned_abs();
        if number < NINE_DIGITS {
            let digits = digits(number);
            let zeros = digits.trailing_zeros() / 8;
            // Behind eight digits at most.
            let comma = u128::from(b',') << (64 - 8 * zeros);
            let text = u128::from(ascii(digits) >> (8 * zeros)) | comma;
            return self.put(text.to_le_bytes(), 9 - zeros as usize);
        }
        let (above, low) = (number / NINE_DIGITS, number % NINE_DIGITS);
        if above < NINE_DIGITS {
            let digits = digits(above);
            let zeros = digits.trailing_zeros() / 8;
            let text = u128::from(ascii(digits)) | u128::from(ascii(self::digits(low))) << 64;
            self.put((text >> (8 * zeros)).to_le_bytes(), 16 - zeros as usize);
            return self.put([b','], 1);
        }
        // What stands before the last sixteen digits, without the comma that ends a number.
        self.int((above / NINE_DIGITS).cast_signed());
        self.at -= 1;
        self.put(ascii(digits(above % NINE_DIGITS)).to_le_bytes(), 8);
        self.put(ascii(digits(low)).to_le_bytes(), 8);
        self.put([b','], 1);
    }

    fn text(&mut self, text: &str) {
        let from = text.as_bytes();
        let to = &mut self.bytes[self.at..self.at + from.len()];
        let plain = match from.len() {
            0 => false,
            1..4 => copy::<1>(from, to),
            4..8 => copy::<4>(from, to),
            _ => copy::<8>(from, to),
        };
        if plain || !from.is_empty() && !from.iter().any(|byte| b",\"\n\r".contains(byte)) {
            self.at += from.len();
        } else {
            self.quoted(from);
        }
        self.put([b','], 1);
    }

    #[cold]
    fn quoted(&mut self, text: &[u8]) {
        self.put([b'"'], 1);
        for byte in text {
            if *byte == b'"' {
                self.put([b'"'], 1);
            }
            self.put([*byte], 1);
        }
        self.put([b'"'], 1);
    }

    /// Where the line ends: the comma behind the last field becomes its end.
    fn end(self) -> usize {
        if let Some(last) = self.bytes[..self.at].last_mut() {
            *last = b'\n';
        }
        self.at
    }
}

/// Copies `from`, which has `N` bytes at least (`N` is eight at the most), and tells whether all of it is plain. The last
/// `N` are copied whatever was copied before them, so that few bytes are taken by themselves.
#[inline(always)]
fn copy<const N: usize>(from: &[u8], to: &mut [u8]) -> bool {
    let mut plain = true;
    let mut put = |from: &[u8; N], to: &mut [u8; N]| {
        let mut eight = [b'x'; 8];
        eight[..N].copy_from_slice(from);
        plain &= is_plain(u64::from_le_bytes(eight));
        *to = *from;
    };
    for (from, to) in from.as_chunks::<N>().0.iter().zip(to.as_chunks_mut::<N>().0) {
        put(from, to);
    }
    if let (Some(from), Some(to)) = (from.last_chunk::<N>(), to.last_chunk_mut::<N>()) {
        put(from, to);
    }
    plain
}

/// Do eight bytes want no quotes for sure? Those below `#` do (quotes and line ends) or are rare (spaces), and so do
/// commas. (The tests of bytes in a word are those of Sean Anderson's Bit Twiddling Hacks.)
#[inline(always)]
fn is_plain(bytes: u64) -> bool {
    const ONES: u64 = u64::from_le_bytes([1; 8]);
    const TOP: u64 = u64::from_le_bytes([0x80; 8]);
    const COMMAS: u64 = u64::from_le_bytes([b','; 8]);
    let below = |bytes: u64, byte: u8| bytes.wrapping_sub(ONES * byte as u64) & !bytes;
    (below(bytes, b'#') | below(bytes ^ COMMAS, 1)) & TOP == 0
}

/// The eight digits of a number below 10^8, the first in the lowest byte: halves, then pairs, then single ones, each
/// by one multiplication that divides all of them at once.
#[inline(always)]
fn digits(number: u64) -> u64 {
    let fours = (number / 10_000) | (number % 10_000) << 32;
    let hundreds = (fours * 10_486) >> 20 & 0x0000_007F_0000_007F;
    let pairs = hundreds | (fours - 100 * hundreds) << 16;
    let tens = (pairs * 103) >> 10 & 0x000F_000F_000F_000F;
    tens | (pairs - 10 * tens) << 8
}

/// Digits as text, the first in the lowest byte.
#[inline(always)]
fn ascii(digits: u64) -> u64 {
    digits | u64::from_le_bytes([b'0'; 8])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::{Category, EventName};

    /// A line of these numbers.
    fn line_of(numbers: &[i64]) -> String {
        let mut bytes = vec![0; (numbers.len() + 1) * FIELD];
        let mut line = Line { bytes: &mut bytes, at: 0 };
        numbers.iter().for_each(|number| line.int(*number));
        let end = line.end();
        String::from_utf8(bytes[..end].to_vec()).unwrap()
    }

    #[test]
    fn numbers_of_every_length_are_written_whole() {
        let mut numbers =
            vec![0, i64::MAX, i64::MIN, 100_000_000, 10_000_000_000_000_000, 1_000_000_010_000_000];
        let mut number = 0_i64;
        for digit in [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 0, 0, 9, 9, 1, 0, 5, 7] {
            number = number * 10 + digit;
            numbers.extend([
                number,
                -number,
                number - 1,
                10_i64.pow(number.ilog10()),
                -(10_i64.pow(number.ilog10())),
            ]);
        }
        let expected: Vec<String> = numbers.iter().map(i64::to_string).collect();
        assert_eq!(line_of(&numbers), expected.join(",") + "\n");
        // Every pair of digits in every place.
        for low in 0..10_000 {
            let number = low * 10_000 + (9_999 - low);
            assert_eq!(line_of(&[number]), format!("{number}\n"));
        }
    }

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
        let texts = ["(none)", "GPT.h.0", "a,b", "say \"hi\"", "{\"a\":1}", "two\nlines", "é", " x "];
        let numbers = [0, 1, -1, 512, i64::MAX, i64::MIN, 1 << 46];
        let mut ours = RowWriter::new(Vec::new());
        let mut theirs = csv::Writer::from_writer(Vec::new());
        for index in 0..500 {
            let text = |shift: usize| texts[(index * 7 + shift) % texts.len()];
            let number = |shift: usize| numbers[(index * 5 + shift) % numbers.len()];
            let row = Row {
                seq: index as i64 + 1,
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
                ..Row::default()
            };
            ours.write(&row).unwrap();
            theirs.serialize(row).unwrap();
        }
        ours.flush().unwrap();
        let theirs = theirs.into_inner().unwrap();
        assert_eq!(String::from_utf8(ours.get_ref().clone()).unwrap(), String::from_utf8(theirs).unwrap());
    }
}
