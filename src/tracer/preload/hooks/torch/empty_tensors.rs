//! The hooks of the functions in which torch makes tensors without values, which show the type and the shape
//! of the memory that is allocated next.
//!
//! The tensor is returned in memory whose address the caller passes, and an OOM throws an exception through
//! the function. So a hook only notes the arguments and jumps to the real function.

use std::ffi::c_void;

use crate::attribution::tensor_forms::{self, Asked};
use crate::ffi::symbols::RealFn;

/// A function that is only jumped to, with the registers and the stack of its caller.
type Opaque = unsafe extern "C" fn();

// SAFETY: the function is never called by this type; the hook jumps to it.
static GENERIC: RealFn<Opaque> = unsafe {
    RealFn::new(
        c"_ZN2at6detail13empty_genericEN3c108ArrayRefIlEEPNS1_9AllocatorENS1_14DispatchKeySetENS1_10ScalarTypeESt8optionalINS1_12MemoryFormatEE",
        "libtorch_cpu.so",
    )
};
// SAFETY: as above.
static STRIDED: RealFn<Opaque> = unsafe {
    RealFn::new(
        c"_ZN2at6detail21empty_strided_genericEN3c108ArrayRefIlEES3_PNS1_9AllocatorENS1_14DispatchKeySetENS1_10ScalarTypeE",
        "libtorch_cpu.so",
    )
};

/// Notes the form of a tensor.
///
/// # Safety
/// The arguments are the ones that torch passes to the function: arrays with these lengths. `strides` is null if
/// the function has no such argument.
unsafe fn note(sizes: Array, strides: Array, allocator: *const c_void, dtype: i32) {
    // SAFETY: by the contract. The address of an empty array may be null.
    let values = |Array(values, length): Array| unsafe {
        if length == 0 { &[] } else { std::slice::from_raw_parts(values, length) }
    };
    let has_strides = !strides.0.is_null();
    // A program may pass arrays of different lengths, which torch refuses.
    if !has_strides || sizes.1 == strides.1 {
        let strides = has_strides.then(|| values(strides));
        tensor_forms::note(allocator, Asked { dtype: dtype as i8, sizes: values(sizes), strides });
    }
}

/// The address and the length of a `c10::ArrayRef<int64_t>`.
#[derive(Clone, Copy)]
struct Array(*const i64, usize);

/// Defines the body of a hook, which notes the form and returns the real function.
macro_rules! body {
    ($name:ident, $real:ident) => {
        unsafe extern "C" fn $name(
            sizes: *const i64,
            dims: usize,
            strides: *const i64,
            stride_count: usize,
            allocator: *const c_void,
            dtype: i32,
        ) -> Opaque {
            // SAFETY: these are the arguments of the hook.
            unsafe { note(Array(sizes, dims), Array(strides, stride_count), allocator, dtype) };
            // torch called the function, so a library has it. A return without a tensor would be worse than an
            // end.
            $real.get().unwrap_or_else(|| std::process::abort())
        }
    };
}

body!(note_generic, GENERIC);
body!(note_strided, STRIDED);

/// The code of a hook: calls the body with the arguments that `$moves` selects, restores the registers, and
/// jumps to the function that the body returned.
#[cfg(target_arch = "x86_64")]
macro_rules! note_and_jump {
    ($body:path, [$($moves:literal),*]) => {
        core::arch::naked_asm!(
            "push rdi",
            "push rsi",
            "push rdx",
            "push rcx",
            "push r8",
            "push r9",
            "sub rsp, 8",
            $($moves,)*
            "call {body}",
            "mov r11, rax",
            "add rsp, 8",
            "pop r9",
            "pop r8",
            "pop rcx",
            "pop rdx",
            "pop rsi",
            "pop rdi",
            "jmp r11",
            body = sym $body
        )
    };
}

#[cfg(target_arch = "aarch64")]
macro_rules! note_and_jump {
    ($body:path, [$($moves:literal),*]) => {
        core::arch::naked_asm!(
            "stp x29, x30, [sp, #-96]!",
            "mov x29, sp",
            "stp x0, x1, [sp, #16]",
            "stp x2, x3, [sp, #32]",
            "stp x4, x5, [sp, #48]",
            "stp x6, x7, [sp, #64]",
            "str x8, [sp, #80]",
            $($moves,)*
            "bl {body}",
            "mov x16, x0",
            "ldr x8, [sp, #80]",
            "ldp x6, x7, [sp, #64]",
            "ldp x4, x5, [sp, #48]",
            "ldp x2, x3, [sp, #32]",
            "ldp x0, x1, [sp, #16]",
            "ldp x29, x30, [sp], #96",
            "br x16",
            body = sym $body
        )
    };
}

/// `TensorBase empty_generic(IntArrayRef size, Allocator*, DispatchKeySet, ScalarType, optional<MemoryFormat>)`
/// in ATen/EmptyTensor.h, 2.5 to 2.15. On x86-64 the first register has the address of the result.
#[unsafe(export_name = "_ZN2at6detail13empty_genericEN3c108ArrayRefIlEEPNS1_9AllocatorENS1_14DispatchKeySetENS1_10ScalarTypeESt8optionalINS1_12MemoryFormatEE")]
#[unsafe(naked)]
unsafe extern "C" fn empty_generic() {
    #[cfg(target_arch = "x86_64")]
    note_and_jump!(
        note_generic,
        ["mov rdi, rsi", "mov rsi, rdx", "mov r8, rcx", "xor edx, edx", "xor ecx, ecx", "movsx r9d, r9b"]
    );
    #[cfg(target_arch = "aarch64")]
    note_and_jump!(note_generic, ["sxtb w5, w4", "mov x4, x2", "mov x2, xzr", "mov x3, xzr"]);
}

/// `TensorBase empty_strided_generic(IntArrayRef size, IntArrayRef stride, Allocator*, DispatchKeySet, ScalarType)`,
/// as above. On x86-64 the last two arguments are on the stack, above the return address and what the hook
/// pushes (56 bytes).
#[unsafe(export_name = "_ZN2at6detail21empty_strided_genericEN3c108ArrayRefIlEES3_PNS1_9AllocatorENS1_14DispatchKeySetENS1_10ScalarTypeE")]
#[unsafe(naked)]
unsafe extern "C" fn empty_strided_generic() {
    #[cfg(target_arch = "x86_64")]
    note_and_jump!(
        note_strided,
        [
            "mov rdi, rsi",
            "mov rsi, rdx",
            "mov rdx, rcx",
            "mov rcx, r8",
            "mov r8, r9",
            "movsx r9d, byte ptr [rsp + 72]"
        ]
    );
    #[cfg(target_arch = "aarch64")]
    note_and_jump!(note_strided, ["sxtb w5, w6"]);
}
