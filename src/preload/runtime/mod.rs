//! What every hook stands on: the session, the state of a thread, the guard around our code, and the log.

pub(crate) mod cache;
pub(crate) mod guard;
pub(crate) mod log;
pub(crate) mod session;
pub(crate) mod thread;
