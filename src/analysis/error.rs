//! Why there is no answer.

use std::fmt;

/// The result of an analysis.
pub type Result<T> = std::result::Result<T, Error>;

/// What went wrong.
#[derive(Debug)]
pub enum Error {
    /// A trace could not be read.
    Trace(memtrace_trace::Error),
    /// What was asked for makes no sense; the text says what would.
    Usage(String),
}

impl Error {
    /// A request that makes no sense.
    pub fn usage(what: impl Into<String>) -> Error {
        Error::Usage(what.into())
    }
}

impl From<memtrace_trace::Error> for Error {
    fn from(error: memtrace_trace::Error) -> Self {
        Error::Trace(error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Trace(error) => error.fmt(f),
            Error::Usage(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Trace(error) => error.source(),
            Error::Usage(_) => None,
        }
    }
}
