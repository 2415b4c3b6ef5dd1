//! The functions that return a function of the driver by its name: `cuGetProcAddress`, and the runtime's
//! calls for the same purpose. The returned function is replaced if [`super::driver`] hooks it, or if it is
//! `cuGetProcAddress` itself.
//!
//! Every CUDA runtime, whether linked into the program or loaded later, finds `cuGetProcAddress` with `dlsym`
//! and everything else with `cuGetProcAddress`.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::ptr::null_mut;

use super::driver;
use super::driver_fn::DriverFn;
use super::stand_in::StandIn;
use crate::ffi::cuda_types::{NOT_INITIALIZED, SUCCESS};
use crate::ffi::symbols::RealFn;
use crate::guard::shielded;
use crate::runtime::session;

/// The out-parameter through which a call returns the address of a function.
type FunctionSlot = *mut *mut c_void;
type Get = unsafe extern "C" fn(*const c_char, FunctionSlot, c_int, c_ulonglong) -> c_int;
type GetV2 = unsafe extern "C" fn(*const c_char, FunctionSlot, c_int, c_ulonglong, *mut c_int) -> c_int;
type OfRuntime = unsafe extern "C" fn(*const c_char, FunctionSlot, c_ulonglong, *mut c_int) -> c_int;
type ByVersion = unsafe extern "C" fn(*const c_char, FunctionSlot, c_uint, c_ulonglong, *mut c_int) -> c_int;

// SAFETY: the signature is the one in cuda.h, before CUDA 12.
static GET: DriverFn<Get> = unsafe { DriverFn::new(c"cuGetProcAddress") };
// SAFETY: the signature is the one in cuda.h.
static GET_V2: DriverFn<GetV2> = unsafe { DriverFn::new(c"cuGetProcAddress_v2") };
// SAFETY: the signature is the one in cuda_runtime_api.h.
static OF_RUNTIME: RealFn<OfRuntime> = unsafe { RealFn::new(c"cudaGetDriverEntryPoint", "libcudart.so") };
// SAFETY: as above.
static OF_RUNTIME_PTSZ: RealFn<OfRuntime> =
    unsafe { RealFn::new(c"cudaGetDriverEntryPoint_ptsz", "libcudart.so") };
// SAFETY: as above.
static BY_VERSION: RealFn<ByVersion> =
    unsafe { RealFn::new(c"cudaGetDriverEntryPointByVersion", "libcudart.so") };
// SAFETY: as above.
static BY_VERSION_PTSZ: RealFn<ByVersion> =
    unsafe { RealFn::new(c"cudaGetDriverEntryPointByVersion_ptsz", "libcudart.so") };

/// The first CUDA version whose `cuGetProcAddress` has a fifth argument.
const V2_SINCE: c_int = 12000;
/// The CUDA version assumed for a request to the runtime that names no version: the version of the oldest
/// runtime with this call.
const RUNTIME_SINCE: c_int = 11030;

/// Returns the stand-in for `cuGetProcAddress` of CUDA 11.
///
/// # Safety
/// `found` is the driver's `cuGetProcAddress`.
unsafe fn get_proc_address(found: *mut c_void) -> *mut c_void {
    let ours = [
        cuGetProcAddress as *mut c_void,
        get::<1> as *mut c_void,
        get::<2> as *mut c_void,
        get::<3> as *mut c_void,
        get::<4> as *mut c_void,
    ];
    // SAFETY: by the contract.
    unsafe { GET.stand_in(found, ours) }
}

/// Returns the stand-in for `cuGetProcAddress` since CUDA 12.
///
/// # Safety
/// `found` is the driver's `cuGetProcAddress_v2`.
unsafe fn get_proc_address_v2(found: *mut c_void) -> *mut c_void {
    let ours = [
        cuGetProcAddress_v2 as *mut c_void,
        get_v2::<1> as *mut c_void,
        get_v2::<2> as *mut c_void,
        get_v2::<3> as *mut c_void,
        get_v2::<4> as *mut c_void,
    ];
    // SAFETY: by the contract.
    unsafe { GET_V2.stand_in(found, ours) }
}

/// Returns the stand-in for an exported name of the driver.
pub(super) fn of_driver(name: &[u8]) -> Option<StandIn> {
    match name {
        b"cuGetProcAddress" => Some(get_proc_address),
        b"cuGetProcAddress_v2" => Some(get_proc_address_v2),
        _ => None,
    }
}

/// Replaces the address that the driver wrote with a stand-in, if the address belongs to a hooked function.
///
/// # Safety
/// The call that received `name` and `place` succeeded. So `name` is a C string, and `place` is null or was
/// written.
unsafe fn replace(name: *const c_char, place: FunctionSlot, version: c_int) {
    shielded(|| {
        if name.is_null() || !session::session().is_some_and(|session| session.settings.driver) {
            return;
        }
        // SAFETY: by the contract above.
        let name = unsafe { CStr::from_ptr(name) }.to_bytes();
        let stand_in: StandIn = match name {
            b"cuGetProcAddress" if version < V2_SINCE => get_proc_address,
            b"cuGetProcAddress" => get_proc_address_v2,
            _ => match driver::by_base_name(name, version) {
                Some(stand_in) => stand_in,
                None => return,
            },
        };
        // SAFETY: by the contract above.
        let Some(place) = (unsafe { place.as_mut() }).filter(|place| !place.is_null()) else { return };
        // SAFETY: `*place` is the driver's own function of that name.
        let ours = unsafe { stand_in(*place) };
        if !ours.is_null() {
            *place = ours;
        }
    });
}

unsafe extern "C" fn get<const WAY: usize>(
    name: *const c_char,
    place: FunctionSlot,
    version: c_int,
    flags: c_ulonglong,
) -> c_int {
    let Some(real) = GET.get(WAY) else { return NOT_INITIALIZED };
    // SAFETY: the caller's arguments are passed on unchanged.
    let status = unsafe { real(name, place, version, flags) };
    if status == SUCCESS {
        // SAFETY: the call with these arguments succeeded.
        unsafe { replace(name, place, version) };
    }
    status
}

unsafe extern "C" fn get_v2<const WAY: usize>(
    name: *const c_char,
    place: FunctionSlot,
    version: c_int,
    flags: c_ulonglong,
    found: *mut c_int,
) -> c_int {
    let Some(real) = GET_V2.get(WAY) else { return NOT_INITIALIZED };
    // SAFETY: the caller's arguments are passed on unchanged.
    let status = unsafe { real(name, place, version, flags, found) };
    if status == SUCCESS {
        // SAFETY: the call with these arguments succeeded.
        unsafe { replace(name, place, version) };
    }
    status
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetProcAddress(
    name: *const c_char,
    place: FunctionSlot,
    version: c_int,
    flags: c_ulonglong,
) -> c_int {
    // SAFETY: the caller's arguments are passed on unchanged.
    unsafe { get::<0>(name, place, version, flags) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetProcAddress_v2(
    name: *const c_char,
    place: FunctionSlot,
    version: c_int,
    flags: c_ulonglong,
    found: *mut c_int,
) -> c_int {
    // SAFETY: the caller's arguments are passed on unchanged.
    unsafe { get_v2::<0>(name, place, version, flags, found) }
}

/// Defines the hook of a call of the runtime that returns functions of the driver. `$version` is the CUDA
/// version of the request.
macro_rules! of_runtime {
    ($($name:ident($($arg:ident: $type:ty),*) version $version:expr => $real:ident;)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            name: *const c_char,
            place: FunctionSlot,
            $($arg: $type,)*
            flags: c_ulonglong,
            found: *mut c_int,
        ) -> c_int {
            let Some(real) = $real.get() else { return NOT_INITIALIZED };
            // SAFETY: the caller's arguments are passed on unchanged.
            let status = unsafe { real(name, place, $($arg,)* flags, found) };
            if status == SUCCESS {
                // SAFETY: the call with these arguments succeeded.
                unsafe { replace(name, place, $version) };
            }
            status
        }
    )*

        /// Returns the stand-in for an exported name of the runtime.
        pub(super) fn of_runtime(name: &[u8]) -> Option<StandIn> {
            match name {
                $(_ if name == stringify!($name).as_bytes() => Some(|found| {
                    let ours = $name as *mut c_void;
                    // SAFETY: `found` is the runtime's own function, by the contract of `StandIn`.
                    if found != ours && unsafe { $real.leads_to(found) } { ours } else { null_mut() }
                }),)*
                _ => None,
            }
        }
    };
}

of_runtime! {
    cudaGetDriverEntryPoint() version RUNTIME_SINCE => OF_RUNTIME;
    cudaGetDriverEntryPoint_ptsz() version RUNTIME_SINCE => OF_RUNTIME_PTSZ;
    cudaGetDriverEntryPointByVersion(version: c_uint) version version as c_int => BY_VERSION;
    cudaGetDriverEntryPointByVersion_ptsz(version: c_uint) version version as c_int => BY_VERSION_PTSZ;
}
