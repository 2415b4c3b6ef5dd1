//! Reads and writes rows as CSV.

mod bounded;
mod field_cache;
mod last_line;
mod line;
mod reader;
mod writer;

pub(crate) use bounded::Bounded;
pub use bounded::{LONGEST_LINE, too_long};
pub use last_line::{last_line, last_line_of_stream};
pub use reader::RowReader;
pub use writer::RowWriter;

use crate::EventName;
use crate::columns::{COLUMNS, ColumnType, index_of};

/// Returns true if `line`, without its line end, is an `end` row.
#[must_use]
pub fn is_end_row(line: &[u8]) -> bool {
    const EVENT: usize = index_of("event");
    // The columns before `event` contain no text, so they have no quotes.
    const { assert!(first_text() == EVENT) };
    line.split(|byte| *byte == b',').nth(EVENT) == Some(EventName::End.as_str().as_bytes())
}

/// Returns the text of an `end` row, or `None` if `line`, without its line end, is another row.
#[must_use]
pub fn end_text(line: &[u8]) -> Option<String> {
    if !is_end_row(line) {
        return None;
    }
    let mut rows = ::csv::ReaderBuilder::new().has_headers(false).from_reader(line);
    let row = rows.records().next()?.ok()?;
    row.get(const { index_of("name") }).map(str::to_owned)
}

/// Returns the index of the first text column. All columns before it contain integers.
const fn first_text() -> usize {
    let mut index = 0;
    while matches!(COLUMNS[index].kind, ColumnType::Int) {
        index += 1;
    }
    index
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Row;

    #[test]
    fn an_end_row_is_distinguished_from_every_other() {
        for event in EventName::ALL {
            let mut writer = RowWriter::without_header(Vec::new());
            let row = Row { event: *event, name: "exit lost=0 x=a,b", op: "end", ..Row::default() };
            writer.write(&row).unwrap();
            writer.flush().unwrap();
            let line = writer.get_ref().strip_suffix(b"\n").unwrap();
            let is_end = *event == EventName::End;
            assert_eq!(is_end_row(line), is_end);
            assert_eq!(end_text(line).as_deref(), is_end.then_some("exit lost=0 x=a,b"));
        }
        assert!(!is_end_row(b"1,2,3"));
    }
}
