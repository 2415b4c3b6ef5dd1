//! Bounds the length of a row, so that a file without line ends cannot exhaust the memory.

use std::io::{self, Read};

/// The maximum length in bytes of a line that a reader accepts. The longest line that memtrace writes is the
/// meta row, which includes the program's arguments.
pub const LONGEST_LINE: usize = 16 << 20;

/// A source that is read row by row. A row longer than [`LONGEST_LINE`] bytes is an error.
pub(crate) struct Bounded<R> {
    source: R,
    left: usize,
}

impl<R> Bounded<R> {
    pub(crate) fn new(source: R) -> Self {
        Bounded { source, left: LONGEST_LINE }
    }

    /// Resets the limit of [`LONGEST_LINE`] bytes. The caller must call this before it reads a row.
    pub(crate) fn next_row(&mut self) {
        self.left = LONGEST_LINE;
    }
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 {
            return Err(too_long());
        }
        let most = buffer.len().min(self.left);
        let got = self.source.read(&mut buffer[..most])?;
        self.left -= got;
        Ok(got)
    }
}

/// Returns the error for a line longer than [`LONGEST_LINE`].
#[must_use]
pub fn too_long() -> io::Error {
    let what = format!("a line of more than {} MiB: not a trace", LONGEST_LINE >> 20);
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_without_end_is_an_error_and_takes_no_more_memory_than_the_longest_line() {
        let mut bounded = Bounded::new(io::repeat(b'a'));
        let mut read = Vec::new();
        let error = bounded.read_to_end(&mut read).unwrap_err();
        assert_eq!((read.len(), error.kind()), (LONGEST_LINE, io::ErrorKind::InvalidData));
        bounded.next_row();
        assert_eq!(bounded.read(&mut [0; 8]).unwrap(), 8);
    }
}
