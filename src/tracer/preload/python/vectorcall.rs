//! Intercepts calls of the program's Python functions, without Python code.
//!
//! CPython calls a function through the field `vectorcall` of its object (PEP 590). A hook sets the field of
//! one function; Python code sees the function unchanged, and no profiler sees a call that was not there
//! before.
//!
//! The interpreter runs some calls of Python functions without the field. Python 3.12 and later do this only
//! when the field has the usual value (`CALL` and `CALL_FUNCTION_EX` in ceval.c), so a changed field is
//! always used. `PyFunction_SetVectorcall` sets the field, and invalidates what call sites have cached about
//! the function. 3.9 and 3.10 always use the field. 3.11 skips the field without a check, but only if the
//! arguments are written out; a call with `*args, **kwargs` uses the field.
//!
//! When Python shuts down, a daemon thread that waits for the interpreter is unwound from there, through the
//! functions that are `extern "C-unwind"` here. So these functions keep no value that must be dropped across
//! such a call.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::ffi::cpython::{Functions, Gil, Object, Owned, RawObject, Vectorcall};
use crate::ffi::symbols::find_global;
use crate::python::hidden;

/// The usual value of the field: CPython's function that calls any function written in Python.
static USUAL: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
/// Dynamo's function that sets the callback through which dynamo sees the calling thread's frames, and
/// returns the previous callback. Null if this torch has no such function.
static SET_EVAL_FRAME: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

/// A function of the tracer that a hook calls. Never released.
pub(super) struct TracerFunction(AtomicPtr<c_void>);

impl TracerFunction {
    pub(super) const fn new() -> TracerFunction {
        TracerFunction(AtomicPtr::new(null_mut()))
    }

    /// Stores a function written in Python; `None` stores nothing.
    pub(super) fn set(&self, function: Option<Object<'_>>) {
        keep(&self.0, function);
    }

    pub(super) fn is_set(&self) -> bool {
        !self.0.load(Ordering::Relaxed).is_null()
    }

    /// Calls the function. Returns false if it raised an exception that belongs to the program. If dynamo
    /// watches this thread, dynamo's callback is removed during the call, because dynamo would otherwise
    /// compile the tracer's frames.
    ///
    /// # Safety
    /// The GIL is held, the function is set, and the arguments have the form of a [`Vectorcall`].
    pub(super) unsafe fn call(&self, args: *const RawObject, count: usize, names: RawObject) -> bool {
        // SAFETY: by the contract.
        let Some(gil) = (unsafe { Gil::held() }) else { return true };
        let none = gil.none();
        // The callback is kept as a plain pointer, because the call below may unwind and no value with a
        // destructor may be alive then.
        let watcher = set_eval_frame(gil, none).map_or(null_mut(), Owned::into_raw);
        let function = self.0.load(Ordering::Relaxed);
        let goes_on = hidden::call(gil, "call of a hook", || {
            // SAFETY: the function is written in Python, the arguments are valid by the contract, and the
            // call returns a new reference.
            unsafe { gil.owned(usual()(function, args, count, names)) }
        });
        // SAFETY: `set_eval_frame` returned this reference.
        if let Some(watcher) = unsafe { gil.owned(watcher) }
            && !watcher.get().is(none)
        {
            // Keep an exception of the program raised while dynamo's callback is restored.
            let error = gil.fetch_error();
            drop(set_eval_frame(gil, watcher.get()));
            gil.restore_error(error);
        }
        goes_on
    }

    /// Calls the function after a call of the program that returned `result`. Returns the result, or null if
    /// the program's call has failed or the function raised an exception that belongs to the program.
    ///
    /// # Safety
    /// Same as for [`TracerFunction::call`], with positional arguments. `result` is null or a new reference
    /// that no other code has.
    pub(super) unsafe fn call_after(
        &self,
        result: RawObject,
        args: *const RawObject,
        count: usize,
    ) -> RawObject {
        // SAFETY: by the contract.
        if result.is_null() || unsafe { self.call(args, count, null_mut()) } {
            return result;
        }
        // SAFETY: by the contract.
        unsafe { release(result) };
        null_mut()
    }
}

/// The tracer's functions that run before and after each call of one function of the program.
pub(super) struct Around {
    pub(super) before: TracerFunction,
    pub(super) after: TracerFunction,
}

fn keep(place: &AtomicPtr<c_void>, object: Option<Object<'_>>) {
    if let Some(object) = object.filter(|object| !object.is_none()) {
        place.store(object.to_owned().into_raw(), Ordering::Release);
    }
}

/// Stores dynamo's function in [`SET_EVAL_FRAME`].
pub(super) fn keep_set_eval_frame(function: Option<Object<'_>>) {
    keep(&SET_EVAL_FRAME, function);
}

/// Returns CPython's own function, which a hook calls to run the program's function.
///
/// # Safety
/// [`hook`] has hooked a function.
pub(super) unsafe fn usual() -> Vectorcall {
    // SAFETY: `Field::find` stored this function before a field was set.
    unsafe { std::mem::transmute::<*mut c_void, Vectorcall>(USUAL.load(Ordering::Relaxed)) }
}

/// Returns the number of positional arguments in the `count` of a [`Vectorcall`], whose highest bit is a
/// flag.
pub(super) fn positional(count: usize) -> usize {
    count << 1 >> 1
}

/// Releases a reference.
///
/// # Safety
/// The GIL is held, and `object` is null or a new reference.
unsafe fn release(object: RawObject) {
    // SAFETY: by the contract.
    drop(unsafe { Gil::held().and_then(|gil| gil.owned(object)) });
}

/// Sets dynamo's callback and returns the previous one. Returns `None` if this torch has no such callback or
/// the call failed.
fn set_eval_frame(gil: Gil, callback: Object<'_>) -> Option<Owned> {
    // SAFETY: the pointer is null or to a function that is never released.
    let function = unsafe { gil.borrowed(SET_EVAL_FRAME.load(Ordering::Relaxed)) }?;
    let before = function.call_with(callback);
    if before.is_none() {
        gil.clear_error();
    }
    before
}

/// Redirects calls of `function` to `ours`. Returns false and changes nothing if the field is not found in
/// this interpreter, or if the function's field has already been changed.
///
/// # Safety
/// `function` and `plain` are functions written in Python, whose objects have `size` bytes. Nobody has set
/// the field of `plain`. `ours` calls the original function.
pub(super) unsafe fn hook(
    functions: &Functions,
    function: Object<'_>,
    size: usize,
    plain: Object<'_>,
    ours: Vectorcall,
) -> bool {
    // SAFETY: by the contract.
    let Some(field) = (unsafe { Field::find(functions, function, size, plain) }) else { return false };
    // SAFETY: by the contract.
    unsafe { field.set(function, ours) };
    true
}

/// The field `vectorcall` of a function.
enum Field {
    /// The field is set with `PyFunction_SetVectorcall`.
    Setter(unsafe extern "C" fn(RawObject, Vectorcall)),
    /// The field has no setter and is written at this address.
    Address(*mut *mut c_void),
}

impl Field {
    /// Returns the field of `function` if it has the usual value, which is stored in [`USUAL`]. `plain` is a
    /// function whose field nobody has set.
    ///
    /// # Safety
    /// Both are functions written in Python, whose objects have `size` bytes.
    unsafe fn find(
        functions: &Functions,
        function: Object<'_>,
        size: usize,
        plain: Object<'_>,
    ) -> Option<Field> {
        let (usual, field) =
            if let (Some(get), Some(set)) = (functions.vectorcall_of, functions.set_vectorcall) {
                // SAFETY: both are functions, and the GIL is held.
                let (usual, current) = unsafe { (get(plain.raw()), get(function.raw())) };
                (usual, (usual == current).then_some(Field::Setter(set)))
            } else {
                let usual = find_global(c"_PyFunction_Vectorcall");
                let words = function.raw().cast::<*mut c_void>();
                // SAFETY: the pointer is to a word of the object.
                let is_usual = |word: &*mut *mut c_void| unsafe { **word == usual };
                let mut fields =
                    (0..size / size_of::<usize>()).map(|index| words.wrapping_add(index)).filter(is_usual);
                let (first, second) = (fields.next(), fields.next());
                (usual, first.filter(|_| second.is_none()).map(Field::Address))
            };
        let field = field.filter(|_| !usual.is_null())?;
        USUAL.store(usual, Ordering::Release);
        Some(field)
    }

    /// Sets the field.
    ///
    /// # Safety
    /// `self` is the field of `function`, and `ours` is ready to be called.
    unsafe fn set(self, function: Object<'_>, ours: Vectorcall) {
        match self {
            // SAFETY: by the contract; the GIL is held.
            Field::Setter(set) => unsafe { set(function.raw(), ours) },
            // SAFETY: by the contract.
            Field::Address(field) => unsafe { *field = ours as *mut c_void },
        }
    }
}
