//! Workspaces: memory of torch's allocator that torch hands to cuBLAS. The block has no tensor, so nothing else
//! names it. A workspace that torch takes for one call of cuBLASLt, and frees after it, stays what its op makes it.

use std::ffi::{c_int, c_void};

use memtrace_trace::{Category, Claim};

use crate::ffi::by_caller::hooks_by_caller;
use crate::python::tags::{self, Tag};
use crate::runtime::guard::shielded;
use crate::runtime::{fixed_text::FixedText, session, thread};

/// `CUBLAS_STATUS_NOT_INITIALIZED`.
const NOT_INITIALIZED: c_int = 1;

/// Tags the block of a workspace. torch passes it with each call; only a block that this thread has just allocated
/// is new.
fn is_used(workspace: *mut c_void) {
    let pointer = workspace as usize;
    let is_new = |state: &thread::ThreadState| {
        pointer != 0 && state.last_block.get() == pointer && state.last_block.replace(0) == pointer
    };
    let has_tags = session::session().is_some_and(|session| session.settings.modules);
    if has_tags && thread::with(is_new) == Some(true) {
        static NAME: FixedText = FixedText::new("cuBLAS");
        tags::record(Tag {
            pointer,
            category: Category::Workspace,
            path: 0,
            name: NAME.id(),
            claim: Claim::Strong,
        });
    }
}

hooks_by_caller! { "libcublas.so", NOT_INITIALIZED;
    cublasSetWorkspace_v2(handle: *mut c_void, workspace: *mut c_void, bytes: usize) |real| {
        shielded(|| is_used(workspace));
        real()
    };
}
