//! Three words of every thread that cost no call to reach.
//!
//! Rust's `thread_local!` in a shared library asks the loader for the variable's place at every use, which a
//! block report would do eight times; that is a third of what it costs. This library is there when the program
//! starts, so its words can lie at a fixed distance from the thread's pointer ("initial-exec"), as those of
//! the C library do. (glibc keeps room for so few bytes also where a library comes later.)
//!
//! The pointers are null or lead to something that a `thread_local!` with a destructor owns, which is how they
//! become null again when the thread ends. The words themselves last longer than every destructor.

use std::arch::{asm, global_asm};
use std::cell::Cell;
use std::ffi::c_void;

global_asm!(
    ".pushsection .tbss.memtrace_words, \"awT\", @nobits",
    ".balign 8",
    ".globl memtrace_words",
    ".hidden memtrace_words",
    ".type memtrace_words, @object",
    "memtrace_words: .zero 24",
    ".size memtrace_words, 24",
    ".popsection",
);

/// The words of a thread. A child of a fork has those of the thread that forked.
#[repr(C)]
pub struct Words {
    /// For this crate: the thread's lane.
    pub(crate) lane: Cell<*mut c_void>,
    /// For the crate above, whatever it keeps of a thread.
    pub user: Cell<*mut c_void>,
    /// Is the thread inside a hook? Destructors of the thread's locals may still free memory.
    pub inside: Cell<bool>,
}

/// The calling thread's words; null at first.
#[inline(always)]
#[must_use]
pub fn words() -> *const Words {
    let at: *const Words;
    // SAFETY: x86-64's rule for the initial-exec model (ELF Handling For Thread-Local Storage, 4.3.6): the
    // word at fs:0 is the thread's pointer, and the loader filled in the distance of the symbol from it.
    unsafe {
        asm!(
            "mov {at}, qword ptr fs:[0]",
            "add {at}, qword ptr [rip + memtrace_words@GOTTPOFF]",
            at = out(reg) at,
            options(pure, nomem, nostack),
        );
    }
    at
}
