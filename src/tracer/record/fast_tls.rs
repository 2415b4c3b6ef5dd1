//! Thread-local storage that is reached without a call: three words per thread.
//!
//! In a shared library, every use of Rust's `thread_local!` asks the loader for the address of the variable.
//! A block report would do that eight times, which takes a third of its time. This library is loaded when the
//! program starts, so its words can be at a fixed offset from the thread pointer (the "initial-exec" model),
//! as in the C library. (For so few bytes, glibc also reserves room for a library that is loaded later.)
//!
//! Each pointer is null or points to data that a [`PerThread`](crate::per_thread::PerThread) owns. The
//! destructor of that data resets the pointer when the thread ends. The words themselves outlive every
//! destructor.

#[cfg(not(miri))]
use std::arch::{asm, global_asm};
use std::cell::Cell;
use std::ffi::c_void;

#[cfg(not(miri))]
global_asm!(
    ".pushsection .tbss.memtrace_fast_tls, \"awT\", @nobits",
    ".balign 8",
    ".globl memtrace_fast_tls",
    ".hidden memtrace_fast_tls",
    ".type memtrace_fast_tls, @object",
    "memtrace_fast_tls: .zero 24",
    ".size memtrace_fast_tls, 24",
    ".popsection",
);

/// The thread-local words. The child of a fork has the forking thread's words.
#[repr(C)]
pub struct FastTls {
    /// The lane of the thread; null before the first event. Used only by this crate.
    pub(crate) lane: Cell<*mut c_void>,
    /// The state of the thread in the preloaded library; null before the first use.
    pub user: Cell<*mut c_void>,
    /// True if the thread is inside a hook. The flag must outlive the thread's other locals, because their
    /// destructors may still free memory.
    pub inside: Cell<bool>,
}

/// Returns the words of the calling thread. They are all zero at first.
#[cfg(not(miri))]
#[inline(always)]
#[must_use]
pub fn fast_tls() -> *const FastTls {
    let at: *const FastTls;
    // SAFETY: the initial-exec model (ELF Handling For Thread-Local Storage, 4.3.6): the word at fs:0 is the
    // thread pointer, and the loader stored the offset of the symbol from it.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        asm!(
            "mov {at}, qword ptr fs:[0]",
            "add {at}, qword ptr [rip + memtrace_fast_tls@GOTTPOFF]",
            at = out(reg) at,
            options(pure, readonly, nostack),
        );
    }
    // SAFETY: the same model (ELF for the Arm 64-bit Architecture, 6.7): the thread pointer is in a system
    // register.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        asm!(
            "mrs {at}, tpidr_el0",
            "adrp {offset}, :gottprel:memtrace_fast_tls",
            "ldr {offset}, [{offset}, :gottprel_lo12:memtrace_fast_tls]",
            "add {at}, {at}, {offset}",
            at = out(reg) at,
            offset = out(reg) _,
            options(pure, readonly, nostack, preserves_flags),
        );
    }
    at
}

/// Returns the words of the calling thread, for Miri, which cannot run assembly.
#[cfg(miri)]
#[must_use]
pub fn fast_tls() -> *const FastTls {
    thread_local! {
        static WORDS: FastTls = const {
            FastTls {
                lane: Cell::new(std::ptr::null_mut()),
                user: Cell::new(std::ptr::null_mut()),
                inside: Cell::new(false),
            }
        };
    }
    WORDS.with(std::ptr::from_ref)
}
