//! The effects of PyTorch's elementwise kernels on flags and on small known tensors.
//!
//! Comparisons and logical operations on known values are computed. Questions about unknown values get the
//! answers with which a program continues: a value equals itself (it is not NaN), and two tensors differ.

use std::cell::Cell;

use crate::core::ffi::read;
use crate::core::values::SMALL;
use crate::cuda::copy::{
    Known, device_of, fill, forget, read_known, set_mask, set_opposite_mask, write_computed,
};
use crate::cuda::reach;
use crate::kernels::recognize::KernelEffect;
use crate::kernels::reduce::{self, Comparison, DataType, ncclUint8};
use crate::ops::scalar_type;

/// The maximum number of values that are assumed to be ordinary: finite, and not NaN.
const MAX_ORDINARY: usize = 1 << 20;

/// The address of memory whose location is unknown.
pub(crate) const UNKNOWN_ADDRESS: usize = usize::MAX;

thread_local! {
    /// The address of the flags if the last launch tested two tensors for equality, otherwise 0.
    static LAST_EQUALITY: Cell<usize> = const { Cell::new(0) };
}

/// Returns the address of the flags if the last launch tested two tensors for equality, otherwise 0. Resets
/// the stored address, because another launch begins.
pub(crate) fn take_last_equality() -> usize {
    LAST_EQUALITY.try_with(|cell| cell.replace(0)).unwrap_or(0)
}

/// Returns true if the last launch tested two tensors for equality and wrote the flags to this address.
pub(crate) fn is_last_equality(address: usize) -> bool {
    LAST_EQUALITY.try_with(Cell::get) == Ok(address)
}

/// Records that the last launch tested two tensors for equality and wrote the flags to this address.
pub(crate) fn set_last_equality(address: usize) {
    let _ = LAST_EQUALITY.try_with(|cell| cell.set(address));
}

/// The launch of an elementwise kernel. Only [`new`](Self::new) creates it, so its addresses are valid for
/// the reads that the [`KernelEffect`] allows.
#[derive(Clone, Copy)]
pub(crate) struct ElementwiseLaunch {
    /// The number of elements.
    count: usize,
    /// The address of the functor.
    functor: usize,
    /// The address of the array of operand addresses.
    operands: usize,
}

impl ElementwiseLaunch {
    /// # Safety
    /// `functor` and `operands` come from a launch of an elementwise kernel.
    pub(crate) unsafe fn new(count: usize, functor: usize, operands: usize) -> Self {
        Self { count, functor, operands }
    }

    /// Returns the address of the output (0) or of an input (1, 2).
    fn operand(&self, index: usize) -> Option<usize> {
        // SAFETY: the kernel has this operand.
        unsafe { read(self.operands + index * size_of::<usize>()) }
    }

    /// Returns the first member of the functor.
    fn operator(&self) -> Option<i32> {
        // SAFETY: the functor begins with an `int`.
        unsafe { read(self.functor) }
    }

    /// Returns `length` bytes of the functor at an offset.
    fn functor_bytes(&self, offset: usize, length: usize) -> Vec<u8> {
        // SAFETY: the functor has these members.
        unsafe { std::slice::from_raw_parts((self.functor + offset) as *const u8, length) }.to_vec()
    }

    /// Returns the bytes of the functor's scalar, which is after the operator and aligned to its size.
    fn scalar(&self, data_type: DataType) -> Vec<u8> {
        let width = reduce::width(data_type);
        self.functor_bytes(width.max(4), width)
    }

    /// Returns the flags of an input, or `None` if a flag is unknown or if there are more than
    /// [`MAX_ORDINARY`].
    fn flags(&self, index: usize) -> Option<Known> {
        let from = self.operand(index)?;
        // SAFETY: an input of the kernel, readable for its number of elements.
        (self.count <= MAX_ORDINARY).then(|| unsafe { read_known(from, self.count) }).flatten()
    }

    /// Returns the elements of an input, or `None` if one is unknown or if they have more than `SMALL` bytes.
    fn input(&self, index: usize, data_type: DataType) -> Option<Known> {
        let from = self.operand(index)?;
        let size = small_size(self.count, data_type)?;
        // SAFETY: an input of the kernel, readable for its number of elements.
        unsafe { read_known(from, size) }
    }

    /// Writes `size` flags to the output, or marks them as unknown if `flags` is `None`.
    fn write(&self, to: usize, flags: Option<Known>, size: usize) {
        match flags {
            // SAFETY: the output of the kernel, writable for its number of elements.
            Some(flags) => unsafe { write_computed(to, &flags) },
            None => set_mask(to, size),
        }
    }

    /// Stores the assumed value of an unknown output, if it is a single flag.
    fn assume(&self, to: usize, flag: bool) {
        if let (1, Some(device)) = (self.count, device_of(to)) {
            device.values().set_result(to, u64::from(flag));
        }
    }
}

/// Applies the effect of an elementwise kernel, which writes only the elements of its first operand.
pub(crate) fn apply(effect: KernelEffect, launch: &ElementwiseLaunch) {
    /// The size of the largest element in bytes: a complex number of two doubles.
    const WIDEST: usize = 16;
    let Some(to) = launch.operand(0) else { return };
    let count = launch.count;
    match effect {
        KernelEffect::Fill(width) if count.saturating_mul(width) <= SMALL => {
            let pattern = launch.functor_bytes(0, width);
            // SAFETY: the output of the kernel, writable for its number of elements.
            unsafe { fill(to, &pattern, count * width) };
            if width == 1 && count <= MAX_BATCH {
                note_flag_fill(pattern[0]);
            }
        }
        KernelEffect::Fill(width) => forget(to, count.saturating_mul(width)),
        KernelEffect::Compare(data_type) => {
            let comparison = launch.operator().and_then(Comparison::from_number);
            let inputs = launch.input(1, data_type).zip(launch.input(2, data_type));
            let result = comparison.zip(inputs).map(|(comparison, (left, right))| {
                of_two(&left, &right, |left, right| reduce::compare(data_type, comparison, left, right))
            });
            launch.write(to, result, count);
        }
        KernelEffect::CompareScalar(data_type) => compare_scalar(to, data_type, launch),
        KernelEffect::EqualScalar(data_type) => equal_scalar(to, data_type, launch),
        KernelEffect::And => and_flags(to, launch),
        KernelEffect::Not => not_flags(to, launch),
        KernelEffect::Or => or_flags(to, launch),
        KernelEffect::Flags => set_mask(to, count),
        KernelEffect::Equal(data_type) => equal(to, data_type, launch),
        // The size of the elements is unknown, but a kernel stays inside the block of its output.
        _ => {
            let end = reach::block_end(to).unwrap_or(usize::MAX);
            forget(to, count.saturating_mul(WIDEST).min(end - to));
        }
    }
}

/// Returns the result of an operation on two known inputs.
fn of_two(left: &Known, right: &Known, result: impl FnOnce(&[u8], &[u8]) -> Vec<u8>) -> Known {
    Known { bytes: result(&left.bytes, &right.bytes), is_answer: left.is_answer || right.is_answer }
}

/// Returns the result of an operation on a known input.
fn of_one(input: &Known, result: impl FnOnce(&[u8]) -> Vec<u8>) -> Known {
    Known { bytes: result(&input.bytes), is_answer: input.is_answer }
}

/// Applies an operation to the bytes at each position of two inputs, and returns the results.
fn bytewise(left: &[u8], right: &[u8], operation: impl Fn(u8, u8) -> u8) -> Vec<u8> {
    left.iter().zip(right).map(|(&left, &right)| operation(left, right)).collect()
}

/// The maximum batch size of a program that generates tokens. A fill of at most this number of bytes counts
/// as a fill of flags.
const MAX_BATCH: usize = 1024;

thread_local! {
    /// True if a small fill of this thread has written true flags, and since then the thread has launched no kernel of
    /// unknown effect and tested no unknown value for equality.
    static TRUE_FILL: Cell<bool> = const { Cell::new(false) };
    /// The flags written by the last three small fills of this thread, the newest in the lowest bit.
    static RECENT_FILLS: Cell<u8> = const { Cell::new(0) };
}

fn note_flag_fill(flag: u8) {
    if flag == 1 {
        set_true_fill(true);
    }
    let _ = RECENT_FILLS.try_with(|fills| fills.set((fills.get() << 1 | flag) & 0b111));
}

/// Sets [`TRUE_FILL`], and returns its value before.
fn set_true_fill(is_true: bool) -> bool {
    TRUE_FILL.try_with(|cell| cell.replace(is_true)).unwrap_or(false)
}

/// Records that a kernel of unknown effect was launched.
pub(crate) fn launched_unknown() {
    set_true_fill(false);
}

/// Computes the logical "and" of two flags. Beam search uses this to decide whether to continue, and its
/// flags are unknown here. In each step, it fills flags three times: with false at the start, with true at
/// the length limit and otherwise false, and with false before it searches for the end token. So the result
/// for unknown flags is true ("continue") unless one of the last three fills wrote true.
fn and_flags(to: usize, launch: &ElementwiseLaunch) {
    if launch.operand(1).is_none() || launch.operand(2).is_none() {
        return;
    }
    let count = launch.count;
    if let Some((left, right)) = launch.flags(1).zip(launch.flags(2)) {
        let result = of_two(&left, &right, |left, right| bytewise(left, right, |left, right| left & right));
        launch.write(to, Some(result), count);
        return;
    }
    set_mask(to, count);
    launch.assume(to, RECENT_FILLS.try_with(Cell::get).unwrap_or(0) == 0);
}

/// Converts whole numbers to flags, as `any` does for a single element. `loader` is the address of a
/// `LoadWithCast<1>` (ATen's MemoryAccess.cuh): a byte with the type of the input, and a word with the size
/// of an element.
pub(crate) fn to_flags(launch: &ElementwiseLaunch, loader: usize) {
    let (Some(to), Some(from)) = (launch.operand(0), launch.operand(1)) else { return };
    // SAFETY: members of an argument of the kernel.
    let members = unsafe { read::<u8>(loader).zip(read::<u32>(loader + 4)) };
    let width = members.and_then(|(number, width)| {
        let scalar_type = i32::from(number);
        // Floats are excluded, because a zero may have a sign.
        let is_whole = scalar_type::is_whole(scalar_type);
        scalar_type::width(scalar_type).filter(|&known| is_whole && known == width as usize)
    });
    let flags = width.and_then(|width| {
        let size = launch.count.checked_mul(width).filter(|&size| size <= SMALL)?;
        // SAFETY: the input of the kernel, readable for its number of elements.
        let input = unsafe { read_known(from, size) }?;
        let is_nonzero = |element: &[u8]| u8::from(element.iter().any(|&byte| byte != 0));
        Some(of_one(&input, |bytes| bytes.chunks_exact(width).map(is_nonzero).collect()))
    });
    launch.write(to, flags, launch.count);
}

/// Inverts flags. Unknown flags are linked to their inverted copies: once the host reads an invented value
/// for one of the two, the other one gets the opposite value.
fn not_flags(to: usize, launch: &ElementwiseLaunch) {
    let Some(from) = launch.operand(1) else { return };
    let count = launch.count;
    if let Some(flags) = launch.input(1, ncclUint8) {
        let result = of_one(&flags, |flags| flags.iter().map(|&flag| u8::from(flag == 0)).collect());
        return launch.write(to, Some(result), count);
    }
    let assumed = device_of(from).filter(|_| count == 1).and_then(|device| device.values().result(from));
    set_opposite_mask(from, to, count);
    if let Some(flag) = assumed {
        launch.assume(to, flag == 0);
    }
}

/// Computes the logical "or" of two flags. If one is true, the result is true.
fn or_flags(to: usize, launch: &ElementwiseLaunch) {
    let result = match (launch.input(1, ncclUint8), launch.input(2, ncclUint8)) {
        (Some(left), Some(right)) => {
            Some(of_two(&left, &right, |left, right| bytewise(left, right, |left, right| left | right)))
        }
        (Some(known), None) | (None, Some(known)) => {
            known.bytes.iter().all(|&flag| flag == 1).then_some(known)
        }
        (None, None) => None,
    };
    launch.write(to, result, launch.count);
}

/// Tests two inputs for equality. Unknown values of two tensors count as unequal if a reduction asks.
fn equal(to: usize, data_type: Option<DataType>, launch: &ElementwiseLaunch) {
    let inputs = |data_type| Some((launch.input(1, data_type)?, launch.input(2, data_type)?));
    let known = data_type.and_then(|data_type| inputs(data_type).map(|inputs| (data_type, inputs)));
    if let (Some((data_type, (left, right))), Some(operator @ 0..=1)) = (known, launch.operator()) {
        let mut flags = of_two(&left, &right, |left, right| reduce::equal(data_type, left, right));
        flags.bytes.iter_mut().for_each(|flag| *flag ^= operator as u8);
        return launch.write(to, Some(flags), launch.count);
    }
    let is_same = launch.operand(1) == launch.operand(2);
    if let (true, Some(operator @ 0..=1), ..=MAX_ORDINARY) = (is_same, launch.operator(), launch.count) {
        // A value equals itself, unless it is NaN. Unknown values are assumed not to be NaN.
        let flags = Known { bytes: vec![operator as u8 ^ 1; launch.count], is_answer: false };
        return launch.write(to, Some(flags), launch.count);
    }
    set_mask(to, launch.count);
    set_last_equality(if is_same { 0 } else { to });
}

/// Tests an input for equality with a scalar. Loops that generate tokens use this test to check whether all
/// sequences are finished, with values that no kernel computed. When the length limit is reached, such a
/// loop fills flags with true just before the test. So the test of one unknown value is true after such a
/// fill, and otherwise false.
fn equal_scalar(to: usize, data_type: DataType, launch: &ElementwiseLaunch) {
    if launch.operand(1).is_none() {
        return;
    }
    let scalar = launch.scalar(data_type);
    let wanted = launch.operator() == Some(0);
    match launch.input(1, data_type) {
        Some(known) => {
            let elements = known.bytes.chunks_exact(reduce::width(data_type));
            let bytes = elements.map(|element| u8::from((element == scalar) == wanted)).collect();
            launch.write(to, Some(Known { bytes, ..known }), launch.count);
        }
        None if reduce::is_infinite(data_type, &scalar) && launch.count <= MAX_ORDINARY => {
            // Unknown values count as finite.
            let bytes = vec![u8::from(!wanted); launch.count];
            launch.write(to, Some(Known { bytes, is_answer: false }), launch.count);
        }
        None => {
            set_mask(to, launch.count);
            if launch.count == 1 && device_of(to).is_some() {
                launch.assume(to, set_true_fill(false));
            }
        }
    }
}

/// Compares an input with a scalar. `torch.normal` checks its standard deviations in this way. An unknown
/// value counts as zero, which is also the value that reading it returns.
fn compare_scalar(to: usize, data_type: DataType, launch: &ElementwiseLaunch) {
    if launch.operand(1).is_none() {
        return;
    }
    let count = launch.count;
    let comparison = launch.operator().and_then(Comparison::from_number);
    let (Some(size), Some(comparison)) = (small_size(count, data_type), comparison) else {
        return set_mask(to, count);
    };
    let scalars = launch.scalar(data_type).repeat(count);
    match launch.input(1, data_type) {
        Some(left) => {
            let result = of_one(&left, |left| reduce::compare(data_type, comparison, left, &scalars));
            launch.write(to, Some(result), count);
        }
        None => {
            let result = reduce::compare(data_type, comparison, &vec![0; size], &scalars);
            launch.write(to, None, count);
            if let [flag] = result.as_slice() {
                launch.assume(to, *flag == 1);
            }
        }
    }
}

/// Returns the size of `count` elements in bytes, if they are few.
pub(crate) fn small_size(count: usize, data_type: DataType) -> Option<usize> {
    count.checked_mul(reduce::width(data_type)).filter(|&size| size <= SMALL)
}
