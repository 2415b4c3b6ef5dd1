//! Module calls: the path of each module, and when its forward begins and ends.
//!
//! A global hook of torch puts every module call on torch's slow path, which costs more than all the work
//! here. So calls of `Module._call_impl`, the one function that each of them goes through, are intercepted in
//! C: CPython calls a function through the field `vectorcall` of its object (PEP 590), which is set to
//! [`call_module`]. Python code sees the function unchanged.
//!
//! The interpreter runs some calls of Python functions without the field. From 3.12 on it does so only when
//! the field has the usual value (`CALL` and `CALL_FUNCTION_EX` in ceval.c), and `PyFunction_SetVectorcall`
//! sets the field and invalidates what call sites have cached about the function. 3.9 and 3.10 always use the
//! field. 3.11 skips it without a check, but only where the arguments are written out: torch's
//! `self._call_impl(*args, **kwargs)` uses the field.
//!
//! A daemon thread that waits for the interpreter when Python ends is unwound from there, through functions
//! that are `extern "C-unwind"` here: they keep nothing that must be dropped across such a call.

use std::ffi::{CStr, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

use memtrace_record::intern::TextId;
use memtrace_record::recorder::text_id;
use rustc_hash::FxHashMap;

use crate::attribution::{backward_passes, module_ranges};
use crate::ffi::cpython::{Arguments, Functions, Gil, Object, Owned, RawObject, Vectorcall};
use crate::ffi::symbols::find_global;
use crate::python::errors;
use crate::runtime::guard::shielded;
use crate::runtime::thread;

/// The path of each module object, by its address. Only a thread that holds the GIL takes the lock.
static PATHS: Mutex<Option<FxHashMap<usize, TextId>>> = Mutex::new(None);

fn with_paths<R>(work: impl FnOnce(&mut FxHashMap<usize, TextId>) -> R) -> R {
    work(PATHS.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

/// `assign_path(module, path)`.
pub(crate) fn assign_path(arguments: Arguments<'_>) {
    let (module, path) = (arguments.id(0), text_id(arguments.text(1)));
    with_paths(|paths| paths.insert(module, path));
}

/// `forget_module(id)`: the module has been garbage-collected.
pub(crate) fn forget_module(arguments: Arguments<'_>) {
    let module = arguments.size(0);
    with_paths(|paths| paths.remove(&module));
}

/// `enter_module(module)`.
pub(crate) fn enter_module(arguments: Arguments<'_>) -> i64 {
    enter(arguments.id(0)) as i64
}

/// `leave_module(module)`.
pub(crate) fn leave_module(arguments: Arguments<'_>) {
    module_ranges::leave(arguments.id(0));
}

/// The place at which a module call begins.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Entered {
    /// Inside another module's call, or for a backward that computes it again: autograd's thread calls no
    /// model.
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
    let Some(path) = with_paths(|paths| paths.get(&module).copied()) else { return Entered::Unknown };
    if module_ranges::enter(path, module) > 0 || thread::is_autograd() {
        return Entered::Inside;
    }
    backward_passes::gradients_are_due();
    Entered::Outermost
}

/// Enters a module when the tracer has nothing to do for its call; `false`, and nothing is done, otherwise.
fn enter_without_tracer(module: usize) -> bool {
    AFTER.load(Ordering::Relaxed).is_null()
        && (module_ranges::depth() > 0 || thread::is_autograd())
        && enter(module) != Entered::Unknown
}

/// The usual value of the field: CPython's function that calls any function written in Python.
static USUAL: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
/// The tracer's function to call before a module, with its arguments. Never released, like the others.
static BEFORE: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
/// The tracer's function to call after a module, with the module and its result; null when it needs none.
static AFTER: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
/// Sets the callback through which dynamo sees the calling thread's frames, and returns the previous one.
static SET_EVAL_FRAME: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

/// The value of the field.
///
/// # Safety
/// Python calls it as a `vectorcallfunc`, after [`hook_vectorcall`] has stored [`USUAL`] and [`BEFORE`].
unsafe extern "C-unwind" fn call_module(
    function: RawObject,
    args: *const RawObject,
    count: usize,
    names: RawObject,
) -> RawObject {
    // SAFETY: `hook_vectorcall` stored the usual value before it set the field; the arguments are the
    // caller's own.
    let usual = unsafe { std::mem::transmute::<*mut c_void, Vectorcall>(USUAL.load(Ordering::Relaxed)) };
    // The highest bit is a flag.
    if count << 1 == 0 {
        // SAFETY: as above. It raises the error of a method that is called without its object.
        return unsafe { usual(function, args, count, names) };
    }
    // SAFETY: the first argument is there, and the caller keeps it during the call.
    let module = unsafe { *args };
    let mut is_open = shielded(|| enter_without_tracer(module as usize)) == Some(true);
    let mut result = null_mut();
    let mut goes_on = true;
    if !is_open {
        let depth = shielded(module_ranges::depth);
        // SAFETY: as above.
        goes_on = unsafe { call_tracer(&BEFORE, usual, args, count, names) };
        is_open = shielded(module_ranges::depth) > depth;
    }
    if goes_on {
        // SAFETY: as above.
        result = unsafe { usual(function, args, count, names) };
    }
    if is_open {
        if !result.is_null() && !AFTER.load(Ordering::Relaxed).is_null() {
            let arguments = [module, result];
            // SAFETY: two arguments, both alive.
            if !unsafe { call_tracer(&AFTER, usual, arguments.as_ptr(), arguments.len(), null_mut()) } {
                // SAFETY: the GIL is held, and the result is a new reference that nobody else gets.
                unsafe { release(result) };
                result = null_mut();
            }
        }
        shielded(|| module_ranges::leave(module as usize));
    }
    result
}

/// Releases a reference.
///
/// # Safety
/// The GIL is held, and `object` is null or a new reference.
unsafe fn release(object: RawObject) {
    // SAFETY: by the contract.
    drop(unsafe { Gil::held().and_then(|gil| gil.owned(object)) });
}

/// Calls a function of the tracer. Returns false if it raised an exception that belongs to the program (a
/// KeyboardInterrupt that arrived meanwhile). If dynamo watches this thread, the frames of the tracer are
/// hidden from it, or it would compile them.
///
/// # Safety
/// The GIL is held; `args` and `names` are valid for a `vectorcallfunc`, and `usual` is [`USUAL`].
unsafe fn call_tracer(
    function: &AtomicPtr<c_void>,
    usual: Vectorcall,
    args: *const RawObject,
    count: usize,
    names: RawObject,
) -> bool {
    // SAFETY: by the contract.
    let Some(gil) = (unsafe { Gil::held() }) else { return true };
    let none = gil.none();
    // A plain pointer: the call below may unwind.
    let watcher = set_eval_frame(gil, none).map_or(null_mut(), Owned::into_raw);
    // SAFETY: `hook_vectorcall` stored a function written in Python; the arguments by the contract.
    let result = unsafe { usual(function.load(Ordering::Relaxed), args, count, names) };
    let goes_on = !result.is_null() || drop_exception(gil);
    // SAFETY: the reference that `set_eval_frame` returned.
    if let Some(watcher) = unsafe { gil.owned(watcher) }
        && !watcher.get().is(none)
    {
        // An exception of the program stays raised.
        let error = gil.fetch_error();
        drop(set_eval_frame(gil, watcher.get()));
        gil.restore_error(error);
    }
    // SAFETY: null or a new reference.
    drop(unsafe { gil.owned(result) });
    goes_on
}

/// Drops the pending exception if it is an `Exception`, such as a RecursionError in a place where the
/// module's own forward would have raised one. Returns false for other exceptions.
fn drop_exception(gil: Gil) -> bool {
    let is_exception = gil.is_exception_raised();
    if is_exception {
        errors::take(gil, "call of a hook");
    }
    is_exception
}

/// Sets dynamo's callback; returns the previous one, `None` when this torch has none to set.
fn set_eval_frame(gil: Gil, callback: Object<'_>) -> Option<Owned> {
    // SAFETY: null or a function that is never released.
    let function = unsafe { gil.borrowed(SET_EVAL_FRAME.load(Ordering::Relaxed)) }?;
    let before = function.call_with(callback);
    if before.is_none() {
        gil.clear_error();
    }
    before
}

/// `hook_vectorcall(function, object_size, before, after, set_eval_frame) -> bool`: calls of `function`,
/// whose object has `object_size` bytes, go through [`call_module`]; `None` for a function that is not there.
/// `False`, and nothing is changed, where that is not possible: an interpreter that has the field elsewhere,
/// or a function whose field somebody else has set.
pub(crate) fn hook_vectorcall(arguments: Arguments<'_>) -> bool {
    let object = |index| arguments.get(index);
    let (Some(function), Some(before)) = (object(0), object(2)) else { return false };
    // SAFETY: the tracer passes functions written in Python, and the size of their objects.
    let Some(field) =
        (unsafe { Field::find(arguments.gil.functions(), function, arguments.size(1), before) })
    else {
        return false;
    };
    for (place, index) in [(&BEFORE, 2), (&AFTER, 3), (&SET_EVAL_FRAME, 4)] {
        if let Some(object) = object(index).filter(|object| !object.is_none()) {
            place.store(object.to_owned().into_raw(), Ordering::Release);
        }
    }
    // SAFETY: the field of this function; all that `call_module` needs is there.
    unsafe { field.set(function) };
    true
}

/// The field `vectorcall` of a function.
enum Field {
    /// Set by `PyFunction_SetVectorcall`.
    Setter(unsafe extern "C" fn(RawObject, Vectorcall)),
    /// At this address.
    Address(*mut *mut c_void),
}

impl Field {
    /// The field of `function` when it has the usual value, which is kept in [`USUAL`]; `plain` is a function
    /// whose field nobody has set.
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
                // SAFETY: two functions; the GIL is held.
                let (usual, current) = unsafe { (get(plain.raw()), get(function.raw())) };
                (usual, (usual == current).then_some(Field::Setter(set)))
            } else {
                let usual = find_global(c"_PyFunction_Vectorcall");
                let words = function.raw().cast::<*mut c_void>();
                // SAFETY: the words of the object.
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

    /// Sets the field to [`call_module`].
    ///
    /// # Safety
    /// It is the field of `function`, and the statics that [`call_module`] reads are set.
    unsafe fn set(self, function: Object<'_>) {
        match self {
            // SAFETY: by the contract; the GIL is held.
            Field::Setter(set) => unsafe { set(function.raw(), call_module) },
            // SAFETY: by the contract.
            Field::Address(field) => unsafe { *field = call_module as *mut c_void },
        }
    }
}
