//! cuBLAS and cuBLASLt: handles that store their modes, and a heuristic with one result.
//!
//! The workspaces are PyTorch's own (`CUBLAS_WORKSPACE_CONFIG`, `CUBLASLT_WORKSPACE_SIZE`), so their memory
//! is right for any algorithm. The calls that compute products are in [`generated`](crate::table::generated).

use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, Ordering};

use cudarc::cublaslt::sys::{cublasLtMatmulAlgo_t, cublasLtMatmulHeuristicResult_t, cublasStatus_t};

use crate::core::addresses::may_be_address;
use crate::core::call_table::answers;
use crate::core::ffi::{Handle, In, OK, Out, Status, Word};
use crate::cuda::reach::{Holder, hold};
use crate::cuda::streams::StreamHandle;
use crate::kernels::kernel::launch_library;
use crate::libs::descriptor_addresses::DescriptorAddresses;
use crate::libs::handle_memory;
use crate::libs::library_calls::{launch_of, set_stream, stream_of};

/// The state of a cuBLAS handle.
#[derive(Default)]
struct BlasHandle {
    math_mode: AtomicI32,
    pointer_mode: AtomicI32,
    atomics_mode: AtomicI32,
}

const NOT_INITIALIZED: Status = cublasStatus_t::CUBLAS_STATUS_NOT_INITIALIZED as Status;
const INVALID_VALUE: Status = cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE as Status;

fn set(handle: Handle<BlasHandle>, value: c_int, field: impl Fn(&BlasHandle) -> &AtomicI32) -> Status {
    let Some(handle) = handle.get() else { return NOT_INITIALIZED };
    field(handle).store(value, Ordering::Relaxed);
    OK
}

fn get(handle: Handle<BlasHandle>, out: Out<c_int>, field: impl Fn(&BlasHandle) -> &AtomicI32) -> Status {
    let Some(handle) = handle.get() else { return NOT_INITIALIZED };
    out.give(field(handle).load(Ordering::Relaxed))
}

/// The addresses of biases, second outputs and scales in the descriptors of products.
static ADDRESSES: DescriptorAddresses = DescriptorAddresses::new();

const _: () = assert!(size_of::<cublasLtMatmulHeuristicResult_t>() == 96);

answers! {
    Real fn cublasCreate_v2(out: Out<Handle<BlasHandle>>) {
        if out.is_null() {
            return INVALID_VALUE;
        }
        let handle = Handle::new(BlasHandle::default());
        match handle_memory::create_cublas(handle.address()) {
            OK => out.give(handle),
            status => status,
        }
    }
    Success fn cublasDestroy_v2(handle: Word) { handle_memory::destroy(handle) }
    Real fn cublasSetStream_v2(handle: Handle<BlasHandle>, stream: StreamHandle) {
        if handle.get().is_none() {
            return NOT_INITIALIZED;
        }
        set_stream(handle.address(), stream);
        OK
    }
    Real fn cublasGetStream_v2(handle: Handle<BlasHandle>, out: Out<StreamHandle>) {
        if handle.get().is_none() {
            return NOT_INITIALIZED;
        }
        out.give(stream_of(handle.address()))
    }
    Success fn cublasSetWorkspace_v2(_handle: Word, workspace: Word, _size: usize) {
        hold(Holder::Libraries, workspace);
        OK
    }
    Success fn cublasLtMatmulDescSetAttribute(
        descriptor: Word, attribute: c_int, value: In<usize>, size: usize,
    ) {
        // An attribute that is an address has 8 bytes.
        let address = if size == 8 { value.get().filter(|&value| may_be_address(value)) } else { None };
        ADDRESSES.set(descriptor, attribute, address.into_iter().collect());
        OK
    }
    Success fn cublasLtMatmulDescDestroy(descriptor: Word) {
        ADDRESSES.remove(descriptor);
        OK
    }
    Real fn cublasSetMathMode(handle: Handle<BlasHandle>, mode: c_int) {
        set(handle, mode, |handle| &handle.math_mode)
    }
    Real fn cublasGetMathMode(handle: Handle<BlasHandle>, out: Out<c_int>) {
        get(handle, out, |handle| &handle.math_mode)
    }
    Real fn cublasSetPointerMode_v2(handle: Handle<BlasHandle>, mode: c_int) {
        set(handle, mode, |handle| &handle.pointer_mode)
    }
    Real fn cublasGetPointerMode_v2(handle: Handle<BlasHandle>, out: Out<c_int>) {
        get(handle, out, |handle| &handle.pointer_mode)
    }
    Real fn cublasSetAtomicsMode(handle: Handle<BlasHandle>, mode: c_int) {
        set(handle, mode, |handle| &handle.atomics_mode)
    }
    Real fn cublasGetAtomicsMode(handle: Handle<BlasHandle>, out: Out<c_int>) {
        get(handle, out, |handle| &handle.atomics_mode)
    }
    /// Returns one algorithm that needs no workspace, because PyTorch allocates a workspace of
    /// its own size for any result.
    Success fn cublasLtMatmulAlgoGetHeuristic(
        _handle: Word, _operation: Word, _a: Word, _b: Word, _c: Word, _d: Word, _preference: Word,
        wanted: c_int, results: Out<cublasLtMatmulHeuristicResult_t>, count: Out<c_int>,
    ) {
        if wanted < 1 {
            return INVALID_VALUE;
        }
        results.put(cublasLtMatmulHeuristicResult_t {
            algo: cublasLtMatmulAlgo_t { data: [0; 8] },
            workspaceSize: 0,
            state: cublasStatus_t::CUBLAS_STATUS_SUCCESS,
            wavesCount: 1.0,
            reserved: [0; 4],
        });
        count.give(1)
    }
    Success fn cublasLtMatmul(
        _handle: Word, descriptor: Word, _alpha: Word, a: Word, _a_layout: Word, b: Word, _b_layout: Word,
        _beta: Word, c: Word, _c_layout: Word, d: Word, _d_layout: Word, _algorithm: Word, workspace: Word,
        _size: usize, stream: StreamHandle,
    ) {
        let mut launch = launch_of(&[d, workspace]);
        [a, b, c].iter().for_each(|&input| launch.reads(input));
        launch.add(&launch_of(&ADDRESSES.of_descriptor(descriptor).unwrap_or_default()));
        launch_library(stream, Some(launch))
    }
}
