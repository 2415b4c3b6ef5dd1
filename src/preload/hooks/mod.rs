//! The functions that stand before the real ones, a file for each library that has them.

/// Our function, and whether it leads to what the program itself found under its name.
type Exported = (*mut std::ffi::c_void, fn(*mut std::ffi::c_void) -> bool);

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

        /// The exported names, for `dlsym`: each with our function and with whether it leads to what the
        /// program found.
        pub(super) fn exported(name: &[u8]) -> Option<super::Exported> {
            match name {
                $(_ if name == stringify!($name).as_bytes() =>
                    Some(($name as *mut std::ffi::c_void, |found| $real.leads_to(found))),)*
                _ => None,
            }
        }
    };
}

use caller_hooks;

mod api;
mod cuda_events;
mod cuda_runtime;
mod dlsym;
pub(crate) mod nvtx;
mod process;
pub(crate) mod torch_allocator;
mod torch_ops;

/// `cudaErrorInitializationError`: what a program gets when there is no runtime behind the hook.
const NO_RUNTIME: std::ffi::c_int = 3;

/// Our function of this exact name that stands before the runtime's, with whether it leads to what the
/// program found.
fn exported(name: &[u8]) -> Option<Exported> {
    cuda_runtime::exported(name).or_else(|| cuda_events::exported(name))
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
