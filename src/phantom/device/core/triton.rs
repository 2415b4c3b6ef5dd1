//! The environment variable through which Triton finds this library as `libcuda`.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use memtrace_machine::libcuda::{self, FOLDER_VARIABLE};

use crate::core::loaded_library::library_of;

/// The reason why the folder for Triton could not be created.
static FAILURE: OnceLock<String> = OnceLock::new();

/// Sets [`FOLDER_VARIABLE`] to a folder with links to this library, unless the folder that it names already
/// has such a link. Called once, from the library's constructor: Python copies the environment when it
/// starts.
pub(crate) fn find_libcuda() {
    let own = library_of(find_libcuda as *mut libc::c_void).map(PathBuf::from);
    let Some(own) = own.and_then(|file| std::fs::canonicalize(file).ok()) else { return };
    let named = std::env::var_os(FOLDER_VARIABLE).map(|folder| Path::new(&folder).join("libcuda.so.1"));
    if named.and_then(|link| std::fs::canonicalize(link).ok()).is_some_and(|library| library == own) {
        return;
    }
    // SAFETY: only reads the process's user id.
    let user = unsafe { libc::geteuid() };
    let folder = libcuda::folder(&own, user).map_err(|error| error.to_string());
    let text = folder.map(|folder| CString::new(folder.as_os_str().as_bytes()).unwrap_or_default());
    let name = CString::new(FOLDER_VARIABLE).unwrap_or_default();
    match text {
        // SAFETY: C strings; the process has one thread yet.
        Ok(folder) => drop(unsafe { libc::setenv(name.as_ptr(), folder.as_ptr(), 1) }),
        Err(error) => drop(FAILURE.set(format!(
            "Triton will not find the simulated GPU: {error}; set {FOLDER_VARIABLE} to a folder with a link \
             libcuda.so.1 to {}",
            own.display()
        ))),
    }
}

/// Prints why Triton will not find the simulated GPU, if that is so. Only a process that uses CUDA calls
/// this.
pub(crate) fn report_failure() {
    if let Some(why) = FAILURE.get() {
        eprintln!("memtrace: {why}");
    }
}
