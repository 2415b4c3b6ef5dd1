//! The search for the objects that refer to given objects, among all objects that the garbage collector
//! tracks.
//!
//! Each search asks every object for its references, as the collector itself does: no code of the program
//! runs, and the GIL is held throughout.

use std::ffi::{c_int, c_void};
use std::time::{Duration, Instant};

use rustc_hash::{FxHashMap, FxHashSet};

use crate::ffi::cpython::{Arguments, Gil, Object, Owned, RawObject, Traverse};

/// The number of objects between two checks of the clock.
const STRIDE: u32 = 4096;
/// The maximum number of referrers returned per object. Constants and types have millions of referrers.
const MAX_REFERRERS: u32 = 64;

struct ReferrerSearch {
    gil: Gil,
    /// For each type, by address: the function that visits the references of its objects, if there is one.
    visits: FxHashMap<usize, Option<Traverse>>,
    /// For each target, by address: the number of referrers found.
    targets: FxHashMap<usize, u32>,
    excluded: FxHashSet<usize>,
    found: Vec<(Owned, usize)>,
    /// The ids of the targets to which the object in [`ReferrerSearch::look_at`] refers.
    of_object: Vec<usize>,
    deadline: Instant,
    seen: u32,
    is_late: bool,
}

impl ReferrerSearch {
    /// Collects the references of an object to the targets. Returns false if the deadline has passed.
    fn look_at(&mut self, object: Object<'_>) -> bool {
        self.seen += 1;
        if self.seen.is_multiple_of(STRIDE) && Instant::now() > self.deadline {
            self.is_late = true;
            return false;
        }
        let Some(kind) = object.kind() else { return true };
        let gil = self.gil;
        let visit = *self.visits.entry(kind.get().id()).or_insert_with(|| kind.get().traverse(gil));
        let (Some(visit), false) = (visit, self.excluded.contains(&object.id())) else { return true };
        // SAFETY: this is the type's own function, called for one of its objects with the GIL held. `refers`
        // changes only the search.
        unsafe { visit(object.raw(), refers, (&raw mut *self).cast()) };
        for target in std::mem::take(&mut self.of_object) {
            self.found.push((object.to_owned(), target));
        }
        true
    }
}

unsafe extern "C" fn refers(object: RawObject, search: *mut c_void) -> c_int {
    // SAFETY: `look_at` passes its search, which no other code uses during the visit.
    let search = unsafe { &mut *search.cast::<ReferrerSearch>() };
    let id = object as usize;
    if let Some(count) = search.targets.get_mut(&id)
        && *count < MAX_REFERRERS
    {
        *count += 1;
        search.of_object.push(id);
    }
    0
}

unsafe extern "C" fn visit(object: RawObject, search: *mut c_void) -> c_int {
    // SAFETY: this is the search of `find_referrers`, which no other code uses during the visits.
    let search = unsafe { &mut *search.cast::<ReferrerSearch>() };
    // SAFETY: Python visits live objects.
    let goes_on = unsafe { search.gil.borrowed(object) }.is_none_or(|object| search.look_at(object));
    goes_on.into()
}

/// `find_referrers(get_objects, targets, excluded, milliseconds) -> list | None`: returns the objects that
/// refer to an object whose `id` is in the list `targets`, each followed by that id. Returns `None` if the
/// search takes longer than `milliseconds`. Objects whose `id` is in the list `excluded` are skipped.
/// `get_objects` is `gc.get_objects`, which is used before Python 3.12.
pub(crate) fn find_referrers(arguments: Arguments<'_>) -> Option<Owned> {
    let gil = arguments.gil;
    let ids = |index: usize| -> Vec<usize> {
        let Some(list) = arguments.get(index) else { return Vec::new() };
        // SAFETY: the tracer made the list, and no other code has it.
        let item = |place| unsafe { list.list_item(place) }.and_then(Object::to_size);
        (0..list.list_size()).filter_map(item).collect()
    };
    let mut search = ReferrerSearch {
        gil,
        visits: FxHashMap::default(),
        targets: ids(1).into_iter().map(|id| (id, 0)).collect(),
        excluded: ids(2).into_iter().collect(),
        found: Vec::new(),
        of_object: Vec::new(),
        deadline: Instant::now() + Duration::from_millis(arguments.size(3) as u64),
        seen: 0,
        is_late: false,
    };
    if let Some(visit_objects) = gil.functions().visit_objects {
        // SAFETY: the GIL is held, and the search outlives the call. `visit` neither creates nor frees Python
        // objects.
        unsafe { visit_objects(visit, (&raw mut search).cast()) };
    } else {
        let objects = arguments.get(0)?.call()?;
        let objects = objects.get();
        // SAFETY: no other code has the list.
        let item = |index| unsafe { objects.list_item(index) };
        (0..objects.list_size()).filter_map(item).all(|object| search.look_at(object));
    }
    if search.is_late {
        return Some(gil.none().to_owned());
    }
    let list = gil.new_list()?;
    for (object, target) in &search.found {
        let target = gil.integer(*target as i64)?;
        if !(list.get().append(object.get()) && list.get().append(target.get())) {
            return None;
        }
    }
    Some(list)
}
