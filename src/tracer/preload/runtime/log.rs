//! The log: a few lines on stderr, or in the file that `MEMTRACE_LOG_FILE` names. A line says what happened
//! and, if possible, what to do.

use std::ffi::{c_char, c_int};
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use memtrace_trace::config::Level;
use memtrace_trace::private_file;

use crate::runtime::session;
use crate::runtime::signals::without_write_signals;

/// Logs `text` as one line.
pub(crate) fn line(text: &str) {
    static IS_FAILURE_REPORTED: AtomicBool = AtomicBool::new(false);
    without_write_signals(|| {
        if let Some(session) = session::session()
            && let Some(pattern) = &session.settings.log_file
        {
            let path = session.named_path(pattern);
            match append(&path, text) {
                Ok(()) => return,
                Err(error) if !IS_FAILURE_REPORTED.swap(true, Ordering::Relaxed) => to_stderr(&format!(
                    "MEMTRACE_LOG_FILE={}: {error}; messages go to stderr; set it to a file that you can write",
                    path.display()
                )),
                Err(_) => {}
            }
        }
        to_stderr(text);
    });
}

/// The number of bytes that a pipe always accepts in one write if `poll` reports that it is writable
/// (`PIPE_BUF` in pipe(7)).
const ATOMIC: usize = 4096;

/// Writes a line to stderr. Drops the line if stderr accepts no bytes (a full pipe, a stopped terminal).
fn to_stderr(text: &str) {
    let line = format!("memtrace: {text}\n");
    // A line is usually one write, so that the program's own output does not split it.
    for part in line.as_bytes().chunks(ATOMIC) {
        if !takes_bytes(libc::STDERR_FILENO) {
            return;
        }
        // SAFETY: the buffer is valid for its length. A write error, such as a closed stderr, cannot be
        // handled.
        unsafe { libc::write(libc::STDERR_FILENO, part.as_ptr().cast(), part.len()) };
    }
}

/// Returns false if a write to the file would block. Waits up to one second for the file to accept bytes.
/// After a wait that failed, later calls do not wait, until the file accepts bytes again.
fn takes_bytes(file: c_int) -> bool {
    static IS_STUCK: AtomicBool = AtomicBool::new(false);
    let milliseconds = if IS_STUCK.load(Ordering::Relaxed) { 0 } else { 1000 };
    let mut question = libc::pollfd { fd: file, events: libc::POLLOUT, revents: 0 };
    // SAFETY: the pointer is to one valid entry.
    let answered = unsafe { libc::poll(&raw mut question, 1, milliseconds) } != 0;
    IS_STUCK.store(!answered, Ordering::Relaxed);
    answered
}

/// Logs `text` if the session's level is at least `level`.
pub(crate) fn line_at(level: Level, text: &str) {
    if session::session().is_some_and(|session| session.settings.log >= level) {
        line(text);
    }
}

/// Appends a line with the time and the process id, because several processes may share the file.
fn append(path: &Path, text: &str) -> io::Result<()> {
    if path == Path::new("/dev/null") {
        return Ok(());
    }
    if let Some(folder) = path.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    let line = format!("{} {} {text}\n", now(), std::process::id());
    private_file::append_or_create(path)?.write_all(line.as_bytes())
}

/// Returns the current time in UTC, in ISO 8601.
fn now() -> String {
    let mut text = [0u8; 32];
    // SAFETY: zero bytes are a valid value of the plain struct, all pointers are valid, and the length is the
    // length of the buffer.
    let length = unsafe {
        let mut parts: libc::tm = std::mem::zeroed();
        let seconds = libc::time(std::ptr::null_mut());
        libc::gmtime_r(&raw const seconds, &raw mut parts);
        let format = c"%Y-%m-%dT%H:%M:%SZ";
        libc::strftime(text.as_mut_ptr().cast::<c_char>(), text.len(), format.as_ptr(), &raw const parts)
    };
    String::from_utf8_lossy(&text[..length]).into_owned()
}
