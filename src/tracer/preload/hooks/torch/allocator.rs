//! The caching allocator's reports: every block that it hands out or takes back, and every OOM.
//!
//! torch makes a report on the thread that allocates or frees. The CUDA allocator always reports, under its
//! mutex. The CPU allocator reports only while [`memory_profiling_enabled`] returns true. `c10::Device` is
//! two bytes in one register, with garbage in the upper bits.

use std::ffi::{CStr, c_char, c_void};
use std::sync::OnceLock;

use memtrace_record::Recorder;
use memtrace_record::intern::TextId;
use memtrace_record::recorder::text_id;
use memtrace_trace::event::{self, AllocCall, Block, Call};
use memtrace_trace::{Api, Event, Header, Payload};

use crate::attribution::{
    block_ages, context, deferred_frees, detail, growth, pinned_sizes, private_pools, requested_sizes,
    tensor_forms,
};
use crate::ffi::cuda::current_device;
use crate::ffi::phantom;
use crate::ffi::symbols::RealFn;
use crate::ffi::torch::{self, current_stream};
use crate::guard::shielded;
use crate::hooks::torch::op_callbacks;
use crate::python::{callbacks, injection};
use crate::runtime::session;
use crate::runtime::thread::{self, ThreadState};

type Report = unsafe extern "C-unwind" fn(*mut c_void, i64, usize, usize, u64);
type OutOfMemory = unsafe extern "C-unwind" fn(i64, usize, usize, u64);

// SAFETY: the signature is c10::reportMemoryUsageToProfiler's in c10/core/Allocator.h, 2.1 to 2.15.
static REPORT: RealFn<Report> =
    unsafe { RealFn::new(c"_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE", "libc10.so") };

// SAFETY: the signature is c10::reportOutOfMemoryToProfiler's in c10/core/Allocator.h, 2.1 to 2.15.
static OUT_OF_MEMORY: RealFn<OutOfMemory> =
    unsafe { RealFn::new(c"_ZN3c1027reportOutOfMemoryToProfilerElmmNS_6DeviceE", "libc10.so") };

type CheckFail = unsafe extern "C-unwind" fn(*const c_char, *const c_char, u32, *const c_char);

// SAFETY: the signature is c10::detail::torchCheckFail's in c10/util/Exception.h, 2.1 to 2.15. The function
// does not return.
static CHECK_FAIL: RealFn<CheckFail> =
    unsafe { RealFn::new(c"_ZN3c106detail14torchCheckFailEPKcS2_jS2_", "libc10.so") };

/// The start of the error message when a call of NVML fails in torch's allocator.
const NVML_FAILED: &[u8] = b"NVML_SUCCESS == r ";

/// Looks up the functions that reports need. Called at torch's first call to CUDA.
pub(super) fn install() {
    requested_sizes::install();
    pinned_sizes::install();
    // The look-ups must not happen in the first report; see `prepare_reports`.
    let _ = (REPORT.get(), OUT_OF_MEMORY.get(), CHECK_FAIL.get(), OUT_OF_MEMORY_ERROR.get());
    torch::prepare_reports();
}

/// The type of `void changeCurrentAllocator(const std::shared_ptr<CUDAAllocator> &)`: the argument is passed
/// by its address.
type Change = unsafe extern "C-unwind" fn(*const c_void);

// SAFETY: the signature is the one in torch/csrc/cuda/CUDAPluggableAllocator.h, 2.6 to 2.15.
static CHANGE_ALLOCATOR: RealFn<Change> = unsafe {
    RealFn::new(
        c"_ZN5torch4cuda22CUDAPluggableAllocator22changeCurrentAllocatorERKSt10shared_ptrIN3c104cuda20CUDACachingAllocator13CUDAAllocatorEE",
        "libtorch_cuda.so",
    )
};

/// The hook of the function that replaces torch's allocator. Hooks the new allocator, too.
#[unsafe(export_name = "_ZN5torch4cuda22CUDAPluggableAllocator22changeCurrentAllocatorERKSt10shared_ptrIN3c104cuda20CUDACachingAllocator13CUDAAllocatorEE")]
unsafe extern "C-unwind" fn change_current_allocator(allocator: *const c_void) {
    if let Some(real) = CHANGE_ALLOCATOR.get() {
        // SAFETY: the caller's argument is passed on unchanged.
        unsafe { real(allocator) };
        shielded(requested_sizes::install);
    }
}

// SAFETY: the signature is c10::memoryProfilingEnabled's in c10/core/Allocator.h, 2.1 to 2.15.
static PROFILING_ENABLED: RealFn<unsafe extern "C-unwind" fn() -> bool> =
    unsafe { RealFn::new(c"_ZN3c1022memoryProfilingEnabledEv", "libc10.so") };

/// torch's CPU allocator reports only if this function returns true. The CUDA allocator does not call it.
#[unsafe(export_name = "_ZN3c1022memoryProfilingEnabledEv")]
unsafe extern "C-unwind" fn memory_profiling_enabled() -> bool {
    // SAFETY: the function takes no arguments and reads thread-local state.
    wants_host_tensors() || PROFILING_ENABLED.get().is_some_and(|real| unsafe { real() })
}

fn wants_host_tensors() -> bool {
    session::session().is_some_and(|session| session.settings.host_tensors)
}

/// Records a report about a CPU tensor. A negative `size` means that the tensor's memory was freed.
fn host_tensor(addr: u64, size: i64) {
    static LIBRARY: OnceLock<TextId> = OnceLock::new();
    let Some(recorder) = session::recorder() else { return };
    if injection::is_wanted() {
        op_callbacks::install_callbacks();
    }
    let owner = thread::with(|state| context::of_cpu_tensor(state, size));
    let (context, step) = owner.unwrap_or_else(context::current);
    let library = *LIBRARY.get_or_init(|| text_id("libc10.so"));
    let call = Call {
        address: addr,
        bytes: size.abs(),
        status: 0,
        latency_ns: 0,
        library,
        user: 0,
        pool: 0,
        from_torch_allocator: false,
        unreported: false,
    };
    recorder.record(|clock_ns| {
        let header = Header { clock_ns, api: Some(Api::CpuAllocator), device: Event::CPU, context, step };
        if size >= 0 {
            Payload::HostAlloc(AllocCall { call, requested: call.bytes, handle: 0 }).pack(header)
        } else {
            Payload::HostFree(call).pack(header)
        }
    });
}

/// Returns true if the device's first byte, its `c10::DeviceType`, is the CPU.
fn is_cpu(device: u64) -> bool {
    device.to_le_bytes()[0] == 0
}

/// Returns the CUDA ordinal of a `c10::Device`, or `None` for another type of device.
fn cuda_ordinal(device: u64) -> Option<i8> {
    const CUDA: u8 = 1;
    let [kind, index, ..] = device.to_le_bytes();
    (kind == CUDA).then_some(index as i8)
}

#[unsafe(export_name = "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE")]
unsafe extern "C-unwind" fn report_memory_usage(
    ptr: *mut c_void,
    size: i64,
    allocated: usize,
    reserved: usize,
    device: u64,
) {
    if let Some(ordinal) = cuda_ordinal(device) {
        shielded(|| {
            let Some(recorder) = session::recorder() else { return };
            let stream = current_stream(ordinal);
            let (mut requested, mut pool, mut deferred, mut form) = (-1, 0, false, 0);
            let owner = thread::with(|state| {
                if size >= 0 {
                    requested = requested_sizes::of_block(state, size);
                    pool = private_pools::take(state, ordinal, stream);
                    form = tensor_forms::of_block(state);
                    state.last_block.set(ptr as usize);
                }
                context::of_report(state, stream, size, ordinal)
            });
            // A thread that is ending has lost its state, so `owner` is `None`.
            let (context, step) = owner.unwrap_or_else(context::current);
            if size >= 0 {
                detail::allocated(ordinal, allocated as u64);
                block_ages::allocated(ptr as u64, size as u64, step);
                deferred_frees::forget_recorded();
            } else {
                deferred = deferred_frees::is_deferred(ptr as u64, ordinal);
                block_ages::freed(ptr as u64);
            }
            growth::allocated(ordinal, allocated as u64);
            if injection::is_wanted() {
                injection::schedule();
            }
            // The event is built in its final location, because copying it from the stack would take longer
            // than reading the clock.
            recorder.record(|clock_ns| {
                let address = ptr as u64;
                Payload::Block(Block {
                    address,
                    bytes: size,
                    allocated,
                    reserved,
                    requested,
                    pool,
                    deferred,
                    form,
                })
                .pack(Header {
                    clock_ns,
                    api: Some(Api::CachingAllocator),
                    device: ordinal,
                    context,
                    step,
                })
            });
        });
    } else if is_cpu(device) {
        // The tracer makes tensors to learn torch's layout. Their reports end here, so that a profiler of the
        // program does not see them.
        if thread::with(|state| state.is_learning.get()) == Some(true) {
            return;
        }
        if wants_host_tensors() {
            shielded(|| host_tensor(ptr as u64, size));
        }
    }
    if let Some(real) = REPORT.get() {
        // SAFETY: the caller's arguments are passed on unchanged.
        unsafe { real(ptr, size, allocated, reserved, device) }
    }
}

/// Requests the tags and the detail that follow an OOM, records the OOM, and wakes the writer to write it at
/// once.
pub(in crate::hooks) fn record_out_of_memory(recorder: &'static Recorder, oom: Payload, header: Header) {
    callbacks::out_of_memory(recorder);
    detail::out_of_memory();
    recorder.record(|clock_ns| oom.pack(Header { clock_ns, ..header }));
    recorder.nudge();
}

fn note_out_of_memory(ordinal: i8, size: i64, allocated: usize, reserved: usize) {
    let Some(recorder) = session::recorder() else { return };
    let stream = current_stream(ordinal);
    let (context, step) = context::current_on(stream);
    let api = if phantom::take_fault() { Api::InjectedFault } else { Api::CachingAllocator };
    let of_request = |state: &ThreadState| {
        let pool = private_pools::take(state, ordinal, stream);
        (requested_sizes::of_block(state, size), pool, tensor_forms::of_block(state))
    };
    let (requested, pool, form) = thread::with(of_request).unwrap_or((-1, 0, 0));
    let oom = Payload::OutOfMemory { bytes: size, requested, allocated, reserved, pool, form };
    record_out_of_memory(
        recorder,
        oom,
        Header { clock_ns: 0, api: Some(api), device: ordinal, context, step },
    );
}

#[unsafe(export_name = "_ZN3c1027reportOutOfMemoryToProfilerElmmNS_6DeviceE")]
unsafe extern "C-unwind" fn report_out_of_memory(size: i64, allocated: usize, reserved: usize, device: u64) {
    if let Some(ordinal) = cuda_ordinal(device) {
        shielded(|| {
            note_out_of_memory(ordinal, size, allocated, reserved);
            // `out_of_memory_error` must not record it again.
            requested_sizes::forget();
        });
    }
    if let Some(real) = OUT_OF_MEMORY.get() {
        // SAFETY: the caller's arguments are passed on unchanged.
        unsafe { real(size, allocated, reserved, device) }
    }
}

/// Records an OOM that torch's allocator does not report, if an allocation is in progress.
fn note_unreported_out_of_memory() {
    let (Some(session), requested @ 0..) = (session::session(), requested_sizes::in_progress()) else {
        return;
    };
    let size = session.rounding.round(requested.cast_unsigned()).cast_signed();
    let (allocated, reserved) = (event::UNREPORTED_TOTAL, event::UNREPORTED_TOTAL);
    note_out_of_memory(current_device(), size, allocated, reserved);
    requested_sizes::forget();
}

/// `c10::SourceLocation`, which is passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
struct SourceLocation {
    function: *const c_char,
    file: *const c_char,
    line: u32,
}

/// The constructor of `c10::OutOfMemoryError`. Its third argument is a `std::string`, passed by its address.
type OutOfMemoryError = unsafe extern "C-unwind" fn(*mut c_void, SourceLocation, *mut c_void);

// SAFETY: the type is the constructor's in c10/util/Exception.h, 2.15. Older versions have no such function.
static OUT_OF_MEMORY_ERROR: RealFn<OutOfMemoryError> = unsafe {
    RealFn::new(
        c"_ZN3c1016OutOfMemoryErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
        "libc10.so",
    )
};

/// The hook of the constructor of torch's error. With `throw_on_cudamalloc_oom`, torch refuses an allocation
/// before it asks the driver, and does not report the OOM. This hook then records it.
#[unsafe(export_name = "_ZN3c1016OutOfMemoryErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE")]
unsafe extern "C-unwind" fn out_of_memory_error(
    this: *mut c_void,
    location: SourceLocation,
    message: *mut c_void,
) {
    shielded(note_unreported_out_of_memory);
    match OUT_OF_MEMORY_ERROR.get() {
        // SAFETY: the caller's arguments are passed on unchanged.
        Some(real) => unsafe { real(this, location, message) },
        // The caller would throw an object that was never made.
        None => std::process::abort(),
    }
}

/// The hook of the function that torch calls when a check fails. Before torch's allocator reports an OOM, it
/// asks NVML for the processes on the device. If NVML fails, as on a Jetson Orin, a check fails and torch
/// never reports the OOM (pytorch#185240). This hook then records the OOM.
#[unsafe(export_name = "_ZN3c106detail14torchCheckFailEPKcS2_jS2_")]
unsafe extern "C-unwind" fn torch_check_fail(
    function: *const c_char,
    file: *const c_char,
    line: u32,
    message: *const c_char,
) {
    // SAFETY: by the function's contract, the message is null or a C string.
    let is_nvmls =
        !message.is_null() && unsafe { CStr::from_ptr(message) }.to_bytes().starts_with(NVML_FAILED);
    if is_nvmls {
        shielded(note_unreported_out_of_memory);
    }
    match CHECK_FAIL.get() {
        // SAFETY: the caller's arguments are passed on unchanged.
        Some(real) => unsafe { real(function, file, line, message) },
        // The caller expects that this function does not return.
        None => std::process::abort(),
    }
}
