//! What the preloaded library tells `memtrace run`: bytes in a file that this launcher makes for each run.

/// The variable that names the file.
pub const HELLO: &str = "MEMTRACE_HELLO";

/// The byte of a process that loaded the library: the launcher cannot see it otherwise.
pub const LOADED: u8 = b'.';

/// The byte of a process that could not write its trace, or not to the end. It said why on stderr.
pub const TRACE_FAILED: u8 = b'!';
