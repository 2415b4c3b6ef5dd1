//! One line of the CSV, whose fields are written in order.

use super::field_cache::{CachedWord, Counter, Near, NearRecent, Numbers};
use crate::columns::{COLUMNS, MAX_BYTES, MAX_NUMBER};
use crate::text::NONE;

/// The number of bytes to reserve for a field in addition to its text. A number takes at most 20 bytes and a
/// comma, and copies of a fixed size write a few more bytes. Events and categories need no more, because
/// their texts are short.
const FIELD: usize = 32;

/// The maximum length of a line, a power of two.
const LINE: usize = 4096;

/// The space for a line: a copy of a fixed size may exceed the line.
pub(super) const SPACE: usize = LINE + 128;

/// 10^8, the smallest number with nine digits.
pub(super) const NINE_DIGITS: u64 = 100_000_000;
const NINE_DIGITS_SIGNED: i64 = NINE_DIGITS.cast_signed();

/// The maximum length of a line's texts, together. Each of their bytes may be a quote, which is doubled. Cached texts
/// do not count: [`FIELD`] leaves space for them, because numbers and words take less.
const TEXTS: usize = (LINE - COLUMNS.len() * FIELD) / 2;

/// 10^16. A smaller number never exceeds the bound of its column. [`LineBuffer::long`] formats these huge
/// numbers in a separate branch and sets a flag there, so usual numbers cost no additional check.
pub(super) const HUGE: u64 = NINE_DIGITS * NINE_DIGITS;
const _: () = assert!(HUGE < MAX_BYTES && HUGE < MAX_NUMBER);

/// A line under construction, with less than [`LINE`] bytes.
pub(super) struct LineBuffer<'a> {
    bytes: &'a mut [u8; SPACE],
    at: Position,
}

/// A position in a line.
#[derive(Clone, Copy)]
struct Position {
    /// The number of bytes so far.
    length: usize,
    /// The number of bytes of texts so far; `usize::MAX` after a number of at least [`HUGE`].
    texts: usize,
}

impl<'a> LineBuffer<'a> {
    /// Starts a line at offset `from` of `bytes`, which has [`SPACE`] bytes from there on.
    #[inline(always)]
    pub(super) fn new(bytes: &'a mut [u8], from: usize) -> Self {
        let bytes = bytes[from..].first_chunk_mut().expect("the buffer has space for a line");
        LineBuffer { bytes, at: Position { length: 0, texts: 0 } }
    }

    /// Runs `write` as a function of its own, for fields that are rarely needed. That function gets and returns the
    /// position by value, so the position stays in registers while the other fields are written.
    #[inline(always)]
    pub(super) fn apart(&mut self, write: impl FnOnce(&mut LineBuffer<'_>)) {
        #[inline(never)]
        fn run(bytes: &mut [u8; SPACE], at: Position, write: impl FnOnce(&mut LineBuffer<'_>)) -> Position {
            let mut line = LineBuffer { bytes, at };
            write(&mut line);
            line.at
        }
        self.at = run(self.bytes, self.at, write);
    }

    /// Returns true if the line is not usable: it has too long texts, or a number of at least [`HUGE`], which may
    /// exceed the bound of its column. Cached numbers are not checked, so the caches must be emptied after such a line.
    #[inline(always)]
    pub(super) fn is_rare(&self) -> bool {
        self.at.texts > TEXTS
    }

    /// Returns the number of bytes so far. The remainder is always the number itself; with it, the compiler knows
    /// that copies to this offset stay within the space, and does not check each.
    #[inline(always)]
    pub(super) fn length(&self) -> usize {
        self.at.length % LINE
    }

    /// Returns the `N` bytes from offset `from` on, which may include bytes after the written part.
    #[inline(always)]
    pub(super) fn written<const N: usize>(&self, from: usize) -> [u8; N] {
        let mut bytes = [0; N];
        let from = from % LINE;
        bytes.copy_from_slice(&self.bytes[from..from + N]);
        bytes
    }

    /// Appends the first `count` bytes of `bytes`. All `N` bytes are copied, because the compiler replaces a
    /// copy of fixed length by a few stores.
    #[inline(always)]
    pub(super) fn put<const N: usize>(&mut self, bytes: &[u8; N], count: usize) {
        const { assert!(N <= SPACE - LINE) };
        let at = self.length();
        self.bytes[at..at + N].copy_from_slice(bytes);
        self.at.length += count;
    }

    /// Same as [`LineBuffer::put`], but copies fewer bytes if `count` is small.
    #[inline(always)]
    pub(super) fn put_cached<const N: usize>(&mut self, bytes: &[u8; N], count: usize) {
        match (bytes.first_chunk::<32>(), bytes.first_chunk::<64>()) {
            (Some(first), _) if count <= 32 => self.put(first, count),
            (_, Some(first)) if count <= 64 => self.put(first, count),
            _ => self.put(bytes, count),
        }
    }

    /// Writes a number.
    #[inline(always)]
    pub(super) fn int(&mut self, number: i64) {
        match number {
            // Half of the numbers in a row are single digits.
            0..=9 => self.put(&[b'0' + number as u8, b','], 2),
            -1 => self.put(b"-1,", 3),
            _ => self.apart(move |line| line.long(number)),
        }
    }

    /// Writes a number that usually has one to eight digits.
    #[inline(always)]
    pub(super) fn id(&mut self, number: i64) {
        match number {
            1..NINE_DIGITS_SIGNED => self.short(number.cast_unsigned()),
            _ => self.apart(move |line| line.int(number)),
        }
    }

    /// Writes a number from 1 to 10^8 - 1.
    #[inline(always)]
    fn short(&mut self, number: u64) {
        let digits = digits(number);
        let zeros = digits.trailing_zeros() / 8;
        self.put(&(ascii(digits) >> (8 * zeros)).to_le_bytes(), 8 - zeros as usize);
        self.put(b",", 1);
    }

    /// Writes numbers that usually equal those in `cache`.
    #[inline(always)]
    pub(super) fn numbers<const N: usize, const TEXT: usize>(
        &mut self,
        numbers: [i64; N],
        cache: &mut Numbers<N, TEXT>,
    ) {
        // Number by number, because the numbers are in registers.
        if !numbers.iter().zip(&cache.numbers).all(|(number, cached)| number == cached) {
            return self.apart(move |line| {
                let from = line.length();
                numbers.into_iter().for_each(|number| line.int(number));
                *cache = Numbers { numbers, text: line.written(from), length: line.length() - from };
            });
        }
        self.put_cached(&cache.text, cache.length);
    }

    /// Writes a number that usually is the number in `cache` plus 1.
    #[inline(always)]
    pub(super) fn counter(&mut self, number: i64, cache: &mut Counter) {
        if !cache.count_to(number) {
            return self.apart(move |line| {
                let from = line.length();
                line.int(number);
                *cache = Counter::new(number, line.written(from), line.length() - from);
            });
        }
        self.put(&cache.text, cache.length);
    }

    /// Writes a number, usually a time, an address or a total, that usually is the number in `cache`, or has the same
    /// digits before the last eight.
    #[inline(always)]
    pub(super) fn near(&mut self, number: i64, cache: &mut Near) {
        if number != cache.number {
            let (high, low) = (number.cast_unsigned() / NINE_DIGITS, number.cast_unsigned() % NINE_DIGITS);
            if high != cache.high {
                return self.apart(move |line| {
                    let from = line.length();
                    line.int(number);
                    *cache = Near::new(number, line.written(from), line.length() - from);
                });
            }
            cache.set_low(number, with_comma(ascii(digits(low))));
        }
        self.put(&cache.text, cache.length);
    }

    /// Same as [`LineBuffer::near`], with several recent numbers.
    #[inline(always)]
    pub(super) fn near_recent(&mut self, number: i64, cache: &mut NearRecent) {
        self.near(number, cache.of(number.cast_unsigned() / NINE_DIGITS));
    }

    /// Writes a nonzero number of any length.
    #[inline(always)]
    fn long(&mut self, number: i64) {
        if number < 0 {
            self.put(b"-", 1);
        }
        let number = number.unsigned_abs();
        let (above, low) = (number / NINE_DIGITS, number % NINE_DIGITS);
        if above == 0 {
            return self.short(low);
        }
        let last = with_comma(ascii(digits(low))).to_le_bytes();
        if above < NINE_DIGITS {
            let digits = digits(above);
            let zeros = digits.trailing_zeros() / 8;
            self.put(&(ascii(digits) >> (8 * zeros)).to_le_bytes(), 8 - zeros as usize);
            return self.put(&last, 9);
        }
        self.at.texts = usize::MAX;
        // Writes the digits before the last sixteen, without the comma after them.
        self.int((above / NINE_DIGITS).cast_signed());
        self.at.length -= 1;
        self.put(&ascii(digits(above % NINE_DIGITS)).to_le_bytes(), 8);
        self.put(&last, 9);
    }

    /// Writes a precomputed word.
    #[inline(always)]
    pub(super) fn word(&mut self, word: &CachedWord) {
        self.put(&word.text, word.length);
    }

    /// Writes a text, with quotes if it needs them.
    pub(super) fn text(&mut self, text: &str) {
        let from = text.as_bytes();
        self.at.texts = self.at.texts.saturating_add(from.len());
        if self.is_rare() {
            return;
        }
        let at = self.length();
        let to = &mut self.bytes[at..at + from.len()];
        let plain = match from.len() {
            0 => false,
            1..4 => copy::<1>(from, to),
            4..8 => copy::<4>(from, to),
            8..16 => copy::<8>(from, to),
            _ => copy::<16>(from, to),
        };
        if plain || !from.is_empty() && !from.iter().any(|byte| b",\"\n\r".contains(byte)) {
            self.at.length += from.len();
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

    /// Ends the line: replaces the comma after the last field by a newline. Returns the length of the line.
    #[inline(always)]
    pub(super) fn end(self) -> usize {
        let length = self.length();
        self.bytes[length.saturating_sub(1)] = b'\n';
        length
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
/// into halves, pairs and digits; one multiplication divides all parts at once. To split `n` at `d` is
/// `n / d | (n % d) << bits`, which equals `(n << bits) - n / d * ((d << bits) - 1)`.
#[inline(always)]
fn digits(number: u64) -> u64 {
    let fours = (number << 32) - number / 10_000 * ((10_000 << 32) - 1);
    let hundreds = (fours * 10_486) >> 20 & 0x0000_007F_0000_007F;
    let pairs = (fours << 16) - hundreds * ((100 << 16) - 1);
    let tens = (pairs * 103) >> 10 & 0x000F_000F_000F_000F;
    (pairs << 8) - tens * ((10 << 8) - 1)
}

/// Returns eight digits with a comma after them.
#[inline(always)]
fn with_comma(digits: u64) -> u128 {
    u128::from(digits) | u128::from(b',') << 64
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
        let mut text = String::new();
        for number in numbers {
            let mut bytes = [0; SPACE];
            let mut line = LineBuffer::new(&mut bytes, 0);
            write(&mut line, *number);
            let length = line.end();
            text += str::from_utf8(&bytes[..length - 1]).unwrap();
            text.push(',');
        }
        text.pop();
        text + "\n"
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
        let cache = std::cell::RefCell::new((Counter::default(), Near::default()));
        assert_eq!(line_of(&some, |line, number| line.counter(number, &mut cache.borrow_mut().0)), expected);
        assert_eq!(line_of(&some, |line, number| line.near(number, &mut cache.borrow_mut().1)), expected);
        for counted in [0..2_100, 99_999_000..100_001_000] {
            let cache = std::cell::RefCell::new(Counter::default());
            let numbers: Vec<i64> = counted.clone().collect();
            let expected: Vec<String> = counted.map(|number| number.to_string()).collect();
            let written = line_of(&numbers, |line, number| line.counter(number, &mut cache.borrow_mut()));
            assert_eq!(written, expected.join(",") + "\n");
        }
    }
}
