//! Intercepts functions of the sharding libraries (FSDP1, FSDP2, DeepSpeed). Only inside them are some tensors
//! known, such as the gradients of whole parameters: FSDP takes them from the parameters first and frees them
//! as soon as they are copied. After the call, the rank's own parts have their gradients.

use std::ptr::null_mut;

use crate::ffi::cpython::{Arguments, RawObject, Vectorcall};
use crate::python::vectorcall::{self, Around, TracerFunction, positional, usual};

/// The maximum number of arguments that the tracer's functions get.
const GIVEN: usize = 2;

/// The tracer's functions that run before and after a call, for each function that is hooked. They get the
/// first arguments of the call.
static AROUND: [Around; CALLS.len()] =
    [const { Around { before: TracerFunction::new(), after: TracerFunction::new() } }; CALLS.len()];

/// The functions that replace the field `vectorcall` of the hooked functions.
const CALLS: [Vectorcall; 4] = [call::<0>, call::<1>, call::<2>, call::<3>];

/// The function that replaces the field `vectorcall` of a hooked function.
///
/// # Safety
/// Python calls it as a `vectorcallfunc`, after [`hook_sharding`] has set the functions at `INDEX`.
unsafe extern "C-unwind" fn call<const INDEX: usize>(
    function: RawObject,
    args: *const RawObject,
    count: usize,
    names: RawObject,
) -> RawObject {
    let Around { before, after } = &AROUND[INDEX];
    // SAFETY: the function is hooked.
    let usual = unsafe { usual() };
    let given = positional(count).min(GIVEN);
    // SAFETY: the first arguments exist, and the caller keeps them alive during the call. This holds for the
    // use below, too.
    if given > 0 && before.is_set() && !unsafe { before.call(args, given, null_mut()) } {
        return null_mut();
    }
    // SAFETY: these are the caller's own arguments.
    let result = unsafe { usual(function, args, count, names) };
    if given == 0 || !after.is_set() {
        return result;
    }
    // SAFETY: as above. The GIL is held, and the result is a new reference that no other code has.
    unsafe { after.call_after(result, args, given) }
}

/// `hook_sharding(function, object_size, index, before, after) -> bool`: calls `before` and `after` with the
/// first two arguments of each call of `function`, before and after the call. Returns false, and leaves `function`
/// unchanged, if this is not possible or if `index` is used already. An index cannot be used again after a failed call.
pub(crate) fn hook_sharding(arguments: Arguments<'_>) -> bool {
    let index = arguments.size(2);
    let (Some(function), Some(around), Some(call)) = (arguments.get(0), AROUND.get(index), CALLS.get(index))
    else {
        return false;
    };
    let around_functions = [arguments.get(3), arguments.get(4)];
    let Some(plain) = around_functions.iter().flatten().find(|function| !function.is_none()) else {
        return false;
    };
    if around.before.is_set() || around.after.is_set() {
        return false;
    }
    around.before.set(around_functions[0]);
    around.after.set(around_functions[1]);
    let functions = arguments.gil.functions();
    // SAFETY: the tracer passes functions written in Python, and the size of their objects.
    unsafe { vectorcall::hook(functions, function, arguments.size(1), *plain, *call) }
}
