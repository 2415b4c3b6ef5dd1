//! Looks up symbols of other libraries, on behalf of all other modules.
//!
//! There are two kinds of symbols, with different search rules:
//!
//! - [`RealFn`], the function behind one of memtrace's hooks. `RTLD_NEXT` finds the next definition in the
//!   global scope, but misses libraries that were loaded with `RTLD_LOCAL` (as Python loads torch's). So
//!   these libraries are then searched by file name. Next comes the address that the program itself found
//!   with `dlsym`, and last any loaded library, because one library may contain another (some contain the
//!   CUDA runtime). A library that may be loaded twice, each copy with its own state, needs
//!   [`ByCaller`](super::by_caller::ByCaller).
//! - [`Symbol`], a function that memtrace calls but does not hook. Its [`Home`] names the search scope.
//!
//! Whether any library has a symbol at all is checked first, without a lock of the loader, in the libraries'
//! tables in memory.
//!
//! A search by file name uses an `RTLD_NOLOAD` handle, which loads nothing and runs no constructor. A failed
//! lookup is not cached for good, because the library may be loaded later.
//!
//! Every lookup calls glibc's own `dlsym` (the exported name is memtrace's hook), and may take a lock of the
//! loader. Code that runs under a lock of the program must therefore not look up symbols (torch's allocator
//! reports under its mutex). Such code uses [`Symbol::cached`], after an earlier [`Symbol::get`].

use std::ffi::{CStr, c_char, c_void};
use std::marker::PhantomData;
use std::ops::ControlFlow;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use crate::ffi::loaded_libraries::{Visited, loaded_libraries, version, walk};

/// The type of `dlsym`.
pub(crate) type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

static REAL_DLSYM: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

/// Returns glibc's own `dlsym`, which memtrace's hook of that name hides.
pub(crate) fn real_dlsym() -> Option<Dlsym> {
    let mut found = REAL_DLSYM.load(Ordering::Relaxed);
    if found.is_null() {
        // The name has the first version of the architecture in libdl and, since glibc 2.34, GLIBC_2.34 in
        // libc. One of the two exists.
        let first = if cfg!(target_arch = "aarch64") { c"GLIBC_2.17" } else { c"GLIBC_2.2.5" };
        for version in [first, c"GLIBC_2.34"] {
            // SAFETY: both names end in 0; dlvsym only looks them up.
            found = unsafe { dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) };
            if !found.is_null() {
                break;
            }
        }
        REAL_DLSYM.store(found, Ordering::Relaxed);
    }
    // SAFETY: the pointer is not null, so it is `dlsym`, which has this type.
    (!found.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, Dlsym>(found) })
}

unsafe extern "C" {
    fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void;
}

/// Looks up `name` through an open handle or `RTLD_DEFAULT`. Returns null if it is not found.
///
/// # Safety
/// `handle` is open, or one of the special handles.
pub(crate) unsafe fn find_in(handle: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: by the contract; the name ends in 0.
    real_dlsym().map_or(null_mut(), |dlsym| unsafe { dlsym(handle, name.as_ptr()) })
}

/// Looks up `name` in the global scope: the program, its libraries, and preloaded ones. If memtrace has a
/// hook of that name, finds the hook.
pub(crate) fn find_global(name: &CStr) -> *mut c_void {
    // SAFETY: RTLD_DEFAULT is a special handle.
    unsafe { find_in(libc::RTLD_DEFAULT, name) }
}

/// Looks up `name` in the part of the global scope after this library.
pub(crate) fn find_behind(name: &CStr) -> *mut c_void {
    // SAFETY: RTLD_NEXT is a special handle. The call comes from this library, so "next" means after it.
    unsafe { find_in(libc::RTLD_NEXT, name) }
}

/// Looks up `name` in a loaded library whose file name starts with `library`.
pub(crate) fn find_in_loaded(library: &str, name: &CStr) -> *mut c_void {
    for path in loaded_libraries(library) {
        let found = find_in_path(&path, name);
        if !found.is_null() {
            return found;
        }
    }
    null_mut()
}

/// Looks up `name` in the loaded library at `path`, and in the libraries that it needs.
pub(crate) fn find_in_path(path: &CStr, name: &CStr) -> *mut c_void {
    // SAFETY: the path ends in 0; RTLD_NOLOAD loads and runs nothing.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if handle.is_null() {
        return null_mut();
    }
    // SAFETY: the handle is open.
    let found = unsafe { find_in(handle, name) };
    // SAFETY: closes the handle opened above. The library stays loaded, since it was loaded before.
    unsafe { libc::dlclose(handle) };
    found
}

/// Looks up `name` in the loaded libraries for which `wanted` returns true, in the order of their loading.
/// Never finds memtrace's own hook.
pub(crate) fn find_where(name: &CStr, wanted: impl Fn(&Visited<'_>) -> bool) -> *mut c_void {
    let mut found = null_mut();
    walk(|library| {
        if wanted(library) && !library.is_ours() {
            found = library.dynamic_section().map_or(null_mut(), |section| section.find(name));
        }
        if found.is_null() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    });
    found
}

/// Looks up `name` in the global scope, where a preloaded phantom device is, then in a loaded library.
pub(crate) fn find_anywhere(library: &str, name: &CStr) -> *mut c_void {
    let found = find_global(name);
    if found.is_null() { find_in_loaded(library, name) } else { found }
}

/// Looks up `name` in the program's own scope, which begins with the program and the preloaded libraries.
/// `RTLD_DEFAULT` would begin with the scope into which this library was loaded.
pub(crate) fn find_in_program(name: &CStr) -> *mut c_void {
    // SAFETY: null means the program; nothing is loaded, and the handle needs no closing.
    let program = unsafe { libc::dlopen(std::ptr::null(), libc::RTLD_LAZY) };
    // SAFETY: the handle is open.
    unsafe { find_in(program, name) }
}

/// Converts a literal that ends in 0 to a C string, for macros that build names. Panics if the literal does
/// not end in 0.
pub(crate) const fn c_name(literal: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(literal.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("the literal does not end in 0"),
    }
}

/// Converts an address from a lookup to a function. Returns `None` for null.
///
/// # Safety
/// `found` is null or the address of a function of type `F`.
pub(crate) unsafe fn function<F: Copy>(found: *mut c_void) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: not null, so it is a function of type `F` by the contract.
    (!found.is_null()).then(|| unsafe { std::mem::transmute_copy::<*mut c_void, F>(&found) })
}

/// The search scope of a [`Symbol`].
#[derive(Clone, Copy)]
pub(crate) enum Home {
    /// A loaded library whose file name starts with this.
    Loaded(&'static str),
    /// The global scope, then a loaded library whose file name starts with this.
    Anywhere(&'static str),
}

/// A function that memtrace calls but does not hook. `F` is its type.
pub(crate) struct Symbol<F> {
    name: &'static CStr,
    home: Home,
    found: AtomicPtr<c_void>,
    kind: PhantomData<F>,
}

// SAFETY: only the pointer changes, and it is atomic.
unsafe impl<F> Sync for Symbol<F> {}

impl<F: Copy> Symbol<F> {
    /// # Safety
    /// `F` is the type of the function `name` in the library that `home` names, as its header declares it.
    pub(crate) const unsafe fn new(name: &'static CStr, home: Home) -> Self {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        Symbol { name, home, found: AtomicPtr::new(null_mut()), kind: PhantomData }
    }

    /// Returns the function, which is looked up unless it was found before. Returns `None` while no library
    /// has it.
    pub(crate) fn get(&self) -> Option<F> {
        self.cached().or_else(|| {
            let found = match self.home {
                Home::Loaded(library) => find_in_loaded(library, self.name),
                Home::Anywhere(library) => find_anywhere(library, self.name),
            };
            if !found.is_null() {
                self.found.store(found, Ordering::Relaxed);
            }
            self.cached()
        })
    }

    /// Returns the function if an earlier [`get`](Symbol::get) found it. Does no lookup.
    #[inline]
    pub(crate) fn cached(&self) -> Option<F> {
        // SAFETY: the pointer is null or the function of that name, which has the type `F` by the contract of
        // `new`.
        unsafe { function(self.found.load(Ordering::Relaxed)) }
    }
}

/// The real function behind a hook. `F` is its type.
pub(crate) struct RealFn<F> {
    name: &'static CStr,
    library: &'static str,
    found: AtomicPtr<c_void>,
    /// The address that the program looked up with `dlsym`, when it got memtrace's hook instead.
    looked_up: AtomicPtr<c_void>,
    /// The loader's count of loads when no library had the function; 0 if that never happened.
    missed_at: AtomicU64,
    kind: PhantomData<F>,
}

// SAFETY: every field that changes after `new` is atomic.
unsafe impl<F> Sync for RealFn<F> {}

impl<F: Copy> RealFn<F> {
    /// # Safety
    /// `F` is the type of the function `name` as its library's header declares it. The file name of that
    /// library starts with `library`.
    pub(crate) const unsafe fn new(name: &'static CStr, library: &'static str) -> Self {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        RealFn {
            name,
            library,
            found: AtomicPtr::new(null_mut()),
            looked_up: AtomicPtr::new(null_mut()),
            missed_at: AtomicU64::new(0),
            kind: PhantomData,
        }
    }

    /// Returns the real function, or `None` while no library has it.
    #[inline]
    pub(crate) fn get(&self) -> Option<F> {
        let mut found = self.found.load(Ordering::Relaxed);
        if found.is_null() {
            found = self.find();
        }
        // SAFETY: the pointer is null or the function of that name, which has the type `F` by the contract of
        // `new`.
        unsafe { function(found) }
    }

    /// Returns true if the hook calls `found`, the address that the program looked up under this name. If no
    /// search finds a real function, the hook calls `found` from now on.
    ///
    /// # Safety
    /// `found` is a function of type `F`: the one with this name in some library.
    pub(crate) unsafe fn leads_to(&self, found: *mut c_void) -> bool {
        let _ = self.looked_up.compare_exchange(null_mut(), found, Ordering::Relaxed, Ordering::Relaxed);
        let _ = self.get();
        self.found.load(Ordering::Relaxed) == found
    }

    #[cold]
    fn find(&self) -> *mut c_void {
        // The search without the loader's lock comes first, because otherwise a hook without a real function
        // would take that lock on each call.
        let any = self.find_in_any();
        let mut found = if any.is_null() { any } else { find_behind(self.name) };
        if found.is_null() && !any.is_null() {
            found = find_in_loaded(self.library, self.name);
        }
        if found.is_null() {
            found = self.looked_up.load(Ordering::Relaxed);
        }
        if found.is_null() {
            found = any;
        }
        if !found.is_null() {
            self.found.store(found, Ordering::Relaxed);
        }
        found
    }

    /// Searches every library, unless the last search failed and no library was loaded since then. A hook
    /// without a real function may be called often, so repeated searches would be slow.
    fn find_in_any(&self) -> *mut c_void {
        let (loads, _) = version();
        if self.missed_at.load(Ordering::Relaxed) == loads {
            return null_mut();
        }
        let found = find_where(self.name, |_| true);
        if found.is_null() {
            self.missed_at.store(loads, Ordering::Relaxed);
        }
        found
    }
}
