//! Kernels that count: how many elements are nonzero, unique, selected. Their result becomes the
//! size of a tensor, so what it reads as is an assumption that the user can set
//! ([`Dynamic`](crate::values::Dynamic)), not zero like everything else.
//!
//! A kernel is known by its mangled name, which the program registers before it can launch it; the
//! number of elements and the place of the result are among its arguments, as CUB and Thrust declare
//! them. A kernel whose name or arguments changed is no longer recognized, and its count reads as zero.

use std::cell::Cell;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use crate::ffi::Out;
use crate::machine::machine;
use crate::stream::stream;

/// What a counting kernel is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Counting {
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
}

impl Counting {
    const ALL: [Self; 6] =
        [Self::Nonzero, Self::NonzeroPart, Self::Finish, Self::Unique, Self::Runs, Self::ThrustUnique];

    fn of(name: &[u8]) -> Option<Self> {
        let has = |part: &[u8]| find(name, part);
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
}

fn find(text: &[u8], part: &[u8]) -> bool {
    // SAFETY: both slices are good for their length; `memmem` reads no further. Tens of thousands of
    // names pass here while PyTorch is loaded, and it is the fastest search at hand.
    !unsafe { libc::memmem(text.as_ptr().cast(), text.len(), part.as_ptr().cast(), part.len()) }.is_null()
}

/// Slots of the table of counting kernels; PyTorch has some hundreds of them.
const SLOTS: usize = 4096;
/// The table, from a kernel's host address to what it counts. Only ever added to, so that a launch
/// finds its kernel without a lock.
static KERNELS: [AtomicUsize; SLOTS] = [const { AtomicUsize::new(0) }; SLOTS];
static COUNTINGS: [AtomicU8; SLOTS] = [const { AtomicU8::new(0) }; SLOTS];

fn slots(kernel: usize) -> impl Iterator<Item = usize> {
    let first = (kernel >> 4).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 52;
    (0..16).map(move |step| (first + step) % SLOTS)
}

/// Notes a kernel that the program registers, if it is one that counts.
pub(crate) fn register(kernel: usize, name: &[u8]) {
    let Some(counting) = Counting::of(name) else { return };
    for slot in slots(kernel) {
        match KERNELS[slot].compare_exchange(0, kernel, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return COUNTINGS[slot].store(counting as u8, Ordering::Release),
            Err(there) if there == kernel => return,
            Err(_) => {}
        }
    }
}

fn counting(kernel: usize) -> Option<Counting> {
    for slot in slots(kernel) {
        match KERNELS[slot].load(Ordering::Acquire) {
            0 => return None,
            there if there == kernel => {
                let number = COUNTINGS[slot].load(Ordering::Acquire);
                return Counting::ALL.into_iter().find(|&counting| counting as u8 == number);
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

/// Looks at a launch: when it counts, its result is what the assumption says.
pub(crate) fn launched(kernel: usize, arguments: usize, on: usize) {
    let Some(counting) = counting(kernel) else { return };
    let list = Out::<usize>::from_address(arguments);
    // The list holds the address of each argument. Elements are counted in 32 or 64 bits; no tensor
    // that could be counted in one launch has more than 2^32, so the lower half tells.
    let pointer =
        |index: usize| list.at(index).get().and_then(|place| Out::<usize>::from_address(place).get());
    let count = |index: usize| {
        list.at(index).get().and_then(|place| Out::<u32>::from_address(place).get()).map(u64::from)
    };
    let found = match counting {
        Counting::Nonzero => pointer(1).zip(count(2)),
        Counting::NonzeroPart => {
            if let Some(partial) = pointer(1).zip(count(2)) {
                let _ = PARTIAL.try_with(|cell| cell.set(partial));
            }
            None
        }
        Counting::Finish => {
            let (partial, all) = PARTIAL.try_with(|cell| cell.replace((0, 0))).unwrap_or((0, 0));
            pointer(0).filter(|&from| from == partial && partial != 0).and(pointer(1)).map(|to| (to, all))
        }
        Counting::Unique => pointer(3).zip(count(7)),
        Counting::Runs => pointer(4).zip(count(9)),
        Counting::ThrustUnique => pointer(3).zip(count(4)),
    };
    if let Some((place, all)) = found {
        let device = stream(on).device();
        device.values().result(device.now(), place, machine().dynamic.of(all));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counting_kernels_are_known_by_their_names() {
        let cases: [(&[u8], Option<Counting>); 6] = [
            (b"_ZN3cub28DeviceReduceSingleTileKernelI9NonZeroOpIfE", Some(Counting::Nonzero)),
            (b"_ZN3cub18DeviceReduceKernelI9NonZeroOpIfE", Some(Counting::NonzeroPart)),
            (b"_ZN3cub28DeviceReduceSingleTileKernelI3Sum", Some(Counting::Finish)),
            (b"_ZN3cub23DeviceSelectSweepKernelI9NonZeroOpIfE", None),
            (b"_ZN3cub23DeviceSelectSweepKernelI8equal_to", Some(Counting::Unique)),
            (b"_ZN2at6native13reduce_kernelILi512E", None),
        ];
        for (name, expected) in cases {
            assert_eq!(Counting::of(name), expected, "{}", String::from_utf8_lossy(name));
        }
    }

    #[test]
    fn a_registered_kernel_is_found_again_and_no_other() {
        for kernel in (0x1000..0x9000).step_by(16) {
            register(kernel, b"UniqueAgent");
        }
        assert_eq!(counting(0x1010), Some(Counting::ThrustUnique));
        assert_eq!(counting(0x900_0000), None);
    }
}
