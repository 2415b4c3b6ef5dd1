//! Records the tags of gradients. Each backward needs a tag for each parameter. Calling Python's API from
//! here takes little more than half the time of the same code in Python.
//!
//! Gradients that are not plain tensors are left to the tracer.

use std::sync::OnceLock;

use memtrace_record::intern::TextId;
use memtrace_trace::{Category, Claim};
use rustc_hash::{FxBuildHasher, FxHashMap};

use crate::ffi::cpython::{Arguments, Gil, Object, Owned, RawObject};
use crate::python::tags::{self, Tag};
use crate::runtime::session;

/// Names of attributes and methods of tensors, as Python strings.
struct Names {
    is_leaf: RawObject,
    grad: RawObject,
    is_cuda: RawObject,
    is_cpu: RawObject,
    layout: RawObject,
    dtype: RawObject,
    storage_offset: RawObject,
    untyped_storage: RawObject,
    data_ptr: RawObject,
}

// SAFETY: the objects live as long as the process, and are used only with the GIL.
unsafe impl Send for Names {}
// SAFETY: as above.
unsafe impl Sync for Names {}

impl Names {
    fn get(gil: Gil) -> Option<&'static Names> {
        static NAMES: OnceLock<Names> = OnceLock::new();
        if let Some(names) = NAMES.get() {
            return Some(names);
        }
        let text = |name| gil.text(name).map(Owned::into_raw);
        let names = Names {
            is_leaf: text(c"is_leaf")?,
            grad: text(c"grad")?,
            is_cuda: text(c"is_cuda")?,
            is_cpu: text(c"is_cpu")?,
            layout: text(c"layout")?,
            dtype: text(c"dtype")?,
            storage_offset: text(c"storage_offset")?,
            untyped_storage: text(c"untyped_storage")?,
            data_ptr: text(c"data_ptr")?,
        };
        Some(NAMES.get_or_init(|| names))
    }
}

/// A tensor, with the values that are needed to read its attributes.
struct Tensor<'a> {
    object: Object<'a>,
    names: &'static Names,
    gil: Gil,
}

impl Tensor<'_> {
    #[inline]
    fn attribute(&self, name: RawObject) -> Option<Owned> {
        // SAFETY: `name` is one of `Names`, which are never released.
        self.object.attribute(unsafe { self.gil.borrowed(name) }?)
    }

    #[inline]
    fn number(&self, object: Object<'_>, method: RawObject) -> Option<usize> {
        // SAFETY: `method` is one of `Names`, which are never released.
        object.call_method(unsafe { self.gil.borrowed(method) }?)?.get().to_size()
    }

    /// Returns the address of the start of the tensor's storage.
    fn storage_pointer(&self) -> Option<usize> {
        if self.number(self.object, self.names.storage_offset)? == 0 {
            return self.number(self.object, self.names.data_ptr);
        }
        // SAFETY: the name is one of `Names`, which are never released.
        let storage = self.object.call_method(unsafe { self.gil.borrowed(self.names.untyped_storage) }?)?;
        self.number(storage.get(), self.names.data_ptr)
    }
}

/// The location of a parameter's gradient.
enum Gradient {
    /// The parameter has no gradient in traced memory, or is not a leaf.
    None,
    /// The storage of the gradient begins at this address.
    At(usize),
}

/// Returns the gradient of a parameter, which `reference` refers to weakly. Returns `None` if the tracer must
/// handle the gradient: the parameter is gone, an exception was raised, or the gradient is not a plain
/// tensor. A plain tensor has the class `plain` (`torch.Tensor`) and the layout `strided` (`torch.strided`).
fn gradient(
    gil: Gil,
    names: &'static Names,
    reference: Object<'_>,
    plain: Object<'_>,
    strided: Object<'_>,
) -> Option<Gradient> {
    let parameter = reference.call()?;
    if parameter.get().is_none() {
        return None;
    }
    let parameter = Tensor { object: parameter.get(), names, gil };
    // torch warns when the gradient of a non-leaf tensor is read.
    if !parameter.attribute(names.is_leaf)?.get().is_true() {
        return Some(Gradient::None);
    }
    let gradient = parameter.attribute(names.grad)?;
    if gradient.get().is_none() {
        return Some(Gradient::None);
    }
    let gradient = Tensor { object: gradient.get(), names, gil };
    // The tag has the type of the parameter. A gradient of another type (`grad_dtype`) is left to the tracer.
    let dtype = gradient.attribute(names.dtype)?;
    let is_plain =
        gradient.object.kind()?.get().is(plain) && dtype.get().is(parameter.attribute(names.dtype)?.get());
    if !is_plain || !gradient.attribute(names.layout)?.get().is(strided) {
        return None;
    }
    let is_traced = gradient.attribute(names.is_cuda)?.get().is_true()
        || session::session().is_some_and(|session| session.settings.host_tensors)
            && gradient.attribute(names.is_cpu)?.get().is_true();
    if !is_traced {
        return Some(Gradient::None);
    }
    gradient.storage_pointer().map(Gradient::At)
}

/// `record_gradients(owners, Tensor, strided, category) -> list`: tags the gradients of the parameters in
/// `owners`, a list of pairs whose second item is an `Owner` (a weak reference, the ids of the path, the name
/// and the form, and more). A gradient has the form of its parameter. Returns the indices of the gradients that are
/// left to the tracer. These include gradients that share a storage, because the tag of such a storage names the
/// module that contains all of them.
pub(crate) fn record_gradients(arguments: Arguments<'_>) -> Option<Owned> {
    let gil = arguments.gil;
    let (owners, plain, strided) = (arguments.get(0)?, arguments.get(1)?, arguments.get(2)?);
    let category = Category::from_id(arguments.size(3) as u64)?;
    let names = Names::get(gil)?;
    let left = gil.new_list()?;
    let size = owners.list_size();
    // For each storage, by address: the index in `found` of the last gradient in the storage.
    let mut last: FxHashMap<usize, usize> = FxHashMap::with_capacity_and_hasher(size, FxBuildHasher);
    let mut found: Vec<Found> = Vec::with_capacity(size);
    for index in 0..size {
        // SAFETY: the tracer made the list for this call, and no other code has it.
        let owner = unsafe { owners.list_item(index) }?.tuple_item(1)?;
        match gradient(gil, names, owner.tuple_item(0)?, plain, strided) {
            Some(Gradient::None | Gradient::At(0)) => {}
            Some(Gradient::At(pointer)) => {
                let text = |index| owner.tuple_item(index)?.to_size().map(|id| id as TextId);
                let [path, name, form] = [text(1)?, text(2)?, text(3)?];
                let tag = Tag { pointer, category, path, name, form, claim: Claim::Strong };
                let before = last.insert(pointer, found.len());
                if let Some(before) = before.and_then(|before| found.get_mut(before)) {
                    before.is_shared = true;
                }
                found.push(Found { index, tag, is_shared: before.is_some() });
            }
            None => {
                gil.clear_error();
                leave(gil, &left, index);
            }
        }
    }
    for Found { index, tag, is_shared } in found {
        if is_shared { leave(gil, &left, index) } else { tags::record(tag) }
    }
    Some(left)
}

/// A gradient whose storage is known.
struct Found {
    index: usize,
    tag: Tag,
    /// True if another gradient is in the same storage.
    is_shared: bool,
}

/// Adds a gradient to `left`, the list of gradients that the tracer handles.
fn leave(gil: Gil, left: &Owned, index: usize) {
    if let Some(index) = gil.integer(index as i64) {
        left.get().append(index.get());
    }
}
