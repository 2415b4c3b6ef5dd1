//! Arithmetic on small known data: reductions over ranks and elements, and comparisons.

#![expect(non_upper_case_globals, reason = "constants of NCCL are named as in its header")]

use std::cmp::Ordering;
use std::ffi::c_int;

use cudarc::nccl::sys::{ncclDataType_t, ncclRedOp_t};

use crate::core::ffi::codes;

/// The type of elements, an `ncclDataType_t`.
pub(crate) type DataType = c_int;

codes!(pub(crate) ncclDataType_t {
    ncclInt8,
    ncclUint8,
    ncclInt32,
    ncclUint32,
    ncclInt64,
    ncclUint64,
    ncclFloat16,
    ncclFloat32,
    ncclFloat64,
    ncclBfloat16,
});

/// A reduction operation, an `ncclRedOp_t`. An operation created by the program counts as a sum.
pub(crate) type Operation = c_int;

codes!(pub(crate) ncclRedOp_t { ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg });

/// Returns the size of an element in bytes, which is 1 for types that are not listed.
pub(crate) fn width(data_type: DataType) -> usize {
    match data_type {
        ncclInt32 | ncclUint32 | ncclFloat32 => 4,
        ncclInt64 | ncclUint64 | ncclFloat64 => 8,
        ncclFloat16 | ncclBfloat16 => 2,
        _ => 1,
    }
}

/// Returns true if an element is not zero. -0.0 is zero, and NaN is not.
pub(crate) fn is_nonzero(data_type: DataType, bytes: &[u8]) -> bool {
    match decode(data_type, bytes) {
        Element::Integer(value) => value != 0,
        Element::Float(value) => value != 0.0,
    }
}

/// The value of an element, wide enough for the sum of many elements.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Element {
    Integer(i128),
    Float(f64),
}

fn decode(data_type: DataType, bytes: &[u8]) -> Element {
    use Element::{Float, Integer};
    let word = |length: usize| {
        let mut all = [0u8; 8];
        all[..length].copy_from_slice(&bytes[..length]);
        u64::from_le_bytes(all)
    };
    match data_type {
        ncclInt8 => Integer(i128::from(bytes[0] as i8)),
        ncclInt32 => Integer(i128::from(word(4) as u32 as i32)),
        ncclUint32 => Integer(i128::from(word(4))),
        ncclInt64 => Integer(i128::from(word(8) as i64)),
        ncclUint64 => Integer(i128::from(word(8))),
        ncclFloat16 => Float(half_to_f64(word(2) as u16)),
        ncclFloat32 => Float(f64::from(f32::from_bits(word(4) as u32))),
        ncclFloat64 => Float(f64::from_bits(word(8))),
        ncclBfloat16 => Float(f64::from(f32::from_bits((word(2) as u32) << 16))),
        _ => Integer(i128::from(bytes[0])),
    }
}

fn encode(data_type: DataType, element: Element, out: &mut [u8]) {
    let bits = match (element, data_type) {
        (Element::Integer(value), _) => value as u64,
        (Element::Float(value), ncclFloat16) => u64::from(f64_to_half(value)),
        (Element::Float(value), ncclFloat32) => u64::from((value as f32).to_bits()),
        (Element::Float(value), ncclBfloat16) => u64::from(f32_to_bfloat16(value as f32)),
        (Element::Float(value), _) => value.to_bits(),
    };
    let length = out.len();
    out.copy_from_slice(&bits.to_le_bytes()[..length]);
}

/// Rounds to the nearest bfloat16, of two equally near ones to the even one.
fn f32_to_bfloat16(value: f32) -> u16 {
    let bits = value.to_bits();
    // A NaN stays one: rounding could turn it into an infinity.
    let rounded = if value.is_nan() { bits | 1 << 22 } else { bits + 0x7fff + (bits >> 16 & 1) };
    (rounded >> 16) as u16
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

fn f64_to_half(value: f64) -> u16 {
    let sign = if value.is_sign_negative() { 0x8000 } else { 0 };
    let magnitude = value.abs();
    if magnitude.is_nan() {
        return sign | 0x7e00;
    }
    if magnitude >= 65520.0 {
        return sign | 0x7c00;
    }
    // The exponent gives the distance between two adjacent half-precision numbers at this magnitude. The
    // distance is the same for all numbers below the smallest normal one.
    let exponent = if magnitude < 2f64.powi(-14) { -14 } else { magnitude.log2().floor() as i32 };
    let steps = (magnitude / 2f64.powi(exponent - 10)).round_ties_even() as u16;
    // A normal number has at least 1024 steps. Adding the steps increases the exponent field by one, so the
    // exponent is one too small here.
    sign | (((exponent + 14) as u16) * 1024 + steps)
}

/// A comparison of two elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Comparison {
    GreaterEqual,
    Greater,
    LessEqual,
    Less,
}

impl Comparison {
    /// Returns the comparison with this number in PyTorch's `CompareFunctor`.
    pub(crate) fn from_number(number: i32) -> Option<Self> {
        let all = [Self::GreaterEqual, Self::Greater, Self::LessEqual, Self::Less];
        all.get(usize::try_from(number).ok()?).copied()
    }

    fn holds(self, order: Ordering) -> bool {
        match self {
            Self::GreaterEqual => order.is_ge(),
            Self::Greater => order.is_gt(),
            Self::LessEqual => order.is_le(),
            Self::Less => order.is_lt(),
        }
    }
}

/// Compares two buffers element by element. The result has one byte per pair, which is 1 if the comparison is
/// true. A comparison with NaN is false.
pub(crate) fn compare(data_type: DataType, comparison: Comparison, left: &[u8], right: &[u8]) -> Vec<u8> {
    let width = width(data_type);
    let compare_pair = |(left, right): (&[u8], &[u8])| {
        let order = match (decode(data_type, left), decode(data_type, right)) {
            (Element::Integer(left), Element::Integer(right)) => Some(left.cmp(&right)),
            (Element::Float(left), Element::Float(right)) => left.partial_cmp(&right),
            _ => None,
        };
        u8::from(order.is_some_and(|order| comparison.holds(order)))
    };
    left.chunks_exact(width).zip(right.chunks_exact(width)).map(compare_pair).collect()
}

/// Tests two buffers for equality element by element. The result has one byte per pair, which is 1 if the
/// elements are equal. NaN is not equal to any value.
pub(crate) fn equal(data_type: DataType, left: &[u8], right: &[u8]) -> Vec<u8> {
    let width = width(data_type);
    let pairs = left.chunks_exact(width).zip(right.chunks_exact(width));
    pairs.map(|(left, right)| u8::from(decode(data_type, left) == decode(data_type, right))).collect()
}

/// Returns true if an element of a floating-point type is infinite. Returns false for any other type.
pub(crate) fn is_infinite(data_type: DataType, bytes: &[u8]) -> bool {
    matches!(decode(data_type, bytes), Element::Float(value) if value.is_infinite())
}

fn combine(operation: Operation, a: Element, b: Element) -> Element {
    use Element::{Float, Integer};
    match (a, b) {
        (Integer(a), Integer(b)) => Integer(match operation {
            ncclProd => a.wrapping_mul(b),
            ncclMax => a.max(b),
            ncclMin => a.min(b),
            _ => a.wrapping_add(b),
        }),
        (Float(a), Float(b)) => Float(match operation {
            ncclProd => a * b,
            ncclMax => a.max(b),
            ncclMin => a.min(b),
            _ => a + b,
        }),
        (a, _) => a,
    }
}

/// Reduces buffers of the same length to one, element by element.
pub(crate) fn reduce(data_type: DataType, operation: Operation, all: &[Vec<u8>]) -> Vec<u8> {
    let width = width(data_type);
    let mut result = all.first().cloned().unwrap_or_default();
    for (index, place) in result.chunks_exact_mut(width).enumerate() {
        let range = index * width..(index + 1) * width;
        let elements = all.iter().filter_map(|bytes| bytes.get(range.clone()));
        let Some(mut total) =
            elements.map(|bytes| decode(data_type, bytes)).reduce(|a, b| combine(operation, a, b))
        else {
            continue;
        };
        if operation == ncclAvg {
            total = match total {
                Element::Integer(sum) => Element::Integer(sum / all.len() as i128),
                Element::Float(sum) => Element::Float(sum / all.len() as f64),
            };
        }
        encode(data_type, total, place);
    }
    result
}

/// Reduces `count` copies of one buffer, like [`reduce`]. A sum is computed as a product, so it takes one
/// step for any count.
pub(crate) fn of_equals(data_type: DataType, operation: Operation, bytes: &[u8], count: usize) -> Vec<u8> {
    use Element::{Float, Integer};
    let width = width(data_type);
    let mut result = bytes.to_vec();
    for place in result.chunks_exact_mut(width) {
        let element = match (operation, decode(data_type, place)) {
            (ncclMax | ncclMin | ncclAvg, element) => element,
            (ncclProd, Integer(value)) => Integer(value.wrapping_pow(count as u32)),
            (ncclProd, Float(value)) => Float(value.powf(count as f64)),
            (_, Integer(value)) => Integer(value.wrapping_mul(count as i128)),
            (_, Float(value)) => Float(value * count as f64),
        };
        encode(data_type, element, place);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_survives_conversion_to_f64_and_back() {
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
    fn a_bfloat16_is_rounded_to_the_nearest_and_between_two_to_the_even_one() {
        for (value, bits) in [
            (1.0, 0x3f80),
            (1.0 + 1.0 / 256.0, 0x3f80),
            (1.0 + 1.1 / 256.0, 0x3f81),
            (1.0 + 3.0 / 256.0, 0x3f82),
            (-1.0 - 3.0 / 256.0, 0xbf82),
            (f32::MAX, 0x7f80),
            (f32::NEG_INFINITY, 0xff80),
            (f32::from_bits(0x7fff_ffff), 0x7fff),
            (f32::from_bits(0x7f80_0001), 0x7fc0),
        ] {
            assert_eq!(f32_to_bfloat16(value), bits, "{value}");
        }
        let all = [[0x80, 0x3f], [0x40, 0x3c]].map(|bytes: [u8; 2]| bytes.to_vec());
        assert_eq!(reduce(9, 0, &all), [0x82, 0x3f], "1 and 3/256");
    }

    #[test]
    fn negative_zero_is_zero_in_each_type_of_float_and_not_in_integers() {
        let is_nonzero = |data_type, bytes: &[u8]| super::is_nonzero(data_type, bytes);
        assert!(!is_nonzero(ncclFloat32, &(-0.0f32).to_le_bytes()));
        assert!(!is_nonzero(ncclFloat64, &(-0.0f64).to_le_bytes()));
        assert!(!is_nonzero(ncclFloat16, &[0, 0x80]) && !is_nonzero(ncclBfloat16, &[0, 0x80]));
        assert!(is_nonzero(ncclFloat16, &[1, 0x80]) && is_nonzero(ncclFloat32, &f32::NAN.to_le_bytes()));
        assert!(is_nonzero(ncclInt32, &i32::MIN.to_le_bytes()) && is_nonzero(ncclInt8, &[0x80]));
        assert!(is_nonzero(ncclUint8, &[1]) && !is_nonzero(ncclUint8, &[0]));
    }

    #[test]
    fn each_reduction_of_integers_floats_and_bfloat16_is_right() {
        let all = [3i64, -5, 11].map(|value| value.to_le_bytes().to_vec());
        let number = |operation| i64::from_le_bytes(reduce(4, operation, &all).try_into().unwrap());
        assert_eq!([0, 1, 2, 3, 4].map(number), [9, -165, 11, -5, 3]);
        let all = [1.5f32, 2.5].map(|value| value.to_le_bytes().to_vec());
        assert_eq!(reduce(7, 4, &all), 2f32.to_le_bytes());
        let all = [[0x80, 0x3f], [0x00, 0x40]].map(|bytes: [u8; 2]| bytes.to_vec());
        assert_eq!(reduce(9, 0, &all), [0x40, 0x40]);
    }

    #[test]
    fn equal_buffers_are_reduced_as_their_copies_would_be() {
        for operation in 0..5 {
            let bytes = 3i64.to_le_bytes();
            let copies = vec![bytes.to_vec(); 5];
            assert_eq!(of_equals(4, operation, &bytes, 5), reduce(4, operation, &copies), "{operation}");
            let bytes = 1.5f32.to_le_bytes();
            let copies = vec![bytes.to_vec(); 5];
            assert_eq!(of_equals(7, operation, &bytes, 5), reduce(7, operation, &copies), "{operation}");
        }
    }
}
