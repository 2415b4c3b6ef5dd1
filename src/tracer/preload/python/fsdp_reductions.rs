//! Intercepts the functions in which FSDP reduces gradients. Only there are the gradients of whole parameters
//! known: FSDP takes them from the parameters first and frees them as soon as they are copied. After the call,
//! the rank's own parts have their gradients.

use std::ptr::null_mut;

use crate::ffi::cpython::{Arguments, RawObject};
use crate::python::vectorcall::{self, Around, TracerFunction, positional, usual};

/// The maximum number of arguments that the tracer's functions get.
const GIVEN: usize = 2;

/// The tracer's functions that run before and after a reduction. They get the first arguments of the reduction.
static AROUND: Around = Around { before: TracerFunction::new(), after: TracerFunction::new() };

/// The function that replaces the field `vectorcall` of a reduction.
///
/// # Safety
/// Python calls it as a `vectorcallfunc`, after [`hook_reduction`] has set [`AROUND`].
unsafe extern "C-unwind" fn call_reduction(
    function: RawObject,
    args: *const RawObject,
    count: usize,
    names: RawObject,
) -> RawObject {
    // SAFETY: the function is hooked.
    let usual = unsafe { usual() };
    let given = positional(count).min(GIVEN);
    if given == 0 {
        // SAFETY: these are the caller's own arguments.
        return unsafe { usual(function, args, count, names) };
    }
    // SAFETY: the first arguments exist, and the caller keeps them alive during the call. This holds for the
    // uses below, too.
    if !unsafe { AROUND.before.call(args, given, null_mut()) } {
        return null_mut();
    }
    // SAFETY: these are the caller's own arguments.
    let result = unsafe { usual(function, args, count, names) };
    // SAFETY: as above. The GIL is held, and the result is a new reference that no other code has.
    unsafe { AROUND.after.call_after(result, args, given) }
}

/// `hook_reduction(function, object_size, before, after) -> bool`: calls `before` and `after` with the first two
/// arguments of each call of `function`, before and after the call. Every call of `hook_reduction` must pass the
/// same two. Returns false and changes nothing if this is not possible.
pub(crate) fn hook_reduction(arguments: Arguments<'_>) -> bool {
    let (Some(function), Some(before)) = (arguments.get(0), arguments.get(2)) else { return false };
    if !AROUND.before.is_set() {
        AROUND.before.set(Some(before));
        AROUND.after.set(arguments.get(3));
    }
    let functions = arguments.gil.functions();
    // SAFETY: the tracer passes functions written in Python, and the size of their objects.
    unsafe { vectorcall::hook(functions, function, arguments.size(1), before, call_reduction) }
}
