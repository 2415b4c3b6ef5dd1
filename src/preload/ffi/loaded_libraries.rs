//! The shared libraries that are loaded into the process.

use std::ffi::{CStr, CString, OsStr, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// The paths of the loaded libraries whose file name starts with `prefix`.
pub(crate) fn loaded_libraries(prefix: &str) -> Vec<CString> {
    struct Search<'a> {
        prefix: &'a str,
        found: Vec<CString>,
    }
    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, data: *mut c_void) -> c_int {
        // SAFETY: `data` is the search below, and `info` is valid during the call.
        let (search, info) = unsafe { (&mut *data.cast::<Search<'_>>(), &*info) };
        if !info.dlpi_name.is_null() {
            // SAFETY: the loader's name of the object, a C string that outlives the call.
            let name = unsafe { CStr::from_ptr(info.dlpi_name) };
            let file = name.to_bytes().rsplit(|byte| *byte == b'/').next().unwrap_or_default();
            if file.starts_with(search.prefix.as_bytes()) {
                search.found.push(name.to_owned());
            }
        }
        0
    }
    let mut search = Search { prefix, found: Vec::new() };
    // SAFETY: `visit` has the expected type, and `search` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search.found
}

/// The path of the loaded library that `address` lies in, as the loader names it.
pub(crate) fn path_of(address: *const c_void) -> Option<PathBuf> {
    // SAFETY: all zero is a value of this plain struct.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: it accepts any address, and `info` is a place for the answer.
    if unsafe { libc::dladdr(address, &raw mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader's name of a loaded library.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(OsStr::from_bytes(name.to_bytes()).into())
}

/// The absolute path of this library.
pub(crate) fn own_path() -> Option<PathBuf> {
    std::fs::canonicalize(path_of(own_path as *const c_void)?).ok()
}
