//! Reports to `memtrace run` the events that the command cannot observe itself; see
//! [`memtrace_trace::hello`].

use std::io::Write;
use std::path::PathBuf;
use std::sync::OnceLock;

use memtrace_trace::hello::{HELLO, LOADED, TRACE_FAILED};
use memtrace_trace::private_file;

use super::log;
use super::signals::without_write_signals;

/// The path of the file through which the launcher gets reports; `None` without a launcher. It is read from
/// the environment at load, because the program may change the environment later.
static FILE: OnceLock<Option<PathBuf>> = OnceLock::new();

/// Reports that the library was loaded. Called once, at load, when the path of the file is read from the
/// environment.
pub(crate) fn report_load() {
    FILE.get_or_init(|| std::env::var_os(HELLO).map(PathBuf::from));
    report(LOADED);
}

/// Reports that the trace cannot be written, and logs `why`.
pub(crate) fn report_failure(why: &str) {
    log::line(why);
    report(TRACE_FAILED);
}

fn report(byte: u8) {
    let Some(Some(path)) = FILE.get() else { return };
    without_write_signals(|| {
        if let Ok(mut file) = private_file::append(path) {
            let _ = file.write_all(&[byte]);
        }
    });
}
