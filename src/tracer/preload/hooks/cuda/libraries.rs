//! Workspaces: blocks of torch's allocator that torch passes to cuBLAS or cuBLASLt. A workspace has no
//! tensor, so only the call that passes the block shows its use.

use std::ffi::{c_int, c_void};

use memtrace_trace::{Category, Claim};

use crate::ffi::by_caller::hooks_by_caller;
use crate::guard::shielded;
use crate::python::tags::{self, Tag};
use crate::runtime::{fixed_text::FixedText, session, thread};

/// `CUBLAS_STATUS_NOT_INITIALIZED`: returned by a hook that finds no real function.
const NOT_INITIALIZED: c_int = 1;

/// Tags the block of a workspace with the name of its library. torch passes the workspace with each call, but
/// one tag is enough. So the block is tagged only if it is the last block that this thread allocated, and
/// only once.
fn is_used(workspace: *mut c_void, name: &'static FixedText) {
    let pointer = workspace as usize;
    let is_new = |state: &thread::ThreadState| {
        pointer != 0 && state.last_block.get() == pointer && state.last_block.replace(0) == pointer
    };
    let has_tags = session::session().is_some_and(|session| session.settings.modules);
    if has_tags && thread::with(is_new) == Some(true) {
        tags::record(Tag {
            pointer,
            category: Category::Workspace,
            path: 0,
            name: name.id(),
            form: 0,
            claim: Claim::Strong,
        });
    }
}

hooks_by_caller! { "libcublas.so", NOT_INITIALIZED;
    cublasSetWorkspace_v2(handle: *mut c_void, workspace: *mut c_void, bytes: usize) |real| {
        static NAME: FixedText = FixedText::new("cuBLAS");
        shielded(|| is_used(workspace, &NAME));
        real()
    };
}

hooks_by_caller! { "libcublasLt.so", NOT_INITIALIZED;
    cublasLtMatmul(
        handle: *mut c_void, operation: *mut c_void, alpha: *const c_void,
        a: *const c_void, a_layout: *mut c_void, b: *const c_void, b_layout: *mut c_void, beta: *const c_void,
        c: *const c_void, c_layout: *mut c_void, d: *mut c_void, d_layout: *mut c_void,
        algorithm: *const c_void, workspace: *mut c_void, bytes: usize, stream: *mut c_void
    ) |real| {
        static NAME: FixedText = FixedText::new("cuBLASLt");
        shielded(|| is_used(workspace, &NAME));
        real()
    };
}
