//! The functions of the tracer that the library calls: after a backward, after an OOM, when the program
//! registers objects, and to search for the objects that hold memory.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use memtrace_record::Recorder;

use crate::attribution::{autograd_seq, backward_passes, growth};
use crate::ffi::cpython::{Functions, Gil, Object, Owned, PendingCall, RawObject};
use crate::guard::shielded;
use crate::python::{hidden, own_threads};
use crate::runtime::thread;

/// A function of the tracer, kept for as long as the process lives. The pointer is null until the tracer is
/// installed.
struct Callback {
    function: AtomicPtr<c_void>,
    /// The name of the function, for the log.
    name: &'static str,
}

static AFTER_BACKWARD: Callback = Callback::new("after a backward");
static OUT_OF_MEMORY: Callback = Callback::new("when memory ran out");
static TRACK: Callback = Callback::new("track_external");
static RETAINED: Callback = Callback::new("retained");
static RETAINED_AT_OOM: Callback = Callback::new("the search for holders at an OOM");
static RETAINED_ON_REQUEST: Callback = Callback::new("the search for holders that a command requested");
static RETAINED_GROWTH: Callback = Callback::new("the search for holders of growing memory");

impl Callback {
    const fn new(name: &'static str) -> Callback {
        Callback { function: AtomicPtr::new(null_mut()), name }
    }

    fn set(&self, function: Owned) {
        self.function.store(function.into_raw(), Ordering::Release);
    }

    fn is_set(&self) -> bool {
        !self.function.load(Ordering::Relaxed).is_null()
    }

    /// Calls the function, with the items of the tuple `arguments` if there is one. Returns the status of a
    /// pending call. It is -1 only if the function raised an exception that belongs to the program, such as a
    /// KeyboardInterrupt that arrived meanwhile. Python then raises this exception in the program.
    fn call(&self, gil: Gil, arguments: Option<Object<'_>>) -> c_int {
        // SAFETY: the pointer is null or to a function that is never released.
        let Some(function) = (unsafe { gil.borrowed(self.function.load(Ordering::Acquire)) }) else {
            return 0;
        };
        let goes_on = hidden::call(gil, self.name, || match arguments {
            Some(arguments) => function.call_with_tuple(arguments),
            None => function.call(),
        });
        if goes_on { 0 } else { -1 }
    }
}

/// Stores the functions of the dict that the tracer returned.
pub(crate) fn install(functions: Object<'_>) {
    let callbacks = [
        (c"after_backward", &AFTER_BACKWARD),
        (c"out_of_memory", &OUT_OF_MEMORY),
        (c"track", &TRACK),
        (c"retained", &RETAINED),
        (c"retained_at_oom", &RETAINED_AT_OOM),
        (c"retained_growth", &RETAINED_GROWTH),
        (c"retained_on_request", &RETAINED_ON_REQUEST),
    ];
    for (name, callback) in callbacks {
        if let Some(function) = functions.item(name) {
            callback.set(function);
        }
    }
    if RETAINED_GROWTH.is_set() {
        // If Python's queue is full, the search is skipped.
        growth::set_searches(
            || {
                call_soon(memory_grows);
            },
            || {
                call_soon(command_asks);
            },
        );
    }
    if AFTER_BACKWARD.is_set() {
        backward_passes::set_schedule(|| call_on_main_thread(after_backward));
    }
}

/// Adds a pending call of one of the functions below, which Python's main thread then runs. Returns false if
/// the process has no Python, or if the queue is full.
fn call_on_main_thread(function: PendingCall) -> bool {
    // SAFETY: the functions below are made for pending calls.
    Functions::get().is_some_and(|functions| unsafe { functions.call_soon(function) })
}

/// Schedules a call of one of the functions below. If the current thread works for Python's main thread, the
/// main thread makes the call. For any other thread, a thread of ours makes the call if possible, because the
/// main thread may be waiting for the caller. Autograd's threads count as working for the main thread, unless
/// the tracer started on another thread and the main thread has run no pending call yet. Returns false if the
/// call cannot be scheduled.
fn call_soon(function: PendingCall) -> bool {
    let is_for_main =
        own_threads::is_main_thread() || thread::is_autograd() && !autograd_seq::is_main_unknown();
    !is_for_main && own_threads::call_on_own_thread(function) || call_on_main_thread(function)
}

/// Schedules a call of the tracer that tags the tensors of all models. The message about an OOM then names
/// even a model that fails while it is loaded. Called before the OOM is recorded, so that the message waits
/// for the tags.
pub(crate) fn out_of_memory(recorder: &Recorder) {
    if OUT_OF_MEMORY.is_set() {
        recorder.tags_follow();
        if !call_soon(after_out_of_memory) {
            recorder.tags_came();
        }
    }
}

unsafe extern "C" fn after_backward(_: *mut c_void) -> c_int {
    // SAFETY: a pending call runs with the GIL.
    let gil = unsafe { Gil::held() };
    gil.and_then(|gil| shielded(|| AFTER_BACKWARD.call(gil, None))).unwrap_or(0)
}

unsafe extern "C" fn after_out_of_memory(_: *mut c_void) -> c_int {
    // SAFETY: a pending call runs with the GIL.
    let gil = unsafe { Gil::held() };
    let result = gil.and_then(|gil| shielded(|| OUT_OF_MEMORY.call(gil, None))).unwrap_or(0);
    shielded(|| {
        if let Some(recorder) = Recorder::active() {
            recorder.tags_came();
        }
    });
    // The search runs after the tags, because the message of the OOM does not wait for the search.
    match gil {
        Some(gil) if result == 0 => shielded(|| RETAINED_AT_OOM.call(gil, None)).unwrap_or(0),
        _ => result,
    }
}

unsafe extern "C" fn command_asks(_: *mut c_void) -> c_int {
    // SAFETY: a pending call runs with the GIL.
    let gil = unsafe { Gil::held() };
    gil.and_then(|gil| shielded(|| RETAINED_ON_REQUEST.call(gil, None))).unwrap_or(0)
}

unsafe extern "C" fn memory_grows(_: *mut c_void) -> c_int {
    // SAFETY: a pending call runs with the GIL.
    let gil = unsafe { Gil::held() };
    gil.and_then(|gil| shielded(|| RETAINED_GROWTH.call(gil, None))).unwrap_or(0)
}

/// `memtrace.track_external` of `python/memtrace/_marks.py`: `arguments` is a tuple whose only item is the
/// tuple of registered objects. Exceptions of the tracer do not reach the program.
///
/// # Safety
/// The calling thread holds the GIL (`ctypes.PyDLL`), and `arguments` is a tuple that lives during the call.
#[unsafe(no_mangle)]
unsafe extern "C" fn memtrace_python_track(arguments: RawObject) {
    // SAFETY: by the contract.
    if let Some(gil) = unsafe { Gil::held() } {
        // SAFETY: by the contract.
        let arguments = unsafe { gil.borrowed(arguments) };
        shielded(|| TRACK.call(gil, arguments));
    }
}

/// `memtrace.retained` of `python/memtrace/_marks.py`: returns a new reference to the list of holders, or to
/// `None` if the search is off. Returns null, with the exception set, if an exception of the program was
/// raised.
///
/// # Safety
/// The calling thread holds the GIL (`ctypes.PyDLL`).
#[unsafe(no_mangle)]
unsafe extern "C" fn memtrace_python_retained() -> RawObject {
    // SAFETY: by the contract.
    let Some(gil) = (unsafe { Gil::held() }) else { return null_mut() };
    let mut answer = None;
    // SAFETY: the pointer is null or to a function that is never released.
    if let Some(function) = unsafe { gil.borrowed(RETAINED.function.load(Ordering::Acquire)) } {
        let goes_on = shielded(|| {
            hidden::call(gil, RETAINED.name, || {
                answer = function.call();
                answer.as_ref().map(|answer| answer.get().to_owned())
            })
        });
        if goes_on == Some(false) {
            return null_mut();
        }
    }
    answer.unwrap_or_else(|| gil.none().to_owned()).into_raw()
}
