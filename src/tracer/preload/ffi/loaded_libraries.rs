//! The shared libraries in the process.
//!
//! `dl_iterate_phdr` walks them. It takes a lock that the loader holds only while it links, not while a
//! constructor runs. So a walk cannot wait for a thread that itself waits for the hook. `dladdr`, `dlsym` and
//! `dlopen` take a lock that the loader also holds while a constructor runs, so these calls may wait for such
//! a thread. `symbols.rs` describes which lookups avoid that lock.

use std::ffi::{CStr, CString, OsStr, c_int, c_void};
use std::ops::{ControlFlow, Range};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use super::dynamic_section::DynamicSection;

/// A loaded library, or the program, during a walk.
pub(crate) struct Visited<'a> {
    /// The loader's name of the library: its path, or an empty text for the program.
    pub(crate) path: &'a CStr,
    /// The loader's counts of loaded and unloaded libraries.
    version: (u64, u64),
    base: usize,
    headers: &'a [libc::Elf64_Phdr],
    /// The thread-local variables of the library on the calling thread; null if the library has none, or has
    /// none yet on this thread.
    thread_variables: *mut u64,
}

impl Visited<'_> {
    /// Returns the library's dynamic section, or `None` if the library has no such section or no symbols.
    pub(crate) fn dynamic_section(&self) -> Option<DynamicSection> {
        let header = self.headers.iter().find(|header| header.p_type == libc::PT_DYNAMIC)?;
        let address = self.base.wrapping_add(header.p_vaddr as usize);
        // SAFETY: the section belongs to a library of the loader, which stays loaded during the walk.
        unsafe { DynamicSection::read(self.base, address, header.p_memsz as usize) }
    }

    /// Returns true if `address` is in the library's code.
    pub(crate) fn has_code(&self, address: usize) -> bool {
        self.code().any(|code| code.contains(&address))
    }

    /// Returns true if this is memtrace's own library.
    pub(crate) fn is_ours(&self) -> bool {
        self.has_code(own_path as *const c_void as usize)
    }

    /// Returns the address ranges of the executable segments.
    pub(crate) fn code(&self) -> impl Iterator<Item = Range<usize>> {
        let is_code =
            |header: &&libc::Elf64_Phdr| header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_X != 0;
        self.headers.iter().filter(is_code).map(|header| {
            let start = self.base.wrapping_add(header.p_vaddr as usize);
            start..start.wrapping_add(header.p_memsz as usize)
        })
    }
}

/// Visits the program and the loaded libraries in the order of their loading.
pub(crate) fn walk(mut visit: impl FnMut(&Visited<'_>) -> ControlFlow<()>) {
    unsafe extern "C" fn next<F: FnMut(&Visited<'_>) -> ControlFlow<()>>(
        info: *mut libc::dl_phdr_info,
        _: usize,
        visit: *mut c_void,
    ) -> c_int {
        // SAFETY: `visit` is the closure that `walk` passes below, and `info` is valid during the call.
        let (visit, info) = unsafe { (&mut *visit.cast::<F>(), &*info) };
        let path = if info.dlpi_name.is_null() {
            c""
        } else {
            // SAFETY: the name is the loader's own, a C string that outlives the call.
            unsafe { CStr::from_ptr(info.dlpi_name) }
        };
        let headers = if info.dlpi_phdr.is_null() {
            &[]
        } else {
            // SAFETY: the object has `dlpi_phnum` program headers.
            unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) }
        };
        let version = (info.dlpi_adds, info.dlpi_subs);
        let thread_variables = info.dlpi_tls_data.cast();
        visit(&Visited { path, version, base: info.dlpi_addr as usize, headers, thread_variables })
            .is_break()
            .into()
    }
    fn typed<F: FnMut(&Visited<'_>) -> ControlFlow<()>>(_: &F) -> LibraryVisitor {
        next::<F>
    }
    // SAFETY: `next` has the expected type, and `visit` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(typed(&visit)), (&raw mut visit).cast()) };
}

type LibraryVisitor = unsafe extern "C" fn(*mut libc::dl_phdr_info, usize, *mut c_void) -> c_int;

/// Returns the paths of the loaded libraries whose file name starts with `prefix`. The program itself has no
/// path.
pub(crate) fn loaded_libraries(prefix: &str) -> Vec<CString> {
    let mut found = Vec::new();
    walk(|library| {
        let file = library.path.to_bytes().rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        if !file.is_empty() && file.starts_with(prefix.as_bytes()) {
            found.push(library.path.to_owned());
        }
        ControlFlow::Continue(())
    });
    found
}

/// Returns the calling thread's thread-local variables in the loaded library named `file`: the address of the
/// first word and the number of words. Returns `None` if the library is not loaded or has no variables on
/// this thread yet.
pub(crate) fn thread_variables(file: &str) -> Option<(*mut u64, usize)> {
    let mut found = None;
    walk(|library| {
        if library.path.to_bytes().rsplit(|byte| *byte == b'/').next() != Some(file.as_bytes()) {
            return ControlFlow::Continue(());
        }
        let header = library.headers.iter().find(|header| header.p_type == libc::PT_TLS);
        found = header
            .filter(|_| !library.thread_variables.is_null() && library.thread_variables.is_aligned())
            .map(|header| (library.thread_variables, header.p_memsz as usize / size_of::<u64>()));
        ControlFlow::Break(())
    });
    found
}

/// Returns the loader's counts of loaded and unloaded libraries. While they stay the same, lookups give the
/// same results.
pub(crate) fn version() -> (u64, u64) {
    let mut version = (0, 0);
    walk(|library| {
        version = library.version;
        ControlFlow::Break(())
    });
    version
}

/// A loaded library, or the program.
pub(crate) struct Loaded {
    /// The loader's name of the library: its path, or an empty text for the program.
    pub(crate) path: CString,
    /// The executable segment that contains the requested address.
    pub(crate) code: Range<usize>,
    /// The position of the library in the order of loading; the program has position 0.
    pub(crate) place: usize,
}

/// Returns the library whose code contains `address`, or `None` for generated code.
pub(crate) fn library_of(address: usize) -> Option<Loaded> {
    let (mut place, mut found) = (0, None);
    walk(|library| {
        if let Some(code) = library.code().find(|code| code.contains(&address)) {
            found = Some(Loaded { path: library.path.to_owned(), code, place });
            return ControlFlow::Break(());
        }
        place += 1;
        ControlFlow::Continue(())
    });
    found
}

/// Returns the loader's path of the library that contains `address`.
pub(crate) fn path_of(address: *const c_void) -> Option<PathBuf> {
    // SAFETY: all zero is a valid value of this plain struct.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: `dladdr` accepts any address, and `info` is valid for writes.
    if unsafe { libc::dladdr(address, &raw mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: `dladdr` returned the loader's name of a loaded library, which is a C string.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(OsStr::from_bytes(name.to_bytes()).into())
}

/// Returns the absolute path of memtrace's own library.
pub(crate) fn own_path() -> Option<PathBuf> {
    std::fs::canonicalize(path_of(own_path as *const c_void)?).ok()
}
