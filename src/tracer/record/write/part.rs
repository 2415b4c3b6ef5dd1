//! The file to which rows are written: the trace, or the current part of a rotated trace.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use memtrace_encode::stacks::write_stacks;
use memtrace_encode::{Encoder, RowSink};
use memtrace_trace::Row;
use memtrace_trace::config::Settings;
use memtrace_trace::csv::RowWriter;
use memtrace_trace::files;
use memtrace_trace::stacks::StackWriter;

use super::output;

/// The writer of a part's rows.
pub(crate) struct RowFile {
    writer: RowWriter<File>,
}

impl RowSink for RowFile {
    type Error = io::Error;
    fn row(&mut self, row: &Row<'_>) -> io::Result<()> {
        self.writer.write(row)
    }

    #[inline(always)]
    fn keyed_row<'a>(&mut self, row: Row<'a>, with_texts: impl Fn(Row<'a>) -> Row<'a>) -> io::Result<()> {
        self.writer.write_keyed(row, with_texts)
    }
}

impl RowFile {
    /// Creates the rows of a new file.
    pub(crate) fn new(file: File) -> RowFile {
        RowFile { writer: RowWriter::new(file) }
    }

    /// Writes the buffered rows and returns the length of the file in bytes.
    pub(crate) fn flush(&mut self) -> io::Result<u64> {
        self.writer.flush()?;
        self.file().stream_position()
    }

    pub(crate) fn file(&self) -> &File {
        self.writer.get_ref()
    }
}

/// The part that is written now.
pub(crate) struct Part {
    pub(crate) rows: RowFile,
    pub(crate) path: PathBuf,
    /// The file of stacks, created with the first stack.
    stacks: Option<StackWriter<File>>,
    opened: Instant,
    /// The length of the file and the number of rows when the part was opened.
    opening_len: u64,
    opening_rows: i64,
}

impl Part {
    /// Creates a part whose file has `opening_len` bytes. `opening_rows` is the number of rows of the trace
    /// so far.
    pub(crate) fn new(rows: RowFile, path: PathBuf, opening_len: u64, opening_rows: i64) -> Part {
        Part { rows, path, stacks: None, opened: Instant::now(), opening_len, opening_rows }
    }

    /// Returns true if the settings ask for a new part. The opening rows do not count, because otherwise a
    /// program with much live memory would start a part with every row.
    pub(crate) fn is_full(&self, csv_len: u64, rows: i64, settings: &Settings) -> bool {
        let (bytes, secs) = (self.own_bytes(settings), settings.rotate_secs);
        let is_long = bytes > 0 && csv_len.saturating_sub(self.opening_len) >= bytes;
        let is_old = secs > 0 && self.opened.elapsed() >= Duration::from_secs(secs);
        (is_long || is_old) && rows > self.opening_rows
    }

    /// Returns the size, in bytes after the opening rows, at which the part ends, or 0 if the part has no
    /// size limit.
    fn own_bytes(&self, settings: &Settings) -> u64 {
        settings.keep.part_bytes(settings.rotate_bytes, self.opening_len)
    }

    /// Returns the file size in bytes at which the part ends. For a part without a size limit, returns the
    /// size at its opening.
    pub(crate) fn most_bytes(&self, settings: &Settings) -> u64 {
        self.opening_len.saturating_add(self.own_bytes(settings))
    }

    /// Writes all buffered rows, after the stacks that they refer to. Returns the length of the file in
    /// bytes.
    pub(crate) fn flush(&mut self, encoder: &mut Encoder) -> io::Result<u64> {
        if encoder.definitions().has_new_stacks() {
            let writer = match &mut self.stacks {
                Some(writer) => writer,
                None => {
                    let file = output::create_private(&files::stacks(&self.path))?;
                    self.stacks.insert(StackWriter::new(file)?)
                }
            };
            write_stacks(writer, encoder)?;
        }
        self.rows.flush()
    }

    /// Cuts the file to `length` bytes.
    pub(crate) fn truncate(&self, length: u64) -> io::Result<()> {
        let mut file = self.rows.file();
        file.set_len(length)?;
        file.seek(SeekFrom::Start(length)).map(|_| ())
    }
}
