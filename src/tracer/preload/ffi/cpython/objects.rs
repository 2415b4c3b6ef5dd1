//! References to Python objects, and the functions on them.

use std::ffi::{CStr, c_int, c_void};
use std::marker::PhantomData;
use std::ptr::{NonNull, null_mut};

use super::{Gil, RawObject, Traverse};

/// A borrowed reference to an object that lives for `'a`.
#[derive(Clone, Copy)]
pub(crate) struct Object<'a> {
    pub(super) pointer: NonNull<c_void>,
    pub(super) gil: Gil,
    pub(super) alive: PhantomData<&'a ()>,
}

impl<'a> Object<'a> {
    /// Returns the raw pointer, for C functions.
    #[inline]
    pub(crate) fn raw(self) -> RawObject {
        self.pointer.as_ptr()
    }

    /// Returns the `id` of the object in Python, which is its address.
    #[inline]
    pub(crate) fn id(self) -> usize {
        self.pointer.as_ptr() as usize
    }

    /// Returns true if both references are to the same object.
    #[inline]
    pub(crate) fn is(self, other: Object<'_>) -> bool {
        self.pointer == other.pointer
    }

    /// Returns true if the object is Python's `None`.
    #[inline]
    pub(crate) fn is_none(self) -> bool {
        self.is(self.gil.none())
    }

    /// Returns an owned reference to the same object.
    pub(crate) fn to_owned(self) -> Owned {
        // SAFETY: the object is alive.
        unsafe { (self.gil.functions.inc_ref)(self.raw()) };
        Owned { pointer: self.pointer, gil: self.gil }
    }

    /// Returns the type of the object.
    pub(crate) fn kind(self) -> Option<Owned> {
        // SAFETY: the object is alive; the call returns a new reference.
        unsafe { self.gil.owned((self.gil.functions.type_of)(self.raw())) }
    }

    /// Returns true if this type is `other` or a subtype of it, by its `mro`. Runs no code of the program.
    #[inline]
    pub(crate) fn is_subtype_of(self, other: Object<'_>) -> bool {
        // SAFETY: the caller passes types, which are alive.
        unsafe { (self.gil.functions.is_subtype)(self.raw(), other.raw()) != 0 }
    }

    /// Returns the type's `tp_traverse` function, which visits the objects that an instance refers to.
    /// Returns `None` if the type has no such function and, before Python 3.10, for a built-in type, whose
    /// slots cannot be looked up there.
    pub(crate) fn traverse(self, gil: Gil) -> Option<Traverse> {
        const PY_TP_TRAVERSE: c_int = 71;
        let slot_of_type = gil.functions.slot_of_type?;
        // SAFETY: the caller passes a type, which is alive.
        let slot = unsafe { slot_of_type(self.raw(), PY_TP_TRAVERSE) };
        if slot.is_null() {
            gil.clear_error();
            return None;
        }
        // SAFETY: this slot has this type in Python's headers.
        Some(unsafe { std::mem::transmute::<*mut c_void, Traverse>(slot) })
    }

    /// Returns the attribute `name`.
    #[inline]
    pub(crate) fn attribute(self, name: Object<'_>) -> Option<Owned> {
        // SAFETY: both objects are alive; the call returns a new reference.
        unsafe { self.gil.owned((self.gil.functions.attribute)(self.raw(), name.raw())) }
    }

    /// Calls the object without arguments.
    #[inline]
    pub(crate) fn call(self) -> Option<Owned> {
        // SAFETY: the object is alive; null ends the arguments; the call returns a new reference.
        unsafe { self.gil.owned((self.gil.functions.call_with)(self.raw(), null_mut::<c_void>())) }
    }

    /// Calls the object with one argument.
    pub(crate) fn call_with(self, argument: Object<'_>) -> Option<Owned> {
        // SAFETY: both objects are alive; null ends the arguments; the call returns a new reference.
        unsafe {
            self.gil.owned((self.gil.functions.call_with)(self.raw(), argument.raw(), null_mut::<c_void>()))
        }
    }

    /// Calls the object with the arguments in a tuple.
    pub(crate) fn call_with_tuple(self, arguments: Object<'_>) -> Option<Owned> {
        // SAFETY: both objects are alive; the call returns a new reference.
        unsafe { self.gil.owned((self.gil.functions.call)(self.raw(), arguments.raw())) }
    }

    /// Calls the method `name` of the object without arguments.
    #[inline]
    pub(crate) fn call_method(self, name: Object<'_>) -> Option<Owned> {
        // SAFETY: both objects are alive; null ends the arguments; the call returns a new reference.
        unsafe {
            self.gil.owned((self.gil.functions.call_method)(self.raw(), name.raw(), null_mut::<c_void>()))
        }
    }

    /// Returns the truth value of the object. Returns false, with the exception set, if computing the value
    /// raised one.
    #[inline]
    pub(crate) fn is_true(self) -> bool {
        // SAFETY: the object is alive.
        unsafe { (self.gil.functions.is_true)(self.raw()) == 1 }
    }

    /// Returns `str(self)`.
    pub(crate) fn string(self) -> Option<Owned> {
        // SAFETY: the object is alive; the call returns a new reference.
        unsafe { self.gil.owned((self.gil.functions.string_of)(self.raw())) }
    }

    /// Returns the value of an integer. Returns `None`, with an exception, if the object is not an integer or
    /// its value is out of range.
    #[inline]
    pub(crate) fn to_size(self) -> Option<usize> {
        // SAFETY: the object is alive.
        let size = unsafe { (self.gil.functions.integer_as_size)(self.raw()) };
        // SAFETY: the GIL is held.
        (size != usize::MAX || unsafe { (self.gil.functions.error_occurred)() }.is_null()).then_some(size)
    }

    /// Returns the characters of a `str`. Returns `None`, with an exception, if the object is not a `str`.
    pub(crate) fn to_text(self) -> Option<&'a str> {
        let mut length = 0;
        // SAFETY: the object is alive.
        let bytes = unsafe { (self.gil.functions.text_as_utf8)(self.raw(), &raw mut length) };
        if bytes.is_null() {
            return None;
        }
        // SAFETY: Python keeps the UTF-8 form of a `str` with the object, which lives for `'a`.
        std::str::from_utf8(unsafe { std::slice::from_raw_parts(bytes, length as usize) }).ok()
    }

    /// Returns the length of a list, or 0 if the object is not a list.
    pub(crate) fn list_size(self) -> usize {
        // SAFETY: the object is alive.
        let size = unsafe { (self.gil.functions.list_size)(self.raw()) };
        usize::try_from(size).unwrap_or_else(|_| {
            self.gil.clear_error();
            0
        })
    }

    /// Returns an item of a list.
    ///
    /// # Safety
    /// Nobody changes the list for `'a`.
    #[inline]
    pub(crate) unsafe fn list_item(self, index: usize) -> Option<Object<'a>> {
        // SAFETY: the object is alive; the call returns a borrowed reference, which the list keeps by the
        // contract.
        unsafe { self.gil.borrowed((self.gil.functions.list_item)(self.raw(), index as isize)) }
    }

    /// Appends `item` to a list. Returns false if that raised an exception.
    pub(crate) fn append(self, item: Object<'_>) -> bool {
        // SAFETY: both objects are alive.
        unsafe { (self.gil.functions.list_append)(self.raw(), item.raw()) == 0 }
    }

    /// Returns an item of a tuple, or `None`, with an exception, if `index` is past the end.
    #[inline]
    pub(crate) fn tuple_item(self, index: usize) -> Option<Object<'a>> {
        // SAFETY: the object is alive; the call returns a borrowed reference, which the tuple keeps for as
        // long as it lives.
        unsafe { self.gil.borrowed((self.gil.functions.tuple_item)(self.raw(), index as isize)) }
    }

    /// Sets an item of a dict. Returns false if that raised an exception.
    pub(crate) fn set_item(self, key: &CStr, value: Object<'_>) -> bool {
        // SAFETY: both objects are alive, and the key ends in 0.
        unsafe { (self.gil.functions.dict_set)(self.raw(), key.as_ptr(), value.raw()) == 0 }
    }

    /// Returns an item of a dict, or `None`, without an exception, if the dict does not have it.
    pub(crate) fn item(self, key: &CStr) -> Option<Owned> {
        // SAFETY: the object is alive, and the key ends in 0. The borrowed reference becomes an owned one at
        // once.
        unsafe {
            let item = (self.gil.functions.dict_get)(self.raw(), key.as_ptr());
            self.gil.borrowed(item).map(Object::to_owned)
        }
    }

    /// Returns the namespace of a module object, a dict.
    pub(crate) fn module_namespace(self) -> Option<Object<'a>> {
        // SAFETY: the object is alive; the call returns a borrowed reference, which the module keeps for as
        // long as it lives.
        unsafe { self.gil.borrowed((self.gil.functions.module_dict)(self.raw())) }
    }
}

/// An owned reference, released when it is dropped.
pub(crate) struct Owned {
    pub(super) pointer: NonNull<c_void>,
    pub(super) gil: Gil,
}

impl Owned {
    /// Returns the object.
    #[inline]
    pub(crate) fn get(&self) -> Object<'_> {
        Object { pointer: self.pointer, gil: self.gil, alive: PhantomData }
    }

    /// Transfers the reference to the caller, who releases it or keeps it forever.
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
