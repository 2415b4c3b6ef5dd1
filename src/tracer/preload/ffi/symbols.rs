//! Symbols of other libraries. No other module looks a symbol up.
//!
//! Two kinds of look-up, and one rule for each:
//!
//! - [`RealFn`], the function behind a hook of ours. `RTLD_NEXT` finds the definition after ours in the
//!   global scope. It misses libraries that were loaded with `RTLD_LOCAL` (torch's, through Python): those
//!   are then searched by file name. Then comes the address that the program itself found with `dlsym`, and
//!   last any loaded library: one may contain another, as some libraries contain the CUDA runtime. A library
//!   that a process may have twice, with state of its own, needs [`ByCaller`](super::by_caller::ByCaller).
//! - [`Symbol`], a function that we call and do not hook. It is searched where its [`Home`] says.
//!
//! What no library has is found out without a lock of the loader, from the tables of the libraries in memory.
//!
//! A library is searched by file name through an `RTLD_NOLOAD` handle: that loads nothing and runs no
//! constructor. A failed look-up is never cached, because the library may be loaded before the next call.
//!
//! Every look-up goes through glibc's own `dlsym`, since the exported name is our hook, and may take a lock
//! of the loader. Code that runs under a lock of the program (torch's allocator reports under its mutex) must
//! therefore not look up: it asks [`Symbol::cached`], and the symbol was found before, by [`Symbol::get`].

use std::ffi::{CStr, c_char, c_void};
use std::marker::PhantomData;
use std::ops::ControlFlow;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use crate::ffi::loaded_libraries::{Visited, loaded_libraries, version, walk};

/// The type of `dlsym`.
pub(crate) type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

static REAL_DLSYM: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

/// glibc's own `dlsym`, behind our hook of that name.
pub(crate) fn real_dlsym() -> Option<Dlsym> {
    let mut found = REAL_DLSYM.load(Ordering::Relaxed);
    if found.is_null() {
        // glibc 2.34 moved it from libdl to libc and kept the name of the old version.
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

/// Looks `name` up through an open handle, or `RTLD_DEFAULT`; null when it is not there.
///
/// # Safety
/// `handle` is open or one of the special handles.
pub(crate) unsafe fn find_in(handle: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: by the contract, and the name ends in 0.
    real_dlsym().map_or(null_mut(), |dlsym| unsafe { dlsym(handle, name.as_ptr()) })
}

/// Looks `name` up in the global scope: the program, its libraries, and preloaded ones. Finds our own hook
/// where we have one of that name.
pub(crate) fn find_global(name: &CStr) -> *mut c_void {
    // SAFETY: RTLD_DEFAULT is a special handle.
    unsafe { find_in(libc::RTLD_DEFAULT, name) }
}

/// Looks `name` up after this library in the global scope.
pub(crate) fn find_behind(name: &CStr) -> *mut c_void {
    // SAFETY: RTLD_NEXT is a special handle. The call comes from this library, so "next" means after it.
    unsafe { find_in(libc::RTLD_NEXT, name) }
}

/// Looks `name` up in a loaded library whose file name starts with `library`.
pub(crate) fn find_in_loaded(library: &str, name: &CStr) -> *mut c_void {
    for path in loaded_libraries(library) {
        let found = find_in_path(&path, name);
        if !found.is_null() {
            return found;
        }
    }
    null_mut()
}

/// Looks `name` up in the loaded library of this path, and in those that it needs.
pub(crate) fn find_in_path(path: &CStr, name: &CStr) -> *mut c_void {
    // SAFETY: the path ends in 0; RTLD_NOLOAD loads and runs nothing.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if handle.is_null() {
        return null_mut();
    }
    // SAFETY: the handle is open.
    let found = unsafe { find_in(handle, name) };
    // SAFETY: closes the handle opened above; the library stays, since it was loaded before.
    unsafe { libc::dlclose(handle) };
    found
}

/// Looks `name` up in the loaded libraries for which `wanted` returns true, in the order in which they were loaded. Never
/// finds our own hook.
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

/// Looks `name` up in the global scope, where a preloaded phantom device is, then in a loaded library.
pub(crate) fn find_anywhere(library: &str, name: &CStr) -> *mut c_void {
    let found = find_global(name);
    if found.is_null() { find_in_loaded(library, name) } else { found }
}

/// Looks `name` up in the program's own scope, which begins with the program and the preloaded libraries.
/// `RTLD_DEFAULT` would begin with the scope that this library was loaded into.
pub(crate) fn find_in_program(name: &CStr) -> *mut c_void {
    // SAFETY: null means the program; nothing is loaded, and the handle needs no closing.
    let program = unsafe { libc::dlopen(std::ptr::null(), libc::RTLD_LAZY) };
    // SAFETY: an open handle.
    unsafe { find_in(program, name) }
}

/// A literal that ends in 0 as a C string; for macros that build names.
pub(crate) const fn c_name(literal: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(literal.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("the literal does not end in 0"),
    }
}

/// Converts a found address to a function.
///
/// # Safety
/// `found` is null or a function of type `F`.
pub(crate) unsafe fn function<F: Copy>(found: *mut c_void) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: not null, so by the contract a function of this type.
    (!found.is_null()).then(|| unsafe { std::mem::transmute_copy::<*mut c_void, F>(&found) })
}

/// The search scope of a [`Symbol`].
#[derive(Clone, Copy)]
pub(crate) enum Home {
    /// Loaded, by a file name that starts with this.
    Loaded(&'static str),
    /// In the global scope, else loaded by a file name that starts with this.
    Anywhere(&'static str),
}

/// A function that we call and do not hook. `F` is its type.
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

    /// The function, looked up unless it was found before; `None` while no library has it.
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

    /// The function, if [`get`](Symbol::get) has found it; never looks it up.
    #[inline]
    pub(crate) fn cached(&self) -> Option<F> {
        // SAFETY: null, or the function of that name, of type `F` by the contract of `new`.
        unsafe { function(self.found.load(Ordering::Relaxed)) }
    }
}

/// The real function behind a hook. `F` is its type.
pub(crate) struct RealFn<F> {
    name: &'static CStr,
    library: &'static str,
    found: AtomicPtr<c_void>,
    /// The address that the program found with `dlsym`, when it got our hook instead.
    looked_up: AtomicPtr<c_void>,
    /// The number of libraries that had been loaded when none of them had the function; 0 before that.
    missed_at: AtomicU64,
    kind: PhantomData<F>,
}

// SAFETY: only the pointers change, and they are atomic.
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

    /// The real function; `None` while no library has it.
    #[inline]
    pub(crate) fn get(&self) -> Option<F> {
        let mut found = self.found.load(Ordering::Relaxed);
        if found.is_null() {
            found = self.find();
        }
        // SAFETY: null, or the function of that name, of type `F` by the contract of `new`.
        unsafe { function(found) }
    }

    /// Returns true if the hook calls `found`, the address that the program looked up under this name. A hook
    /// without a real function takes `found`.
    ///
    /// # Safety
    /// `found` is a function of type `F`: the one of this name in a library that has it.
    pub(crate) unsafe fn leads_to(&self, found: *mut c_void) -> bool {
        let _ = self.looked_up.compare_exchange(null_mut(), found, Ordering::Relaxed, Ordering::Relaxed);
        let _ = self.get();
        self.found.load(Ordering::Relaxed) == found
    }

    #[cold]
    fn find(&self) -> *mut c_void {
        // First without the lock of the loader, which a call without an answer would take each time.
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

    /// Searches every library, unless none was loaded since that failed: a hook may be called often without one.
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
