//! The layout of PyTorch's `OffsetCalculator` (ATen's `OffsetCalculator.cuh`), with which kernels find the elements of
//! strided tensors.
//!
//! It begins with the number of dimensions. For each of 25 dimensions, a divisor follows: the size and the two numbers
//! with which a kernel divides by it. Then for each dimension, the stride of each operand follows, in bytes. Each
//! number has 4 bytes. It contains no address, and its unused slots contain old stack contents.

/// The maximum number of dimensions of a tensor iterator.
pub(crate) const MAX_DIMENSIONS: usize = 25;

/// Returns the offset of the size of a dimension.
pub(crate) const fn size_at(dimension: usize) -> usize {
    4 + 12 * dimension
}

/// Returns the offset of an operand's stride in a dimension, in a calculator for `operands` operands.
pub(crate) const fn stride_at(dimension: usize, operand: usize, operands: usize) -> usize {
    size_at(MAX_DIMENSIONS) + 4 * (operands * dimension + operand)
}

/// Returns the size of a calculator in bytes.
const fn size_of_calculator(operands: usize) -> usize {
    stride_at(MAX_DIMENSIONS, 0, operands)
}

/// Returns the size of a calculator in bytes, up to the next address.
pub(crate) const fn aligned_size(operands: usize) -> usize {
    size_of_calculator(operands).next_multiple_of(8)
}

/// The size in bytes of a reduction's configuration, after which its two calculators follow (ATen's `Reduce.cuh`).
pub(crate) const REDUCE_CONFIGURATION: usize = 64;

/// The size in bytes of a reduction's configuration and of its calculators, for the input and for the output. The
/// addresses follow.
pub(crate) const REDUCE_OP: usize = REDUCE_CONFIGURATION + size_of_calculator(1) + size_of_calculator(2);

const _: () = assert!(REDUCE_OP == 972);
