//! The functions that stand before the real ones, a file for each library that has them.

/// Gives our function for what the program itself found under a name; null to leave it alone.
type StandIn = fn(*mut std::ffi::c_void) -> *mut std::ffi::c_void;

/// Defines the exported function of each call of the runtime: it hands the return address, which a function of the
/// usual kind cannot see, to `$body` as one more argument, in the register `$register` that the ABI
/// gives to it. The real function is `$real`.
macro_rules! caller_hooks {
    ($($name:ident($($arg:ident: $type:ty),*) caller $register:literal => $body:ident, $real:ident;)*) => {
        $(
            static $real: $crate::real::RealFn<unsafe extern "C" fn($($type),*) -> std::ffi::c_int> =
                // SAFETY: the signature is the one in cuda_runtime_api.h.
                unsafe { $crate::real::RealFn::new($crate::real::c_name(concat!(stringify!($name), "\0")), "libcudart.so") };

            #[unsafe(no_mangle)]
            #[unsafe(naked)]
            unsafe extern "C" fn $name($($arg: $type),*) -> std::ffi::c_int {
                // At the entry of a function the return address is on top of the stack.
                core::arch::naked_asm!(
                    concat!("mov ", $register, ", qword ptr [rsp]"),
                    "jmp {body}",
                    body = sym $body
                )
            }
        )*

        /// Our function for an exported name of the runtime. A second runtime in the process keeps its own
        /// calls: ours lead to the first.
        pub(super) fn exported(name: &[u8]) -> Option<super::StandIn> {
            match name {
                $(_ if name == stringify!($name).as_bytes() => Some(|found| {
                    let ours = $name as *mut std::ffi::c_void;
                    if found != ours && $real.leads_to(found) { ours } else { std::ptr::null_mut() }
                }),)*
                _ => None,
            }
        }
    };
}

use caller_hooks;

pub(crate) mod api;
mod calls;
mod cuda_driver;
mod cuda_events;
mod cuda_runtime;
mod dlsym;
mod entry_points;
pub(crate) mod exec;
pub(crate) mod nvtx;
mod process;
pub(crate) mod torch_allocator;
mod torch_ops;
mod torch_state;

/// `cudaErrorInitializationError`: what a program gets when there is no runtime behind the hook.
const NO_RUNTIME: std::ffi::c_int = 3;

/// Our function of this exact name, of the runtime's or of the driver's.
fn exported(name: &[u8]) -> Option<StandIn> {
    let settings = &crate::init::session()?.settings;
    if !settings.dlsym {
        return None;
    }
    if name.starts_with(b"cuda") {
        cuda_runtime::exported(name)
            .or_else(|| cuda_events::exported(name))
            .or_else(|| entry_points::of_runtime(name).filter(|_| settings.driver))
    } else if settings.driver {
        entry_points::of_driver(name).or_else(|| cuda_driver::exported(name))
    } else {
        None
    }
}

/// Before a fork: no lock may be held by a thread that the child does not have.
pub(crate) fn lock_for_fork() {
    nvtx::lock_for_fork();
    cuda_events::lock_for_fork();
    crate::pools::lock_for_fork();
}

/// After a fork, on both sides.
pub(crate) fn unlock_after_fork() {
    crate::pools::unlock_after_fork();
    cuda_events::unlock_after_fork();
    nvtx::unlock_after_fork();
}
