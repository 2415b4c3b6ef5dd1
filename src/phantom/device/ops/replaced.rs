//! The functions of PyTorch and cuDNN that this library replaces, and calls in turn.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::ops::torch::library;

pub(super) const TORCH_CPU: &CStr = c"libtorch_cpu.so";

/// A function of another library that a function of the same name in this library replaces.
pub(crate) struct Replaced {
    name: &'static CStr,
    library: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Replaced {
    /// Creates the description of the function with this name in this library.
    pub(crate) const fn new(library: &'static CStr, name: &'static CStr) -> Self {
        Self { name, library, found: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Returns the address of the replaced function. It exists, because only libraries that are linked with it call
    /// the function that replaces it.
    pub(crate) fn real(&self) -> *mut c_void {
        let mut found = self.found.load(Ordering::Relaxed);
        if found.is_null() {
            let library = library(self.library).unwrap_or(libc::RTLD_NEXT as usize);
            // SAFETY: a lookup without side effects.
            found = unsafe { libc::dlsym(library as *mut c_void, self.name.as_ptr()) };
            assert!(!found.is_null(), "{} has no {:?}", self.library.to_string_lossy(), self.name);
            self.found.store(found, Ordering::Relaxed);
        }
        found
    }
}
