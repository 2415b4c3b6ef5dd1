//! The functions that we put into NVTX's tables. Each also calls the function of the earlier tool, if there
//! is such a tool, and returns that tool's result.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use memtrace_trace::Api;

use super::names::{self, Attributes};
use super::shared::{self, DEFAULT_DOMAIN, NO_TRACKING};
use crate::attribution::ranges;
use crate::guard::shielded;

/// A function pointer in one of NVTX's tables.
pub(super) type Slot = *mut c_void;

/// The number of slots in our tables of functions. In NVTX 3, the modules that we fill have at most this many
/// slots, including the unused slot 0.
pub(super) const SLOTS: usize = 16;

/// A module of NVTX: for each slot, our function (`None` if we do not fill the slot) and the earlier tool's
/// function (null if there is no such function).
pub(super) struct Module {
    pub(super) id: c_uint,
    pub(super) ours: [Option<Slot>; SLOTS],
    pub(super) next: &'static [AtomicPtr<c_void>; SLOTS],
}

static NEXT_CORE: [AtomicPtr<c_void>; SLOTS] = [const { AtomicPtr::new(null_mut()) }; SLOTS];
static NEXT_CORE2: [AtomicPtr<c_void>; SLOTS] = [const { AtomicPtr::new(null_mut()) }; SLOTS];

/// Returns the modules `NVTX_CB_MODULE_CORE` and `NVTX_CB_MODULE_CORE2`. nvtxTypes.h defines the slots.
pub(super) fn modules() -> [Module; 2] {
    let mut core = [None; SLOTS];
    core[1] = Some(mark_ex as Slot);
    core[2] = Some(mark_a as Slot);
    core[3] = Some(mark_w as Slot);
    core[4] = Some(start_ex as Slot);
    core[5] = Some(start_a as Slot);
    core[6] = Some(start_w as Slot);
    core[7] = Some(end as Slot);
    core[8] = Some(push_ex as Slot);
    core[9] = Some(push_a as Slot);
    core[10] = Some(push_w as Slot);
    core[11] = Some(pop as Slot);
    let mut core2 = [None; SLOTS];
    core2[1] = Some(domain_mark as Slot);
    core2[2] = Some(domain_start as Slot);
    core2[3] = Some(domain_end as Slot);
    core2[4] = Some(domain_push as Slot);
    core2[5] = Some(domain_pop as Slot);
    core2[8] = Some(domain_name_category as Slot);
    core2[9] = Some(domain_name_category_w as Slot);
    core2[10] = Some(domain_register as Slot);
    core2[11] = Some(domain_register_w as Slot);
    core2[12] = Some(domain_create as Slot);
    core2[13] = Some(domain_create_w as Slot);
    [Module { id: 1, ours: core, next: &NEXT_CORE }, Module { id: 5, ours: core2, next: &NEXT_CORE2 }]
}

/// Calls the earlier tool's function in a slot. Evaluates to the function's result, or `None` if the earlier
/// tool has no function there.
macro_rules! next {
    ($next:ident[$slot:literal]($($arg:expr),*) as $type:ty) => {{
        let next = $next[$slot].load(Ordering::Acquire);
        // SAFETY: the earlier tool put this function into the slot, whose type nvtxTypes.h fixes; the
        // arguments are the program's own.
        (!next.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, $type>(next)($($arg),*) })
    }};
}

unsafe extern "C" fn push_a(text: *const c_char) -> c_int {
    // SAFETY: the program passed this string to NVTX.
    shielded(|| ranges::push(&unsafe { names::ascii(text) }, DEFAULT_DOMAIN, None));
    next!(NEXT_CORE[9](text) as unsafe extern "C" fn(*const c_char) -> c_int).unwrap_or(NO_TRACKING)
}

unsafe extern "C" fn push_w(text: *const u32) -> c_int {
    // SAFETY: the program passed this string to NVTX.
    shielded(|| ranges::push(&unsafe { names::wide(text) }, DEFAULT_DOMAIN, None));
    next!(NEXT_CORE[10](text) as unsafe extern "C" fn(*const u32) -> c_int).unwrap_or(NO_TRACKING)
}

unsafe extern "C" fn push_ex(attributes: *const Attributes) -> c_int {
    shielded(|| {
        // SAFETY: the program passed these attributes to NVTX.
        let message = unsafe { names::message_of(DEFAULT_DOMAIN, attributes) };
        ranges::push(&message.0, DEFAULT_DOMAIN, None)
    });
    next!(NEXT_CORE[8](attributes) as unsafe extern "C" fn(*const Attributes) -> c_int).unwrap_or(NO_TRACKING)
}

unsafe extern "C" fn pop() -> c_int {
    shielded(|| ranges::pop(DEFAULT_DOMAIN));
    next!(NEXT_CORE[11]() as unsafe extern "C" fn() -> c_int).unwrap_or(NO_TRACKING)
}

unsafe extern "C" fn start_a(text: *const c_char) -> u64 {
    let theirs = next!(NEXT_CORE[5](text) as unsafe extern "C" fn(*const c_char) -> u64);
    // SAFETY: the program passed this string to NVTX.
    shared::start(&unsafe { names::ascii(text) }, DEFAULT_DOMAIN, None, theirs)
}

unsafe extern "C" fn start_w(text: *const u32) -> u64 {
    let theirs = next!(NEXT_CORE[6](text) as unsafe extern "C" fn(*const u32) -> u64);
    // SAFETY: the program passed this string to NVTX.
    shared::start(&unsafe { names::wide(text) }, DEFAULT_DOMAIN, None, theirs)
}

unsafe extern "C" fn start_ex(attributes: *const Attributes) -> u64 {
    let theirs = next!(NEXT_CORE[4](attributes) as unsafe extern "C" fn(*const Attributes) -> u64);
    // SAFETY: the program passed these attributes to NVTX.
    shared::start(&unsafe { names::message_of(DEFAULT_DOMAIN, attributes) }.0, DEFAULT_DOMAIN, None, theirs)
}

unsafe extern "C" fn end(id: u64) {
    shared::end(id);
    next!(NEXT_CORE[7](id) as unsafe extern "C" fn(u64));
}

unsafe extern "C" fn mark_a(text: *const c_char) {
    // SAFETY: the program passed this string to NVTX.
    shielded(|| ranges::mark(Api::Nvtx, &unsafe { names::ascii(text) }));
    next!(NEXT_CORE[2](text) as unsafe extern "C" fn(*const c_char));
}

unsafe extern "C" fn mark_w(text: *const u32) {
    // SAFETY: the program passed this string to NVTX.
    shielded(|| ranges::mark(Api::Nvtx, &unsafe { names::wide(text) }));
    next!(NEXT_CORE[3](text) as unsafe extern "C" fn(*const u32));
}

unsafe extern "C" fn mark_ex(attributes: *const Attributes) {
    // SAFETY: the program passed these attributes to NVTX.
    shielded(|| ranges::mark(Api::Nvtx, &unsafe { names::message_of(DEFAULT_DOMAIN, attributes) }.0));
    next!(NEXT_CORE[1](attributes) as unsafe extern "C" fn(*const Attributes));
}

unsafe extern "C" fn domain_push(domain: usize, attributes: *const Attributes) -> c_int {
    // SAFETY: the program passed these attributes to NVTX.
    unsafe { shared::push_in_domain(domain, attributes) };
    next!(NEXT_CORE2[4](domain, attributes) as unsafe extern "C" fn(usize, *const Attributes) -> c_int)
        .unwrap_or(NO_TRACKING)
}

unsafe extern "C" fn domain_pop(domain: usize) -> c_int {
    shielded(|| ranges::pop(domain));
    next!(NEXT_CORE2[5](domain) as unsafe extern "C" fn(usize) -> c_int).unwrap_or(NO_TRACKING)
}

unsafe extern "C" fn domain_start(domain: usize, attributes: *const Attributes) -> u64 {
    let theirs =
        next!(NEXT_CORE2[2](domain, attributes) as unsafe extern "C" fn(usize, *const Attributes) -> u64);
    // SAFETY: the program passed these attributes to NVTX.
    unsafe { shared::start_in_domain(domain, attributes, theirs) }
}

unsafe extern "C" fn domain_end(domain: usize, id: u64) {
    shared::end(id);
    next!(NEXT_CORE2[3](domain, id) as unsafe extern "C" fn(usize, u64));
}

unsafe extern "C" fn domain_mark(domain: usize, attributes: *const Attributes) {
    // SAFETY: the program passed these attributes to NVTX.
    shielded(|| ranges::mark(Api::Nvtx, &unsafe { names::message_of(domain, attributes) }.0));
    next!(NEXT_CORE2[1](domain, attributes) as unsafe extern "C" fn(usize, *const Attributes));
}

unsafe extern "C" fn domain_name_category(domain: usize, category: u32, name: *const c_char) {
    // SAFETY: the program passed this string to NVTX.
    names::name_category(domain, category, || unsafe { names::ascii(name) });
    next!(NEXT_CORE2[8](domain, category, name) as unsafe extern "C" fn(usize, u32, *const c_char));
}

unsafe extern "C" fn domain_name_category_w(domain: usize, category: u32, name: *const u32) {
    // SAFETY: the program passed this string to NVTX.
    names::name_category(domain, category, || unsafe { names::wide(name) });
    next!(NEXT_CORE2[9](domain, category, name) as unsafe extern "C" fn(usize, u32, *const u32));
}

unsafe extern "C" fn domain_register(domain: usize, text: *const c_char) -> usize {
    let theirs = next!(NEXT_CORE2[10](domain, text) as unsafe extern "C" fn(usize, *const c_char) -> usize);
    // SAFETY: the program passed this string to NVTX.
    names::register_string(unsafe { names::ascii(text) }, theirs)
}

unsafe extern "C" fn domain_register_w(domain: usize, text: *const u32) -> usize {
    let theirs = next!(NEXT_CORE2[11](domain, text) as unsafe extern "C" fn(usize, *const u32) -> usize);
    // SAFETY: the program passed this string to NVTX.
    names::register_string(unsafe { names::wide(text) }, theirs)
}

unsafe extern "C" fn domain_create(name: *const c_char) -> usize {
    let theirs = next!(NEXT_CORE2[12](name) as unsafe extern "C" fn(*const c_char) -> usize);
    // SAFETY: the program passed this string to NVTX.
    names::create_domain(unsafe { names::ascii(name) }, theirs)
}

unsafe extern "C" fn domain_create_w(name: *const u32) -> usize {
    let theirs = next!(NEXT_CORE2[13](name) as unsafe extern "C" fn(*const u32) -> usize);
    // SAFETY: the program passed this string to NVTX.
    names::create_domain(unsafe { names::wide(name) }, theirs)
}
