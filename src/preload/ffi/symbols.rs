//! The real functions behind the hooks, found at their first use.
//!
//! `dlsym(RTLD_NEXT)` sees only what is in the global scope: libraries that the program loaded with
//! `RTLD_LOCAL` (torch's, through Python) are asked for by name among those that are loaded. A function
//! that is not there yet may be there at the next call, so "not found" is never remembered.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::marker::PhantomData;
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The type of `dlsym`.
pub(crate) type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

static REAL_DLSYM: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

/// glibc's own `dlsym`: ours has the same name.
pub(crate) fn real_dlsym() -> Option<Dlsym> {
    let mut found = REAL_DLSYM.load(Ordering::Relaxed);
    if found.is_null() {
        // glibc 2.34 moved it from libdl to libc and kept the old version's name.
        for version in [c"GLIBC_2.2.5", c"GLIBC_2.34"] {
            // SAFETY: both names end in 0; dlvsym only looks them up.
            found = unsafe { dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) };
            if !found.is_null() {
                break;
            }
        }
        REAL_DLSYM.store(found, Ordering::Relaxed);
    }
    // SAFETY: a function pointer or null, and `dlsym` has this type.
    (!found.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, Dlsym>(found) })
}

unsafe extern "C" {
    fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void;
}

/// Looks `name` up in a library that is loaded already, whose file name starts with `library`.
pub(crate) fn find_in_loaded(library: &str, name: &CStr) -> *mut c_void {
    let Some(dlsym) = real_dlsym() else { return null_mut() };
    for path in loaded_libraries(library) {
        // SAFETY: the path ends in 0; RTLD_NOLOAD loads and runs nothing.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        if handle.is_null() {
            continue;
        }
        // SAFETY: the handle is open and the name ends in 0.
        let found = unsafe { dlsym(handle, name.as_ptr()) };
        // SAFETY: closes what was opened above; the library stays, since it was there before.
        unsafe { libc::dlclose(handle) };
        if !found.is_null() {
            return found;
        }
    }
    null_mut()
}

/// Looks `name` up in the global scope, where a preloaded device stands, then in a loaded library.
pub(crate) fn find_anywhere(library: &str, name: &CStr) -> *mut c_void {
    // SAFETY: RTLD_DEFAULT and a name that ends in 0.
    let found = real_dlsym().map_or(null_mut(), |dlsym| unsafe { dlsym(libc::RTLD_DEFAULT, name.as_ptr()) });
    if found.is_null() { find_in_loaded(library, name) } else { found }
}

/// The paths of loaded libraries whose file name starts with `prefix`.
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
    // SAFETY: `visit` has the type that is asked for and `search` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search.found
}

/// A literal that ends in 0 as the C string that it is; for macros that make names.
pub(crate) const fn c_name(literal: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(literal.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("the literal does not end in 0"),
    }
}

/// The function that a hook stands before. `F` is its type.
pub(crate) struct RealFn<F> {
    name: &'static CStr,
    library: &'static str,
    found: AtomicPtr<c_void>,
    /// What the program itself looked up with `dlsym`, when our hook was put in its place.
    looked_up: AtomicPtr<c_void>,
    kind: PhantomData<F>,
}

// SAFETY: only the pointers change, and they are atomic.
unsafe impl<F> Sync for RealFn<F> {}

impl<F: Copy> RealFn<F> {
    /// # Safety
    /// `F` must be the type of the function `name` as its library's header declares it. `library` is
    /// how the file name of that library begins.
    pub(crate) const unsafe fn new(name: &'static CStr, library: &'static str) -> Self {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        RealFn {
            name,
            library,
            found: AtomicPtr::new(null_mut()),
            looked_up: AtomicPtr::new(null_mut()),
            kind: PhantomData,
        }
    }

    /// The real function; `None` while no library has it.
    #[inline]
    pub(crate) fn get(&self) -> Option<F> {
        let mut found = self.found.load(Ordering::Relaxed);
        if found.is_null() {
            found = self.find();
        }
        // SAFETY: not null, so the function of that name, of type `F` by the contract of `new`.
        (!found.is_null()).then(|| unsafe { std::mem::transmute_copy::<*mut c_void, F>(&found) })
    }

    /// Is `found`, which the program looked up under this name by itself, the function that the hook
    /// calls? It is from now on when there was none.
    pub(crate) fn leads_to(&self, found: *mut c_void) -> bool {
        let _ = self.looked_up.compare_exchange(null_mut(), found, Ordering::Relaxed, Ordering::Relaxed);
        let _ = self.get();
        self.found.load(Ordering::Relaxed) == found
    }

    #[cold]
    fn find(&self) -> *mut c_void {
        let Some(dlsym) = real_dlsym() else { return null_mut() };
        // SAFETY: RTLD_NEXT and a name that ends in 0; called from this library, so "next" is what
        // stands behind it.
        let mut found = unsafe { dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        if found.is_null() {
            found = find_in_loaded(self.library, self.name);
        }
        if found.is_null() {
            found = self.looked_up.load(Ordering::Relaxed);
        }
        if !found.is_null() {
            self.found.store(found, Ordering::Relaxed);
        }
        found
    }
}

/// The path of this library, as the loader knows it.
pub(crate) fn own_path() -> Option<PathBuf> {
    use std::os::unix::ffi::OsStrExt;
    // SAFETY: all zero is a value of this plain struct.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    let here = own_path as *const std::ffi::c_void;
    // SAFETY: the address is of this library's code and `info` is a place for the answer.
    if unsafe { libc::dladdr(here, &raw mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader's name of this library, which stays loaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    std::fs::canonicalize(std::ffi::OsStr::from_bytes(name.to_bytes())).ok()
}
