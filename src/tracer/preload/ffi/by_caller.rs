//! Finds the real function behind a hook for libraries that may be loaded more than once, each copy with its
//! own state. For example, torch may contain NCCL while CuPy or vLLM loads another copy. A call that reached
//! the other copy would pass a communicator that this copy does not know.
//!
//! So each library that calls a hook gets its own function. The return address identifies the calling
//! library. The function is taken from the first of these libraries that has it:
//!
//! 1. The library to which the loader has bound the caller's calls of other functions of the same family,
//!    which have no hook. This is the loader's own choice, whatever the search scopes were.
//! 2. The library that the loader would choose, as far as this can be known later: the global scope if that
//!    library was loaded before the caller, then the caller and the libraries that it needs, then the rest of
//!    the global scope. If the caller calls only hooked functions, the choice may be a wrong copy: memtrace
//!    does not know the scope of a library that needs the caller, nor the time at which a library became
//!    global.
//! 3. A library with the usual file name, then any library. The identified caller may be wrong, because a
//!    function that ends with a tail call leaves the return address of its own caller.
//!
//! The caller's library may be unloaded at any time.

use std::ffi::{CStr, c_void};
use std::marker::PhantomData;
use std::ops::{ControlFlow, Range};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use crate::ffi::loaded_libraries::{self, Loaded, library_of, walk};
use crate::ffi::symbols::{find_behind, find_in_loaded, find_in_path, find_where, function};

/// A return address, passed in the register of the first floating-point argument. No hooked function has a
/// floating-point argument, so this register is free, however many other arguments there are.
pub(crate) type Caller = f64;

/// Defines the exported hooks of functions that return an `int`. The body calls the real function as `$real`.
/// If no library has the function, the hook returns `$without`.
macro_rules! hooks_by_caller {
    ($library:literal, $without:expr; $($name:ident($($arg:ident: $type:ty),*) |$real:ident| $body:expr;)*) => { $(
        const _: () = {
            static REAL: $crate::ffi::by_caller::ByCaller<unsafe extern "C" fn($($type),*) -> std::ffi::c_int> =
                // SAFETY: the signature is the one in the header of the library.
                unsafe {
                    $crate::ffi::by_caller::ByCaller::new(
                        $crate::ffi::symbols::c_name(concat!(stringify!($name), "\0")),
                        $library,
                    )
                };

            unsafe extern "C" fn body(
                $($arg: $type,)* caller: $crate::ffi::by_caller::Caller
            ) -> std::ffi::c_int {
                let Some(function) = REAL.get(caller) else { return $without };
                // SAFETY: the call passes on the caller's own arguments unchanged.
                let $real = || unsafe { function($($arg),*) };
                $body
            }

            #[unsafe(no_mangle)]
            #[unsafe(naked)]
            unsafe extern "C" fn $name($($arg: $type),*) -> std::ffi::c_int {
                // At the entry of a function the return address is on top of the stack.
                #[cfg(target_arch = "x86_64")]
                core::arch::naked_asm!("movq xmm0, qword ptr [rsp]", "jmp {body}", body = sym body);
                // Here it is in the link register.
                #[cfg(target_arch = "aarch64")]
                core::arch::naked_asm!("fmov d0, x30", "b {body}", body = sym body);
            }
        };
    )* };
}

pub(crate) use hooks_by_caller;

/// The result of the lookup for one calling library. After the entry is in the list, only `checked` changes.
struct KnownCaller {
    /// The code of the calling library.
    code: Range<usize>,
    /// The function that was found; null if no library has it.
    function: *mut c_void,
    /// The result of [`KnownCaller::state`] when the entry was last found to be valid.
    checked: AtomicU64,
    next: *const KnownCaller,
}

/// The loader's counts of loaded and unloaded libraries.
type Version = (u64, u64);

impl KnownCaller {
    /// Returns true if this entry is still valid. A found function is valid until a library is unloaded,
    /// because after that another library may occupy the memory of the function or of the caller. A missing
    /// function may appear when another library is loaded.
    fn is_valid(&self, version: Version) -> bool {
        self.checked.load(Ordering::Relaxed) == self.state(version)
    }

    /// Returns the value of `checked` for a set of loaded libraries. Both counts only grow, so their sum
    /// changes whenever one of them does.
    fn state(&self, (loaded, unloaded): Version) -> u64 {
        if self.function.is_null() { loaded + unloaded } else { unloaded }
    }
}

/// The real functions behind a hook, one for each library that calls the hook. `F` is the type of these
/// functions.
pub(crate) struct ByCaller<F> {
    name: &'static CStr,
    file_name: &'static str,
    /// The newest entry of a linked list. Entries are never freed, and the list is read and extended without
    /// a lock.
    known: AtomicPtr<KnownCaller>,
    kind: PhantomData<F>,
}

// SAFETY: only the list changes, and its links are atomic or never change.
unsafe impl<F> Sync for ByCaller<F> {}

impl<F: Copy> ByCaller<F> {
    /// # Safety
    /// `F` is the type of the function `name` as its library's header declares it. The file name of that
    /// library starts with `file_name`.
    pub(crate) const unsafe fn new(name: &'static CStr, file_name: &'static str) -> Self {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        ByCaller { name, file_name, known: AtomicPtr::new(null_mut()), kind: PhantomData }
    }

    /// Returns the real function for the calling code, or `None` while no library has it.
    #[inline]
    pub(crate) fn get(&self, caller: Caller) -> Option<F> {
        let caller = caller.to_bits() as usize;
        let version = loaded_libraries::version();
        let known = self.known(caller);
        let found = match known {
            Some(known) if known.is_valid(version) => known.function,
            _ => self.find(caller, known, version),
        };
        // SAFETY: `found` is null or the function of that name, which has the type `F` by the contract of
        // `new`.
        unsafe { function(found) }
    }

    fn known(&self, caller: usize) -> Option<&'static KnownCaller> {
        // SAFETY: the pointer is null or points to an entry, which is never freed.
        let newest = unsafe { self.known.load(Ordering::Acquire).as_ref::<'static>() };
        // SAFETY: as above.
        std::iter::successors(newest, |known| unsafe { known.next.as_ref() })
            .find(|known| known.code.contains(&caller))
    }

    /// Looks the function up, and caches the result for `version` of the loaded libraries.
    #[cold]
    fn find(&self, caller: usize, known: Option<&'static KnownCaller>, version: Version) -> *mut c_void {
        let library = library_of(caller);
        let found = self.search(caller, library.as_ref());
        // The result for generated code is not cached, because other code may later be at the same address.
        let Some(library) = library else { return found };
        match known {
            // Keep the entry if the result has not changed. A library that is loaded again usually gets the
            // same addresses.
            Some(known) if known.code == library.code && known.function == found => {
                known.checked.store(known.state(version), Ordering::Relaxed);
            }
            _ => self.add(library.code, found, version),
        }
        found
    }

    /// Returns the function that the loader would have bound for `caller`. `library` is `None` for generated
    /// code.
    fn search(&self, caller: usize, library: Option<&Loaded>) -> *mut c_void {
        let bound = self.bound(caller);
        if !bound.is_null() {
            return bound;
        }
        let global = find_behind(self.name);
        // The program itself has no scope of its own, only the global scope.
        let local = match library {
            Some(library) if !library.path.is_empty() => not_ours(find_in_path(&library.path, self.name)),
            _ => null_mut(),
        };
        let global_library = library_of(global as usize);
        let was_there = match (&global_library, library) {
            (Some(global), Some(library)) => global.place < library.place,
            _ => true,
        };
        match (global.is_null(), local.is_null()) {
            (false, false) if was_there && global != local => kept(global),
            (_, false) => local,
            (false, true) => kept(global),
            (true, true) => {
                let found = not_ours(find_in_loaded(self.file_name, self.name));
                if found.is_null() { find_where(self.name, |_| true) } else { found }
            }
        }
    }

    /// Returns the function from the library to which the caller's calls of the unhooked functions are bound.
    /// Returns null if the caller has no such calls, or has not made one yet.
    fn bound(&self, caller: usize) -> *mut c_void {
        let family = self.file_name.trim_start_matches("lib").trim_end_matches(".so");
        let mut addresses = Vec::new();
        walk(|library| {
            if !library.has_code(caller) {
                return ControlFlow::Continue(());
            }
            if let Some(section) = library.dynamic_section() {
                section.references(family, |address, own| {
                    // Before the first call, the word may hold the address of a stub in the caller's own
                    // code. Such an address is skipped.
                    if address == own || !library.has_code(address) {
                        addresses.push(address);
                    }
                });
            }
            ControlFlow::Break(())
        });
        find_where(self.name, |library| addresses.iter().any(|address| library.has_code(*address)))
    }

    fn add(&self, code: Range<usize>, function: *mut c_void, version: Version) {
        let mut fresh =
            Box::new(KnownCaller { code, function, checked: AtomicU64::new(0), next: null_mut() });
        *fresh.checked.get_mut() = fresh.state(version);
        let fresh = Box::into_raw(fresh);
        let mut newest = self.known.load(Ordering::Relaxed);
        loop {
            // SAFETY: no other thread has the entry yet.
            unsafe { (*fresh).next = newest };
            match self.known.compare_exchange_weak(newest, fresh, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(other) => newest = other,
            }
        }
    }
}

/// Returns `found`, or null if this address is in memtrace's own library.
fn not_ours(found: *mut c_void) -> *mut c_void {
    if is_ours(found) { null_mut() } else { found }
}

fn is_ours(found: *mut c_void) -> bool {
    library_of(not_ours as *const c_void as usize).is_some_and(|own| own.code.contains(&(found as usize)))
}

/// Keeps the function's library loaded from now on, and returns the function. The loader keeps a library
/// loaded while other libraries are bound to it. But the caller is bound to the hook, so the loader does not
/// know that the caller uses this library.
fn kept(function: *mut c_void) -> *mut c_void {
    if let Some(library) = library_of(function as usize) {
        // SAFETY: the path ends in 0; RTLD_NOLOAD loads and runs nothing. The handle stays open on purpose.
        unsafe { libc::dlopen(library.path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    }
    function
}

/// Returns true if `found` is a hook of this library and no other library has a function of that name. A
/// program that probes for the function must then not find the hook, and `dlerror` must report the name as
/// undefined.
pub(crate) fn is_hook_of_nothing(found: *mut c_void, name: &CStr) -> bool {
    // The order matters, because the program may call `dlerror` next, which reports the failure of the last
    // lookup.
    is_ours(found) && find_where(name, |_| true).is_null() && find_behind(name).is_null()
}
