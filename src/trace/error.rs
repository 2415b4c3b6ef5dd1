//! Errors from reading a trace.

use std::fmt;
use std::io;
use std::path::PathBuf;

/// The result of reading or writing a trace.
pub type Result<T> = std::result::Result<T, Error>;

/// A failure, with its location.
#[derive(Debug)]
pub enum Error {
    /// The file could not be opened, read or written.
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The header does not match this schema.
    Header {
        /// The file.
        path: PathBuf,
        /// The first column that differs, or a description of the file.
        found: String,
    },
    /// The trace has a schema that this version does not know.
    Schema {
        /// The file.
        path: PathBuf,
        /// The schema in the meta row.
        found: String,
    },
    /// A row does not match its columns.
    Row {
        /// The file.
        path: PathBuf,
        /// The line number; the header is line 1.
        line: u64,
        /// The expected and the found value.
        what: String,
    },
    /// There is no trace at this path.
    NoTrace {
        /// The file or folder.
        path: PathBuf,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Io { path, source } => write!(f, "{}: {source}", path.display()),
            Error::Header { path, found } => write!(
                f,
                "{}: not a memtrace trace: {found} (expected a header that starts with seq,ts_ns,rank)",
                path.display()
            ),
            Error::Schema { path, found } => write!(
                f,
                "{}: written in schema {found}, this command reads {}; use the command of the version that wrote it",
                path.display(),
                crate::SCHEMA_VERSION
            ),
            Error::Row { path, line, what } => write!(f, "{}:{line}: {what}", path.display()),
            Error::NoTrace { path } => write!(
                f,
                "{}: no trace here; write one with: memtrace run -o {} -- python train.py",
                path.display(),
                path.display()
            ),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}
