//! Results of ops whose inputs are partly known, such as a sequence of known and generated tokens.
//!
//! The op runs three times on the host, with other values in the unknown places each time. The elements of
//! the result on which all runs agree do not depend on the unknown values, so they are known: the known part
//! of a concatenation or a comparison, `False & unknown`, the start of a running sum.
//!
//! Only integers and flags may be unknown, because these steer programs.

use crate::core::values::SMALL;
use crate::cuda::copy::{self, Known};
use crate::ops::ordinary::Question;
use crate::ops::scalar_type::BOOL;
use crate::ops::tensor::TensorMemory;
use crate::ops::torch::Torch;
use crate::ops::values::{Value, Values};

/// What a run has in place of the unknown elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fill {
    /// A large number, or true. Tensors at other addresses mostly get another number.
    Large,
    /// A negative number of large magnitude, or false.
    Negative,
    Zero,
    /// Like `Large`, with another assignment of numbers to addresses.
    OtherLarge,
}

impl Fill {
    /// Returns the byte with which the unknown elements of a tensor are filled.
    pub(super) fn byte(self, memory: &TensorMemory) -> u8 {
        let hash = (memory.data as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let is_flag = memory.dtype == BOOL;
        match self {
            Self::Zero => 0,
            Self::Negative if is_flag => 0,
            Self::Large | Self::OtherLarge if is_flag => 1,
            Self::Large => 0x7F - (hash >> 60) as u8,
            Self::Negative => 0x80 + (hash >> 56 & 15) as u8,
            Self::OtherLarge => 0x7F - (hash >> 52 & 15) as u8,
        }
    }
}

/// Returns for each of `count` elements of `width` bytes whether all results have the same value.
fn agreements(results: &[Vec<u8>], count: usize, width: usize) -> Vec<bool> {
    let is_same = |index: usize| {
        let mut values = results.iter().map(|result| result.get(index * width..(index + 1) * width));
        let first = values.next();
        values.all(|value| Some(value) == first)
    };
    (0..count).map(is_same).collect()
}

/// The arguments of an op whose inputs are partly known, once for each run.
pub(super) struct Partial {
    pub(super) runs: Vec<Values>,
    question: Option<Question>,
}

impl Partial {
    /// Copies the arguments of an op. Returns `None` if no element of the result can be known.
    ///
    /// # Safety
    /// `inputs` are the live inputs of an op.
    pub(super) unsafe fn read(
        torch: &'static Torch,
        question: Option<Question>,
        overwrites: bool,
        inputs: &[Value],
    ) -> Option<Self> {
        let is_small_whole =
            |memory: &TensorMemory| memory.is_whole() && memory.count().saturating_mul(memory.width) <= SMALL;
        let mut has_known = false;
        for value in inputs {
            // SAFETY: by the contract.
            unsafe {
                value.each_on_device(torch, |memory| {
                    has_known |= is_small_whole(&memory) && memory.has_known_elements();
                });
            }
        }
        // Most ops have no such input, so the others are examined only now.
        let mut is_followed = has_known;
        for value in inputs.iter().filter(|_| has_known) {
            // SAFETY: by the contract.
            unsafe {
                value.each_on_device(torch, |memory| {
                    is_followed &= is_small_whole(&memory) || memory.known_elements().is_some();
                });
            }
        }
        if !is_followed {
            return None;
        }
        // An unknown number equals no other number, so a test for equality does not need to try zero.
        let third =
            if matches!(question, Some(Question::Equality(_))) { Fill::OtherLarge } else { Fill::Zero };
        let mut runs = Vec::new();
        for fill in [Fill::Large, Fill::Negative, third] {
            let mut values = Values::filled(torch, fill);
            for (index, value) in inputs.iter().enumerate() {
                // SAFETY: by the contract.
                unsafe { values.add(value, index == 0 && overwrites) }?;
            }
            runs.push(values);
        }
        Some(Self { runs, question })
    }

    /// Writes the elements of an output on which the runs agree. Returns true if all elements are known then.
    pub(super) fn write(&self, output: &TensorMemory, results: &[Vec<u8>]) -> bool {
        let Some(first) = results.first() else { return false };
        let is_same = agreements(results, output.count(), output.width);
        let mut is_answer = self.runs.first().is_some_and(|values| values.is_answer);
        if let Some(Question::Equality(is_equal)) = self.question {
            // A known element that was searched for decides: then the unknown elements are others. Without
            // one, they are only expected to be others.
            let is_found = |(index, same): (usize, &bool)| *same && first[index] == u8::from(is_equal);
            if output.dtype != BOOL || !is_same.iter().enumerate().any(is_found) {
                return false;
            }
            is_answer = true;
        }
        if is_same.iter().all(|same| *same) {
            output.write(Known { bytes: first.clone(), is_answer });
            return true;
        }
        let is_mask = copy::device_of(output.data)
            .is_some_and(|device| device.values().is_mask(output.data, output.span()));
        output.write_some(first, is_answer, &is_same);
        if let Some(device) = copy::device_of(output.data).filter(|_| is_mask) {
            device.values().add_mask(output.data, output.span());
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tensor of two numbers at an address.
    fn tensor(data: usize, dtype: i32) -> TensorMemory {
        TensorMemory { data, dtype, width: 8, sizes: vec![2], strides: vec![1] }
    }

    #[test]
    fn elements_on_which_all_runs_agree_are_known() {
        let running_sums = [vec![1, 0, 5, 0, 9, 1], vec![1, 0, 5, 0, 9, 2], vec![1, 0, 5, 0, 0, 0]];
        assert_eq!(agreements(&running_sums, 3, 2), [true, true, false]);
        assert_eq!(agreements(&running_sums, 6, 1), [true, true, true, true, false, false]);
        assert_eq!(agreements(&running_sums[..1], 3, 2), [true; 3]);
        assert_eq!(agreements(&[vec![1, 2], vec![1]], 2, 1), [true, false], "a result that is too short");
        assert_eq!(agreements(&running_sums, 0, 2), []);
    }

    #[test]
    fn the_runs_fill_unknown_numbers_with_large_negative_and_zero_bytes_and_flags_with_both_values() {
        const INT64: i32 = 4;
        for data in (0x7000_0000_0000usize..).step_by(512).take(1000) {
            let byte = |fill: Fill| fill.byte(&tensor(data, INT64)) as i8;
            assert!(
                byte(Fill::Large) > 0x60 && byte(Fill::OtherLarge) > 0x60 && byte(Fill::Negative) < -0x60
            );
            assert_eq!(byte(Fill::Zero), 0);
            let flags = [Fill::Large, Fill::Negative, Fill::Zero, Fill::OtherLarge];
            assert_eq!(flags.map(|fill| fill.byte(&tensor(data, BOOL))), [1, 0, 0, 1]);
        }
        // Two tensors with unknown numbers mostly get other numbers, so they are not taken as equal.
        let bytes: std::collections::BTreeSet<u8> = (0x7000_0000_0000usize..)
            .step_by(512)
            .take(1000)
            .map(|data| Fill::Large.byte(&tensor(data, INT64)))
            .collect();
        assert!(bytes.len() > 8, "{bytes:?}");
    }
}
