//! Calls of modules: who they are, and when they begin and end.
//!
//! A global hook of torch's puts every module call on torch's slow path, which costs more than all that is done
//! here. So `Module._call_impl`, the one function that each of these calls goes through, is heard of from C: CPython
//! calls a function through the field `vectorcall` of its object (PEP 590), and [`call_module`] stands there. What
//! Python sees of the function stays as it is.
//!
//! The interpreter runs some calls of Python functions without the field. From 3.12 on it first looks whether that is
//! the usual one (`CALL` and `CALL_FUNCTION_EX` in ceval.c), and `PyFunction_SetVectorcall` is there to set it and to
//! make call sites forget what they know of the function. 3.9 and 3.10 call all of them by the field. 3.11 does not
//! look, but only where the arguments are written out: torch's `self._call_impl(*args, **kwargs)` goes by the field.
//!
//! A daemon thread that waits for the interpreter when Python ends is unwound from there: through what is
//! `extern "C-unwind"` here, which keeps nothing that is to be dropped across such a call.

use std::ffi::{c_int, c_long, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

use memtrace_record::intern::TextId;
use memtrace_record::recorder::text_id;
use rustc_hash::FxHashMap;

use crate::attribution::backward_passes;
use crate::attribution::module_ranges;
use crate::python::injection::{
    Object, cached, function_named, identity, integer, python, release, size, symbol, text,
};
use crate::runtime::guard::shielded;
use crate::runtime::thread;

/// The numbers of the paths of module objects, by their address. Only who holds the GIL takes the lock.
static PATHS: Mutex<Option<FxHashMap<usize, TextId>>> = Mutex::new(None);

fn with_paths<R>(work: impl FnOnce(&mut FxHashMap<usize, TextId>) -> R) -> R {
    work(PATHS.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

/// `adopt(module, path)`: its path is known.
pub(crate) unsafe extern "C" fn adopt(_: Object, args: *const Object, count: isize) -> Object {
    // SAFETY: as in `enter`.
    let (module, path) = unsafe { (identity(args, count, 0), text(args, count, 1)) };
    shielded(|| {
        let path = text_id(path);
        with_paths(|paths| paths.insert(module, path));
    });
    integer(0)
}

/// `forget(id)`: the module is gone.
pub(crate) unsafe extern "C" fn forget(_: Object, args: *const Object, count: isize) -> Object {
    // SAFETY: as in `enter`.
    let module = unsafe { size(args, count, 0) };
    shielded(|| with_paths(|paths| paths.remove(&module)));
    integer(0)
}

/// `enter(module)`: see [`begin`].
///
/// # Safety
/// Called by Python, which holds the GIL and passes `count` arguments.
pub(crate) unsafe extern "C" fn enter(_: Object, args: *const Object, count: isize) -> Object {
    // SAFETY: by the contract.
    let module = unsafe { identity(args, count, 0) };
    integer(shielded(|| begin(module)).unwrap_or(0))
}

/// `leave(module)`: it ends.
pub(crate) unsafe extern "C" fn leave(_: Object, args: *const Object, count: isize) -> Object {
    // SAFETY: as in `enter`.
    let module = unsafe { identity(args, count, 0) };
    shielded(|| module_ranges::leave(module));
    integer(0)
}

/// A module's forward begins. 0: inside that of another, or again, for a backward that recomputes it, whose thread is
/// no caller of the model; 1: it is the outermost; 2: nobody knows it, and nothing was done.
fn begin(module: usize) -> c_long {
    let Some(path) = with_paths(|paths| paths.get(&module).copied()) else { return 2 };
    if module_ranges::enter(path, module) > 0 || thread::is_autograd() {
        return 0;
    }
    backward_passes::gradients_are_due();
    1
}

/// As [`begin`], when `hooks.py` has nothing to do for this call; else nothing is done.
fn begin_unasked(module: usize) -> bool {
    AFTER.load(Ordering::Relaxed).is_null()
        && (module_ranges::depth() > 0 || thread::is_autograd())
        && begin(module) != 2
}

/// `vectorcallfunc`: the function, its arguments, their number, the names of those behind them.
type Call = unsafe extern "C-unwind" fn(Object, *const Object, usize, Object) -> Object;

/// What stood in the field: CPython's own, which calls whatever function is written in Python.
static USUAL: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
/// What `hooks.py` gave us to call before a module, with its arguments; and after it, when anybody asks for that, with
/// the module and its result. Kept for as long as the process lives.
static BEFORE: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
static AFTER: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
/// Sets the callback to which dynamo has the calling thread's frames told; gives the one that was set.
static SET_EVAL_FRAME: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

/// Stands in the field.
unsafe extern "C-unwind" fn call_module(
    function: Object,
    args: *const Object,
    count: usize,
    names: Object,
) -> Object {
    // SAFETY: `hear` stored what stood there before it put this in its place; the arguments are the caller's own.
    let usual = unsafe { std::mem::transmute::<*mut c_void, Call>(USUAL.load(Ordering::Relaxed)) };
    // The highest bit is a flag.
    if count << 1 == 0 {
        // SAFETY: as above. It raises what it raises for a method without its object.
        return unsafe { usual(function, args, count, names) };
    }
    // SAFETY: the first argument is there, and the caller keeps it for as long as the call lasts.
    let module = unsafe { *args };
    let mut is_open = shielded(|| begin_unasked(module as usize)) == Some(true);
    let mut result = null_mut();
    let mut goes_on = true;
    if !is_open {
        let open = shielded(module_ranges::depth);
        // SAFETY: as above.
        goes_on = unsafe { ask(&BEFORE, usual, args, count, names) };
        is_open = shielded(module_ranges::depth) > open;
    }
    if goes_on {
        // SAFETY: as above.
        result = unsafe { usual(function, args, count, names) };
    }
    if is_open {
        if !result.is_null() && !AFTER.load(Ordering::Relaxed).is_null() {
            let told = [module, result];
            // SAFETY: two arguments, both alive.
            if !unsafe { ask(&AFTER, usual, told.as_ptr(), told.len(), null_mut()) } {
                release(result);
                result = null_mut();
            }
        }
        shielded(|| module_ranges::leave(module as usize));
    }
    result
}

/// Calls what `hooks.py` gave us. `false`: it raised what is the program's own (a KeyboardInterrupt that came
/// meanwhile). Where dynamo watches this thread it would compile that: it is told of none of our frames.
///
/// # Safety
/// `args` and `names` are as Python gave them to [`call_module`], and `usual` is [`USUAL`].
unsafe fn ask(
    function: &AtomicPtr<c_void>,
    usual: Call,
    args: *const Object,
    count: usize,
    names: Object,
) -> bool {
    let none = symbol_of_none();
    let watcher = set_eval_frame(none);
    // SAFETY: `hear` stored a function that is written in Python; the arguments by the contract.
    let result = unsafe { usual(function.load(Ordering::Relaxed), args, count, names) };
    let goes_on = !result.is_null() || forget_exception();
    if !watcher.is_null() && watcher != none {
        set_eval_frame_beside_error(watcher);
    }
    release(watcher);
    release(result);
    goes_on
}

/// Drops what was raised, when it is an `Exception` (a RecursionError, right where the program would have met it).
fn forget_exception() -> bool {
    type Matches = unsafe extern "C" fn(Object) -> c_int;
    let exception = symbol(c"PyExc_Exception").cast::<Object>();
    // SAFETY: the variable of Python's pyerrors.h, which is never null once Python runs.
    let exception = if exception.is_null() { null_mut() } else { unsafe { *exception } };
    let is_one = !exception.is_null() && python!(PyErr_ExceptionMatches(exception) as Matches) != 0;
    if is_one {
        clear_error();
    }
    is_one
}

fn clear_error() {
    python!(PyErr_Clear() as unsafe extern "C" fn());
}

/// Gives the callback that was set; null when there is nothing to set.
fn set_eval_frame(callback: Object) -> Object {
    type CallWith = unsafe extern "C" fn(Object, ...) -> Object;
    let (function, found) = (SET_EVAL_FRAME.load(Ordering::Relaxed), symbol_of_call());
    if function.is_null() || found.is_null() {
        return null_mut();
    }
    // SAFETY: the type of PyObject_CallFunctionObjArgs; the GIL is held.
    let call = unsafe { std::mem::transmute::<*mut c_void, CallWith>(found) };
    // SAFETY: as above; null ends the arguments.
    let before = unsafe { call(function, callback, null_mut::<c_void>()) };
    if before.is_null() {
        clear_error();
    }
    before
}

/// The same while an exception may be on its way, which stays.
fn set_eval_frame_beside_error(callback: Object) {
    type Fetch = unsafe extern "C" fn(*mut Object, *mut Object, *mut Object);
    type Restore = unsafe extern "C" fn(Object, Object, Object);
    let [mut kind, mut value, mut place] = [null_mut(); 3];
    python!(PyErr_Fetch(&raw mut kind, &raw mut value, &raw mut place) as Fetch);
    release(set_eval_frame(callback));
    python!(PyErr_Restore(kind, value, place) as Restore);
}

cached!(symbol_of_none, c"_Py_NoneStruct");
cached!(symbol_of_call, c"PyObject_CallFunctionObjArgs");

/// `hear(function, size, before, after, set_eval_frame) -> bool`: has calls of `function`, whose object has `size`
/// bytes, go through [`call_module`], which calls `before` and `after`; `None` for what there is not. `False`, and
/// nothing is done, where that is not possible: an interpreter that keeps the field elsewhere, or a function that
/// somebody else calls in a way of their own.
pub(crate) unsafe extern "C" fn hear(_: Object, args: *const Object, count: isize) -> Object {
    if count != 5 {
        return integer(0);
    }
    // SAFETY: as in `enter`; five arguments are there.
    let (bytes, args) = unsafe { (size(args, count, 1), std::slice::from_raw_parts(args, 5)) };
    let none = symbol_of_none();
    let heard = shielded(|| {
        // SAFETY: `hooks.py` passes a function written in Python and the size of its object.
        let Some(field) = (unsafe { field_of(args[0], bytes, args[2]) }) else { return false };
        for (place, object) in [(&BEFORE, args[2]), (&AFTER, args[3]), (&SET_EVAL_FRAME, args[4])] {
            if object != none {
                python!(Py_IncRef(object) as unsafe extern "C" fn(Object));
                place.store(object, Ordering::Release);
            }
        }
        // SAFETY: as above; everything that `call_module` needs is there.
        unsafe { field.set(args[0]) };
        true
    });
    integer(i64::from(heard == Some(true)))
}

/// `PyFunction_SetVectorcall`.
type Set = unsafe extern "C" fn(Object, Call);

/// How the field of a function is set.
enum Field {
    By(Set),
    At(*mut *mut c_void),
}

impl Field {
    /// # Safety
    /// The field is that of `function`.
    unsafe fn set(self, function: Object) {
        match self {
            // SAFETY: the type of PyFunction_SetVectorcall; by the contract.
            Field::By(set) => unsafe { set(function, call_module) },
            // SAFETY: by the contract.
            Field::At(field) => unsafe { *field = call_module as *mut c_void },
        }
    }
}

/// The field of `function`, when what stands there is the usual one, which is kept; `plain` is a function where it is.
///
/// # Safety
/// Both are functions written in Python; the object of one has `bytes` bytes.
unsafe fn field_of(function: Object, bytes: usize, plain: Object) -> Option<Field> {
    type Get = unsafe extern "C" fn(Object) -> *mut c_void;
    // SAFETY: the types of these functions.
    let (get, set) = unsafe {
        (function_named::<Get>(c"PyVectorcall_Function"), function_named::<Set>(c"PyFunction_SetVectorcall"))
    };
    let (usual, field) = if let (Some(get), Some(set)) = (get, set) {
        // SAFETY: two functions; the GIL is held.
        let (usual, is) = unsafe { (get(plain), get(function)) };
        (usual, (usual == is).then_some(Field::By(set)))
    } else {
        let usual = symbol(c"_PyFunction_Vectorcall");
        let words = function.cast::<*mut c_void>();
        // SAFETY: the words of the object.
        let is_it = |word: &*mut *mut c_void| unsafe { **word == usual };
        let mut fields = (0..bytes / size_of::<usize>()).map(|at| words.wrapping_add(at)).filter(is_it);
        let (first, second) = (fields.next(), fields.next());
        (usual, first.filter(|_| second.is_none()).map(Field::At))
    };
    let field = field.filter(|_| !usual.is_null())?;
    USUAL.store(usual, Ordering::Release);
    Some(field)
}
