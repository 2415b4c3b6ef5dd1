//! Arithmetic on small data of known value: what a reduction over ranks or a comparison gives.

use std::ffi::c_int;

/// Bytes of one element of an `ncclDataType_t`.
pub(crate) fn width(data_type: c_int) -> usize {
    match data_type {
        2 | 3 | 7 => 4,
        4 | 5 | 8 => 8,
        6 | 9 => 2,
        _ => 1,
    }
}

/// An element, wide enough to add many of its kind up.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Number {
    Whole(i128),
    Real(f64),
}

fn decode(data_type: c_int, bytes: &[u8]) -> Number {
    use Number::{Real, Whole};
    let fixed = |length: usize| {
        let mut all = [0u8; 8];
        all[..length].copy_from_slice(&bytes[..length]);
        u64::from_le_bytes(all)
    };
    match data_type {
        0 => Whole(i128::from(bytes[0] as i8)),
        2 => Whole(i128::from(fixed(4) as u32 as i32)),
        3 => Whole(i128::from(fixed(4))),
        4 => Whole(i128::from(fixed(8) as i64)),
        5 => Whole(i128::from(fixed(8))),
        6 => Real(half_to_f64(fixed(2) as u16)),
        7 => Real(f64::from(f32::from_bits(fixed(4) as u32))),
        8 => Real(f64::from_bits(fixed(8))),
        9 => Real(f64::from(f32::from_bits((fixed(2) as u32) << 16))),
        _ => Whole(i128::from(bytes[0])),
    }
}

fn encode(data_type: c_int, number: Number, out: &mut [u8]) {
    let bits = match (number, data_type) {
        (Number::Whole(whole), _) => whole as u64,
        (Number::Real(real), 6) => u64::from(f64_to_half(real)),
        (Number::Real(real), 7) => u64::from((real as f32).to_bits()),
        (Number::Real(real), 9) => u64::from((real as f32).to_bits() >> 16),
        (Number::Real(real), _) => real.to_bits(),
    };
    let length = out.len();
    out.copy_from_slice(&bits.to_le_bytes()[..length]);
}

fn half_to_f64(bits: u16) -> f64 {
    let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    sign * match exponent {
        0 => fraction * 2f64.powi(-24),
        31 if fraction == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        _ => (1.0 + fraction / 1024.0) * 2f64.powi(exponent - 15),
    }
}

fn f64_to_half(real: f64) -> u16 {
    let sign = if real.is_sign_negative() { 0x8000 } else { 0 };
    let size = real.abs();
    if size.is_nan() {
        return sign | 0x7e00;
    }
    if size >= 65520.0 {
        return sign | 0x7c00;
    }
    // The step between neighbours at this size; below the smallest normal number it stays the same.
    let exponent = if size < 2f64.powi(-14) { -14 } else { size.log2().floor() as i32 };
    let steps = (size / 2f64.powi(exponent - 10)).round_ties_even() as u16;
    // As many steps as a normal number has carry into its exponent by themselves.
    sign | (((exponent + 14) as u16) * 1024 + steps)
}

/// What two elements are compared for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Comparison {
    AtLeast,
    More,
    AtMost,
    Less,
}

impl Comparison {
    /// As PyTorch numbers them.
    pub(crate) fn numbered(number: i32) -> Option<Self> {
        [Self::AtLeast, Self::More, Self::AtMost, Self::Less].get(usize::try_from(number).ok()?).copied()
    }
}

/// Compares two buffers of elements: a byte for each pair, 1 where it holds.
pub(crate) fn compare(data_type: c_int, comparison: Comparison, left: &[u8], right: &[u8]) -> Vec<u8> {
    let width = width(data_type);
    let holds = |(left, right): (&[u8], &[u8])| {
        let order = match (decode(data_type, left), decode(data_type, right)) {
            (Number::Whole(left), Number::Whole(right)) => Some(left.cmp(&right)),
            (Number::Real(left), Number::Real(right)) => left.partial_cmp(&right),
            _ => None,
        };
        // What is no number compares as false.
        u8::from(order.is_some_and(|order| match comparison {
            Comparison::AtLeast => order.is_ge(),
            Comparison::More => order.is_gt(),
            Comparison::AtMost => order.is_le(),
            Comparison::Less => order.is_lt(),
        }))
    };
    left.chunks_exact(width).zip(right.chunks_exact(width)).map(holds).collect()
}

/// Three of `ncclRedOp_t`.
pub(crate) const SUM: c_int = 0;
pub(crate) const MAX: c_int = 2;
pub(crate) const MIN: c_int = 3;

/// `ncclRedOp_t`: sum, product, maximum, minimum, average; an operation of the program's own is
/// taken for a sum.
fn combine(operation: c_int, a: Number, b: Number) -> Number {
    use Number::{Real, Whole};
    match (a, b) {
        (Whole(a), Whole(b)) => Whole(match operation {
            1 => a.wrapping_mul(b),
            MAX => a.max(b),
            MIN => a.min(b),
            _ => a.wrapping_add(b),
        }),
        (Real(a), Real(b)) => Real(match operation {
            1 => a * b,
            MAX => a.max(b),
            MIN => a.min(b),
            _ => a + b,
        }),
        (a, _) => a,
    }
}

/// Reduces as many buffers of one length into one.
pub(crate) fn reduce(data_type: c_int, operation: c_int, all: &[Vec<u8>]) -> Vec<u8> {
    let width = width(data_type);
    let mut result = all.first().cloned().unwrap_or_default();
    for (index, place) in result.chunks_exact_mut(width).enumerate() {
        let range = index * width..(index + 1) * width;
        let numbers = all.iter().filter_map(|bytes| bytes.get(range.clone()));
        let Some(mut total) =
            numbers.map(|bytes| decode(data_type, bytes)).reduce(|a, b| combine(operation, a, b))
        else {
            continue;
        };
        if operation == 4 {
            total = match total {
                Number::Whole(sum) => Number::Whole(sum / all.len() as i128),
                Number::Real(sum) => Number::Real(sum / all.len() as f64),
            };
        }
        encode(data_type, total, place);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_survive_the_way_there_and_back() {
        for bits in 0..=u16::MAX {
            let real = half_to_f64(bits);
            if !real.is_nan() {
                assert_eq!(f64_to_half(real), bits, "{real}");
            }
        }
        assert_eq!(f64_to_half(1.0 / 3.0), 0x3555);
        assert_eq!(f64_to_half(1e9), 0x7c00);
    }

    #[test]
    fn each_operation_does_what_it_says() {
        let all = [3i64, -5, 11].map(|value| value.to_le_bytes().to_vec());
        let number = |operation| i64::from_le_bytes(reduce(4, operation, &all).try_into().unwrap());
        assert_eq!([0, 1, 2, 3, 4].map(number), [9, -165, 11, -5, 3]);
        let all = [1.5f32, 2.5].map(|value| value.to_le_bytes().to_vec());
        assert_eq!(reduce(7, 4, &all), 2f32.to_le_bytes());
        let all = [[0x80, 0x3f], [0x00, 0x40]].map(|bytes: [u8; 2]| bytes.to_vec());
        assert_eq!(reduce(9, 0, &all), [0x40, 0x40]);
    }
}
