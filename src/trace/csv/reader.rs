//! Reads rows from CSV one at a time. Errors name the line and the column.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::Bounded;
use crate::EventName;
use crate::columns::{COLUMNS, FIRST_COLUMNS, Row, SCHEMA_VERSION};
use crate::error::{Error, Result};
use crate::meta::Meta;

/// Reads a trace row by row in bounded memory.
///
/// ```
/// use memtrace_trace::csv::{RowReader, RowWriter};
/// use memtrace_trace::{EventName, Meta, Row, SCHEMA_VERSION};
///
/// let meta = Meta { schema: SCHEMA_VERSION.to_owned(), ..Meta::default() }.to_json()?;
/// let mut writer = RowWriter::new(Vec::new());
/// writer.write(&Row { event: EventName::Meta, api: "memtrace", name: &meta, ..Row::default() })?;
/// writer.write(&Row { seq: 1, event: EventName::Alloc, delta_bytes: 512, op: "aten::mm", ..Row::default() })?;
/// let file = writer.into_inner()?;
///
/// let mut reader = RowReader::new("example.csv".as_ref(), &file[..])?;
/// let mut live = 0;
/// while let Some(row) = reader.next_row()? {
///     live += row.delta_bytes;
/// }
/// assert_eq!(live, 512);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct RowReader<R> {
    path: PathBuf,
    csv: csv::Reader<Bounded<R>>,
    record: csv::StringRecord,
    /// The default fields for the columns that an older file lacks.
    missing: Vec<String>,
    meta: Meta,
    first: bool,
}

impl RowReader<File> {
    /// Opens the trace at `path` and reads its header and meta row.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, or is not a trace of a known schema.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|source| Error::Io { path: path.to_owned(), source })?;
        RowReader::new(path, file)
    }
}

impl<R: Read> RowReader<R> {
    /// Reads a trace from `source`. Messages name `path`.
    ///
    /// # Errors
    /// Same as [`RowReader::open`].
    pub fn new(path: &Path, source: R) -> Result<Self> {
        let csv = csv::ReaderBuilder::new()
            .buffer_capacity(1 << 20)
            .flexible(false)
            .from_reader(Bounded::new(source));
        let mut reader = RowReader {
            path: path.to_owned(),
            csv,
            record: csv::StringRecord::new(),
            missing: Vec::new(),
            meta: Meta::default(),
            first: false,
        };
        reader.check_header()?;
        reader.read_meta()?;
        Ok(reader)
    }

    /// Returns the contents of the meta row.
    #[must_use]
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    /// Returns the next row, starting with the meta row, or `None` at the end.
    ///
    /// # Errors
    /// Returns an error if a row is malformed. The error names the file, the line and the expected value.
    pub fn next_row(&mut self) -> Result<Option<Row<'_>>> {
        if !std::mem::take(&mut self.first) && !self.advance()? {
            return Ok(None);
        }
        self.row().map(Some)
    }

    /// Returns the line number of the last row. The header is line 1.
    #[must_use]
    pub fn line(&self) -> u64 {
        self.record.position().map_or(0, csv::Position::line)
    }

    fn advance(&mut self) -> Result<bool> {
        self.csv.get_mut().next_row();
        match self.csv.read_record(&mut self.record) {
            Ok(more) => {
                self.missing.iter().for_each(|field| self.record.push_field(field));
                Ok(more)
            }
            Err(error) => Err(self.csv_error(error)),
        }
    }

    fn row(&self) -> Result<Row<'_>> {
        self.record.deserialize(None).map_err(|error| {
            let what = match error.kind() {
                csv::ErrorKind::Deserialize { err, .. } => match err.field() {
                    Some(index) => format!(
                        "column {}: {} (found {:?})",
                        COLUMNS.get(index as usize).map_or("?", |column| column.name),
                        err.kind(),
                        self.record.get(index as usize).unwrap_or("")
                    ),
                    None => err.to_string(),
                },
                _ => error.to_string(),
            };
            Error::Row { path: self.path.clone(), line: self.line(), what }
        })
    }

    fn check_header(&mut self) -> Result<()> {
        let header = match self.csv.headers() {
            Ok(header) => header.clone(),
            Err(error) => return Err(self.csv_error(error)),
        };
        for (index, column) in COLUMNS.iter().enumerate() {
            let is_older = index >= FIRST_COLUMNS && index >= header.len();
            if header.get(index) != Some(column.name) && !is_older {
                let found = match header.get(index) {
                    _ if header.is_empty() => "the file is empty".to_owned(),
                    Some(name) => format!("column {} is {name:?}, not {:?}", index + 1, column.name),
                    None => format!("column {} ({}) is missing", index + 1, column.name),
                };
                return Err(Error::Header { path: self.path.clone(), found });
            }
        }
        self.missing = defaults_from(header.len());
        Ok(())
    }

    fn read_meta(&mut self) -> Result<()> {
        if !self.advance()? {
            let found = "the file ends after its header".to_owned();
            return Err(Error::Header { path: self.path.clone(), found });
        }
        let row = self.row()?;
        let bad = |what: String| Error::Row { path: self.path.clone(), line: self.line(), what };
        if row.event != EventName::Meta {
            return Err(bad(format!("the first row is {:?}, not \"meta\"", row.event.as_str())));
        }
        let meta: Meta = serde_json::from_str(row.name).map_err(|error| bad(format!("meta row: {error}")))?;
        if meta.schema != SCHEMA_VERSION {
            return Err(Error::Schema { path: self.path.clone(), found: meta.schema });
        }
        self.meta = meta;
        self.first = true;
        Ok(())
    }

    fn csv_error(&self, error: csv::Error) -> Error {
        let path = self.path.clone();
        let line = error.position().map_or(0, csv::Position::line);
        match error.into_kind() {
            csv::ErrorKind::Io(source) => Error::Io { path, source },
            csv::ErrorKind::UnequalLengths { expected_len, len, .. } => Error::Row {
                path,
                line,
                what: format!("expected {expected_len} columns, found {len}: the line is cut off or damaged"),
            },
            csv::ErrorKind::Utf8 { err, .. } => Error::Row { path, line, what: format!("not UTF-8: {err}") },
            kind => Error::Io { path, source: io::Error::other(format!("{kind:?}")) },
        }
    }
}

/// Returns the default fields of the columns from `index` on.
fn defaults_from(index: usize) -> Vec<String> {
    if index >= COLUMNS.len() {
        return Vec::new();
    }
    let mut writer = super::RowWriter::without_header(Vec::new());
    // Writing to a vector cannot fail, and no default needs quotes.
    let _ = writer.write(&Row::default()).and_then(|()| writer.flush());
    let line = String::from_utf8_lossy(writer.get_ref()).trim_end().to_owned();
    line.split(',').skip(index).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::super::RowWriter;
    use super::*;

    fn trace(rows: &[Row<'_>]) -> Vec<u8> {
        let meta = Meta { schema: SCHEMA_VERSION.to_owned(), ..Meta::default() };
        let json = serde_json::to_string(&meta).unwrap();
        let mut writer = RowWriter::new(Vec::new());
        writer.write(&Row { seq: 1, event: EventName::Meta, name: &json, ..Row::default() }).unwrap();
        for row in rows {
            writer.write(row).unwrap();
        }
        writer.flush().unwrap();
        writer.get_ref().clone()
    }

    fn open(bytes: &[u8]) -> Result<RowReader<&[u8]>> {
        RowReader::new(Path::new("t.csv"), bytes)
    }

    #[test]
    fn rows_come_back_as_they_were_written() {
        let row = Row { seq: 2, name: "a,\"b\"", op: "aten::mm", addr: 1 << 46, ..Row::default() };
        let bytes = trace(&[row]);
        let mut reader = open(&bytes).unwrap();
        assert_eq!(reader.next_row().unwrap().unwrap().event, EventName::Meta);
        assert_eq!(reader.next_row().unwrap(), Some(row));
        assert_eq!(reader.next_row().unwrap(), None);
    }

    #[test]
    fn the_columns_that_a_file_lacks_have_their_defaults() {
        assert_eq!(defaults_from(COLUMNS.len()), [""; 0]);
        let last = defaults_from(crate::columns::index_of("stack_id"));
        assert_eq!(last, ["0", crate::text::NONE, crate::text::UNKNOWN, crate::text::UNKNOWN]);
        assert_eq!(defaults_from(crate::columns::index_of("device"))[0], "-1");
        // A file that ends before `name`, the last of the first columns -> an error that names the column.
        let text = String::from_utf8(trace(&[])).unwrap();
        let cut: String =
            text.lines().map(|line| line.rsplitn(4, ',').last().unwrap().to_owned() + "\n").collect();
        let error = open(cut.as_bytes()).err().unwrap().to_string();
        assert!(error.contains("column 29 (name) is missing"), "{error}");
    }

    #[test]
    fn the_error_of_a_damaged_row_names_line_and_column() {
        let bytes = trace(&[Row { seq: 2, ..Row::default() }]);
        let text = String::from_utf8(bytes).unwrap();
        let damaged = text.replace("\n2,", "\ntwo,");
        let mut reader = open(damaged.as_bytes()).unwrap();
        reader.next_row().unwrap();
        let error = reader.next_row().unwrap_err().to_string();
        assert!(error.contains("t.csv:3: column seq"), "{error}");
        let cut = &text.as_bytes()[..text.len() - 8];
        let mut reader = open(cut).unwrap();
        reader.next_row().unwrap();
        let error = reader.next_row().unwrap_err().to_string();
        assert!(error.contains("cut off"), "{error}");
    }

    #[test]
    fn a_file_that_is_no_trace_gives_an_error_that_says_so() {
        for text in ["", "a,b,c\n1,2,3\n"] {
            let error = open(text.as_bytes()).err().unwrap().to_string();
            assert!(error.contains("not a memtrace trace"), "{error}");
        }
    }
}
