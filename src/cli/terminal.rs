//! The terminal: color, width, messages, and a progress line.

use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use memtrace_analysis::read::input::Input;
use memtrace_analysis::render::printer::Printer;
use memtrace_trace::text::{printable, printable_json, printable_lines};

/// Prints a message on stderr. All messages of the command pass through here. Text quoted from a trace or
/// from the traced program is shown without control sequences. On a terminal, messages are wrapped to the
/// terminal's width.
pub(crate) fn say(message: &str) {
    let stderr = std::io::stderr();
    let mut page = Printer::new(false, width(&stderr));
    for line in format!("memtrace: {}", printable_lines(message)).split('\n') {
        page.plain(line);
    }
    // An error means that stderr is closed.
    stderr.lock().write_all(page.text().as_bytes()).ok();
}

/// Replaces the progress line on stderr. An empty line clears it.
pub(crate) fn show_progress(line: &str) {
    write!(std::io::stderr(), "\r\x1b[K{}", printable(line)).ok();
    std::io::stderr().flush().ok();
}

/// Prints a line on stdout, without control sequences.
///
/// # Errors
/// When stdout is closed.
pub(crate) fn print_line(line: &str) -> std::io::Result<()> {
    writeln!(std::io::stdout(), "{}", printable(line))
}

/// Returns the text of an answer to `--json`. Control characters in the texts of a trace are escaped as in
/// JSON.
pub(crate) fn json_text(answer: &serde_json::Value) -> String {
    printable_json(&format!("{answer:#}\n")).into_owned()
}

/// Returns true if text on `stream` is colored. `--color` takes precedence over `NO_COLOR`. Without both,
/// only a terminal gets color.
pub(crate) fn use_colour(choice: &str, stream: &impl IsTerminal) -> bool {
    let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    match choice {
        "always" => true,
        "never" => false,
        _ => {
            stream.is_terminal()
                && !set("NO_COLOR")
                && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
        }
    }
}

/// Returns the number of columns of the terminal `stream`, or `None` if it is not a terminal.
pub(crate) fn width(stream: &(impl IsTerminal + std::os::fd::AsFd)) -> Option<usize> {
    if !stream.is_terminal() {
        return None;
    }
    let size = rustix::termios::tcgetwinsize(stream).ok()?;
    (size.ws_col > 0).then_some(usize::from(size.ws_col))
}

/// A progress line on stderr that shows how much of the traces was read. It appears only on a terminal, and
/// only if reading takes longer than half a second.
pub(crate) struct Progress {
    done: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Progress {
    /// Shows the progress of reading `inputs` until dropped.
    pub(crate) fn start(inputs: &[Input]) -> Progress {
        let done = Arc::new(AtomicBool::new(false));
        let traces = inputs.iter().flat_map(|input| &input.traces);
        let total: u64 = traces.clone().map(|trace| trace.size).sum();
        let counts: Vec<Arc<AtomicU64>> = traces.map(|trace| Arc::clone(&trace.progress)).collect();
        let stop = Arc::clone(&done);
        let watch = move || {
            let mut shown = false;
            // If reading ends during this pause, no line is shown.
            std::thread::park_timeout(Duration::from_millis(500));
            while !stop.load(Ordering::Acquire) {
                let read: u64 = counts.iter().map(|count| count.load(Ordering::Relaxed)).sum();
                // Some reports read a trace twice, so start again at 0 % after 100 %.
                let percent = read % total.max(1) * 100 / total.max(1);
                show_progress(&format!("reading {:.1} GB: {percent} % ", total as f64 / 1e9));
                shown = true;
                std::thread::park_timeout(Duration::from_millis(100));
            }
            if shown {
                show_progress("");
            }
        };
        // If the thread cannot be started, no progress is shown.
        let thread =
            std::io::stderr().is_terminal().then(|| std::thread::Builder::new().spawn(watch).ok()).flatten();
        Progress { done, thread }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.done.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            thread.join().ok();
        }
    }
}
