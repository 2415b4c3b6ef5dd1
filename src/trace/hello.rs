//! The reports of the preloaded library to `memtrace run`: bytes in a file that the launcher creates for each
//! run.

/// The environment variable with the path of the file.
pub const HELLO: &str = "MEMTRACE_HELLO";

/// Written by a process that has loaded the library, which the launcher cannot detect otherwise.
pub const LOADED: u8 = b'.';

/// Written by a process that could not write its trace completely. It has printed the reason on stderr.
pub const TRACE_FAILED: u8 = b'!';
