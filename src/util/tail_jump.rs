//! The body of a function that replaces one of glibc's, and mostly continues there by a jump.
//!
//! glibc then sees the return address of the program, on which `dlopen` and `dlsym` depend. The macro expands in
//! the crate that defines the function, so this crate stays free of unsafe code.

/// Expands to the body of a naked function with two arguments of a word. It calls `decide` with the same
/// arguments. `decide` returns two words, in two registers: the result of the function, or null to jump to
/// the address in the second.
#[cfg(target_arch = "x86_64")]
#[macro_export]
macro_rules! return_or_jump {
    ($decide:path) => {
        ::core::arch::naked_asm!(
            "push rdi",
            "push rsi",
            "sub rsp, 8",
            "call {decide}",
            "add rsp, 8",
            "pop rsi",
            "pop rdi",
            // rax: the result or null; rdx: the address of glibc's function.
            "test rax, rax",
            "jne 2f",
            "jmp rdx",
            "2: ret",
            decide = sym $decide
        )
    };
}

/// As on x86-64.
#[cfg(target_arch = "aarch64")]
#[macro_export]
macro_rules! return_or_jump {
    ($decide:path) => {
        ::core::arch::naked_asm!(
            "stp x29, x30, [sp, #-32]!",
            "stp x0, x1, [sp, #16]",
            "bl {decide}",
            // x0: the result or null; x1: the address of glibc's function.
            "mov x9, x0",
            "mov x16, x1",
            "ldp x0, x1, [sp, #16]",
            "ldp x29, x30, [sp], #32",
            "cbnz x9, 2f",
            "br x16",
            "2: mov x0, x9",
            "ret",
            decide = sym $decide
        )
    };
}
