//! The session of this process: its settings, and the recorder that the first event starts.

use std::sync::OnceLock;

use memtrace_record::{Recorder, Session};

use crate::runtime::state_version;

static SESSION: OnceLock<Session> = OnceLock::new();

/// Returns the session, or `None` before the library has loaded or if tracing is disabled.
#[inline]
pub(crate) fn session() -> Option<&'static Session> {
    SESSION.get()
}

/// Sets the session. Returns false if the session was already set.
pub(crate) fn begin(session: Session) -> bool {
    SESSION.set(session).is_ok()
}

/// Returns the recorder, after starting it if necessary. Returns `None` if the process is not traced or the
/// recorder cannot start.
#[inline]
pub(crate) fn recorder() -> Option<&'static Recorder> {
    if let Some(recorder) = Recorder::active() {
        return Some(recorder);
    }
    let recorder = Recorder::get(session()?)?;
    // The recorder may have just started. The new version makes threads write the rows of ranges that they
    // opened before the trace began.
    state_version::advance();
    Some(recorder)
}

/// Ends the trace of this process. Called at every kind of exit at which memtrace's code can still run.
pub(crate) fn finish() {
    if let Some(recorder) = Recorder::active() {
        recorder.finish();
    }
}
