//! Stand-ins: the functions that a program gets in place of CUDA's when it looks them up by name.

use std::ffi::c_void;

/// A function that returns our stand-in for the address that the program found under a name, or null to leave
/// the address unchanged.
///
/// # Safety
/// The address belongs to the function of this name, from its library.
pub(crate) type StandIn = unsafe fn(*mut c_void) -> *mut c_void;

/// Defines the exported hook of each function of the runtime.
///
/// A line gives the function's signature, the register that the ABI of x86-64 would use for one more
/// argument, the body, and the static of the real function. The hook passes the return address, which an
/// ordinary function cannot see, to the body in that register
/// ([`jump_with_caller`](crate::hooks::cuda::stand_in::jump_with_caller)).
macro_rules! caller_hooks {
    ($($name:ident($($arg:ident: $type:ty),*) caller $register:literal => $body:ident, $real:ident;)*) => {
        $(
            static $real: $crate::ffi::symbols::RealFn<unsafe extern "C" fn($($type),*) -> std::ffi::c_int> =
                // SAFETY: the signature is the one in cuda_runtime_api.h.
                unsafe { $crate::ffi::symbols::RealFn::new($crate::ffi::symbols::c_name(concat!(stringify!($name), "\0")), "libcudart.so") };

            const _: () = assert!($crate::hooks::cuda::stand_in::is_next_register($register, &[$(size_of::<$type>()),*]));

            #[unsafe(no_mangle)]
            #[unsafe(naked)]
            unsafe extern "C" fn $name($($arg: $type),*) -> std::ffi::c_int {
                $crate::hooks::cuda::stand_in::jump_with_caller!($register, [$($arg)*], $body)
            }
        )*

        /// Returns the stand-in for an exported name of the runtime. The functions of a second runtime in the
        /// process are not replaced, because our hooks call the first runtime.
        pub(crate) fn exported(name: &[u8]) -> Option<$crate::hooks::cuda::stand_in::StandIn> {
            match name {
                $(_ if name == stringify!($name).as_bytes() => Some(|found| {
                    let ours = $name as *mut std::ffi::c_void;
                    // SAFETY: `found` is the library's own function, by the contract of `StandIn`.
                    if found != ours && unsafe { $real.leads_to(found) } { ours } else { std::ptr::null_mut() }
                }),)*
                _ => None,
            }
        }
    };
}

pub(super) use caller_hooks;

/// Returns true if the ABI of x86-64 passes one more argument in `register`, after arguments of these sizes in
/// bytes. None of them is a floating-point number. A type of more than 16 bytes is passed in memory. After six
/// words, no register is left, and the hook may use `rax`.
pub(super) const fn is_next_register(register: &str, sizes: &[usize]) -> bool {
    let (mut words, mut at) = (0, 0);
    while at < sizes.len() {
        words += if sizes[at] > 16 { 0 } else { sizes[at].div_ceil(8) };
        at += 1;
    }
    let number = match register.as_bytes() {
        [b'r', b'd', b'i'] => 0,
        [b'r', b's', b'i'] => 1,
        [b'r', b'd', b'x'] => 2,
        [b'r', b'c', b'x'] => 3,
        [b'r', b'8'] => 4,
        [b'r', b'9'] => 5,
        [b'r', b'a', b'x'] => 6,
        _ => return false,
    };
    words == number
}

/// The code of a hook: jumps to the body with the return address as one more argument.
///
/// At the entry of a function, x86-64 has the return address on top of the stack, and aarch64 has it in the
/// link register. On aarch64, each argument of these functions takes one register, also a large structure,
/// whose address is passed.
#[cfg(target_arch = "x86_64")]
macro_rules! jump_with_caller {
    ($register:literal, [$($arg:ident)*], $body:path) => {
        core::arch::naked_asm!(
            concat!("mov ", $register, ", qword ptr [rsp]"),
            "jmp {body}",
            body = sym $body
        )
    };
}

#[cfg(target_arch = "aarch64")]
macro_rules! jump_with_caller {
    ($register:literal, [$($arg:ident)*], $body:path) => {
        core::arch::naked_asm!(
            "mov x{count}, x30",
            "b {body}",
            count = const <[&str]>::len(&[$(stringify!($arg)),*]),
            body = sym $body
        )
    };
}

pub(super) use jump_with_caller;

#[cfg(test)]
mod tests {
    use super::is_next_register;

    #[test]
    fn the_register_of_the_caller_follows_those_of_the_arguments() {
        let (int, word, pair, structure) = (4, 8, 16, 24);
        assert!(is_next_register("rdi", &[]) && is_next_register("rdx", &[word, int]));
        assert!(is_next_register("rcx", &[word, pair]) && is_next_register("rsi", &[word, structure]));
        assert!(is_next_register("r9", &[word; 5]) && is_next_register("rax", &[word; 6]));
        for (register, sizes) in
            [("rdx", &[word][..]), ("rsi", &[word, int]), ("r9", &[word; 6]), ("rbx", &[])]
        {
            assert!(!is_next_register(register, sizes), "{register}");
        }
    }
}
