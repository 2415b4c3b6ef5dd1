//! Calls C++ functions, catches their exceptions, and gives strings the layout of the C++ standard library.

use std::arch::global_asm;
use std::ffi::{CStr, c_char, c_int, c_void};

use crate::ops::torch;

unsafe extern "C" {
    /// Calls a function with an argument. Returns 1 if it threw an exception.
    fn memtrace_phantom_catching(
        function: unsafe extern "C-unwind" fn(*mut c_void),
        context: *mut c_void,
    ) -> c_int;
    fn memtrace_phantom_landing();
    fn _Unwind_SetGR(context: *mut c_void, register: c_int, value: usize);
    fn _Unwind_SetIP(context: *mut c_void, address: usize);
}

// The function makes a single call. The personality routine below sends the call's exceptions to the landing
// pad, with the exception in the register of a result.
#[cfg(target_arch = "x86_64")]
global_asm!(
    ".pushsection .data.rel.ro.memtrace_phantom_personality,\"aw\",@progbits",
    ".p2align 3",
    "memtrace_phantom_personality_address:",
    ".quad {personality}",
    ".popsection",
    ".pushsection .text.memtrace_phantom_catching,\"ax\",@progbits",
    ".p2align 4",
    ".globl memtrace_phantom_catching",
    ".hidden memtrace_phantom_catching",
    ".type memtrace_phantom_catching,@function",
    "memtrace_phantom_catching:",
    ".cfi_startproc",
    ".cfi_personality 0x9b, memtrace_phantom_personality_address",
    "push rbx",
    ".cfi_adjust_cfa_offset 8",
    ".cfi_rel_offset rbx, 0",
    "mov rax, rdi",
    "mov rdi, rsi",
    "call rax",
    "xor eax, eax",
    "pop rbx",
    ".cfi_remember_state",
    ".cfi_adjust_cfa_offset -8",
    ".cfi_restore rbx",
    "ret",
    ".globl memtrace_phantom_landing",
    ".hidden memtrace_phantom_landing",
    "memtrace_phantom_landing:",
    ".cfi_restore_state",
    "mov rdi, rax",
    "call {swallow}",
    "mov eax, 1",
    "pop rbx",
    ".cfi_adjust_cfa_offset -8",
    ".cfi_restore rbx",
    "ret",
    ".cfi_endproc",
    ".size memtrace_phantom_catching, .-memtrace_phantom_catching",
    ".popsection",
    personality = sym personality,
    swallow = sym swallow,
);

#[cfg(target_arch = "aarch64")]
global_asm!(
    ".pushsection .data.rel.ro.memtrace_phantom_personality,\"aw\",@progbits",
    ".p2align 3",
    "memtrace_phantom_personality_address:",
    ".xword {personality}",
    ".popsection",
    ".pushsection .text.memtrace_phantom_catching,\"ax\",@progbits",
    ".p2align 4",
    ".globl memtrace_phantom_catching",
    ".hidden memtrace_phantom_catching",
    ".type memtrace_phantom_catching,@function",
    "memtrace_phantom_catching:",
    ".cfi_startproc",
    ".cfi_personality 0x9b, memtrace_phantom_personality_address",
    "stp x29, x30, [sp, #-16]!",
    ".cfi_def_cfa_offset 16",
    ".cfi_offset x29, -16",
    ".cfi_offset x30, -8",
    "mov x2, x0",
    "mov x0, x1",
    "blr x2",
    "mov w0, #0",
    "2: ldp x29, x30, [sp], #16",
    ".cfi_remember_state",
    ".cfi_def_cfa_offset 0",
    ".cfi_restore x29",
    ".cfi_restore x30",
    "ret",
    ".globl memtrace_phantom_landing",
    ".hidden memtrace_phantom_landing",
    "memtrace_phantom_landing:",
    ".cfi_restore_state",
    "bl {swallow}",
    "mov w0, #1",
    "b 2b",
    ".cfi_endproc",
    ".size memtrace_phantom_catching, .-memtrace_phantom_catching",
    ".popsection",
    personality = sym personality,
    swallow = sym swallow,
);

/// The personality routine of [`memtrace_phantom_catching`] (Itanium C++ ABI, exception handling, 1.6.2). It
/// catches every exception.
unsafe extern "C" fn personality(
    _version: c_int,
    actions: c_int,
    _class: u64,
    exception: *mut c_void,
    context: *mut c_void,
) -> c_int {
    const SEARCH_PHASE: c_int = 1;
    const HANDLER_FRAME: c_int = 4;
    const HANDLER_FOUND: c_int = 6;
    const INSTALL_CONTEXT: c_int = 7;
    const CONTINUE_UNWIND: c_int = 8;
    /// The DWARF number of the register of a result: rax on x86-64, x0 on aarch64.
    const RESULT: c_int = 0;
    if actions & SEARCH_PHASE != 0 {
        return HANDLER_FOUND;
    }
    if actions & HANDLER_FRAME == 0 {
        // The thread is being canceled, and such a forced unwind must not be stopped.
        return CONTINUE_UNWIND;
    }
    // SAFETY: the context is the unwinder's own.
    unsafe {
        _Unwind_SetGR(context, RESULT, exception as usize);
        _Unwind_SetIP(context, memtrace_phantom_landing as *const () as usize);
    }
    INSTALL_CONTEXT
}

/// Ends the handling of a caught exception.
unsafe extern "C" fn swallow(exception: *mut c_void) {
    if let Some(torch) = torch::get() {
        // SAFETY: the exception was caught, and this ends it once.
        unsafe {
            (torch.begin_catch)(exception);
            (torch.end_catch)();
        }
    }
}

/// Runs `work`. Returns `None` if it threw a C++ exception.
pub(super) fn catching<R>(work: impl FnOnce() -> R) -> Option<R> {
    struct Call<W, R> {
        work: Option<W>,
        result: Option<R>,
    }
    unsafe extern "C-unwind" fn run<W: FnOnce() -> R, R>(context: *mut c_void) {
        // SAFETY: `context` is the address of `call` below, which nothing else uses while this function runs.
        let call = unsafe { &mut *context.cast::<Call<W, R>>() };
        call.result = call.work.take().map(|work| work());
    }
    fn runner<W: FnOnce() -> R, R>(_call: &Call<W, R>) -> unsafe extern "C-unwind" fn(*mut c_void) {
        run::<W, R>
    }
    let mut call = Call { work: Some(work), result: None };
    let run = runner(&call);
    // SAFETY: `run` takes the address of such a call.
    let thrown = unsafe { memtrace_phantom_catching(run, (&raw mut call).cast()) };
    call.result.filter(|_| thrown == 0)
}

/// A `std::string`, for calls that only read it.
pub(super) struct CxxString {
    /// The words of both layouts. The old layout is the address of the characters, preceded there by their
    /// number, the capacity and a reference count. The new layout is the address, the number and the
    /// capacity.
    words: [usize; 4],
    _characters: Box<[u64]>,
}

impl CxxString {
    pub(super) fn new(text: &[u8], is_new: bool) -> Self {
        let mut characters = vec![0u64; 3 + text.len() / 8 + 1].into_boxed_slice();
        characters[0] = text.len() as u64;
        characters[1] = text.len() as u64;
        let start = characters[3..].as_mut_ptr().cast::<u8>();
        // SAFETY: there is space for the text and a terminating 0.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), start, text.len()) };
        let words =
            if is_new { [start as usize, text.len(), text.len(), 0] } else { [start as usize, 0, 0, 0] };
        Self { words, _characters: characters }
    }

    /// Returns the words of the string: four words in the new layout, the first word in the old layout.
    pub(super) fn words(&self, is_new: bool) -> &[usize] {
        if is_new { &self.words } else { &self.words[..1] }
    }
}

/// Returns the text of a `std::string`, in either layout.
///
/// # Safety
/// `string` is the address of a live `std::string`.
pub(super) unsafe fn text<'a>(string: usize) -> &'a [u8] {
    // SAFETY: both layouts start with the address of characters that end in 0.
    unsafe { CStr::from_ptr(*(string as *const *const c_char)) }.to_bytes()
}
