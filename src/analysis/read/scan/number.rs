//! Parses decimal integers.

use super::cpu::Cpu;

/// Returns the integer `block[from..to]`, or `None` if it is not a number or its absolute value exceeds
/// `most`. `most` must have more than sixteen digits, because numbers of up to sixteen digits are not
/// compared with it.
#[inline(always)]
pub(super) fn int_within(cpu: impl Cpu, block: &[u8], from: usize, to: usize, most: u64) -> Option<i64> {
    let negative = block.get(from) == Some(&b'-');
    match digits_within(cpu, block, from + usize::from(negative), to) {
        Some(number) => Some(if negative { -number } else { number }),
        None => int(&block[from..to], most),
    }
}

/// Same as [`int_within`], but faster for integers that are not negative.
#[inline(always)]
pub(super) fn natural_within(cpu: impl Cpu, block: &[u8], from: usize, to: usize, most: u64) -> Option<i64> {
    match digits_within(cpu, block, from, to) {
        Some(number) => Some(number),
        None => int(&block[from..to], most),
    }
}

/// Returns the number `block[from..to]` if it has 1 to 16 digits. This loads the sixteen bytes that end at
/// `to`, which may include bytes before the number, so no step depends on the number of digits.
#[inline(always)]
fn digits_within(cpu: impl Cpu, block: &[u8], from: usize, to: usize) -> Option<i64> {
    let digits = to - from;
    // Leave the rare cases to the caller: a field that ends before offset 16 of the block, an empty field,
    // and a number of more than sixteen digits.
    let sixteen = block[..to].last_chunk::<16>()?;
    if digits.wrapping_sub(1) >= 16 {
        return None;
    }
    cpu.digits(sixteen, digits)
}

/// Same as [`int_within`], but faster for integers of one digit.
#[inline(always)]
pub(super) fn digit_within(block: &[u8], from: usize, to: usize, most: u64) -> Option<i64> {
    let digit = block.get(from).map_or(0, |digit| digit.wrapping_sub(b'0'));
    if to == from + 1 && digit <= 9 {
        return Some(i64::from(digit));
    }
    int(&block[from..to], most)
}

/// Returns the integer of any field, or `None` if it is not a number or its absolute value exceeds `most`.
#[cold]
#[inline(never)]
pub(super) fn int(bytes: &[u8], most: u64) -> Option<i64> {
    // Rust's parser would accept a plus sign.
    let number: i64 = std::str::from_utf8(bytes).ok().filter(|text| !text.starts_with('+'))?.parse().ok()?;
    (number.unsigned_abs() <= most).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::read::scan::cpu::{self, Work};

    /// Parses `block[from..to]` with the two parsers that use the instructions of a [`cpu::Cpu`].
    struct Numbers<'a>(&'a [u8], usize, usize, &'a mut Vec<Option<i64>>);

    impl Work for Numbers<'_> {
        #[inline(always)]
        fn on(self, cpu: impl Cpu) {
            let Numbers(block, from, to, found) = self;
            found.push(int_within(cpu, block, from, to, MOST));
            found.push(natural_within(cpu, block, from, to, MOST));
        }
    }

    const MOST: u64 = u64::MAX;

    /// Asserts that every parser returns the same for `block[from..to]`, with the portable implementation and
    /// with the best one for this processor. Returns this result.
    fn all(block: &[u8], from: usize, to: usize) -> Option<i64> {
        let mut found = vec![int(&block[from..to], MOST), digit_within(block, from, to, MOST)];
        Numbers(block, from, to, &mut found).on(cpu::Plain);
        cpu::run(Numbers(block, from, to, &mut found));
        assert!(found.iter().all(|number| *number == found[0]), "{found:?}");
        found[0]
    }

    #[test]
    fn integers_are_parsed_up_to_the_largest_that_fits() {
        assert_eq!(all(b"0", 0, 1), Some(0));
        assert_eq!(all(b"-1", 0, 2), Some(-1));
        for number in [i64::MIN, i64::MAX] {
            let text = number.to_string();
            assert_eq!(all(text.as_bytes(), 0, text.len()), Some(number));
        }
        for bad in [&b""[..], b"-", b"+1", b"1.0", b" 1", b"9223372036854775808", b"1e3", b"--1", b":", b"/"]
        {
            for before in ["", ",", "1234567890123456,"] {
                let block = [before.as_bytes(), bad, b",77777777"].concat();
                assert_eq!(all(&block, before.len(), before.len() + bad.len()), None, "{bad:?}");
            }
        }
        assert_eq!(int(b"-6", 5), None);
    }

    #[test]
    fn integers_are_parsed_whatever_bytes_surround_them() {
        let mut number = 0_i64;
        for digit in (1..=9).chain([0, 9, 9, 9, 1, 2, 3, 4, 5]) {
            number = number * 10 + digit;
            for number in [number, -number] {
                for before in ["", "9", "9,", "99999999,", "9999999999999999999,", "-------------------,"] {
                    let block = format!("{before}{number},99999999");
                    let to = before.len() + number.to_string().len();
                    assert_eq!(all(block.as_bytes(), before.len(), to), Some(number), "{block}");
                }
            }
        }
    }
}
