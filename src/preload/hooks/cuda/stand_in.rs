//! Stand-ins: our functions in the place of CUDA's.

/// Gives our function for what the program itself found under a name; null to leave it alone.
pub(in crate::hooks) type StandIn = fn(*mut std::ffi::c_void) -> *mut std::ffi::c_void;

/// Defines the exported function of each call of the runtime: it hands the return address, which a function of the
/// usual kind cannot see, to `$body` as one more argument, in the register `$register` that the ABI
/// gives to it. The real function is `$real`.
macro_rules! caller_hooks {
    ($($name:ident($($arg:ident: $type:ty),*) caller $register:literal => $body:ident, $real:ident;)*) => {
        $(
            static $real: $crate::ffi::symbols::RealFn<unsafe extern "C" fn($($type),*) -> std::ffi::c_int> =
                // SAFETY: the signature is the one in cuda_runtime_api.h.
                unsafe { $crate::ffi::symbols::RealFn::new($crate::ffi::symbols::c_name(concat!(stringify!($name), "\0")), "libcudart.so") };

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
        pub(super) fn exported(name: &[u8]) -> Option<$crate::hooks::cuda::stand_in::StandIn> {
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

pub(super) use caller_hooks;

/// `cudaErrorInitializationError`: what a program gets when there is no runtime behind the hook.
pub(in crate::hooks) const NO_RUNTIME: std::ffi::c_int = 3;
