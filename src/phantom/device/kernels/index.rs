//! Kernels that select positions by indices: `batch[order]`, `gather`, and `scatter` into one dimension.
//!
//! A program that sorts or samples uses indices that no kernel computed. If the program selects from a small
//! known tensor, the result must consist of values of that tensor, because sizes are derived from them: the
//! largest number in a graph, a segment or an expert. So unknown indices count as evenly spaced and in order,
//! from the first element to the last.

use crate::core::bytes::{after, contains};
use crate::core::ffi::read;
use crate::core::values::SMALL;
use crate::cuda::copy::{Known, read_known};
use crate::kernels::offset_calculator::{MAX_DIMENSIONS, aligned_size, size_at, stride_at};

/// The number of operands: output, input and indices.
const OPERANDS: usize = 3;
/// The offset of the members after the offset calculator.
const CALCULATOR: usize = aligned_size(OPERANDS);

/// A kernel that selects positions by indices. Its arguments are the number of elements and a struct.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct IndexKernel {
    layout: IndexLayout,
    /// The sizes of an element and of an index, in bytes.
    width: usize,
    index_width: usize,
}

/// The layout of the kernel's struct. It begins with an offset calculator, which the listed members follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum IndexLayout {
    /// ATen's `gpu_index_kernel` (`IndexKernel.cu`): the addresses of the output and the input, the number of
    /// index tensors, and arrays of 25 with their addresses, sizes and strides in bytes.
    Index,
    /// ATen's `_cuda_scatter_gather_internal_kernel` (`ScatterGatherKernel.cu`): the address of the indices,
    /// the size of the dimension, the functor, the address of the output, the stride in elements, the number
    /// of elements, and the address of the input.
    Gather,
    /// The same layout as `Gather`, but the index selects a position in the output.
    Scatter,
}

impl IndexKernel {
    /// Returns the kernel with this mangled name.
    pub(crate) fn from_name(name: &[u8]) -> Option<Self> {
        let is_index = contains(name, b"24index_elementwise_kernel");
        if !is_index && !contains(name, b"36_cuda_scatter_gather_internal_kernel") {
            return None;
        }
        let opaque = after(name, b"10OpaqueTypeILi")?;
        let digits = opaque.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let width = std::str::from_utf8(&opaque[..digits]).ok()?.parse().ok().filter(|&width| width > 0)?;
        if is_index {
            let index = Self { layout: IndexLayout::Index, width, index_width: 8 };
            return contains(name, b"17index_kernel_impl").then_some(index);
        }
        let is_scatter = after(name, b"36_cuda_scatter_gather_internal_kernelILb")?.first()?;
        after(name, b"12TensorAssign")?;
        let layout = if *is_scatter == b'1' { IndexLayout::Scatter } else { IndexLayout::Gather };
        // Since PyTorch 2.8, the type of the indices follows; before that, it is `long`.
        let index_width = if opaque[digits..].starts_with(b"EEEiE") { 4 } else { 8 };
        Some(Self { layout, width, index_width })
    }
}

/// The selection of one launch, read from the struct in the kernel's arguments.
struct Choice {
    /// For each dimension, the size and the stride of each operand in bytes.
    dimensions: Vec<(usize, [usize; OPERANDS])>,
    /// The addresses of the output, the input and the indices.
    addresses: [usize; OPERANDS],
    /// The number of positions from which an index selects.
    places: usize,
    /// The distance in bytes between two neighboring positions.
    stride: usize,
    index_width: usize,
}

impl Choice {
    /// # Safety
    /// `operation` is the address of the struct in a launch of this kernel.
    unsafe fn read(kernel: IndexKernel, operation: usize) -> Option<Self> {
        // SAFETY: members of the struct.
        let number = |offset: usize| unsafe { read::<u32>(operation + offset) }.map(|number| number as usize);
        // SAFETY: as above.
        let word = |index: usize| unsafe { read::<usize>(operation + CALCULATOR + 8 * index) };
        let count = number(0).filter(|&count| count <= MAX_DIMENSIONS)?;
        let dimension = |index: usize| {
            let stride = |operand| number(stride_at(index, operand, OPERANDS));
            Some((number(size_at(index))?, [stride(0)?, stride(1)?, stride(2)?]))
        };
        let dimensions = (0..count).map(dimension).collect::<Option<_>>()?;
        let index_width = kernel.index_width;
        let (addresses, places, stride) = match kernel.layout {
            IndexLayout::Index if word(2)? != 1 => return None,
            IndexLayout::Index => {
                ([word(0)?, word(1)?, word(3)?], word(3 + MAX_DIMENSIONS)?, word(3 + 2 * MAX_DIMENSIONS)?)
            }
            IndexLayout::Gather | IndexLayout::Scatter => {
                ([word(3)?, word(6)?, word(0)?], word(1)?, word(4)?.checked_mul(kernel.width)?)
            }
        };
        (places > 0).then_some(Self { dimensions, addresses, places, stride, index_width })
    }

    /// Returns the offsets in bytes of the element with the number `element` in the output, the input and the
    /// indices.
    fn offsets(&self, mut element: usize) -> [usize; OPERANDS] {
        let mut offsets = [0; OPERANDS];
        for (size, strides) in &self.dimensions {
            let at = element % size.max(&1);
            element /= size.max(&1);
            for (offset, stride) in offsets.iter_mut().zip(strides) {
                *offset += at * stride;
            }
        }
        offsets
    }

    /// Returns the number of bytes of an operand from the start of its first element to the end of its last
    /// one.
    fn length(&self, operand: usize, width: usize) -> usize {
        let last = |(size, strides): &(usize, [usize; OPERANDS])| {
            size.saturating_sub(1).saturating_mul(strides[operand])
        };
        self.dimensions.iter().map(last).fold(width, usize::saturating_add)
    }

    /// Returns the distance in bytes from the first to the last position that an index can select.
    fn span(&self) -> usize {
        (self.places - 1).saturating_mul(self.stride)
    }

    /// Returns the index at this offset from the known indices. If the indices are unknown, returns the index
    /// that evenly spaced indices in ascending order have there.
    fn index(&self, known: Option<&[u8]>, offset: usize) -> Option<usize> {
        let Some(bytes) = known else {
            let last = (self.length(2, self.index_width) / self.index_width - 1).max(1);
            return Some((offset / self.index_width).checked_mul(self.places - 1)? / last);
        };
        let bytes = bytes.get(offset..offset + self.index_width)?;
        let index = match bytes.try_into() {
            Ok(word) => i64::from_le_bytes(word),
            Err(_) => i64::from(i32::from_le_bytes(bytes.try_into().ok()?)),
        };
        let index = if index < 0 { index.checked_add_unsigned(self.places as u64)? } else { index };
        usize::try_from(index).ok().filter(|&index| index < self.places)
    }
}

/// Returns the output of a launch on `count` elements, and its address, or `None` if it is not known.
///
/// # Safety
/// Same as for [`Choice::read`], and the operands are valid for their elements.
pub(crate) unsafe fn choose(kernel: IndexKernel, count: usize, operation: usize) -> Option<(usize, Known)> {
    let width = kernel.width;
    // SAFETY: the caller's promise.
    let choice = unsafe { Choice::read(kernel, operation) }?;
    let [to, from, indices] = choice.addresses;
    let (mut size, mut source_size) = (choice.length(0, width), choice.length(1, width));
    let is_scatter = kernel.layout == IndexLayout::Scatter;
    let chosen = if is_scatter { &mut size } else { &mut source_size };
    *chosen = chosen.saturating_add(choice.span());
    let index_size = choice.length(2, choice.index_width);
    // An output with gaps is excluded, because it keeps the bytes between its elements.
    if size.max(source_size).max(index_size) > SMALL || count.checked_mul(width) != Some(size) {
        return None;
    }
    // SAFETY: the caller's promise.
    let (source, known) = unsafe { (read_known(from, source_size), read_known(indices, index_size)) };
    let source = source?;
    let is_answer = source.is_answer || known.as_ref().is_some_and(|known| known.is_answer);
    let (mut output, mut is_written) = (vec![0; size], vec![false; size]);
    for element in 0..count {
        let [mut target, mut start, at] = choice.offsets(element);
        let index = choice.index(known.as_ref().map(|known| known.bytes.as_slice()), at)?;
        *(if is_scatter { &mut target } else { &mut start }) += index * choice.stride;
        output.get_mut(target..target + width)?.copy_from_slice(source.bytes.get(start..start + width)?);
        is_written[target] = true;
    }
    let is_whole = is_written.iter().step_by(width).all(|&is_written| is_written);
    is_whole.then_some((to, Known { bytes: output, is_answer }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORDS: IndexKernel = IndexKernel { layout: IndexLayout::Index, width: 8, index_width: 8 };

    fn put(bytes: &mut [u8], place: usize, number: usize, width: usize) {
        bytes[place..place + width].copy_from_slice(&number.to_le_bytes()[..width]);
    }

    /// Builds the struct of a launch over one dimension, with these strides and members.
    fn functor(count: usize, strides: [usize; 3], members: &[(usize, usize)]) -> Vec<u8> {
        let mut bytes = vec![0; CALCULATOR + 8 * (3 + 3 * MAX_DIMENSIONS)];
        put(&mut bytes, 0, 1, 4);
        put(&mut bytes, 4, count, 4);
        for (operand, stride) in strides.into_iter().enumerate() {
            put(&mut bytes, stride_at(0, operand, OPERANDS), stride, 4);
        }
        for &(member, number) in members {
            put(&mut bytes, CALCULATOR + 8 * member, number, 8);
        }
        bytes
    }

    fn index(output: &mut [i64], input: &[i64], indices: &[i64]) -> Vec<u8> {
        let addresses = [output.as_mut_ptr() as usize, input.as_ptr() as usize, indices.as_ptr() as usize];
        let members =
            [(0, addresses[0]), (1, addresses[1]), (2, 1), (3, addresses[2]), (28, input.len()), (53, 8)];
        functor(output.len(), [8, 0, 8], &members)
    }

    #[test]
    fn kernels_that_choose_by_indices_are_recognized() {
        let of = |name: &str| IndexKernel::from_name(name.as_bytes());
        let scatter =
            "34_scatter_gather_elementwise_kernelILi128ELi8EZNS0_36_cuda_scatter_gather_internal_kernelILb";
        let assign = "clINS0_12TensorAssignEEEvRNS_";
        assert_eq!(
            of("24index_elementwise_kernelILi128EZNS0_17index_kernel_implINS0_10OpaqueTypeILi16EEEEEvR"),
            Some(IndexKernel { width: 16, ..WORDS })
        );
        assert_eq!(
            of("24index_elementwise_kernelILi128EZNS0_21index_put_kernel_implINS0_10OpaqueTypeILi8EEE"),
            None
        );
        for (element, layout, index_width) in [
            ("1ENS0_10OpaqueTypeILi8EEElE", IndexLayout::Scatter, 8),
            ("1ENS0_10OpaqueTypeILi8EEEiE", IndexLayout::Scatter, 4),
            ("0ENS0_10OpaqueTypeILi8EEEE", IndexLayout::Gather, 8),
        ] {
            let name = format!("{scatter}{element}{assign}");
            assert_eq!(of(&name), Some(IndexKernel { layout, width: 8, index_width }), "{name}");
        }
        assert_eq!(of(&format!("{scatter}1ENS0_10OpaqueTypeILi8EEEEclINS0_9ReduceAddEEE")), None);
        assert_eq!(of("24index_elementwise_kernel17index_kernel_impl10OpaqueTypeILi0EE"), None);
    }

    /// Returns the output of a launch of this kernel on `count` elements, or `None` if it is unknown.
    fn output(kernel: IndexKernel, count: usize, functor: &[u8]) -> Option<Vec<u8>> {
        // SAFETY: a struct of this layout; host memory is known.
        unsafe { choose(kernel, count, functor.as_ptr() as usize) }.map(|(_, known)| known.bytes)
    }

    #[test]
    fn known_indices_select_and_an_index_out_of_range_selects_nothing() {
        let input = [10, 20, 30, 40];
        let bytes =
            |numbers: [i64; 3]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<_>>();
        for (indices, expected) in
            [([3i64, 0, -1], Some([40i64, 10, 40])), ([4, 0, 0], None), ([-5, 0, 0], None)]
        {
            let functor = index(&mut [0; 3], &input, &indices);
            assert_eq!(output(WORDS, 3, &functor), expected.map(bytes), "{indices:?}");
        }
    }

    #[test]
    fn a_scatter_that_fills_its_output_is_known_and_another_is_not() {
        let kernel = IndexKernel { layout: IndexLayout::Scatter, width: 4, index_width: 4 };
        let (input, place) = ([10i32, 20, 30], [0i32; 3]);
        let bytes =
            |numbers: [i32; 3]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<_>>();
        for (indices, expected) in [([2i32, 0, 1], Some([20i32, 30, 10])), ([2, 2, 1], None)] {
            let addresses = [indices.as_ptr() as usize, place.as_ptr() as usize, input.as_ptr() as usize];
            let members = [(0, addresses[0]), (1, 3), (3, addresses[1]), (4, 1), (6, addresses[2])];
            let functor = functor(3, [0, 4, 4], &members);
            assert_eq!(output(kernel, 3, &functor), expected.map(bytes), "{indices:?}");
        }
    }

    #[test]
    fn hostile_structs_choose_nothing() {
        let (input, indices) = ([1i64, 2], [0i64, 1]);
        for (place, number) in [(0, 26u8), (CALCULATOR + 16, 2), (4, 255), (CALCULATOR + 8 * 28, 0)] {
            let mut functor = index(&mut [0; 2], &input, &indices);
            functor[place] = number;
            assert_eq!(output(WORDS, 2, &functor), None, "{place}");
        }
    }
}
