//! Reads a file that is still being written.
//!
//! A read takes every whole line that is there and keeps the start of a line whose end is not written yet. It
//! never waits.

use std::io::Read;

use memtrace_trace::csv::LONGEST_LINE;

use super::record::Wanted;
use super::scan::{Chunk, Scanner};
use super::source;
use super::stream::TraceFile;
use super::symbols::SymbolTable;

/// The most bytes of one read.
const BLOCK: usize = 1 << 20;

/// A part of a trace that may still grow.
pub(crate) struct PartTail {
    source: Box<dyn Read + Send>,
    scanner: Scanner,
    /// The start of a line whose end is not written yet.
    rest: Vec<u8>,
    /// Lines still to skip: the header, and the opening rows that repeat the part before.
    skip: u64,
}

impl PartTail {
    /// Opens `part` to read the `wanted` columns behind its header and `opening_rows` more lines.
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
            skip: opening_rows + 1,
        })
    }

    /// The rows of the next block; `None` when nothing new was written.
    pub(crate) fn read_block(&mut self) -> Option<Chunk> {
        let old = self.rest.len();
        // A file that cannot be read any more has nothing new.
        let got = self.source.by_ref().take(BLOCK as u64).read_to_end(&mut self.rest).ok()?;
        if got == 0 {
            return None;
        }
        let mut chunk = Chunk::default();
        let Some(end) = self.rest[old..].iter().rposition(|byte| *byte == b'\n') else {
            if self.rest.len() > LONGEST_LINE {
                // No trace has such a line: the rest of the file is not read.
                (self.rest, self.source) = (Vec::new(), Box::new(std::io::empty()));
            }
            return Some(chunk);
        };
        let mut lines = &self.rest[..old + end + 1];
        while self.skip > 0 {
            let Some(end) = lines.iter().position(|byte| *byte == b'\n') else { break };
            lines = &lines[end + 1..];
            self.skip -= 1;
        }
        self.scanner.scan(lines, &mut chunk);
        self.rest.drain(..=old + end);
        Some(chunk)
    }
}
