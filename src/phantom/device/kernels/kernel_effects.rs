//! The effects of known kernels, derived from their names and arguments. No kernel code runs.
//!
//! - Counting kernels: the result becomes the size of a tensor, so its value is an assumption that the user
//!   can set ([`DynamicSizes`](crate::core::values::DynamicSizes)).
//! - Fills of small ranges are performed, so `torch.ones(3)` reads as ones.
//! - Comparisons and reductions of small known tensors are performed, because ranks use them to agree on
//!   sizes. For unknown values, "all" is assumed true and "any" false, because programs use these to check
//!   that their data is valid. Two different tensors are assumed to be unequal ([`elementwise`]).
//! - A selection from a small known tensor by unknown indices returns values of that tensor ([`index`]).
//! - Elementwise kernels write one range, and the known content of all other memory stays.
//! - A kernel that has only numbers as parameters, such as the one of `torch.cuda._sleep`, gets no address to
//!   write to, so all known content stays.
//!
//! A kernel is recognized by its mangled name, which the program registers before it can launch the kernel.
//! The arguments are as PyTorch, CUB and Thrust declare them. A kernel with another name or other arguments
//! is not recognized: a count then reads as zero, and memory becomes unknown.

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

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
use crate::kernels::index::{self, IndexKernel};
use crate::kernels::reduce::{
    self, DataType, ncclBfloat16, ncclFloat16, ncclFloat32, ncclFloat64, ncclInt8, ncclInt32, ncclInt64,
    ncclMax, ncclMin, ncclSum, ncclUint8, ncclUint32, ncclUint64,
};
use crate::kernels::{signature, strided};

/// The effect of a kernel, with the arguments on which it depends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KernelEffect {
    /// `cub::DeviceReduceSingleTileKernel` over a test for nonzero: (in, out, count, ...).
    CountNonzero(NonzeroInput),
    /// `cub::DeviceReduceKernel` over a test for nonzero: (in, partial results, count, ...).
    CountNonzeroPartial(NonzeroInput),
    /// `cub::DeviceReduceSingleTileKernel` over anything else: (in, out, ...). It may finish a
    /// `CountNonzeroPartial`.
    FinishReduction,
    /// `cub::DeviceSelectSweepKernel` by equality: (in, flags, out, count out, tiles, op, equality, count,
    /// ...).
    CountUnique,
    /// `cub::DeviceReduceByKeyKernel` for run-length encoding: (in, out, values, lengths, count out, tiles,
    /// first tile, equality, op, count).
    CountRuns,
    /// Thrust's `unique`: (in, out, predicate, count out, count, ...).
    CountThrustUnique,
    /// An elementwise PyTorch kernel: (count, functor, operands, ...). The operands are addresses, with the
    /// output first.
    Elementwise,
    /// An elementwise kernel that writes flags of one byte each.
    Flags,
    /// A copy that converts elements to flags: (count, functor, operands, input offsets, output offsets,
    /// loader, storer).
    ToFlags,
    /// An elementwise kernel that writes a single value of this number of bytes, which its functor contains.
    Fill(usize),
    /// An elementwise comparison of two inputs. The functor contains the number of a
    /// [`Comparison`](crate::kernels::reduce::Comparison).
    Compare(DataType),
    /// An elementwise comparison with a scalar. The functor contains the number of a
    /// [`Comparison`](crate::kernels::reduce::Comparison), and the scalar.
    CompareScalar(DataType),
    /// An elementwise test for equality with a scalar. The functor contains 0 for equal or 1 for unequal, and
    /// the scalar.
    EqualScalar(DataType),
    /// An elementwise test of two inputs for equality. The functor contains 0 for equal or 1 for unequal.
    /// `None` if the type of the inputs is unknown.
    Equal(Option<DataType>),
    /// The elementwise logical "and" of two flags.
    And,
    /// The elementwise logical "or" of two flags.
    Or,
    /// The elementwise logical "not" of a flag.
    Not,
    /// A selection of positions by indices: (count, struct).
    Index(IndexKernel),
    /// A comparison of two strided inputs, whose addresses are inside the functor.
    CompareStrided {
        is_equality: bool,
        /// False if the kernel converts its result to another type.
        writes_flags: bool,
    },
    /// PyTorch's `reduce_kernel`, whose only argument is a struct; see [`reduce_to_one`].
    Reduce(ReductionKind, DataType),
    /// A kernel that has only numbers as parameters.
    NoPointer,
}

/// The input of a count of nonzero elements. It is an iterator that consists of an address and a test. The
/// test has an empty type, so its word contains leftovers from other calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NonzeroInput {
    /// The type of the elements, if known.
    element: Option<DataType>,
    /// True if the test precedes the address, as in CUB; in Thrust, it follows the address.
    test_is_first: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReductionKind {
    Sum,
    Max,
    Min,
    All,
    Any,
}

pub(crate) fn contains(text: &[u8], part: &[u8]) -> bool {
    // SAFETY: both slices are valid for their length, and `memmem` reads no further. It is the fastest
    // available search: tens of thousands of names are searched while PyTorch loads.
    !unsafe { libc::memmem(text.as_ptr().cast(), text.len(), part.as_ptr().cast(), part.len()) }.is_null()
}

/// Returns the text after a part of a mangled name.
pub(crate) fn after<'a>(name: &'a [u8], part: &[u8]) -> Option<&'a [u8]> {
    let at = name.windows(part.len()).position(|window| window == part)? + part.len();
    name.get(at..)
}

/// Returns the encoded parameter types at the end of the mangled name of a non-template function (Itanium C++
/// ABI, section 5.1: `_Z`, then a name or `N` names `E`, each name preceded by its length).
fn parameters(name: &[u8]) -> Option<&[u8]> {
    let mut rest = name.strip_prefix(b"_Z")?;
    let nested = rest.strip_prefix(b"N");
    rest = nested.unwrap_or(rest);
    loop {
        let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let length: usize = std::str::from_utf8(rest.get(..digits)?).ok()?.parse().ok()?;
        rest = rest.get(digits + length..)?;
        match (nested, rest.strip_prefix(b"E")) {
            (None, _) => return Some(rest),
            (Some(_), Some(parameters)) => return Some(parameters),
            (Some(_), None) => {}
        }
    }
}

/// Returns true if the encoded parameter types are only integers, floats and booleans, or an empty list
/// (`v`).
fn only_numbers(parameters: &[u8]) -> bool {
    !parameters.is_empty() && parameters.iter().all(|code| b"vbcahstijlmfd".contains(code))
}

/// Returns the type whose mangled name is at the start of `name`. A boolean is a byte.
fn data_type(name: &[u8]) -> Option<DataType> {
    Some(match name.first()? {
        b'a' => ncclInt8,
        b'b' | b'h' => ncclUint8,
        b'i' => ncclInt32,
        b'j' => ncclUint32,
        b'l' => ncclInt64,
        b'm' => ncclUint64,
        b'f' => ncclFloat32,
        b'd' => ncclFloat64,
        _ if name.starts_with(b"N3c104HalfE") => ncclFloat16,
        _ if name.starts_with(b"N3c108BFloat16E") => ncclBfloat16,
        _ => return None,
    })
}

impl KernelEffect {
    /// Returns the effect of the kernel with this mangled name.
    fn of(name: &[u8]) -> Option<Self> {
        // The unrolled variant may convert types and use strides; the vectorized variant never does.
        if contains(name, b"for_multi_outputs") || contains(name, b"amp_non_finite") {
            // The kernel has several outputs, or writes one through an address that the functor captured.
            return None;
        }
        let vectorized = contains(name, b"vectorized_elementwise_kernel");
        if vectorized || contains(name, b"unrolled_elementwise_kernel") {
            let contiguous = vectorized || contains(name, b"TrivialOffset") && !contains(name, b"WithCast");
            let known = contiguous.then(|| Self::fill(name).or_else(|| Self::comparison(name))).flatten();
            if !vectorized && Self::is_flag_copy(name) && contains(name, b"TrivialOffset") {
                let converts = contains(name, b"12LoadWithCastILi1E");
                return Some(if converts { Self::ToFlags } else { Self::Flags });
            }
            let flags = if Self::writes_flags(name) { Self::Flags } else { Self::Elementwise };
            return Some(known.unwrap_or(flags));
        }
        if contains(name, b"18elementwise_kernelI") {
            let is_equality = Self::is_equality(name);
            let has_scalar = contains(name, b"compare_scalar_kernel") || contains(name, b"UnaryFunctor");
            let is_comparison = contains(name, b"14CompareFunctorI") && !has_scalar;
            let writes_flags = contains(name, b"gpu_kernel_impl_nocast");
            return (is_comparison || is_equality)
                .then_some(Self::CompareStrided { is_equality, writes_flags });
        }
        if contains(name, b"6native13reduce_kernel") {
            return Self::reduction(name);
        }
        if let Some(kernel) = IndexKernel::of(name) {
            return Some(Self::Index(kernel));
        }
        if contains(name, b"DeviceReduce") {
            let nonzero = after(name, b"NonZeroOp");
            let input = NonzeroInput {
                element: nonzero.and_then(|rest| data_type(rest.strip_prefix(b"I")?)),
                test_is_first: contains(name, b"22TransformInputIterator"),
            };
            return match (contains(name, b"SingleTileKernel"), contains(name, b"ByKeyKernel")) {
                (true, _) if nonzero.is_some() => Some(Self::CountNonzero(input)),
                (true, _) => Some(Self::FinishReduction),
                (false, false) => nonzero.map(|_| Self::CountNonzeroPartial(input)),
                // Of the reductions by key, only run-length encoding sums up a constant.
                (false, true) => [&b"rle"[..], b"ConstantInput", b"constant_iter"]
                    .iter()
                    .any(|part| contains(name, part))
                    .then_some(Self::CountRuns),
            };
        }
        if contains(name, b"DeviceSelectSweepKernel") {
            return contains(name, b"equal_to").then_some(Self::CountUnique);
        }
        if contains(name, b"UniqueAgent") {
            return Some(Self::CountThrustUnique);
        }
        parameters(name).is_some_and(only_numbers).then_some(Self::NoPointer)
    }

    /// Recognizes `FillFunctor<T>`.
    fn fill(name: &[u8]) -> Option<Self> {
        let element = after(name, b"FillFunctorI")?;
        match element.first()? {
            b's' | b't' => Some(Self::Fill(2)),
            _ => data_type(element).map(|data_type| Self::Fill(reduce::width(data_type))),
        }
    }

    /// Recognizes `CompareFunctor<T>` and related functors with two inputs or a scalar. A functor wrapped in
    /// another one has its operator at another offset and is not recognized.
    fn comparison(name: &[u8]) -> Option<Self> {
        if let Some(element) = after(name, b"compare_scalar_kernelI") {
            return data_type(element).map(Self::CompareScalar);
        }
        if Self::is_equality(name) {
            return Some(Self::Equal(after(name, b"13BinaryFunctorI").and_then(data_type)));
        }
        // `isfinite` multiplies two flags.
        let is_and = contains(name, b"17BitwiseAndFunctorIbE") || contains(name, b"10MulFunctorIbE");
        if contains(name, b"13BinaryFunctorIbbb") && is_and {
            return Some(Self::And);
        }
        if contains(name, b"13BinaryFunctorI") && contains(name, b"16BitwiseOrFunctorIbE") {
            return Some(Self::Or);
        }
        let not = contains(name, b"logical_not_kernel") || contains(name, b"bitwise_not_kernel");
        if not && contains(name, b"EUlbE_") {
            return Some(Self::Not);
        }
        if contains(name, b"13AUnaryFunctorI") {
            return data_type(after(name, b"16CompareEqFunctorI")?).map(Self::EqualScalar);
        }
        let element = after(name, b"14CompareFunctorI")?;
        let two_inputs = contains(name, b"arrayIPcLm3E") || contains(name, b"ArrayIPcLi3E");
        (two_inputs && !contains(name, b"aryFunctorI")).then_some(Self::Compare(data_type(element)?))
    }

    /// Returns true if an elementwise kernel writes booleans: its functor returns them and no conversion
    /// follows, or the kernel converts to them.
    fn writes_flags(name: &[u8]) -> bool {
        let is_logical =
            [&b"CompareFunctor"[..], b"CompareEqFunctor", b"compare_scalar_kernel", b"logical_not_kernel"]
                .iter()
                .any(|part| contains(name, part));
        let is_boolean = contains(name, b"FunctorIbbb")
            || contains(name, b"bitwise_not_kernel") && contains(name, b"EUlbE_");
        Self::is_flag_copy(name) || !contains(name, b"WithCast") && (is_logical || is_boolean)
    }

    fn is_flag_copy(name: &[u8]) -> bool {
        contains(name, b"direct_copy_kernel") && contains(name, b"EUlbE_")
    }

    fn is_equality(name: &[u8]) -> bool {
        contains(name, b"13BinaryFunctorI") && contains(name, b"16CompareEqFunctorI")
    }

    /// Recognizes `ReduceOp<T, ...>` with a plain operation.
    fn reduction(name: &[u8]) -> Option<Self> {
        let data_type = data_type(after(name, b"8ReduceOpI")?)?;
        let kinds: [(&[u8], ReductionKind); 5] = [
            (b"and_kernel_cuda", ReductionKind::All),
            (b"or_kernel_cuda", ReductionKind::Any),
            (b"sum_functor", ReductionKind::Sum),
            (b"MaxNanFunctor", ReductionKind::Max),
            (b"MinNanFunctor", ReductionKind::Min),
        ];
        let (_, kind) = kinds.into_iter().find(|(part, _)| contains(name, part))?;
        // A reduction that accumulates in another type has another layout, so it is not recognized.
        let same_type = after(name, b"14func_wrapper_tI").and_then(self::data_type) == Some(data_type);
        (same_type || matches!(kind, ReductionKind::All | ReductionKind::Any))
            .then_some(Self::Reduce(kind, data_type))
    }
}

/// The number of slots in the table. PyTorch has about ten thousand recognized kernels.
const SLOTS: usize = 1 << 16;
/// A hash table with linear probing, from the host address of a kernel to its effect. Entries are never
/// removed, so a launch can look up its kernel without a lock.
static KERNELS: [AtomicUsize; SLOTS] = [const { AtomicUsize::new(0) }; SLOTS];
static EFFECTS: [OnceLock<KernelEffect>; SLOTS] = [const { OnceLock::new() }; SLOTS];

/// Returns the slots in which a kernel may be, in search order.
fn slots(kernel: usize) -> impl Iterator<Item = usize> {
    let first = (kernel >> 4).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 48;
    (0..64).map(move |step| (first + step) % SLOTS)
}

/// Registers a kernel if its effect is known.
pub(crate) fn register(kernel: usize, name: &[u8]) {
    let Some(effect) = KernelEffect::of(name) else { return };
    for slot in slots(kernel) {
        match KERNELS[slot].compare_exchange(0, kernel, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                let _ = EFFECTS[slot].set(effect);
                return;
            }
            Err(there) if there == kernel => return,
            Err(_) => {}
        }
    }
}

fn effect_of(kernel: usize) -> Option<KernelEffect> {
    for slot in slots(kernel) {
        match KERNELS[slot].load(Ordering::Acquire) {
            0 => return None,
            there if there == kernel => return EFFECTS[slot].get().copied(),
            _ => {}
        }
    }
    None
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
    signature::of(kernel).and_then(|signature| unsafe { signature.launch_with(arguments, blocks) })
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
/// input and for the output (each with its dimensions, 25 sizes of 12 bytes, and strides), then the two
/// addresses.
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
    let pointers = (configuration + 972usize).next_multiple_of(8);
    let (Some(from), Some(to)) = (address(pointers), address(pointers + 8)) else {
        return false;
    };
    let (inputs, outputs) = (number(configuration + 4), number(configuration + 8));
    if number(configuration) != width || inputs == 0 {
        return false;
    }
    // The stride is in bytes.
    let (dimensions, stride) = (number(configuration + 64), number(configuration + 64 + 4 + 300));
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
    fn kernels_are_recognized_by_their_mangled_names() {
        let input = NonzeroInput { element: Some(7), test_is_first: false };
        let cubs = NonzeroInput { test_is_first: true, ..input };
        let cases: [(&[u8], Option<KernelEffect>); 22] = [
            (
                b"_ZN2at4cuda40_GLOBAL__N__758183f4_8_Sleep_cu_088d913f11spin_kernelEl",
                Some(KernelEffect::NoPointer),
            ),
            (b"_ZN2at4cuda11spin_kernelElPi", None),
            (b"_Z4waitv", Some(KernelEffect::NoPointer)),
            (b"_Z4workPfi", None),
            (b"_Z4workIfEvi", None),
            (b"plain_c", None),
            (b"_ZN3cub28DeviceReduceSingleTileKernelI9NonZeroOpIfE", Some(KernelEffect::CountNonzero(input))),
            (b"_ZN3cub28DeviceReduceSingleTileKernelI22TransformInputIteratorIb9NonZeroOpIfE", Some(KernelEffect::CountNonzero(cubs))),
            (b"_ZN3cub18DeviceReduceKernelI9NonZeroOpIfE", Some(KernelEffect::CountNonzeroPartial(input))),
            (b"_ZN3cub28DeviceReduceSingleTileKernelI3Sum", Some(KernelEffect::FinishReduction)),
            (b"_ZN3cub23DeviceReduceByKeyKernelI3rle", Some(KernelEffect::CountRuns)),
            (b"_ZN3cub23DeviceSelectSweepKernelI9NonZeroOpIfE", None),
            (b"_ZN3cub23DeviceSelectSweepKernelI8equal_to", Some(KernelEffect::CountUnique)),
            (b"_ZN3at6native12other_kernelILi512E", None),
            (b"_ZN29vectorized_elementwise_kernelILi2ENS0_11FillFunctorIlEE", Some(KernelEffect::Fill(8))),
            (b"_ZN29vectorized_elementwise_kernelILi2ENS0_11FillFunctorIN3c104HalfEEE", Some(KernelEffect::Fill(2))),
            (
                b"29vectorized_elementwise_kernelILi4ENS0_14CompareFunctorIlEESt5arrayIPcLm3EEEE",
                Some(KernelEffect::Compare(4)),
            ),
            (
                b"_ZN29vectorized_elementwise_kernelILi2EZNS0_23bitwise_not_kernel_cudaERNS_18TensorIteratorBaseEEUlbE_St5",
                Some(KernelEffect::Not),
            ),
            (
                b"_ZN29vectorized_elementwise_kernelILi2EZZZNS0_23logical_not_kernel_cudaERNS_EENKUlvE_clEvEUlfE_St5",
                Some(KernelEffect::Flags),
            ),
            (b"_ZN27unrolled_elementwise_kernelI3Add", Some(KernelEffect::Elementwise)),
            (
                b"_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIbNS0_14func_wrapper_tIbZ15and_kernel_cuda",
                Some(KernelEffect::Reduce(ReductionKind::All, 1)),
            ),
            (
                b"_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIlNS0_14func_wrapper_tIlZNS0_11sum_functorIlll",
                Some(KernelEffect::Reduce(ReductionKind::Sum, 4)),
            ),
        ];
        for (name, expected) in cases {
            assert_eq!(KernelEffect::of(name), expected, "{}", String::from_utf8_lossy(name));
        }
    }

    #[test]
    fn only_registered_kernels_are_found() {
        for kernel in (0x1000..0x9000).step_by(16) {
            register(kernel, b"UniqueAgent");
        }
        assert_eq!(effect_of(0x1010), Some(KernelEffect::CountThrustUnique));
        assert_eq!(effect_of(0x900_0000), None);
    }
}
