//! Reads the last line of a trace, which is its `end` row if the trace is complete.

use std::io::{self, Read, Seek, SeekFrom};

use super::LONGEST_LINE;

/// The number of bytes that are read at once from a stream, and first from the end of a file.
const PIECE: usize = 64 << 10;

/// Returns the last line of a file without its line end. Reads backwards to the start of that line, because an
/// `end` row may have long words. Returns `None` if the file does not end with a line end, or if the line is longer
/// than [`LONGEST_LINE`], so that it is not a row.
///
/// # Errors
/// When the file cannot be read.
pub fn last_line<F: Read + Seek>(file: &mut F) -> io::Result<Option<Vec<u8>>> {
    let length = file.seek(SeekFrom::End(0))?;
    let mut size = PIECE as u64;
    loop {
        let start = length.saturating_sub(size);
        file.seek(SeekFrom::Start(start))?;
        let mut tail = Vec::new();
        file.by_ref().take(length - start).read_to_end(&mut tail)?;
        let Some(b'\n') = tail.pop() else { return Ok(None) };
        if let Some(before) = tail.iter().rposition(|byte| *byte == b'\n') {
            tail.drain(..=before);
        } else if start > 0 && size <= LONGEST_LINE as u64 {
            size *= 2;
            continue;
        }
        return Ok(Some(tail).filter(|line| line.len() <= LONGEST_LINE));
    }
}

/// Returns what [`last_line`] returns, for a source that can only be read from its beginning.
///
/// # Errors
/// When the source cannot be read.
pub fn last_line_of_stream(mut source: impl Read) -> io::Result<Option<Vec<u8>>> {
    // Begins with the last whole line; the beginning of the next line may follow.
    let (mut tail, mut piece) = (Vec::new(), vec![0; PIECE]);
    loop {
        let got = source.read(&mut piece)?;
        if got == 0 {
            break;
        }
        let end = piece[..got].iter().rposition(|byte| *byte == b'\n').map(|end| tail.len() + end);
        tail.extend_from_slice(&piece[..got]);
        if let Some(before) = end.and_then(|end| tail[..end].iter().rposition(|byte| *byte == b'\n')) {
            tail.drain(..=before);
        }
        if tail.len() > 2 * (LONGEST_LINE + PIECE) {
            return Ok(None);
        }
    }
    let is_whole = tail.pop() == Some(b'\n') && tail.len() <= LONGEST_LINE;
    Ok(is_whole.then_some(tail))
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    #[test]
    fn the_last_line_is_the_same_of_a_file_and_of_a_stream() {
        let long = |length: usize| [&b"first\n"[..], &vec![b'x'; length], b"\n"].concat();
        let cases = [
            (Vec::new(), None),
            (b"\n".to_vec(), Some(0)),
            (b"one\n".to_vec(), Some(3)),
            (b"one\ntwo2\n".to_vec(), Some(4)),
            (b"one\ntwo\nunfinished".to_vec(), None),
            (b"one\n\n".to_vec(), Some(0)),
            (long(PIECE - 1), Some(PIECE - 1)),
            (long(PIECE), Some(PIECE)),
            (long(3 * PIECE), Some(3 * PIECE)),
            (long(LONGEST_LINE), Some(LONGEST_LINE)),
            (long(LONGEST_LINE + 1), None),
            (vec![b'x'; PIECE], None),
        ];
        for (bytes, length) in cases {
            let of_file = last_line(&mut Cursor::new(&bytes)).unwrap();
            assert_eq!(of_file.as_ref().map(Vec::len), length, "{} bytes", bytes.len());
            assert!(of_file.as_ref().is_none_or(|line| bytes[..bytes.len() - 1].ends_with(line)));
            assert!(last_line_of_stream(&bytes[..]).unwrap() == of_file, "{} bytes", bytes.len());
        }
    }
}
