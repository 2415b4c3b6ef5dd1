//! The functions of PyTorch that this library replaces, and calls in turn.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::ops::torch::library;

pub(super) const TORCH_CPU: &CStr = c"libtorch_cpu.so";

/// A PyTorch function that a function of the same name in this library replaces.
pub(super) struct Replaced {
    name: &'static CStr,
    library: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Replaced {
    /// Creates the description of the function with this name in this library.
    pub(super) const fn new(library: &'static CStr, name: &'static CStr) -> Self {
        Self { name, library, found: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Returns the address of PyTorch's function. It exists, because only PyTorch's libraries call the
    /// function that replaces it.
    pub(super) fn real(&self) -> *mut c_void {
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
