//! Large CPU tensors without values (`--no-host-values`).
//!
//! PyTorch's CPU allocator and a few of its functions are interposed. A floating-point CPU tensor of at least
//! [`LEAST`] bytes gets memory that it shares with all other such tensors ([`host_pages`]). The loops that
//! would write this memory are skipped, so building a model on the host costs neither memory nor time. Every
//! other tensor, such as a mask, an index or a batch of tokens, is an ordinary tensor. Without the option,
//! each function below only calls the one that it replaces.

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::core::host_pages::{self, LEAST};
use crate::ops::replaced::{Replaced, TORCH_CPU};
use crate::ops::scalar_type::is_floating_point;
use crate::ops::torch::{TensorPlace, library, symbol};

const C10: &CStr = c"libc10.so";

/// Defines a function that replaces PyTorch's function of a name: its type, the name, and its body, in which
/// `$real` is PyTorch's function.
///
/// `placed fn` is a function whose caller passes the place of the result, which the body gets as the first
/// argument. On x86-64 it is passed so; on aarch64 it is in x8.
macro_rules! replace {
    ($library:ident, $symbol:literal,
     placed fn $name:ident($($argument:ident: $kind:ty),*) -> usize, |$real:ident| $body:block) => {
        #[cfg(target_arch = "x86_64")]
        replace!($library, $symbol, fn $name($($argument: $kind),*) -> usize, |$real| $body);
        #[cfg(target_arch = "aarch64")]
        const _: () = {
            static REAL: Replaced = Replaced::new($library, terminated(concat!($symbol, "\0")));

            // SAFETY: PyTorch's definition has the same type.
            #[unsafe(export_name = $symbol)]
            #[unsafe(naked)]
            unsafe extern "C-unwind" fn entry() {
                core::arch::naked_asm!(
                    "mov x6, x5",
                    "mov x5, x4",
                    "mov x4, x3",
                    "mov x3, x2",
                    "mov x2, x1",
                    "mov x1, x0",
                    "mov x0, x8",
                    "b {body}",
                    body = sym $name
                )
            }

            unsafe extern "C-unwind" fn $name($($argument: $kind),*) -> usize {
                let $real = |$($argument: $kind),*| {
                    let words = placed_words([$($argument as usize),*]);
                    let [place, rest @ ..] = words;
                    // SAFETY: PyTorch's function has six arguments at most besides the place.
                    unsafe {
                        call_placed(place, rest[0], rest[1], rest[2], rest[3], rest[4], rest[5], REAL.real())
                    }
                };
                // The body calls `$real` as the unsafe function that it is on x86-64.
                #[allow(unused_unsafe, reason = "`$real` is a closure here")]
                $body
            }
        };
    };
    ($library:ident, $symbol:literal, fn $name:ident($($argument:ident: $kind:ty),*) $(-> $result:ty)?,
     |$real:ident| $body:block) => {
        // SAFETY: PyTorch's definition has the same type, and is called with the caller's arguments.
        #[unsafe(export_name = $symbol)]
        unsafe extern "C-unwind" fn $name($($argument: $kind),*) $(-> $result)? {
            static REAL: Replaced = Replaced::new($library, terminated(concat!($symbol, "\0")));
            // SAFETY: PyTorch's function has this type.
            let $real = unsafe {
                std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C-unwind" fn($($kind),*) $(-> $result)?,
                >(REAL.real())
            };
            $body
        }
    };
}

/// Returns the C string of a text that ends with a zero byte.
const fn terminated(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("a symbol with a zero byte"),
    }
}

/// Returns `words`, padded with zeros to seven words.
#[cfg(target_arch = "aarch64")]
fn placed_words<const N: usize>(words: [usize; N]) -> [usize; 7] {
    std::array::from_fn(|index| words.get(index).copied().unwrap_or(0))
}

/// Calls `function` with the place of its result in x8 and six arguments. The returned word has no meaning.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
unsafe extern "C-unwind" fn call_placed(
    place: usize,
    first: usize,
    second: usize,
    third: usize,
    fourth: usize,
    fifth: usize,
    sixth: usize,
    function: *mut c_void,
) -> usize {
    core::arch::naked_asm!(
        "mov x8, x0",
        "mov x9, x7",
        "mov x0, x1",
        "mov x1, x2",
        "mov x2, x3",
        "mov x3, x4",
        "mov x4, x5",
        "mov x5, x6",
        "br x9",
    )
}

thread_local! {
    /// True while a floating-point CPU tensor is created on this thread.
    static IS_FLOATING_POINT: Cell<bool> = const { Cell::new(false) };
}

/// Sets [`IS_FLOATING_POINT`], and restores it when dropped: also when PyTorch throws an exception.
struct Creation(bool);

impl Creation {
    fn begin(dtype: u64) -> Self {
        // `c10::ScalarType` is a signed byte; the rest of the register is undefined.
        let is_floating_point = host_pages::is_on() && is_floating_point(i32::from(dtype as i8));
        Self(IS_FLOATING_POINT.try_with(|flag| flag.replace(is_floating_point)).unwrap_or(false))
    }
}

impl Drop for Creation {
    fn drop(&mut self) {
        let _ = IS_FLOATING_POINT.try_with(|flag| flag.set(self.0));
    }
}

// The creation of CPU tensors, `TensorBase at::detail::empty_cpu(IntArrayRef, ScalarType, bool,
// optional<MemoryFormat>)` and `empty_strided_cpu(IntArrayRef, IntArrayRef, ScalarType, bool)`: a list is an
// address and a length, and the first argument is the place of the result.
replace!(
    TORCH_CPU,
    "_ZN2at6detail9empty_cpuEN3c108ArrayRefIlEENS1_10ScalarTypeEbSt8optionalINS1_12MemoryFormatEE",
    placed fn empty_cpu(result: usize, sizes: usize, count: usize, dtype: u64, pinned: u64, format: u64) -> usize,
    |real| {
        let _creation = Creation::begin(dtype);
        // SAFETY: the caller's arguments, as in every call of `real` below.
        unsafe { real(result, sizes, count, dtype, pinned, format) }
    }
);
replace!(
    TORCH_CPU,
    "_ZN2at6detail17empty_strided_cpuEN3c108ArrayRefIlEES3_NS1_10ScalarTypeEb",
    placed fn empty_strided_cpu(
        result: usize, sizes: usize, count: usize, strides: usize, stride_count: usize, dtype: u64, pinned: u64
    ) -> usize,
    |real| {
        let _creation = Creation::begin(dtype);
        // SAFETY: as above.
        unsafe { real(result, sizes, count, strides, stride_count, dtype, pinned) }
    }
);

// The CPU allocator: `void* c10::alloc_cpu(size_t)` and `void c10::free_cpu(void*)`.
replace!(C10, "_ZN3c109alloc_cpuEm", fn alloc_cpu(size: usize) -> usize, |real| {
    let has_no_values = size >= LEAST
        && host_pages::is_on()
        && IS_FLOATING_POINT.try_with(Cell::get).unwrap_or(false);
    match has_no_values.then(|| host_pages::alloc(size)).flatten() {
        Some(address) => address,
        // SAFETY: as above.
        None => unsafe { real(size) },
    }
});
replace!(C10, "_ZN3c108free_cpuEPv", fn free_cpu(address: usize), |real| {
    if host_pages::contains(address) {
        return host_pages::free(address);
    }
    // SAFETY: as above.
    unsafe { real(address) }
});

/// The PyTorch functions that describe a tensor.
struct Tensors {
    data: unsafe extern "C" fn(TensorPlace, *mut usize) -> c_int,
    sizes: unsafe extern "C" fn(TensorPlace, *mut *const i64) -> c_int,
    dimensions: unsafe extern "C" fn(TensorPlace, *mut i64) -> c_int,
    device: unsafe extern "C" fn(TensorPlace, *mut i32) -> c_int,
    /// `void* at::TensorIteratorBase::data_ptr(int64_t) const`.
    iterator_data: unsafe extern "C-unwind" fn(usize, i64) -> usize,
}

fn tensors() -> Option<&'static Tensors> {
    static TENSORS: OnceLock<Option<Tensors>> = OnceLock::new();
    let look_up = || {
        let cpu = library(TORCH_CPU)?;
        // SAFETY: the types are the ones in PyTorch's headers.
        unsafe {
            Some(Tensors {
                data: symbol(cpu, c"aoti_torch_get_data_ptr")?,
                sizes: symbol(cpu, c"aoti_torch_get_sizes")?,
                dimensions: symbol(cpu, c"aoti_torch_get_dim")?,
                device: symbol(cpu, c"aoti_torch_get_device_type")?,
                iterator_data: symbol(cpu, c"_ZNK2at18TensorIteratorBase8data_ptrEl")?,
            })
        }
    };
    TENSORS.get_or_init(look_up).as_ref()
}

/// Returns true if the values of a tensor that is about to be written are not kept.
///
/// # Safety
/// `tensor` has the address of a live tensor with a storage.
unsafe fn has_no_values(tensor: TensorPlace) -> bool {
    let mut data = 0;
    host_pages::is_on()
        // SAFETY: by the contract.
        && tensors().is_some_and(|torch| unsafe { (torch.data)(tensor, &raw mut data) } == 0)
        && host_pages::contains(data)
}

/// Returns true if all outputs of an elementwise loop are in ranges without values ([`host_pages`]). A loop
/// with several outputs may write indices in addition to values, as in a sort, so every output is checked.
///
/// # Safety
/// `iterator` is a live `TensorIteratorBase`.
unsafe fn writes_no_values(iterator: usize) -> bool {
    let Some(torch) = host_pages::is_on().then(tensors).flatten() else { return false };
    // SAFETY: by the contract; every iterator has an operand.
    let data = |operand| unsafe { (torch.iterator_data)(iterator, operand) };
    // SAFETY: by the contract.
    let outputs = unsafe { outputs(iterator, &data) };
    host_pages::contains(data(0))
        && outputs.is_some_and(|outputs| (1..outputs).all(|n| host_pages::contains(data(n))))
}

/// The size of an `at::OperandInfo` in bytes, or 0 until it is known.
static OPERAND_SIZE: AtomicUsize = AtomicUsize::new(0);

/// Returns the number of outputs of an iterator, which no function of PyTorch returns, or `None` if it is not
/// known.
///
/// The operands are a `c10::SmallVector<OperandInfo, 4>`: the address of the first, their number and the
/// capacity, then space for four. The number of outputs, an `int`, follows.
///
/// # Safety
/// `iterator` is a live `TensorIteratorBase`, and `data` returns the addresses of its operands' elements.
unsafe fn outputs(iterator: usize, data: &dyn Fn(i64) -> usize) -> Option<i64> {
    const WORD: usize = size_of::<usize>();
    /// The number of words at the start of the iterator in which the vector is searched. All of them are
    /// readable, because the space for four operands has more words.
    const WORDS_BEFORE: usize = 48;
    /// The number of words after the vector's header in which the addresses of the first two operands are
    /// searched.
    const WORDS: usize = 64;
    // SAFETY: reads in the iterator, by the contract.
    let word = |at: usize| unsafe { (at as *const usize).read() };
    // SAFETY: as above.
    let half = |at: usize| unsafe { (at as *const u32).read() };
    // A vector of more than four operands is stored on the heap and does not have this form, so it is not
    // found.
    let vector = (1..WORDS_BEFORE)
        .map(|index| iterator + index * WORD)
        .find(|&at| word(at) == at + 2 * WORD && half(at + WORD + 4) == 4)?;
    let (first, count) = (vector + 2 * WORD, half(vector + WORD));
    if count == 1 {
        return Some(1);
    }
    let mut size = OPERAND_SIZE.load(Ordering::Relaxed);
    if size == 0 {
        let wanted = [data(0), data(1)];
        if wanted[0] == wanted[1] || wanted.contains(&0) {
            return None;
        }
        let place = |wanted| (0..WORDS).find(|index| word(first + index * WORD) == wanted);
        size = place(wanted[1])?.checked_sub(place(wanted[0])?)? * WORD;
        OPERAND_SIZE.store(size, Ordering::Relaxed);
    }
    let outputs = i64::from(half(first + 4 * size));
    (1..=i64::from(count)).contains(&outputs).then_some(outputs)
}

// The loops of elementwise CPU kernels: `void at::TensorIteratorBase::for_each(loop2d_t, int64_t)` and
// `serial_for_each(loop2d_t, Range) const`. A loop and a range are two words each.
replace!(
    TORCH_CPU,
    "_ZN2at18TensorIteratorBase8for_eachEN3c1012function_refIFvPPcPKlllEEEl",
    fn for_each(iterator: usize, function: usize, context: usize, grain: i64),
    |real| {
        // SAFETY: as above.
        unsafe {
            if !writes_no_values(iterator) {
                real(iterator, function, context, grain);
            }
        }
    }
);
replace!(
    TORCH_CPU,
    "_ZNK2at18TensorIteratorBase15serial_for_eachEN3c1012function_refIFvPPcPKlllEEENS_5RangeE",
    fn serial_for_each(iterator: usize, function: usize, context: usize, start: i64, end: i64),
    |real| {
        // SAFETY: as above.
        unsafe {
            if !writes_no_values(iterator) {
                real(iterator, function, context, start, end);
            }
        }
    }
);

// `Tensor& at::native::normal_(Tensor&, double, double, optional<Generator>)`, which has a loop of its own.
replace!(
    TORCH_CPU,
    "_ZN2at6native7normal_ERNS_6TensorEddSt8optionalINS_9GeneratorEE",
    fn normal(tensor: usize, mean: f64, deviation: f64, generator: usize) -> usize,
    |real| {
        // A negative deviation is an error that PyTorch reports.
        // SAFETY: as above.
        if deviation >= 0.0 && unsafe { has_no_values(tensor as TensorPlace) } {
            return tensor;
        }
        // SAFETY: as above.
        unsafe { real(tensor, mean, deviation, generator) }
    }
);

// `Tensor& at::native::copy_(Tensor&, const Tensor&, bool)`, which has loops of its own for conversions and
// transposed tensors.
replace!(
    TORCH_CPU,
    "_ZN2at6native5copy_ERNS_6TensorERKS1_b",
    fn copy(tensor: usize, source: usize, non_blocking: u64) -> usize,
    |real| {
        // SAFETY: as above.
        unsafe {
            let (to, from) = (tensor as TensorPlace, source as TensorPlace);
            if has_no_values(to) && is_host(from) && sizes(from).is_some_and(|from| sizes(to) == Some(from)) {
                return tensor;
            }
            real(tensor, source, non_blocking)
        }
    }
);

/// Returns true if a tensor is on the host.
///
/// # Safety
/// `tensor` has the address of a live tensor.
unsafe fn is_host(tensor: TensorPlace) -> bool {
    /// `c10::DeviceType::CPU`.
    const CPU: i32 = 0;
    let mut device = -1;
    // SAFETY: by the contract.
    tensors().is_some_and(|torch| unsafe { (torch.device)(tensor, &raw mut device) } == 0) && device == CPU
}

/// Returns the sizes of a tensor. PyTorch broadcasts or refuses a copy between different ones.
///
/// # Safety
/// `tensor` has the address of a live tensor.
unsafe fn sizes(tensor: TensorPlace) -> Option<Vec<i64>> {
    let torch = tensors()?;
    let (mut first, mut count) = (std::ptr::null(), 0);
    // SAFETY: by the contract; the sizes live as long as the tensor is not changed.
    unsafe {
        let failed = (torch.sizes)(tensor, &raw mut first) | (torch.dimensions)(tensor, &raw mut count);
        let count = usize::try_from(count).ok().filter(|_| failed == 0)?;
        Some(if count == 0 { Vec::new() } else { std::slice::from_raw_parts(first, count).to_vec() })
    }
}
