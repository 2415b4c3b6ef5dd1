//! Parses bytes into records. Only the wanted columns are parsed.
//!
//! Each 64 bytes become one bit mask of commas and line ends, so an unwanted column costs only the bit of its
//! delimiter. Rows with quotes take a slow path through the `csv` crate.

use memtrace_trace::columns::{COLUMNS, MAX_BYTES, MAX_DEVICE, MAX_NUMBER, Reading, Shape, index_of};
use memtrace_trace::text::original_text;
use memtrace_trace::{Category, EventName};
use rustc_hash::FxHashMap;

use crate::read::record::{Columns, Record, Wanted};
use crate::read::symbols::{Symbol, SymbolTable};
use cpu::{Cpu, Work};
use delimiters::Delimiters;
use number::{digit_within, int, int_within, natural_within};
use owners::OwnerCache;

#[cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "safe Rust has no names for these instructions")
)]
mod cpu;
mod delimiters;
mod number;
mod owners;

/// The number of bytes that are searched for delimiters before their rows are parsed. These bytes and their
/// delimiters fit in a core's L1 cache.
const STRIP: usize = 16 << 10;

/// The columns that few reports want. One test skips all of them.
const RARE: Columns = Columns::of_reading(Reading::Rare);
const ONE_DIGIT: Columns = Columns::of_shape(Shape::Digit);
const NATURAL: Columns = Columns::of_shape(Shape::Natural).and(Columns::of_shape(Shape::Rising));
/// The columns of an owner, which are adjacent and are looked up together. [`owners`] stores their values.
const OWNER: Columns = {
    let owner = Columns::of_reading(Reading::Owner);
    assert!(owner.has_all(Columns::of(&owners::COLUMNS)) && Columns::of(&owners::COLUMNS).has_all(owner));
    owner
};

/// The maximum number of faults that are described. Further faults are only counted.
pub(crate) const MOST_FAULTS: usize = 8;

/// A line that is not a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// The line in the block, counted from 0.
    pub(crate) line: u64,
    /// A description of the expected and the found value.
    pub(crate) what: String,
}

/// The result of scanning one block of whole lines.
#[derive(Default)]
pub(crate) struct Chunk {
    /// The rows, in order.
    pub(crate) records: Vec<Record>,
    /// The number of lines, including empty ones.
    pub(crate) lines: u64,
    /// The first [`MOST_FAULTS`] lines that were not rows. Unless the scan is lenient, it stopped at the
    /// first such line.
    pub(crate) faults: Vec<Fault>,
    /// The number of lines that were not rows.
    pub(crate) skipped: u64,
}

/// Parses blocks. A scanner caches the symbols of the texts that it has seen, so it seldom locks the shared
/// table.
pub(crate) struct Scanner {
    wanted: Wanted,
    width: usize,
    lenient: bool,
    symbols: SymbolTable,
    known: FxHashMap<Box<[u8]>, Symbol>,
    /// For each column, the text of the previous row, because most rows repeat it.
    last: [(Vec<u8>, Symbol); COLUMNS.len()],
    owners: OwnerCache,
    delimiters: Delimiters,
}

impl Scanner {
    /// Returns a scanner for rows of `width` fields that parses the `wanted` columns. An older file lacks the
    /// last columns of the schema; their fields keep their defaults.
    pub(crate) fn new(wanted: Wanted, width: usize, lenient: bool, symbols: SymbolTable) -> Self {
        Scanner {
            wanted: wanted.within(width),
            width,
            lenient,
            symbols,
            known: FxHashMap::default(),
            last: std::array::from_fn(|_| (Vec::new(), Symbol::NONE)),
            owners: OwnerCache::default(),
            delimiters: Delimiters::default(),
        }
    }

    /// Parses `block`, which must be smaller than 4 GiB and contain whole lines. The last line end may be
    /// missing.
    pub(crate) fn scan(&mut self, block: &[u8], chunk: &mut Chunk) {
        cpu::run(ScanWork { scanner: self, block, chunk });
    }

    /// Parses one line. Returns false if the scan must stop at this line.
    #[inline(always)]
    fn line(&mut self, cpu: impl Cpu, block: &[u8], line: &ScanLine<'_>, chunk: &mut Chunk) -> bool {
        let number = chunk.lines;
        chunk.lines += 1;
        let (start, end) = (line.start, line.end());
        if start == end {
            return true;
        }
        // Parse in place, because copying a record would copy three cache lines.
        chunk.records.push(Record::default());
        let Some(record) = chunk.records.last_mut() else { return false };
        let parsed = if line.quotes && block[start..end].contains(&b'"') {
            self.quoted(&block[start..end], record)
        } else if let (true, Some(first)) = (line.ends.len() == self.width, line.ends.first_chunk()) {
            self.fields(record, &Plain { cpu, block, start, ends: first, width: self.width })
        } else if line.ends.len() == self.width && self.width < COLUMNS.len() {
            let ends = widened(block, start, line.ends);
            self.fields(record, &Plain { cpu, block, start, ends: &ends, width: self.width })
        } else {
            Err(wrong_width(self.width, line.ends.len()))
        };
        let Err(what) = parsed else { return true };
        chunk.records.pop();
        chunk.skipped += 1;
        if chunk.faults.len() < MOST_FAULTS {
            chunk.faults.push(Fault { line: number, what });
        }
        self.lenient
    }

    /// Parses a row with quotes.
    #[cold]
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

    #[inline(always)]
    fn fields(&mut self, record: &mut Record, row: &impl Fields) -> Result<(), String> {
        const EVENT: usize = index_of("event");
        const OWNER_SPAN: (usize, usize) = OWNER.span();
        let field = |index| row.text(index);
        record.event = event(field(EVENT)).ok_or_else(|| bad(EVENT, "an event", field(EVENT)))?;
        let columns = self.wanted.columns(record.event);
        // Parses the value of a column, according to the column's type.
        macro_rules! value {
            ($index:ident text) => {
                self.text($index, field($index))?
            };
            ($index:ident Category) => {
                category(field($index)).ok_or_else(|| bad($index, "a category", field($index)))?
            };
            ($index:ident bytes) => {
                integer($index, MAX_BYTES, row)?
            };
            // All other types, which are `request`, `i64` and `i32`.
            ($index:ident $int:ident) => {
                integer($index, const { most_of($index) }, row)?
            };
        }
        // Parses a column if it is wanted and declared with the reading `$now`. Other columns are skipped.
        macro_rules! parse {
            (common common $name:ident $type:ident) => { parse!($name $type) };
            (rare rare $name:ident $type:ident) => { parse!($name $type) };
            (owner owner $name:ident $type:ident) => { parse!($name $type) };
            ($now:ident $reading:ident $name:ident $type:ident) => {};
            ($name:ident $type:ident) => {{
                const INDEX: usize = index_of(stringify!($name));
                if columns.has(INDEX) {
                    record.$name = value!(INDEX $type);
                }
            }};
        }
        macro_rules! parse_all {
            ($($block:ident($($cache:ident)?) { $(
                $(#[$doc:meta])+
                $name:ident: $type:ident = $default:expr, $shape:ident, $reading:ident,
                    $writing:ident $(($of:ident))?;
            )+ })+) => {
                $($(parse!(common $reading $name $type);)+)+
                if columns.has_any(RARE) {
                    $($(parse!(rare $reading $name $type);)+)+
                }
                if columns.has_all(OWNER) && self.owners.find(row.texts(OWNER_SPAN), record) {
                    return Ok(());
                }
                $($(parse!(owner $reading $name $type);)+)+
            };
        }
        memtrace_trace::columns!(parse_all);
        if columns.has_all(OWNER) {
            self.owners.add(row.texts(OWNER_SPAN), record);
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
                let symbol = self.symbols.intern(original_text(text));
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

/// A block of lines and the destination of its records.
struct ScanWork<'a> {
    scanner: &'a mut Scanner,
    block: &'a [u8],
    chunk: &'a mut Chunk,
}

impl Work for ScanWork<'_> {
    #[inline(always)]
    fn on(self, cpu: impl Cpu) {
        let ScanWork { scanner, block, chunk } = self;
        let mut delimiters = std::mem::take(&mut scanner.delimiters);
        delimiters.clear();
        let (mut read, mut start) = (0, 0);
        'block: while read < block.len() {
            let to = block.len().min(read + STRIP);
            delimiters.next(cpu, block, read, to);
            read = to;
            if to == block.len() && block.last() != Some(&b'\n') {
                delimiters.end(to);
            }
            let mut done = 0;
            for last in delimiters.lines() {
                let next = *last as usize + 1;
                let line =
                    ScanLine { start, ends: &delimiters.places()[done..next], quotes: delimiters.quotes };
                start = line.end() + 1;
                if !scanner.line(cpu, block, &line, chunk) {
                    break 'block;
                }
                done = next;
            }
            if done > 0 {
                delimiters.forget(done, &block[start.min(to)..to]);
            }
        }
        scanner.delimiters = delimiters;
    }
}

/// Returns the largest absolute value that the column at `index` may have. Columns of the type `bytes` have
/// another limit.
const fn most_of(index: usize) -> u64 {
    if index == index_of("device") { MAX_DEVICE } else { MAX_NUMBER }
}

/// A line of a block.
struct ScanLine<'a> {
    start: usize,
    /// The ends of the line's fields.
    ends: &'a [u32],
    /// True if the line may have quotes.
    quotes: bool,
}

impl ScanLine<'_> {
    #[inline(always)]
    fn end(&self) -> usize {
        self.ends.last().map_or(self.start, |end| *end as usize)
    }
}

/// The fields of one row.
trait Fields {
    /// Returns the bytes of the field at `index`.
    fn text(&self, index: usize) -> &[u8];

    /// Returns the bytes of the fields from `first` to `last` with the commas between them, or `None` if they
    /// are not adjacent in memory.
    #[inline(always)]
    fn texts(&self, (first, last): (usize, usize)) -> Option<&[u8]> {
        let _ = (first, last);
        None
    }

    /// Returns the integer of the field at `index`, or `None` if it is not a number or its absolute value
    /// exceeds `most`.
    #[inline(always)]
    fn int(&self, index: usize, most: u64) -> Option<i64> {
        int(self.text(index), most)
    }
}

/// A row without quotes that begins at `start`. `ends` are the ends of its fields.
struct Plain<'a, C> {
    cpu: C,
    block: &'a [u8],
    start: usize,
    ends: &'a [u32; COLUMNS.len()],
    width: usize,
}

/// Returns the field ends of a line that lacks the last columns. Each missing field gets the end of the line.
#[cold]
fn widened(block: &[u8], start: usize, ends: &[u32]) -> [u32; COLUMNS.len()] {
    let mut end = ends.last().copied().unwrap_or_default();
    if end as usize > start && block[end as usize - 1] == b'\r' {
        end -= 1;
    }
    let mut all = [end; COLUMNS.len()];
    let known = ends.len().saturating_sub(1);
    all[..known].copy_from_slice(&ends[..known]);
    all
}

impl<C> Plain<'_, C> {
    /// Returns the start and the end of the field at `index`.
    #[inline(always)]
    fn span(&self, index: usize) -> (usize, usize) {
        let from = if index == 0 { self.start } else { self.ends[index - 1] as usize + 1 };
        let mut to = self.ends[index] as usize;
        // Tools on Windows write CR before LF. The first comparison is constant for each column.
        if index + 1 == COLUMNS.len() && index + 1 == self.width && to > from && self.block[to - 1] == b'\r' {
            to -= 1;
        }
        (from, to)
    }
}

impl<C: Cpu> Fields for Plain<'_, C> {
    #[inline(always)]
    fn text(&self, index: usize) -> &[u8] {
        let (from, to) = self.span(index);
        &self.block[from..to]
    }

    #[inline(always)]
    fn texts(&self, (first, last): (usize, usize)) -> Option<&[u8]> {
        Some(&self.block[self.span(first).0..self.span(last).1])
    }

    #[inline(always)]
    fn int(&self, index: usize, most: u64) -> Option<i64> {
        let (from, to) = self.span(index);
        if ONE_DIGIT.has(index) {
            return digit_within(self.block, from, to, most);
        }
        if NATURAL.has(index) {
            return natural_within(self.cpu, self.block, from, to, most);
        }
        int_within(self.cpu, self.block, from, to, most)
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

/// Returns the integer of the field at `index`, or an error unless its absolute value is at most `most`.
#[inline(always)]
fn integer<T: TryFrom<i64>>(index: usize, most: u64, row: &impl Fields) -> Result<T, String> {
    row.int(index, most).and_then(|number| number.try_into().ok()).ok_or_else(|| no_integer(index, row))
}

#[cold]
#[inline(never)]
fn no_integer(column: usize, row: &impl Fields) -> String {
    bad(column, "an integer", row.text(column))
}

#[cold]
fn bad(column: usize, expected: &str, found: &[u8]) -> String {
    let name = COLUMNS.get(column).map_or("?", |column| column.name);
    let shown = String::from_utf8_lossy(&found[..found.len().min(80)]);
    format!("column {name}: expected {expected}, found {shown:?}")
}

/// Parses the name of an event. Tries the most frequent names first.
fn event(bytes: &[u8]) -> Option<EventName> {
    match bytes {
        b"alloc" => Some(EventName::Alloc),
        b"free" => Some(EventName::Free),
        b"op" => Some(EventName::Op),
        b"io" => Some(EventName::Io),
        _ => std::str::from_utf8(bytes).ok().and_then(EventName::parse),
    }
}

/// Parses the name of a category. Tries the most frequent names first.
fn category(bytes: &[u8]) -> Option<Category> {
    match bytes {
        b"activation" => Some(Category::Activation),
        b"(none)" => Some(Category::None),
        b"temporary" => Some(Category::Temporary),
        _ => std::str::from_utf8(bytes).ok().and_then(Category::parse),
    }
}

#[cfg(test)]
mod tests;
