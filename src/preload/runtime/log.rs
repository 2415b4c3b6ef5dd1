//! Lines on stderr, in the program's own terminal, or in the file of `MEMTRACE_LOG_FILE`: few, and each
//! says what to do next.

use std::ffi::c_char;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use crate::runtime::session;

/// Writes `memtrace: <line>` in one call, so that it does not mix with the program's own lines.
pub(crate) fn say(line: &str) {
    if let Some(session) = session::session()
        && let Some(pattern) = &session.settings.log_file
        && log(Path::new(&session.named(&pattern.to_string_lossy())), line).is_ok()
    {
        return;
    }
    let text = format!("memtrace: {line}\n");
    // SAFETY: the buffer is valid for its length; a closed stderr is an error that nobody needs.
    unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
}

/// Adds a line to the file, with the time and the process: several may share it.
fn log(path: &Path, line: &str) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    let mut options = OpenOptions::new();
    options.append(true).create(true).mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC);
    let text = format!("{} {} {line}\n", now(), std::process::id());
    options.open(path)?.write_all(text.as_bytes())
}

/// The time as ISO 8601 has it, in UTC.
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
