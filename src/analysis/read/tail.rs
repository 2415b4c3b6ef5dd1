//! Reads a file that is still being written.
//!
//! A read returns all complete lines and keeps the start of an incomplete line. It never waits.

use std::io::Read;

use memtrace_trace::csv::LONGEST_LINE;

use super::record::{Record, Wanted};
use super::scan::{Chunk, Scanner};
use super::source;
use super::stream::TraceFile;
use super::symbols::SymbolTable;

/// The maximum number of bytes of one read.
const BLOCK: usize = 1 << 20;

/// A part of a trace that may still grow.
pub(crate) struct PartTail {
    source: Box<dyn Read + Send>,
    scanner: Scanner,
    /// The start of a line whose end is not written yet.
    rest: Vec<u8>,
    /// True if the header has not been read yet.
    header: bool,
    /// The number of rows still to skip, which are the opening rows that repeat the part before, and their
    /// meta row.
    skip: u64,
}

/// The result of one read.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BlockRead {
    /// The number of rows.
    pub(crate) rows: u64,
    /// The number of lines that are not rows.
    pub(crate) skipped: u64,
}

impl PartTail {
    /// Opens `part` to read the `wanted` columns, starting after its header and the next `opening_rows` rows.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub(crate) fn open(
        part: &TraceFile,
        wanted: Wanted,
        symbols: &SymbolTable,
        opening_rows: u64,
    ) -> std::io::Result<PartTail> {
        Ok(PartTail {
            source: source::bytes(&part.path)?,
            scanner: Scanner::new(wanted, part.width(), true, symbols.clone()),
            rest: Vec::new(),
            header: true,
            skip: opening_rows,
        })
    }

    /// Passes the rows of the next block to `visit`. Returns `None` if nothing new was written.
    pub(crate) fn read_block(&mut self, mut visit: impl FnMut(&Record)) -> Option<BlockRead> {
        let old = self.rest.len();
        // Treat a read error as if nothing new was written.
        let got = self.source.by_ref().take(BLOCK as u64).read_to_end(&mut self.rest).ok()?;
        if got == 0 {
            return None;
        }
        let Some(end) = self.rest[old..].iter().rposition(|byte| *byte == b'\n') else {
            if self.rest.len() > LONGEST_LINE {
                // No trace has such a long line, so the rest of the file is not read.
                (self.rest, self.source) = (Vec::new(), Box::new(std::io::empty()));
            }
            return Some(BlockRead::default());
        };
        let mut lines = &self.rest[..old + end + 1];
        if std::mem::take(&mut self.header) {
            let end = lines.iter().position(|byte| *byte == b'\n').unwrap_or_default();
            lines = &lines[end + 1..];
        }
        let mut chunk = Chunk::default();
        self.scanner.scan(lines, &mut chunk);
        self.rest.drain(..=old + end);
        let mut read = BlockRead { rows: 0, skipped: chunk.skipped };
        for record in &chunk.records {
            if self.skip > 0 {
                self.skip -= 1;
            } else {
                visit(record);
                read.rows += 1;
            }
        }
        Some(read)
    }
}
