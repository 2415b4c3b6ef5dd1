//! The injection: NVTX loads this library, which fills NVTX's tables with our functions.

use std::ffi::{CStr, CString, OsString, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use memtrace_record::recorder::text_id;

use super::callbacks::{self, SLOTS, Slot};
use super::legacy;
use crate::ffi::symbols::{find_in, function};
use crate::ffi::{callers, loaded_libraries};
use crate::guard::shielded;
use crate::runtime::session;

const VARIABLE: &str = "NVTX_INJECTION64_PATH";
/// The variable that passes the path of the earlier tool on to child processes.
const NEXT_VARIABLE: &str = "MEMTRACE_NVTX_NEXT";
/// The path of the tool that [`VARIABLE`] named before memtrace set it; unset if there is no such tool.
static EARLIER_TOOL: OnceLock<CString> = OnceLock::new();

/// Sets the variable that NVTX reads to the path of this library. If the variable named another tool before,
/// stores the path of that tool, which [`inject`] initializes later.
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

/// `NvtxGetExportTableFunc_t`.
type GetExportTable = unsafe extern "C" fn(c_uint) -> *const c_void;
/// `InitializeInjectionNvtx2`, which every injection library exports.
type Initialize = unsafe extern "C" fn(GetExportTable) -> c_int;

/// `NvtxExportTableCallbacks`: NVTX's table with the function that returns the slots of a module.
#[repr(C)]
struct Callbacks {
    size: usize,
    get_table: unsafe extern "C" fn(c_uint, *mut *mut *mut Slot, *mut c_uint) -> c_int,
}

/// NVTX calls this function once for each shared object that uses NVTX. Returns 1 if our functions were
/// installed, otherwise 0.
#[unsafe(no_mangle)]
unsafe extern "C" fn InitializeInjectionNvtx2(get: GetExportTable) -> c_int {
    if session::session().is_none_or(|session| !session.settings.nvtx) {
        return 0;
    }
    if callers::library_at(get as *const c_void).name == text_id("libnvToolsExt.so.1") {
        legacy::set_injected();
    }
    // SAFETY: by the contract of the injection, `get` is NVTX's own function.
    shielded(|| unsafe { inject(get) }).unwrap_or(0)
}

/// Puts our functions into NVTX's tables; returns 1 on success, otherwise 0.
///
/// # Safety
/// `get` is NVTX's function that returns its tables.
unsafe fn inject(get: GetExportTable) -> c_int {
    const CALLBACKS: c_uint = 1;
    // SAFETY: by the contract; the table is null or at least as long as it says.
    let Some(callbacks) = (unsafe { get(CALLBACKS).cast::<Callbacks>().as_ref() }) else { return 0 };
    if callbacks.size < size_of::<Callbacks>() {
        return 0;
    }
    let before = callbacks::modules().map(|module| unfilled(callbacks, module.id));
    if let Some(tool) = EARLIER_TOOL.get() {
        // SAFETY: NVTX made the same call to us.
        unsafe { initialize_tool(tool, get) };
    }
    for (module, before) in callbacks::modules().iter().zip(before) {
        for (slot, place) in places(callbacks, module.id) {
            let Some(ours) = module.ours.get(slot).copied().flatten() else { continue };
            // SAFETY: `place` points to a function pointer in NVTX's table.
            let now = unsafe { *place };
            // A slot that no tool has filled still holds NVTX's own initializer. It must not become the next
            // function, because it would replace our function.
            if before.get(slot).copied().flatten() != Some(now) && !now.is_null() {
                module.next[slot].store(now, Ordering::Release);
            }
            // SAFETY: as above; NVTX reads it at the next call. `Release`: after `next` above.
            unsafe { AtomicPtr::from_ptr(place) }.store(ours, Ordering::Release);
        }
    }
    1
}

/// Initializes the earlier tool if it can be loaded.
///
/// # Safety
/// `get` is NVTX's function that returns its tables.
unsafe fn initialize_tool(tool: &CStr, get: GetExportTable) {
    // SAFETY: the path ends in 0; NVTX itself would have loaded the tool.
    let handle = unsafe { libc::dlopen(tool.as_ptr(), libc::RTLD_LAZY) };
    // `dlopen` has failed. A lookup with a null handle would search the global scope and find our own
    // function.
    if handle.is_null() {
        return;
    }
    // SAFETY: the handle is open, and every injection library exports the function with this type.
    if let Some(initialize) = unsafe { function::<Initialize>(find_in(handle, c"InitializeInjectionNvtx2")) }
    {
        // SAFETY: by the contract.
        unsafe { initialize(get) };
    }
}

/// Returns the slots of a module, each with the address of its function pointer. Slots that this version of
/// NVTX does not have are left out.
fn places(callbacks: &Callbacks, module: c_uint) -> Vec<(usize, *mut Slot)> {
    let (mut table, mut count) = (null_mut(), 0);
    // SAFETY: the function is NVTX's own, and both pointers are valid for its answer.
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

/// Returns the current content of a module's slots. Called before any tool fills the slots.
fn unfilled(callbacks: &Callbacks, module: c_uint) -> [Option<Slot>; SLOTS] {
    let mut slots = [None; SLOTS];
    for (slot, place) in places(callbacks, module) {
        // SAFETY: `place` points to a function pointer in NVTX's table.
        slots[slot] = Some(unsafe { *place });
    }
    slots
}
