//! The types of arguments that arrive from C.
//!
//! Every exported function is an `unsafe extern "C" fn`: its caller promises the contract of the CUDA header.
//! Pointer arguments are [`In`], [`Out`], [`InOut`], [`Text`] and [`Handle`] instead of raw pointers. A value
//! of these types exists only as an argument of an exported function, or through a constructor that is
//! `unsafe` or starts from a Rust reference. That is the invariant which makes their safe methods sound.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int};
use std::marker::PhantomData;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{LazyLock, Mutex};

use cudarc::runtime::sys::cudaError;
pub(crate) use cudarc::runtime::sys::dim3 as Dim3;

use crate::core::lock::lock;

/// A status code. It is an integer and not an enum, because newer CUDA versions add codes.
pub(crate) type Status = c_int;

/// Success, in every family of calls.
pub(crate) const OK: Status = cudaError::cudaSuccess as Status;
/// An argument has a value that the call does not accept.
pub(crate) const INVALID_VALUE: Status = cudaError::cudaErrorInvalidValue as Status;
/// The device has too little free memory.
pub(crate) const OUT_OF_MEMORY: Status = cudaError::cudaErrorMemoryAllocation as Status;
/// No device is visible.
pub(crate) const NO_DEVICE: Status = cudaError::cudaErrorNoDevice as Status;
/// No device has this index.
pub(crate) const INVALID_DEVICE: Status = cudaError::cudaErrorInvalidDevice as Status;
/// The process opened an IPC handle that it exported itself.
pub(crate) const DEVICE_UNINITIALIZED: Status = cudaError::cudaErrorDeviceUninitialized as Status;
/// A handle is null or of the wrong kind.
pub(crate) const INVALID_HANDLE: Status = cudaError::cudaErrorInvalidResourceHandle as Status;
/// No symbol has this name.
pub(crate) const NOT_FOUND: Status = cudaError::cudaErrorSymbolNotFound as Status;
/// Queued work is not done. This is not an error, so the runtime does not keep it for `cudaGetLastError`.
pub(crate) const NOT_READY: Status = cudaError::cudaErrorNotReady as Status;
/// The code in a file or in memory is incomplete.
pub(crate) const INVALID_IMAGE: Status = cudaError::cudaErrorInvalidKernelImage as Status;
/// The file cannot be read.
pub(crate) const FILE_NOT_FOUND: Status = cudaError::cudaErrorFileNotFound as Status;
/// The rows of a copy are longer than the distance between two rows.
pub(crate) const INVALID_PITCH: Status = cudaError::cudaErrorInvalidPitchValue as Status;
/// A kernel ran for too long.
pub(crate) const LAUNCH_TIMEOUT: Status = cudaError::cudaErrorLaunchTimeout as Status;
/// The range is already registered as pinned host memory.
pub(crate) const ALREADY_REGISTERED: Status = cudaError::cudaErrorHostMemoryAlreadyRegistered as Status;
/// The range is not registered as pinned host memory.
pub(crate) const NOT_REGISTERED: Status = cudaError::cudaErrorHostMemoryNotRegistered as Status;
/// The call is not supported.
pub(crate) const NOT_SUPPORTED: Status = cudaError::cudaErrorNotSupported as Status;

/// An integer, enum or pointer argument that is not dereferenced: a device address, an opaque handle, or an
/// argument that the call ignores.
pub(crate) type Word = usize;

/// A pointer through which a call reads one `T`, or the first element of an array of `T`. It may be null.
#[repr(transparent)]
pub(crate) struct In<'call, T>(*const T, PhantomData<&'call T>);

impl<T> Clone for In<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for In<'_, T> {}

impl<'call, T: Copy> In<'call, T> {
    /// Returns a null pointer, from which nothing is read.
    pub(crate) const fn null() -> Self {
        Self(std::ptr::null(), PhantomData)
    }

    /// Returns the value, or `None` if the pointer is null.
    pub(crate) fn get(self) -> Option<T> {
        // SAFETY: not null, so by the invariant it is good for one read. C callers may pass less alignment
        // than Rust asks for.
        (!self.0.is_null()).then(|| unsafe { self.0.read_unaligned() })
    }

    /// Returns a pointer to the value at an address that the program passed as a number.
    ///
    /// # Safety
    /// `address` is null or good for reads of a `T`.
    pub(crate) unsafe fn from_address(address: usize) -> Self {
        Self(address as *const T, PhantomData)
    }

    /// Returns the pointer to the element at an index of an array.
    ///
    /// # Safety
    /// The pointer is null or the array has more than `index` elements.
    pub(crate) unsafe fn at(self, index: usize) -> Self {
        if self.0.is_null() { self } else { Self(self.0.wrapping_add(index), PhantomData) }
    }

    /// Returns a pointer to the same address with another type.
    ///
    /// # Safety
    /// The pointer is null or good for a read of a `U`.
    pub(crate) unsafe fn cast<U>(self) -> In<'call, U> {
        In(self.0.cast(), PhantomData)
    }

    /// Returns the raw pointer, for reading single fields of a struct that may hold codes which
    /// its Rust enums do not list.
    pub(crate) fn as_ptr(self) -> *const T {
        self.0
    }
}

/// A pointer through which a call writes one `T`, or the first element of an array of `T`. It may be null.
#[repr(transparent)]
pub(crate) struct Out<'call, T>(*mut T, PhantomData<&'call Cell<T>>);

impl<T> Clone for Out<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<'_, T> {}

impl<'call, T> Out<'call, T> {
    /// Returns a pointer to a variable of this library, to pass to a function of another library.
    pub(crate) fn to(place: &'call mut T) -> Self {
        Self(place, PhantomData)
    }

    /// Returns a null pointer, to which nothing is written.
    pub(crate) fn null() -> Self {
        Self(std::ptr::null_mut(), PhantomData)
    }

    /// Returns a pointer to the memory at an address that the program passed as a number.
    ///
    /// # Safety
    /// The address is null or good for a write of a `T` during `'call`.
    pub(crate) unsafe fn from_address(address: usize) -> Self {
        Self(address as *mut T, PhantomData)
    }

    /// Writes the value, unless the pointer is null.
    pub(crate) fn put(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: not null, so by the invariant it is good for one write. C callers may pass less
            // alignment than Rust asks for.
            unsafe { self.0.write_unaligned(value) }
        }
    }

    /// Writes the value and returns success, or `INVALID_VALUE` if the pointer is null.
    pub(crate) fn give(self, value: T) -> Status {
        if self.is_null() {
            return INVALID_VALUE;
        }
        self.put(value);
        OK
    }

    /// Returns true if the pointer is null, which means that the caller does not want this result.
    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Returns the pointer to the element at an index of an array.
    ///
    /// # Safety
    /// The pointer is null or the array has more than `index` elements.
    pub(crate) unsafe fn at(self, index: usize) -> Self {
        if self.is_null() { self } else { Self(self.0.wrapping_add(index), PhantomData) }
    }

    /// Returns a pointer to the same address with another type.
    ///
    /// # Safety
    /// The pointer is null or good for a write of a `U`.
    pub(crate) unsafe fn cast<U>(self) -> Out<'call, U> {
        Out(self.0.cast(), PhantomData)
    }
}

impl Out<'_, c_char> {
    /// Writes a C string. A string that does not fit is cut, and the terminating zero
    /// follows the last byte that fits.
    ///
    /// # Safety
    /// The pointer is null or the array has `capacity` elements.
    pub(crate) unsafe fn text(self, text: &str, capacity: usize) {
        if capacity == 0 {
            return;
        }
        let bytes = &text.as_bytes()[..text.len().min(capacity - 1)];
        for (index, &byte) in bytes.iter().chain(&[0]).enumerate() {
            // SAFETY: index <= capacity - 1.
            unsafe { self.at(index) }.put(byte as c_char);
        }
    }
}

/// A pointer through which a call reads and writes one `T`. It may be null.
#[repr(transparent)]
pub(crate) struct InOut<'call, T>(*mut T, PhantomData<&'call Cell<T>>);

impl<T> Clone for InOut<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for InOut<'_, T> {}

impl<'call, T> InOut<'call, T> {
    /// Returns the pointer for reading.
    pub(crate) fn input(self) -> In<'call, T> {
        In(self.0, PhantomData)
    }

    /// Returns the pointer for writing.
    pub(crate) fn output(self) -> Out<'call, T> {
        Out(self.0, PhantomData)
    }

    /// Returns the raw pointer, for reading and writing single fields of a struct.
    pub(crate) fn as_ptr(self) -> *mut T {
        self.0
    }
}

/// A C string argument. It may be null.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Text<'call>(*const c_char, PhantomData<&'call CStr>);

impl Text<'_> {
    /// Returns the bytes without the terminating zero, or no bytes if the pointer is null.
    pub(crate) fn bytes(&self) -> &[u8] {
        if self.0.is_null() {
            return b"";
        }
        // SAFETY: not null, so by the invariant it is a C string that outlives the call.
        unsafe { CStr::from_ptr(self.0) }.to_bytes()
    }

    /// Returns the address of the first byte, or 0 if the pointer is null.
    pub(crate) fn address(&self) -> usize {
        self.0 as usize
    }

    /// Returns the text, or an empty text if it is not UTF-8.
    pub(crate) fn str(&self) -> &str {
        std::str::from_utf8(self.bytes()).unwrap_or("")
    }
}

/// A handle of an object in this library, as the program holds it: null, or the address of an object that
/// [`new`](Self::new) leaked. Objects are never freed, because a program may use a handle after it destroyed
/// the object, and a real driver survives that.
#[repr(transparent)]
pub(crate) struct Handle<T: 'static>(*const T);

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Handle<T> {}

// SAFETY: a handle gives out shared references only.
unsafe impl<T: Sync> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Handle<T> {}

impl<T> Handle<T> {
    /// Leaks an object and returns its handle.
    pub(crate) fn new(object: T) -> Self {
        Self(Box::leak(Box::new(object)))
    }

    /// Returns the handle of an object that lives as long as the process.
    pub(crate) fn to(object: &'static T) -> Self {
        Self(object)
    }

    /// Returns the null handle.
    pub(crate) const fn null() -> Self {
        Self(std::ptr::null())
    }

    /// Returns the handle that the program passed inside a struct.
    ///
    /// # Safety
    /// `address` is null or came from a handle of the same type.
    pub(crate) unsafe fn from_address(address: usize) -> Self {
        Self(address as *const T)
    }

    /// Returns the object, or `None` if the handle is null.
    pub(crate) fn get(self) -> Option<&'static T> {
        // SAFETY: by the invariant null or the address of an object that is never freed.
        unsafe { self.0.as_ref() }
    }

    /// Returns the handle as a number, as the program sees it; 0 for the null handle.
    pub(crate) fn address(self) -> usize {
        self.0 as usize
    }
}

/// Destroyed objects, which later creations reuse, so that the memory of a program that creates one for each
/// op does not grow. Their memory is never freed, so a handle that the program still uses leads to an object.
pub(crate) struct Destroyed<T: 'static>(Mutex<Vec<Handle<T>>>);

impl<T> Destroyed<T> {
    /// Returns a list without destroyed objects.
    pub(crate) const fn none() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// Adds an object, unless its `flag` shows that it was added before. Returns false in that case.
    pub(crate) fn add(&self, handle: Handle<T>, flag: &AtomicBool) -> bool {
        let is_new = !flag.swap(true, Relaxed);
        if is_new {
            lock(&self.0).push(handle);
        }
        is_new
    }

    /// Takes an object from the list. The caller resets the object's flag.
    pub(crate) fn take(&self) -> Option<(Handle<T>, &'static T)> {
        let handle = lock(&self.0).pop()?;
        Some((handle, handle.get()?))
    }
}

/// Returns a handle without an object: a readable address that differs from every other such handle.
///
/// A program creates several such handles for each op, such as the descriptors of `cublasLtMatmul`. The calls
/// that destroy them do nothing, so a handle must not take memory.
pub(crate) fn opaque_handle() -> usize {
    static FIRST: LazyLock<Option<usize>> = LazyLock::new(|| {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address that the system chooses.
        let address =
            unsafe { libc::mmap(std::ptr::null_mut(), OPAQUE_RANGE, libc::PROT_READ, flags, -1, 0) };
        (address != libc::MAP_FAILED).then_some(address as usize)
    });
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    match *FIRST {
        Some(first) => first + NEXT.fetch_add(OPAQUE_SIZE, Relaxed) % OPAQUE_RANGE,
        // The mapping fails if the program's address space is limited (`ulimit -v`).
        None => Handle::new([0u64; 8]).address(),
    }
}

/// The bytes of address space for handles without an object. They suffice for 2^30 handles, after which the
/// handles repeat. Only pages that the program reads become resident.
const OPAQUE_RANGE: usize = 1 << 36;
/// The distance in bytes between two handles without an object.
const OPAQUE_SIZE: usize = 64;

/// Returns the number of threads or blocks of a launch dimension.
pub(crate) fn volume(dim: Dim3) -> u64 {
    u64::from(dim.x) * u64::from(dim.y) * u64::from(dim.z)
}

/// Defines integer constants for variants of a C enum of cudarc, which can be used in patterns. A value that
/// the program passes stays an integer, because it may be a code that the enum does not list.
macro_rules! codes {
    ($vis:vis $enum:ty { $($name:ident),* $(,)? }) => {
        $(#[allow(non_upper_case_globals, reason = "named as in the header")]
        $vis const $name: ::std::ffi::c_int = <$enum>::$name as ::std::ffi::c_int;)*
    };
}

pub(crate) use codes;

/// Reads a value at an address. Returns `None` if the address is null.
///
/// # Safety
/// The address is null or good for a read of a `T`, which is an integer.
pub(crate) unsafe fn read<T: Copy>(address: usize) -> Option<T> {
    // SAFETY: the caller's promise.
    (address != 0).then(|| unsafe { (address as *const T).read_unaligned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_c_string_is_cut_to_the_capacity_with_its_zero() {
        for (capacity, expected) in
            [(8, b"abcd\0###"), (5, b"abcd\0###"), (3, b"ab\0#####"), (0, b"########")]
        {
            let mut bytes = [b'#' as c_char; 8];
            // SAFETY: the array has eight elements.
            unsafe { Out::<c_char>::from_address(bytes.as_mut_ptr() as usize).text("abcd", capacity) };
            assert_eq!(bytes.map(|byte| byte as u8), *expected, "capacity {capacity}");
        }
    }

    #[test]
    fn a_null_out_pointer_is_refused_and_not_written() {
        assert_eq!(Out::<u32>::null().give(1), INVALID_VALUE);
        let mut place = 0u32;
        assert_eq!((Out::to(&mut place).give(7), place), (OK, 7));
        assert!(Handle::<u32>::null().get().is_none());
        assert_eq!(Handle::new(5u32).get(), Some(&5));
    }

    #[test]
    fn handles_without_an_object_are_distinct_and_can_be_read() {
        let handles: std::collections::HashSet<_> = (0..1000).map(|_| opaque_handle()).collect();
        assert_eq!(handles.len(), 1000);
        for handle in handles {
            // SAFETY: a handle can be read.
            assert_eq!(unsafe { read::<u64>(handle) }, Some(0));
        }
    }

    #[test]
    fn a_destroyed_object_is_taken_once() {
        static NONE: AtomicBool = AtomicBool::new(false);
        let destroyed = Destroyed::none();
        assert!(destroyed.take().is_none());
        let handle = Handle::new(5u32);
        assert!(destroyed.add(handle, &NONE));
        assert!(!destroyed.add(handle, &NONE), "destroyed twice");
        assert_eq!(destroyed.take().map(|(_, object)| *object), Some(5));
        assert!(destroyed.take().is_none());
    }
}
