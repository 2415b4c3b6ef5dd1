//! The gradients of parameters, told from C: there is one for each parameter after each backward, and the calls of
//! Python's API that this takes are little more than half of what Python itself needs for them.
//!
//! What is not a plain tensor is left to `hooks.py`.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use rustc_hash::{FxBuildHasher, FxHashSet};

use crate::python::injection::{Object, function_named, integer, symbol, tell};
use crate::runtime::guard::shielded;

/// What is used of Python's API (all of it is in its stable ABI), and the names of what tensors are asked.
struct Python {
    list_size: unsafe extern "C" fn(Object) -> isize,
    list_item: unsafe extern "C" fn(Object, isize) -> Object,
    list_new: unsafe extern "C" fn(isize) -> Object,
    list_append: unsafe extern "C" fn(Object, Object) -> c_int,
    tuple_item: unsafe extern "C" fn(Object, isize) -> Object,
    call: unsafe extern "C" fn(Object, ...) -> Object,
    call_method: unsafe extern "C" fn(Object, Object, ...) -> Object,
    attribute: unsafe extern "C" fn(Object, Object) -> Object,
    kind: unsafe extern "C" fn(Object) -> Object,
    is_true: unsafe extern "C" fn(Object) -> c_int,
    number: unsafe extern "C" fn(Object) -> usize,
    raised: unsafe extern "C" fn() -> Object,
    clear: unsafe extern "C" fn(),
    release: unsafe extern "C" fn(Object),
    none: Object,
    is_leaf: Object,
    grad: Object,
    is_cuda: Object,
    layout: Object,
    storage_offset: Object,
    untyped_storage: Object,
    data_ptr: Object,
}

// SAFETY: functions, and objects that live as long as the process; all are used with the GIL.
unsafe impl Send for Python {}
// SAFETY: as above.
unsafe impl Sync for Python {}

impl Python {
    fn get() -> Option<&'static Python> {
        static FOUND: OnceLock<Option<Python>> = OnceLock::new();
        FOUND.get_or_init(Python::find).as_ref()
    }

    fn find() -> Option<Python> {
        type Intern = unsafe extern "C" fn(*const c_char) -> Object;
        // SAFETY: the type in Python's headers.
        let intern: Intern = unsafe { function_named(c"PyUnicode_InternFromString")? };
        let named = |name: &CStr| {
            // SAFETY: a text that ends in 0; the GIL is held.
            Some(unsafe { intern(name.as_ptr()) }).filter(|object| !object.is_null())
        };
        // SAFETY: the types in Python's headers.
        unsafe {
            Some(Python {
                list_size: function_named(c"PyList_Size")?,
                list_item: function_named(c"PyList_GetItem")?,
                list_new: function_named(c"PyList_New")?,
                list_append: function_named(c"PyList_Append")?,
                tuple_item: function_named(c"PyTuple_GetItem")?,
                call: function_named(c"PyObject_CallFunctionObjArgs")?,
                call_method: function_named(c"PyObject_CallMethodObjArgs")?,
                attribute: function_named(c"PyObject_GetAttr")?,
                kind: function_named(c"PyObject_Type")?,
                is_true: function_named(c"PyObject_IsTrue")?,
                number: function_named(c"PyLong_AsSize_t")?,
                raised: function_named(c"PyErr_Occurred")?,
                clear: function_named(c"PyErr_Clear")?,
                release: function_named(c"Py_DecRef")?,
                none: Some(symbol(c"_Py_NoneStruct")).filter(|none| !none.is_null())?,
                is_leaf: named(c"is_leaf")?,
                grad: named(c"grad")?,
                is_cuda: named(c"is_cuda")?,
                layout: named(c"layout")?,
                storage_offset: named(c"storage_offset")?,
                untyped_storage: named(c"untyped_storage")?,
                data_ptr: named(c"data_ptr")?,
            })
        }
    }

    /// A new reference; `None` when something was raised.
    fn own(&self, object: Object) -> Option<Owned<'_>> {
        (!object.is_null()).then_some(Owned { python: self, object })
    }
}

/// A reference of ours.
struct Owned<'a> {
    python: &'a Python,
    object: Object,
}

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        // SAFETY: the reference is ours, and the GIL is held.
        unsafe { (self.python.release)(self.object) };
    }
}

impl Owned<'_> {
    fn attribute(&self, name: Object) -> Option<Owned<'_>> {
        // SAFETY: both objects are alive.
        self.python.own(unsafe { (self.python.attribute)(self.object, name) })
    }

    fn ask(&self, method: Object) -> Option<Owned<'_>> {
        // SAFETY: both objects are alive; null ends the arguments.
        self.python.own(unsafe { (self.python.call_method)(self.object, method, std::ptr::null::<c_void>()) })
    }

    fn is_true(&self) -> bool {
        // SAFETY: the object is alive.
        unsafe { (self.python.is_true)(self.object) == 1 }
    }

    fn number(&self) -> Option<usize> {
        // SAFETY: the object is alive.
        let number = unsafe { (self.python.number)(self.object) };
        // SAFETY: takes nothing.
        (number != usize::MAX || unsafe { (self.python.raised)() }.is_null()).then_some(number)
    }
}

/// What there is to do for a parameter.
enum Found {
    /// Its gradient is on no GPU, or it has none.
    Nothing,
    /// The gradient's storage begins here.
    At(usize),
}

/// The gradient of the parameter that a weak reference is of. `None`: `hooks.py` looks at it.
fn gradient(python: &Python, reference: Object, tensor: Object, strided: Object) -> Option<Found> {
    // SAFETY: a weak reference, called without arguments.
    let parameter = python.own(unsafe { (python.call)(reference, std::ptr::null::<c_void>()) })?;
    if parameter.object == python.none {
        return None;
    }
    // Asking a tensor that is no leaf warns.
    if !parameter.attribute(python.is_leaf)?.is_true() {
        return Some(Found::Nothing);
    }
    let gradient = parameter.attribute(python.grad)?;
    if gradient.object == python.none {
        return Some(Found::Nothing);
    }
    // SAFETY: the object is alive.
    let kind = python.own(unsafe { (python.kind)(gradient.object) })?;
    if kind.object != tensor || gradient.attribute(python.layout)?.object != strided {
        return None;
    }
    if !gradient.attribute(python.is_cuda)?.is_true() {
        return Some(Found::Nothing);
    }
    if gradient.ask(python.storage_offset)?.number()? == 0 {
        return gradient.ask(python.data_ptr)?.number().map(Found::At);
    }
    gradient.ask(python.untyped_storage)?.ask(python.data_ptr)?.number().map(Found::At)
}

/// `gradients(owners, Tensor, strided, category) -> list`: tells of the gradients of the parameters of `owners`, which
/// are pairs of anything and what `hooks.py` has in its table of that name. Of gradients that share a storage, the
/// first has it. Gives the indices of those that `hooks.py` has to look at.
///
/// # Safety
/// Called by Python, which holds the GIL and passes `count` arguments.
pub(crate) unsafe extern "C" fn gradients(_: Object, args: *const Object, count: isize) -> Object {
    let Some(python) = Python::get().filter(|_| count == 4) else { return std::ptr::null_mut() };
    // SAFETY: by the contract, four arguments are there.
    let [owners, tensor, strided, category] = *unsafe { &*args.cast::<[Object; 4]>() };
    // SAFETY: no arguments but the size.
    let left = unsafe { (python.list_new)(0) };
    if left.is_null() {
        return left;
    }
    shielded(|| {
        // SAFETY: the list is alive.
        let size = unsafe { (python.list_size)(owners) }.max(0);
        let mut seen = FxHashSet::with_capacity_and_hasher(size as usize, FxBuildHasher);
        // SAFETY: objects that are alive: `hooks.py` made the list and its pairs for this call, whose second has five
        // items, and nobody changes them meanwhile.
        unsafe {
            let category = (python.number)(category);
            for index in 0..size {
                let owner = (python.tuple_item)((python.list_item)(owners, index), 1);
                let item = |index| (python.tuple_item)(owner, index);
                match gradient(python, item(0), tensor, strided) {
                    Some(Found::Nothing | Found::At(0)) => {}
                    Some(Found::At(pointer)) => {
                        if seen.insert(pointer) {
                            tell(pointer, category, (python.number)(item(1)), (python.number)(item(4)));
                        }
                    }
                    None => {
                        (python.clear)();
                        if let Some(index) = python.own(integer(index as i64)) {
                            (python.list_append)(left, index.object);
                        }
                    }
                }
            }
        }
    });
    left
}
