//! The session of this process: its settings, and the recorder that the first event starts.

use std::sync::OnceLock;

use memtrace_record::{Recorder, Session};

use crate::runtime::state_version;

static SESSION: OnceLock<Session> = OnceLock::new();

/// The session; `None` before the library has loaded, and when tracing is disabled.
#[inline]
pub(crate) fn session() -> Option<&'static Session> {
    SESSION.get()
}

/// Sets the session, once; `false` if it is set already.
pub(crate) fn begin(session: Session) -> bool {
    SESSION.set(session).is_ok()
}

/// The recorder, which the first call starts.
#[inline]
pub(crate) fn recorder() -> Option<&'static Recorder> {
    if let Some(recorder) = Recorder::active() {
        return Some(recorder);
    }
    let recorder = Recorder::get(session()?)?;
    // Threads now write the rows of the ranges that they opened before the trace began.
    state_version::advance();
    Some(recorder)
}

/// Ends the trace of this process. Called on every way out of a process that can run code.
pub(crate) fn finish() {
    if let Some(recorder) = Recorder::active() {
        recorder.finish();
    }
}
