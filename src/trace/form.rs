//! The type and the shape of a tensor, as one text: `bfloat16 [4096x11008]`.

use crate::text::UNKNOWN;

/// The type and the shape of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Form<'a> {
    /// The column `dtype`.
    pub dtype: &'a str,
    /// The column `shape`.
    pub shape: &'a str,
}

/// The maximum number of dimensions of a shape that is recorded at an allocation.
pub const MAX_DIMS: usize = 8;

/// The name and the bytes of each `c10::ScalarType`, by its number (`torch/headeronly/core/ScalarType.h`). The bytes
/// are 0 for types of less than a byte.
pub const SCALAR_TYPES: &[(&str, i64)] = &[
    ("uint8", 1),
    ("int8", 1),
    ("int16", 2),
    ("int32", 4),
    ("int64", 8),
    ("float16", 2),
    ("float32", 4),
    ("float64", 8),
    ("complex32", 4),
    ("complex64", 8),
    ("complex128", 16),
    ("bool", 1),
    ("qint8", 1),
    ("quint8", 1),
    ("qint32", 4),
    ("bfloat16", 2),
    ("quint4x2", 1),
    ("quint2x4", 1),
    ("bits1x8", 1),
    ("bits2x4", 1),
    ("bits4x2", 1),
    ("bits8", 1),
    ("bits16", 2),
    ("float8_e5m2", 1),
    ("float8_e4m3fn", 1),
    ("float8_e5m2fnuz", 1),
    ("float8_e4m3fnuz", 1),
    ("uint16", 2),
    ("uint32", 4),
    ("uint64", 8),
    ("uint1", 0),
    ("uint2", 0),
    ("uint3", 0),
    ("uint4", 0),
    ("uint5", 0),
    ("uint6", 0),
    ("uint7", 0),
    ("int1", 0),
    ("int2", 0),
    ("int3", 0),
    ("int4", 0),
    ("int5", 0),
    ("int6", 0),
    ("int7", 0),
    ("float8_e8m0fnu", 1),
    ("float4_e2m1fn_x2", 1),
];

impl<'a> Form<'a> {
    /// A tensor of unknown type and shape.
    pub const UNKNOWN: Form<'static> = Form { dtype: UNKNOWN, shape: UNKNOWN };

    /// Parses a text such as `bfloat16 [4096x11008]` or `bfloat16 ?`. Any other text is unknown.
    #[must_use]
    pub fn parse(text: &'a str) -> Form<'a> {
        match text.split_once(' ') {
            Some((dtype, shape)) if !dtype.is_empty() && (shape == UNKNOWN || sizes(shape).is_some()) => {
                Form { dtype, shape }
            }
            _ => Form::UNKNOWN,
        }
    }

    /// Parses the form of a model's input, which has no space: `int64[8x1024]`.
    #[must_use]
    pub fn of_input(text: &'a str) -> Form<'a> {
        match text.find('[').map(|at| text.split_at(at)) {
            Some((dtype, shape)) if !dtype.is_empty() && sizes(shape).is_some() => Form { dtype, shape },
            _ => Form::UNKNOWN,
        }
    }

    /// Returns the sizes of the shape, or `None` if the shape is unknown.
    #[must_use]
    pub fn dims(self) -> Option<Vec<i64>> {
        sizes(self.shape)?.collect()
    }

    /// Returns the number of the tensor's values, or `None` if the shape is unknown.
    #[must_use]
    pub fn elements(self) -> Option<i64> {
        sizes(self.shape)?.try_fold(1_i64, |product, size| product.checked_mul(size?))
    }

    /// Returns the bytes of the tensor's values. Returns `None` if the shape or the size of the type is unknown.
    #[must_use]
    pub fn bytes(self) -> Option<i64> {
        self.elements()?.checked_mul(bytes_of(self.dtype)?)
    }
}

/// Returns the sizes in a shape, each `None` if it is not a number. Returns `None` if `shape` has no brackets.
fn sizes(shape: &str) -> Option<impl Iterator<Item = Option<i64>>> {
    let inside = shape.strip_prefix('[')?.strip_suffix(']')?;
    Some(inside.split('x').filter(move |_| !inside.is_empty()).map(|size| size.parse().ok()))
}

/// Returns the bytes of one value of a type of PyTorch, or `None` for a type that is not known.
fn bytes_of(dtype: &str) -> Option<i64> {
    SCALAR_TYPES.iter().find(|(name, _)| *name == dtype).map(|(_, bytes)| *bytes).filter(|bytes| *bytes > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_form_has_a_type_a_shape_and_bytes() {
        let form = |dtype, shape| Form { dtype, shape };
        assert_eq!(Form::parse("bfloat16 [4096x11008]"), form("bfloat16", "[4096x11008]"));
        assert_eq!(Form::parse("float32 ?"), form("float32", "?"));
        for other in ["", "float32", " [1]", "float32 1x2", "GPT.h 0"] {
            assert_eq!(Form::parse(other), Form::UNKNOWN, "{other}");
        }
        assert_eq!(Form::of_input("int64[8x2]"), form("int64", "[8x2]"));
        assert_eq!(Form::of_input("[8x2]"), Form::UNKNOWN);
        assert_eq!(Form::parse("bfloat16 [4096x2]").bytes(), Some(16384));
        assert_eq!(Form::parse("float32 []").bytes(), Some(4));
        assert_eq!(Form::parse("int64 [0x7]").bytes(), Some(0));
        for unknown in ["float32 ?", "nf4(bfloat16) [2]", "int8 [9999999999x9999999999]", "int8 [2xs0]"] {
            assert_eq!(Form::parse(unknown).bytes(), None, "{unknown}");
        }
    }
}
