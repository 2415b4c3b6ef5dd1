//! Python's C API.
//!
//! One build serves Python 3.9 to 3.14 and programs without Python, so nothing is linked: each function is
//! looked up by its name, once. The required ones belong to the stable ABI or have had the same type in all
//! these versions.
//!
//! A [`Gil`] stands for the right to call them. [`Object`] is a borrowed reference and [`Owned`] one of ours.
//! Where a function returns `None`, Python has raised an exception, which the caller clears, fetches or
//! leaves to its own caller.

use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::marker::PhantomData;
use std::ptr::{NonNull, null_mut};
use std::sync::OnceLock;

use crate::ffi::symbols::{c_name, find_global, function};
use crate::runtime::guard::shielded;

/// A `PyObject *`, as C functions take and return it.
pub(crate) type RawObject = *mut c_void;
/// The argument of `Py_AddPendingCall`: returns 0, or -1 with an exception set.
pub(crate) type PendingCall = unsafe extern "C" fn(*mut c_void) -> c_int;
/// `PyCFunctionFast`: self, the arguments, their number.
pub(crate) type FastFunction = unsafe extern "C" fn(RawObject, *const RawObject, isize) -> RawObject;

/// `PyMethodDef`.
#[repr(C)]
pub(crate) struct Method {
    name: *const c_char,
    function: FastFunction,
    flags: c_int,
    doc: *const c_char,
}

// SAFETY: the pointers are those of literals, which never change.
unsafe impl Sync for Method {}

impl Method {
    /// A function that Python calls with positional arguments; [`native_method`] makes one from a Rust
    /// function.
    pub(crate) const fn new(name: &'static CStr, function: FastFunction) -> Method {
        const METH_FASTCALL: c_int = 0x80;
        Method { name: name.as_ptr(), function, flags: METH_FASTCALL, doc: std::ptr::null() }
    }

    /// The name in Python.
    pub(crate) fn name(&self) -> &'static CStr {
        // SAFETY: the name that `new` was given.
        unsafe { CStr::from_ptr(self.name) }
    }
}

/// Declares the functions of the API: a field, the symbol behind it, and its type in Python's headers.
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
        }

        impl Functions {
            fn find() -> Option<Functions> {
                // SAFETY: each has this type in the headers of Python 3.9 to 3.14.
                unsafe {
                    Some(Functions {
                        $($field: function(find_global(c_name(concat!($symbol, "\0"))))?,)*
                        $($maybe: function(find_global(c_name(concat!($maybe_symbol, "\0")))),)*
                        none: NonNull::new(find_global(c"_Py_NoneStruct"))?.as_ptr(),
                        // A variable, which is set before the interpreter runs anything.
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
        type_of: "PyObject_Type" as unsafe extern "C" fn(RawObject) -> RawObject,
        is_true: "PyObject_IsTrue" as unsafe extern "C" fn(RawObject) -> c_int,
        string_of: "PyObject_Str" as unsafe extern "C" fn(RawObject) -> RawObject,
        attribute: "PyObject_GetAttr" as unsafe extern "C" fn(RawObject, RawObject) -> RawObject,
        call: "PyObject_CallObject" as unsafe extern "C" fn(RawObject, RawObject) -> RawObject,
        call_with: "PyObject_CallFunctionObjArgs" as unsafe extern "C" fn(RawObject, ...) -> RawObject,
        call_method: "PyObject_CallMethodObjArgs"
            as unsafe extern "C" fn(RawObject, RawObject, ...) -> RawObject,
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
        evaluate: "PyEval_EvalCode" as unsafe extern "C" fn(RawObject, RawObject, RawObject) -> RawObject,
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
        line_of_code: "PyCode_Addr2Line" as unsafe extern "C" fn(*const usize, c_int) -> c_int,
        text_length: "PyUnicode_GetLength" as unsafe extern "C" fn(*const usize) -> isize,
        text_as_ucs4: "PyUnicode_AsUCS4"
            as unsafe extern "C" fn(*const usize, *mut u32, isize, c_int) -> *mut u32,
    }
}

/// `vectorcallfunc`: the function, its arguments, their number, the names of the keyword arguments behind
/// them.
///
/// It unwinds where Python ends a daemon thread: a caller keeps nothing that must be dropped across the call.
pub(crate) type Vectorcall =
    unsafe extern "C-unwind" fn(RawObject, *const RawObject, usize, RawObject) -> RawObject;

// SAFETY: functions, and two objects that live as long as the process.
unsafe impl Send for Functions {}
// SAFETY: as above; the objects are used with the GIL only.
unsafe impl Sync for Functions {}

/// Returns true if this process has a Python interpreter.
pub(crate) fn is_loaded() -> bool {
    Functions::get().is_some()
}

impl Functions {
    /// The functions; `None` in a process that has no Python, or not yet.
    #[inline]
    pub(crate) fn get() -> Option<&'static Functions> {
        static FOUND: OnceLock<Functions> = OnceLock::new();
        if let Some(found) = FOUND.get() {
            return Some(found);
        }
        let found = Functions::find()?;
        Some(FOUND.get_or_init(|| found))
    }

    /// Returns true if the interpreter runs: not before its start, and not from the moment that it begins to
    /// end.
    #[inline]
    pub(crate) fn is_running(&self) -> bool {
        // SAFETY: it reads a flag, on any thread.
        unsafe { (self.is_initialized)() != 0 }
    }

    /// Asks Python's main thread to call `function` between two instructions. `false` when the queue is full,
    /// or when no interpreter runs. Any thread may ask, with or without the GIL.
    ///
    /// # Safety
    /// `function` may run on the main thread at any time, with the GIL and a null argument.
    pub(crate) unsafe fn call_soon(&self, function: PendingCall) -> bool {
        // The end of an interpreter frees the lock of the queue.
        // SAFETY: the interpreter runs; by the contract.
        self.is_running() && unsafe { (self.add_pending_call)(function, null_mut()) == 0 }
    }
}

/// The right to call Python: the calling thread holds the GIL.
#[derive(Clone, Copy)]
pub(crate) struct Gil {
    functions: &'static Functions,
    /// Another thread does not hold it.
    of_thread: PhantomData<*mut ()>,
}

impl Gil {
    /// The GIL, when this process has Python.
    ///
    /// # Safety
    /// The calling thread holds the GIL for as long as the value, and all that was made with it, are used.
    #[inline]
    pub(crate) unsafe fn held() -> Option<Gil> {
        Functions::get().map(|functions| Gil { functions, of_thread: PhantomData })
    }

    /// The functions behind it.
    pub(crate) fn functions(self) -> &'static Functions {
        self.functions
    }

    /// A reference of ours, which was returned by a function of Python; `None` for null.
    ///
    /// # Safety
    /// `raw` is null or a new reference, which nobody else releases.
    #[inline]
    pub(crate) unsafe fn owned(self, raw: RawObject) -> Option<Owned> {
        NonNull::new(raw).map(|pointer| Owned { pointer, gil: self })
    }

    /// A borrowed reference; `None` for null.
    ///
    /// # Safety
    /// `raw` is null or an object that stays alive for `'a`.
    #[inline]
    pub(crate) unsafe fn borrowed<'a>(self, raw: RawObject) -> Option<Object<'a>> {
        NonNull::new(raw).map(|pointer| Object { pointer, gil: self, alive: PhantomData })
    }

    /// `None`.
    #[inline]
    pub(crate) fn none(self) -> Object<'static> {
        // SAFETY: an object that is never freed, and not null.
        unsafe { self.borrowed(self.functions.none).unwrap_unchecked() }
    }

    /// An integer.
    pub(crate) fn integer(self, value: i64) -> Option<Owned> {
        // SAFETY: the GIL is held; a new reference.
        unsafe { self.owned((self.functions.integer_from)(value)) }
    }

    /// An interned text.
    pub(crate) fn text(self, text: &CStr) -> Option<Owned> {
        // SAFETY: a text that ends in 0; a new reference.
        unsafe { self.owned((self.functions.text_from)(text.as_ptr())) }
    }

    /// An empty list.
    pub(crate) fn new_list(self) -> Option<Owned> {
        // SAFETY: the GIL is held; a new reference.
        unsafe { self.owned((self.functions.list_new)(0)) }
    }

    /// An empty dict.
    pub(crate) fn new_dict(self) -> Option<Owned> {
        // SAFETY: the GIL is held; a new reference.
        unsafe { self.owned((self.functions.dict_new)()) }
    }

    /// A module object that is in no table of modules.
    pub(crate) fn new_module(self, name: &CStr) -> Option<Owned> {
        // SAFETY: a text that ends in 0; a new reference.
        unsafe { self.owned((self.functions.module_new)(name.as_ptr())) }
    }

    /// A function that calls `method`.
    pub(crate) fn new_function(self, method: &'static Method) -> Option<Owned> {
        // SAFETY: Python keeps the address of the method, which is static; a new reference.
        unsafe { self.owned((self.functions.function_new)(method, null_mut(), null_mut())) }
    }

    /// The built-ins of this thread's interpreter, a dict.
    pub(crate) fn builtins(self) -> Option<Owned> {
        // SAFETY: a borrowed reference, whose object lives as long as the interpreter.
        unsafe { self.borrowed((self.functions.builtins)()).map(Object::to_owned) }
    }

    /// The code of a module. `file` is the name that tracebacks show.
    pub(crate) fn compile(self, source: &CStr, file: &CStr) -> Option<Owned> {
        const FILE_INPUT: c_int = 257;
        // SAFETY: texts that end in 0; a new reference.
        unsafe { self.owned((self.functions.compile)(source.as_ptr(), file.as_ptr(), FILE_INPUT)) }
    }

    /// Runs code with this dict as its namespace.
    pub(crate) fn evaluate(self, code: Object<'_>, namespace: Object<'_>) -> Option<Owned> {
        let namespace = namespace.raw();
        // SAFETY: the objects are alive; a new reference.
        unsafe { self.owned((self.functions.evaluate)(code.raw(), namespace, namespace)) }
    }

    /// Drops the exception that was raised, if any.
    pub(crate) fn clear_error(self) {
        // SAFETY: the GIL is held.
        unsafe { (self.functions.error_clear)() }
    }

    /// Returns true if the exception that was raised is an `Exception`. Others, such as KeyboardInterrupt,
    /// are the program's.
    pub(crate) fn is_exception_raised(self) -> bool {
        // SAFETY: the GIL is held; the class is alive. With no exception raised the function is not called.
        unsafe {
            !(self.functions.error_occurred)().is_null()
                && (self.functions.error_matches)(self.functions.exception) != 0
        }
    }

    /// Takes the exception that was raised: the caller deals with it, or puts it back.
    pub(crate) fn fetch_error(self) -> Error {
        let [mut kind, mut value, mut trace] = [null_mut(); 3];
        // SAFETY: three places for new references, each of which may stay null.
        unsafe {
            (self.functions.error_fetch)(&raw mut kind, &raw mut value, &raw mut trace);
            Error { kind: self.owned(kind), value: self.owned(value), trace: self.owned(trace) }
        }
    }

    /// Raises an exception that was taken.
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
    /// The name of its class, and its text.
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

/// A borrowed reference to an object that lives for `'a`.
#[derive(Clone, Copy)]
pub(crate) struct Object<'a> {
    pointer: NonNull<c_void>,
    gil: Gil,
    alive: PhantomData<&'a ()>,
}

impl<'a> Object<'a> {
    /// The pointer, for functions of C.
    #[inline]
    pub(crate) fn raw(self) -> RawObject {
        self.pointer.as_ptr()
    }

    /// The `id` of the object.
    #[inline]
    pub(crate) fn id(self) -> usize {
        self.pointer.as_ptr() as usize
    }

    /// Returns true if it is the same object.
    #[inline]
    pub(crate) fn is(self, other: Object<'_>) -> bool {
        self.pointer == other.pointer
    }

    /// Returns true if it is `None`.
    #[inline]
    pub(crate) fn is_none(self) -> bool {
        self.is(self.gil.none())
    }

    /// A reference of ours to the same object.
    pub(crate) fn to_owned(self) -> Owned {
        // SAFETY: the object is alive.
        unsafe { (self.gil.functions.inc_ref)(self.raw()) };
        Owned { pointer: self.pointer, gil: self.gil }
    }

    /// The type of the object.
    pub(crate) fn kind(self) -> Option<Owned> {
        // SAFETY: the object is alive; a new reference.
        unsafe { self.gil.owned((self.gil.functions.type_of)(self.raw())) }
    }

    /// The attribute of this name.
    #[inline]
    pub(crate) fn attribute(self, name: Object<'_>) -> Option<Owned> {
        // SAFETY: both objects are alive; a new reference.
        unsafe { self.gil.owned((self.gil.functions.attribute)(self.raw(), name.raw())) }
    }

    /// Calls it without arguments.
    #[inline]
    pub(crate) fn call(self) -> Option<Owned> {
        // SAFETY: the object is alive; null ends the arguments; a new reference.
        unsafe { self.gil.owned((self.gil.functions.call_with)(self.raw(), null_mut::<c_void>())) }
    }

    /// Calls it with one argument.
    pub(crate) fn call_with(self, argument: Object<'_>) -> Option<Owned> {
        // SAFETY: both objects are alive; null ends the arguments; a new reference.
        unsafe {
            self.gil.owned((self.gil.functions.call_with)(self.raw(), argument.raw(), null_mut::<c_void>()))
        }
    }

    /// Calls it with the arguments of a tuple.
    pub(crate) fn call_with_tuple(self, arguments: Object<'_>) -> Option<Owned> {
        // SAFETY: both objects are alive; a new reference.
        unsafe { self.gil.owned((self.gil.functions.call)(self.raw(), arguments.raw())) }
    }

    /// Calls its method of this name without arguments.
    #[inline]
    pub(crate) fn call_method(self, name: Object<'_>) -> Option<Owned> {
        // SAFETY: both objects are alive; null ends the arguments; a new reference.
        unsafe {
            self.gil.owned((self.gil.functions.call_method)(self.raw(), name.raw(), null_mut::<c_void>()))
        }
    }

    /// Returns true if it is true; `false` also when that raised.
    #[inline]
    pub(crate) fn is_true(self) -> bool {
        // SAFETY: the object is alive.
        unsafe { (self.gil.functions.is_true)(self.raw()) == 1 }
    }

    /// `str(self)`.
    pub(crate) fn string(self) -> Option<Owned> {
        // SAFETY: the object is alive; a new reference.
        unsafe { self.gil.owned((self.gil.functions.string_of)(self.raw())) }
    }

    /// The value of an integer; `None`, with an exception, for another object and for one out of range.
    #[inline]
    pub(crate) fn to_size(self) -> Option<usize> {
        // SAFETY: the object is alive.
        let size = unsafe { (self.gil.functions.integer_as_size)(self.raw()) };
        // SAFETY: the GIL is held.
        (size != usize::MAX || unsafe { (self.gil.functions.error_occurred)() }.is_null()).then_some(size)
    }

    /// The characters of a text; `None`, with an exception, for another object.
    pub(crate) fn to_text(self) -> Option<&'a str> {
        let mut length = 0;
        // SAFETY: the object is alive.
        let bytes = unsafe { (self.gil.functions.text_as_utf8)(self.raw(), &raw mut length) };
        if bytes.is_null() {
            return None;
        }
        // SAFETY: Python keeps the UTF-8 form of a text with the object, which lives for `'a`.
        std::str::from_utf8(unsafe { std::slice::from_raw_parts(bytes, length as usize) }).ok()
    }

    /// The length of a list; 0 for another object.
    pub(crate) fn list_size(self) -> usize {
        // SAFETY: the object is alive.
        let size = unsafe { (self.gil.functions.list_size)(self.raw()) };
        usize::try_from(size).unwrap_or_else(|_| {
            self.gil.clear_error();
            0
        })
    }

    /// An item of a list.
    ///
    /// # Safety
    /// Nobody changes the list for `'a`.
    #[inline]
    pub(crate) unsafe fn list_item(self, index: usize) -> Option<Object<'a>> {
        // SAFETY: the object is alive; a borrowed reference, which the list keeps by the contract.
        unsafe { self.gil.borrowed((self.gil.functions.list_item)(self.raw(), index as isize)) }
    }

    /// Appends to a list; `false` when that raised.
    pub(crate) fn append(self, item: Object<'_>) -> bool {
        // SAFETY: both objects are alive.
        unsafe { (self.gil.functions.list_append)(self.raw(), item.raw()) == 0 }
    }

    /// An item of a tuple.
    #[inline]
    pub(crate) fn tuple_item(self, index: usize) -> Option<Object<'a>> {
        // SAFETY: the object is alive; a borrowed reference, which the tuple keeps for as long as it lives.
        unsafe { self.gil.borrowed((self.gil.functions.tuple_item)(self.raw(), index as isize)) }
    }

    /// Sets an item of a dict; `false` when that raised.
    pub(crate) fn set_item(self, key: &CStr, value: Object<'_>) -> bool {
        // SAFETY: both objects are alive, and the key ends in 0.
        unsafe { (self.gil.functions.dict_set)(self.raw(), key.as_ptr(), value.raw()) == 0 }
    }

    /// An item of a dict. `None`, without an exception, when there is none.
    pub(crate) fn item(self, key: &CStr) -> Option<Owned> {
        // SAFETY: the object is alive, and the key ends in 0; a borrowed reference, which becomes one of ours
        // at once.
        unsafe {
            let item = (self.gil.functions.dict_get)(self.raw(), key.as_ptr());
            self.gil.borrowed(item).map(Object::to_owned)
        }
    }

    /// The namespace of a module object, a dict.
    pub(crate) fn module_namespace(self) -> Option<Object<'a>> {
        // SAFETY: the object is alive; a borrowed reference, which the module keeps for as long as it lives.
        unsafe { self.gil.borrowed((self.gil.functions.module_dict)(self.raw())) }
    }
}

/// A reference of ours, released when it is dropped.
pub(crate) struct Owned {
    pointer: NonNull<c_void>,
    gil: Gil,
}

impl Owned {
    /// The object.
    #[inline]
    pub(crate) fn get(&self) -> Object<'_> {
        Object { pointer: self.pointer, gil: self.gil, alive: PhantomData }
    }

    /// Gives the reference to the caller, who releases it or keeps it for ever.
    pub(crate) fn into_raw(self) -> RawObject {
        std::mem::ManuallyDrop::new(self).pointer.as_ptr()
    }
}

impl Drop for Owned {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the reference is ours, and the GIL is held by the contract of `Gil::held`.
        unsafe { (self.gil.functions.dec_ref)(self.pointer.as_ptr()) };
    }
}

/// The arguments that Python passes to a function of ours.
#[derive(Clone, Copy)]
pub(crate) struct Arguments<'a> {
    /// Held during the call.
    pub(crate) gil: Gil,
    objects: &'a [RawObject],
}

impl<'a> Arguments<'a> {
    /// Their number.
    pub(crate) fn len(self) -> usize {
        self.objects.len()
    }

    /// An argument; `None` behind the last one.
    #[inline]
    pub(crate) fn get(self, index: usize) -> Option<Object<'a>> {
        // SAFETY: the caller of the function keeps its arguments alive during the call.
        self.objects.get(index).and_then(|raw| unsafe { self.gil.borrowed(*raw) })
    }

    /// The `id` of an argument; 0 behind the last one.
    #[inline]
    pub(crate) fn id(self, index: usize) -> usize {
        self.get(index).map_or(0, Object::id)
    }

    /// An argument that is a number; 0 for another object.
    #[inline]
    pub(crate) fn size(self, index: usize) -> usize {
        self.get(index).map_or(0, |object| {
            object.to_size().unwrap_or_else(|| {
                self.gil.clear_error();
                0
            })
        })
    }

    /// An argument that is a text; empty for another object.
    pub(crate) fn text(self, index: usize) -> &'a str {
        self.get(index).map_or("", |object| {
            object.to_text().unwrap_or_else(|| {
                self.gil.clear_error();
                ""
            })
        })
    }
}

/// A value that one of our functions returns to Python.
pub(crate) trait IntoPython {
    /// The object; `None` when making it raised.
    fn into_python(self, gil: Gil) -> Option<Owned>;
}

impl IntoPython for () {
    fn into_python(self, gil: Gil) -> Option<Owned> {
        Some(gil.none().to_owned())
    }
}

impl IntoPython for i64 {
    fn into_python(self, gil: Gil) -> Option<Owned> {
        gil.integer(self)
    }
}

impl IntoPython for bool {
    fn into_python(self, gil: Gil) -> Option<Owned> {
        gil.integer(self.into())
    }
}

impl IntoPython for Option<Owned> {
    fn into_python(self, _: Gil) -> Option<Owned> {
        self
    }
}

/// Runs a function that Python calls: [`native_method`] makes the C function around it. When it panics it
/// returns `None` to Python.
///
/// # Safety
/// The calling thread holds the GIL, and `count` objects stand at `arguments`, which live during the call.
pub(crate) unsafe fn answer<R: IntoPython>(
    arguments: *const RawObject,
    count: isize,
    function: impl FnOnce(Arguments<'_>) -> R,
) -> RawObject {
    // SAFETY: by the contract.
    let Some(gil) = (unsafe { Gil::held() }) else { return null_mut() };
    let objects: &[RawObject] = match usize::try_from(count) {
        // SAFETY: by the contract.
        Ok(count) if count > 0 => unsafe { std::slice::from_raw_parts(arguments, count) },
        _ => &[],
    };
    let result = shielded(|| function(Arguments { gil, objects }));
    let result = result.map_or_else(|| ().into_python(gil), |result| result.into_python(gil));
    result.map_or(null_mut(), Owned::into_raw)
}

/// `native_method!("name", function)`: a [`Method`] that calls `function(Arguments<'_>) -> impl IntoPython`.
macro_rules! native_method {
    ($name:literal, $function:path) => {{
        unsafe extern "C" fn native(
            _: $crate::ffi::cpython::RawObject,
            arguments: *const $crate::ffi::cpython::RawObject,
            count: isize,
        ) -> $crate::ffi::cpython::RawObject {
            // SAFETY: Python calls it, with the GIL and `count` arguments.
            unsafe { $crate::ffi::cpython::answer(arguments, count, $function) }
        }
        $crate::ffi::cpython::Method::new($crate::ffi::symbols::c_name(concat!($name, "\0")), native)
    }};
}
pub(crate) use native_method;
