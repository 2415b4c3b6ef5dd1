//! The real functions of the driver, which our hooks call.
//!
//! A program gets a function of the driver in several ways: it is linked to the driver, it looks the name up
//! with `dlsym`, or it calls `cuGetProcAddress`, once for each kind of default stream. Each way may return a
//! different address, and each address gets its own stand-in, which calls the function at that address.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::ffi::symbols::{RealFn, function};

/// An address or a handle of the driver. cuda.h declares some of these as integers and others as pointers,
/// but all are one word long.
pub(super) type Word = *mut c_void;

/// The maximum number of addresses of one function that get a stand-in: the address from `dlsym`, two
/// addresses from `cuGetProcAddress` (one per kind of default stream), and one spare.
const WAYS: usize = 4;

/// A function of the driver, for each way in which a program gets it. `F` is the type of the function.
pub(crate) struct DriverFn<F> {
    /// The function for programs that are linked to the driver: way 0.
    linked: RealFn<F>,
    /// The addresses that the program looked up, for the ways from 1 to [`WAYS`].
    found: [AtomicPtr<c_void>; WAYS],
}

impl<F: Copy> DriverFn<F> {
    /// # Safety
    /// `F` must be the type of the function `name` as cuda.h declares it.
    pub(crate) const unsafe fn new(name: &'static std::ffi::CStr) -> Self {
        // SAFETY: by the contract.
        let linked = unsafe { RealFn::new(name, "libcuda.so") };
        DriverFn { linked, found: [const { AtomicPtr::new(null_mut()) }; WAYS] }
    }

    /// Returns the real function for `way`.
    #[inline]
    pub(crate) fn get(&self, way: usize) -> Option<F> {
        if way == 0 {
            return self.linked.get();
        }
        // SAFETY: the address is the driver's address for the name, so it has the type `F` by the contract of
        // `new`.
        unsafe { function(self.found.get(way - 1)?.load(Ordering::Relaxed)) }
    }

    /// Returns the stand-in for an address that the program looked up, or null if the address is a stand-in
    /// already or no stand-in is left.
    ///
    /// # Safety
    /// `found` is a function of type `F`: the driver's own of that name.
    pub(crate) unsafe fn stand_in(&self, found: *mut c_void, ours: [*mut c_void; WAYS + 1]) -> *mut c_void {
        if ours.contains(&found) {
            return null_mut();
        }
        for (place, stand_in) in self.found.iter().zip(&ours[1..]) {
            let known = match place.compare_exchange(null_mut(), found, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => found,
                Err(known) => known,
            };
            if known == found {
                return *stand_in;
            }
        }
        null_mut()
    }
}

/// Defines, for each function of the driver, its real function, the exported hook, the stand-ins, and its
/// entries in `exported` and `by_base_name`.
///
/// After `as` is the name of the function for `cuGetProcAddress`, or an empty text if it has none. The number
/// after `from` is the first CUDA version that knows this name. The other fields are the same as in
/// [`caller_hooks`](crate::hooks::cuda::stand_in).
macro_rules! driver_hooks {
    ($($name:ident as $base:literal from $since:literal ($($arg:ident: $type:ty),*) caller $register:literal => $body:ident, $real:ident;)*) => {
        $(
            static $real: $crate::hooks::cuda::driver_fn::DriverFn<unsafe extern "C" fn($($type),*) -> std::ffi::c_int> =
                // SAFETY: the signature is the one in cuda.h.
                unsafe { $crate::hooks::cuda::driver_fn::DriverFn::new($crate::ffi::symbols::c_name(concat!(stringify!($name), "\0"))) };

            const _: () = assert!($crate::hooks::cuda::stand_in::is_next_register($register, &[$(size_of::<$type>()),*]));

            #[unsafe(no_mangle)]
            #[unsafe(naked)]
            unsafe extern "C" fn $name($($arg: $type),*) -> std::ffi::c_int {
                $crate::hooks::cuda::stand_in::jump_with_caller!($register, [$($arg)*], $body::<0>)
            }
        )*

        /// The hooks for addresses that were looked up.
        struct StandIns;

        #[expect(non_snake_case, reason = "named as the functions that they replace")]
        impl StandIns {
            $(
                #[unsafe(naked)]
                unsafe extern "C" fn $name<const WAY: usize>($($arg: $type),*) -> std::ffi::c_int {
                    $crate::hooks::cuda::stand_in::jump_with_caller!($register, [$($arg)*], $body::<WAY>)
                }
            )*
        }

        /// Returns the stand-in for an exported name of the driver.
        pub(super) fn exported(name: &[u8]) -> Option<$crate::hooks::cuda::stand_in::StandIn> {
            match name {
                $(_ if name == stringify!($name).as_bytes() => Some(|found| {
                    let ours = [
                    $name as *mut std::ffi::c_void,
                    StandIns::$name::<1> as *mut std::ffi::c_void,
                    StandIns::$name::<2> as *mut std::ffi::c_void,
                    StandIns::$name::<3> as *mut std::ffi::c_void,
                    StandIns::$name::<4> as *mut std::ffi::c_void,
                    ];
                    // SAFETY: `found` is the driver's own function, by the contract of `StandIn`.
                    unsafe { $real.stand_in(found, ours) }
                }),)*
                _ => None,
            }
        }

        /// Returns the stand-in for the address that `cuGetProcAddress` returns for `name` of CUDA `version`.
        pub(super) fn by_base_name(name: &[u8], version: std::ffi::c_int) -> Option<$crate::hooks::cuda::stand_in::StandIn> {
            match name {
                $(_ if name == $base && version >= $since => exported(stringify!($name).as_bytes()),)*
                _ => None,
            }
        }
    };
}

pub(super) use driver_hooks;
