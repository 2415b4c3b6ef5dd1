//! The effects of known kernels, derived from their names and arguments. No kernel code runs.
//!
//! - Counting kernels: the result becomes the size of a tensor, so its value is an assumption that the user
//!   can set ([`DynamicSizes`](crate::core::dynamic_sizes::DynamicSizes)).
//! - Fills of small ranges are performed, so `torch.ones(3)` reads as ones.
//! - Comparisons and reductions of small known tensors are performed, because ranks use them to agree on
//!   sizes. For unknown values, "all" is assumed true and "any" false, because programs use these to check
//!   that their data is valid. Two different tensors are assumed to be unequal ([`elementwise`]).
//! - A selection from a small known tensor by unknown indices returns values of that tensor ([`index`]).
//! - Elementwise kernels write one range, and the known content of all other memory stays.
//! - A kernel that has only numbers as parameters, such as the one of `torch.cuda._sleep`, gets no address to
//!   write to, so all known content stays.
//!
//! A kernel is recognized by its mangled name ([`recognize`](crate::kernels::recognize)), which the program
//! registers before it can launch the kernel. The arguments are as PyTorch, CUB and Thrust declare them. A
//! kernel with another name or other arguments is not recognized: a count then reads as zero, and memory
//! becomes unknown.

use std::cell::Cell;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use crate::core::device::Device;
use crate::core::ffi::{In, read};
use crate::core::host_state::host_state;
use crate::core::running_ops::{self, Count};
use crate::core::stream::Stream;
use crate::core::values::SMALL;
use crate::cuda::copy::{Known, answer_flags, device_of, forget, read_known, write_computed};
use crate::cuda::reach::{Launch, forget_everything};
use crate::cuda::streams;
use crate::kernels::elementwise::{self, ElementwiseLaunch, UNKNOWN_ADDRESS, small_size};
use crate::kernels::offset_calculator::{REDUCE_CONFIGURATION, REDUCE_OP, stride_at};
use crate::kernels::recognize::{KernelEffect, NonzeroInput, ReductionKind};
use crate::kernels::reduce::{self, DataType, ncclMax, ncclMin, ncclSum};
use crate::kernels::{index, signature, strided};

/// The number of slots in the table. PyTorch has about ten thousand recognized kernels.
const SLOTS: usize = 1 << 16;
/// A hash table with linear probing, from the host address of a kernel to its effect. Entries are never
/// removed, so a launch can look up its kernel without a lock.
static KERNELS: [AtomicUsize; SLOTS] = [const { AtomicUsize::new(0) }; SLOTS];
/// The effect of the kernel in each slot, a leaked object. It is null if the effect is not known, because a kernel
/// of a library that was loaded later has the address.
static EFFECTS: [AtomicPtr<KernelEffect>; SLOTS] = [const { AtomicPtr::new(null_mut()) }; SLOTS];

/// Returns the slots in which a kernel may be, in search order.
fn slots(kernel: usize) -> impl Iterator<Item = usize> {
    let first = (kernel >> 4).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 48;
    (0..64).map(move |step| (first + step) % SLOTS)
}

/// Registers a kernel if its effect is known. Replaces the effect of a kernel that had the same address in an
/// unloaded library.
pub(crate) fn register(kernel: usize, name: &[u8]) {
    let effect = KernelEffect::from_name(name);
    let slot = if effect.is_some() { take_slot(kernel) } else { slot_of(kernel) };
    if let Some(slot) = slot.filter(|&slot| effect_at(slot) != effect) {
        let effect = effect.map_or(null_mut(), |effect| Box::into_raw(Box::new(effect)));
        EFFECTS[slot].store(effect, Ordering::Release);
    }
}

/// Returns the slot of a kernel, which it takes if it has none. Returns `None` if all its slots are taken.
fn take_slot(kernel: usize) -> Option<usize> {
    slots(kernel).find(|&slot| {
        let taken = KERNELS[slot].compare_exchange(0, kernel, Ordering::AcqRel, Ordering::Acquire);
        taken.is_ok() || taken == Err(kernel)
    })
}

/// Returns the slot of a kernel, or `None` if it has none.
fn slot_of(kernel: usize) -> Option<usize> {
    for slot in slots(kernel) {
        match KERNELS[slot].load(Ordering::Acquire) {
            0 => return None,
            there if there == kernel => return Some(slot),
            _ => {}
        }
    }
    None
}

fn effect_at(slot: usize) -> Option<KernelEffect> {
    // SAFETY: null or the address of a leaked object.
    unsafe { EFFECTS[slot].load(Ordering::Acquire).as_ref() }.copied()
}

fn effect_of(kernel: usize) -> Option<KernelEffect> {
    effect_at(slot_of(kernel)?)
}

thread_local! {
    /// The address of the partial counts that the next reduction finishes, and the
    /// number of counted elements.
    static PARTIAL_COUNT: Cell<(usize, Count)> = const { Cell::new((0, Count { number: 0, is_computed: false })) };
}

/// The argument list of a launch: an array with the address of each argument.
#[derive(Clone, Copy)]
struct KernelArguments<'call>(In<'call, usize>);

impl<'call> KernelArguments<'call> {
    /// # Safety
    /// `list` is the argument list in a launch of a kernel with a known effect. Only the arguments that the
    /// [`KernelEffect`] lists are read, with their types.
    unsafe fn new(list: In<'call, usize>) -> Self {
        Self(list)
    }

    /// Returns the address of an argument.
    fn address(self, index: usize) -> Option<usize> {
        // SAFETY: the promise of `new`.
        unsafe { self.0.at(index) }.get()
    }

    /// Returns the value of a pointer argument.
    fn pointer(self, index: usize) -> Option<usize> {
        // SAFETY: the promise of `new`.
        self.address(index).and_then(|address| unsafe { read(address) })
    }

    /// Returns the number of elements in an argument of 32 or 64 bits. No tensor counted in one launch has
    /// 2^32 elements, so the lower half is the number.
    fn count(self, index: usize) -> Option<u64> {
        // SAFETY: the promise of `new`.
        self.address(index).and_then(|address| unsafe { read::<u32>(address) }).map(u64::from)
    }

    /// Returns the count that the running op set with [`set_count`](running_ops::set_count). If it set none,
    /// applies the user's assumption to the total in argument `index`.
    fn assumed(self, index: usize) -> Option<Count> {
        running_ops::count().or_else(|| {
            let number = host_state().dynamic.count_of(self.count(index)?);
            Some(Count { number, is_computed: false })
        })
    }

    /// Returns the number of nonzero elements that a counting kernel finds. If the input is unknown, returns
    /// an assumed number.
    fn nonzero(self, NonzeroInput { element, test_is_first }: NonzeroInput) -> Option<Count> {
        let width = element.map_or(1, reduce::width);
        let size = self.count(2)? as usize * width;
        // SAFETY: by the contract of `new`, the iterator has two words.
        let from =
            self.address(0).and_then(|at| unsafe { read::<usize>(at + 8 * usize::from(test_is_first)) });
        let from = from.filter(|&from| device_of(from).is_some());
        let bytes = from.filter(|_| element.is_some() && size <= SMALL).and_then(|from| {
            // SAFETY: the input of the kernel, readable for its number of elements.
            unsafe {
                read_known(from, size)
                    .or_else(|| answer_flags(from, size).map(|bytes| Known { bytes, is_answer: true }))
            }
        });
        match bytes {
            Some(Known { bytes, is_answer }) => {
                let is_nonzero =
                    |bytes: &&[u8]| element.is_some_and(|element| reduce::is_nonzero(element, bytes));
                let number = bytes.chunks_exact(width).filter(is_nonzero).count() as u64;
                Some(Count { number, is_computed: !is_answer })
            }
            None => self.assumed(2),
        }
    }

    /// Returns the arguments of an elementwise kernel.
    fn elementwise(self) -> Option<ElementwiseLaunch> {
        let count = self.count(0)? as usize;
        let (functor, operands) = (self.address(1)?, self.address(2).filter(|&address| address != 0)?);
        // SAFETY: the promise of `new`.
        Some(unsafe { ElementwiseLaunch::new(count, functor, operands) })
    }
}

/// Returns the memory that a launch of a registered kernel reaches, or `None` if the kernel's parameters are
/// not known. `blocks` is the number of blocks in the first dimension.
///
/// # Safety
/// `arguments` is the argument list in a launch of this kernel: an array with the address of each argument.
pub(crate) unsafe fn launch_of(kernel: usize, arguments: In<usize>, blocks: u32) -> Option<Launch> {
    // SAFETY: the caller's promise.
    signature::for_kernel(kernel).and_then(|signature| unsafe { signature.launch_with(arguments, blocks) })
}

/// Applies a launch whose effect is not known: the memory that its arguments reach becomes unknown.
///
/// # Safety
/// Same as for [`launch_of`].
unsafe fn forget_reached(kernel: usize, arguments: In<usize>, blocks: u32) {
    // SAFETY: the caller's promise.
    match unsafe { launch_of(kernel, arguments, blocks) } {
        Some(launch) => launch.apply(),
        None => forget_everything(),
    }
}

/// Applies the effect of a launch. If the effect is not known, the memory that the launch reaches becomes
/// unknown. `blocks` is the number of blocks in the first dimension.
///
/// # Safety
/// `arguments` is the argument list in a launch of this kernel: an array with the address of each argument.
pub(crate) unsafe fn launched(kernel: usize, arguments: In<usize>, blocks: u32, stream: &Stream) {
    let device = streams::device_of(stream);
    let Some(effect) = effect_of(kernel) else {
        elementwise::take_last_equality();
        elementwise::launched_unknown();
        // SAFETY: the caller's promise.
        return unsafe { forget_reached(kernel, arguments, blocks) };
    };
    if effect == KernelEffect::NoPointer {
        return;
    }
    let list = arguments;
    // SAFETY: by the caller's promise; below, each effect reads only the arguments that it lists.
    let arguments = unsafe { KernelArguments::new(arguments) };
    let equality = elementwise::take_last_equality();
    let counted = match effect {
        KernelEffect::CountNonzero(input) => arguments.pointer(1).zip(arguments.nonzero(input)),
        KernelEffect::CountNonzeroPartial(input) => {
            if let Some(partial) = arguments.pointer(1).zip(arguments.nonzero(input)) {
                let _ = PARTIAL_COUNT.try_with(|cell| cell.set(partial));
            }
            None
        }
        KernelEffect::FinishReduction => {
            let (partial, found) = PARTIAL_COUNT.try_with(Cell::take).unwrap_or_default();
            let finishes = partial != 0 && arguments.pointer(0) == Some(partial);
            arguments.pointer(1).filter(|_| finishes).map(|to| (to, found))
        }
        KernelEffect::CountUnique => arguments.pointer(3).zip(arguments.assumed(7)),
        KernelEffect::CountRuns => arguments.pointer(4).zip(arguments.assumed(9)),
        KernelEffect::CountThrustUnique => arguments.pointer(3).zip(arguments.assumed(4)),
        KernelEffect::Reduce(kind, data_type) => {
            if let Some(operation) = arguments.address(0) {
                // SAFETY: the address of the kernel's only argument, and the argument list that contains it.
                unsafe {
                    if !reduce_to_one(device, kind, data_type, operation, equality) {
                        forget_reached(kernel, list, blocks);
                    }
                }
            }
            return;
        }
        KernelEffect::ToFlags => {
            if let (Some(launch), Some(loader)) = (arguments.elementwise(), arguments.address(5)) {
                elementwise::to_flags(&launch, loader);
            }
            return;
        }
        KernelEffect::CompareStrided { is_equality, writes_flags } => {
            if is_equality {
                elementwise::set_last_equality(UNKNOWN_ADDRESS);
            }
            let launch = arguments.count(0).zip(arguments.address(1));
            // SAFETY: the arguments of such a kernel.
            let output =
                launch.and_then(|(count, functor)| unsafe { strided::output(count as usize, functor) });
            if let Some(output) = output {
                return output.compared(writes_flags);
            }
            None
        }
        KernelEffect::Index(_) => None,
        KernelEffect::NoPointer
        | KernelEffect::Elementwise
        | KernelEffect::Flags
        | KernelEffect::Equal(_)
        | KernelEffect::And
        | KernelEffect::Or
        | KernelEffect::Not
        | KernelEffect::Fill(_)
        | KernelEffect::Compare(_)
        | KernelEffect::EqualScalar(_)
        | KernelEffect::CompareScalar(_) => {
            if let Some(launch) = arguments.elementwise() {
                elementwise::apply(effect, &launch);
            }
            return;
        }
    };
    let chosen = match effect {
        KernelEffect::Index(kernel) => {
            let launch = arguments.count(0).zip(arguments.address(1));
            // SAFETY: the arguments of such a kernel. Its inputs are read before its output becomes unknown.
            launch.and_then(|(count, operation)| unsafe { index::choose(kernel, count as usize, operation) })
        }
        _ => None,
    };
    // SAFETY: the caller's promise.
    unsafe { forget_reached(kernel, list, blocks) };
    if let Some((to, bytes)) = chosen {
        // SAFETY: the output of the kernel, writable for its number of elements.
        unsafe { write_computed(to, &bytes) };
    }
    if let Some((place, found)) = counted {
        device.values().set_count(place, found.number, found.is_computed);
    }
}

/// Applies the effect of a reduction to one value. Returns false if its layout is not known. `equality` is
/// the address of the flags if the previous launch tested two tensors for equality.
///
/// # Safety
/// `operation` is the address of the kernel's only argument, PyTorch's `ReduceOp` (ATen's Reduce.cuh). The
/// struct has the operation and its identity, then the configuration. Two offset calculators follow, for the
/// input and for the output, then the two addresses.
unsafe fn reduce_to_one(
    device: &Device,
    kind: ReductionKind,
    data_type: DataType,
    operation: usize,
    equality: usize,
) -> bool {
    let width = reduce::width(data_type);
    let configuration = match width {
        1 => 4,
        4 => 8,
        8 => 16,
        // Half-precision values are accumulated in a wider type, so every member of the struct has another
        // offset.
        _ => return false,
    };
    // SAFETY: members of the struct, by the caller's promise.
    let number = |offset: usize| unsafe { read::<u32>(operation + offset) }.unwrap_or(0) as usize;
    // SAFETY: as above.
    let address = |offset: usize| unsafe { read::<usize>(operation + offset) };
    let pointers = (configuration + REDUCE_OP).next_multiple_of(8);
    let (Some(from), Some(to)) = (address(pointers), address(pointers + 8)) else {
        return false;
    };
    let (inputs, outputs) = (number(configuration + 4), number(configuration + 8));
    if number(configuration) != width || inputs == 0 {
        return false;
    }
    // The stride is in bytes.
    let calculator = configuration + REDUCE_CONFIGURATION;
    let (dimensions, stride) = (number(calculator), number(calculator + stride_at(0, 0, 1)));
    let result_width = match kind {
        ReductionKind::All | ReductionKind::Any => 1,
        _ => width,
    };
    forget(to, outputs.max(1).saturating_mul(result_width));
    if outputs != 1 {
        return true;
    }
    let contiguous = inputs == 1 || dimensions == 1 && stride == width;
    let size = small_size(inputs, data_type).filter(|_| contiguous);
    // SAFETY: the input of the kernel, readable for its number of elements.
    let known = size.and_then(|size| unsafe { read_known(from, size) });
    let is_answer = known.as_ref().is_some_and(|known| known.is_answer);
    let bytes = match (kind, known.map(|known| known.bytes)) {
        (ReductionKind::All | ReductionKind::Any, None) => {
            let all_hold = kind == ReductionKind::All && from != equality && equality != UNKNOWN_ADDRESS;
            device.values().set_result(to, u64::from(all_hold));
            return true;
        }
        (_, None) => return true,
        (ReductionKind::All, Some(bytes)) => {
            let all = bytes.chunks_exact(width).all(|element| reduce::is_nonzero(data_type, element));
            vec![u8::from(all)]
        }
        (ReductionKind::Any, Some(bytes)) => {
            let any = bytes.chunks_exact(width).any(|element| reduce::is_nonzero(data_type, element));
            vec![u8::from(any)]
        }
        (ReductionKind::Sum | ReductionKind::Max | ReductionKind::Min, Some(bytes)) => {
            let operation = match kind {
                ReductionKind::Max => ncclMax,
                ReductionKind::Min => ncclMin,
                _ => ncclSum,
            };
            let elements: Vec<_> = bytes.chunks_exact(width).map(<[u8]>::to_vec).collect();
            reduce::reduce(data_type, operation, &elements)
        }
    };
    // SAFETY: the output of the kernel, writable for its single value.
    unsafe { write_computed(to, &Known { bytes, is_answer }) };
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_registered_kernels_are_found() {
        for kernel in (0x1000..0x9000).step_by(16) {
            register(kernel, b"UniqueAgent");
        }
        assert_eq!(effect_of(0x1010), Some(KernelEffect::CountThrustUnique));
        assert_eq!(effect_of(0x900_0000), None);
        // The library of the first kernel is unloaded, and another one has kernels at its addresses.
        register(0x1010, b"_Z4waitv");
        register(0x1020, b"plain_c");
        let effects = [0x1010, 0x1020, 0x1030].map(effect_of);
        assert_eq!(effects, [Some(KernelEffect::NoPointer), None, Some(KernelEffect::CountThrustUnique)]);
    }
}
