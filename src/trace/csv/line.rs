//! One line of the CSV, whose fields are written in order.

use super::field_cache::{CachedWord, Numbers, One};
use crate::columns::{MAX_BYTES, MAX_NUMBER};
use crate::text::NONE;

/// The number of bytes to reserve for a field in addition to its text. A number takes at most 20 bytes and a
/// comma, and copies of a fixed size write a few more bytes. Events and categories need no more, because
/// their texts are short.
pub(super) const FIELD: usize = 32;

/// 10^8, the smallest number with nine digits.
const NINE_DIGITS: u64 = 100_000_000;

/// 10^16. A smaller number never exceeds the bound of its column. [`LineBuffer::long`] formats these huge
/// numbers in a separate branch and sets a flag there, so usual numbers cost no additional check.
const HUGE: u64 = NINE_DIGITS * NINE_DIGITS;
const _: () = assert!(HUGE < MAX_BYTES && HUGE < MAX_NUMBER);

/// A line under construction.
pub(super) struct LineBuffer<'a> {
    /// A buffer with space for the whole line.
    bytes: &'a mut [u8],
    at: usize,
    huge: bool,
}

impl<'a> LineBuffer<'a> {
    /// Starts a line at offset `at` of `bytes`, which has space for it.
    pub(super) fn new(bytes: &'a mut [u8], at: usize) -> Self {
        LineBuffer { bytes, at, huge: false }
    }

    /// Returns true if a number of at least [`HUGE`] was formatted, which may exceed the bound of its column.
    /// Cached numbers are not checked: [`FieldCache::forget_numbers`] keeps huge numbers out of the caches.
    ///
    /// [`FieldCache::forget_numbers`]: super::field_cache::FieldCache::forget_numbers
    pub(super) fn has_huge(&self) -> bool {
        self.huge
    }

    /// Returns the offset of the next field.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// Returns the `N` bytes from offset `from` on, which may include bytes after the written part.
    #[inline(always)]
    pub(super) fn written<const N: usize>(&self, from: usize) -> [u8; N] {
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.bytes[from..from + N]);
        bytes
    }

    /// Appends the first `count` bytes of `bytes`. All `N` bytes are copied, because the compiler replaces a
    /// copy of fixed length by a few stores.
    #[inline(always)]
    pub(super) fn put<const N: usize>(&mut self, bytes: &[u8; N], count: usize) {
        self.bytes[self.at..self.at + N].copy_from_slice(bytes);
        self.at += count;
    }

    /// Writes a number.
    #[inline(always)]
    pub(super) fn int(&mut self, number: i64) {
        match number {
            // Half of the numbers in a row are single digits.
            0..=9 => self.put(&[b'0' + number as u8, b','], 2),
            -1 => self.put(b"-1,", 3),
            _ => self.long(number),
        }
    }

    /// Writes numbers that usually equal those in `cache`.
    #[inline(always)]
    pub(super) fn numbers<const N: usize, const TEXT: usize>(
        &mut self,
        numbers: [i64; N],
        cache: &mut Numbers<N, TEXT>,
    ) {
        if cache.numbers == numbers {
            return self.put(&cache.text, cache.length);
        }
        self.write_and_keep(numbers, cache);
    }

    fn write_and_keep<const N: usize, const TEXT: usize>(
        &mut self,
        numbers: [i64; N],
        cache: &mut Numbers<N, TEXT>,
    ) {
        let from = self.at;
        numbers.into_iter().for_each(|number| self.int(number));
        cache.keep(numbers, self.written(from), self.at - from);
    }

    /// Writes a number that usually equals the number in `cache`. Formatting a small number is faster than
    /// comparing it.
    #[inline(always)]
    pub(super) fn int_repeated(&mut self, number: i64, cache: &mut One) {
        match number {
            -1..=9 => self.int(number),
            _ => self.numbers([number], cache),
        }
    }

    /// Writes a number that usually has the magnitude of the number in `cache`. The signs may differ.
    #[inline(always)]
    pub(super) fn magnitude_repeated(&mut self, number: i64, cache: &mut One) {
        match number.checked_neg() {
            Some(magnitude @ 1..) => {
                self.put(b"-", 1);
                self.int_repeated(magnitude, cache);
            }
            _ => self.int_repeated(number, cache),
        }
    }

    /// Writes a number that usually is the number in `cache` plus 1.
    #[inline(always)]
    pub(super) fn counter(&mut self, number: i64, cache: &mut One) {
        cache.count_to(number);
        self.numbers([number], cache);
    }

    /// Writes a number, usually a time or an address, whose digits before the last eight usually equal those
    /// in `prefix`.
    #[inline(always)]
    pub(super) fn int_shared_prefix(&mut self, number: i64, prefix: &mut One) {
        if number < NINE_DIGITS.cast_signed() {
            return self.int(number);
        }
        let number = number.cast_unsigned();
        let high = [(number / NINE_DIGITS).cast_signed()];
        if prefix.numbers == high {
            self.put(&prefix.text, prefix.length);
        } else {
            self.huge |= number >= HUGE;
            self.write_and_keep(high, prefix);
        }
        // Removes the comma after the number.
        self.at -= 1;
        let low = u128::from(ascii(digits(number % NINE_DIGITS))) | u128::from(b',') << 64;
        self.put(&low.to_le_bytes(), 9);
    }

    /// Writes a nonzero number of any length.
    fn long(&mut self, number: i64) {
        if number < 0 {
            self.put(b"-", 1);
        }
        let number = number.unsigned_abs();
        if number < NINE_DIGITS {
            let digits = digits(number);
            let zeros = digits.trailing_zeros() / 8;
            // Puts a comma after the digits. There are at most eight, so a comma fits into the same store.
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
        self.huge = true;
        // Writes the digits before the last sixteen, without the comma after them.
        self.int((above / NINE_DIGITS).cast_signed());
        self.at -= 1;
        self.put(&ascii(digits(above % NINE_DIGITS)).to_le_bytes(), 8);
        self.put(&ascii(digits(low)).to_le_bytes(), 8);
        self.put(b",", 1);
    }

    /// Writes a precomputed word.
    #[inline(always)]
    pub(super) fn word(&mut self, word: &CachedWord) {
        self.put(&word.text, word.length);
    }

    /// Writes a text, with quotes if it needs them.
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
        } else if from.is_empty() {
            // A text field is never empty: an empty text is written as the placeholder.
            return self.word(&const { CachedWord::new(NONE) });
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

    /// Ends the line: replaces the comma after the last field by a newline. Returns the offset after the
    /// line.
    pub(super) fn end(self) -> usize {
        if let Some(last) = self.bytes[..self.at].last_mut() {
            *last = b'\n';
        }
        self.at
    }
}

/// Copies `from`, which has at least `N` bytes, and returns true if all of it is plain. The last `N` bytes
/// are copied as one chunk, which may overlap the previous chunk, so no byte is copied individually.
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

/// Returns true if these bytes certainly need no quotes. A comma or a byte below `#` (quotes, line ends,
/// spaces) may need them. The compiler vectorizes this function.
#[inline(always)]
fn is_plain<const N: usize>(bytes: &[u8; N]) -> bool {
    bytes.iter().fold(0, |odd, byte| odd | u8::from(*byte < b'#') | u8::from(*byte == b',')) == 0
}

/// Returns the eight digits of a number below 10^8, the first digit in the lowest byte. The number is split
/// into halves, pairs and digits; one multiplication divides all parts at once.
#[inline(always)]
fn digits(number: u64) -> u64 {
    let fours = (number / 10_000) | (number % 10_000) << 32;
    let hundreds = (fours * 10_486) >> 20 & 0x0000_007F_0000_007F;
    let pairs = hundreds | (fours - 100 * hundreds) << 16;
    let tens = (pairs * 103) >> 10 & 0x000F_000F_000F_000F;
    tens | (pairs - 10 * tens) << 8
}

/// Converts digits to ASCII, the first digit in the lowest byte.
#[inline(always)]
fn ascii(digits: u64) -> u64 {
    digits | u64::from_le_bytes([b'0'; 8])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes a line with these numbers.
    fn line_of(numbers: &[i64], write: impl Fn(&mut LineBuffer<'_>, i64)) -> String {
        let mut bytes = vec![0; (numbers.len() + 4) * FIELD];
        let mut line = LineBuffer::new(&mut bytes, 0);
        numbers.iter().for_each(|number| write(&mut line, *number));
        let end = line.end();
        String::from_utf8(bytes[..end].to_vec()).unwrap()
    }

    /// Returns numbers of every length, including those around the powers of ten.
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
        // Numbers in which each pair of digits occurs at each position.
        for low in 0..10_000 {
            let number = low * 10_000 + (9_999 - low);
            assert_eq!(line_of(&[number], |line, number| line.int(number)), format!("{number}\n"));
        }
    }

    #[test]
    fn cached_numbers_are_written_as_uncached_ones() {
        // Each number twice, followed by its successor, so that hits, misses and increments alternate.
        let some: Vec<i64> =
            numbers().into_iter().flat_map(|number| [number, number, number.saturating_add(1)]).collect();
        let expected: Vec<String> = some.iter().map(i64::to_string).collect();
        let expected = expected.join(",") + "\n";
        let ways: [fn(&mut LineBuffer<'_>, i64, &mut One); 4] = [
            |line, number, cache| line.int_repeated(number, cache),
            |line, number, cache| line.magnitude_repeated(number, cache),
            |line, number, cache| line.counter(number, cache),
            |line, number, cache| line.int_shared_prefix(number, cache),
        ];
        for how in ways {
            let cache = std::cell::RefCell::new(One::default());
            let write = |line: &mut LineBuffer<'_>, number| how(line, number, &mut cache.borrow_mut());
            assert_eq!(line_of(&some, write), expected);
        }
        for counted in [0..2_100, 99_999_000..100_001_000] {
            let cache = std::cell::RefCell::new(One::default());
            let numbers: Vec<i64> = counted.clone().collect();
            let expected: Vec<String> = counted.map(|number| number.to_string()).collect();
            let written = line_of(&numbers, |line, number| line.counter(number, &mut cache.borrow_mut()));
            assert_eq!(written, expected.join(",") + "\n");
        }
    }
}
