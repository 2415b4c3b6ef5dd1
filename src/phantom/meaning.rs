//! Kernels whose effect can be told from their name and arguments, though none of them runs.
//!
//! Four kinds are worth it. Counting kernels: their result becomes the size of a tensor, so what it
//! reads as is an assumption that the user can set ([`Dynamic`](crate::values::Dynamic)). Fills: small
//! ones are really done, so `torch.ones(3)` reads as ones. Comparisons of small known tensors: Python's
//! own `max` over tensors, by which ranks agree on a size, asks for them. Elementwise kernels: they
//! write one range and leave what is known of all other memory alone.
//!
//! A kernel is known by its mangled name, which the program registers before it can launch it; its
//! arguments are as PyTorch, CUB and Thrust declare them. A kernel whose name or arguments changed is
//! no longer recognized: a count then reads as zero, and memory as unknown.

use std::cell::Cell;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use crate::copy::{forget, read_host, read_known, set, write_known};
use crate::ffi::Out;
use crate::machine::machine;
use crate::reduce;
use crate::stream::stream;
use crate::values::SMALL;

/// What a kernel does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Meaning {
    /// `cub::DeviceReduceSingleTileKernel` over a test for nonzero: (in, out, count, ...).
    Nonzero = 1,
    /// `cub::DeviceReduceKernel` over a test for nonzero: (in, partial results, count, ...).
    NonzeroPart = 2,
    /// `cub::DeviceReduceSingleTileKernel` over anything, which may finish the above.
    Finish = 3,
    /// `cub::DeviceSelectSweepKernel` by equality: (in, flags, out, count out, tiles, op, equality, count, ...).
    Unique = 4,
    /// `cub::DeviceReduceByKeyKernel` that encodes run lengths: (in, out, values, lengths, count out,
    /// tiles, first tile, equality, op, count).
    Runs = 5,
    /// Thrust's `unique`: (in, out, predicate, count out, count, ...).
    ThrustUnique = 6,
    /// An elementwise kernel of PyTorch: (count, function, addresses, ...), the output's first.
    Elementwise = 7,
    /// The same with a function that gives one value of so many bytes.
    Fill1 = 8,
    Fill2 = 9,
    Fill4 = 10,
    Fill8 = 11,
    /// The same that compares its two inputs: the function is which of `>= > <= <`. Elements of
    /// int32, int64, float, double.
    Compare2 = 12,
    Compare4 = 13,
    Compare7 = 14,
    Compare8 = 15,
}

impl Meaning {
    const ALL: [Self; 15] = [
        Self::Nonzero,
        Self::NonzeroPart,
        Self::Finish,
        Self::Unique,
        Self::Runs,
        Self::ThrustUnique,
        Self::Elementwise,
        Self::Fill1,
        Self::Fill2,
        Self::Fill4,
        Self::Fill8,
        Self::Compare2,
        Self::Compare4,
        Self::Compare7,
        Self::Compare8,
    ];

    fn of(name: &[u8]) -> Option<Self> {
        let has = |part: &[u8]| find(name, part);
        // The unrolled form may convert types and walk over strides; the vectorized one never does.
        let plain = has(b"vectorized_elementwise_kernel");
        if plain || has(b"unrolled_elementwise_kernel") {
            let known = plain || has(b"TrivialOffset") && !has(b"WithCast");
            let function = known.then(|| Self::fill(name).or_else(|| Self::compare(name))).flatten();
            return Some(function.unwrap_or(Self::Elementwise));
        }
        if has(b"DeviceReduce") {
            return match (has(b"SingleTileKernel"), has(b"NonZeroOp"), has(b"ByKeyKernel")) {
                (true, true, _) => Some(Self::Nonzero),
                (true, false, _) => Some(Self::Finish),
                (false, true, false) => Some(Self::NonzeroPart),
                // Only run lengths add up a constant.
                (false, _, true) if has(b"rle") || has(b"ConstantInput") || has(b"constant_iter") => {
                    Some(Self::Runs)
                }
                _ => None,
            };
        }
        if has(b"DeviceSelectSweepKernel") {
            return has(b"equal_to").then_some(Self::Unique);
        }
        has(b"UniqueAgent").then_some(Self::ThrustUnique)
    }

    /// The mangled name of the type on which the kernel's function `functor<T>` works.
    fn type_of<'a>(name: &'a [u8], functor: &[u8]) -> Option<&'a [u8]> {
        let at = name.windows(functor.len()).position(|part| part == functor)? + functor.len();
        name.get(at..).filter(|kind| !kind.is_empty())
    }

    /// `CompareFunctor<T>` with two inputs.
    fn compare(name: &[u8]) -> Option<Self> {
        // One that is wrapped in another function has its operator elsewhere.
        let kind = Self::type_of(name, b"14CompareFunctorI")?;
        if !find(name, b"arrayIPcLm3E") && !find(name, b"ArrayIPcLi3E") || find(name, b"aryFunctorI") {
            return None;
        }
        match kind.first()? {
            b'i' => Some(Self::Compare2),
            b'l' => Some(Self::Compare4),
            b'f' => Some(Self::Compare7),
            b'd' => Some(Self::Compare8),
            _ => None,
        }
    }

    /// The `ncclDataType_t` of the elements that are compared.
    fn compared(self) -> Option<i32> {
        match self {
            Self::Compare2 => Some(2),
            Self::Compare4 => Some(4),
            Self::Compare7 => Some(7),
            Self::Compare8 => Some(8),
            _ => None,
        }
    }

    /// `FillFunctor<T>`.
    fn fill(name: &[u8]) -> Option<Self> {
        let kind = Self::type_of(name, b"FillFunctorI")?;
        match kind.first()? {
            b'b' | b'a' | b'h' => Some(Self::Fill1),
            b's' | b't' => Some(Self::Fill2),
            b'f' | b'i' | b'j' => Some(Self::Fill4),
            b'd' | b'l' | b'm' => Some(Self::Fill8),
            _ if kind.starts_with(b"N3c104HalfE") || kind.starts_with(b"N3c108BFloat16E") => {
                Some(Self::Fill2)
            }
            _ => None,
        }
    }

    /// Bytes of the value that a fill gives.
    fn width(self) -> Option<usize> {
        match self {
            Self::Fill1 => Some(1),
            Self::Fill2 => Some(2),
            Self::Fill4 => Some(4),
            Self::Fill8 => Some(8),
            _ => None,
        }
    }
}

fn find(text: &[u8], part: &[u8]) -> bool {
    // SAFETY: both slices are good for their length; `memmem` reads no further. Tens of thousands of
    // names pass here while PyTorch is loaded, and it is the fastest search at hand.
    !unsafe { libc::memmem(text.as_ptr().cast(), text.len(), part.as_ptr().cast(), part.len()) }.is_null()
}

/// Slots of the table; PyTorch has some ten thousand such kernels.
const SLOTS: usize = 1 << 16;
/// The table, from a kernel's host address to its meaning. Only ever added to, so that a launch
/// finds its kernel without a lock.
static KERNELS: [AtomicUsize; SLOTS] = [const { AtomicUsize::new(0) }; SLOTS];
static MEANINGS: [AtomicU8; SLOTS] = [const { AtomicU8::new(0) }; SLOTS];

fn slots(kernel: usize) -> impl Iterator<Item = usize> {
    let first = (kernel >> 4).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 48;
    (0..64).map(move |step| (first + step) % SLOTS)
}

/// Notes a kernel that the program registers, if it is one of these.
pub(crate) fn register(kernel: usize, name: &[u8]) {
    let Some(meaning) = Meaning::of(name) else { return };
    for slot in slots(kernel) {
        match KERNELS[slot].compare_exchange(0, kernel, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return MEANINGS[slot].store(meaning as u8, Ordering::Release),
            Err(there) if there == kernel => return,
            Err(_) => {}
        }
    }
}

fn meaning(kernel: usize) -> Option<Meaning> {
    for slot in slots(kernel) {
        match KERNELS[slot].load(Ordering::Acquire) {
            0 => return None,
            there if there == kernel => {
                let number = MEANINGS[slot].load(Ordering::Acquire);
                return Meaning::ALL.into_iter().find(|&meaning| meaning as u8 == number);
            }
            _ => {}
        }
    }
    None
}

thread_local! {
    /// Partial results that the next reduction finishes: their address and how many elements they count.
    static PARTIAL: Cell<(usize, u64)> = const { Cell::new((0, 0)) };
}

/// Looks at a launch and lets it have the effect that is known of it.
pub(crate) fn launched(kernel: usize, arguments: usize, on: usize) {
    let device = stream(on).device();
    let Some(meaning) = meaning(kernel) else { return device.disturb() };
    let list = Out::<usize>::from_address(arguments);
    // The list holds the address of each argument. Elements are counted in 32 or 64 bits; no tensor
    // that is counted in one launch has more than 2^32, so the lower half tells.
    let pointer =
        |index: usize| list.at(index).get().and_then(|place| Out::<usize>::from_address(place).get());
    let count = |index: usize| {
        list.at(index).get().and_then(|place| Out::<u32>::from_address(place).get()).map(u64::from)
    };
    let found = match meaning {
        Meaning::Nonzero => pointer(1).zip(count(2)),
        Meaning::NonzeroPart => {
            if let Some(partial) = pointer(1).zip(count(2)) {
                let _ = PARTIAL.try_with(|cell| cell.set(partial));
            }
            None
        }
        Meaning::Finish => {
            let (partial, all) = PARTIAL.try_with(|cell| cell.replace((0, 0))).unwrap_or((0, 0));
            pointer(0).filter(|&from| from == partial && partial != 0).and(pointer(1)).map(|to| (to, all))
        }
        Meaning::Unique => pointer(3).zip(count(7)),
        Meaning::Runs => pointer(4).zip(count(9)),
        Meaning::ThrustUnique => pointer(3).zip(count(4)),
        // All others are elementwise: (count, function, addresses).
        _ => {
            if let (Some(count), Some(value), Some(places)) = (count(0), list.at(1).get(), list.at(2).get()) {
                elementwise(meaning, count as usize, value, Out::from_address(places));
            }
            return;
        }
    };
    device.disturb();
    if let Some((place, all)) = found {
        device.values().result(device.epoch(), place, machine().dynamic.of(all));
    }
}

/// An elementwise kernel writes `count` elements at the first of its places and nothing else.
fn elementwise(meaning: Meaning, count: usize, function: usize, places: Out<usize>) {
    /// The widest element that there is: a complex number of two doubles.
    const WIDEST: usize = 16;
    let Some(to) = places.get() else { return };
    if let Some(width) = meaning.width().filter(|width| count.saturating_mul(*width) <= SMALL) {
        let mut pattern = [0; 8];
        read_host(function, &mut pattern[..width]);
        set(to, &pattern[..width], count * width);
    } else if let Some(data_type) = meaning.compared() {
        let inputs = (places.at(1).get(), places.at(2).get());
        let result = comparison(data_type, count, Out::from_address(function).get(), inputs);
        write_known(to, result.as_deref(), count);
    } else {
        forget(to, count.saturating_mul(meaning.width().unwrap_or(WIDEST)));
    }
}

/// The truth of each comparison, when both sides are known.
fn comparison(
    data_type: i32,
    count: usize,
    operator: Option<i32>,
    inputs: (Option<usize>, Option<usize>),
) -> Option<Vec<u8>> {
    let width = reduce::width(data_type);
    if count.saturating_mul(width) > SMALL {
        return None;
    }
    let (left, right) = (read_known(inputs.0?, count * width)?, read_known(inputs.1?, count * width)?);
    let pairs = left.chunks_exact(width).zip(right.chunks_exact(width));
    pairs.map(|(left, right)| Some(u8::from(reduce::holds(data_type, operator?, left, right)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_known_by_their_names() {
        let cases: [(&[u8], Option<Meaning>); 10] = [
            (b"_ZN3cub28DeviceReduceSingleTileKernelI9NonZeroOpIfE", Some(Meaning::Nonzero)),
            (b"_ZN3cub18DeviceReduceKernelI9NonZeroOpIfE", Some(Meaning::NonzeroPart)),
            (b"_ZN3cub28DeviceReduceSingleTileKernelI3Sum", Some(Meaning::Finish)),
            (b"_ZN3cub23DeviceSelectSweepKernelI9NonZeroOpIfE", None),
            (b"_ZN3cub23DeviceSelectSweepKernelI8equal_to", Some(Meaning::Unique)),
            (b"_ZN2at6native13reduce_kernelILi512E", None),
            (b"_ZN29vectorized_elementwise_kernelILi2ENS0_11FillFunctorIlEE", Some(Meaning::Fill8)),
            (b"_ZN29vectorized_elementwise_kernelILi2ENS0_11FillFunctorIN3c104HalfEEE", Some(Meaning::Fill2)),
            (
                b"29vectorized_elementwise_kernelILi4ENS0_14CompareFunctorIlEESt5arrayIPcLm3EEEE",
                Some(Meaning::Compare4),
            ),
            (b"_ZN27unrolled_elementwise_kernelI3Add", Some(Meaning::Elementwise)),
        ];
        for (name, expected) in cases {
            assert_eq!(Meaning::of(name), expected, "{}", String::from_utf8_lossy(name));
        }
    }

    #[test]
    fn a_registered_kernel_is_found_again_and_no_other() {
        for kernel in (0x1000..0x9000).step_by(16) {
            register(kernel, b"UniqueAgent");
        }
        assert_eq!(meaning(0x1010), Some(Meaning::ThrustUnique));
        assert_eq!(meaning(0x900_0000), None);
    }
}
