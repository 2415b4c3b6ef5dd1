//! Python's C API.
//!
//! One build serves Python 3.9 to 3.15 and programs without Python, so nothing is linked. Instead, each
//! function is looked up by name, once. The required functions belong to the stable ABI or have the same type
//! in all these versions.
//!
//! When Python ends, it unwinds a daemon thread that waits for the GIL, through the function that called
//! Python. So functions that may wait for the GIL have the ABI `C-unwind`.
//!
//! A [`Gil`] is the right to call these functions. [`Object`] is a borrowed reference; [`Owned`] is an owned
//! one. If a function returns `None`, Python has raised an exception, unless the documentation of the
//! function says otherwise. The caller clears the exception, fetches it, or leaves it to its own caller.

pub(crate) mod collector;
mod native;
mod objects;
mod tracing;
pub(crate) mod version;

use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::marker::PhantomData;
use std::ptr::{NonNull, null_mut};
use std::sync::OnceLock;

pub(crate) use native::{Arguments, Method, answer, native_method};
pub(crate) use objects::{Object, Owned};

use crate::ffi::symbols::{c_name, find_global, function};
use tracing::Tracing;

/// A `PyObject *`, as C functions take and return it.
pub(crate) type RawObject = *mut c_void;
/// The argument of `Py_AddPendingCall`: returns 0, or -1 with an exception set.
pub(crate) type PendingCall = unsafe extern "C" fn(*mut c_void) -> c_int;
/// Declares the functions of the API: field name, symbol, and type in Python's headers.
macro_rules! functions {
    (
        required { $($field:ident: $symbol:literal as $kind:ty,)* }
        optional { $($maybe:ident: $maybe_symbol:literal as $maybe_kind:ty,)* }
    ) => {
        /// The functions of the interpreter in this process.
        pub(crate) struct Functions {
            $($field: $kind,)*
            $(
                #[doc = concat!("`", $maybe_symbol, "`, which not every version has.")]
                pub(crate) $maybe: Option<$maybe_kind>,
            )*
            none: RawObject,
            exception: RawObject,
            tracing: Option<Tracing>,
        }

        impl Functions {
            fn find() -> Option<Functions> {
                // SAFETY: each function has this type in the headers of Python 3.9 to 3.15.
                unsafe {
                    Some(Functions {
                        $($field: function(find_global(c_name(concat!($symbol, "\0"))))?,)*
                        $($maybe: function(find_global(c_name(concat!($maybe_symbol, "\0")))),)*
                        none: NonNull::new(find_global(c"_Py_NoneStruct"))?.as_ptr(),
                        tracing: Tracing::find(),
                        // `PyExc_Exception` is a variable, set before the interpreter runs any code.
                        exception: *NonNull::new(find_global(c"PyExc_Exception"))?
                            .cast::<RawObject>()
                            .as_ptr(),
                    })
                }
            }
        }
    };
}

functions! {
    required {
        inc_ref: "Py_IncRef" as unsafe extern "C" fn(RawObject),
        dec_ref: "Py_DecRef" as unsafe extern "C" fn(RawObject),
        is_subtype: "PyType_IsSubtype" as unsafe extern "C" fn(RawObject, RawObject) -> c_int,
        current_thread: "PyThreadState_Get" as unsafe extern "C" fn() -> RawObject,
        type_of: "PyObject_Type" as unsafe extern "C" fn(RawObject) -> RawObject,
        is_true: "PyObject_IsTrue" as unsafe extern "C" fn(RawObject) -> c_int,
        string_of: "PyObject_Str" as unsafe extern "C" fn(RawObject) -> RawObject,
        attribute: "PyObject_GetAttr" as unsafe extern "C-unwind" fn(RawObject, RawObject) -> RawObject,
        call: "PyObject_CallObject" as unsafe extern "C-unwind" fn(RawObject, RawObject) -> RawObject,
        call_with: "PyObject_CallFunctionObjArgs" as unsafe extern "C-unwind" fn(RawObject, ...) -> RawObject,
        call_method: "PyObject_CallMethodObjArgs"
            as unsafe extern "C-unwind" fn(RawObject, RawObject, ...) -> RawObject,
        integer_from: "PyLong_FromLong" as unsafe extern "C" fn(c_long) -> RawObject,
        integer_as_size: "PyLong_AsSize_t" as unsafe extern "C" fn(RawObject) -> usize,
        text_from: "PyUnicode_InternFromString" as unsafe extern "C" fn(*const c_char) -> RawObject,
        text_as_utf8: "PyUnicode_AsUTF8AndSize" as unsafe extern "C" fn(RawObject, *mut isize) -> *const u8,
        list_new: "PyList_New" as unsafe extern "C" fn(isize) -> RawObject,
        list_size: "PyList_Size" as unsafe extern "C" fn(RawObject) -> isize,
        list_item: "PyList_GetItem" as unsafe extern "C" fn(RawObject, isize) -> RawObject,
        list_append: "PyList_Append" as unsafe extern "C" fn(RawObject, RawObject) -> c_int,
        tuple_item: "PyTuple_GetItem" as unsafe extern "C" fn(RawObject, isize) -> RawObject,
        dict_new: "PyDict_New" as unsafe extern "C" fn() -> RawObject,
        dict_set: "PyDict_SetItemString"
            as unsafe extern "C" fn(RawObject, *const c_char, RawObject) -> c_int,
        dict_get: "PyDict_GetItemString" as unsafe extern "C" fn(RawObject, *const c_char) -> RawObject,
        module_new: "PyModule_New" as unsafe extern "C" fn(*const c_char) -> RawObject,
        module_dict: "PyModule_GetDict" as unsafe extern "C" fn(RawObject) -> RawObject,
        function_new: "PyCFunction_NewEx"
            as unsafe extern "C" fn(*const Method, RawObject, RawObject) -> RawObject,
        builtins: "PyEval_GetBuiltins" as unsafe extern "C" fn() -> RawObject,
        compile: "Py_CompileString" as unsafe extern "C" fn(*const c_char, *const c_char, c_int) -> RawObject,
        evaluate: "PyEval_EvalCode" as unsafe extern "C-unwind" fn(RawObject, RawObject, RawObject) -> RawObject,
        error_occurred: "PyErr_Occurred" as unsafe extern "C" fn() -> RawObject,
        error_matches: "PyErr_ExceptionMatches" as unsafe extern "C" fn(RawObject) -> c_int,
        error_clear: "PyErr_Clear" as unsafe extern "C" fn(),
        error_fetch: "PyErr_Fetch" as unsafe extern "C" fn(*mut RawObject, *mut RawObject, *mut RawObject),
        error_restore: "PyErr_Restore" as unsafe extern "C" fn(RawObject, RawObject, RawObject),
        add_pending_call: "Py_AddPendingCall" as unsafe extern "C" fn(PendingCall, *mut c_void) -> c_int,
        is_initialized: "Py_IsInitialized" as unsafe extern "C" fn() -> c_int,
    }
    optional {
        vectorcall_of: "PyVectorcall_Function" as unsafe extern "C" fn(RawObject) -> *mut c_void,
        set_vectorcall: "PyFunction_SetVectorcall" as unsafe extern "C" fn(RawObject, Vectorcall),
        thread_state: "PyGILState_GetThisThreadState" as unsafe extern "C" fn() -> *const usize,
        interpreter: "PyInterpreterState_Get" as unsafe extern "C" fn() -> RawObject,
        take_gil: "PyGILState_Ensure" as unsafe extern "C-unwind" fn() -> c_int,
        leave_gil: "PyGILState_Release" as unsafe extern "C" fn(c_int),
        release_gil: "PyEval_SaveThread" as unsafe extern "C" fn() -> RawObject,
        restore_gil: "PyEval_RestoreThread" as unsafe extern "C-unwind" fn(RawObject),
        visit_objects: "PyUnstable_GC_VisitObjects" as unsafe extern "C" fn(Visitor, *mut c_void),
        slot_of_type: "PyType_GetSlot" as unsafe extern "C" fn(RawObject, c_int) -> *mut c_void,
        line_of_code: "PyCode_Addr2Line" as unsafe extern "C" fn(*const usize, c_int) -> c_int,
        text_length: "PyUnicode_GetLength" as unsafe extern "C" fn(*const usize) -> isize,
        text_as_ucs4: "PyUnicode_AsUCS4"
            as unsafe extern "C" fn(*const usize, *mut u32, isize, c_int) -> *mut u32,
    }
}

/// `gcvisitobjects_t`: returns 0 to stop the traversal.
pub(crate) type Visitor = unsafe extern "C" fn(RawObject, *mut c_void) -> c_int;

/// `traverseproc`: calls a visitor for each object that an object refers to.
pub(crate) type Traverse = unsafe extern "C" fn(RawObject, Visitor, *mut c_void) -> c_int;

/// `vectorcallfunc`: the callable, its arguments, their number, and the names of the keyword arguments, whose
/// values come last.
///
/// A call may unwind when Python ends a daemon thread, so the caller must hold nothing across the call that
/// needs a drop.
pub(crate) type Vectorcall =
    unsafe extern "C-unwind" fn(RawObject, *const RawObject, usize, RawObject) -> RawObject;

// SAFETY: the struct holds functions, and two objects that live as long as the process.
unsafe impl Send for Functions {}
// SAFETY: as above; the objects are used only with the GIL held.
unsafe impl Sync for Functions {}

/// Returns true if this process has a Python interpreter.
pub(crate) fn is_loaded() -> bool {
    Functions::get().is_some()
}

impl Functions {
    /// Returns the functions, or `None` if the process has no Python, or has not loaded Python yet.
    #[inline]
    pub(crate) fn get() -> Option<&'static Functions> {
        static FOUND: OnceLock<Functions> = OnceLock::new();
        if let Some(found) = FOUND.get() {
            return Some(found);
        }
        let found = Functions::find()?;
        Some(FOUND.get_or_init(|| found))
    }

    /// Returns true if the interpreter runs: it has started and has not begun to finalize.
    #[inline]
    pub(crate) fn is_running(&self) -> bool {
        // SAFETY: the function only reads a flag, and may be called on any thread.
        unsafe { (self.is_initialized)() != 0 }
    }

    /// Returns true if [`Functions::with_gil`] can run on a thread that Python does not know.
    pub(crate) fn can_take_gil(&self) -> bool {
        self.take_gil.is_some() && self.leave_gil.is_some() && self.is_running()
    }

    /// Takes the GIL, runs `work` and releases the GIL. Does nothing if this Python lacks the functions for
    /// it.
    ///
    /// # Safety
    /// The calling thread does not hold the GIL, and may be unwound from here when Python ends.
    pub(crate) unsafe fn with_gil(&'static self, work: impl FnOnce(Gil)) {
        if let (Some(take), Some(leave)) = (self.take_gil, self.leave_gil) {
            // SAFETY: the two functions belong together; the rest is the caller's contract.
            unsafe {
                let before = take();
                work(Gil { functions: self, of_thread: PhantomData });
                leave(before);
            }
        }
    }

    /// Makes Python's main thread call `function` between two bytecode instructions, as a pending call.
    /// Returns false if the queue of pending calls is full or no interpreter runs. Any thread may use this
    /// function, with or without the GIL.
    ///
    /// # Safety
    /// `function` may run on the main thread at any time, with the GIL and a null argument.
    pub(crate) unsafe fn call_soon(&self, function: PendingCall) -> bool {
        // Check that the interpreter runs, because finalizing it frees the lock of the queue.
        // SAFETY: the interpreter runs; the rest is the caller's contract.
        self.is_running() && unsafe { (self.add_pending_call)(function, null_mut()) == 0 }
    }
}

/// Proof that the calling thread holds the GIL. Python is called through its methods.
#[derive(Clone, Copy)]
pub(crate) struct Gil {
    functions: &'static Functions,
    /// Makes the type neither `Send` nor `Sync`, because another thread does not hold the GIL.
    of_thread: PhantomData<*mut ()>,
}

impl Gil {
    /// Returns a [`Gil`] for the calling thread, which holds the GIL, or `None` if this process has no
    /// Python.
    ///
    /// # Safety
    /// The calling thread holds the GIL as long as this value, or anything made with it, is in use.
    #[inline]
    pub(crate) unsafe fn held() -> Option<Gil> {
        Functions::get().map(|functions| Gil { functions, of_thread: PhantomData })
    }

    /// Releases the GIL while `work` runs. `work` must not call Python. It does not run if this Python lacks
    /// the functions that release and restore the GIL.
    pub(crate) fn released(self, work: impl FnOnce()) {
        if let (Some(release), Some(restore)) = (self.functions.release_gil, self.functions.restore_gil) {
            // SAFETY: the two functions belong together, and the GIL is held.
            unsafe {
                let thread = release();
                work();
                restore(thread);
            }
        }
    }

    /// Returns the functions of the C API, for calls that have no method here.
    pub(crate) fn functions(self) -> &'static Functions {
        self.functions
    }

    /// Takes over a new reference that a Python function returned. Returns `None` for null.
    ///
    /// # Safety
    /// `raw` is null or a new reference that nobody else releases.
    #[inline]
    pub(crate) unsafe fn owned(self, raw: RawObject) -> Option<Owned> {
        NonNull::new(raw).map(|pointer| Owned { pointer, gil: self })
    }

    /// Returns a borrowed reference, or `None` for null.
    ///
    /// # Safety
    /// `raw` is null or an object that stays alive for `'a`.
    #[inline]
    pub(crate) unsafe fn borrowed<'a>(self, raw: RawObject) -> Option<Object<'a>> {
        NonNull::new(raw).map(|pointer| Object { pointer, gil: self, alive: PhantomData })
    }

    /// Returns Python's `None`.
    #[inline]
    pub(crate) fn none(self) -> Object<'static> {
        // SAFETY: the pointer is not null, and the object is never freed.
        unsafe { self.borrowed(self.functions.none).unwrap_unchecked() }
    }

    /// Creates an integer.
    pub(crate) fn integer(self, value: i64) -> Option<Owned> {
        // SAFETY: the GIL is held; the call returns a new reference.
        unsafe { self.owned((self.functions.integer_from)(value)) }
    }

    /// Creates an interned string.
    pub(crate) fn text(self, text: &CStr) -> Option<Owned> {
        // SAFETY: `text` ends in 0; the call returns a new reference.
        unsafe { self.owned((self.functions.text_from)(text.as_ptr())) }
    }

    /// Creates an empty list.
    pub(crate) fn new_list(self) -> Option<Owned> {
        // SAFETY: the GIL is held; the call returns a new reference.
        unsafe { self.owned((self.functions.list_new)(0)) }
    }

    /// Creates an empty dict.
    pub(crate) fn new_dict(self) -> Option<Owned> {
        // SAFETY: the GIL is held; the call returns a new reference.
        unsafe { self.owned((self.functions.dict_new)()) }
    }

    /// Creates a module object that is not in `sys.modules`.
    pub(crate) fn new_module(self, name: &CStr) -> Option<Owned> {
        // SAFETY: `name` ends in 0; the call returns a new reference.
        unsafe { self.owned((self.functions.module_new)(name.as_ptr())) }
    }

    /// Creates a Python function that calls `method`.
    pub(crate) fn new_function(self, method: &'static Method) -> Option<Owned> {
        // SAFETY: Python keeps the address of the method, which is static; the call returns a new reference.
        unsafe { self.owned((self.functions.function_new)(method, null_mut(), null_mut())) }
    }

    /// Creates a Python function that calls `method` with `bound` as its `self`, and keeps `bound` alive.
    pub(crate) fn new_bound_function(self, method: &'static Method, bound: Object<'_>) -> Option<Owned> {
        // SAFETY: as above; Python takes a reference of its own to `bound`.
        unsafe { self.owned((self.functions.function_new)(method, bound.raw(), null_mut())) }
    }

    /// Returns the dict of built-ins of this thread's interpreter.
    pub(crate) fn builtins(self) -> Option<Owned> {
        // SAFETY: the call returns a borrowed reference to an object that lives as long as the interpreter.
        unsafe { self.borrowed((self.functions.builtins)()).map(Object::to_owned) }
    }

    /// Compiles the source of a module. `file` is the name that tracebacks show.
    pub(crate) fn compile(self, source: &CStr, file: &CStr) -> Option<Owned> {
        const FILE_INPUT: c_int = 257;
        // SAFETY: both texts end in 0; the call returns a new reference.
        unsafe { self.owned((self.functions.compile)(source.as_ptr(), file.as_ptr(), FILE_INPUT)) }
    }

    /// Runs `code` with the dict `namespace` as its globals and locals.
    pub(crate) fn evaluate(self, code: Object<'_>, namespace: Object<'_>) -> Option<Owned> {
        let namespace = namespace.raw();
        // SAFETY: the objects are alive; the call returns a new reference.
        unsafe { self.owned((self.functions.evaluate)(code.raw(), namespace, namespace)) }
    }

    /// Clears the current exception, if any.
    pub(crate) fn clear_error(self) {
        // SAFETY: the GIL is held.
        unsafe { (self.functions.error_clear)() }
    }

    /// Returns true if the current exception is an `Exception`. Other exceptions, such as
    /// `KeyboardInterrupt`, are meant for the program.
    pub(crate) fn is_exception_raised(self) -> bool {
        // SAFETY: the GIL is held, and the class is alive. The function is called only if an exception is
        // set.
        unsafe {
            !(self.functions.error_occurred)().is_null()
                && (self.functions.error_matches)(self.functions.exception) != 0
        }
    }

    /// Takes the current exception. The caller handles it or restores it.
    pub(crate) fn fetch_error(self) -> Error {
        let [mut kind, mut value, mut trace] = [null_mut(); 3];
        // SAFETY: the call writes up to three new references. Each pointer may stay null.
        unsafe {
            (self.functions.error_fetch)(&raw mut kind, &raw mut value, &raw mut trace);
            Error { kind: self.owned(kind), value: self.owned(value), trace: self.owned(trace) }
        }
    }

    /// Restores an exception that was taken.
    pub(crate) fn restore_error(self, error: Error) {
        let raw = |object: Option<Owned>| object.map_or(null_mut(), Owned::into_raw);
        // SAFETY: the function takes these references over.
        unsafe { (self.functions.error_restore)(raw(error.kind), raw(error.value), raw(error.trace)) }
    }
}

/// An exception that was taken with [`Gil::fetch_error`].
pub(crate) struct Error {
    kind: Option<Owned>,
    value: Option<Owned>,
    trace: Option<Owned>,
}

impl Error {
    /// Returns the name of the exception's class and the text of the exception. Clears any exception that the
    /// two lookups raise.
    pub(crate) fn describe(&self, gil: Gil) -> (String, String) {
        let name = self.kind.as_ref().and_then(|kind| {
            let attribute = gil.text(c"__name__")?;
            kind.get().attribute(attribute.get())?.get().to_text().map(str::to_owned)
        });
        let text = self.value.as_ref().and_then(|value| {
            let text = value.get().string()?;
            text.get().to_text().map(str::to_owned)
        });
        gil.clear_error();
        (name.unwrap_or_else(|| "exception".to_owned()), text.unwrap_or_default())
    }
}
