//! Workspaces: memory of torch's allocator that torch hands to cuBLAS. The block has no tensor, so nothing else
//! names it.

use std::ffi::{c_int, c_void};

use memtrace_trace::Category;

use crate::ffi::symbols::RealFn;
use crate::python::tags::{self, Tag};
use crate::runtime::guard::shielded;
use crate::runtime::{fixed_text::FixedText, thread};

/// `CUBLAS_STATUS_NOT_INITIALIZED`.
const NOT_INITIALIZED: c_int = 1;

type SetWorkspace = unsafe extern "C" fn(*mut c_void, *mut c_void, usize) -> c_int;

// SAFETY: the signature is the one in cublas_api.h, since CUDA 11.
static SET_WORKSPACE: RealFn<SetWorkspace> = unsafe { RealFn::new(c"cublasSetWorkspace_v2", "libcublas.so") };

/// Tags the block of a workspace. torch passes it with each call; only a block that this thread has just allocated
/// is new.
fn is_used(workspace: *mut c_void) {
    let pointer = workspace as usize;
    let is_new = |state: &thread::ThreadState| {
        pointer != 0 && state.last_block.get() == pointer && state.last_block.replace(0) == pointer
    };
    if thread::with(is_new) == Some(true) {
        static NAME: FixedText = FixedText::new("cuBLAS");
        tags::record(Tag { pointer, category: Category::Workspace, path: 0, name: NAME.id(), weak: false });
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasSetWorkspace_v2(
    handle: *mut c_void,
    workspace: *mut c_void,
    bytes: usize,
) -> c_int {
    let Some(real) = SET_WORKSPACE.get() else { return NOT_INITIALIZED };
    shielded(|| is_used(workspace));
    // SAFETY: the caller's own arguments, passed on unchanged.
    unsafe { real(handle, workspace, bytes) }
}

/// `const void *`.
type Pointer = *const c_void;
/// `cublasLtMatmul(handle, description, alpha, A, its layout, B, its layout, beta, C, its layout, D, its layout,
/// algorithm, workspace, bytes, stream)`.
type Matmul = unsafe extern "C" fn(
    Pointer,
    Pointer,
    Pointer,
    Pointer,
    Pointer,
    Pointer,
    Pointer,
    Pointer,
    Pointer,
    Pointer,
    Pointer,
    Pointer,
    Pointer,
    *mut c_void,
    usize,
    Pointer,
) -> c_int;

// SAFETY: the signature is the one in cublasLt.h, since CUDA 10.1.
static LT_MATMUL: RealFn<Matmul> = unsafe { RealFn::new(c"cublasLtMatmul", "libcublasLt.so") };

#[unsafe(no_mangle)]
#[expect(clippy::too_many_arguments, reason = "those of cuBLASLt")]
unsafe extern "C" fn cublasLtMatmul(
    handle: Pointer,
    description: Pointer,
    alpha: Pointer,
    a: Pointer,
    a_layout: Pointer,
    b: Pointer,
    b_layout: Pointer,
    beta: Pointer,
    c: Pointer,
    c_layout: Pointer,
    d: Pointer,
    d_layout: Pointer,
    algorithm: Pointer,
    workspace: *mut c_void,
    bytes: usize,
    stream: Pointer,
) -> c_int {
    let Some(real) = LT_MATMUL.get() else { return NOT_INITIALIZED };
    shielded(|| is_used(workspace));
    // SAFETY: the caller's own arguments, passed on unchanged.
    unsafe {
        real(
            handle,
            description,
            alpha,
            a,
            a_layout,
            b,
            b_layout,
            beta,
            c,
            c_layout,
            d,
            d_layout,
            algorithm,
            workspace,
            bytes,
            stream,
        )
    }
}
