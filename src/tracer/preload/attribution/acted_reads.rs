//! The lines of the program that act on values which a simulated GPU made up: branches, loops and sizes.
//!
//! The phantom device counts such reads. If the count grows during an op, the innermost line of Python is
//! noted. The end row lists the lines, so that a report can say that the program may run otherwise on a real
//! GPU.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::attribution::python_frames;
use crate::ffi::phantom;

/// The maximum number of lines that are noted.
const MOST_LINES: usize = 16;

/// The count at the end of the last op.
static SEEN: AtomicU64 = AtomicU64::new(0);
/// The files and the numbers of the lines.
static LINES: Mutex<Vec<(String, i32)>> = Mutex::new(Vec::new());

/// Notes the line of the op that ends, if it acted on a value that the phantom device made up.
#[inline]
pub(crate) fn op_ended() {
    if let Some(count) = phantom::acted_reads()
        && SEEN.load(Ordering::Relaxed) != count
    {
        SEEN.store(count, Ordering::Relaxed);
        note();
    }
}

#[cold]
fn note() {
    let Some((file, number)) = python_frames::innermost_line() else { return };
    // PyTorch's own checks of values pass on the simulated GPU.
    if file.contains("/torch/") {
        return;
    }
    let Ok(mut lines) = LINES.try_lock() else { return };
    if lines.len() < MOST_LINES && !lines.iter().any(|(known, line)| *line == number && *known == file) {
        lines.push((file, number));
    }
}

/// Returns the end row's entry with the lines; empty if there are none.
pub(crate) fn end_words() -> String {
    let Ok(lines) = LINES.try_lock() else { return String::new() };
    let is_kept = |(file, number): &&(String, i32)| {
        let source = std::fs::read_to_string(file).unwrap_or_default();
        let first = usize::try_from(*number).unwrap_or(0).saturating_sub(1);
        !is_harmless(source.lines().skip(first))
    };
    let names: Vec<String> = lines.iter().filter(is_kept).map(|(file, number)| name(file, *number)).collect();
    if names.is_empty() { String::new() } else { format!("acted_at={}", names.join(";")) }
}

/// Returns true if a statement only checks or prints a value, or makes a sum or a mean of it. The simulated GPU
/// answers a check so that it passes.
fn is_harmless<'a>(mut lines: impl Iterator<Item = &'a str>) -> bool {
    let Some(line) = lines.next().map(str::trim) else { return false };
    let next = lines.map(str::trim).find(|line| !line.is_empty()).unwrap_or_default();
    let is_condition = line.starts_with("if ") || line.starts_with("elif ");
    line.starts_with("assert ")
        || line.starts_with("raise ")
        || line.contains("print(")
        || line.contains("log(")
        || line.contains("+=")
        || line.contains(".item() /")
        || is_condition && (next.starts_with("raise ") || next.starts_with("warn"))
}

/// Returns the name of a line: `train.py:12`, or with its folder for a file of an installed package.
fn name(file: &str, number: i32) -> String {
    let parts = if file.contains("-packages/") { 2 } else { 1 };
    let mut parts: Vec<_> =
        Path::new(file).iter().rev().take(parts).map(|part| part.to_string_lossy()).collect();
    parts.reverse();
    let file: String =
        parts.join("/").chars().map(|c| if c.is_whitespace() || c == ';' { '_' } else { c }).collect();
    format!("{file}:{number}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_prints_and_statistics_are_harmless_and_loops_and_sizes_are_not() {
        let is = |text: &str| is_harmless(text.lines());
        for text in [
            "    assert (x > 0).all()",
            "print(loss.item())",
            "if not valid.all():\n\n    raise ValueError",
            "right += int((a == b).sum())",
            "return self.right.item() / self.count",
        ] {
            assert!(is(text), "{text}");
        }
        for text in ["while x < 3:\n    pass", "if done.all():\n    break", "n = int(x.sum())", ""] {
            assert!(!is(text), "{text}");
        }
    }

    #[test]
    fn a_line_is_named_by_its_file_and_in_a_package_also_by_its_folder() {
        assert_eq!(name("/home/a/my train.py", 12), "my_train.py:12");
        assert_eq!(name("/x/site-packages/whisper/decoding.py", 7), "whisper/decoding.py:7");
    }
}
