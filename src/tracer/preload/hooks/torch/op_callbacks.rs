//! torch's op callbacks (`at::RecordFunction`), installed from here without Python.
//!
//! There is one callback for each scope, so that a callback need not query its scope. The callbacks are
//! global, so they also run on threads that were started before the installation. They see the same ops as
//! `torch.profiler`.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::{allocator, callback_state};
use crate::attribution::op_stack::{self, Ending};
use crate::attribution::{acted_reads, autograd_seq, detail};
use crate::ffi::cuda_types::NOT_INITIALIZED;
use crate::ffi::symbols::{Home, RealFn, Symbol};
use crate::guard::shielded;
use crate::python::{injection, op_io};
use crate::runtime::session;
use crate::runtime::thread::running_ops::{NameOf, Scope};

/// A start callback: `std::unique_ptr<ObserverContext> (*)(const RecordFunction&)`. The caller passes the
/// place of the result: on x86-64 as the first argument, on aarch64 in x8; see [`entry`].
type Start = unsafe extern "C" fn(*mut *mut c_void, *const c_void) -> *mut *mut c_void;
type End = unsafe extern "C" fn(*const c_void, *mut c_void);

/// `at::RecordFunctionCallback`, which is passed by value.
#[repr(C)]
struct Callback {
    start: Start,
    end: End,
    probability: f64,
    /// For each `at::RecordScope`, 1 if the callback is for this scope.
    scopes: [u8; 10],
    needs_inputs: u8,
    needs_outputs: u8,
    needs_ids: u8,
}

const _: () = assert!(size_of::<Callback>() == 40);

const TORCH: Home = Home::Loaded("libtorch_cpu.so");
// SAFETY: this is the type of at::addGlobalCallback in ATen/record_function.h, 2.1 to 2.15.
static ADD: Symbol<unsafe extern "C" fn(Callback) -> u64> =
    unsafe { Symbol::new(c"_ZN2at17addGlobalCallbackENS_22RecordFunctionCallbackE", TORCH) };
// SAFETY: this is the type of at::RecordFunction::name, as above.
static NAME: Symbol<NameOf> = unsafe { Symbol::new(c"_ZNK2at14RecordFunction4nameEv", TORCH) };
/// The type of `disableCallback` and `reenableCallback`: the argument is the handle of a callback.
type OfHandle = unsafe extern "C" fn(u64);
// SAFETY: this is the type of at::disableCallback, as above.
static DISABLE: Symbol<OfHandle> = unsafe { Symbol::new(c"_ZN2at15disableCallbackEm", TORCH) };
// SAFETY: this is the type of at::reenableCallback, as above.
static ENABLE: Symbol<OfHandle> = unsafe { Symbol::new(c"_ZN2at16reenableCallbackEm", TORCH) };
/// The handles of the two callbacks that [`switch`] enables and disables: for ops and for backward functions.
static HANDLES: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
static INSTALLED: AtomicBool = AtomicBool::new(false);

// SAFETY: the signature is the one in cuda_runtime_api.h.
static GET_DEVICE_COUNT: RealFn<unsafe extern "C" fn(*mut c_int) -> c_int> =
    unsafe { RealFn::new(c"cudaGetDeviceCount", "libcudart.so") };

/// The function that torch calls for a start callback whose body gets the place of the result as its first
/// argument.
macro_rules! entry {
    ($body:ident) => {{
        #[cfg(target_arch = "aarch64")]
        #[unsafe(naked)]
        unsafe extern "C" fn entry(_: *mut *mut c_void, _: *const c_void) -> *mut *mut c_void {
            core::arch::naked_asm!("mov x1, x0", "mov x0, x8", "b {body}", body = sym $body)
        }
        #[cfg(target_arch = "x86_64")]
        use $body as entry;
        entry as Start
    }};
}

/// The hook of torch's first call to CUDA. At this point, torch's libraries are loaded and its mutexes are
/// free, so our callbacks are installed here.
#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGetDeviceCount(count: *mut c_int) -> c_int {
    shielded(install);
    // SAFETY: the caller's argument is passed on unchanged.
    GET_DEVICE_COUNT.get().map_or(NOT_INITIALIZED, |real| unsafe { real(count) })
}

fn install() {
    if session::session().is_some() {
        allocator::install();
        install_callbacks();
    }
}

/// Installs the callbacks and schedules the start of the tracer, unless that was done already. A program that
/// uses no GPU makes no call to CUDA, so its first CPU tensor calls this function, if these are recorded.
pub(super) fn install_callbacks() {
    let Some(session) = session::session() else { return };
    injection::schedule();
    if !session.settings.ops.callbacks() || INSTALLED.load(Ordering::Acquire) {
        return;
    }
    let (Some(add), Some(_)) = (ADD.get(), NAME.get()) else { return };
    if INSTALLED.swap(true, Ordering::AcqRel) {
        return;
    }
    autograd_seq::install();
    callback_state::install();
    op_stack::set_rows(session.settings.ops.callbacks(), session.settings.ops.all());
    let scopes: [(usize, Start); 3] = if op_io::is_wanted() {
        [(0, entry!(start_function_io)), (1, entry!(start_backward_io)), (7, entry!(start_user))]
    } else {
        [(0, entry!(start_function)), (1, entry!(start_backward)), (7, entry!(start_user))]
    };
    let needs_inputs = u8::from(op_io::is_wanted());
    for (index, (scope, start)) in scopes.into_iter().enumerate() {
        let mut scopes = [0; 10];
        scopes[scope] = 1;
        let callback = Callback {
            start,
            end: if op_io::is_wanted() { end_io } else { end },
            probability: 1.0,
            scopes,
            needs_inputs,
            needs_outputs: 0,
            needs_ids: 0,
        };
        // SAFETY: the callback's functions live as long as the process.
        let handle = unsafe { add(callback) };
        if let Some(place) = HANDLES.get(index) {
            place.store(handle, Ordering::Relaxed);
        }
    }
    if DISABLE.get().is_some() && ENABLE.get().is_some() {
        detail::set_switch(switch);
    }
}

/// Enables or disables the callbacks of ops and of backward functions. While they are disabled, torch runs
/// ops and backward functions without looking for callbacks. The callback of user scopes stays enabled,
/// because user scopes are rare and show when a step ends.
fn switch(on: bool) {
    if let Some(function) = if on { ENABLE.cached() } else { DISABLE.cached() } {
        for handle in &HANDLES {
            // SAFETY: the handles are of callbacks that are never removed.
            unsafe { function(handle.load(Ordering::Relaxed)) };
        }
    }
}

/// Records that an op begins. torch expects the state of the callback at `context`. Our callbacks have no
/// state, so this writes null.
///
/// # Safety
/// The arguments are torch's own, of a start callback.
unsafe fn start(scope: Scope, context: *mut *mut c_void, record: *const c_void) -> *mut *mut c_void {
    // SAFETY: `context` is torch's place for a unique_ptr, which is null if empty.
    unsafe { *context = null_mut() };
    if let Some(name_of) = NAME.cached() {
        // SAFETY: torch's record is alive until the end callback, which calls `leave`.
        shielded(|| unsafe { op_stack::enter(scope, record, name_of) });
    }
    context
}

unsafe extern "C" fn start_function(context: *mut *mut c_void, record: *const c_void) -> *mut *mut c_void {
    // SAFETY: these are torch's own arguments.
    unsafe { start(Scope::Function, context, record) }
}

unsafe extern "C" fn start_backward(context: *mut *mut c_void, record: *const c_void) -> *mut *mut c_void {
    // SAFETY: these are torch's own arguments.
    unsafe { start(Scope::Backward, context, record) }
}

unsafe extern "C" fn start_user(context: *mut *mut c_void, record: *const c_void) -> *mut *mut c_void {
    // SAFETY: these are torch's own arguments.
    unsafe { start(Scope::User, context, record) }
}

/// Same as [`start`]; records the op's inputs too.
///
/// # Safety
/// Same as for [`start`].
unsafe fn start_io(scope: Scope, context: *mut *mut c_void, record: *const c_void) -> *mut *mut c_void {
    // SAFETY: these are torch's own arguments.
    let context = unsafe { start(scope, context, record) };
    if let Some(name_of) = NAME.cached() {
        // SAFETY: torch's record is alive, and its start callbacks run.
        shielded(|| unsafe { op_io::enter(scope, record, name_of) });
    }
    context
}

unsafe extern "C" fn start_function_io(context: *mut *mut c_void, record: *const c_void) -> *mut *mut c_void {
    // SAFETY: these are torch's own arguments.
    unsafe { start_io(Scope::Function, context, record) }
}

unsafe extern "C" fn start_backward_io(context: *mut *mut c_void, record: *const c_void) -> *mut *mut c_void {
    // SAFETY: these are torch's own arguments.
    unsafe { start_io(Scope::Backward, context, record) }
}

unsafe extern "C" fn end(record: *const c_void, _context: *mut c_void) {
    shielded(|| {
        acted_reads::op_ended();
        op_stack::leave(record, Ending::default());
    });
}

unsafe extern "C" fn end_io(record: *const c_void, _context: *mut c_void) {
    shielded(|| {
        acted_reads::op_ended();
        // SAFETY: torch's record is alive during its end callback.
        op_stack::leave(record, unsafe { op_io::leave(record) });
    });
}
