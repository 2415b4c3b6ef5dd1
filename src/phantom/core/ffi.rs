//! The types in which the C side's arguments arrive.
//!
//! An answer takes its pointers as [`Out`] or [`Text`] rather than raw: both can only come into
//! being as arguments of an exported function, so the C contract of that function (null, or good
//! for what the header says) is what makes their methods safe.

use std::ffi::{CStr, c_char, c_int};

/// A status code. An integer, not an enum: newer versions add codes.
pub(crate) type Status = c_int;
/// Success, in every family.
pub(crate) const OK: Status = 0;
/// `cudaErrorInvalidValue`.
pub(crate) const INVALID_VALUE: Status = 1;
/// `cudaErrorMemoryAllocation`.
pub(crate) const OUT_OF_MEMORY: Status = 2;
/// `cudaErrorNoDevice`.
pub(crate) const NO_DEVICE: Status = 100;
/// `cudaErrorInvalidDevice`.
pub(crate) const INVALID_DEVICE: Status = 101;
/// `cudaErrorInvalidResourceHandle`.
pub(crate) const INVALID_HANDLE: Status = 400;
/// `cudaErrorSymbolNotFound`.
pub(crate) const NOT_FOUND: Status = 500;
/// `cudaErrorNotReady`.
pub(crate) const NOT_READY: Status = 600;
/// `cudaErrorLaunchTimeout`.
pub(crate) const LAUNCH_TIMEOUT: Status = 702;
/// `cudaErrorNotSupported`.
pub(crate) const NOT_SUPPORTED: Status = 801;

/// An integer, enum or pointer argument whose meaning does not matter here. Device addresses are
/// never pointers to us: nothing lives behind most of them.
pub(crate) type Word = usize;

/// Where an answer writes a value.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Out<T>(*mut T);

impl<T: Copy> Out<T> {
    /// Writes the value, unless the caller did not want it.
    pub(crate) fn put(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: not null, so the C contract makes it good for one write; C callers may pass
            // less alignment than Rust would ask for.
            unsafe { self.0.write_unaligned(value) }
        }
    }

    /// Writes the value where the C contract demands a place for it.
    pub(crate) fn give(self, value: T) -> Status {
        if self.0.is_null() {
            return INVALID_VALUE;
        }
        self.put(value);
        OK
    }

    /// Reads what the caller left there, for arguments that go both ways.
    pub(crate) fn get(self) -> Option<T> {
        // SAFETY: not null, so the C contract makes it good for one read.
        (!self.0.is_null()).then(|| unsafe { self.0.read_unaligned() })
    }

    /// The place of the `index`th element of an array that the header says has one.
    pub(crate) fn at(self, index: usize) -> Self {
        if self.0.is_null() { self } else { Self(self.0.wrapping_add(index)) }
    }

    /// The address, for memory that is then treated as bytes.
    pub(crate) fn address(self) -> usize {
        self.0 as usize
    }

    /// The same place, read as another type.
    pub(crate) fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }

    /// An array elsewhere, whose address the C side gave in a struct.
    pub(crate) fn from_address(address: usize) -> Self {
        Self(address as *mut T)
    }
}

impl Out<c_char> {
    /// Writes a C string, cut to what fits with its zero.
    pub(crate) fn text(self, text: &str, capacity: usize) {
        if capacity == 0 {
            return;
        }
        let bytes = &text.as_bytes()[..text.len().min(capacity - 1)];
        for (index, &byte) in bytes.iter().enumerate() {
            self.at(index).put(byte as c_char);
        }
        self.at(bytes.len()).put(0);
    }
}

/// A C string that came as an argument.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Text(*const c_char);

impl Text {
    /// The text; empty for null.
    pub(crate) fn bytes(&self) -> &[u8] {
        if self.0.is_null() {
            return b"";
        }
        // SAFETY: not null, so the C contract makes it a string that ends in zero and outlives the
        // call, and the borrow of an argument ends with the call.
        unsafe { CStr::from_ptr(self.0) }.to_bytes()
    }

    /// The text as UTF-8; empty where it is not.
    pub(crate) fn str(&self) -> &str {
        std::str::from_utf8(self.bytes()).unwrap_or("")
    }
}

/// `dim3`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Dim3 {
    pub(crate) x: u32,
    pub(crate) y: u32,
    pub(crate) z: u32,
}

impl Dim3 {
    pub(crate) fn product(self) -> u64 {
        u64::from(self.x) * u64::from(self.y) * u64::from(self.z)
    }
}

/// An object of the library that the C side knows by a handle: never freed while anything could
/// still name it, since a program may use a handle after it destroyed it and a card survives that.
pub(crate) fn leak<T>(value: T) -> usize {
    std::ptr::from_mut(Box::leak(Box::new(value))) as usize
}

/// A handle that stands for nothing: an address that is valid, distinct and never read by us.
pub(crate) fn opaque_handle() -> usize {
    leak([0u64; 8])
}
