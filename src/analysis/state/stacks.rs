//! The call stacks of a trace by `stack_id`, read from the `.stacks` file.

use std::io::Read;

use memtrace_trace::stacks::{self, FrameKind, StackRow};
use memtrace_trace::text::{MAX_TEXT, cut};
use rustc_hash::FxHashMap;

use crate::read::packed_file::open_file;
use crate::read::snapshot;
use crate::read::stream::TraceFile;

/// A frame of a stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    parent: i64,
    /// Whether the frame is an op, a module or a line of Python.
    pub kind: FrameKind,
    /// The op, the module path, or `file:line function`.
    pub text: String,
}

/// The stacks of a trace. They are empty if the stacks file is missing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stacks {
    frames: FxHashMap<i64, Frame>,
    bytes: usize,
}

/// The limit for the bytes of frames that are kept. A file that exceeds it is hostile or broken.
const MOST_BYTES: usize = 256 << 20;

/// The maximum number of frames of a stack, so that work stays bounded.
const DEEPEST: usize = 10_000;

/// The maximum number of lines of a stack that a report prints.
const SHOWN: usize = 4;

impl Stacks {
    /// Reads the stacks of all parts of `trace`. A missing file is skipped, and a truncated file is read up
    /// to its end.
    #[must_use]
    pub fn read(trace: &TraceFile) -> Stacks {
        let mut stacks = Stacks::default();
        for part in trace.files() {
            if let Some(file) = snapshot::stacks(part) {
                stacks.add(file);
            } else if let Ok(file) = open_file(&memtrace_trace::files::written_stacks(part)) {
                stacks.add(file);
            }
        }
        stacks
    }

    fn add(&mut self, file: impl Read) {
        // The size of an entry without its text, in bytes.
        const ENTRY: usize = 64;
        for StackRow { id, parent, kind, text } in stacks::read(file) {
            if self.bytes > MOST_BYTES {
                return;
            }
            let text = cut(&text, MAX_TEXT).to_owned();
            self.bytes += text.len() + ENTRY;
            self.frames.insert(id, Frame { parent, kind, text });
        }
    }

    /// Returns the frames of a stack, innermost first.
    pub fn frames(&self, id: i64) -> impl Iterator<Item = &Frame> {
        // A parent must have a smaller id than its child, so the walk ends even if a file contains a cycle.
        let parent_of = |frame: &Frame, id: i64| (frame.parent < id).then_some(frame.parent);
        let first = self.frames.get(&id).map(|frame| (frame, id));
        std::iter::successors(first, move |(frame, id)| {
            let parent = parent_of(frame, *id)?;
            self.frames.get(&parent).map(|frame| (frame, parent))
        })
        .map(|(frame, _)| frame)
        .take(DEEPEST)
    }

    /// Returns true if any frame is a Python line.
    #[must_use]
    pub fn has_lines(&self) -> bool {
        self.frames.values().any(|frame| frame.kind == FrameKind::Python)
    }

    /// Returns the Python lines of a stack, innermost first, as file, line number and function.
    pub fn calls(&self, id: i64) -> impl Iterator<Item = (&str, i64, &str)> {
        self.frames(id).filter(|frame| frame.kind == FrameKind::Python).map(|frame| call_of(&frame.text))
    }

    /// Returns the Python lines of a stack in the program's own files, innermost first. If the stack has no
    /// such line, returns its lines in libraries.
    #[must_use]
    pub fn lines(&self, id: i64) -> Vec<&str> {
        let all: Vec<&str> = self
            .frames(id)
            .filter(|frame| frame.kind == FrameKind::Python)
            .map(|frame| &*frame.text)
            .collect();
        let own: Vec<&str> = all.iter().copied().filter(|line| !is_of_library(line)).collect();
        if own.is_empty() { all } else { own }
    }

    /// Returns a stack on one line, innermost first: the innermost op and at most `SHOWN` Python lines or,
    /// without Python lines, all frames.
    #[must_use]
    pub fn show(&self, id: i64) -> Option<String> {
        let mut parts: Vec<&str> = self.lines(id);
        parts.truncate(SHOWN);
        let op = self.frames(id).find(|frame| frame.kind == FrameKind::Op).map(|frame| &*frame.text);
        if parts.is_empty() {
            parts = self.frames(id).map(|frame| &*frame.text).collect();
        } else if let Some(op) = op {
            parts.insert(0, op);
        }
        (!parts.is_empty()).then(|| cut(&parts.join(" < "), MAX_TEXT).to_owned())
    }
}

/// Splits `file:line function`. Returns line 0 if the text has no line number.
fn call_of(text: &str) -> (&str, i64, &str) {
    let (place, function) = text.rsplit_once(' ').unwrap_or((text, ""));
    let numbered = place.rsplit_once(':').and_then(|(file, line)| Some((file, line.parse().ok()?)));
    let (file, line) = numbered.unwrap_or((place, 0));
    (file, line, function)
}

/// Returns true if a line is in an installed library, in Python's standard library, or in no file.
fn is_of_library(line: &str) -> bool {
    let inside = ["/site-packages/", "/dist-packages/", "/lib/python3"];
    line.starts_with('<') || inside.iter().any(|folder| line.contains(folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "stack_id,parent_id,depth,frame,stack,kind\n\
        1,0,1,/home/me/train.py:9 <module>,x,python\n\
        2,1,2,/usr/lib/python3.11/site-packages/torch/nn/modules/linear.py:125 forward,x,python\n\
        3,2,3,GPT.h.0,x,module\n\
        4,3,4,aten::linear,x,op\n\
        5,4,5,aten::addmm,x,op\n\
        6,0,1,(script),x,module\n\
        7,6,2,aten::empty,x,op\n";

    fn stacks() -> Stacks {
        let mut stacks = Stacks::default();
        stacks.add(FILE.as_bytes());
        stacks
    }

    #[test]
    fn a_stack_shows_lines_of_the_program_or_its_ops() {
        let stacks = stacks();
        assert_eq!(stacks.frames(5).count(), 5);
        assert_eq!(stacks.lines(5), ["/home/me/train.py:9 <module>"]);
        assert_eq!(stacks.show(5).as_deref(), Some("aten::addmm < /home/me/train.py:9 <module>"));
        assert_eq!(stacks.show(7).as_deref(), Some("aten::empty < (script)"));
        assert_eq!(stacks.show(0), None);
        let calls: Vec<_> = stacks.calls(5).collect();
        let library = "/usr/lib/python3.11/site-packages/torch/nn/modules/linear.py";
        assert_eq!(calls, [(library, 125, "forward"), ("/home/me/train.py", 9, "<module>")]);
        assert_eq!(call_of("text"), ("text", 0, ""));
        assert_eq!(stacks.show(99), None);
    }

    #[test]
    fn a_stacks_file_with_a_cycle_is_read_to_an_end() {
        let mut stacks = Stacks::default();
        stacks.add("stack_id,parent_id,depth,frame,stack\n1,2,1,a,a\n2,1,1,b,b\nx,y\n".as_bytes());
        assert_eq!(stacks.frames(2).count(), 2);
        assert_eq!(stacks.show(2).as_deref(), Some("b < a"));
    }
}
