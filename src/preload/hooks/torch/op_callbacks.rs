//! torch's op callbacks (`at::RecordFunction`), installed from here without Python.
//!
//! One callback for each scope, so that none has to ask which it is. They are global, so threads that
//! exist already have them too, and they see what `torch.profiler` sees.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use crate::attribution::autograd_seq;
use crate::attribution::op_stack::{self, Ending, NameOf, Scope};
use crate::ffi::symbols::{RealFn, find_in_loaded};
use crate::python::injection;
use crate::python::op_io;
use crate::runtime::guard::shielded;
use crate::runtime::session;

const TORCH: &str = "libtorch_cpu.so";
const ADD: &CStr = c"_ZN2at17addGlobalCallbackENS_22RecordFunctionCallbackE";
const NAME: &CStr = c"_ZNK2at14RecordFunction4nameEv";

type Start = unsafe extern "C" fn(*mut *mut c_void, *const c_void) -> *mut *mut c_void;
type End = unsafe extern "C" fn(*const c_void, *mut c_void);

/// `at::RecordFunctionCallback`, which is passed by value.
#[repr(C)]
struct Callback {
    start: Start,
    end: End,
    probability: f64,
    /// By `at::RecordScope`.
    scopes: [u8; 10],
    needs_inputs: u8,
    needs_outputs: u8,
    needs_ids: u8,
}

const _: () = assert!(size_of::<Callback>() == 40);

static NAME_OF: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
static INSTALLED: AtomicBool = AtomicBool::new(false);

// SAFETY: the signature is the one in cuda_runtime_api.h.
static GET_DEVICE_COUNT: RealFn<unsafe extern "C" fn(*mut c_int) -> c_int> =
    unsafe { RealFn::new(c"cudaGetDeviceCount", "libcudart.so") };

/// The first call that torch makes to CUDA, with its libraries loaded and its mutexes free: the moment
/// to put our callbacks in.
#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGetDeviceCount(count: *mut c_int) -> c_int {
    shielded(install);
    // SAFETY: the caller's own argument, passed on unchanged.
    GET_DEVICE_COUNT.get().map_or(crate::hooks::cuda::NO_RUNTIME, |real| unsafe { real(count) })
}

/// Are our callbacks among torch's?
#[inline]
pub(super) fn are_installed() -> bool {
    INSTALLED.load(Ordering::Relaxed)
}

fn install() {
    let Some(session) = session::session() else { return };
    super::allocator::install();
    injection::schedule();
    if !session.settings.ops.callbacks() || INSTALLED.load(Ordering::Acquire) {
        return;
    }
    let (add, name) = (find_in_loaded(TORCH, ADD), find_in_loaded(TORCH, NAME));
    if add.is_null() || name.is_null() || INSTALLED.swap(true, Ordering::AcqRel) {
        return;
    }
    NAME_OF.store(name, Ordering::Release);
    autograd_seq::install();
    super::callback_state::install();
    op_stack::set_rows(session.settings.ops.rows(), session.settings.ops.all());
    // SAFETY: the type of at::addGlobalCallback in ATen/record_function.h, 2.1 to 2.15.
    let add: unsafe extern "C" fn(Callback) -> u64 = unsafe { std::mem::transmute(add) };
    let scopes: [(usize, Start); 3] = if op_io::is_wanted() {
        [(0, start_function_io), (1, start_backward_io), (7, start_user)]
    } else {
        [(0, start_function), (1, start_backward), (7, start_user)]
    };
    let needs_inputs = u8::from(op_io::is_wanted());
    for (scope, start) in scopes {
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
        // SAFETY: as above; the functions live as long as the process.
        unsafe { add(callback) };
    }
}

/// An op begins; `context` is where torch wants our state of it, of which there is none.
unsafe fn start(scope: Scope, context: *mut *mut c_void, record: *const c_void) -> *mut *mut c_void {
    // SAFETY: torch's place for a unique_ptr, which is null when empty.
    unsafe { *context = null_mut() };
    let name_of = NAME_OF.load(Ordering::Relaxed);
    // SAFETY: stored before the first callback was installed; the type is at::RecordFunction::name's.
    let name_of = unsafe { std::mem::transmute::<*mut c_void, NameOf>(name_of) };
    shielded(|| op_stack::enter(scope, record, name_of));
    context
}

unsafe extern "C" fn start_function(context: *mut *mut c_void, record: *const c_void) -> *mut *mut c_void {
    // SAFETY: torch's own arguments.
    unsafe { start(Scope::Function, context, record) }
}

unsafe extern "C" fn start_backward(context: *mut *mut c_void, record: *const c_void) -> *mut *mut c_void {
    // SAFETY: torch's own arguments.
    unsafe { start(Scope::Backward, context, record) }
}

unsafe extern "C" fn start_user(context: *mut *mut c_void, record: *const c_void) -> *mut *mut c_void {
    // SAFETY: torch's own arguments.
    unsafe { start(Scope::User, context, record) }
}

/// As `start`, and tells what the op is given.
unsafe fn start_io(scope: Scope, context: *mut *mut c_void, record: *const c_void) -> *mut *mut c_void {
    // SAFETY: torch's own arguments.
    let context = unsafe { start(scope, context, record) };
    let name_of = NAME_OF.load(Ordering::Relaxed);
    // SAFETY: as in `start`.
    let name_of = unsafe { std::mem::transmute::<*mut c_void, NameOf>(name_of) };
    shielded(|| op_io::enter(scope, record, name_of));
    context
}

unsafe extern "C" fn start_function_io(context: *mut *mut c_void, record: *const c_void) -> *mut *mut c_void {
    // SAFETY: torch's own arguments.
    unsafe { start_io(Scope::Function, context, record) }
}

unsafe extern "C" fn start_backward_io(context: *mut *mut c_void, record: *const c_void) -> *mut *mut c_void {
    // SAFETY: torch's own arguments.
    unsafe { start_io(Scope::Backward, context, record) }
}

unsafe extern "C" fn end(record: *const c_void, _context: *mut c_void) {
    shielded(|| op_stack::leave(record, Ending::default()));
}

unsafe extern "C" fn end_io(record: *const c_void, _context: *mut c_void) {
    shielded(|| op_stack::leave(record, op_io::leave(record)));
}
