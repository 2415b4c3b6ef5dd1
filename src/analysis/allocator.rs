//! The allocator of the command: memory that runs out ends it with a line and status 2, as every other error does.
//!
//! Without it Rust aborts, and a shell reports a crash. A trace of a few kilobytes may describe more live blocks than
//! the machine can hold, so this is an answer about the input.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

/// The system's allocator, which never returns null.
pub struct EndsWhenFull;

/// True once [`end`] runs: at the second time nothing can be written.
static ENDS: AtomicBool = AtomicBool::new(false);

#[cold]
fn end() -> ! {
    if ENDS.swap(true, Ordering::Relaxed) {
        std::process::abort()
    }
    // Nothing here allocates: standard error has no buffer.
    let text = b"memtrace: out of memory: this machine, or a limit such as ulimit -v, has less than the answer needs\n";
    let _ = std::io::stderr().write_all(text);
    std::process::exit(2)
}

#[expect(unsafe_code, reason = "an allocator is unsafe by its trait")]
// SAFETY: every call goes to the system's allocator under the same contract.
unsafe impl GlobalAlloc for EndsWhenFull {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's.
        let memory = unsafe { System.alloc(layout) };
        if memory.is_null() { end() } else { memory }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's.
        let memory = unsafe { System.alloc_zeroed(layout) };
        if memory.is_null() { end() } else { memory }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's.
        let memory = unsafe { System.realloc(memory, layout, size) };
        if memory.is_null() { end() } else { memory }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's.
        unsafe { System.dealloc(memory, layout) }
    }
}
