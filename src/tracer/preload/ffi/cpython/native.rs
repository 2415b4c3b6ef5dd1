//! Rust functions that Python calls.

use std::ffi::{CStr, c_char, c_int};
use std::ptr::null_mut;

use super::{Gil, Object, Owned, RawObject};
use crate::guard::shielded;

/// `PyCFunctionFast`, the C type of a native function. The parameters are `self`, the arguments, and the
/// number of arguments.
pub(crate) type FastFunction = unsafe extern "C-unwind" fn(RawObject, *const RawObject, isize) -> RawObject;

/// `PyMethodDef`: the name and the function of a method.
#[repr(C)]
pub(crate) struct Method {
    name: *const c_char,
    function: FastFunction,
    flags: c_int,
    doc: *const c_char,
}

// SAFETY: the pointers come from literals, which never change.
unsafe impl Sync for Method {}

impl Method {
    /// Creates a method that takes positional arguments. [`native_method`] creates a method from a Rust
    /// function.
    pub(crate) const fn new(name: &'static CStr, function: FastFunction) -> Method {
        const METH_FASTCALL: c_int = 0x80;
        Method { name: name.as_ptr(), function, flags: METH_FASTCALL, doc: std::ptr::null() }
    }

    /// Returns the method's name in Python.
    pub(crate) fn name(&self) -> &'static CStr {
        // SAFETY: `new` stored the address of this C string, which is static.
        unsafe { CStr::from_ptr(self.name) }
    }
}

/// The arguments of a call from Python.
#[derive(Clone, Copy)]
pub(crate) struct Arguments<'a> {
    /// The GIL, held during the call.
    pub(crate) gil: Gil,
    objects: &'a [RawObject],
}

impl<'a> Arguments<'a> {
    /// Returns the number of arguments.
    pub(crate) fn len(self) -> usize {
        self.objects.len()
    }

    /// Returns an argument, or `None` if `index` is past the last argument.
    #[inline]
    pub(crate) fn get(self, index: usize) -> Option<Object<'a>> {
        // SAFETY: the caller of the function keeps its arguments alive during the call.
        self.objects.get(index).and_then(|raw| unsafe { self.gil.borrowed(*raw) })
    }

    /// Returns the `id` of an argument, or 0 if `index` is past the last argument.
    #[inline]
    pub(crate) fn id(self, index: usize) -> usize {
        self.get(index).map_or(0, Object::id)
    }

    /// Returns an argument as an unsigned integer, or 0 if it is missing, is not an integer, or does not fit.
    #[inline]
    pub(crate) fn size(self, index: usize) -> usize {
        self.get(index).map_or(0, |object| {
            object.to_size().unwrap_or_else(|| {
                self.gil.clear_error();
                0
            })
        })
    }

    /// Returns an argument as text, or an empty string if it is missing or is not a `str`.
    pub(crate) fn text(self, index: usize) -> &'a str {
        self.get(index).map_or("", |object| {
            object.to_text().unwrap_or_else(|| {
                self.gil.clear_error();
                ""
            })
        })
    }
}

/// A value that a native function returns to Python.
pub(crate) trait IntoPython {
    /// Converts the value to an object. Returns `None` if that raised an exception.
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

/// Runs a function that Python calls; [`native_method`] generates the C function around it. If the function
/// panics, Python gets `None`.
///
/// # Safety
/// The calling thread holds the GIL. `arguments` points to `count` objects that live during the call.
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

/// `native_method!("name", function)` creates a [`Method`] that calls
/// `function(Arguments<'_>) -> impl IntoPython`.
macro_rules! native_method {
    ($name:literal, $function:path) => {{
        unsafe extern "C-unwind" fn native(
            _: $crate::ffi::cpython::RawObject,
            arguments: *const $crate::ffi::cpython::RawObject,
            count: isize,
        ) -> $crate::ffi::cpython::RawObject {
            // SAFETY: Python calls this function with the GIL held and with `count` arguments.
            unsafe { $crate::ffi::cpython::answer(arguments, count, $function) }
        }
        $crate::ffi::cpython::Method::new($crate::ffi::symbols::c_name(concat!($name, "\0")), native)
    }};
}
pub(crate) use native_method;
