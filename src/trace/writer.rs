//! Rows into a CSV.
//!
//! The writer thread must keep up with the fastest program, and most of a row is integers: `csv` with
//! `serde` formats each field through three layers, these plain loops take half the time or less. A test holds every byte against `csv`, which also reads all that is written.

use std::io::{self, Write};

use crate::schema::{COLUMNS, Row};

/// Bytes that are collected before the sink gets them: whole rows, always.
const BUFFER: usize = 256 << 10;

/// Writes the header with the first row, then whole lines.
pub struct RowWriter<W: Write> {
    sink: W,
    buffer: Vec<u8>,
    header: bool,
}

impl<W: Write> RowWriter<W> {
    /// Rows go to `sink`, buffered; see [`RowWriter::flush`].
    pub fn new(sink: W) -> Self {
        RowWriter { sink, buffer: Vec::with_capacity(BUFFER + 4096), header: true }
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
            for column in COLUMNS {
                text(&mut self.buffer, column.name);
            }
            end_line(&mut self.buffer);
        }
        append(&mut self.buffer, row);
        if self.buffer.len() >= BUFFER { self.pass_on() } else { Ok(()) }
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

    fn pass_on(&mut self) -> io::Result<()> {
        let result = self.sink.write_all(&self.buffer);
        // After an error the rows are gone either way: half of them may be in the sink.
        self.buffer.clear();
        result
    }
}

/// The fields of a row, in the order of [`COLUMNS`]; a missing one is an error of the compiler.
fn append(buffer: &mut Vec<u8>, row: &Row<'_>) {
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
    int(buffer, seq);
    int(buffer, ts_ns);
    for number in [rank, pid, tid, device] {
        int(buffer, i64::from(number));
    }
    word(buffer, event.as_str());
    int(buffer, i64::from(status));
    text(buffer, api);
    text(buffer, source);
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
        int(buffer, number);
    }
    text(buffer, op);
    text(buffer, module);
    text(buffer, phase);
    word(buffer, category.as_str());
    for number in [step, stream, pool, latency_ns, stack_id] {
        int(buffer, number);
    }
    text(buffer, name);
    end_line(buffer);
}

#[inline]
fn int(buffer: &mut Vec<u8>, number: i64) {
    match number {
        // Half of a row's numbers.
        0..=9 => buffer.extend_from_slice(&[b'0' + number as u8, b',']),
        -1 => buffer.extend_from_slice(b"-1,"),
        _ => {
            buffer.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
            buffer.push(b',');
        }
    }
}

/// A word of the schema's own, which needs no quotes.
#[inline]
fn word(buffer: &mut Vec<u8>, word: &'static str) {
    buffer.extend_from_slice(word.as_bytes());
    buffer.push(b',');
}

fn text(buffer: &mut Vec<u8>, text: &str) {
    let bytes = text.as_bytes();
    // Without a way out half-way the compiler looks at many bytes at once.
    let special = |byte: u8| byte == b',' || byte == b'"' || byte == b'\n' || byte == b'\r';
    if bytes.iter().fold(bytes.is_empty(), |found, byte| found | special(*byte)) {
        buffer.push(b'"');
        for byte in bytes {
            if *byte == b'"' {
                buffer.push(b'"');
            }
            buffer.push(*byte);
        }
        buffer.push(b'"');
    } else {
        buffer.extend_from_slice(bytes);
    }
    buffer.push(b',');
}

/// The comma behind the last field becomes the end of the line.
fn end_line(buffer: &mut [u8]) {
    if let Some(last) = buffer.last_mut() {
        *last = b'\n';
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::{Category, EventName};

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
