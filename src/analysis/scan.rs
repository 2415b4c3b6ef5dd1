//! Bytes into records: a scan by byte masks that parses only the columns asked for.
//!
//! Sixty-four bytes at a time become one bit mask of commas and line ends, so that the cost of a
//! column which nobody asked for is one bit. A row with a quote takes a slower way.

use memtrace_trace::schema::COLUMNS;
use memtrace_trace::{Category, EventName};
use rustc_hash::FxHashMap;
use wide::{CmpEq, i8x16};

use crate::record::{Record, Wanted};
use crate::texts::{Symbol, Texts};

/// No id, address or time is larger: their differences stay within 64 bits.
const MOST: u64 = 1 << 62;
/// No memory is larger (64 PiB): the sums over it stay within 64 bits.
const MOST_BYTES: u64 = 1 << 56;

/// What is wrong with a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// The line in the block, counted from 0.
    pub(crate) line: u64,
    /// What was expected and what stood there.
    pub(crate) what: String,
}

/// What came out of one block of whole lines.
#[derive(Default)]
pub(crate) struct Chunk {
    /// The rows, in order.
    pub(crate) records: Vec<Record>,
    /// How many lines there were, the empty ones too.
    pub(crate) lines: u64,
    /// The first line that was not a row. Unless the scan is lenient, nothing behind it was read.
    pub(crate) fault: Option<Fault>,
    /// How many lines were not rows.
    pub(crate) skipped: u64,
}

/// Parses blocks; keeps the texts that it saw, so that the shared table is seldom asked.
pub(crate) struct Scanner {
    wanted: Wanted,
    width: usize,
    lenient: bool,
    texts: Texts,
    known: FxHashMap<Box<[u8]>, Symbol>,
    /// Per column, the text of the row before: most rows repeat it.
    last: [(Vec<u8>, Symbol); COLUMNS.len()],
    index: Index,
}

/// Where the fields and lines of a block end.
#[derive(Default)]
struct Index {
    /// Every comma and line end.
    stops: Vec<u32>,
    /// For each line, the place of its end in `stops`.
    lines: Vec<u32>,
    /// Every quote.
    quotes: Vec<u32>,
}

impl Index {
    fn fill(&mut self, block: &[u8]) {
        self.lines.clear();
        self.quotes.clear();
        let mut count = 0;
        let (words, rest) = block.as_chunks::<64>();
        // A space is none of the three.
        let mut tail = [b' '; 64];
        tail[..rest.len()].copy_from_slice(rest);
        for (number, word) in words.iter().chain((!rest.is_empty()).then_some(&tail)).enumerate() {
            let base = (number * 64) as u32;
            let masks = Masks::of(word);
            if self.stops.len() < count + 64 {
                self.stops.resize(count + 4096, 0);
            }
            let Some(places) = self.stops[count..].first_chunk_mut::<64>() else { return };
            let mut stops = masks.commas | masks.lines;
            let before = stops;
            let found = stops.count_ones() as usize;
            // Eight at a time and some for nothing: cheaper than to ask after each whether it was the last.
            for eight in places.as_chunks_mut::<8>().0 {
                for place in eight {
                    *place = base + stops.trailing_zeros();
                    stops &= stops.wrapping_sub(1);
                }
                if stops == 0 {
                    break;
                }
            }
            let mut lines = masks.lines;
            while lines != 0 {
                let rank = (before & ((lines & lines.wrapping_neg()) - 1)).count_ones();
                self.lines.push(count as u32 + rank);
                lines &= lines - 1;
            }
            let mut quotes = masks.quotes;
            while quotes != 0 {
                self.quotes.push(base + quotes.trailing_zeros());
                quotes &= quotes - 1;
            }
            count += found;
        }
        self.stops.truncate(count);
    }
}

impl Scanner {
    /// Rows must have `width` fields, of which those `wanted` are parsed.
    pub(crate) fn new(wanted: Wanted, width: usize, lenient: bool, texts: Texts) -> Self {
        Scanner {
            wanted,
            width,
            lenient,
            texts,
            known: FxHashMap::default(),
            last: std::array::from_fn(|_| (Vec::new(), Symbol::NONE)),
            index: Index::default(),
        }
    }

    /// Parses `block`, whole lines but for the last, whose line end may be missing. A block is smaller
    /// than 4 GiB.
    pub(crate) fn scan(&mut self, block: &[u8], chunk: &mut Chunk) {
        let mut index = std::mem::take(&mut self.index);
        index.fill(block);
        // A last line without an end ends with the block.
        if block.last().is_some_and(|byte| *byte != b'\n') {
            index.lines.push(index.stops.len() as u32);
            index.stops.push(block.len() as u32);
        }
        let mut quotes = index.quotes.as_slice();
        let (mut start, mut first) = (0, 0);
        for end in &index.lines {
            let stops = &index.stops[first..=*end as usize];
            first = *end as usize + 1;
            let line_end = stops.last().map_or(start, |end| *end as usize);
            let quoted = quotes.first().is_some_and(|quote| (*quote as usize) < line_end);
            if quoted {
                let inside = quotes.partition_point(|quote| (*quote as usize) < line_end);
                quotes = &quotes[inside..];
            }
            if !self.line(block, start, line_end, stops, quoted, chunk) {
                break;
            }
            start = line_end + 1;
        }
        self.index = index;
    }

    /// One line, `block[start..end]`; false when the scan must stop at it.
    fn line(
        &mut self,
        block: &[u8],
        start: usize,
        end: usize,
        stops: &[u32],
        quoted: bool,
        chunk: &mut Chunk,
    ) -> bool {
        let line = chunk.lines;
        chunk.lines += 1;
        if start == end {
            return true;
        }
        // In its place at once: a record is three cache lines.
        chunk.records.push(Record::default());
        let Some(record) = chunk.records.last_mut() else { return false };
        let parsed = if quoted {
            self.quoted(&block[start..end], record)
        } else {
            self.plain(block, start, stops, record)
        };
        match parsed {
            Ok(()) => {}
            Err(what) => {
                chunk.records.pop();
                chunk.skipped += 1;
                chunk.fault.get_or_insert(Fault { line, what });
                return self.lenient;
            }
        }
        true
    }

    /// A row without quotes, whose fields end at `stops`.
    fn plain(
        &mut self,
        block: &[u8],
        start: usize,
        stops: &[u32],
        record: &mut Record,
    ) -> Result<(), String> {
        if stops.len() != self.width {
            return Err(wrong_width(self.width, stops.len()));
        }
        self.fields(record, &Plain { block, start, stops })
    }

    /// A row with quotes.
    fn quoted(&mut self, line: &[u8], record: &mut Record) -> Result<(), String> {
        let mut reader =
            csv::ReaderBuilder::new().has_headers(false).buffer_capacity(line.len()).from_reader(line);
        let mut row = csv::ByteRecord::new();
        reader.read_byte_record(&mut row).map_err(|error| error.to_string())?;
        if row.len() != self.width {
            return Err(wrong_width(self.width, row.len()));
        }
        self.fields(record, &row)
    }

    fn fields(&mut self, record: &mut Record, row: &impl Fields) -> Result<(), String> {
        let field = |index| row.text(index);
        record.event = event(field(6)).ok_or_else(|| bad(6, "an event", field(6)))?;
        let columns = self.wanted.of(record.event);
        // The places are those of the schema; a test holds them to it.
        macro_rules! ints {
            ($most:expr; $($index:literal $name:ident,)*) => {
                $(if columns.has($index) {
                    record.$name = row.int($index)
                        .filter(|n| n.unsigned_abs() <= $most)
                        .and_then(|n| n.try_into().ok())
                        .ok_or_else(|| bad($index, "an integer", field($index)))?;
                })*
            };
        }
        macro_rules! texts {
            ($($index:literal $name:ident,)*) => {
                $(if columns.has($index) {
                    record.$name = self.text($index, field($index))?;
                })*
            };
        }
        ints! { MOST; 0 seq, 1 ts_ns, 2 rank, 3 pid, 4 tid, 5 device, 7 status, 10 alloc_id, 11 addr,
        23 step, 24 stream, 25 pool, 26 latency_ns, 27 stack_id, }
        ints! { MOST_BYTES; 12 requested_bytes, 13 rounded_bytes, 14 delta_bytes, 15 allocated_bytes,
        16 active_bytes, 17 reserved_bytes, 18 device_free_bytes, }
        texts! { 8 api, 9 source, 19 op, 20 module, 21 phase, 28 name, }
        if columns.has(22) {
            record.category = category(field(22)).ok_or_else(|| bad(22, "a category", field(22)))?;
        }
        Ok(())
    }

    fn text(&mut self, column: usize, bytes: &[u8]) -> Result<Symbol, String> {
        let (last, symbol) = &mut self.last[column];
        if last == bytes {
            return Ok(*symbol);
        }
        let found = match self.known.get(bytes) {
            Some(symbol) => *symbol,
            None => {
                let text = std::str::from_utf8(bytes).map_err(|_| bad(column, "UTF-8", bytes))?;
                if text.is_empty() {
                    return Err(bad(column, "a text", bytes));
                }
                let symbol = self.texts.intern(text);
                if symbol != Symbol::REST {
                    self.known.insert(bytes.into(), symbol);
                }
                symbol
            }
        };
        last.clear();
        last.extend_from_slice(bytes);
        *symbol = found;
        Ok(found)
    }
}

/// The fields of one row.
trait Fields {
    /// The bytes of the field at `index`.
    fn text(&self, index: usize) -> &[u8];

    /// The integer of the field at `index`.
    fn int(&self, index: usize) -> Option<i64> {
        int(self.text(index))
    }
}

/// A row without quotes, which begins at `start` and whose fields end at `stops`.
struct Plain<'a> {
    block: &'a [u8],
    start: usize,
    stops: &'a [u32],
}

impl Plain<'_> {
    /// Where the field at `index` begins and ends.
    fn span(&self, index: usize) -> (usize, usize) {
        let from = if index == 0 { self.start } else { self.stops[index - 1] as usize + 1 };
        (from, self.stops[index] as usize)
    }
}

impl Fields for Plain<'_> {
    fn text(&self, index: usize) -> &[u8] {
        let (from, mut to) = self.span(index);
        // A file that went through Windows has CR before LF.
        if index + 1 == self.stops.len() && to > from && self.block[to - 1] == b'\r' {
            to -= 1;
        }
        &self.block[from..to]
    }

    fn int(&self, index: usize) -> Option<i64> {
        let (from, to) = self.span(index);
        int_within(self.block, from, to)
    }
}

impl Fields for csv::ByteRecord {
    fn text(&self, index: usize) -> &[u8] {
        self.get(index).unwrap_or_default()
    }
}

fn wrong_width(expected: usize, found: usize) -> String {
    format!("expected {expected} columns, found {found}: the line is cut off or damaged")
}

#[cold]
fn bad(column: usize, expected: &str, found: &[u8]) -> String {
    let name = COLUMNS.get(column).map_or("?", |column| column.name);
    let shown = String::from_utf8_lossy(&found[..found.len().min(80)]);
    format!("column {name}: expected {expected}, found {shown:?}")
}

/// The event of its word; the frequent ones first.
fn event(bytes: &[u8]) -> Option<EventName> {
    match bytes {
        b"alloc" => Some(EventName::Alloc),
        b"free" => Some(EventName::Free),
        b"op" => Some(EventName::Op),
        b"io" => Some(EventName::Io),
        _ => std::str::from_utf8(bytes).ok().and_then(EventName::parse),
    }
}

/// The category of its word.
fn category(bytes: &[u8]) -> Option<Category> {
    match bytes {
        b"activation" => Some(Category::Activation),
        b"(none)" => Some(Category::None),
        b"temporary" => Some(Category::Temporary),
        _ => std::str::from_utf8(bytes).ok().and_then(Category::parse),
    }
}

/// The integer `block[from..to]`. It is read eight bytes at a time from its end, over what stands before
/// it, so that no step depends on how many digits there are.
fn int_within(block: &[u8], from: usize, to: usize) -> Option<i64> {
    let negative = block.get(from) == Some(&b'-');
    let digits = to - from - usize::from(negative);
    // A first field may have too little before it; more digits than sixteen are rare.
    let (1..=16, Some(sixteen)) = (digits, block[..to].last_chunk::<16>()) else {
        return int(&block[from..to]);
    };
    let (high, low) = sixteen.split_at(8);
    let (high, low) = (high.first_chunk::<8>()?, low.first_chunk::<8>()?);
    let value = if digits <= 8 {
        eight_digits(last_of(*low, digits))?
    } else {
        eight_digits(last_of(*high, digits - 8))? * 100_000_000 + eight_digits(u64::from_le_bytes(*low))?
    };
    Some(if negative { -value } else { value })
}

/// The last `count` of eight bytes, one at least, behind zeros.
fn last_of(bytes: [u8; 8], count: usize) -> u64 {
    let kept = u64::MAX << (64 - 8 * count);
    u64::from_le_bytes(bytes) & kept | ZEROS & !kept
}

/// A decimal integer that fits 64 bits.
fn int(bytes: &[u8]) -> Option<i64> {
    let (negative, digits) = match bytes {
        [b'-', digits @ ..] => (true, digits),
        digits => (false, digits),
    };
    // Eighteen digits cannot overflow.
    if digits.is_empty() || digits.len() > 18 {
        return std::str::from_utf8(bytes).ok()?.parse().ok();
    }
    let mut value = 0;
    let mut rest = digits;
    while let Some((eight, more)) = rest.split_first_chunk::<8>() {
        value = value * 100_000_000 + eight_digits(u64::from_le_bytes(*eight))?;
        rest = more;
    }
    for digit in rest {
        let digit = digit.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        value = value * 10 + i64::from(digit);
    }
    Some(if negative { -value } else { value })
}

const ZEROS: u64 = u64::from_ne_bytes([b'0'; 8]);

/// Eight digits at once, the first in the lowest byte: pairs, then fours, then all, each by one multiplication.
fn eight_digits(word: u64) -> Option<i64> {
    const HIGH: u64 = u64::from_ne_bytes([0xF0; 8]);
    const SIX: u64 = u64::from_ne_bytes([6; 8]);
    // A digit has 3 in its upper half, and still has when six is added.
    if word & HIGH != ZEROS || word.wrapping_add(SIX) & HIGH != ZEROS {
        return None;
    }
    let digits = word - ZEROS;
    let pairs = digits.wrapping_mul(10).wrapping_add(digits >> 8) & 0x00FF_00FF_00FF_00FF;
    let fours = pairs.wrapping_mul(100).wrapping_add(pairs >> 16) & 0x0000_FFFF_0000_FFFF;
    let all = fours.wrapping_mul(10_000).wrapping_add(fours >> 32) & 0xFFFF_FFFF;
    Some(all.cast_signed())
}

/// One bit for each byte of sixty-four.
struct Masks {
    commas: u64,
    lines: u64,
    quotes: u64,
}

impl Masks {
    fn of(bytes: &[u8; 64]) -> Masks {
        let mut masks = Masks { commas: 0, lines: 0, quotes: 0 };
        let (parts, _) = bytes.as_chunks::<16>();
        let (mut any_quote, mut quoted) = (i8x16::ZERO, [i8x16::ZERO; 4]);
        for (index, part) in parts.iter().enumerate() {
            let word = i8x16::new(part.map(u8::cast_signed));
            let equal = |byte: u8| word.cmp_eq(i8x16::splat(byte.cast_signed()));
            let mask = |found: i8x16| u64::from(found.move_mask().cast_unsigned()) << (index * 16);
            masks.commas |= mask(equal(b','));
            masks.lines |= mask(equal(b'\n'));
            let quotes = equal(b'"');
            any_quote |= quotes;
            quoted[index] = quotes;
        }
        // Quotes are rare: four words are asked at once.
        if any_quote.any() {
            for (index, found) in quoted.into_iter().enumerate() {
                masks.quotes |= u64::from(found.move_mask().cast_unsigned()) << (index * 16);
            }
        }
        masks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Columns;
    use memtrace_trace::schema::Row;
    use memtrace_trace::writer::RowWriter;

    fn scan(block: &[u8], columns: Columns, lenient: bool) -> (Chunk, Texts) {
        let texts = Texts::default();
        let mut chunk = Chunk::default();
        Scanner::new(Wanted::all_events(columns), COLUMNS.len(), lenient, texts.clone())
            .scan(block, &mut chunk);
        (chunk, texts)
    }

    /// The lines of `rows`, without the header.
    fn lines(rows: &[Row<'_>]) -> Vec<u8> {
        let mut writer = RowWriter::new(Vec::new());
        for row in rows {
            writer.write(row).unwrap();
        }
        writer.flush().unwrap();
        let all = writer.get_ref();
        let header = all.iter().position(|byte| *byte == b'\n').unwrap();
        all[header + 1..].to_vec()
    }

    /// A row in which every column has a value of its own.
    const FULL: Row<'_> = Row {
        seq: 1,
        ts_ns: 2,
        rank: 3,
        pid: 4,
        tid: 5,
        device: 6,
        event: EventName::Alloc,
        status: 8,
        api: "caching_allocator",
        source: "libc10_cuda.so",
        alloc_id: 11,
        addr: 12,
        requested_bytes: 13,
        rounded_bytes: 14,
        delta_bytes: -15,
        allocated_bytes: 16,
        active_bytes: 17,
        reserved_bytes: 18,
        device_free_bytes: 19,
        op: "aten::mm",
        module: "GPT.h.0",
        phase: "forward",
        category: Category::Activation,
        step: 24,
        stream: 25,
        pool: 26,
        latency_ns: 27,
        stack_id: 28,
        name: "a, \"b\" and c",
    };

    #[test]
    fn a_record_has_every_value_of_its_row() {
        let (chunk, texts) = scan(&lines(&[FULL, Row { name: "plain", ..FULL }]), Columns::ALL, false);
        assert_eq!(chunk.fault, None);
        for (record, name) in chunk.records.iter().zip(["a, \"b\" and c", "plain"]) {
            let text = |symbol| texts.get(symbol);
            let (api, source) = (text(record.api), text(record.source));
            let (op, module, phase, found) =
                (text(record.op), text(record.module), text(record.phase), text(record.name));
            let back = Row {
                seq: record.seq,
                ts_ns: record.ts_ns,
                rank: record.rank,
                pid: record.pid,
                tid: record.tid,
                device: record.device,
                event: record.event,
                status: record.status,
                api: &api,
                source: &source,
                alloc_id: record.alloc_id,
                addr: record.addr,
                requested_bytes: record.requested_bytes,
                rounded_bytes: record.rounded_bytes,
                delta_bytes: record.delta_bytes,
                allocated_bytes: record.allocated_bytes,
                active_bytes: record.active_bytes,
                reserved_bytes: record.reserved_bytes,
                device_free_bytes: record.device_free_bytes,
                op: &op,
                module: &module,
                phase: &phase,
                category: record.category,
                step: record.step,
                stream: record.stream,
                pool: record.pool,
                latency_ns: record.latency_ns,
                stack_id: record.stack_id,
                name: &found,
            };
            assert_eq!(back, Row { name, ..FULL });
        }
        assert_eq!(chunk.records.len(), 2);
    }

    #[test]
    fn only_the_columns_asked_for_are_parsed() {
        let text = String::from_utf8(lines(&[FULL])).unwrap().replace("-15", "many");
        let (chunk, _) = scan(text.as_bytes(), Columns::of(&["seq", "op"]), false);
        assert_eq!((chunk.records[0].seq, chunk.records[0].delta_bytes), (1, 0));
        let (chunk, _) = scan(text.as_bytes(), Columns::of(&["delta_bytes"]), false);
        let fault = chunk.fault.unwrap();
        assert_eq!(fault.what, "column delta_bytes: expected an integer, found \"many\"");
    }

    #[test]
    fn a_fault_stops_a_strict_scan_and_is_counted_by_a_lenient_one() {
        let mut block = lines(&[FULL; 3]);
        block.extend(b"1,2,3\n\n");
        block.extend(lines(&[FULL]));
        block.extend(b"1,2");
        let (strict, _) = scan(&block, Columns::ALL, false);
        assert_eq!((strict.records.len(), strict.skipped), (3, 1));
        assert_eq!(strict.fault.unwrap().line, 3);
        let (lenient, _) = scan(&block, Columns::ALL, true);
        assert_eq!((lenient.records.len(), lenient.skipped, lenient.lines), (4, 2, 7));
    }

    #[test]
    fn integers_are_read_to_the_last_that_fits() {
        assert_eq!(int(b"0"), Some(0));
        assert_eq!(int(b"-1"), Some(-1));
        assert_eq!(int(i64::MIN.to_string().as_bytes()), Some(i64::MIN));
        assert_eq!(int(i64::MAX.to_string().as_bytes()), Some(i64::MAX));
        for bad in [&b""[..], b"-", b"+1", b"1.0", b" 1", b"9223372036854775808", b"1e3", b"--1"] {
            assert_eq!(int(bad), None, "{bad:?}");
            for before in ["", ",", "1234567890123456,"] {
                let block = [before.as_bytes(), bad, b",77777777"].concat();
                assert_eq!(int_within(&block, before.len(), before.len() + bad.len()), None, "{bad:?}");
            }
        }
    }

    #[test]
    fn integers_are_read_whatever_stands_around_them() {
        let mut number = 0_i64;
        for digit in (1..=9).chain([0, 9, 9, 9, 1, 2, 3, 4, 5]) {
            number = number * 10 + digit;
            for number in [number, -number] {
                for before in ["", "9", "9,", "99999999,", "9999999999999999999,", "-------------------,"] {
                    let block = format!("{before}{number},99999999");
                    let to = before.len() + number.to_string().len();
                    assert_eq!(int_within(block.as_bytes(), before.len(), to), Some(number), "{block}");
                }
            }
        }
    }

    #[test]
    fn carriage_returns_and_a_missing_last_line_end_are_read_over() {
        let text = String::from_utf8(lines(&[Row { name: "n", ..FULL }; 2])).unwrap();
        let windows = text.replace('\n', "\r\n");
        let (chunk, texts) = scan(windows.trim_end().as_bytes(), Columns::ALL, false);
        assert_eq!(chunk.fault, None);
        assert_eq!(chunk.records.len(), 2);
        assert_eq!(&*texts.get(chunk.records[0].name), "n");
    }
}
