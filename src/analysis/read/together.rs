//! Several readers of a trace's rows in one pass over the file.

use std::ops::ControlFlow;

use crate::error::Result;
use crate::options::Options;
use crate::read::record::{Columns, Record, Wanted};
use crate::read::stream::TraceFile;
use crate::read::symbols::SymbolTable;

/// Something that is learned from the rows of a trace without a replay.
pub trait RowReader {
    /// Returns the columns that [`Self::feed`] needs.
    fn wanted(&self) -> Wanted;

    /// Processes a row. Rows come in the order of the file, of every event.
    fn feed(&mut self, row: &Record, symbols: &SymbolTable);
}

/// Reads the whole trace once, for all of `readers`.
///
/// # Errors
/// When the trace cannot be read.
pub fn read_together(
    trace: &TraceFile,
    options: &Options,
    symbols: &SymbolTable,
    readers: &mut [&mut dyn RowReader],
) -> Result<()> {
    let least = Wanted::all_events(Columns::of(&["seq"]));
    let wanted = readers.iter().fold(least, |wanted, reader| wanted.or(&reader.wanted()));
    trace.read(wanted, options.lenient, symbols, |row| {
        for reader in &mut *readers {
            reader.feed(row, symbols);
        }
        ControlFlow::Continue(())
    })?;
    Ok(())
}
