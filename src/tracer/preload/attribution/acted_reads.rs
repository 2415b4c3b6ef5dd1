//! The lines of the program that act on values which a simulated GPU made up: branches, loops and sizes.
//!
//! The phantom device counts such reads. If the count grows during an op, the innermost line of Python is
//! noted. The end row lists the lines, so that a report can say that the program may run otherwise on a real
//! GPU.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use crate::attribution::python_frames;
use crate::ffi::{phantom, torch};

/// The maximum number of lines that are noted.
const MOST_LINES: usize = 16;

/// How often the writer thread tries to get the list, which another thread holds for less than a microsecond,
/// and the time between two attempts. In a forked child, the list may stay locked.
const ATTEMPTS: u32 = 20;
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(1);

/// The count at the end of the last op whose line was noted.
static SEEN: AtomicU64 = AtomicU64::new(0);
static LINES: Mutex<Vec<Arc<Line>>> = Mutex::new(Vec::new());

/// A line that acted on a value which the phantom device made up.
struct Line {
    file: String,
    number: i32,
    /// Whether the end row leaves the line out. Set from the source at the first end row.
    is_harmless: OnceLock<bool>,
}

impl Line {
    fn is_harmless(&self) -> bool {
        *self.is_harmless.get_or_init(|| {
            let source = std::fs::read_to_string(&self.file).unwrap_or_default();
            let first = usize::try_from(self.number).unwrap_or(0).saturating_sub(1);
            is_harmless(source.lines().skip(first))
        })
    }
}

/// Notes the line of the op that ends, if it acted on a value that the phantom device made up.
#[inline]
pub(crate) fn op_ended() {
    if let Some(count) = phantom::acted_reads()
        && SEEN.load(Ordering::Relaxed) != count
        && note()
    {
        SEEN.store(count, Ordering::Relaxed);
    }
}

/// Notes the innermost line of Python. Returns false if another thread holds the list.
#[cold]
fn note() -> bool {
    let Some((file, number)) = python_frames::innermost_line() else { return true };
    static TORCH: OnceLock<Option<PathBuf>> = OnceLock::new();
    let torch = TORCH.get_or_init(torch::folder).as_deref();
    // PyTorch's own checks of values pass on the simulated GPU.
    is_of_torch(&file, torch) || add(file, number)
}

/// Returns true if a file belongs to PyTorch, whose library is loaded from the folder `torch`.
fn is_of_torch(file: &str, torch: Option<&Path>) -> bool {
    file.contains("-packages/torch/") || torch.is_some_and(|torch| Path::new(file).starts_with(torch))
}

/// Adds a line to the list. Returns false if another thread holds the list.
fn add(file: String, number: i32) -> bool {
    let Ok(mut lines) = LINES.try_lock() else { return false };
    if lines.len() < MOST_LINES && !lines.iter().any(|line| line.number == number && line.file == file) {
        lines.push(Arc::new(Line { file, number, is_harmless: OnceLock::new() }));
    }
    true
}

/// Returns the end row's entry with the lines; empty if there are none. Called by the writer thread, which
/// reads the sources without holding the list.
pub(crate) fn end_words() -> String {
    let lines = (0..ATTEMPTS).find_map(|attempt| {
        if attempt > 0 {
            std::thread::sleep(BETWEEN_ATTEMPTS);
        }
        LINES.try_lock().ok().map(|lines| lines.clone())
    });
    let lines = lines.unwrap_or_default();
    let kept = lines.iter().filter(|line| !line.is_harmless());
    let names: Vec<String> = kept.map(|line| name(&line.file, line.number)).collect();
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
        || is_logging(line)
        || line.contains("+=")
        || line.contains(".item() /")
        || is_condition && (next.starts_with("raise ") || next.starts_with("warn"))
}

/// Returns true if a line writes a log: it uses a logger, or the statement is a call of a function `log`. A
/// logarithm has no effect as a statement, and is part of an expression.
fn is_logging(line: &str) -> bool {
    let is_call_of_log = |(function, arguments): (&str, &str)| {
        let is_name = |c: char| c.is_alphanumeric() || c == '_' || c == '.';
        let name = function.rsplit('.').next().unwrap_or_default();
        function.chars().all(is_name)
            && (name == "log" || name.ends_with("_log"))
            && !arguments.starts_with(')')
    };
    ["logger.", "logging.", "wandb.log("].iter().any(|part| line.contains(part))
        || line.split_once('(').is_some_and(is_call_of_log)
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
            "logger.info(loss.item())",
            "self.logger.debug('%s', loss.item())",
            "logging.warning(loss.item())",
            "    wandb.log({'loss': loss.item()})",
            "self.log('loss', loss.item())",
            "log(f'{loss.item()}')",
        ] {
            assert!(is(text), "{text}");
        }
        for text in [
            "while x < 3:\n    pass",
            "if done.all():\n    break",
            "n = int(x.sum())",
            "n = int(x.log().sum())",
            "n = int(torch.log(x).sum())",
            "x.log().sum().item()",
            "buffer = torch.empty(int(x.log(y)))",
            "",
        ] {
            assert!(!is(text), "{text}");
        }
    }

    #[test]
    fn a_line_is_kept_while_another_thread_reads_the_list_and_its_source_is_read_once() {
        let folder = std::env::temp_dir().join(format!("memtrace-acted-test-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("acted.py");
        std::fs::write(&path, "n = int(x.sum())\nprint(x.item())\n").unwrap();
        let file = path.to_str().unwrap();
        let held = LINES.lock().unwrap();
        assert!(!add(file.to_owned(), 1), "noted again at the end of the next op");
        drop(held);
        assert!(add(file.to_owned(), 1) && add(file.to_owned(), 1) && add(file.to_owned(), 2));
        assert_eq!(end_words(), "acted_at=acted.py:1");
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(end_words(), "acted_at=acted.py:1");
    }

    #[test]
    fn a_file_of_the_loaded_torch_is_left_out_and_one_in_a_folder_called_torch_is_not() {
        let torch = Some(Path::new("/home/a/pytorch/torch"));
        for file in
            ["/x/site-packages/torch/nn/a.py", "/x/dist-packages/torch/a.py", "/home/a/pytorch/torch/a.py"]
        {
            assert!(is_of_torch(file, torch), "{file}");
        }
        for file in
            ["/home/a/torch/train.py", "/x/site-packages/whisper/torch/a.py", "/home/a/pytorch/torch.py"]
        {
            assert!(!is_of_torch(file, torch), "{file}");
        }
        assert!(!is_of_torch("/home/a/pytorch/torch/a.py", None));
    }

    #[test]
    fn a_line_is_named_by_its_file_and_in_a_package_also_by_its_folder() {
        assert_eq!(name("/home/a/my train.py", 12), "my_train.py:12");
        assert_eq!(name("/x/site-packages/whisper/decoding.py", 7), "whisper/decoding.py:7");
    }
}
