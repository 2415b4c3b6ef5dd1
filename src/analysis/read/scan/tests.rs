//! Tests that a scan returns the values of the rows, with each implementation that this processor can run.
//! Random and damaged rows must give the result of the `csv` crate.

use super::*;
use memtrace_trace::Row;
use memtrace_trace::columns::{TextKeys, index_of};
use memtrace_trace::csv::RowWriter;

fn scan(block: &[u8], columns: Columns, lenient: bool) -> (Chunk, SymbolTable) {
    let symbols = SymbolTable::default();
    let mut chunk = Chunk::default();
    Scanner::new(Wanted::all_events(columns), COLUMNS.len(), lenient, symbols.clone())
        .scan(block, &mut chunk);
    (chunk, symbols)
}

/// Returns the lines of `rows`, without the header.
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

/// Returns the value of a column in the row `DISTINCT`, in which each text and number occurs in only one
/// column.
macro_rules! distinct {
    ($name:ident text) => {
        stringify!($name)
    };
    ($name:ident EventName) => {
        EventName::Alloc
    };
    ($name:ident Category) => {
        Category::Activation
    };
    ($name:ident bytes) => {
        index_of(stringify!($name)) as i64 + 1
    };
    ($name:ident request) => {
        index_of(stringify!($name)) as i64 + 1
    };
    ($name:ident $int:ident) => {
        index_of(stringify!($name)) as $int + 1
    };
}

/// Returns a random value for a column.
macro_rules! any {
    ($random:ident text) => {
        $random.text()
    };
    ($random:ident EventName) => {
        $random.pick(EventName::ALL)
    };
    ($random:ident Category) => {
        $random.pick(Category::ALL)
    };
    ($random:ident i32) => {
        $random.number() as i32 >> $random.pick(&[0, 16])
    };
    ($random:ident bytes) => {
        $random.number() >> $random.pick(&[0, 8, 8, 8, 8, 8])
    };
    ($random:ident request) => {
        $random.number()
    };
    ($random:ident i64) => {
        $random.number()
    };
}

/// Returns the value of a record's column in the type that the column has in a row.
macro_rules! value_of {
    ($record:ident $symbols:ident $name:ident text) => {
        $symbols.get($record.$name).to_string()
    };
    ($record:ident $symbols:ident $name:ident $type:ident) => {
        $record.$name
    };
}

macro_rules! rows {
    ($($block:ident($($cache:ident)?) { $(
        $(#[$doc:meta])+
        $name:ident: $type:ident = $default:expr, $shape:ident, $reading:ident, $writing:ident $(($of:ident))?;
    )+ })+) => {
        const DISTINCT: Row<'_> = Row {
            keys: TextKeys { call: 0, owner: 0, form: 0 },
            $($($name: distinct!($name $type),)+)+
        };

        /// Returns a row with random values.
        fn any_row(random: &mut Random) -> Row<'static> {
            let row = Row { keys: TextKeys::default(), $($($name: any!(random $type),)+)+ };
            Row { device: row.device % (MAX_DEVICE as i32 + 1), ..row }
        }

        /// Asserts that a record has the values of a row.
        fn assert_same(record: &Record, symbols: &SymbolTable, row: &Row<'_>) {
            $($(assert_eq!(value_of!(record symbols $name $type), row.$name, stringify!($name));)+)+
        }
    };
}

memtrace_trace::columns!(rows);

/// A row with a different value in every column, including quotes and a negative number.
const FULL: Row<'_> = Row { name: "a, \"b\" and c", delta_bytes: -15, ..DISTINCT };

#[test]
fn a_column_that_a_file_lacks_has_its_default() {
    let rows = [Row { name: "plain", ..FULL }, FULL];
    let whole = lines(&rows);
    let (chunk, _) = scan(&whole, Columns::ALL, false);
    for missing in 1..7 {
        for line_end in ["\n", "\r\n"] {
            let width = COLUMNS.len() - missing;
            let mut narrow = Vec::new();
            for row in csv::ReaderBuilder::new().has_headers(false).from_reader(&whole[..]).records() {
                let row = row.unwrap();
                let mut writer = csv::Writer::from_writer(Vec::new());
                writer.write_record(row.iter().take(width)).unwrap();
                let line = String::from_utf8(writer.into_inner().unwrap()).unwrap();
                narrow.extend_from_slice((line.trim_end().to_owned() + line_end).as_bytes());
            }
            let mut read = Chunk::default();
            let wanted = Wanted::all_events(Columns::ALL);
            Scanner::new(wanted, width, false, SymbolTable::default()).scan(&narrow, &mut read);
            assert_eq!((read.faults.len(), read.records.len()), (0, 2));
            for (read, whole) in read.records.iter().zip(&chunk.records) {
                let default = Record::default();
                assert_eq!(read.shape, default.shape);
                assert_eq!(read.name == default.name, missing > 2);
                assert_eq!(read.stack_id, if missing > 3 { default.stack_id } else { whole.stack_id });
                assert_eq!(read.pool, if missing > 5 { default.pool } else { whole.pool });
                assert_eq!((read.seq, read.delta_bytes), (whole.seq, whole.delta_bytes));
            }
        }
    }
}

#[test]
fn a_record_has_every_value_of_its_row() {
    let rows = [FULL, Row { name: "plain", ..FULL }];
    let (chunk, symbols) = scan(&lines(&rows), Columns::ALL, false);
    assert_eq!(chunk.faults, []);
    assert_eq!(chunk.records.len(), 2);
    for (record, row) in chunk.records.iter().zip(rows) {
        assert_same(record, &symbols, &row);
    }
}

#[test]
fn a_scan_parses_only_the_wanted_columns() {
    let text = String::from_utf8(lines(&[FULL])).unwrap().replace("-15", "many");
    let (chunk, _) = scan(text.as_bytes(), Columns::of(&["seq", "op"]), false);
    assert_eq!((chunk.records[0].seq, chunk.records[0].delta_bytes), (1, 0));
    let (chunk, _) = scan(text.as_bytes(), Columns::of(&["delta_bytes"]), false);
    let fault = &chunk.faults[0];
    assert_eq!(fault.what, "column delta_bytes: expected an integer, found \"many\"");
}

#[test]
fn a_fault_stops_a_strict_scan_and_is_counted_by_a_lenient_scan() {
    let mut block = lines(&[FULL; 3]);
    block.extend(b"1,2,3\n\n");
    block.extend(lines(&[FULL]));
    block.extend(b"1,2");
    let (strict, _) = scan(&block, Columns::ALL, false);
    assert_eq!((strict.records.len(), strict.skipped), (3, 1));
    assert_eq!(strict.faults[0].line, 3);
    let (lenient, _) = scan(&block, Columns::ALL, true);
    assert_eq!((lenient.records.len(), lenient.skipped, lenient.lines), (4, 2, 7));
    assert_eq!(lenient.faults.iter().map(|fault| fault.line).collect::<Vec<_>>(), [3, 6]);
}

#[test]
fn a_scan_accepts_carriage_returns_and_a_missing_last_line_end() {
    let text = String::from_utf8(lines(&[Row { name: "n", ..FULL }; 2])).unwrap();
    let windows = text.replace('\n', "\r\n");
    let (chunk, symbols) = scan(windows.trim_end().as_bytes(), Columns::ALL, false);
    assert_eq!(chunk.faults, []);
    assert_eq!(chunk.records.len(), 2);
    assert_eq!(&*symbols.get(chunk.records[0].name), "n");
}

/// Every implementation that this processor can run. Without AVX2, the portable one is repeated.
const IMPLEMENTATIONS: &[fn(ScanWork<'_>)] = &[
    |block| block.on(cpu::Plain),
    #[cfg(target_arch = "x86_64")]
    |block| match cpu::x86::Avx2::here() {
        Some(cpu) => cpu.run(block),
        None => block.on(cpu::Plain),
    },
    |block| cpu::run(block),
];

/// Returns the expected chunk of a block: its lines, parsed by the csv crate and Rust's own number parser.
fn judge(scanner: &mut Scanner, block: &[u8]) -> Chunk {
    let mut chunk = Chunk::default();
    let lines = block.strip_suffix(b"\n").unwrap_or(block);
    for line in lines.split(|byte| *byte == b'\n').filter(|_| !block.is_empty()) {
        let number = chunk.lines;
        chunk.lines += 1;
        if line.is_empty() {
            continue;
        }
        let mut record = Record::default();
        match scanner.quoted(line, &mut record) {
            Ok(()) => chunk.records.push(record),
            Err(what) => {
                chunk.skipped += 1;
                if chunk.faults.len() < MOST_FAULTS {
                    chunk.faults.push(Fault { line: number, what });
                }
                if !scanner.lenient {
                    break;
                }
            }
        }
    }
    chunk
}

/// A pseudorandom generator that yields the same numbers in every run.
struct Random(u64);

impl Random {
    fn next(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % below
    }

    fn pick<T: Copy>(&mut self, some: &[T]) -> T {
        some[self.next(some.len())]
    }

    /// Returns a number of any length that is mostly valid in a trace.
    fn number(&mut self) -> i64 {
        let number = (self.0 >> (1 + self.next(63))).cast_signed();
        match self.next(20) {
            0 => -number,
            1 => self.pick(&[i64::MIN, i64::MAX, 1 << 62, (1 << 62) + 1, 1 << 56, (1 << 56) + 1, 1 << 31]),
            _ => number >> 8,
        }
    }

    fn text(&mut self) -> &'static str {
        self.pick(&["(none)", "aten::mm", "GPT.h.0.mlp", "forward", "a, \"b\"", "é", "x", "alloc", "-", "1"])
    }
}

/// Returns rows with random values, some of them damaged.
fn hostile(random: &mut Random) -> Vec<u8> {
    let mut block = Vec::new();
    for _ in 0..random.next(40) {
        let row = any_row(random);
        let from = block.len();
        block.extend(lines(&[row]));
        for _ in 0..[0, 0, 0, 1, 3][random.next(5)] {
            let at = from + random.next(block.len() - from);
            block[at] = random.pick(b",,\n\"-+ 09:/a\xff");
        }
    }
    match random.next(10) {
        0 => block.extend([b','; 200]),
        1 => block.extend([b'\n'; 200]),
        2 => block.truncate(random.next(block.len() + 1)),
        _ => {}
    }
    block
}

#[test]
fn every_processor_reads_what_the_csv_crate_reads() {
    let mut random = Random(0x2545_F491_4F6C_DD1D);
    let (mut rows, mut faults) = (0, 0);
    for round in 0..1000 {
        let block = hostile(&mut random);
        let wanted = match random.next(4) {
            0 => Wanted::all_events(Columns::ALL),
            1 => Wanted::all_events(Columns::of(&[])),
            _ => crate::state::replay::COLUMNS,
        };
        let lenient = random.next(4) > 0;
        let scanner = || Scanner::new(wanted, COLUMNS.len(), lenient, SymbolTable::default());
        let expected = judge(&mut scanner(), &block);
        for (way, scan) in IMPLEMENTATIONS.iter().enumerate() {
            let (mut scanner, mut chunk) = (scanner(), Chunk::default());
            scan(ScanWork { scanner: &mut scanner, block: &block, chunk: &mut chunk });
            let counts = |chunk: &Chunk| (chunk.lines, chunk.skipped, chunk.faults.clone());
            assert_eq!(counts(&chunk), counts(&expected), "round {round}, way {way}");
            assert!(chunk.records == expected.records, "round {round}, way {way}");
        }
        rows += expected.records.len();
        faults += usize::from(!expected.faults.is_empty());
    }
    // The random input must have many valid rows and many faults, or the comparison proves little.
    assert!(rows > 5000 && faults > 250, "{rows} rows, {faults} faults");
}

#[test]
fn strips_and_lines_of_a_scan_may_end_anywhere() {
    let row = lines(&[FULL]);
    for before in [0, 1, STRIP - 300, STRIP - 64, STRIP - 1, STRIP, 3 * STRIP + 17] {
        // The first line has `before` bytes, up to several strips, and is not a row. It is followed by 200
        // rows. All of these rows must be read.
        let mut block = vec![b'x'; before];
        block.push(b'\n');
        for _ in 0..200 {
            block.extend(&row);
        }
        for scan in IMPLEMENTATIONS {
            let (symbols, mut chunk) = (SymbolTable::default(), Chunk::default());
            let wanted = Wanted::all_events(Columns::ALL);
            let mut scanner = Scanner::new(wanted, COLUMNS.len(), true, symbols);
            scan(ScanWork { scanner: &mut scanner, block: &block, chunk: &mut chunk });
            assert_eq!((chunk.records.len(), chunk.skipped), (200, u64::from(before > 0)));
            assert!(chunk.records.iter().all(|record| *record == chunk.records[0]));
        }
    }
}

#[test]
fn every_byte_of_a_scanned_block_may_be_a_line_end() {
    for ends in [1, 63, 64, 65, STRIP, STRIP + 1, 2 * STRIP + 65] {
        let block = [vec![b'\n'; ends], lines(&[FULL, FULL])].concat();
        for scan in IMPLEMENTATIONS {
            let (symbols, mut chunk) = (SymbolTable::default(), Chunk::default());
            let mut scanner = Scanner::new(Wanted::all_events(Columns::ALL), COLUMNS.len(), false, symbols);
            scan(ScanWork { scanner: &mut scanner, block: &block, chunk: &mut chunk });
            assert_eq!((chunk.records.len(), chunk.lines), (2, ends as u64 + 2), "{:?}", chunk.faults);
            assert_eq!(chunk.records[0], chunk.records[1]);
        }
    }
}

#[test]
fn a_scan_keeps_a_quote_before_the_end_of_a_strip() {
    let row = String::from_utf8(lines(&[Row { name: "plain", ..FULL }])).unwrap();
    let quoted = row.replacen("1,", "\"1\",", 1);
    for gap in 1..8 {
        let block = format!("{}\n{quoted}{row}", "x".repeat(STRIP - 1 - gap));
        let (chunk, _) = scan(block.as_bytes(), Columns::ALL, true);
        assert_eq!((chunk.records.len(), chunk.skipped), (2, 1), "{gap}: {:?}", chunk.faults);
        assert_eq!(chunk.records[0], chunk.records[1]);
    }
}
