//! Calls of the tracer's Python code, hidden from the tools of the program. Every call that C makes into the
//! tracer goes through here.
//!
//! A profiler, a debugger or a coverage tool of the program must see the same events with the tracer and
//! without it. Tools of Python are suspended ([`Gil::suspend_tracing`]), and torch does not report the
//! tracer's ops to torch's profiler.

use std::ptr::null_mut;

use crate::attribution::autograd_seq;
use crate::ffi::cpython::{Arguments, Gil, Method, Owned, RawObject};
use crate::ffi::{torch, torch_callbacks};
use crate::python::errors;
use crate::runtime::thread;

/// The state of the thread before a hidden call. It has no destructor: when Python ends, it may unwind a
/// daemon thread from the call, and a destructor must not use the interpreter then.
#[derive(Clone, Copy)]
struct Before {
    is_collector_suspended: bool,
    are_ops_observed: Option<bool>,
    is_own_python: bool,
}

/// Runs `work`, which calls Python code of the tracer. Meanwhile, the thread's Python tools and torch's op
/// callbacks are suspended, and so is the garbage collector.
pub(crate) fn hidden<R>(gil: Gil, work: impl FnOnce() -> R) -> R {
    gil.suspend_tracing();
    let is_own_python = set_own_python(true);
    let before = Before {
        is_collector_suspended: !is_own_python && gil.suspend_collector(),
        are_ops_observed: torch::observe_ops(false),
        is_own_python,
    };
    let result = work();
    set_own_python(before.is_own_python);
    if let Some(are_observed) = before.are_ops_observed {
        torch::observe_ops(are_observed);
    }
    if before.is_collector_suspended {
        gil.resume_collector();
    }
    gil.resume_tracing();
    result
}

/// Makes a hidden call. An `Exception` that it raises is counted as a failure of the tracer and dropped.
/// Returns false if the call raised an exception that belongs to the program, such as a KeyboardInterrupt
/// that arrived meanwhile. Such an exception stays raised.
pub(crate) fn call(gil: Gil, place: &str, function: impl FnOnce() -> Option<Owned>) -> bool {
    hidden(gil, || {
        if function().is_some() {
            return true;
        }
        let is_exception = gil.is_exception_raised();
        if is_exception {
            errors::take(gil, place);
        }
        is_exception
    })
}

/// Marks the thread's Python as the tracer's, and returns the previous mark.
fn set_own_python(is_own: bool) -> bool {
    thread::with(|state| state.is_own_python.replace(is_own)).unwrap_or(false)
}

/// `hide(function)`: returns a function that makes a hidden call of `function` with the same argument. It is
/// for calls that Python makes from C, such as the callback of a weak reference.
pub(crate) fn hide(arguments: Arguments<'_>) -> Option<Owned> {
    static METHOD: Method = Method::new(c"memtrace", call_hidden);
    arguments.gil.new_bound_function(&METHOD, arguments.get(0)?)
}

/// # Safety
/// Python calls this with the GIL held; `function` is the object that [`hide`] bound.
unsafe extern "C-unwind" fn call_hidden(
    function: RawObject,
    arguments: *const RawObject,
    count: isize,
) -> RawObject {
    // SAFETY: by the contract.
    let Some(gil) = (unsafe { Gil::held() }) else { return null_mut() };
    // SAFETY: the function holds the object that is bound to it.
    let Some(function) = (unsafe { gil.borrowed(function) }) else { return null_mut() };
    // SAFETY: the caller keeps its arguments during the call.
    let argument = if count > 0 { unsafe { gil.borrowed(*arguments) } } else { None };
    let goes_on = call(gil, "callback", || match argument {
        Some(argument) => function.call_with(argument),
        None => function.call(),
    });
    if goes_on { gil.none().to_owned().into_raw() } else { null_mut() }
}

/// `with_observed_ops(function)`: calls a function whose ops our own callbacks see, so that the library
/// learns from these ops. A profiler of the program does not see the ops, and their nodes use up no sequence
/// numbers of autograd.
pub(crate) fn with_observed_ops(arguments: Arguments<'_>) -> Option<Owned> {
    let function = arguments.get(0)?;
    torch_callbacks::without_callbacks_of_thread(|| {
        let before = torch::observe_ops(true);
        thread::with(|state| state.is_learning.set(true));
        let result = autograd_seq::keeping_number(|| function.call());
        thread::with(|state| state.is_learning.set(false));
        if let Some(before) = before {
            torch::observe_ops(before);
        }
        result
    })
}
