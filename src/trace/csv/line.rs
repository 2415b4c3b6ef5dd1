//! One line of a CSV: its fields, written one behind the other.

use super::field_cache::{Numbers, One, Word};

/// More than a field takes beside the bytes of its text: a number has twenty bytes and a comma, and what is
/// written behind it for nothing; a word of the schema's own (an event, a category) has fewer.
pub(super) const FIELD: usize = 32;

/// 10^8: what has fewer than nine digits is below it.
const NINE_DIGITS: u64 = 100_000_000;

/// A line that is being written.
pub(super) struct Line<'a> {
    /// Has room for all of it.
    bytes: &'a mut [u8],
    at: usize,
}

impl<'a> Line<'a> {
    /// A line that begins at `at`; `bytes` has room for it.
    pub(super) fn new(bytes: &'a mut [u8], at: usize) -> Self {
        Line { bytes, at }
    }

    /// Where the next field begins.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// The `N` bytes that begin at `from`, what was not written yet among them.
    #[inline(always)]
    pub(super) fn written<const N: usize>(&self, from: usize) -> [u8; N] {
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.bytes[from..from + N]);
        bytes
    }

    /// Writes these bytes, of which the first `count` mean something: a copy of a fixed length is no call.
    #[inline(always)]
    pub(super) fn put<const N: usize>(&mut self, bytes: &[u8; N], count: usize) {
        self.bytes[self.at..self.at + N].copy_from_slice(bytes);
        self.at += count;
    }

    /// A number.
    #[inline(always)]
    pub(super) fn int(&mut self, number: i64) {
        match number {
            // Half of a row's numbers.
            0..=9 => self.put(&[b'0' + number as u8, b','], 2),
            -1 => self.put(b"-1,", 3),
            _ => self.long(number),
        }
    }

    /// Numbers that may be those that were said last.
    #[inline(always)]
    pub(super) fn again<const N: usize, const TEXT: usize>(
        &mut self,
        numbers: [i64; N],
        said: &mut Numbers<N, TEXT>,
    ) {
        if said.numbers == numbers {
            return self.put(&said.text, said.length);
        }
        self.anew(numbers, said);
    }

    /// Numbers that were not those that were said last, and are now.
    fn anew<const N: usize, const TEXT: usize>(&mut self, numbers: [i64; N], said: &mut Numbers<N, TEXT>) {
        let from = self.at;
        numbers.into_iter().for_each(|number| self.int(number));
        said.keep(numbers, self.written(from), self.at - from);
    }

    /// A number that may have been said: a small one is written sooner than found.
    #[inline(always)]
    pub(super) fn int_again(&mut self, number: i64, said: &mut One) {
        match number {
            -1..=9 => self.int(number),
            _ => self.again([number], said),
        }
    }

    /// The number that follows the one that was said last, as a rule.
    #[inline(always)]
    pub(super) fn next(&mut self, number: i64, said: &mut One) {
        said.count_to(number);
        self.again([number], said);
    }

    /// A number whose digits before the last eight were said last, as a rule: a time, an address.
    #[inline(always)]
    pub(super) fn int_shared_prefix(&mut self, number: i64, above: &mut One) {
        if number < NINE_DIGITS.cast_signed() {
            return self.int(number);
        }
        let number = number.cast_unsigned();
        self.again([(number / NINE_DIGITS).cast_signed()], above);
        // Without the comma that ends a number.
        self.at -= 1;
        let low = u128::from(ascii(digits(number % NINE_DIGITS))) | u128::from(b',') << 64;
        self.put(&low.to_le_bytes(), 9);
    }

    /// A number that is not 0.
    fn long(&mut self, number: i64) {
        if number < 0 {
            self.put(b"-", 1);
        }
        let number = number.unsigned_abs();
        if number < NINE_DIGITS {
            let digits = digits(number);
            let zeros = digits.trailing_zeros() / 8;
            // Behind eight digits at most.
            let comma = u128::from(b',') << (64 - 8 * zeros);
            let text = u128::from(ascii(digits) >> (8 * zeros)) | comma;
            return self.put(&text.to_le_bytes(), 9 - zeros as usize);
        }
        let (above, low) = (number / NINE_DIGITS, number % NINE_DIGITS);
        if above < NINE_DIGITS {
            let digits = digits(above);
            let zeros = digits.trailing_zeros() / 8;
            let text = u128::from(ascii(digits)) | u128::from(ascii(self::digits(low))) << 64;
            self.put(&(text >> (8 * zeros)).to_le_bytes(), 16 - zeros as usize);
            return self.put(b",", 1);
        }
        // What stands before the last sixteen digits, without the comma that ends a number.
        self.int((above / NINE_DIGITS).cast_signed());
        self.at -= 1;
        self.put(&ascii(digits(above % NINE_DIGITS)).to_le_bytes(), 8);
        self.put(&ascii(digits(low)).to_le_bytes(), 8);
        self.put(b",", 1);
    }

    /// A word that wants no quotes.
    #[inline(always)]
    pub(super) fn word(&mut self, word: &Word) {
        self.put(&word.text, word.length);
    }

    /// A text.
    pub(super) fn text(&mut self, text: &str) {
        let from = text.as_bytes();
        let to = &mut self.bytes[self.at..self.at + from.len()];
        let plain = match from.len() {
            0 => false,
            1..4 => copy::<1>(from, to),
            4..8 => copy::<4>(from, to),
            8..16 => copy::<8>(from, to),
            _ => copy::<16>(from, to),
        };
        if plain || !from.is_empty() && !from.iter().any(|byte| b",\"\n\r".contains(byte)) {
            self.at += from.len();
        } else {
            self.quoted(from);
        }
        self.put(b",", 1);
    }

    #[cold]
    fn quoted(&mut self, text: &[u8]) {
        self.put(b"\"", 1);
        for byte in text {
            if *byte == b'"' {
                self.put(b"\"", 1);
            }
            self.put(&[*byte], 1);
        }
        self.put(b"\"", 1);
    }

    /// Where the line ends: the comma behind the last field becomes its end.
    pub(super) fn end(self) -> usize {
        if let Some(last) = self.bytes[..self.at].last_mut() {
            *last = b'\n';
        }
        self.at
    }
}

/// Copies `from`, which has `N` bytes at least, and tells whether all of it is plain. The last `N` are copied
/// whatever was copied before them, so that few bytes are taken by themselves.
#[inline(always)]
fn copy<const N: usize>(from: &[u8], to: &mut [u8]) -> bool {
    let mut plain = true;
    let mut put = |from: &[u8; N], to: &mut [u8; N]| {
        plain &= is_plain(from);
        *to = *from;
    };
    for (from, to) in from.as_chunks::<N>().0.iter().zip(to.as_chunks_mut::<N>().0) {
        put(from, to);
    }
    if let (Some(from), Some(to)) = (from.last_chunk::<N>(), to.last_chunk_mut::<N>()) {
        put(from, to);
    }
    plain
}

/// Do these bytes want no quotes for sure? Those below `#` do (quotes and line ends) or are rare (spaces), and so do
/// commas. Written for the compiler, which asks all of them at once.
#[inline(always)]
fn is_plain<const N: usize>(bytes: &[u8; N]) -> bool {
    bytes.iter().fold(0, |odd, byte| odd | u8::from(*byte < b'#') | u8::from(*byte == b',')) == 0
}

/// The eight digits of a number below 10^8, the first in the lowest byte: halves, then pairs, then single ones, each
/// by one multiplication that divides all of them at once.
#[inline(always)]
fn digits(number: u64) -> u64 {
    let fours = (number / 10_000) | (number % 10_000) << 32;
    let hundreds = (fours * 10_486) >> 20 & 0x0000_007F_0000_007F;
    let pairs = hundreds | (fours - 100 * hundreds) << 16;
    let tens = (pairs * 103) >> 10 & 0x000F_000F_000F_000F;
    tens | (pairs - 10 * tens) << 8
}

/// Digits as text, the first in the lowest byte.
#[inline(always)]
fn ascii(digits: u64) -> u64 {
    digits | u64::from_le_bytes([b'0'; 8])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A line of these numbers.
    fn line_of(numbers: &[i64], write: impl Fn(&mut Line<'_>, i64)) -> String {
        let mut bytes = vec![0; (numbers.len() + 4) * FIELD];
        let mut line = Line::new(&mut bytes, 0);
        numbers.iter().for_each(|number| write(&mut line, *number));
        let end = line.end();
        String::from_utf8(bytes[..end].to_vec()).unwrap()
    }

    /// Numbers of every length, those around a power of ten among them.
    fn numbers() -> Vec<i64> {
        let mut numbers =
            vec![0, i64::MAX, i64::MIN, 100_000_000, 10_000_000_000_000_000, 1_000_000_010_000_000];
        let mut number = 0_i64;
        for digit in [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 0, 0, 9, 9, 1, 0, 5, 7] {
            number = number * 10 + digit;
            let power = 10_i64.pow(number.ilog10());
            numbers.extend([number, -number, number - 1, power - 1, power, power + 1, -power]);
        }
        numbers
    }

    #[test]
    fn numbers_of_every_length_are_written_whole() {
        let numbers = numbers();
        let expected: Vec<String> = numbers.iter().map(i64::to_string).collect();
        let expected = expected.join(",") + "\n";
        assert_eq!(line_of(&numbers, |line, number| line.int(number)), expected);
        // Every pair of digits in every place.
        for low in 0..10_000 {
            let number = low * 10_000 + (9_999 - low);
            assert_eq!(line_of(&[number], |line, number| line.int(number)), format!("{number}\n"));
        }
    }

    #[test]
    fn what_was_said_before_changes_nothing() {
        // Each twice and with the one that follows it, so that each way is gone after each other.
        let some: Vec<i64> =
            numbers().into_iter().flat_map(|number| [number, number, number.saturating_add(1)]).collect();
        let expected: Vec<String> = some.iter().map(i64::to_string).collect();
        let expected = expected.join(",") + "\n";
        let ways: [fn(&mut Line<'_>, i64, &mut One); 3] = [
            |line, number, said| line.int_again(number, said),
            |line, number, said| line.next(number, said),
            |line, number, said| line.int_shared_prefix(number, said),
        ];
        for how in ways {
            let said = std::cell::RefCell::new(One::default());
            let write = |line: &mut Line<'_>, number| how(line, number, &mut said.borrow_mut());
            assert_eq!(line_of(&some, write), expected);
        }
        for counted in [0..2_100, 99_999_000..100_001_000] {
            let said = std::cell::RefCell::new(One::default());
            let numbers: Vec<i64> = counted.clone().collect();
            let expected: Vec<String> = counted.map(|number| number.to_string()).collect();
            let written = line_of(&numbers, |line, number| line.next(number, &mut said.borrow_mut()));
            assert_eq!(written, expected.join(",") + "\n");
        }
    }
}
