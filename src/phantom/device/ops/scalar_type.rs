//! The types of PyTorch's elements: the numbers of `c10::ScalarType`, which every version of PyTorch keeps.

pub(crate) const UINT8: i32 = 0;
pub(crate) const INT8: i32 = 1;
pub(crate) const INT16: i32 = 2;
pub(crate) const INT32: i32 = 3;
pub(crate) const INT64: i32 = 4;
pub(crate) const FLOAT16: i32 = 5;
pub(crate) const FLOAT32: i32 = 6;
pub(crate) const FLOAT64: i32 = 7;
const COMPLEX32: i32 = 8;
const COMPLEX64: i32 = 9;
const COMPLEX128: i32 = 10;
pub(crate) const BOOL: i32 = 11;
pub(crate) const BFLOAT16: i32 = 15;
const FLOAT8_E5M2: i32 = 23;
const FLOAT8_E4M3FNUZ: i32 = 26;
const UINT16: i32 = 27;
const UINT32: i32 = 28;
const UINT64: i32 = 29;
const FLOAT8_E8M0FNU: i32 = 44;

/// Returns the size of an element in bytes, or `None` for a type whose values are not followed.
pub(crate) fn width(scalar_type: i32) -> Option<usize> {
    Some(match scalar_type {
        UINT8 | INT8 | BOOL | FLOAT8_E5M2..=FLOAT8_E4M3FNUZ => 1,
        INT16 | FLOAT16 | BFLOAT16 | UINT16 => 2,
        INT32 | FLOAT32 | COMPLEX32 | UINT32 => 4,
        INT64 | FLOAT64 | COMPLEX64 | UINT64 => 8,
        COMPLEX128 => 16,
        _ => return None,
    })
}

/// Returns true for a type of integers or flags.
pub(crate) fn is_whole(scalar_type: i32) -> bool {
    matches!(scalar_type, UINT8..=INT64 | BOOL | UINT16..=UINT64)
}

/// Returns true for a floating-point or complex type.
pub(crate) fn is_floating_point(scalar_type: i32) -> bool {
    matches!(
        scalar_type,
        FLOAT16..=COMPLEX128 | BFLOAT16 | FLOAT8_E5M2..=FLOAT8_E4M3FNUZ | FLOAT8_E8M0FNU
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_type_that_is_followed_is_either_whole_or_floating_point() {
        for scalar_type in -1..64 {
            let kinds = [is_whole(scalar_type), is_floating_point(scalar_type)];
            assert_ne!(kinds, [true, true], "{scalar_type}");
            // The values of FLOAT8_E8M0FNU are not followed.
            let is_known = kinds != [false, false] && scalar_type != FLOAT8_E8M0FNU;
            assert_eq!(width(scalar_type).is_some(), is_known, "{scalar_type}");
        }
    }
}
