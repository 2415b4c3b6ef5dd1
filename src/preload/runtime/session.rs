//! The session of this process, and the recorder that it starts.

use std::sync::OnceLock;

use memtrace_record::{Recorder, Session};

use crate::attribution::context;

static SESSION: OnceLock<Session> = OnceLock::new();

/// The session; `None` before the library is loaded, or when it is told to stay out.
#[inline]
pub(crate) fn session() -> Option<&'static Session> {
    SESSION.get()
}

/// Sets the session, once; `false` when there is one already.
pub(crate) fn begin(session: Session) -> bool {
    SESSION.set(session).is_ok()
}

/// The recorder, started when it was not.
#[inline]
pub(crate) fn recorder() -> Option<&'static Recorder> {
    if let Some(recorder) = Recorder::active() {
        return Some(recorder);
    }
    let recorder = Recorder::get(session()?)?;
    context::recorder_started();
    Some(recorder)
}
