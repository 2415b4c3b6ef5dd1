//! The `.stacks` file next to a trace, in CSV form. It contains the stacks to which `stack_id` refers.
//!
//! Each row has one frame and the id of its parent stack, so a stack is a chain of rows. The ids are 1, 2, 3,
//! ... in row order, and a stack's id is larger than its parent's.

use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};

use crate::csv::Bounded;
use crate::text::original_text;
use crate::text_enum::text_enum;

text_enum! {
    /// The kind of a stack frame: the column `kind`.
    #[derive(Default)]
    FrameKind {
        /// An op.
        [default]
        Op = "op",
        /// A module's path. The frames around it are lines of Python.
        Module = "module",
        /// A line of Python, `file:line function`.
        Python = "python",
    }
}

/// The columns.
const HEADER: [&str; 6] = ["stack_id", "parent_id", "depth", "frame", "stack", "kind"];

/// A stack to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stack<'a> {
    /// The id, 1 or more.
    pub id: u32,
    /// The id of the stack without the innermost frame; 0 for none.
    pub parent: u32,
    /// The kind of the innermost frame.
    pub kind: FrameKind,
    /// The texts of all frames, outermost first.
    pub frames: Vec<&'a str>,
}

/// Writes stacks.
pub struct StackWriter<W: Write> {
    csv: ::csv::Writer<W>,
}

impl<W: Write> StackWriter<W> {
    /// Creates a writer for a new file, and writes the header.
    ///
    /// # Errors
    /// Returns the sink's error.
    pub fn new(sink: W) -> io::Result<Self> {
        let mut writer = StackWriter::append(sink);
        writer.csv.write_record(HEADER)?;
        Ok(writer)
    }

    /// Creates a writer for a `sink` that already contains rows.
    pub fn append(sink: W) -> Self {
        StackWriter { csv: ::csv::Writer::from_writer(sink) }
    }

    /// Adds a stack; see [`StackWriter::flush`].
    ///
    /// # Errors
    /// Returns the sink's error if the buffer had to be written.
    pub fn write(&mut self, stack: &Stack<'_>) -> io::Result<()> {
        let Stack { id, parent, kind, frames } = stack;
        let frame = frames.last().copied().unwrap_or_default();
        // There are many stacks whose innermost frame is a Python line, and few rows of a trace refer to
        // them. So the column `stack` contains only the frame in such a row, to keep the file small.
        let whole = if *kind == FrameKind::Python { frame.to_owned() } else { frames.join(" / ") };
        let (id, parent, depth) = (id.to_string(), parent.to_string(), frames.len().to_string());
        Ok(self.csv.write_record([&id, &parent, &depth, frame, &whole, kind.as_str()])?)
    }

    /// Writes all buffered stacks to the sink.
    ///
    /// # Errors
    /// Returns the sink's error.
    pub fn flush(&mut self) -> io::Result<()> {
        self.csv.flush()
    }
}

/// A row of the file: the innermost frame of a stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StackRow {
    /// The id of the stack.
    pub id: i64,
    /// The id of the stack without this frame; 0 for none.
    pub parent: i64,
    /// The kind of the frame; [`FrameKind::Op`] in files of versions without this column.
    pub kind: FrameKind,
    /// The text of the frame.
    pub text: String,
}

/// Reads the rows of a file. Skips damaged rows, and ends at a read error or at a row without a line end.
///
/// ```
/// use memtrace_trace::stacks;
///
/// let file = "stack_id,parent_id,frame,kind\n1,0,train.py:12 main,python\n2,1,GPT.head,module\n";
/// let rows: Vec<_> = stacks::read(file.as_bytes()).collect();
/// assert_eq!(rows[1].text, "GPT.head");
/// // The frame around it:
/// assert_eq!(rows[1].parent, rows[0].id);
/// ```
pub fn read(source: impl Read) -> impl Iterator<Item = StackRow> {
    let mut csv = ::csv::Reader::from_reader(Bounded::new(source));
    let header = csv.headers().cloned().unwrap_or_default();
    let place = |name| header.iter().position(|column| column == name);
    let places = (place("stack_id"), place("parent_id"), place("frame"));
    let kind = place("kind");
    let mut row = ::csv::StringRecord::new();
    let rows = std::iter::from_fn(move || {
        csv.get_mut().next_row();
        csv.read_record(&mut row).ok()?.then(|| row.clone())
    });
    rows.filter_map(move |row| {
        let (Some(id), Some(parent), Some(frame)) = places else { return None };
        let number = |place: usize| row.get(place)?.parse::<i64>().ok();
        Some(StackRow {
            id: number(id)?,
            parent: number(parent)?,
            kind: kind.and_then(|kind| FrameKind::parse(row.get(kind)?)).unwrap_or_default(),
            text: original_text(row.get(frame).unwrap_or_default()).to_owned(),
        })
    })
}

/// Returns the number of stacks in the complete lines of a file, and the number of bytes in these lines.
#[must_use]
pub fn complete(file: &[u8]) -> (usize, usize) {
    let bytes = file.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
    // A text never contains a line end.
    let lines = file[..bytes].iter().filter(|byte| **byte == b'\n').count();
    (lines.saturating_sub(1), bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stacks_come_back_as_they_were_written() {
        let mut file = Vec::new();
        let mut writer = StackWriter::new(&mut file).unwrap();
        let line = "train.py:9 <module>";
        for stack in [
            Stack { id: 1, parent: 0, kind: FrameKind::Python, frames: vec![line] },
            Stack { id: 2, parent: 1, kind: FrameKind::Module, frames: vec![line, "GPT.h, 0"] },
        ] {
            writer.write(&stack).unwrap();
        }
        writer.flush().unwrap();
        drop(writer);
        let mut writer = StackWriter::append(&mut file);
        let stack =
            Stack { id: 3, parent: 2, kind: FrameKind::Op, frames: vec![line, "GPT.h, 0", "aten::mm"] };
        writer.write(&stack).unwrap();
        writer.flush().unwrap();
        drop(writer);
        let expected = "stack_id,parent_id,depth,frame,stack,kind\n\
            1,0,1,train.py:9 <module>,train.py:9 <module>,python\n\
            2,1,2,\"GPT.h, 0\",\"train.py:9 <module> / GPT.h, 0\",module\n\
            3,2,3,aten::mm,\"train.py:9 <module> / GPT.h, 0 / aten::mm\",op\n";
        assert_eq!(String::from_utf8(file.clone()).unwrap(), expected);
        let rows: Vec<_> =
            read(file.as_slice()).map(|row| (row.id, row.parent, row.kind, row.text)).collect();
        assert_eq!(rows[1], (2, 1, FrameKind::Module, "GPT.h, 0".to_owned()));
        assert_eq!(rows.len(), 3);
        assert_eq!(complete(&file), (3, file.len()));
        assert_eq!(complete(&file[..file.len() - 3]).0, 2);
        assert_eq!(complete(b""), (0, 0));
    }

    #[test]
    fn an_older_file_has_no_kinds_and_a_damaged_row_is_skipped() {
        let rows: Vec<_> =
            read("stack_id,parent_id,depth,frame,stack\n1,0,1,a,a\nx,y,1,b,b\n".as_bytes()).collect();
        assert_eq!(rows, [StackRow { id: 1, parent: 0, kind: FrameKind::Op, text: "a".to_owned() }]);
        assert_eq!(read("a,b\n1,2\n".as_bytes()).count(), 0);
    }
}
