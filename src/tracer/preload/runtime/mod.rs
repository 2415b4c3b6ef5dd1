//! Code that all hooks share: the session, the state of a thread, and the log.

pub(crate) mod cache;
pub(crate) mod command_line;
pub(crate) mod fixed_text;
pub(crate) mod fork;
pub(crate) mod launcher;
pub(crate) mod log;
pub(crate) mod pause;
pub(crate) mod session;
pub(crate) mod signals;
pub(crate) mod state_version;
pub(crate) mod thread;
