//! Lines on stderr, in the program's own terminal: few, and each says what to do next.

/// Writes `memtrace: <line>` in one call, so that it does not mix with the program's own lines.
pub(crate) fn say(line: &str) {
    let text = format!("memtrace: {line}\n");
    // SAFETY: the buffer is valid for its length; a closed stderr is an error that nobody needs.
    unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
}
