//! The errors of an analysis.

use std::fmt;

/// The result of an analysis.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of an analysis.
#[derive(Debug)]
pub enum Error {
    /// A trace could not be read.
    Trace(memtrace_trace::Error),
    /// The request is invalid. The text names the valid forms.
    Usage(String),
}

impl Error {
    /// Returns an [`Error::Usage`] with this text.
    pub fn usage(message: impl Into<String>) -> Error {
        Error::Usage(message.into())
    }

    /// Returns true if a file does not exist. The recorder may have removed the file
    /// ([`memtrace_trace::keep`]).
    pub(crate) fn is_no_file(&self) -> bool {
        let Error::Trace(memtrace_trace::Error::Io { source, .. }) = self else { return false };
        source.kind() == std::io::ErrorKind::NotFound
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
            Error::Usage(message) => f.write_str(message),
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
