//! A writer of Python's pickle format, for lists and dicts of numbers and texts.
//!
//! The output is read by Python and by PyTorch's memory_viz page, which knows few opcodes. The format is
//! protocol 4 without frames, with integers of at most 8 bytes, memoized texts, and lists and dicts that grow
//! by at most [`BATCH`] entries at once.

use std::io::{self, Write};

use rustc_hash::FxHashMap;

/// The maximum number of entries that one opcode adds.
pub const BATCH: usize = 1000;

const PROTO: u8 = 0x80;
const STOP: u8 = b'.';
const NONE: u8 = b'N';
const TRUE: u8 = 0x88;
const FALSE: u8 = 0x89;
const BININT: u8 = b'J';
const BININT1: u8 = b'K';
const BININT2: u8 = b'M';
const LONG1: u8 = 0x8a;
const BINFLOAT: u8 = b'G';
const SHORT_BINUNICODE: u8 = 0x8c;
const BINUNICODE: u8 = b'X';
const EMPTY_LIST: u8 = b']';
const APPENDS: u8 = b'e';
const EMPTY_DICT: u8 = b'}';
const SETITEMS: u8 = b'u';
const MARK: u8 = b'(';
const TUPLE2: u8 = 0x86;
const MEMOIZE: u8 = 0x94;
const BINGET: u8 = b'h';
const LONG_BINGET: u8 = b'j';

/// The memo index of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memo(u32);

/// A list or dict under construction.
#[derive(Debug)]
#[must_use = "close it with `Pickle::close`"]
pub struct Open {
    opcode: u8,
    entries: usize,
}

/// Writes one value as a pickle.
pub struct Pickle<W> {
    out: W,
    symbols: FxHashMap<Box<str>, Memo>,
    remembered: u32,
}

impl<W: Write> Pickle<W> {
    /// Writes the header to `out`.
    ///
    /// # Errors
    /// When the writer fails, as for every method.
    pub fn new(mut out: W) -> io::Result<Self> {
        out.write_all(&[PROTO, 4])?;
        Ok(Pickle { out, symbols: FxHashMap::default(), remembered: 0 })
    }

    /// Writes the end of the pickle, and returns the writer.
    ///
    /// # Errors
    /// When the writer fails.
    pub fn finish(mut self) -> io::Result<W> {
        self.out.write_all(&[STOP])?;
        Ok(self.out)
    }

    /// Writes `None`.
    ///
    /// # Errors
    /// When the writer fails.
    pub fn none(&mut self) -> io::Result<()> {
        self.out.write_all(&[NONE])
    }

    /// Writes `True` or `False`.
    ///
    /// # Errors
    /// When the writer fails.
    pub fn bool(&mut self, value: bool) -> io::Result<()> {
        self.out.write_all(&[if value { TRUE } else { FALSE }])
    }

    /// Writes an integer.
    ///
    /// # Errors
    /// When the writer fails.
    pub fn int(&mut self, value: i64) -> io::Result<()> {
        let bytes = value.to_le_bytes();
        match value {
            0..=0xff => self.out.write_all(&[BININT1, bytes[0]]),
            0x100..=0xffff => self.out.write_all(&[BININT2, bytes[0], bytes[1]]),
            _ if i32::try_from(value).is_ok() => {
                self.out.write_all(&[BININT, bytes[0], bytes[1], bytes[2], bytes[3]])
            }
            _ => {
                self.out.write_all(&[LONG1, 8])?;
                self.out.write_all(&bytes)
            }
        }
    }

    /// Writes a float.
    ///
    /// # Errors
    /// When the writer fails.
    pub fn float(&mut self, value: f64) -> io::Result<()> {
        self.out.write_all(&[BINFLOAT])?;
        self.out.write_all(&value.to_be_bytes())
    }

    /// Writes a text and memoizes it. If the text was written before, writes a reference to the memo instead.
    ///
    /// # Errors
    /// When the writer fails.
    pub fn text(&mut self, text: &str) -> io::Result<()> {
        if let Some(memo) = self.symbols.get(text) {
            return self.recall(*memo);
        }
        self.text_once(text)?;
        let memo = self.remember()?;
        self.symbols.insert(text.into(), memo);
        Ok(())
    }

    /// Writes a text without memoizing it, for texts that occur once.
    ///
    /// # Errors
    /// When the writer fails.
    pub fn text_once(&mut self, text: &str) -> io::Result<()> {
        match u8::try_from(text.len()) {
            Ok(length) => self.out.write_all(&[SHORT_BINUNICODE, length])?,
            Err(_) => {
                self.out.write_all(&[BINUNICODE])?;
                self.out.write_all(&(text.len() as u32).to_le_bytes())?;
            }
        }
        self.out.write_all(text.as_bytes())
    }

    /// Replaces the last two values by a tuple of them.
    ///
    /// # Errors
    /// When the writer fails.
    pub fn pair(&mut self) -> io::Result<()> {
        self.out.write_all(&[TUPLE2])
    }

    /// Memoizes the value that was written last.
    ///
    /// # Errors
    /// When the writer fails.
    pub fn remember(&mut self) -> io::Result<Memo> {
        let memo = Memo(self.remembered);
        self.remembered += 1;
        self.out.write_all(&[MEMOIZE])?;
        Ok(memo)
    }

    /// Writes a reference to a memoized value.
    ///
    /// # Errors
    /// When the writer fails.
    pub fn recall(&mut self, memo: Memo) -> io::Result<()> {
        match u8::try_from(memo.0) {
            Ok(place) => self.out.write_all(&[BINGET, place]),
            Err(_) => {
                self.out.write_all(&[LONG_BINGET])?;
                self.out.write_all(&memo.0.to_le_bytes())
            }
        }
    }

    /// Opens a list. Call [`Pickle::entry`] before each entry.
    ///
    /// # Errors
    /// When the writer fails.
    pub fn list(&mut self) -> io::Result<Open> {
        self.out.write_all(&[EMPTY_LIST, MARK])?;
        Ok(Open { opcode: APPENDS, entries: 0 })
    }

    /// Opens a dict. Call [`Pickle::entry`] before each key and value.
    ///
    /// # Errors
    /// When the writer fails.
    pub fn dict(&mut self) -> io::Result<Open> {
        self.out.write_all(&[EMPTY_DICT, MARK])?;
        Ok(Open { opcode: SETITEMS, entries: 0 })
    }

    /// Must be called before each entry of a list or dict. Ends the current batch if it is full.
    ///
    /// # Errors
    /// When the writer fails.
    pub fn entry(&mut self, open: &mut Open) -> io::Result<()> {
        if open.entries == BATCH {
            self.out.write_all(&[open.opcode, MARK])?;
            open.entries = 0;
        }
        open.entries += 1;
        Ok(())
    }

    /// Begins the next entry of a dict and writes its key. The value follows.
    ///
    /// # Errors
    /// When the writer fails.
    pub fn key(&mut self, open: &mut Open, key: &str) -> io::Result<()> {
        self.entry(open)?;
        self.text(key)
    }

    /// Closes a list or dict.
    ///
    /// # Errors
    /// When the writer fails.
    pub fn close(&mut self, open: Open) -> io::Result<()> {
        self.out.write_all(&[open.opcode])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pickle_uses_the_shortest_opcode_that_memory_viz_knows() {
        let mut pickle = Pickle::new(Vec::new()).unwrap();
        let mut list = pickle.list().unwrap();
        for value in [0, 255, 256, 65_535, 65_536, -1, i64::from(i32::MIN), 1 << 40] {
            pickle.entry(&mut list).unwrap();
            pickle.int(value).unwrap();
        }
        for _ in 0..2 {
            pickle.entry(&mut list).unwrap();
            pickle.text("é").unwrap();
        }
        pickle.close(list).unwrap();
        let bytes = pickle.finish().unwrap();
        let expected: &[&[u8]] = &[
            &[0x80, 4, b']', b'('],
            &[b'K', 0, b'K', 255, b'M', 0, 1, b'M', 255, 255],
            &[b'J', 0, 0, 1, 0, b'J', 255, 255, 255, 255, b'J', 0, 0, 0, 0x80],
            &[0x8a, 8, 0, 0, 0, 0, 0, 1, 0, 0],
            &[0x8c, 2, 0xc3, 0xa9, 0x94, b'h', 0],
            b"e.",
        ];
        assert_eq!(bytes, expected.concat());
    }

    #[test]
    fn a_pickle_fills_long_lists_in_batches() {
        let mut pickle = Pickle::new(Vec::new()).unwrap();
        let mut list = pickle.list().unwrap();
        for _ in 0..2500 {
            pickle.entry(&mut list).unwrap();
            pickle.none().unwrap();
        }
        pickle.close(list).unwrap();
        let bytes = pickle.finish().unwrap();
        let batches: Vec<usize> = bytes
            .split(|byte| *byte == b'e')
            .map(|part| part.iter().filter(|b| **b == b'N').count())
            .collect();
        assert_eq!(batches, [1000, 1000, 500, 0]);
    }
}
