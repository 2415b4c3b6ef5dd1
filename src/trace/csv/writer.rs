//! Rows into a CSV.
//!
//! The writer thread must keep up with the fastest program, and most of a row is integers: `csv` with
//! `serde` formats each field through three layers, these plain loops take a fraction of the time. Tests hold
//! every byte against `csv`, which also reads all that is written.

use std::io::{self, Write};

use super::field_cache::{self, FieldCache, Word};
use super::line::{FIELD, Line};
use crate::columns::{COLUMNS, Row};
use crate::text::NONE;

/// Bytes that are collected before the sink gets them: whole rows, always.
const BUFFER: usize = 256 << 10;

/// Writes the header with the first row, then whole lines.
pub struct RowWriter<W: Write> {
    sink: W,
    /// Longer than what is in it: room is made for a line, not for each field.
    buffer: Vec<u8>,
    filled: usize,
    header: bool,
    cache: FieldCache,
}

impl<W: Write> RowWriter<W> {
    /// Rows go to `sink`, buffered; see [`RowWriter::flush`].
    pub fn new(sink: W) -> Self {
        RowWriter {
            sink,
            buffer: vec![0; BUFFER + 4096],
            filled: 0,
            header: true,
            cache: FieldCache::default(),
        }
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
            let (mut line, _) = self.line(COLUMNS.iter().map(|column| column.name.len()).sum());
            COLUMNS.iter().for_each(|column| line.text(column.name));
            self.filled = line.end();
        }
        let Row { api, source, op, module, phase, name, .. } = row;
        let (mut line, cache) =
            self.line([api, source, op, module, phase, name].into_iter().map(|text| text.len()).sum());
        append(&mut line, cache, row);
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

    /// The next line, which has texts of so many bytes beside its other fields, and what the ones before said.
    fn line(&mut self, texts: usize) -> (Line<'_>, &mut FieldCache) {
        // Each byte may be a quote, which becomes two.
        let most = self.filled + 2 * texts + COLUMNS.len() * FIELD;
        if self.buffer.len() < most {
            self.buffer.resize(most, 0);
        }
        (Line::new(&mut self.buffer, self.filled), &mut self.cache)
    }

    fn pass_on(&mut self) -> io::Result<()> {
        let result = self.sink.write_all(&self.buffer[..self.filled]);
        // After an error the rows are gone either way: half of them may be in the sink.
        self.filled = 0;
        result
    }
}

/// The fields of a row, in the order of [`COLUMNS`]; a missing one is an error of the compiler.
fn append(line: &mut Line<'_>, cache: &mut FieldCache, row: &Row<'_>) {
    let Row {
        owner: _,
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
        op: _,
        module: _,
        phase: _,
        category,
        step,
        stream,
        pool,
        latency_ns,
        stack_id,
        name,
    } = *row;
    line.next(seq, &mut cache.seq);
    line.int_shared_prefix(ts_ns, &mut cache.ts_ns);
    line.again([rank, pid, tid, device].map(i64::from), &mut cache.place);
    line.word(field_cache::event(event));
    line.int(i64::from(status));
    line.text(api);
    line.text(source);
    if alloc_id == seq {
        line.again([seq], &mut cache.seq);
    } else {
        line.int(alloc_id);
    }
    line.int_shared_prefix(addr, &mut cache.addr);
    line.int_again(requested_bytes, &mut cache.bytes);
    line.int_again(rounded_bytes, &mut cache.bytes);
    match delta_bytes.checked_neg() {
        Some(freed @ 1..) => {
            line.put(b"-", 1);
            line.int_again(freed, &mut cache.bytes);
        }
        _ => line.int_again(delta_bytes, &mut cache.bytes),
    }
    let totals = [allocated_bytes, active_bytes, reserved_bytes, device_free_bytes];
    if cache.totals.numbers == totals {
        line.again(totals, &mut cache.totals);
    } else {
        let from = line.at();
        line.int_again(allocated_bytes, &mut cache.allocated);
        line.int_again(active_bytes, &mut cache.allocated);
        line.int_again(reserved_bytes, &mut cache.reserved);
        line.int(device_free_bytes);
        cache.totals.keep(totals, line.written(from), line.at() - from);
    }
    cache.owners.write(line, row);
    line.word(field_cache::category(category));
    line.again([step, stream, pool], &mut cache.step);
    line.int(latency_ns);
    line.int(stack_id);
    if name == NONE { line.word(&const { Word::of(NONE) }) } else { line.text(name) }
}

#[cfg(test)]
mod tests {
    use super::*;
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
        // Owners that fit in a register or two, in a place of their own, and in none.
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
            // Twice the same, as rows often are.
            let index = seq as usize / 2;
            let text = |shift: usize| texts[(index * 7 + shift) % texts.len()];
            let number = |shift: usize| numbers[(index * 5 + shift) % numbers.len()];
            let row = Row {
                // One owner, in two places of which each is another's too.
                owner: (index % texts.len() + 1 + (index & 1) * texts.len() + (index & 2) * 512) as u64,
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
