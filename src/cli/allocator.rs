//! The global allocator of the command. If memory runs out, the allocator ends the command with a message and
//! status 2, as for any other error.
//!
//! By default, Rust would abort, and a shell would report a crash. A trace of a few kilobytes may describe
//! more live blocks than the machine can hold, so running out of memory is a result of the input, not a bug.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

/// The system's allocator, except that a failed allocation ends the command instead of returning null.
pub(crate) struct EndsWhenFull;

/// True once [`end`] has started. If memory runs out again inside [`end`], the process aborts without a
/// message.
static ENDS: AtomicBool = AtomicBool::new(false);

#[cold]
fn end() -> ! {
    if ENDS.swap(true, Ordering::Relaxed) {
        std::process::abort()
    }
    // Nothing here allocates, because standard error is unbuffered.
    let text = b"memtrace: out of memory: this machine, or a limit such as ulimit -v, has less memory than \
                 the answer needs\n";
    let _ = std::io::stderr().write_all(text);
    std::process::exit(2)
}

#[expect(unsafe_code, reason = "an allocator is unsafe by its trait")]
// SAFETY: every call is forwarded to the system's allocator, which has the same contract.
unsafe impl GlobalAlloc for EndsWhenFull {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller upholds the contract of the method.
        let memory = unsafe { System.alloc(layout) };
        if memory.is_null() { end() } else { memory }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller upholds the contract of the method.
        let memory = unsafe { System.alloc_zeroed(layout) };
        if memory.is_null() { end() } else { memory }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller upholds the contract of the method.
        let memory = unsafe { System.realloc(memory, layout, size) };
        if memory.is_null() { end() } else { memory }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the contract of the method.
        unsafe { System.dealloc(memory, layout) }
    }
}
