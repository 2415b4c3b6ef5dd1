//! The memory of a tensor, and its known contents.

use crate::core::torch_blocks;
use crate::core::values::SMALL;
use crate::cuda::copy::{self, Known};
use crate::ops::scalar_type;
use crate::ops::torch::{CPU_BIT, CUDA_BIT, TensorPlace, Torch};

/// `c10::DeviceType::CPU` and `CUDA`.
const CPU: i8 = 0;
const CUDA: i8 = 1;

/// The maximum number of elements in a tensor of integers or flags whose values are followed.
const MAX_WHOLE: usize = 1 << 20;

/// The maximum number of parts into which the elements of a tensor may be split.
const MAX_PARTS: usize = 1 << 12;

/// The location of a plain tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Host,
    Device,
    Undefined,
    /// The tensor is not a plain one: it is sparse, fake, wrapped or quantized.
    Elsewhere,
}

/// Returns the location of a tensor, from its dispatch keys.
///
/// # Safety
/// `tensor` is the address of a live `TensorImpl`.
pub(super) unsafe fn place_of(torch: &Torch, tensor: usize) -> Place {
    // SAFETY: the offset was determined from such an object.
    let keys = unsafe { ((tensor + torch.keys) as *const u64).read() };
    // SAFETY: a tensor with the keys of a plain one has a storage.
    let is_on = |device| unsafe { torch.storage_device(tensor) == Some(device) };
    if keys & CUDA_BIT != 0 && keys & !torch.device_keys == 0 && is_on(CUDA) {
        Place::Device
    } else if keys & CPU_BIT != 0 && keys & !torch.host_keys == 0 && is_on(CPU) {
        Place::Host
    } else if tensor == torch.undefined {
        Place::Undefined
    } else {
        Place::Elsewhere
    }
}

/// The shape, the type and the memory of a plain tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TensorMemory {
    pub(super) data: usize,
    /// The type of the elements, a `c10::ScalarType`.
    pub(super) dtype: i32,
    /// The size of an element in bytes.
    pub(super) width: usize,
    pub(super) sizes: Vec<i64>,
    /// The strides in elements.
    pub(super) strides: Vec<i64>,
}

impl TensorMemory {
    /// Returns the memory of a plain tensor, or `None` if its type is not followed.
    ///
    /// # Safety
    /// `place` contains the address of a live plain tensor.
    pub(super) unsafe fn from_tensor(torch: &Torch, place: TensorPlace) -> Option<Self> {
        let (mut dimensions, mut sizes, mut strides) = (0i64, std::ptr::null(), std::ptr::null());
        let (mut dtype, mut data) = (0i32, 0usize);
        // SAFETY: by the contract, and each result has a place of its own.
        unsafe {
            let failed = (torch.dimensions)(place, &raw mut dimensions)
                | (torch.sizes)(place, &raw mut sizes)
                | (torch.strides)(place, &raw mut strides)
                | (torch.dtype)(place, &raw mut dtype);
            let width = scalar_type::width(dtype).filter(|_| failed == 0)?;
            let dimensions = usize::try_from(dimensions).ok().filter(|&number| number <= 64)?;
            let list = |first: *const i64| match dimensions {
                0 => Vec::new(),
                _ => std::slice::from_raw_parts(first, dimensions).to_vec(),
            };
            let (sizes, strides) = (list(sizes), list(strides));
            let memory = Self { data: 0, dtype, width, sizes, strides };
            if memory.count() > 0 && (torch.data)(place, &raw mut data) != 0 {
                return None;
            }
            Some(Self { data, ..memory })
        }
    }

    /// Returns the number of elements.
    pub(super) fn count(&self) -> usize {
        self.sizes.iter().map(|&size| usize::try_from(size).unwrap_or(0)).fold(1, usize::saturating_mul)
    }

    /// Returns true if the elements are integers or flags.
    pub(super) fn is_whole(&self) -> bool {
        scalar_type::is_whole(self.dtype)
    }

    /// Returns true if the tensor is small enough for its values to be followed: up to 64 KiB, or up to
    /// [`MAX_WHOLE`] integers or flags.
    pub(super) fn is_small(&self) -> bool {
        let count = self.count();
        self.is_whole() && count <= MAX_WHOLE || count.saturating_mul(self.width) <= SMALL
    }

    /// Returns the number of bytes from the start of the first element to the end of the last one.
    pub(super) fn span(&self) -> usize {
        if self.count() == 0 {
            return 0;
        }
        let steps = self.sizes.iter().zip(&self.strides);
        let last: i64 = steps.map(|(size, stride)| (size - 1).saturating_mul(*stride)).sum();
        (usize::try_from(last).unwrap_or(usize::MAX / 16) + 1).saturating_mul(self.width)
    }

    /// Returns true if the two tensors may share memory.
    pub(super) fn overlaps(&self, other: &Self) -> bool {
        let (mine, others) = (self.span(), other.span());
        mine > 0 && others > 0 && self.data < other.data + others && other.data < self.data + mine
    }

    /// Returns true if every byte of the span belongs to an element.
    pub(super) fn is_dense(&self) -> bool {
        self.span() == self.count() * self.width
    }

    /// Returns true if the elements are stored in index order without gaps.
    pub(super) fn is_contiguous(&self) -> bool {
        let strides = self.contiguous_strides();
        self.sizes
            .iter()
            .zip(self.strides.iter().zip(&strides))
            .all(|(&size, (mine, other))| size == 1 || mine == other)
    }

    /// Returns the elements in index order as contiguous parts: the offsets of the parts in bytes, and the
    /// length of each part in bytes, which is never 0. A tensor without elements has no parts.
    fn parts(&self) -> (Vec<usize>, usize) {
        if self.count() == 0 {
            return (Vec::new(), self.width);
        }
        let (mut length, mut inner) = (self.width as i64, self.sizes.len());
        while inner > 0
            && (self.strides[inner - 1] * self.width as i64 == length || self.sizes[inner - 1] == 1)
        {
            length *= self.sizes[inner - 1];
            inner -= 1;
        }
        let mut offsets = vec![0i64];
        for (size, stride) in self.sizes[..inner].iter().zip(&self.strides) {
            let step = stride * self.width as i64;
            offsets =
                offsets.iter().flat_map(|start| (0..*size).map(move |index| start + index * step)).collect();
        }
        (offsets.into_iter().map(|offset| offset as usize).collect(), length as usize)
    }

    /// Returns the elements on a device in index order, if all are known.
    pub(super) fn known_elements(&self) -> Option<Known> {
        if self.count() == 0 {
            return Some(Known { bytes: Vec::new(), is_answer: false });
        }
        if self.is_contiguous() {
            // SAFETY: the memory of a tensor.
            return unsafe { copy::read_known(self.data, self.span()) };
        }
        // A large tensor that is not contiguous, such as a transposed weight, has many parts.
        if !self.is_small() {
            return None;
        }
        let (offsets, length) = self.parts();
        // SAFETY: as above.
        let whole = unsafe { copy::read_known(self.data, self.span()) };
        let mut known = Known { bytes: Vec::with_capacity(offsets.len() * length), is_answer: false };
        if whole.is_none() && offsets.len() > MAX_PARTS {
            return None;
        }
        for offset in offsets {
            match &whole {
                Some(whole) => known.bytes.extend_from_slice(&whole.bytes[offset..offset + length]),
                None => {
                    // SAFETY: as above.
                    let part = unsafe { copy::read_known(self.data + offset, length) }?;
                    known.is_answer |= part.is_answer;
                    known.bytes.extend_from_slice(&part.bytes);
                }
            }
        }
        known.is_answer |= whole.is_some_and(|whole| whole.is_answer);
        Some(known)
    }

    /// Returns true if at least one element on a device is known.
    pub(super) fn has_known_elements(&self) -> bool {
        let Some(device) = copy::device_of(self.data).filter(|_| self.count() > 0) else { return false };
        let known = device.values().known_parts(self.data, self.span());
        if known.is_empty() || self.is_dense() {
            return !known.is_empty();
        }
        let (offsets, length) = self.parts();
        offsets.iter().any(|offset| {
            let at = self.data + offset;
            known.iter().any(|&(start, end)| start < at + length && at < end)
        })
    }

    /// Returns the elements on a device in index order, with `fill` in each byte of the unknown elements.
    pub(super) fn filled_elements(&self, fill: u8) -> Option<Known> {
        let (offsets, length) = self.parts();
        let device = copy::device_of(self.data).filter(|_| offsets.len() <= MAX_PARTS)?;
        let known = device.values().known_parts(self.data, self.span());
        let is_answer = !device.values().answered_parts(self.data, self.span()).is_empty();
        let mut bytes = vec![fill; offsets.len() * length];
        for (index, offset) in offsets.into_iter().enumerate() {
            let at = self.data + offset;
            for &(start, end) in known.iter().filter(|&&(start, end)| start < at + length && at < end) {
                let (start, end) = (start.max(at), end.min(at + length));
                // Whole elements only.
                let first = (start - at).next_multiple_of(self.width);
                let last = (end - at) / self.width * self.width;
                if first < last {
                    // SAFETY: a known part of the tensor's memory, which is mapped.
                    let part = unsafe { copy::read_known(at + first, last - first) }?;
                    bytes[index * length + first..index * length + last].copy_from_slice(&part.bytes);
                }
            }
        }
        Some(Known { bytes, is_answer })
    }

    /// Makes the elements for which `is_known` is true the known content on a device.
    pub(super) fn write_some(&self, elements: &[u8], is_answer: bool, is_known: &[bool]) {
        let (offsets, length) = self.parts();
        if offsets.len() > MAX_PARTS {
            return;
        }
        let per_part = length / self.width;
        for ((part, is_known), offset) in
            elements.chunks_exact(length).zip(is_known.chunks_exact(per_part)).zip(offsets)
        {
            let mut first = 0;
            for run in is_known.chunk_by(|one, other| one == other) {
                let (start, end) = (first * self.width, (first + run.len()) * self.width);
                if run[0] {
                    let known = Known { bytes: part[start..end].to_vec(), is_answer };
                    // SAFETY: the memory of a tensor.
                    unsafe { copy::write_computed(self.data + offset + start, &known) };
                }
                first += run.len();
            }
        }
    }

    /// Returns the elements in host memory, in index order.
    ///
    /// # Safety
    /// The memory belongs to a live tensor on the host.
    pub(super) unsafe fn host_elements(&self) -> Vec<u8> {
        let (offsets, length) = self.parts();
        let mut bytes = Vec::with_capacity(offsets.len() * length);
        for offset in offsets {
            // SAFETY: the elements of the tensor.
            bytes.extend_from_slice(unsafe {
                std::slice::from_raw_parts((self.data + offset) as *const u8, length)
            });
        }
        bytes
    }

    /// Makes these elements, in index order, the known content on a device.
    pub(super) fn write(&self, elements: Known) {
        let (offsets, length) = self.parts();
        if let [0] = offsets.as_slice() {
            // SAFETY: the memory of a tensor.
            return unsafe { copy::write_computed(self.data, &elements) };
        }
        if offsets.len() > MAX_PARTS && !self.is_dense() {
            return;
        }
        if self.is_dense() {
            let mut bytes = vec![0; self.span()];
            for (part, offset) in elements.bytes.chunks_exact(length).zip(offsets) {
                bytes[offset..offset + length].copy_from_slice(part);
            }
            // SAFETY: as above.
            return unsafe { copy::write_computed(self.data, &Known { bytes, ..elements }) };
        }
        for (part, offset) in elements.bytes.chunks_exact(length).zip(offsets) {
            let part = Known { bytes: part.to_vec(), is_answer: elements.is_answer };
            // SAFETY: as above.
            unsafe { copy::write_computed(self.data + offset, &part) };
        }
    }

    /// Adds the known parts of the block around the tensor, if the block is small.
    pub(super) fn add_known(&self, parts: &mut Vec<Part>) {
        /// The maximum size of a block in bytes: enough for [`MAX_WHOLE`] integers.
        const MAX_BLOCK: usize = MAX_WHOLE * 8;
        if self.data == 0 {
            return;
        }
        let (start, end) = torch_blocks::find(self.data).unwrap_or((self.data, self.data + self.span()));
        let Some(device) = copy::device_of(start).filter(|_| end - start <= MAX_BLOCK) else { return };
        let values = device.values();
        let known = values.known_parts(start, end - start);
        if known.is_empty() {
            return;
        }
        let answered = values.answered_parts(start, end - start);
        parts.extend(known.into_iter().map(|(start, end)| Part { start, end, is_answer: false }));
        parts.extend(answered.into_iter().map(|(start, end)| Part { start, end, is_answer: true }));
    }

    /// Returns the memory of the elements: the start and the end of each part, or of the whole span if there
    /// are too many parts.
    fn element_ranges(&self) -> Vec<(usize, usize)> {
        if self.count() == 0 {
            return Vec::new();
        }
        let (offsets, length) = self.parts();
        if offsets.len() > MAX_PARTS || self.is_dense() {
            return vec![(self.data, self.data + self.span())];
        }
        offsets.into_iter().map(|offset| (self.data + offset, self.data + offset + length)).collect()
    }

    /// Returns the strides, in elements, of a contiguous tensor with the same sizes.
    pub(super) fn contiguous_strides(&self) -> Vec<i64> {
        let mut strides = vec![1; self.sizes.len()];
        for index in (1..self.sizes.len()).rev() {
            strides[index - 1] = strides[index] * self.sizes[index].max(1);
        }
        strides
    }
}

/// Memory with known content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    start: usize,
    end: usize,
    /// True if the content includes an answer that no kernel computed.
    is_answer: bool,
}

/// Restores the known contents of the blocks around written tensors, except for the tensors' elements.
/// Simulated kernels change no byte, so these contents are still there.
pub(super) fn keep(parts: &[Part], written: &[TensorMemory]) {
    let mut written: Vec<(usize, usize)> = written.iter().flat_map(TensorMemory::element_ranges).collect();
    written.sort_unstable();
    for part in parts {
        // The op may have freed a block, whose memory then belongs to other tensors.
        let is_there = torch_blocks::find(part.start).is_some_and(|(_, end)| part.end <= end);
        let Some(device) = copy::device_of(part.start).filter(|_| is_there) else { continue };
        let mut values = device.values();
        let mut start = part.start;
        for &(from, to) in written.iter().filter(|(from, to)| *from < part.end && part.start < *to) {
            if start < from {
                values.keep_known(start, from - start, part.is_answer);
            }
            start = start.max(to);
        }
        if start < part.end {
            values.keep_known(start, part.end - start, part.is_answer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_without_elements_has_no_parts_to_write() {
        let memory = |sizes: &[i64], strides: &[i64]| TensorMemory {
            data: 0,
            dtype: scalar_type::INT64,
            width: 8,
            sizes: sizes.to_vec(),
            strides: strides.to_vec(),
        };
        for (sizes, strides) in [([3, 0], [1, 1]), ([0, 3], [3, 1]), ([3, 0], [5, 1])] {
            let empty = memory(&sizes, &strides);
            assert_eq!(empty.parts(), (Vec::new(), 8), "{sizes:?}");
            empty.write(Known { bytes: Vec::new(), is_answer: false });
            empty.write_some(&[], false, &[]);
            // SAFETY: there are no elements.
            assert!(unsafe { empty.host_elements() }.is_empty());
        }
        assert_eq!(memory(&[2, 3], &[4, 1]).parts(), (vec![0, 32], 24));
    }
}
