//! Kernels whose effect can be told from their name and arguments, though none of them runs.
//!
//! - Counting kernels: their result becomes the size of a tensor, so what it reads as is an assumption
//!   that the user can set ([`Dynamic`](crate::core::values::Dynamic)).
//! - Fills of small ranges are really done, so `torch.ones(3)` reads as ones.
//! - Comparisons and reductions of small known tensors are done, because ranks agree on sizes by them.
//!   Of unknown values, "all" is taken for true and "any" for false: what programs ask that way is
//!   whether their data is sound. That two different tensors are equal is taken for false.
//! - Elementwise kernels write one range and leave what is known of all other memory alone.
//!
//! A kernel is known by its mangled name, which the program registers before it can launch it; its
//! arguments are as PyTorch, CUB and Thrust declare them. A kernel whose name or arguments changed is
//! no longer recognized: a count then reads as zero, and memory as unknown.

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::core::ffi::Out;
use crate::core::host_state::{Device, machine};
use crate::core::values::SMALL;
use crate::cuda::copy::{device_of, forget, read_host, read_known, set, write_known};
use crate::cuda::stream::stream;
use crate::kernels::reduce::{self, Comparison};

/// A type of elements, numbered as `ncclDataType_t`.
type DataType = i32;

/// What a kernel does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Meaning {
    /// `cub::DeviceReduceSingleTileKernel` over a test for nonzero: (in, out, count, ...).
    Nonzero,
    /// `cub::DeviceReduceKernel` over a test for nonzero: (in, partial results, count, ...).
    NonzeroPart,
    /// `cub::DeviceReduceSingleTileKernel` over anything, which may finish the above.
    Finish,
    /// `cub::DeviceSelectSweepKernel` by equality: (in, flags, out, count out, tiles, op, equality, count, ...).
    Unique,
    /// `cub::DeviceReduceByKeyKernel` that encodes run lengths: (in, out, values, lengths, count out,
    /// tiles, first tile, equality, op, count).
    Runs,
    /// Thrust's `unique`: (in, out, predicate, count out, count, ...).
    ThrustUnique,
    /// An elementwise kernel of PyTorch: (count, function, addresses, ...), the output's first.
    Elementwise,
    /// The same with a function that gives one value of so many bytes.
    Fill(usize),
    /// The same that compares its two inputs; the function is a number for `>= > <= <`.
    Compare(DataType),
    /// The same that compares its input with a scalar; the function is that number and the scalar.
    CompareScalar(DataType),
    /// The same that tests its input and a scalar for equality; the function is 0 for equal, 1 for
    /// not equal, and the scalar.
    EqualScalar(DataType),
    /// The same that tests its two inputs for equality.
    Equal,
    /// The same that says whether both of two flags are set.
    Both,
    /// The same over strides, with its places among the function's own values.
    EqualStrided,
    /// PyTorch's `reduce_kernel`: one struct, see [`reduction`].
    Reduce(Reduction, DataType),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reduction {
    Sum,
    Max,
    Min,
    All,
    Any,
}

fn has(text: &[u8], part: &[u8]) -> bool {
    // SAFETY: both slices are good for their length; `memmem` reads no further. Tens of thousands of
    // names pass here while PyTorch is loaded, and it is the fastest search at hand.
    !unsafe { libc::memmem(text.as_ptr().cast(), text.len(), part.as_ptr().cast(), part.len()) }.is_null()
}

/// What follows a part of a mangled name.
fn after<'a>(name: &'a [u8], part: &[u8]) -> Option<&'a [u8]> {
    let at = name.windows(part.len()).position(|window| window == part)? + part.len();
    name.get(at..)
}

/// The type whose mangled name begins there. Booleans are bytes.
fn data_type(name: &[u8]) -> Option<DataType> {
    Some(match name.first()? {
        b'a' => 0,
        b'b' | b'h' => 1,
        b'i' => 2,
        b'j' => 3,
        b'l' => 4,
        b'm' => 5,
        b'f' => 7,
        b'd' => 8,
        _ if name.starts_with(b"N3c104HalfE") => 6,
        _ if name.starts_with(b"N3c108BFloat16E") => 9,
        _ => return None,
    })
}

impl Meaning {
    fn of(name: &[u8]) -> Option<Self> {
        // The unrolled form may convert types and walk over strides; the vectorized one never does.
        let plain = has(name, b"vectorized_elementwise_kernel");
        if plain || has(name, b"unrolled_elementwise_kernel") {
            let known = plain || has(name, b"TrivialOffset") && !has(name, b"WithCast");
            let function = known.then(|| Self::fill(name).or_else(|| Self::compare(name))).flatten();
            return Some(function.unwrap_or(Self::Elementwise));
        }
        if has(name, b"18elementwise_kernelI") {
            return Self::equal(name).then_some(Self::EqualStrided);
        }
        if has(name, b"6native13reduce_kernel") {
            return Self::reduction(name);
        }
        if has(name, b"DeviceReduce") {
            let nonzero = has(name, b"NonZeroOp");
            return match (has(name, b"SingleTileKernel"), has(name, b"ByKeyKernel")) {
                (true, _) => Some(if nonzero { Self::Nonzero } else { Self::Finish }),
                (false, false) => nonzero.then_some(Self::NonzeroPart),
                // Only run lengths add up a constant.
                (false, true) => [&b"rle"[..], b"ConstantInput", b"constant_iter"]
                    .iter()
                    .any(|part| has(name, part))
                    .then_some(Self::Runs),
            };
        }
        if has(name, b"DeviceSelectSweepKernel") {
            return has(name, b"equal_to").then_some(Self::Unique);
        }
        has(name, b"UniqueAgent").then_some(Self::ThrustUnique)
    }

    /// `FillFunctor<T>`.
    fn fill(name: &[u8]) -> Option<Self> {
        let kind = after(name, b"FillFunctorI")?;
        match kind.first()? {
            b's' | b't' => Some(Self::Fill(2)),
            _ => data_type(kind).map(|data_type| Self::Fill(reduce::width(data_type))),
        }
    }

    /// `CompareFunctor<T>` with two inputs; one that is wrapped in another function has its operator
    /// elsewhere.
    fn compare(name: &[u8]) -> Option<Self> {
        if let Some(kind) = after(name, b"compare_scalar_kernelI") {
            return data_type(kind).map(Self::CompareScalar);
        }
        if Self::equal(name) {
            return Some(Self::Equal);
        }
        if has(name, b"13BinaryFunctorI") && has(name, b"17BitwiseAndFunctorIbE") {
            return Some(Self::Both);
        }
        if has(name, b"13AUnaryFunctorI") {
            return data_type(after(name, b"16CompareEqFunctorI")?).map(Self::EqualScalar);
        }
        let kind = after(name, b"14CompareFunctorI")?;
        let two_inputs = has(name, b"arrayIPcLm3E") || has(name, b"ArrayIPcLi3E");
        (two_inputs && !has(name, b"aryFunctorI")).then_some(Self::Compare(data_type(kind)?))
    }

    fn equal(name: &[u8]) -> bool {
        has(name, b"13BinaryFunctorI") && has(name, b"16CompareEqFunctorI")
    }

    /// `ReduceOp<T, ...>` of the plain operations.
    fn reduction(name: &[u8]) -> Option<Self> {
        let data_type = data_type(after(name, b"8ReduceOpI")?)?;
        let reductions: [(&[u8], Reduction); 5] = [
            (b"and_kernel_cuda", Reduction::All),
            (b"or_kernel_cuda", Reduction::Any),
            (b"sum_functor", Reduction::Sum),
            (b"MaxNanFunctor", Reduction::Max),
            (b"MinNanFunctor", Reduction::Min),
        ];
        let (_, reduction) = reductions.into_iter().find(|(part, _)| has(name, part))?;
        // What is added up in another type has another layout.
        let same = after(name, b"14func_wrapper_tI").and_then(self::data_type) == Some(data_type);
        (same || matches!(reduction, Reduction::All | Reduction::Any))
            .then_some(Self::Reduce(reduction, data_type))
    }
}

/// Slots of the table; PyTorch has some ten thousand such kernels.
const SLOTS: usize = 1 << 16;
/// The table, from a kernel's host address to its meaning. Only ever added to, so that a launch
/// finds its kernel without a lock.
static KERNELS: [AtomicUsize; SLOTS] = [const { AtomicUsize::new(0) }; SLOTS];
static MEANINGS: [OnceLock<Meaning>; SLOTS] = [const { OnceLock::new() }; SLOTS];

fn slots(kernel: usize) -> impl Iterator<Item = usize> {
    let first = (kernel >> 4).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 48;
    (0..64).map(move |step| (first + step) % SLOTS)
}

/// Notes a kernel that the program registers, if it is one of these.
pub(crate) fn register(kernel: usize, name: &[u8]) {
    let Some(meaning) = Meaning::of(name) else { return };
    for slot in slots(kernel) {
        match KERNELS[slot].compare_exchange(0, kernel, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                let _ = MEANINGS[slot].set(meaning);
                return;
            }
            Err(there) if there == kernel => return,
            Err(_) => {}
        }
    }
}

fn meaning(kernel: usize) -> Option<Meaning> {
    for slot in slots(kernel) {
        match KERNELS[slot].load(Ordering::Acquire) {
            0 => return None,
            there if there == kernel => return MEANINGS[slot].get().copied(),
            _ => {}
        }
    }
    None
}

/// A place that is not known.
const ANYWHERE: usize = usize::MAX;

thread_local! {
    /// Partial results that the next reduction finishes: their address and how many elements they count.
    static PARTIAL: Cell<(usize, u64)> = const { Cell::new((0, 0)) };
    /// Where the last launch wrote whether two tensors are equal; 0 when it was no such test.
    static EQUALITY: Cell<usize> = const { Cell::new(0) };
}

/// The arguments of a launch: a list of the address of each.
#[derive(Clone, Copy)]
struct Arguments(Out<usize>);

impl Arguments {
    fn place(self, index: usize) -> Option<usize> {
        self.0.at(index).get()
    }

    fn pointer(self, index: usize) -> Option<usize> {
        Out::<usize>::from_address(self.place(index)?).get()
    }

    /// A number of elements, of 32 or 64 bits: no tensor that is counted in one launch has more than
    /// 2^32, so the lower half tells.
    fn count(self, index: usize) -> Option<u64> {
        Out::<u32>::from_address(self.place(index)?).get().map(u64::from)
    }
}

/// Looks at a launch and lets it have the effect that is known of it.
pub(crate) fn launched(kernel: usize, arguments: usize, on: usize) {
    let device = stream(on).device();
    let Some(meaning) = meaning(kernel) else {
        unknown();
        return device.disturb();
    };
    let arguments = Arguments(Out::from_address(arguments));
    let equality = EQUALITY.try_with(|cell| cell.replace(0)).unwrap_or(0);
    let counted = match meaning {
        Meaning::Nonzero => arguments.pointer(1).zip(arguments.count(2)),
        Meaning::NonzeroPart => {
            if let Some(partial) = arguments.pointer(1).zip(arguments.count(2)) {
                let _ = PARTIAL.try_with(|cell| cell.set(partial));
            }
            None
        }
        Meaning::Finish => {
            let (partial, all) = PARTIAL.try_with(|cell| cell.replace((0, 0))).unwrap_or((0, 0));
            let finishes = partial != 0 && arguments.pointer(0) == Some(partial);
            arguments.pointer(1).filter(|_| finishes).map(|to| (to, all))
        }
        Meaning::Unique => arguments.pointer(3).zip(arguments.count(7)),
        Meaning::Runs => arguments.pointer(4).zip(arguments.count(9)),
        Meaning::ThrustUnique => arguments.pointer(3).zip(arguments.count(4)),
        Meaning::Reduce(reduction, data_type) => {
            if let Some(operation) = arguments.place(0) {
                self::reduction(device, reduction, data_type, operation, equality);
            }
            return;
        }
        Meaning::EqualStrided => {
            let _ = EQUALITY.try_with(|cell| cell.set(ANYWHERE));
            None
        }
        Meaning::Elementwise
        | Meaning::Equal
        | Meaning::Both
        | Meaning::Fill(_)
        | Meaning::Compare(_)
        | Meaning::EqualScalar(_)
        | Meaning::CompareScalar(_) => {
            let count = arguments.count(0);
            if let (Some(count), Some(function), Some(places)) =
                (count, arguments.place(1), arguments.place(2))
            {
                elementwise(meaning, count as usize, function, Out::from_address(places));
            }
            return;
        }
    };
    device.disturb();
    if let Some((place, all)) = counted {
        device.values().result(device.epoch(), place, machine().dynamic.of(all));
    }
}

/// An elementwise kernel writes `count` elements at the first of its places and nothing else.
fn elementwise(meaning: Meaning, count: usize, function: usize, places: Out<usize>) {
    /// The widest element that there is: a complex number of two doubles.
    const WIDEST: usize = 16;
    let Some(to) = places.get() else { return };
    match meaning {
        Meaning::Fill(width) if count.saturating_mul(width) <= SMALL => {
            let mut pattern = [0; 8];
            read_host(function, &mut pattern[..width]);
            set(to, &pattern[..width], count * width);
            if width == 1 && count <= ROWS {
                filled(pattern[0]);
            }
        }
        Meaning::Fill(width) => forget(to, count.saturating_mul(width)),
        Meaning::Compare(data_type) => {
            let operator = Out::<i32>::from_address(function).get().and_then(Comparison::numbered);
            let result = (|| {
                let size = small(count, data_type)?;
                let left = read_known(places.at(1).get()?, size)?;
                let right = read_known(places.at(2).get()?, size)?;
                Some(reduce::compare(data_type, operator?, &left, &right))
            })();
            write_known(to, result.as_deref(), count);
        }
        Meaning::CompareScalar(data_type) => compare_scalar(data_type, count, function, places),
        Meaning::EqualScalar(data_type) => equal_scalar(data_type, count, function, places),
        Meaning::Both => both(count, places),
        Meaning::Equal => {
            forget(to, count);
            let different = places.at(1).get() != places.at(2).get();
            let _ = EQUALITY.try_with(|cell| cell.set(if different { to } else { 0 }));
        }
        _ => forget(to, count.saturating_mul(WIDEST)),
    }
}

/// No batch that is generated for is larger.
const ROWS: usize = 1024;
/// A few flags were filled with true, and since then neither did anything unknown run nor did anybody
/// ask whether a value is zero.
static FINISHED: AtomicBool = AtomicBool::new(false);

/// What the last three such fills wrote, the newest in the lowest bit.
static FILLS: AtomicUsize = AtomicUsize::new(0);

/// A few flags were filled.
fn filled(flag: u8) {
    if flag == 1 {
        FINISHED.store(true, Ordering::Relaxed);
    }
    let before = FILLS.load(Ordering::Relaxed);
    FILLS.store((before << 1 | usize::from(flag)) & 0b111, Ordering::Relaxed);
}

/// Something of unknown effect runs.
pub(crate) fn unknown() {
    FINISHED.store(false, Ordering::Relaxed);
}

/// Are two flags both set? Beam search asks so whether it may go on, of flags that no kernel computed,
/// with work of unknown effect between the length limit's fill and the question. A step fills flags three
/// times: with false to begin with, for the length limit, and with false before it looks for the end's
/// token; so one unknown flag and another are both set unless one of the last three fills wrote true.
fn both(count: usize, places: Out<usize>) {
    let (Some(to), Some(left), Some(right)) = (places.get(), places.at(1).get(), places.at(2).get()) else {
        return;
    };
    let known = small(count, 1).and_then(|size| read_known(left, size).zip(read_known(right, size)));
    if let Some((left, right)) = known {
        let truth: Vec<u8> = left.iter().zip(&right).map(|(left, right)| left & right).collect();
        write_known(to, Some(&truth), count);
        return;
    }
    forget(to, count);
    if let (1, Some(device)) = (count, device_of(to)) {
        let goes_on = FILLS.load(Ordering::Relaxed) == 0;
        device.values().result(device.epoch(), to, u64::from(goes_on));
    }
}

/// Tests for equality with a scalar. Loops that generate tokens ask so whether all sequences are
/// finished, a value that no kernel computed; but that the length limit is reached they say by a fill
/// with true, just before. So the test of one unknown value holds after such a fill, and only then.
fn equal_scalar(data_type: DataType, count: usize, function: usize, places: Out<usize>) {
    let (Some(to), Some(from)) = (places.get(), places.at(1).get()) else { return };
    let width = reduce::width(data_type);
    let mut scalar = vec![0; width];
    read_host(function + width.max(4), &mut scalar);
    let operator = Out::<i32>::from_address(function).get();
    match small(count, data_type).and_then(|size| read_known(from, size)) {
        Some(bytes) => {
            let truth: Vec<u8> = bytes
                .chunks_exact(width)
                .map(|element| u8::from((element == scalar) == (operator == Some(0))))
                .collect();
            write_known(to, Some(&truth), count);
        }
        None => {
            forget(to, count);
            if let (1, Some(device)) = (count, device_of(to)) {
                let finished = FINISHED.swap(false, Ordering::Relaxed);
                device.values().result(device.epoch(), to, u64::from(finished));
            }
        }
    }
}

/// Compares with a scalar: `torch.normal` asks so whether its deviations are sound. An unknown value
/// is compared as the zero that it reads as.
fn compare_scalar(data_type: DataType, count: usize, function: usize, places: Out<usize>) {
    let (Some(to), Some(from)) = (places.get(), places.at(1).get()) else { return };
    let comparison = Out::<i32>::from_address(function).get().and_then(Comparison::numbered);
    let (Some(size), Some(comparison)) = (small(count, data_type), comparison) else {
        return forget(to, count);
    };
    let width = reduce::width(data_type);
    let mut scalar = vec![0; width];
    read_host(function + width.max(4), &mut scalar);
    let left = read_known(from, size);
    let known = left.is_some();
    let truth =
        reduce::compare(data_type, comparison, &left.unwrap_or_else(|| vec![0; size]), &scalar.repeat(count));
    write_known(to, Some(&truth).filter(|_| known).map(Vec::as_slice), count);
    if let (false, [truth], Some(device)) = (known, truth.as_slice(), device_of(to)) {
        device.values().result(device.epoch(), to, u64::from(*truth));
    }
}

/// Bytes of so many elements, if they are few.
fn small(count: usize, data_type: DataType) -> Option<usize> {
    count.checked_mul(reduce::width(data_type)).filter(|&size| size <= SMALL)
}

/// A reduction to one value. The kernel's only argument is PyTorch's `ReduceOp` (ATen's Reduce.cuh):
/// the operation and its identity, the configuration, a calculator of offsets for the input (its
/// dimensions, 25 sizes of 12 bytes, 25 strides) and one for the output, then the two addresses.
fn reduction(device: &Device, reduction: Reduction, data_type: DataType, operation: usize, equality: usize) {
    let configuration = match reduce::width(data_type) {
        1 => 4,
        4 => 8,
        8 => 16,
        // Halves are added up in a wider type, which moves everything.
        _ => return device.disturb(),
    };
    let number = |offset: usize| Out::<u32>::from_address(operation + offset).get().unwrap_or(0) as usize;
    let pointers = (configuration + 972usize).next_multiple_of(8);
    let address = |offset: usize| Out::<usize>::from_address(operation + offset).get();
    let (Some(from), Some(to)) = (address(pointers), address(pointers + 8)) else { return device.disturb() };
    let (inputs, outputs) = (number(configuration + 4), number(configuration + 8));
    if number(configuration) != reduce::width(data_type) || inputs == 0 {
        return device.disturb();
    }
    let (dimensions, stride) = (number(configuration + 64), number(configuration + 64 + 4 + 300));
    let element = match reduction {
        Reduction::All | Reduction::Any => 1,
        _ => reduce::width(data_type),
    };
    forget(to, outputs.max(1).saturating_mul(element));
    if outputs != 1 {
        return;
    }
    // Strides are in bytes.
    let straight = inputs == 1 || dimensions == 1 && stride == reduce::width(data_type);
    let known = small(inputs, data_type).filter(|_| straight).and_then(|size| read_known(from, size));
    match (reduction, known) {
        (Reduction::All | Reduction::Any, None) => {
            let sound = reduction == Reduction::All && from != equality && equality != ANYWHERE;
            device.values().result(device.epoch(), to, u64::from(sound));
        }
        (Reduction::All, Some(bytes)) => {
            let width = reduce::width(data_type);
            let all = bytes.chunks_exact(width).all(|element| element.iter().any(|&byte| byte != 0));
            write_known(to, Some(&[u8::from(all)]), 1);
        }
        (Reduction::Any, Some(bytes)) => {
            write_known(to, Some(&[u8::from(bytes.iter().any(|&byte| byte != 0))]), 1);
        }
        (_, Some(bytes)) => {
            let operation = match reduction {
                Reduction::Max => reduce::MAX,
                Reduction::Min => reduce::MIN,
                _ => reduce::SUM,
            };
            let elements: Vec<_> = bytes.chunks_exact(element).map(<[u8]>::to_vec).collect();
            write_known(to, Some(&reduce::reduce(data_type, operation, &elements)), element);
        }
        (_, None) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_known_by_their_names() {
        let cases: [(&[u8], Option<Meaning>); 13] = [
            (b"_ZN3cub28DeviceReduceSingleTileKernelI9NonZeroOpIfE", Some(Meaning::Nonzero)),
            (b"_ZN3cub18DeviceReduceKernelI9NonZeroOpIfE", Some(Meaning::NonzeroPart)),
            (b"_ZN3cub28DeviceReduceSingleTileKernelI3Sum", Some(Meaning::Finish)),
            (b"_ZN3cub23DeviceReduceByKeyKernelI3rle", Some(Meaning::Runs)),
            (b"_ZN3cub23DeviceSelectSweepKernelI9NonZeroOpIfE", None),
            (b"_ZN3cub23DeviceSelectSweepKernelI8equal_to", Some(Meaning::Unique)),
            (b"_ZN3at6native12other_kernelILi512E", None),
            (b"_ZN29vectorized_elementwise_kernelILi2ENS0_11FillFunctorIlEE", Some(Meaning::Fill(8))),
            (b"_ZN29vectorized_elementwise_kernelILi2ENS0_11FillFunctorIN3c104HalfEEE", Some(Meaning::Fill(2))),
            (
                b"29vectorized_elementwise_kernelILi4ENS0_14CompareFunctorIlEESt5arrayIPcLm3EEEE",
                Some(Meaning::Compare(4)),
            ),
            (b"_ZN27unrolled_elementwise_kernelI3Add", Some(Meaning::Elementwise)),
            (
                b"_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIbNS0_14func_wrapper_tIbZ15and_kernel_cuda",
                Some(Meaning::Reduce(Reduction::All, 1)),
            ),
            (
                b"_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIlNS0_14func_wrapper_tIlZNS0_11sum_functorIlll",
                Some(Meaning::Reduce(Reduction::Sum, 4)),
            ),
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
