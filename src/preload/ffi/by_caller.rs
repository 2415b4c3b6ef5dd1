//! The real function behind a hook, where the library of that function may be in the process more than once and
//! has state of its own: torch may contain NCCL, and CuPy or vLLM load another one. A call that reached the other
//! copy would hand it a communicator that it does not know.
//!
//! So each library that calls a hook gets the function that the loader would have given it without the hook. The
//! caller is the library of the return address. The loader searches the global scope first, as it was when the
//! caller was loaded, and then the libraries that came with the caller.

use std::ffi::{CStr, c_void};
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use crate::ffi::loaded_libraries::{self, Loaded, library_of, loaded_libraries as paths_of};
use crate::ffi::symbols::{find_behind, find_in_loaded, find_in_path, function};
use crate::runtime::fork::ForkSafe;

/// A return address, in the register of the first argument that is a floating-point number: no hooked function has
/// such an argument, so the register is free whatever the number of the others.
pub(crate) type Caller = f64;

/// Defines the exported hooks of functions that return an `int`. A body calls the real function as `$real`. The
/// result is `$without` where there is none.
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
                // SAFETY: the caller's own arguments, passed on unchanged.
                let $real = || unsafe { function($($arg),*) };
                $body
            }

            #[unsafe(no_mangle)]
            #[unsafe(naked)]
            unsafe extern "C" fn $name($($arg: $type),*) -> std::ffi::c_int {
                // At the entry of a function the return address is on top of the stack.
                core::arch::naked_asm!("movq xmm0, qword ptr [rsp]", "jmp {body}", body = sym body)
            }
        };
    )* };
}

pub(crate) use hooks_by_caller;

/// What one library's look-up found.
struct Known {
    /// The code of the calling library, which stays loaded.
    code: Range<usize>,
    /// The function; null where there was none.
    function: AtomicPtr<c_void>,
    /// The number of libraries that had been loaded then.
    loads: AtomicU64,
    next: *const Known,
}

/// The real function behind a hook, by the library that calls the hook. `F` is its type.
pub(crate) struct ByCaller<F> {
    name: &'static CStr,
    file_name: &'static str,
    /// The newest entry of a list. No entry is ever freed, and no lock is taken to read them or to add one.
    known: AtomicPtr<Known>,
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

    /// The real function for the code that calls; `None` while no library has it.
    #[inline]
    pub(crate) fn get(&self, caller: Caller) -> Option<F> {
        let caller = caller.to_bits() as usize;
        let found = match self.known(caller) {
            Some(known) if !known.function.load(Ordering::Relaxed).is_null() => {
                known.function.load(Ordering::Relaxed)
            }
            known => self.find(caller, known),
        };
        // SAFETY: null, or the function of that name, of type `F` by the contract of `new`.
        unsafe { function(found) }
    }

    fn known(&self, caller: usize) -> Option<&'static Known> {
        // SAFETY: null or an entry, which is never freed.
        let newest = unsafe { self.known.load(Ordering::Acquire).as_ref::<'static>() };
        // SAFETY: as above.
        std::iter::successors(newest, |known| unsafe { known.next.as_ref() })
            .find(|known| known.code.contains(&caller))
    }

    /// Looks the function up, unless no library was loaded since that failed.
    #[cold]
    fn find(&self, caller: usize, known: Option<&'static Known>) -> *mut c_void {
        let (loads, _) = loaded_libraries::version();
        if known.is_some_and(|known| known.loads.load(Ordering::Relaxed) == loads) {
            return null_mut();
        }
        let library = library_of(caller);
        let found = self.search(library.as_ref());
        if let Some(known) = known {
            known.loads.store(loads, Ordering::Relaxed);
            known.function.store(found, Ordering::Relaxed);
        } else if let Some(library) = library.filter(keep_loaded) {
            self.add(library.code, found, loads);
        }
        found
    }

    /// The function that the loader would have given `caller`, which is `None` for generated code.
    fn search(&self, caller: Option<&Loaded>) -> *mut c_void {
        let global = find_behind(self.name);
        // The program itself sees the global scope alone.
        let local = match caller {
            Some(library) if !library.path.is_empty() => not_ours(find_in_path(&library.path, self.name)),
            _ => null_mut(),
        };
        let global_library = library_of(global as usize);
        let was_there = match (&global_library, caller) {
            (Some(global), Some(caller)) => global.place < caller.place,
            _ => true,
        };
        let found = match (global.is_null(), local.is_null()) {
            (false, false) if was_there => global,
            (_, false) => local,
            (false, true) => global,
            (true, true) => not_ours(find_in_loaded(self.file_name, self.name)),
        };
        if let Some(library) = library_of(found as usize) {
            keep_loaded(&library);
        }
        found
    }

    fn add(&self, code: Range<usize>, function: *mut c_void, loads: u64) {
        let (function, loads) = (AtomicPtr::new(function), AtomicU64::new(loads));
        let fresh = Box::into_raw(Box::new(Known { code, function, loads, next: null_mut() }));
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

/// Null for an address in this library.
fn not_ours(found: *mut c_void) -> *mut c_void {
    if is_ours(found) { null_mut() } else { found }
}

fn is_ours(found: *mut c_void) -> bool {
    library_of(not_ours as *const c_void as usize).is_some_and(|own| own.code.contains(&(found as usize)))
}

/// Keeps a library loaded, so that its addresses mean nothing else later. Without the hook the loader does that: it
/// keeps a library for those that were bound to it. Returns false if the loader does not find the library.
fn keep_loaded(library: &Loaded) -> bool {
    // SAFETY: the path ends in 0; RTLD_NOLOAD loads and runs nothing. The handle is not closed on purpose.
    let handle = unsafe { libc::dlopen(library.path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    !handle.is_null()
}

/// The hooks for whose names no library had a function, and the number of libraries that had been loaded then.
static MISSED: ForkSafe<Vec<(usize, u64)>> = ForkSafe::new(Vec::new());

/// Returns true if `found` is a hook of this library, and no other library has a function of that name: a program
/// that looks for it must not find the hook. `dlerror` then says that the name is not defined.
pub(crate) fn is_hook_of_nothing(found: *mut c_void, name: &CStr) -> bool {
    if !is_ours(found) || !find_behind(name).is_null() {
        return false;
    }
    let miss = (found as usize, loaded_libraries::version().0);
    if !MISSED.with(|missed| missed.contains(&miss)) {
        if paths_of("").iter().any(|path| !not_ours(find_in_path(path, name)).is_null()) {
            return false;
        }
        MISSED.with(|missed| {
            missed.retain(|(hook, _)| *hook != miss.0);
            missed.push(miss);
        });
    }
    // The last look-up before the program asks `dlerror`.
    find_behind(name).is_null()
}
