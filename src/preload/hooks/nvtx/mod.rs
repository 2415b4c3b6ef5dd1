//! NVTX: the program's own ranges and marks.
//!
//! Header-only NVTX 3 has no symbol to stand before. At its first call in each shared object it loads
//! the library named by `NVTX_INJECTION64_PATH` and calls `InitializeInjectionNvtx2` in it, which puts
//! our functions into that object's table. The legacy library has symbols, so we stand before them.
//!
//! A tool that was named in the variable before us (Nsight) still gets every call: it is initialized
//! first, what it put into a table is called after ours, and what it returned is what the program gets.

use std::ffi::{CStr, CString, OsString, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use memtrace_record::recorder::text_id;
use memtrace_trace::Api;
use memtrace_trace::ranges::{LIBRARY, LIBRARY_DOMAINS};
use rustc_hash::FxHashMap;

use crate::attribution::ranges;
use crate::ffi::{callers, loaded_libraries};
use crate::runtime::fork::ForkSafe;
use crate::runtime::guard::shielded;
use crate::runtime::session;

mod legacy;

const VARIABLE: &str = "NVTX_INJECTION64_PATH";
/// Names the tool that was there before us to the processes that this one starts.
const NEXT_VARIABLE: &str = "MEMTRACE_NVTX_NEXT";
/// What NVTX returns from push and pop when no tool keeps a stack; the program must see the same.
const NO_TRACKING: c_int = -2;

/// The tool that was named before us.
static EARLIER_TOOL: OnceLock<CString> = OnceLock::new();

/// Names this library in the variable that NVTX reads.
pub(crate) fn announce() {
    use std::os::unix::ffi::OsStrExt;
    let Some(own) = loaded_libraries::own_path() else { return };
    let named = std::env::var_os(VARIABLE).filter(|path| !path.is_empty());
    let is_ours = |path: &OsString| std::fs::canonicalize(path).is_ok_and(|path| path == own);
    let earlier = match named {
        Some(path) if is_ours(&path) => std::env::var_os(NEXT_VARIABLE).filter(|path| !is_ours(path)),
        named => named,
    };
    if let Some(earlier) = earlier
        && let Ok(text) = CString::new(earlier.as_bytes())
    {
        let _ = EARLIER_TOOL.set(text);
        // SAFETY: this runs while the program is loaded, before it can have a second thread.
        unsafe { std::env::set_var(NEXT_VARIABLE, earlier) };
    }
    // SAFETY: as above.
    unsafe { std::env::set_var(VARIABLE, own) };
}

type Slot = *mut c_void;
type GetExportTable = unsafe extern "C" fn(c_uint) -> *const c_void;
type Initialize = unsafe extern "C" fn(GetExportTable) -> c_int;

/// `NvtxExportTableCallbacks`.
#[repr(C)]
struct Callbacks {
    size: usize,
    get_table: unsafe extern "C" fn(c_uint, *mut *mut *mut Slot, *mut c_uint) -> c_int,
}

/// Enough for the modules that we fill; NVTX 3 has 15 and 16 functions in them.
const SLOTS: usize = 16;

/// A module of NVTX: its functions of ours, by slot, and the earlier tool's.
struct Module {
    id: c_uint,
    ours: [Option<Slot>; SLOTS],
    next: &'static [AtomicPtr<c_void>; SLOTS],
}

static NEXT_CORE: [AtomicPtr<c_void>; SLOTS] = [const { AtomicPtr::new(std::ptr::null_mut()) }; SLOTS];
static NEXT_CORE2: [AtomicPtr<c_void>; SLOTS] = [const { AtomicPtr::new(std::ptr::null_mut()) }; SLOTS];

/// `NVTX_CB_MODULE_CORE` and `NVTX_CB_MODULE_CORE2`, slots as in nvtxTypes.h.
fn modules() -> [Module; 2] {
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

/// NVTX calls this once for each shared object that uses it.
#[unsafe(no_mangle)]
unsafe extern "C" fn InitializeInjectionNvtx2(get: GetExportTable) -> c_int {
    if session::session().is_none_or(|session| !session.settings.nvtx) {
        return 0;
    }
    if callers::library_at(get as *const c_void).name == text_id("libnvToolsExt.so.1") {
        legacy::injected();
    }
    // SAFETY: NVTX's own function and its table, by the contract of the injection.
    shielded(|| unsafe { inject(get) }).unwrap_or(0)
}

/// # Safety
/// `get` is NVTX's function that gives its tables.
unsafe fn inject(get: GetExportTable) -> c_int {
    const CALLBACKS: c_uint = 1;
    // SAFETY: by the contract; the table is null or at least as long as it says.
    let Some(callbacks) = (unsafe { get(CALLBACKS).cast::<Callbacks>().as_ref() }) else { return 0 };
    if callbacks.size < size_of::<Callbacks>() {
        return 0;
    }
    let before = modules().map(|module| unfilled(callbacks, module.id));
    if let Some(tool) = EARLIER_TOOL.get() {
        // SAFETY: the path ends in 0; the tool is one that NVTX would have loaded by itself.
        let handle = unsafe { libc::dlopen(tool.as_ptr(), libc::RTLD_LAZY) };
        // SAFETY: the handle is open or null, which gives null.
        let found = unsafe { libc::dlsym(handle, c"InitializeInjectionNvtx2".as_ptr()) };
        if !found.is_null() {
            // SAFETY: the type of the function that every injection library exports.
            let initialize: Initialize = unsafe { std::mem::transmute(found) };
            // SAFETY: the same call that NVTX made to us.
            unsafe { initialize(get) };
        }
    }
    for (module, before) in modules().iter().zip(before) {
        for (slot, place) in places(callbacks, module.id) {
            let Some(ours) = module.ours.get(slot).copied().flatten() else { continue };
            // SAFETY: NVTX's table: a place for a function pointer.
            let now = unsafe { *place };
            // What the slot held before any tool is NVTX's own initializer, which must not be called
            // from a function that it installs.
            if before.get(slot).copied().flatten() != Some(now) && !now.is_null() {
                module.next[slot].store(now, Ordering::Release);
            }
            // SAFETY: as above; NVTX reads it at the next call.
            unsafe { *place = ours };
        }
    }
    1
}

/// The places of a module's functions by slot.
fn places(callbacks: &Callbacks, module: c_uint) -> Vec<(usize, *mut Slot)> {
    let (mut table, mut count) = (std::ptr::null_mut(), 0);
    // SAFETY: NVTX's own function; both places are valid for the answer.
    let known = unsafe { (callbacks.get_table)(module, &raw mut table, &raw mut count) };
    if known == 0 || table.is_null() {
        return Vec::new();
    }
    (1..(count as usize).min(SLOTS))
        // SAFETY: the table has `count` entries, null where NVTX has no function.
        .map(|slot| (slot, unsafe { *table.add(slot) }))
        .filter(|(_, place)| !place.is_null())
        .collect()
}

/// What the slots hold before any tool.
fn unfilled(callbacks: &Callbacks, module: c_uint) -> [Option<Slot>; SLOTS] {
    let mut slots = [None; SLOTS];
    for (slot, place) in places(callbacks, module) {
        // SAFETY: a valid place of NVTX's table.
        slots[slot] = Some(unsafe { *place });
    }
    slots
}

/// `nvtxEventAttributes_t`, versions 1 to 3.
#[repr(C)]
struct Attributes {
    version: u16,
    size: u16,
    category: u32,
    color_type: i32,
    color: u32,
    payload_type: i32,
    reserved: i32,
    payload: u64,
    message_type: i32,
    message: *const c_void,
}

const _: () = assert!(size_of::<Attributes>() == 48);

/// Names that a program registered: of strings and domains by handle, of categories by domain and id.
#[derive(Default)]
struct Names {
    strings: FxHashMap<usize, String>,
    domains: FxHashMap<usize, String>,
    categories: FxHashMap<(usize, u32), String>,
    handles: usize,
}

static NAMES: ForkSafe<Option<Names>> = ForkSafe::new(None);

fn with_names<R>(work: impl FnOnce(&mut Names) -> R) -> R {
    NAMES.with(|names| work(names.get_or_insert_with(Names::default)))
}

/// # Safety
/// `text` is null or a C string.
unsafe fn ascii(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: by the contract.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// # Safety
/// `text` is null or a string of 4-byte characters that ends in 0.
unsafe fn wide(text: *const u32) -> String {
    let mut out = String::new();
    if text.is_null() {
        return out;
    }
    for index in 0..memtrace_trace::text::MAX_TEXT {
        // SAFETY: by the contract; the loop ends at the 0.
        match unsafe { *text.add(index) } {
            0 => break,
            code => out.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)),
        }
    }
    out
}

/// The message of a call's attributes and the name of its category, where the domain is ours.
///
/// # Safety
/// `attributes` is null or what the program gave to NVTX.
unsafe fn read(domain: usize, attributes: *const Attributes) -> (String, Option<String>) {
    const ASCII: i32 = 1;
    const UNICODE: i32 = 2;
    const REGISTERED: i32 = 3;
    // SAFETY: by the contract.
    let Some(attributes) = (unsafe { attributes.as_ref() }) else { return (String::new(), None) };
    if usize::from(attributes.size) < size_of::<Attributes>() {
        return (String::new(), None);
    }
    let message = match attributes.message_type {
        // SAFETY: the type says what the pointer is.
        ASCII => unsafe { ascii(attributes.message.cast()) },
        // SAFETY: as above.
        UNICODE => unsafe { wide(attributes.message.cast()) },
        REGISTERED => {
            let handle = attributes.message as usize;
            with_names(|names| names.strings.get(&handle).cloned().unwrap_or_default())
        }
        _ => String::new(),
    };
    let category = with_names(|names| match names.domains.get(&domain).map(String::as_str) {
        Some("memtrace") => names.categories.get(&(domain, attributes.category)).cloned(),
        Some(name) if LIBRARY_DOMAINS.contains(&name) => Some(LIBRARY.to_owned()),
        _ => None,
    });
    (message, category)
}

/// Calls the earlier tool's function of a slot; `None` when there is none.
macro_rules! next {
    ($next:ident[$slot:literal]($($arg:expr),*) as $type:ty) => {{
        let next = $next[$slot].load(Ordering::Acquire);
        // SAFETY: the earlier tool put this function into the slot, whose type nvtxTypes.h fixes; the
        // arguments are the program's own.
        (!next.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, $type>(next)($($arg),*) })
    }};
}

/// The number of a start/end range of ours by the number that the program was given.
static RANGES: ForkSafe<Vec<(u64, u64)>> = ForkSafe::new(Vec::new());

/// Opens a start/end range and gives the program's number for it: the earlier tool's, or our own.
fn started(name: &str, domain: usize, category: Option<&str>, theirs: Option<u64>) -> u64 {
    let ours = shielded(|| ranges::start(name, domain, category)).unwrap_or(0);
    match theirs {
        Some(theirs) if theirs != ours => {
            RANGES.with(|ranges| ranges.push((theirs, ours)));
            theirs
        }
        _ => ours,
    }
}

fn ended(id: u64) {
    let ours = RANGES.with(|ranges| {
        let index = ranges.iter().position(|(theirs, _)| *theirs == id)?;
        Some(ranges.swap_remove(index).1)
    });
    shielded(|| ranges::end(ours.unwrap_or(id)));
}

/// The domain of plain push and pop; the domain calls say it with a null handle.
const DEFAULT: usize = 0;

unsafe extern "C" fn push_a(text: *const c_char) -> c_int {
    // SAFETY: the program's own string.
    shielded(|| ranges::push(&unsafe { ascii(text) }, DEFAULT, None));
    next!(NEXT_CORE[9](text) as unsafe extern "C" fn(*const c_char) -> c_int).unwrap_or(NO_TRACKING)
}

unsafe extern "C" fn push_w(text: *const u32) -> c_int {
    // SAFETY: the program's own string.
    shielded(|| ranges::push(&unsafe { wide(text) }, DEFAULT, None));
    next!(NEXT_CORE[10](text) as unsafe extern "C" fn(*const u32) -> c_int).unwrap_or(NO_TRACKING)
}

unsafe extern "C" fn push_ex(attributes: *const Attributes) -> c_int {
    // SAFETY: the program's own attributes.
    shielded(|| ranges::push(&unsafe { read(DEFAULT, attributes) }.0, DEFAULT, None));
    next!(NEXT_CORE[8](attributes) as unsafe extern "C" fn(*const Attributes) -> c_int).unwrap_or(NO_TRACKING)
}

unsafe extern "C" fn pop() -> c_int {
    shielded(|| ranges::pop(DEFAULT));
    next!(NEXT_CORE[11]() as unsafe extern "C" fn() -> c_int).unwrap_or(NO_TRACKING)
}

unsafe extern "C" fn start_a(text: *const c_char) -> u64 {
    let theirs = next!(NEXT_CORE[5](text) as unsafe extern "C" fn(*const c_char) -> u64);
    // SAFETY: the program's own string.
    started(&unsafe { ascii(text) }, DEFAULT, None, theirs)
}

unsafe extern "C" fn start_w(text: *const u32) -> u64 {
    let theirs = next!(NEXT_CORE[6](text) as unsafe extern "C" fn(*const u32) -> u64);
    // SAFETY: the program's own string.
    started(&unsafe { wide(text) }, DEFAULT, None, theirs)
}

unsafe extern "C" fn start_ex(attributes: *const Attributes) -> u64 {
    let theirs = next!(NEXT_CORE[4](attributes) as unsafe extern "C" fn(*const Attributes) -> u64);
    // SAFETY: the program's own attributes.
    started(&unsafe { read(DEFAULT, attributes) }.0, DEFAULT, None, theirs)
}

unsafe extern "C" fn end(id: u64) {
    ended(id);
    next!(NEXT_CORE[7](id) as unsafe extern "C" fn(u64));
}

unsafe extern "C" fn mark_a(text: *const c_char) {
    // SAFETY: the program's own string.
    shielded(|| ranges::mark(Api::Nvtx, &unsafe { ascii(text) }));
    next!(NEXT_CORE[2](text) as unsafe extern "C" fn(*const c_char));
}

unsafe extern "C" fn mark_w(text: *const u32) {
    // SAFETY: the program's own string.
    shielded(|| ranges::mark(Api::Nvtx, &unsafe { wide(text) }));
    next!(NEXT_CORE[3](text) as unsafe extern "C" fn(*const u32));
}

unsafe extern "C" fn mark_ex(attributes: *const Attributes) {
    // SAFETY: the program's own attributes.
    shielded(|| ranges::mark(Api::Nvtx, &unsafe { read(DEFAULT, attributes) }.0));
    next!(NEXT_CORE[1](attributes) as unsafe extern "C" fn(*const Attributes));
}

/// # Safety
/// `attributes` is null or what the program gave to NVTX.
unsafe fn domain_pushed(domain: usize, attributes: *const Attributes) {
    shielded(|| {
        // SAFETY: by the contract.
        let (name, category) = unsafe { read(domain, attributes) };
        ranges::push(&name, domain, category.as_deref());
    });
}

/// As [`started`].
///
/// # Safety
/// `attributes` is null or what the program gave to NVTX.
unsafe fn domain_started(domain: usize, attributes: *const Attributes, theirs: Option<u64>) -> u64 {
    // SAFETY: by the contract.
    let (name, category) = shielded(|| unsafe { read(domain, attributes) }).unwrap_or_default();
    started(&name, domain, category.as_deref(), theirs)
}

unsafe extern "C" fn domain_push(domain: usize, attributes: *const Attributes) -> c_int {
    // SAFETY: the program's own attributes.
    unsafe { domain_pushed(domain, attributes) };
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
    // SAFETY: the program's own attributes.
    unsafe { domain_started(domain, attributes, theirs) }
}

unsafe extern "C" fn domain_end(domain: usize, id: u64) {
    ended(id);
    next!(NEXT_CORE2[3](domain, id) as unsafe extern "C" fn(usize, u64));
}

unsafe extern "C" fn domain_mark(domain: usize, attributes: *const Attributes) {
    // SAFETY: the program's own attributes.
    shielded(|| ranges::mark(Api::Nvtx, &unsafe { read(domain, attributes) }.0));
    next!(NEXT_CORE2[1](domain, attributes) as unsafe extern "C" fn(usize, *const Attributes));
}

fn category_named(domain: usize, category: u32, name: impl FnOnce() -> String) {
    shielded(|| {
        let name = name();
        with_names(|names| names.categories.insert((domain, category), name));
    });
}

unsafe extern "C" fn domain_name_category(domain: usize, category: u32, name: *const c_char) {
    // SAFETY: the program's own string.
    category_named(domain, category, || unsafe { ascii(name) });
    next!(NEXT_CORE2[8](domain, category, name) as unsafe extern "C" fn(usize, u32, *const c_char));
}

unsafe extern "C" fn domain_name_category_w(domain: usize, category: u32, name: *const u32) {
    // SAFETY: the program's own string.
    category_named(domain, category, || unsafe { wide(name) });
    next!(NEXT_CORE2[9](domain, category, name) as unsafe extern "C" fn(usize, u32, *const u32));
}

/// A handle for the program: the earlier tool's, or a number of our own that no pointer can equal.
fn handle(theirs: Option<usize>, names: &mut Names) -> usize {
    theirs.filter(|handle| *handle != 0).unwrap_or_else(|| {
        names.handles += 1;
        names.handles * 2 + 1
    })
}

fn registered(text: String, theirs: Option<usize>) -> usize {
    with_names(|names| {
        let handle = handle(theirs, names);
        names.strings.insert(handle, text);
        handle
    })
}

fn created(name: String, theirs: Option<usize>) -> usize {
    with_names(|names| {
        let handle = handle(theirs, names);
        names.domains.insert(handle, name);
        handle
    })
}

unsafe extern "C" fn domain_register(domain: usize, text: *const c_char) -> usize {
    let theirs = next!(NEXT_CORE2[10](domain, text) as unsafe extern "C" fn(usize, *const c_char) -> usize);
    // SAFETY: the program's own string.
    registered(unsafe { ascii(text) }, theirs)
}

unsafe extern "C" fn domain_register_w(domain: usize, text: *const u32) -> usize {
    let theirs = next!(NEXT_CORE2[11](domain, text) as unsafe extern "C" fn(usize, *const u32) -> usize);
    // SAFETY: the program's own string.
    registered(unsafe { wide(text) }, theirs)
}

unsafe extern "C" fn domain_create(name: *const c_char) -> usize {
    let theirs = next!(NEXT_CORE2[12](name) as unsafe extern "C" fn(*const c_char) -> usize);
    // SAFETY: the program's own string.
    created(unsafe { ascii(name) }, theirs)
}

unsafe extern "C" fn domain_create_w(name: *const u32) -> usize {
    let theirs = next!(NEXT_CORE2[13](name) as unsafe extern "C" fn(*const u32) -> usize);
    // SAFETY: the program's own string.
    created(unsafe { wide(name) }, theirs)
}
