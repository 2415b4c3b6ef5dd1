//! The log: a few lines on stderr, or in the file of `MEMTRACE_LOG_FILE`. Each says what to do next.

use std::ffi::c_char;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use memtrace_trace::config::Level;

use crate::runtime::session;

/// Logs `text` as a line of its own.
pub(crate) fn line(text: &str) {
    if let Some(session) = session::session()
        && let Some(pattern) = &session.settings.log_file
        && append(Path::new(&session.named(&pattern.to_string_lossy())), text).is_ok()
    {
        return;
    }
    // One call, so that the line does not mix with the program's own.
    let line = format!("memtrace: {text}\n");
    // SAFETY: the buffer is valid for its length. An error of a closed stderr has no remedy.
    unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
}

/// Logs `text` if the session's level is `level` or more.
pub(crate) fn line_at(level: Level, text: &str) {
    if session::session().is_some_and(|session| session.settings.log >= level) {
        line(text);
    }
}

/// Appends a line with the time and the process id: several processes may share the file.
fn append(path: &Path, text: &str) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    let mut options = OpenOptions::new();
    options.append(true).create(true).mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC);
    let line = format!("{} {} {text}\n", now(), std::process::id());
    options.open(path)?.write_all(line.as_bytes())
}

/// The time in UTC, by ISO 8601.
fn now() -> String {
    let mut text = [0u8; 32];
    // SAFETY: all zero is a value of the plain struct, every place is valid, and the length is the buffer's.
    let length = unsafe {
        let mut parts: libc::tm = std::mem::zeroed();
        let seconds = libc::time(std::ptr::null_mut());
        libc::gmtime_r(&raw const seconds, &raw mut parts);
        let format = c"%Y-%m-%dT%H:%M:%SZ";
        libc::strftime(text.as_mut_ptr().cast::<c_char>(), text.len(), format.as_ptr(), &raw const parts)
    };
    String::from_utf8_lossy(&text[..length]).into_owned()
}
