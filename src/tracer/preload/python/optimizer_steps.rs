//! Intercepts the steps of optimizers.
//!
//! torch's own step hooks would be visible to the program: a debugger sees torch's loop over the hooks, and a
//! profiler sees each call of a hook. So the function that torch wraps as `step` is intercepted in C
//! ([`vectorcall`]). torch's wrapper calls this function with `*args, **kwargs`.

use std::ptr::null_mut;

use crate::attribution::steps;
use crate::ffi::cpython::{Arguments, RawObject};
use crate::guard::shielded;
use crate::python::vectorcall::{self, Around, TracerFunction, positional, usual};

/// The tracer's functions that run before and after a step. Their argument is the optimizer.
static AROUND: Around = Around { before: TracerFunction::new(), after: TracerFunction::new() };

/// The function that replaces the field `vectorcall` of a step function.
///
/// # Safety
/// Python calls it as a `vectorcallfunc`, after [`hook_step`] has set [`AROUND`].
unsafe extern "C-unwind" fn call_step(
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
    // SAFETY: the first argument exists, and the caller keeps it alive during the call. This holds for the
    // uses below, too.
    if !unsafe { AROUND.before.call(args, 1, null_mut()) } {
        return null_mut();
    }
    // SAFETY: these are the caller's own arguments.
    let result = unsafe { usual(function, args, count, names) };
    if !result.is_null() {
        // SAFETY: as above.
        let optimizer = unsafe { *args } as usize;
        shielded(|| steps::optimizer_stepped(optimizer));
    }
    // SAFETY: as above. The GIL is held, and the result is a new reference that no other code has.
    unsafe { AROUND.after.call_after(result, args, 1) }
}

/// `hook_step(function, object_size, before, after) -> bool`: redirects calls of `function` to [`call_step`].
/// Returns false and changes nothing if this is not possible or `function` is hooked already.
pub(crate) fn hook_step(arguments: Arguments<'_>) -> bool {
    let object = |index| arguments.get(index);
    let (Some(function), Some(before)) = (object(0), object(2)) else { return false };
    if !AROUND.before.is_set() {
        AROUND.before.set(Some(before));
        AROUND.after.set(object(3));
    }
    let functions = arguments.gil.functions();
    // SAFETY: the tracer passes functions written in Python, and the size of their objects.
    unsafe { vectorcall::hook(functions, function, arguments.size(1), before, call_step) }
}
