//! PyTorch's tensor lists, which are kernel parameters in its `_foreach` functions and fused optimizers.
//!
//! A list has space for more tensors than a launch uses. The rest contains leftovers from an earlier launch
//! or from the stack: addresses of blocks that have other owners by now. Each block of threads works on one
//! tensor, whose number is in the list. So a launch works on the tensors of its blocks and on no other ones (ATen's
//! `MultiTensorApply.cuh`, PyTorch 1.12 to 2.12; NVIDIA's apex has the same lists).

use crate::core::addresses::may_be_address;

/// The capacity of a list with 1 to 6 rows of tensors.
struct Limits {
    /// The maximum number of tensors in a list without scalars, for each number of rows.
    tensors: [usize; 6],
    /// The maximum number of tensors in a list that has a scalar for each tensor.
    with_numbers: [usize; 6],
    /// The maximum number of tensors in a list whose scalars are complex numbers of two doubles, for 1 to 4
    /// rows.
    with_complex_doubles: [usize; 4],
    /// The maximum number of blocks of threads, for each number of rows.
    blocks: [usize; 6],
}

/// The capacities with 4 KB of parameters, and with 32 KB (compute capability 7.0 and later).
const LIMITS: [Limits; 2] = [
    Limits {
        tensors: [110, 64, 48, 36, 30, 24],
        with_numbers: [96, 64, 48, 36, 30, 24],
        with_complex_doubles: [72, 60, 48, 36],
        blocks: [320; 6],
    },
    Limits {
        tensors: [256; 6],
        with_numbers: [256; 6],
        with_complex_doubles: [194, 182, 170, 158],
        blocks: [5272, 4863, 4453, 4044, 3634, 3634],
    },
];

const ADDRESS: usize = size_of::<usize>();
/// The size of a complex number of two doubles in bytes.
const COMPLEX_DOUBLE: usize = 16;

/// The locations of the addresses in a tensor list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TensorList {
    /// The number of rows. A row has the addresses of one tensor operand.
    rows: usize,
    /// The number of tensors in a row.
    tensors: usize,
    /// The offset of an additional row for the optimizer's step counts.
    steps: Option<usize>,
    /// The offset of the array with each block's tensor number (one byte per block), and the number of
    /// blocks.
    blocks: (usize, usize),
}

impl TensorList {
    /// Returns the layout of a parameter with this demangled type and size, or `None` if it is not such a
    /// list.
    pub(crate) fn from_name(parameter: &str, size: usize) -> Option<Self> {
        let name = parameter.split('<').next()?.rsplit(':').next()?;
        let arguments = parameter.split_once('<')?.1;
        let (rows, scalars, has_steps): (_, &[usize], _) = match name {
            "TensorListMetadata" => (arguments, &[0], false),
            "FusedOptimizerTensorListMetadata" => (arguments, &[0], true),
            // The template arguments are the type of the scalars, followed by the number of rows.
            "TensorListScalarListMetadata" => match arguments.strip_prefix("c10::complex<double>, ") {
                Some(rows) => (rows, &[COMPLEX_DOUBLE], false),
                None => (arguments.split_once(", ")?.1, &[1, 2, 4, 8], false),
            },
            _ => return None,
        };
        let digits = rows.bytes().take_while(u8::is_ascii_digit).count();
        let rows: usize = rows.get(..digits)?.parse().ok()?;
        // Element counts have 64 bits since PyTorch 2.1; before that, and in apex, they have 32 bits.
        let forms = LIMITS.iter().flat_map(|limits| [8, 4].map(|count| (limits, count)));
        let mut layouts = forms.flat_map(|(limits, count)| {
            scalars.iter().filter_map(move |&scalar| {
                Self::layout(limits, rows, count, scalar, has_steps).filter(|(_, end)| *end == size)
            })
        });
        layouts.next().map(|(list, _)| list)
    }

    /// Returns the layout with these limits, and its size. `count` is the size of an element count, and
    /// `scalar` is the size of the scalar of each tensor.
    fn layout(
        limits: &Limits,
        rows: usize,
        count: usize,
        scalar: usize,
        has_steps: bool,
    ) -> Option<(Self, usize)> {
        let row = rows.checked_sub(1)?;
        let tensors = match scalar {
            0 => limits.tensors.get(row),
            COMPLEX_DOUBLE => limits.with_complex_doubles.get(row),
            _ => limits.with_numbers.get(row),
        };
        let tensors = *tensors?;
        let mut end = tensors * (rows * ADDRESS + count);
        let mut steps = None;
        if has_steps {
            end = end.next_multiple_of(ADDRESS);
            steps = Some(end);
            end += limits.with_numbers[row] * ADDRESS;
        }
        if scalar != 0 {
            end = end.next_multiple_of(scalar) + tensors * scalar;
        }
        let blocks = (end, limits.blocks[row]);
        // For each block, the list has one byte for the number of its tensor, then four bytes for the number
        // of its chunk. A list without scalars ends with the number of its first tensor.
        end = (end + blocks.1).next_multiple_of(4) + 4 * blocks.1;
        if scalar == 0 {
            end += 4;
        }
        Some((Self { rows, tensors, steps, blocks }, end.next_multiple_of(ADDRESS.max(scalar))))
    }

    /// Calls `found` with each device address in a launch with this number of blocks.
    pub(crate) fn addresses(&self, bytes: &[u8], blocks: u32, mut found: impl FnMut(usize)) {
        let (start, most) = self.blocks;
        let numbers = bytes.get(start..start + most.min(blocks as usize)).unwrap_or_default();
        let mut last = None;
        for &tensor in numbers {
            // The blocks of one tensor are consecutive, so each tensor is visited once.
            if last.replace(tensor) == Some(tensor) {
                continue;
            }
            let tensor = usize::from(tensor);
            let rows = (0..self.rows).map(|row| (row * self.tensors + tensor) * ADDRESS);
            for place in rows.chain(self.steps.map(|start| start + tensor * ADDRESS)) {
                let word = bytes.get(place..place + ADDRESS).and_then(|word| word.try_into().ok());
                if let Some(address) = word.map(usize::from_le_bytes)
                    && may_be_address(address)
                {
                    found(address);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: usize = 0x1000_0020_0000;

    fn put(bytes: &mut [u8], place: usize, address: usize) {
        bytes[place..place + 8].copy_from_slice(&address.to_le_bytes());
    }

    fn found(list: TensorList, bytes: &[u8], blocks: u32) -> Vec<usize> {
        let mut all = Vec::new();
        list.addresses(bytes, blocks, |address| all.push(address));
        all
    }

    #[test]
    fn a_list_is_known_by_its_name_and_its_size() {
        let list = |name: &str, size| TensorList::from_name(name, size).map(|list| (list.rows, list.tensors));
        const METADATA: &str = "at::native::(anonymous namespace)::TensorListMetadata<2>";
        assert_eq!(list(METADATA, 3144), Some((2, 64)));
        assert_eq!(list(METADATA, 3148), None);
        assert_eq!(
            list("at::native::(anonymous namespace)::TensorListMetadata<2, true>", 30464),
            Some((2, 256))
        );
        assert_eq!(list("TensorListMetadata<6>", 2856), Some((6, 24)), "apex");
        let scalars =
            |scalar| format!("at::native::(anonymous namespace)::TensorListScalarListMetadata<{scalar}>");
        assert_eq!(list(&scalars("float, 1"), 3520), Some((1, 96)));
        assert_eq!(list(&scalars("double, 3"), 3520), Some((3, 48)));
        assert_eq!(list(&scalars("double, 1"), 3904), Some((1, 96)), "as large as the next");
        assert_eq!(list(&scalars("c10::complex<double>, 1"), 3904), Some((1, 72)));
        assert_eq!(list(&scalars("c10::complex<float>, 2"), 3648), Some((2, 64)));
        let fused = "at::native::(anonymous namespace)::FusedOptimizerTensorListMetadata<4>";
        assert_eq!(list(fused, 3336), Some((4, 36)));
        for hostile in ["", "<", "TensorListMetadata", "TensorListMetadata<>", "TensorListMetadata<0>"] {
            assert_eq!(list(hostile, 3144), None);
        }
        for hostile in ["TensorListMetadata<7>", "TensorListMetadata<99999999999999999999999>"] {
            assert_eq!(list(hostile, 3144), None);
        }
    }

    #[test]
    fn only_the_tensors_of_the_launched_blocks_count() {
        let list = TensorList::from_name("TensorListMetadata<2>", 3144).unwrap();
        let mut bytes = vec![0; 3144];
        for place in 0..128 {
            put(&mut bytes, place * 8, FIRST + place * 512);
        }
        let blocks = 64 * 2 * 8 + 64 * 8;
        // Setup: a launch of three blocks, with two chunks of tensor 0 and one chunk of tensor 1. The rest of
        // the list is left over from another launch.
        bytes[blocks..blocks + 4].copy_from_slice(&[0, 0, 1, 60]);
        assert_eq!(found(list, &bytes, 3), [FIRST, FIRST + 64 * 512, FIRST + 512, FIRST + 65 * 512]);
        assert_eq!(found(list, &bytes, 0), []);
        // Setup: more blocks than the list has space for -> the maximum of the list counts. A list that is
        // cut off -> no addresses.
        assert!(found(list, &bytes, u32::MAX).len() >= 6);
        assert_eq!(found(list, &bytes[..100], 3), []);
        assert_eq!(found(list, &[], u32::MAX), []);
        // Setup: a tensor number past the end of the row -> other bytes of the parameter are read, but none
        // past its end.
        bytes[blocks] = 255;
        assert!(found(list, &bytes, 1).len() <= 2);
    }

    #[test]
    fn the_steps_of_a_fused_optimizer_are_reached() {
        let list = TensorList::from_name("FusedOptimizerTensorListMetadata<4>", 3336).unwrap();
        let mut bytes = vec![0; 3336];
        put(&mut bytes, 0, FIRST);
        put(&mut bytes, 36 * 5 * 8, FIRST + 4096);
        put(&mut bytes, 36 * 5 * 8 + 8, FIRST + 8192);
        assert_eq!(found(list, &bytes, 1), [FIRST, FIRST + 4096]);
    }
}
