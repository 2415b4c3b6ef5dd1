//! Module calls: the path of each module, and the beginning and end of its forward.
//!
//! A global hook of torch would put every module call on torch's slow path, which costs more than all the
//! work here. So calls of `Module._call_impl`, the one function that every module call goes through, are
//! intercepted in C ([`vectorcall`]). torch calls this function with `*args, **kwargs`.

use std::ffi::CStr;
use std::ptr::null_mut;
use std::sync::{Mutex, PoisonError};

use memtrace_record::intern::TextId;
use memtrace_record::recorder::text_id;
use rustc_hash::FxHashMap;

use crate::attribution::{backward_passes, detail, module_ranges};
use crate::ffi::cpython::{Arguments, RawObject};
use crate::guard::shielded;
use crate::python::vectorcall::{self, Around, TracerFunction, positional, usual};
use crate::runtime::thread;

/// The path and the class of each module object, by the object's address. Only a thread that holds the GIL
/// takes the lock.
static PATHS: Mutex<Option<FxHashMap<usize, (TextId, TextId)>>> = Mutex::new(None);

fn with_paths<R>(work: impl FnOnce(&mut FxHashMap<usize, (TextId, TextId)>) -> R) -> R {
    work(PATHS.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

/// `assign_path(module, path, class)`: sets the path and the class of a module.
pub(crate) fn assign_path(arguments: Arguments<'_>) {
    let (path, class) = (text_id(arguments.text(1)), text_id(arguments.text(2)));
    with_paths(|paths| paths.insert(arguments.id(0), (path, class)));
}

/// `forget_module(id)`: removes the path of a module that has been garbage-collected.
pub(crate) fn forget_module(arguments: Arguments<'_>) {
    let module = arguments.size(0);
    with_paths(|paths| paths.remove(&module));
}

/// `enter_module(module) -> int`: records that a call of the module begins. Returns an [`Entered`].
pub(crate) fn enter_module(arguments: Arguments<'_>) -> i64 {
    enter(arguments.id(0)) as i64
}

/// `leave_module(module)`: records that the call of the module ends.
pub(crate) fn leave_module(arguments: Arguments<'_>) {
    module_ranges::leave(arguments.id(0));
}

/// The position of a module call among the thread's open calls.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Entered {
    /// Inside another module's call, or on an autograd thread, which calls modules only to recompute a
    /// forward.
    Inside = 0,
    /// The outermost call of its thread.
    Outermost = 1,
    /// The module has no path; nothing was recorded.
    Unknown = 2,
}

impl Entered {
    /// The name of this value in the tracer.
    pub(crate) fn name(self) -> &'static CStr {
        match self {
            Entered::Inside => c"ENTERED_INSIDE",
            Entered::Outermost => c"ENTERED_OUTERMOST",
            Entered::Unknown => c"NOT_ENTERED",
        }
    }
}

fn enter(module: usize) -> Entered {
    let Some((path, class)) = with_paths(|paths| paths.get(&module).copied()) else {
        return Entered::Unknown;
    };
    if module_ranges::enter(path, class, module) > 0 || thread::runs_backward() {
        return Entered::Inside;
    }
    backward_passes::gradients_are_due();
    Entered::Outermost
}

/// Enters a module if the tracer has nothing to do for its call. Otherwise does nothing and returns false.
fn enter_without_tracer(module: usize) -> bool {
    !AROUND.after.is_set()
        && (module_ranges::depth() > 0 || thread::runs_backward())
        && enter(module) != Entered::Unknown
}

/// Returns true if a module call outside the detailed steps needs no further work. The outermost call of a
/// thread needs more: it sets the phase, and the tracer counts it. It may also switch detail on after an OOM
/// (`detail::forward_begins`).
fn continues_unseen() -> bool {
    let is_outermost = module_ranges::depth() == 0 && !thread::runs_backward();
    if is_outermost {
        detail::forward_begins();
    }
    !is_outermost
}

/// The tracer's functions that run before and after a module call. The first gets the arguments of the call;
/// the second gets the module and the result of the call.
static AROUND: Around = Around { before: TracerFunction::new(), after: TracerFunction::new() };

/// The tracer's function that runs after the outermost call of the awaited module
/// ([`ThreadState::awaited_module`](thread::ThreadState::awaited_module)).
static AFTER_OUTERMOST: TracerFunction = TracerFunction::new();

/// `call_after(module, function)`: calls `function(module)` after the outermost call of the module that is in
/// progress on this thread. Every call of `call_after` must pass the same function.
pub(crate) fn call_after(arguments: Arguments<'_>) {
    if !AFTER_OUTERMOST.is_set() {
        AFTER_OUTERMOST.set(arguments.get(1));
    }
    let module = arguments.id(0);
    thread::with(|state| state.awaited_module.set(module));
}

/// The function that replaces the field `vectorcall` of `Module._call_impl`.
///
/// # Safety
/// Python calls it as a `vectorcallfunc`, after [`hook_vectorcall`] has set [`AROUND`].
unsafe extern "C-unwind" fn call_module(
    function: RawObject,
    args: *const RawObject,
    count: usize,
    names: RawObject,
) -> RawObject {
    // SAFETY: the function is hooked.
    let usual = unsafe { usual() };
    if positional(count) == 0 {
        // SAFETY: these are the caller's own arguments. The call raises Python's usual error for a method
        // that is called without its object.
        return unsafe { usual(function, args, count, names) };
    }
    // SAFETY: the first argument exists, and the caller keeps it alive during the call.
    let module = unsafe { *args };
    if !detail::is_on() && shielded(continues_unseen) == Some(true) {
        // SAFETY: these are the caller's own arguments.
        return unsafe { usual(function, args, count, names) };
    }
    let mut is_open = shielded(|| enter_without_tracer(module as usize)) == Some(true);
    let mut result = null_mut();
    let mut goes_on = true;
    if !is_open {
        let depth = shielded(module_ranges::depth);
        // SAFETY: these are the caller's own arguments.
        goes_on = unsafe { AROUND.before.call(args, count, names) };
        is_open = shielded(module_ranges::depth) > depth;
    }
    let is_unseen = goes_on && !is_open && !detail::is_on();
    if is_unseen {
        shielded(module_ranges::enter_unseen);
    }
    if goes_on {
        // SAFETY: as above.
        result = unsafe { usual(function, args, count, names) };
    }
    if is_unseen {
        shielded(module_ranges::leave_unseen);
    }
    if is_open {
        if AROUND.after.is_set() {
            let arguments = [module, result];
            // SAFETY: the array has two arguments, and both are alive if the result is not null. The GIL is
            // held, and the result is a new reference that no other code has.
            result = unsafe { AROUND.after.call_after(result, arguments.as_ptr(), arguments.len()) };
        }
        shielded(|| module_ranges::leave(module as usize));
        let awaited = shielded(|| thread::with(|state| state.awaited_module.get())).flatten();
        let is_awaited = awaited == Some(module as usize);
        if is_awaited && !result.is_null() && shielded(module_ranges::depth) == Some(0) {
            shielded(|| thread::with(|state| state.awaited_module.set(0)));
            // SAFETY: the single argument is kept alive by the caller. The result is as above.
            result = unsafe { AFTER_OUTERMOST.call_after(result, args, 1) };
        }
    }
    result
}

/// `hook_vectorcall(function, object_size, before, after, set_eval_frame) -> bool`: redirects calls of
/// `function`, whose object has `object_size` bytes, to [`call_module`]. `after` and `set_eval_frame` are
/// `None` if there is no such function. Returns false and changes nothing if this is not possible.
pub(crate) fn hook_vectorcall(arguments: Arguments<'_>) -> bool {
    let object = |index| arguments.get(index);
    let (Some(function), Some(before)) = (object(0), object(2)) else { return false };
    AROUND.before.set(Some(before));
    AROUND.after.set(object(3));
    vectorcall::keep_set_eval_frame(object(4));
    let functions = arguments.gil.functions();
    // SAFETY: the tracer passes functions written in Python, and the size of their objects.
    unsafe { vectorcall::hook(functions, function, arguments.size(1), before, call_module) }
}
