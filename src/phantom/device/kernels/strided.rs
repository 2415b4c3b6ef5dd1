//! PyTorch's elementwise kernels for strided tensors, such as broadcast ones.
//!
//! The functor contains all data that the kernel uses (ATen's CUDALoops.cuh, `gpu_kernel_impl` and its
//! variant without conversions): an offset calculator, and the addresses of the operands, the output first.

use crate::core::ffi::read;
use crate::cuda::copy::{device_of, forget, set_mask};
use crate::kernels::offset_calculator::{MAX_DIMENSIONS, aligned_size, size_at, stride_at};

/// The number of operands of a kernel with two inputs.
const OPERANDS: usize = 3;
const ADDRESSES: usize = aligned_size(OPERANDS);

/// The location of a launch's output.
pub(crate) struct Output {
    address: usize,
    /// The number of elements.
    count: usize,
    /// The distance in bytes from the start of the first element to the start of the last.
    distance: usize,
}

/// Returns the output of a launch on `count` elements, or `None` if the functor has another layout.
///
/// # Safety
/// `functor` is the address of the functor in a launch of such a kernel with two inputs.
pub(crate) unsafe fn output(count: usize, functor: usize) -> Option<Output> {
    // SAFETY: members of the functor, by the caller's promise.
    let number = |offset: usize| unsafe { read::<u32>(functor + offset) }.map(|number| number as usize);
    // SAFETY: as above.
    let address = |operand: usize| unsafe { read::<usize>(functor + ADDRESSES + 8 * operand) };
    let dimensions = number(0).filter(|dimensions| (1..=MAX_DIMENSIONS).contains(dimensions))?;
    let (mut elements, mut last) = (1usize, 0usize);
    for dimension in 0..dimensions {
        let size = number(size_at(dimension)).filter(|&size| size > 0)?;
        let stride = number(stride_at(dimension, 0, OPERANDS))?;
        elements = elements.checked_mul(size)?;
        last = last.checked_add((size - 1).checked_mul(stride)?)?;
    }
    let are_addresses =
        (0..OPERANDS).all(|operand| address(operand).is_some_and(|at| device_of(at).is_some()));
    (elements == count && are_addresses).then_some(())?;
    Some(Output { address: address(0)?, count, distance: last })
}

impl Output {
    /// Applies the effect of a comparison: the output becomes unknown, and all other memory keeps its
    /// content. Flags have one byte each.
    pub(crate) fn compared(&self, writes_flags: bool) {
        /// The size of the largest element in bytes: a complex number of two doubles.
        const WIDEST: usize = 16;
        if writes_flags && self.distance + 1 == self.count {
            set_mask(self.address, self.count);
        } else {
            forget(self.address, self.distance + if writes_flags { 1 } else { WIDEST });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_functors_have_no_output() {
        let mut functor = vec![0u8; ADDRESSES + 8 * OPERANDS];
        let mut try_with = |dimensions: u32, size: u32| {
            functor[..4].copy_from_slice(&dimensions.to_le_bytes());
            for dimension in 0..MAX_DIMENSIONS {
                let at = size_at(dimension);
                functor[at..at + 4].copy_from_slice(&size.to_le_bytes());
            }
            // SAFETY: the functor has the right size.
            unsafe { output(16, functor.as_ptr() as usize) }
        };
        for dimensions in [0, 1, 25, 26, u32::MAX] {
            for size in [0, 1, 16, u32::MAX] {
                assert!(try_with(dimensions, size).is_none(), "{dimensions} of {size}");
            }
        }
    }
}
