//! The search for live objects of given types, among all objects that the garbage collector tracks.

use std::ffi::{c_int, c_void};

use rustc_hash::FxHashMap;

use crate::ffi::cpython::{Arguments, Gil, Object, Owned, RawObject};

/// The state of one search.
struct ObjectSearch<'a> {
    gil: Gil,
    kinds: &'a [Object<'a>],
    /// For each type seen so far, by address: whether the type is one of `kinds` or a subtype of one.
    is_wanted: FxHashMap<usize, bool>,
    found: Vec<Owned>,
}

impl ObjectSearch<'_> {
    /// Adds an object if its type is wanted. Only the type is read, because an attribute of an arbitrary
    /// object may run code of the program.
    fn look_at(&mut self, object: Object<'_>) {
        let Some(kind) = object.kind() else { return };
        let is_below = || self.kinds.iter().any(|wanted| kind.get().is_subtype_of(*wanted));
        if *self.is_wanted.entry(kind.get().id()).or_insert_with(is_below) {
            self.found.push(object.to_owned());
        }
    }
}

/// `find_objects(get_objects, kind, ...) -> list`: returns the live objects of these types. `get_objects` is
/// `gc.get_objects`, which is used before Python 3.12.
pub(crate) fn find_objects(arguments: Arguments<'_>) -> Option<Owned> {
    let gil = arguments.gil;
    let kinds: Vec<Object<'_>> = (1..arguments.len()).filter_map(|index| arguments.get(index)).collect();
    let mut search = ObjectSearch { gil, kinds: &kinds, is_wanted: FxHashMap::default(), found: Vec::new() };
    if let Some(visit_objects) = gil.functions().visit_objects {
        // SAFETY: the GIL is held, and the search outlives the call. `visit` neither creates nor frees Python
        // objects.
        unsafe { visit_objects(visit, (&raw mut search).cast()) };
    } else {
        let objects = arguments.get(0)?.call()?;
        let objects = objects.get();
        // SAFETY: no other code has the list.
        let item = |index| unsafe { objects.list_item(index) };
        (0..objects.list_size()).filter_map(item).for_each(|object| search.look_at(object));
    }
    let list = gil.new_list()?;
    search.found.iter().all(|object| list.get().append(object.get())).then_some(list)
}

unsafe extern "C" fn visit(object: RawObject, search: *mut c_void) -> c_int {
    // SAFETY: this is the search of `find_objects`, which no other code uses during the visits.
    let search = unsafe { &mut *search.cast::<ObjectSearch<'_>>() };
    // SAFETY: Python visits live objects.
    if let Some(object) = unsafe { search.gil.borrowed(object) } {
        search.look_at(object);
    }
    1
}
