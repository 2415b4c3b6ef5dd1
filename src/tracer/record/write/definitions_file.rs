//! The file of definitions next to a journal.
//!
//! The file keeps the definitions of texts, contexts and stacks, whose chunks are recycled. Only the recovery
//! of a killed process reads it, and a clean end removes it. If it cannot be written, a repaired trace may
//! lack names, but no events.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use memtrace_trace::Event;
use memtrace_trace::event::bytes::bytes_of;
use memtrace_trace::journal::names_path;

use super::output;

/// The file, open for appending, and the definitions that were not written yet.
pub(crate) struct DefinitionsFile {
    file: Option<File>,
    buffer: Vec<u8>,
    length: u64,
}

impl DefinitionsFile {
    /// Creates the file next to `journal`. Creates no file if there is no journal.
    pub(crate) fn new(journal: Option<&Path>) -> DefinitionsFile {
        let file = journal.and_then(|journal| output::create_private(&names_path(journal)).ok());
        DefinitionsFile { file, buffer: Vec::new(), length: 0 }
    }

    /// Adds a definition and the bytes of the slots that follow it.
    pub(crate) fn add(&mut self, definition: &Event, slots: &[u8]) {
        if self.file.is_some() {
            self.buffer.extend(bytes_of(definition));
            self.buffer.extend(slots);
        }
    }

    /// Writes the buffer and returns the length of the file in bytes.
    pub(crate) fn flush(&mut self) -> u64 {
        if let Some(file) = self.file.as_mut().filter(|_| !self.buffer.is_empty()) {
            match file.write_all(&self.buffer) {
                Ok(()) => self.length += self.buffer.len() as u64,
                Err(_) => self.file = None,
            }
            self.buffer.clear();
        }
        self.length
    }
}
