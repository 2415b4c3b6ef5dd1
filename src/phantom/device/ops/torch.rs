//! The PyTorch functions that this library calls, and the layouts that no function reveals.

use std::ffi::{CStr, c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::ops::cxx::{self, CxxString};

/// A `c10::OperatorHandle`, or space for an `optional` of one, whose last word is true if it has a value.
pub(super) type Operator = [usize; 4];

/// The result of `findSchema`. The caller passes the place of a result of this size.
#[repr(C)]
struct FoundOperator(Operator);

/// The address of a word with the address of a `TensorImpl`, such as an `AtenTensorHandle`, an `at::Tensor`
/// or the payload of an `IValue`.
pub(super) type TensorPlace = *const c_void;

type Get<T> = unsafe extern "C" fn(TensorPlace, *mut T) -> c_int;
type CreateFromBlob = unsafe extern "C" fn(
    *mut c_void,
    i64,
    *const i64,
    *const i64,
    i64,
    c_int,
    c_int,
    c_int,
    *mut *mut usize,
) -> c_int;

/// The PyTorch functions, and the layouts.
pub(super) struct Torch {
    pub(super) add_callback: unsafe extern "C" fn(Callback) -> u64,
    find_schema: unsafe extern "C-unwind" fn(*const c_void, *const c_void) -> FoundOperator,
    dispatcher: unsafe extern "C-unwind" fn() -> *const c_void,
    pub(super) run_on_cpu: unsafe extern "C-unwind" fn(*const Operator, *mut [usize; 3], bool, u16),
    pub(super) create_from_blob: CreateFromBlob,
    /// Deletes an `at::Tensor` on the heap.
    pub(super) delete: unsafe extern "C" fn(*mut usize) -> c_int,
    pub(super) dimensions: Get<i64>,
    pub(super) sizes: Get<*const i64>,
    pub(super) strides: Get<*const i64>,
    pub(super) dtype: Get<i32>,
    pub(super) data: Get<usize>,
    pub(super) enable_callbacks: unsafe extern "C" fn(bool),
    pub(super) callbacks_enabled: unsafe extern "C" fn() -> bool,
    pub(super) set_warnings: unsafe extern "C" fn(*const c_void),
    pub(super) warnings: unsafe extern "C" fn() -> *const c_void,
    pub(super) set_gradients: unsafe extern "C" fn(bool),
    pub(super) gradients: unsafe extern "C" fn() -> bool,
    pub(super) threads: unsafe extern "C" fn() -> c_int,
    /// Sets the number of threads for the calling thread only.
    pub(super) set_threads: Option<unsafe extern "C" fn(c_int)>,
    pub(super) new: unsafe extern "C" fn(usize) -> *mut c_void,
    pub(super) free: unsafe extern "C" fn(*mut c_void),
    pub(super) begin_catch: unsafe extern "C" fn(*mut c_void) -> *mut c_void,
    pub(super) end_catch: unsafe extern "C" fn(),
    /// The address of the static object of undefined tensors, such as the index of `:` in `x[:, i]`.
    pub(super) undefined: usize,
    /// The handle of libc10, for its thread-local variables.
    c10: usize,
    /// True if strings have the layout of the new ABI.
    pub(super) has_new_strings: bool,
    /// `c10::DispatchKey::CPU`.
    pub(super) cpu_key: u16,
    /// The offset of `TensorImpl::key_set_`.
    pub(super) keys: usize,
    /// The offset of `TensorImpl::storage_`, and the offset of the address of its memory in a `StorageImpl`.
    storage: [usize; 2],
    /// The dispatch keys of a plain host tensor, including the key of the backend.
    pub(super) host_keys: u64,
    /// The dispatch keys of a plain GPU tensor, including the key of the backend.
    pub(super) device_keys: u64,
}

/// `at::RecordFunctionCallback`, which is passed by value.
#[repr(C)]
pub(super) struct Callback {
    pub(super) start: usize,
    pub(super) end: unsafe extern "C" fn(*const c_void, *mut c_void),
    pub(super) probability: f64,
    /// Flags, indexed by `at::RecordScope`.
    pub(super) scopes: [u8; 10],
    pub(super) needs_inputs: u8,
    pub(super) needs_outputs: u8,
    pub(super) needs_ids: u8,
}

const _: () = assert!(size_of::<Callback>() == 40);

/// The bits of `c10::BackendComponent::CPUBit` and `CUDABit` in a set of dispatch keys.
pub(super) const CPU_BIT: u64 = 1;
pub(super) const CUDA_BIT: u64 = 2;

static TORCH: OnceLock<Option<Torch>> = OnceLock::new();

/// Returns the functions if PyTorch is loaded and has all of them.
pub(super) fn get() -> Option<&'static Torch> {
    TORCH.get().and_then(Option::as_ref)
}

/// Looks up the functions once PyTorch is loaded. Returns true the first time that all of them are found.
pub(super) fn load() -> bool {
    if TORCH.get().is_some() {
        return false;
    }
    let (Some(cpu), Some(c10)) = (library(c"libtorch_cpu.so"), library(c"libc10.so")) else { return false };
    let mut is_first = false;
    // `look_up` also calls some of the functions, to determine the dispatch keys and the layout of a tensor.
    let found = TORCH.get_or_init(|| {
        is_first = true;
        // SAFETY: the handles belong to these two libraries, and the function types in [`Torch`] come from PyTorch's
        // headers.
        unsafe { look_up(cpu, c10) }
    });
    is_first && found.is_some()
}

/// Returns the handle of a library, or `None` if it is not loaded.
pub(super) fn library(name: &CStr) -> Option<usize> {
    // SAFETY: a lookup without side effects.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    (!handle.is_null()).then_some(handle as usize)
}

/// Looks up a function in a library, or in the libraries that it needs.
///
/// # Safety
/// `F` is the type of the function.
pub(super) unsafe fn symbol<F: Copy>(library: usize, name: &CStr) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<usize>()) }
    // SAFETY: a lookup without side effects.
    let found = unsafe { libc::dlsym(library as *mut c_void, name.as_ptr()) };
    // SAFETY: the caller's promise.
    (!found.is_null()).then(|| unsafe { std::mem::transmute_copy(&found) })
}

/// # Safety
/// The libraries are `libtorch_cpu.so` and `libc10.so`.
unsafe fn look_up(cpu: usize, c10: usize) -> Option<Torch> {
    // SAFETY: by the contract of this function.
    unsafe {
        let new_parse = symbol::<Parse>(
            c10,
            c"_ZN3c1016parseDispatchKeyERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
        );
        let old_parse = symbol::<Parse>(c10, c"_ZN3c1016parseDispatchKeyERKSs");
        let has_new_strings = new_parse.is_some();
        let mut torch = Torch {
            add_callback: symbol(cpu, c"_ZN2at17addGlobalCallbackENS_22RecordFunctionCallbackE")?,
            find_schema: symbol(cpu, c"_ZN3c1010Dispatcher10findSchemaERKNS_12OperatorNameE")?,
            dispatcher: symbol(cpu, c"_ZN3c1010Dispatcher13realSingletonEv")?,
            run_on_cpu: symbol(
                cpu,
                c"_ZN2at6native12cpu_fallbackERKN3c1014OperatorHandleEPSt6vectorINS1_6IValueESaIS6_EEbNS1_11DispatchKeyE",
            )?,
            create_from_blob: symbol(cpu, c"aoti_torch_create_tensor_from_blob")?,
            delete: symbol(cpu, c"aoti_torch_delete_tensor_object")?,
            dimensions: symbol(cpu, c"aoti_torch_get_dim")?,
            sizes: symbol(cpu, c"aoti_torch_get_sizes")?,
            strides: symbol(cpu, c"aoti_torch_get_strides")?,
            dtype: symbol(cpu, c"aoti_torch_get_dtype")?,
            data: symbol(cpu, c"aoti_torch_get_data_ptr")?,
            enable_callbacks: symbol(cpu, c"_ZN2at20enableRecordFunctionEb")?,
            callbacks_enabled: symbol(cpu, c"_ZN2at23isRecordFunctionEnabledEv")?,
            set_warnings: symbol(c10, c"_ZN3c1012WarningUtils19set_warning_handlerEPNS_14WarningHandlerE")?,
            warnings: symbol(c10, c"_ZN3c1012WarningUtils19get_warning_handlerEv")?,
            set_gradients: symbol(c10, c"_ZN3c108GradMode11set_enabledEb")?,
            gradients: symbol(c10, c"_ZN3c108GradMode10is_enabledEv")?,
            threads: symbol(cpu, c"_ZN2at15get_num_threadsEv")?,
            set_threads: symbol(cpu, c"omp_set_num_threads"),
            new: symbol(cpu, c"_Znwm")?,
            free: symbol(cpu, c"_ZdlPv")?,
            begin_catch: symbol(cpu, c"__cxa_begin_catch")?,
            end_catch: symbol(cpu, c"__cxa_end_catch")?,
            undefined: symbol::<usize>(c10, c"_ZN3c1019UndefinedTensorImpl10_singletonE").unwrap_or(0),
            c10,
            has_new_strings,
            cpu_key: 0,
            keys: 0,
            storage: [0; 2],
            host_keys: 0,
            device_keys: 0,
        };
        let parse = new_parse.or(old_parse)?;
        let key = |name: &[u8]| {
            let name = CxxString::new(name, has_new_strings);
            parse(name.words(has_new_strings).as_ptr().cast())
        };
        torch.cpu_key = key(b"CPU");
        (torch.keys, torch.host_keys, torch.storage) = torch.find_layout()?;
        // The functionality bits are in the order of their keys, and the lowest set bit is `Dense`.
        let dense = (torch.host_keys & !CPU_BIT).trailing_zeros();
        let bit = |name: &[u8]| 1u64 << (dense + u32::from(key(name)) - u32::from(key(b"Dense")));
        let without = torch.host_keys & !(CPU_BIT | bit(b"AutocastCPU"));
        torch.device_keys = without | CUDA_BIT | bit(b"AutocastCUDA");
        Some(torch)
    }
}

type Parse = unsafe extern "C-unwind" fn(*const c_void) -> u16;

impl Torch {
    /// Finds the set of dispatch keys in a `TensorImpl`, its offset and its value, and the offsets of
    /// [`Torch::storage`]. In a plain CPU tensor, the word of the keys has only the CPU's bit among its
    /// lowest bits (the backends), and some functionality bits above them.
    fn find_layout(&self) -> Option<(usize, u64, [usize; 2])> {
        let (sizes, strides, mut data) = ([2i64, 3], [3i64, 1], [0f32; 6]);
        let mut place: *mut usize = std::ptr::null_mut();
        // SAFETY: the memory outlives the tensor, whose address is readable; a `TensorImpl` has more than 200
        // bytes. Among its first words, only addresses are multiples of eight above 64 KiB: of its vtable
        // and of objects on the heap.
        unsafe {
            let (data, at) = (data.as_mut_ptr().cast(), &raw mut place);
            if (self.create_from_blob)(data, 2, sizes.as_ptr(), strides.as_ptr(), 0, 6, 0, -1, at) != 0 {
                return None;
            }
            let tensor = *place;
            let word = |address: usize| (address as *const usize).read();
            let objects = (0..64).step_by(8).map(|offset| (offset, word(tensor + offset)));
            let storage = objects
                .filter(|&(_, object)| object > 0xFFFF && object.is_multiple_of(8))
                .flat_map(|(offset, object)| (0..48).step_by(8).map(move |inner| [offset, inner, object]))
                .find(|&[_, inner, object]| word(object + inner) == data as usize);
            let mut found = (64..200).step_by(8).filter_map(|offset| {
                let word = ((tensor + offset) as *const u64).read();
                (word & 0x7FFF == CPU_BIT && (2..6).contains(&(word >> 15).count_ones()))
                    .then_some((offset, word))
            });
            let keys = found.next().filter(|_| found.next().is_none());
            (self.delete)(place);
            let ((keys, value), [storage, inner, _]) = keys.zip(storage)?;
            Some((keys, value, [storage, inner]))
        }
    }

    /// Returns the type of the device of the tensor's storage, a `c10::DeviceType`. A fake tensor may have the
    /// dispatch keys of a plain one, but its storage is on the device `meta`.
    ///
    /// # Safety
    /// `tensor` is the address of a live plain `TensorImpl`.
    pub(super) unsafe fn storage_device(&self, tensor: usize) -> Option<i8> {
        let [storage, memory] = self.storage;
        // SAFETY: the offsets were determined from such an object. In a `c10::DataPtr`, the address of the
        // memory is followed by its context, its deleter and its device.
        unsafe {
            let storage = ((tensor + storage) as *const usize).read();
            (storage != 0).then(|| ((storage + memory + 3 * size_of::<usize>()) as *const i8).read())
        }
    }

    /// Returns the size of a `std::string` in bytes.
    pub(super) fn string_size(&self) -> usize {
        if self.has_new_strings { 32 } else { 8 }
    }

    /// Returns the operator with this name and overload.
    pub(super) fn find(&self, name: &[u8], overload: &[u8]) -> Option<Operator> {
        let (name, overload) =
            (CxxString::new(name, self.has_new_strings), CxxString::new(overload, self.has_new_strings));
        let both: Vec<usize> =
            [name.words(self.has_new_strings), overload.words(self.has_new_strings)].concat();
        // SAFETY: an `OperatorName` is two strings, which the call only reads. The result is an `optional` of
        // a handle of two words.
        let FoundOperator(operator) =
            cxx::catching(|| unsafe { (self.find_schema)((self.dispatcher)(), both.as_ptr().cast()) })?;
        (operator[2] & 0xFF == 1).then_some(operator)
    }

    /// Returns the included and the excluded dispatch keys of the calling thread.
    pub(super) fn thread_keys(&self) -> Option<*mut [u64; 2]> {
        // SAFETY: a thread-local variable of type `c10::impl::PODLocalDispatchKeySet`.
        unsafe { symbol(self.c10, c"_ZN3c104impl26raw_local_dispatch_key_setE") }
    }
}

/// Newer versions have the tag `UInt` after `Int`. This offset (0 or 1) is added to all later tags. It is
/// `u32::MAX` until it is known.
static SHIFT: AtomicU32 = AtomicU32::new(u32::MAX);

/// Tags of `IValue`, in the order of `TORCH_FORALL_TAGS`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tag {
    None,
    Tensor,
    /// A number, a flag, or another value that is stored in the payload.
    Number,
    /// An object on the heap that is only read: a complex number or a text.
    Object,
    List,
    Device,
    /// Any other type, which no op of interest uses.
    Other,
}

impl Tag {
    /// Derives the tags of this version of PyTorch from the tag of a list: 13 in older versions, 14 in
    /// versions that have a tag for unsigned integers. Ignores any other tag.
    pub(super) fn learn(list: u32) {
        if let 13 | 14 = list {
            SHIFT.store(list - 13, Ordering::Relaxed);
        }
    }

    /// Returns true if the tags are known.
    pub(super) fn are_known() -> bool {
        SHIFT.load(Ordering::Relaxed) != u32::MAX
    }

    /// Returns the tag of a flag.
    pub(super) fn flag() -> u32 {
        9 + SHIFT.load(Ordering::Relaxed)
    }

    pub(super) fn from_code(tag: u32) -> Self {
        let shift = SHIFT.load(Ordering::Relaxed);
        match tag {
            0 => Self::None,
            1 => Self::Tensor,
            3 | 5 => Self::Number,
            4 => Self::Object,
            _ => match tag.wrapping_sub(shift) {
                9 => Self::Number,
                11 => Self::Object,
                13 => Self::List,
                17 => Self::Device,
                _ => Self::Other,
            },
        }
    }
}
