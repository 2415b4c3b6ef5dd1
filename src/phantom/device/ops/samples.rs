//! Outputs that nothing computed and for which an ordinary number is not enough: indices, samples and counts.
//! They are spread evenly over the values to choose from. So a router gives each expert its share, and a
//! check that a sample is in its support passes.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::core::values::SMALL;
use crate::cuda::copy::{self, Known};
use crate::ops::scalar_type::{BFLOAT16, BOOL, FLOAT16, FLOAT32, FLOAT64, INT8, INT16, INT32, INT64, UINT8};
use crate::ops::tensor::TensorMemory;
use crate::ops::torch::{Tag, Torch};
use crate::ops::values::Value;

/// The assumption about an op's output if nothing computes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sample {
    /// The indices of the largest elements.
    Largest,
    /// The indices that are drawn from a distribution.
    Drawn,
    /// The indices of the nonzero elements.
    Nonzero,
    /// A permutation.
    Permutation,
    /// Flags that are true with a given probability.
    Coins,
    /// The remainder of a division by one, which is 0 because a sample is a whole number.
    Rest,
    /// Zeros, the initial value of a mask.
    Zeros,
    /// A number written to selected elements of a tensor, such as a mask of zeros.
    Scatter,
    /// A copy of flags, possibly with another type.
    Same,
    /// Flags that show whether elements differ from a number, or are greater.
    Test,
    /// The number of true flags.
    Sum,
}

/// The sizes and the numbers among the arguments of an op, and the fraction of nonzero elements in the first
/// tensor.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Arguments {
    sizes: Vec<i64>,
    numbers: Vec<f64>,
    /// The number of elements in the tensor of indices.
    indices: usize,
    nonzero_fraction: Option<f64>,
}

/// The maximum number of positions over which indices are spread. It is enough for the experts of a router,
/// but not for a vocabulary.
const MAX_PLACES: i64 = 4096;

/// The maximum number of candidates that a beam search takes from a larger row.
const MAX_BEAMS: i64 = 64;

impl Sample {
    /// Returns the sample of an op. `base` is its name without a namespace.
    pub(super) fn for_op(base: &str) -> Option<Self> {
        Some(match base.trim_end_matches('_') {
            "topk" => Self::Largest,
            "multinomial" => Self::Drawn,
            "nonzero" => Self::Nonzero,
            "randperm" => Self::Permutation,
            "bernoulli" => Self::Coins,
            "remainder" | "fmod" => Self::Rest,
            "zero" | "zeros" | "zeros_like" | "new_zeros" => Self::Zeros,
            "scatter" => Self::Scatter,
            "clone" | "contiguous" | "_to_copy" => Self::Same,
            "ne" | "gt" => Self::Test,
            "sum" => Self::Sum,
            _ => return None,
        })
    }

    /// Returns the index of this output among the outputs of the op.
    pub(super) fn output(self) -> usize {
        usize::from(self == Self::Largest)
    }

    /// Returns true if the output is derived from the fraction of nonzero elements. This fraction is also
    /// tracked for tensors that are too large to follow each element.
    fn is_of_fractions(self) -> bool {
        matches!(self, Self::Zeros | Self::Scatter | Self::Same | Self::Test | Self::Sum)
    }

    /// Writes the output of an op that draws, or whose inputs are not all known.
    pub(super) fn write(self, arguments: &Arguments, output: &TensorMemory) {
        if self.is_of_fractions() {
            return self.write_fraction(arguments, output);
        }
        let Some(bytes) = self.bytes(arguments, output) else { return };
        output.write(Known { bytes, is_answer: true });
    }

    fn bytes(self, arguments: &Arguments, output: &TensorMemory) -> Option<Vec<u8>> {
        let count = output.count();
        if !output.is_small() || count == 0 || self != Self::Drawn && output.known_elements().is_some() {
            return None;
        }
        let is_index = output.dtype == INT64;
        let whole =
            |numbers: &mut dyn Iterator<Item = i64>| Some(numbers.flat_map(i64::to_le_bytes).collect());
        match self {
            Self::Largest | Self::Drawn => {
                let ((&places, rows), (&chosen, output_rows)) =
                    arguments.sizes.split_last().zip(output.sizes.split_last())?;
                if !is_index || rows != output_rows || places < 1 || chosen < 1 {
                    return None;
                }
                if places > MAX_PLACES {
                    // The indices of the largest elements are distinct, as a beam search expects.
                    let is_beam = self == Self::Largest && chosen <= MAX_BEAMS.min(places);
                    let place = |index: i64| (places * 5 / 8 + index % chosen * (places / chosen)) % places;
                    return is_beam
                        .then(|| (0..count as i64).flat_map(|index| place(index).to_le_bytes()).collect());
                }
                // A draw starts in the middle, because the first and the last value are often special.
                let first = if self == Self::Drawn { places / 2 } else { 0 };
                whole(&mut (0..count as i64).map(|index| (first + index) % places))
            }
            Self::Nonzero => {
                let &[found, dimensions] = output.sizes.as_slice() else { return None };
                let all = arguments.sizes.iter().product::<i64>();
                if !is_index || dimensions as usize != arguments.sizes.len() || found > all {
                    return None;
                }
                let places = (1..=i128::from(found)).flat_map(|index| {
                    let mut place = (index * i128::from(all) / i128::from(found)) as i64 - 1;
                    let mut indices = vec![0; arguments.sizes.len()];
                    for (index, &size) in indices.iter_mut().zip(&arguments.sizes).rev() {
                        *index = place % size;
                        place /= size;
                    }
                    indices
                });
                whole(&mut { places })
            }
            Self::Permutation if is_index => {
                let first = next_start(count);
                whole(&mut (0..count).map(|index| ((first + index) % count) as i64))
            }
            Self::Coins => {
                let chance = arguments.numbers.first().copied().unwrap_or(0.5).clamp(0.0, 1.0);
                let one = one(output.dtype)?;
                let zero = vec![0; one.len()];
                let heads = |index: usize| (index as f64 * chance + 0.5) as usize;
                Some(
                    (0..count)
                        .flat_map(
                            |index| if heads(index + 1) > heads(index) { one.clone() } else { zero.clone() },
                        )
                        .collect(),
                )
            }
            Self::Rest => (arguments.numbers.first() == Some(&1.0)).then(|| vec![0; count * output.width]),
            _ => None,
        }
    }

    /// Records the fraction of nonzero elements of an output that is too large to record each element. For
    /// `Sum`, writes the counts that follow from the fraction of the input instead.
    fn write_fraction(self, arguments: &Arguments, output: &TensorMemory) {
        let (count, fraction) = (output.count(), arguments.nonzero_fraction);
        let all = arguments.sizes.iter().map(|&size| size as usize).product::<usize>();
        if self == Self::Sum {
            let Some(fraction) = fraction.filter(|_| output.is_small() && count > 0) else { return };
            let number = (fraction * (all / count) as f64).round() as i64;
            let bytes: Vec<u8> = match output.dtype {
                INT64 => number.to_le_bytes().repeat(count),
                INT32 => (number as i32).to_le_bytes().repeat(count),
                _ => return,
            };
            return output.write(Known { bytes, is_answer: true });
        }
        if !output.is_whole() || output.is_small() || !output.is_dense() {
            return;
        }
        let fraction = match self {
            Self::Zeros => Some(0.0),
            // The op writes a nonzero number at the selected positions, which are assumed to be distinct.
            Self::Scatter if matches!(arguments.numbers.as_slice(), [_, number] if *number != 0.0) => {
                fraction.map(|fraction| (fraction + arguments.indices as f64 / count as f64).min(1.0))
            }
            Self::Same if all == count => fraction,
            Self::Test if all == count && arguments.numbers == [0.0] => fraction,
            _ => None,
        };
        if let (Some(fraction), Some(device)) = (fraction, copy::device_of(output.data)) {
            device.values().set_nonzero_fraction(output.data, output.span(), fraction);
        }
    }
}

/// Returns the first value of the next permutation of `count` numbers. Consecutive permutations start far
/// apart, so a program that takes the first numbers of two permutations gets different ones.
fn next_start(count: usize) -> usize {
    static PERMUTATIONS: AtomicUsize = AtomicUsize::new(0);
    /// The golden ratio, with which consecutive starts are far apart.
    const STEP: f64 = 0.618_033_988_749_895;
    let number = PERMUTATIONS.fetch_add(1, Ordering::Relaxed) % 4096;
    ((number as f64 * STEP).fract() * count as f64) as usize
}

impl Arguments {
    /// Reads the arguments of an op.
    ///
    /// # Safety
    /// `inputs` are live inputs of an op.
    pub(super) unsafe fn read(torch: &Torch, inputs: &[Value]) -> Self {
        let mut arguments = Self::default();
        let mut tensors = 0;
        for value in inputs {
            // SAFETY: by the contract.
            unsafe {
                if value.kind() == Tag::Tensor {
                    value.each_on_device(torch, |memory| {
                        tensors += 1;
                        if tensors == 1 {
                            arguments.nonzero_fraction = copy::device_of(memory.data).and_then(|device| {
                                device.values().nonzero_fraction(memory.data, memory.span())
                            });
                            arguments.sizes = memory.sizes;
                        } else {
                            arguments.indices = memory.count();
                        }
                    });
                } else if let Some(number) = value.number() {
                    arguments.numbers.push(number);
                }
            }
        }
        arguments
    }

    /// Returns the number of nonzero elements in the first tensor, from its fraction of nonzero elements.
    pub(super) fn nonzero(&self) -> Option<u64> {
        let all: i64 = self.sizes.iter().product();
        self.nonzero_fraction.map(|fraction| (fraction * all as f64).round() as u64)
    }
}

/// Returns the bytes of the number 1 in a type of PyTorch.
fn one(dtype: i32) -> Option<Vec<u8>> {
    Some(match dtype {
        UINT8 | INT8 | BOOL => vec![1],
        INT16 => 1i16.to_le_bytes().to_vec(),
        INT32 => 1i32.to_le_bytes().to_vec(),
        INT64 => 1i64.to_le_bytes().to_vec(),
        FLOAT16 => 0x3C00u16.to_le_bytes().to_vec(),
        BFLOAT16 => 0x3F80u16.to_le_bytes().to_vec(),
        FLOAT32 => 1f32.to_le_bytes().to_vec(),
        FLOAT64 => 1f64.to_le_bytes().to_vec(),
        _ => return None,
    })
}

/// Returns the number of positions from which each index tensor in the argument at `position` chooses: the
/// sizes of the indexed dimensions. Returns `None` if the argument contains no indices.
///
/// # Safety
/// `inputs` are live inputs of an op.
pub(super) unsafe fn places(
    torch: &Torch,
    base: &str,
    position: usize,
    inputs: &[Value],
) -> Option<Vec<i64>> {
    let position_of_indices = match base.trim_end_matches('_').trim_start_matches('_') {
        "gather" | "index_select" => 2,
        "index" | "index_put" | "index_put_impl" | "unsafe_index" | "unsafe_index_put" => 1,
        _ => return None,
    };
    if position != position_of_indices {
        return None;
    }
    let mut sizes = Vec::new();
    // SAFETY: by the contract.
    unsafe { inputs.first()?.each_on_device(torch, |memory| sizes = memory.sizes) };
    if position == 1 {
        return Some(sizes);
    }
    let dimension = inputs.get(1)?.number()? as i64;
    let dimension = if dimension < 0 { dimension + sizes.len() as i64 } else { dimension };
    sizes.get(usize::try_from(dimension).ok()?).map(|&size| vec![size])
}

/// Returns indices spread evenly over `places`, in ascending order. Returns `None` if `memory` is not a small
/// tensor of indices.
pub(super) fn indices(memory: &TensorMemory, places: i64) -> Option<Vec<u8>> {
    let count = memory.count();
    if count * memory.width > SMALL || places < 1 {
        return None;
    }
    let last = (count as i64 - 1).max(1);
    let index = (0..count as i64).map(|index| index * (places - 1) / last);
    match memory.dtype {
        INT64 => Some(index.flat_map(i64::to_le_bytes).collect()),
        INT32 => Some(index.flat_map(|index| (index as i32).to_le_bytes()).collect()),
        _ => None,
    }
}
