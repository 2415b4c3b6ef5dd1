//! Recognizes a kernel by its mangled name, and with it the effect of a launch.

use crate::core::bytes::{after, contains};
use crate::kernels::index::IndexKernel;
use crate::kernels::reduce::{
    self, DataType, ncclBfloat16, ncclFloat16, ncclFloat32, ncclFloat64, ncclInt8, ncclInt32, ncclInt64,
    ncclUint8, ncclUint32, ncclUint64,
};

/// The effect of a kernel, with the arguments on which it depends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KernelEffect {
    /// `cub::DeviceReduceSingleTileKernel` over a test for nonzero: (in, out, count, ...).
    CountNonzero(NonzeroInput),
    /// `cub::DeviceReduceKernel` over a test for nonzero: (in, partial results, count, ...).
    CountNonzeroPartial(NonzeroInput),
    /// `cub::DeviceReduceSingleTileKernel` over anything else: (in, out, ...). It may finish a
    /// `CountNonzeroPartial`.
    FinishReduction,
    /// `cub::DeviceSelectSweepKernel` by equality: (in, flags, out, count out, tiles, op, equality, count,
    /// ...).
    CountUnique,
    /// `cub::DeviceReduceByKeyKernel` for run-length encoding: (in, out, values, lengths, count out, tiles,
    /// first tile, equality, op, count).
    CountRuns,
    /// Thrust's `unique`: (in, out, predicate, count out, count, ...).
    CountThrustUnique,
    /// An elementwise PyTorch kernel: (count, functor, operands, ...). The operands are addresses, with the
    /// output first.
    Elementwise,
    /// An elementwise kernel that writes flags of one byte each.
    Flags,
    /// A copy that converts elements to flags: (count, functor, operands, input offsets, output offsets,
    /// loader, storer).
    ToFlags,
    /// An elementwise kernel that writes a single value of this number of bytes, which its functor contains.
    Fill(usize),
    /// An elementwise comparison of two inputs. The functor contains the number of a
    /// [`Comparison`](crate::kernels::reduce::Comparison).
    Compare(DataType),
    /// An elementwise comparison with a scalar. The functor contains the number of a
    /// [`Comparison`](crate::kernels::reduce::Comparison), and the scalar.
    CompareScalar(DataType),
    /// An elementwise test for equality with a scalar. The functor contains 0 for equal or 1 for unequal, and
    /// the scalar.
    EqualScalar(DataType),
    /// An elementwise test of two inputs for equality. The functor contains 0 for equal or 1 for unequal.
    /// `None` if the type of the inputs is unknown.
    Equal(Option<DataType>),
    /// The elementwise logical "and" of two flags.
    And,
    /// The elementwise logical "or" of two flags.
    Or,
    /// The elementwise logical "not" of a flag.
    Not,
    /// A selection of positions by indices: (count, struct).
    Index(IndexKernel),
    /// A comparison of two strided inputs, whose addresses are inside the functor.
    CompareStrided {
        is_equality: bool,
        /// False if the kernel converts its result to another type.
        writes_flags: bool,
    },
    /// PyTorch's `reduce_kernel`, whose only argument is a struct; see
    /// [`kernel_effects`](crate::kernels::kernel_effects).
    Reduce(ReductionKind, DataType),
    /// A kernel that has only numbers as parameters.
    NoPointer,
}

/// The input of a count of nonzero elements. It is an iterator that consists of an address and a test. The
/// test has an empty type, so its word contains leftovers from other calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NonzeroInput {
    /// The type of the elements, if known.
    pub(super) element: Option<DataType>,
    /// True if the test precedes the address, as in CUB; in Thrust, it follows the address.
    pub(super) test_is_first: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReductionKind {
    Sum,
    Max,
    Min,
    All,
    Any,
}

/// Returns the encoded parameter types at the end of the mangled name of a non-template function (Itanium C++
/// ABI, section 5.1: `_Z`, then a name or `N` names `E`, each name preceded by its length).
fn parameters(name: &[u8]) -> Option<&[u8]> {
    let mut rest = name.strip_prefix(b"_Z")?;
    let nested = rest.strip_prefix(b"N");
    rest = nested.unwrap_or(rest);
    loop {
        let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let length: usize = std::str::from_utf8(rest.get(..digits)?).ok()?.parse().ok()?;
        rest = rest.get(digits + length..)?;
        match (nested, rest.strip_prefix(b"E")) {
            (None, _) => return Some(rest),
            (Some(_), Some(parameters)) => return Some(parameters),
            (Some(_), None) => {}
        }
    }
}

/// Returns true if the encoded parameter types are only integers, floats and booleans, or an empty list
/// (`v`).
fn only_numbers(parameters: &[u8]) -> bool {
    !parameters.is_empty() && parameters.iter().all(|code| b"vbcahstijlmfd".contains(code))
}

/// Returns the type whose mangled name is at the start of `name`. A boolean is a byte.
fn data_type(name: &[u8]) -> Option<DataType> {
    Some(match name.first()? {
        b'a' => ncclInt8,
        b'b' | b'h' => ncclUint8,
        b'i' => ncclInt32,
        b'j' => ncclUint32,
        b'l' => ncclInt64,
        b'm' => ncclUint64,
        b'f' => ncclFloat32,
        b'd' => ncclFloat64,
        _ if name.starts_with(b"N3c104HalfE") => ncclFloat16,
        _ if name.starts_with(b"N3c108BFloat16E") => ncclBfloat16,
        _ => return None,
    })
}

impl KernelEffect {
    /// Returns the effect of the kernel with this mangled name.
    pub(super) fn from_name(name: &[u8]) -> Option<Self> {
        // The unrolled variant may convert types and use strides; the vectorized variant never does.
        if contains(name, b"for_multi_outputs") || contains(name, b"amp_non_finite") {
            // The kernel has several outputs, or writes one through an address that the functor captured.
            return None;
        }
        let vectorized = contains(name, b"vectorized_elementwise_kernel");
        if vectorized || contains(name, b"unrolled_elementwise_kernel") {
            let contiguous = vectorized || contains(name, b"TrivialOffset") && !contains(name, b"WithCast");
            let known = contiguous.then(|| Self::fill(name).or_else(|| Self::comparison(name))).flatten();
            if !vectorized && Self::is_flag_copy(name) && contains(name, b"TrivialOffset") {
                let converts = contains(name, b"12LoadWithCastILi1E");
                return Some(if converts { Self::ToFlags } else { Self::Flags });
            }
            let flags = if Self::writes_flags(name) { Self::Flags } else { Self::Elementwise };
            return Some(known.unwrap_or(flags));
        }
        if contains(name, b"18elementwise_kernelI") {
            let is_equality = Self::is_equality(name);
            let has_scalar = contains(name, b"compare_scalar_kernel") || contains(name, b"UnaryFunctor");
            let is_comparison = contains(name, b"14CompareFunctorI") && !has_scalar;
            let writes_flags = contains(name, b"gpu_kernel_impl_nocast");
            return (is_comparison || is_equality)
                .then_some(Self::CompareStrided { is_equality, writes_flags });
        }
        if contains(name, b"6native13reduce_kernel") {
            return Self::reduction(name);
        }
        if let Some(kernel) = IndexKernel::from_name(name) {
            return Some(Self::Index(kernel));
        }
        if contains(name, b"DeviceReduce") {
            let nonzero = after(name, b"NonZeroOp");
            let input = NonzeroInput {
                element: nonzero.and_then(|rest| data_type(rest.strip_prefix(b"I")?)),
                test_is_first: contains(name, b"22TransformInputIterator"),
            };
            return match (contains(name, b"SingleTileKernel"), contains(name, b"ByKeyKernel")) {
                (true, _) if nonzero.is_some() => Some(Self::CountNonzero(input)),
                (true, _) => Some(Self::FinishReduction),
                (false, false) => nonzero.map(|_| Self::CountNonzeroPartial(input)),
                // Of the reductions by key, only run-length encoding sums up a constant.
                (false, true) => [&b"rle"[..], b"ConstantInput", b"constant_iter"]
                    .iter()
                    .any(|part| contains(name, part))
                    .then_some(Self::CountRuns),
            };
        }
        if contains(name, b"DeviceSelectSweepKernel") {
            return contains(name, b"equal_to").then_some(Self::CountUnique);
        }
        if contains(name, b"UniqueAgent") {
            return Some(Self::CountThrustUnique);
        }
        parameters(name).is_some_and(only_numbers).then_some(Self::NoPointer)
    }

    /// Recognizes `FillFunctor<T>`.
    fn fill(name: &[u8]) -> Option<Self> {
        let element = after(name, b"FillFunctorI")?;
        match element.first()? {
            b's' | b't' => Some(Self::Fill(2)),
            _ => data_type(element).map(|data_type| Self::Fill(reduce::width(data_type))),
        }
    }

    /// Recognizes `CompareFunctor<T>` and related functors with two inputs or a scalar. A functor wrapped in
    /// another one has its operator at another offset and is not recognized.
    fn comparison(name: &[u8]) -> Option<Self> {
        if let Some(element) = after(name, b"compare_scalar_kernelI") {
            return data_type(element).map(Self::CompareScalar);
        }
        if Self::is_equality(name) {
            return Some(Self::Equal(after(name, b"13BinaryFunctorI").and_then(data_type)));
        }
        // `isfinite` multiplies two flags.
        let is_and = contains(name, b"17BitwiseAndFunctorIbE") || contains(name, b"10MulFunctorIbE");
        if contains(name, b"13BinaryFunctorIbbb") && is_and {
            return Some(Self::And);
        }
        if contains(name, b"13BinaryFunctorI") && contains(name, b"16BitwiseOrFunctorIbE") {
            return Some(Self::Or);
        }
        let not = contains(name, b"logical_not_kernel") || contains(name, b"bitwise_not_kernel");
        if not && contains(name, b"EUlbE_") {
            return Some(Self::Not);
        }
        if contains(name, b"13AUnaryFunctorI") {
            return data_type(after(name, b"16CompareEqFunctorI")?).map(Self::EqualScalar);
        }
        let element = after(name, b"14CompareFunctorI")?;
        let two_inputs = contains(name, b"arrayIPcLm3E") || contains(name, b"ArrayIPcLi3E");
        (two_inputs && !contains(name, b"aryFunctorI")).then_some(Self::Compare(data_type(element)?))
    }

    /// Returns true if an elementwise kernel writes booleans: its functor returns them and no conversion
    /// follows, or the kernel converts to them.
    fn writes_flags(name: &[u8]) -> bool {
        let is_logical =
            [&b"CompareFunctor"[..], b"CompareEqFunctor", b"compare_scalar_kernel", b"logical_not_kernel"]
                .iter()
                .any(|part| contains(name, part));
        let is_boolean = contains(name, b"FunctorIbbb")
            || contains(name, b"bitwise_not_kernel") && contains(name, b"EUlbE_");
        Self::is_flag_copy(name) || !contains(name, b"WithCast") && (is_logical || is_boolean)
    }

    fn is_flag_copy(name: &[u8]) -> bool {
        contains(name, b"direct_copy_kernel") && contains(name, b"EUlbE_")
    }

    fn is_equality(name: &[u8]) -> bool {
        contains(name, b"13BinaryFunctorI") && contains(name, b"16CompareEqFunctorI")
    }

    /// Recognizes `ReduceOp<T, ...>` with a plain operation.
    fn reduction(name: &[u8]) -> Option<Self> {
        let data_type = data_type(after(name, b"8ReduceOpI")?)?;
        let kinds: [(&[u8], ReductionKind); 5] = [
            (b"and_kernel_cuda", ReductionKind::All),
            (b"or_kernel_cuda", ReductionKind::Any),
            (b"sum_functor", ReductionKind::Sum),
            (b"MaxNanFunctor", ReductionKind::Max),
            (b"MinNanFunctor", ReductionKind::Min),
        ];
        let (_, kind) = kinds.into_iter().find(|(part, _)| contains(name, part))?;
        // A reduction that accumulates in another type has another layout, so it is not recognized.
        let same_type = after(name, b"14func_wrapper_tI").and_then(self::data_type) == Some(data_type);
        (same_type || matches!(kind, ReductionKind::All | ReductionKind::Any))
            .then_some(Self::Reduce(kind, data_type))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_recognized_by_their_mangled_names() {
        let input = NonzeroInput { element: Some(7), test_is_first: false };
        let cubs = NonzeroInput { test_is_first: true, ..input };
        let cases: [(&[u8], Option<KernelEffect>); 22] = [
            (
                b"_ZN2at4cuda40_GLOBAL__N__758183f4_8_Sleep_cu_088d913f11spin_kernelEl",
                Some(KernelEffect::NoPointer),
            ),
            (b"_ZN2at4cuda11spin_kernelElPi", None),
            (b"_Z4waitv", Some(KernelEffect::NoPointer)),
            (b"_Z4workPfi", None),
            (b"_Z4workIfEvi", None),
            (b"plain_c", None),
            (b"_ZN3cub28DeviceReduceSingleTileKernelI9NonZeroOpIfE", Some(KernelEffect::CountNonzero(input))),
            (
                b"_ZN3cub28DeviceReduceSingleTileKernelI22TransformInputIteratorIb9NonZeroOpIfE",
                Some(KernelEffect::CountNonzero(cubs)),
            ),
            (b"_ZN3cub18DeviceReduceKernelI9NonZeroOpIfE", Some(KernelEffect::CountNonzeroPartial(input))),
            (b"_ZN3cub28DeviceReduceSingleTileKernelI3Sum", Some(KernelEffect::FinishReduction)),
            (b"_ZN3cub23DeviceReduceByKeyKernelI3rle", Some(KernelEffect::CountRuns)),
            (b"_ZN3cub23DeviceSelectSweepKernelI9NonZeroOpIfE", None),
            (b"_ZN3cub23DeviceSelectSweepKernelI8equal_to", Some(KernelEffect::CountUnique)),
            (b"_ZN3at6native12other_kernelILi512E", None),
            (b"_ZN29vectorized_elementwise_kernelILi2ENS0_11FillFunctorIlEE", Some(KernelEffect::Fill(8))),
            (b"_ZN29vectorized_elementwise_kernelILi2ENS0_11FillFunctorIN3c104HalfEEE", Some(KernelEffect::Fill(2))),
            (
                b"29vectorized_elementwise_kernelILi4ENS0_14CompareFunctorIlEESt5arrayIPcLm3EEEE",
                Some(KernelEffect::Compare(4)),
            ),
            (
                b"_ZN29vectorized_elementwise_kernelILi2EZNS0_23bitwise_not_kernel_cuda\
                  ERNS_18TensorIteratorBaseEEUlbE_St5",
                Some(KernelEffect::Not),
            ),
            (
                b"_ZN29vectorized_elementwise_kernelILi2EZZZNS0_23logical_not_kernel_cudaERNS_EENKUlvE_clEvEUlfE_St5",
                Some(KernelEffect::Flags),
            ),
            (b"_ZN27unrolled_elementwise_kernelI3Add", Some(KernelEffect::Elementwise)),
            (
                b"_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIbNS0_14func_wrapper_tIbZ15and_kernel_cuda",
                Some(KernelEffect::Reduce(ReductionKind::All, 1)),
            ),
            (
                b"_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIlNS0_14func_wrapper_tIlZNS0_11sum_functorIlll",
                Some(KernelEffect::Reduce(ReductionKind::Sum, 4)),
            ),
        ];
        for (name, expected) in cases {
            assert_eq!(KernelEffect::from_name(name), expected, "{}", String::from_utf8_lossy(name));
        }
    }
}
