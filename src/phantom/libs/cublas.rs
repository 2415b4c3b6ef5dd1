//! cuBLAS and cuBLASLt: handles that remember their modes, and a heuristic with one answer.
//!
//! The workspaces are PyTorch's own (`CUBLAS_WORKSPACE_CONFIG`, `CUBLASLT_WORKSPACE_SIZE`), so the
//! memory is right whatever algorithm would have been chosen. The products themselves are in
//! [`defaults`](crate::table::generated).

use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use crate::core::ffi::{INVALID_VALUE, OK, Out, Status, Word, leak};
use crate::kernels::kernel::launch_library;
use crate::table::call_table::answers;

/// A cuBLAS handle.
#[derive(Default)]
struct Handle {
    stream: AtomicUsize,
    math: AtomicI32,
    pointers: AtomicI32,
    atomics: AtomicI32,
}

/// `CUBLAS_STATUS_NOT_INITIALIZED`.
const NOT_INITIALIZED: Status = 1;

fn handle(address: usize) -> Option<&'static Handle> {
    // SAFETY: by the C contract a handle is null or came from `cublasCreate`; those are leaked.
    unsafe { (address as *const Handle).as_ref() }
}

fn set(address: usize, value: c_int, field: impl Fn(&Handle) -> &AtomicI32) -> Status {
    let Some(handle) = handle(address) else { return NOT_INITIALIZED };
    field(handle).store(value, Ordering::Relaxed);
    OK
}

fn get(address: usize, out: Out<c_int>, field: impl Fn(&Handle) -> &AtomicI32) -> Status {
    let Some(handle) = handle(address) else { return NOT_INITIALIZED };
    out.give(field(handle).load(Ordering::Relaxed))
}

/// `cublasLtMatmulHeuristicResult_t`: the algorithm, the workspace it needs, its state, its waves.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Heuristic {
    algorithm: [u64; 8],
    workspace: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

answers! {
    Real fn cublasCreate_v2(out: Out<usize>) { out.give(leak(Handle::default())) }
    Success fn cublasDestroy_v2(_handle: Word) { OK }
    Real fn cublasSetStream_v2(address: Word, stream: Word) {
        let Some(handle) = handle(address) else { return NOT_INITIALIZED };
        handle.stream.store(stream, Ordering::Relaxed);
        OK
    }
    Real fn cublasGetStream_v2(address: Word, out: Out<usize>) {
        let Some(handle) = handle(address) else { return NOT_INITIALIZED };
        out.give(handle.stream.load(Ordering::Relaxed))
    }
    Success fn cublasSetWorkspace_v2(_handle: Word, _workspace: Word, _size: usize) { OK }
    Real fn cublasSetMathMode(address: Word, mode: c_int) { set(address, mode, |handle| &handle.math) }
    Real fn cublasGetMathMode(address: Word, out: Out<c_int>) { get(address, out, |handle| &handle.math) }
    Real fn cublasSetPointerMode_v2(address: Word, mode: c_int) { set(address, mode, |handle| &handle.pointers) }
    Real fn cublasGetPointerMode_v2(address: Word, out: Out<c_int>) { get(address, out, |handle| &handle.pointers) }
    Real fn cublasSetAtomicsMode(address: Word, mode: c_int) { set(address, mode, |handle| &handle.atomics) }
    Real fn cublasGetAtomicsMode(address: Word, out: Out<c_int>) { get(address, out, |handle| &handle.atomics) }
    /// One algorithm that needs no workspace: PyTorch allocates its own size whatever this says.
    Success fn cublasLtMatmulAlgoGetHeuristic(
        _handle: Word, _operation: Word, _a: Word, _b: Word, _c: Word, _d: Word, _preference: Word,
        wanted: c_int, results: Out<Heuristic>, count: Out<c_int>,
    ) {
        if wanted < 1 {
            return INVALID_VALUE;
        }
        results.put(Heuristic { algorithm: [0; 8], workspace: 0, state: 0, waves: 1.0, reserved: [0; 4] });
        count.give(1)
    }
    Success fn cublasLtMatmul(
        _handle: Word, _operation: Word, _alpha: Word, _a: Word, _a_layout: Word, _b: Word, _b_layout: Word,
        _beta: Word, _c: Word, _c_layout: Word, _d: Word, _d_layout: Word, _algorithm: Word, _workspace: Word,
        _size: usize, stream: Word,
    ) {
        launch_library(stream)
    }
}
