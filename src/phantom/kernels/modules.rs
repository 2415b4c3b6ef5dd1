//! Modules, libraries and links. Code that is compiled at run time (NVRTC, Triton) is accepted and never
//! read.

use std::ffi::c_int;

use cudarc::driver::sys::CUlaunchConfig;

use crate::core::call_table::{answers, by_contract};
use crate::core::ffi::{Dim3, Handle, INVALID_VALUE, In, OK, Out, Status, Text, Word, opaque_handle};
use crate::cuda::streams::StreamHandle;
use crate::kernels::kernel::{GLOBAL_SIZE, function_attribute, global_variable, launch, occupancy};

/// `CU_MODULE_LAZY_LOADING`.
const LAZY_LOADING: c_int = 2;

fn new_handle(out: Out<usize>) -> Status {
    out.give(opaque_handle())
}

/// Writes the address and the size of a global variable of a module.
fn module_variable(address: Out<usize>, size: Out<usize>, module: usize, name: &Text) -> Status {
    let mut key = module.to_le_bytes().to_vec();
    key.extend_from_slice(name.bytes());
    address.put(global_variable(&key, GLOBAL_SIZE));
    size.put(GLOBAL_SIZE);
    OK
}

/// Writes the result of a link: bytes that begin like an ELF file, for callers that check the magic number.
fn linked_image(cubin: Out<usize>, size: Out<usize>) -> Status {
    let mut image = [0u8; 64];
    image[..4].copy_from_slice(b"\x7fELF");
    size.put(image.len());
    cubin.give(Handle::new(image).address())
}

/// Launches with the shape and the stream of a configuration.
///
/// # Safety
/// `config` is null or holds a stream handle.
unsafe fn launch_with(config: In<CUlaunchConfig>) -> Status {
    let Some(config) = config.get() else { return INVALID_VALUE };
    let grid = Dim3 { x: config.gridDimX, y: config.gridDimY, z: config.gridDimZ };
    let block = Dim3 { x: config.blockDimX, y: config.blockDimY, z: config.blockDimZ };
    // SAFETY: the caller's promise.
    launch(grid, block, unsafe { StreamHandle::from_address(config.hStream as usize) })
}

answers! {
    Success fn cuModuleLoad(out: Out<usize>, _path: Text) { new_handle(out) }
    Success fn cuModuleLoadData(out: Out<usize>, _image: Word) { new_handle(out) }
    Success fn cuModuleLoadDataEx(out: Out<usize>, _image: Word, _count: u32, _options: Word, _values: Word) {
        new_handle(out)
    }
    Success fn cuModuleLoadFatBinary(out: Out<usize>, _image: Word) { new_handle(out) }
    Success fn cuModuleUnload(_module: Word) { OK }
    Real fn cuModuleGetLoadingMode(out: Out<c_int>) { out.give(LAZY_LOADING) }
    Success fn cuModuleGetFunction(out: Out<usize>, _module: Word, _name: Text) { new_handle(out) }
    Guess fn cuModuleGetGlobal_v2(address: Out<usize>, size: Out<usize>, module: Word, name: Text) {
        module_variable(address, size, module, &name)
    }
    Guess fn cuFuncGetAttribute(out: Out<c_int>, attribute: c_int, _function: Word) {
        out.give(function_attribute(attribute))
    }
    Success fn cuFuncSetAttribute(_function: Word, _attribute: c_int, _value: c_int) { OK }
    Success fn cuFuncSetCacheConfig(_function: Word, _mode: c_int) { OK }
    Success fn cuFuncLoad(_function: Word) { OK }
    Real fn cuFuncGetModule(out: Out<usize>, function: Word) { out.give(function) }
    Guess fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        out: Out<c_int>, _function: Word, threads: c_int, _shared: usize,
    ) {
        out.give(occupancy(threads))
    }
    Guess fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        out: Out<c_int>, _function: Word, threads: c_int, _shared: usize, _flags: u32,
    ) {
        out.give(occupancy(threads))
    }
    Guess fn cuOccupancyMaxActiveClusters(out: Out<c_int>, _function: Word, _config: Word) { out.give(1) }
    Guess fn cuOccupancyMaxPotentialClusterSize(out: Out<c_int>, _function: Word, _config: Word) {
        out.give(8)
    }
    Success fn cuLaunchKernel(
        _function: Word, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        _shared: u32, stream: StreamHandle, _arguments: Word, _extra: Word,
    ) {
        launch(Dim3 { x: grid_x, y: grid_y, z: grid_z }, Dim3 { x: block_x, y: block_y, z: block_z }, stream)
    }
    Success fn cuLaunchCooperativeKernel(
        _function: Word, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        _shared: u32, stream: StreamHandle, _arguments: Word,
    ) {
        launch(Dim3 { x: grid_x, y: grid_y, z: grid_z }, Dim3 { x: block_x, y: block_y, z: block_z }, stream)
    }
    Success fn cuLaunchKernelEx(config: In<CUlaunchConfig>, _function: Word, _arguments: Word, _extra: Word) {
        by_contract!(launch_with(config))
    }
    Success fn cuLibraryLoadData(
        out: Out<usize>, _code: Word, _options: Word, _values: Word, _count: u32, _more: Word,
        _more_values: Word, _more_count: u32,
    ) {
        new_handle(out)
    }
    Success fn cuLibraryLoadFromFile(
        out: Out<usize>, _path: Text, _options: Word, _values: Word, _count: u32, _more: Word,
        _more_values: Word, _more_count: u32,
    ) {
        new_handle(out)
    }
    Success fn cuLibraryUnload(_library: Word) { OK }
    Success fn cuLibraryGetKernel(out: Out<usize>, _library: Word, _name: Text) { new_handle(out) }
    Success fn cuLibraryGetModule(out: Out<usize>, _library: Word) { new_handle(out) }
    Guess fn cuLibraryGetGlobal(address: Out<usize>, size: Out<usize>, library: Word, name: Text) {
        module_variable(address, size, library, &name)
    }
    Real fn cuKernelGetFunction(out: Out<usize>, kernel: Word) { out.give(kernel) }
    Guess fn cuKernelGetAttribute(out: Out<c_int>, attribute: c_int, _kernel: Word, _device: c_int) {
        out.give(function_attribute(attribute))
    }
    Success fn cuKernelSetAttribute(_attribute: c_int, _value: c_int, _kernel: Word, _device: c_int) { OK }
    Success fn cuKernelSetCacheConfig(_kernel: Word, _mode: c_int, _device: c_int) { OK }
    Success fn cuLinkCreate_v2(_count: u32, _options: Word, _values: Word, out: Out<usize>) {
        new_handle(out)
    }
    Success fn cuLinkAddData_v2(_state: Word, _kind: Word, _data: Word, _size: usize) { OK }
    Success fn cuLinkAddFile_v2(_state: Word, _kind: Word, _path: Text) { OK }
    Success fn cuLinkComplete(_state: Word, cubin: Out<usize>, size: Out<usize>) { linked_image(cubin, size) }
    Success fn cuLinkDestroy(_state: Word) { OK }
    /// A tensor map is 128 bytes that only kernels read.
    Success fn cuTensorMapEncodeTiled(map: Out<[u64; 16]>) { map.give([0; 16]) }
    Success fn cuTensorMapEncodeIm2col(map: Out<[u64; 16]>) { map.give([0; 16]) }
    Success fn cuTensorMapReplaceAddress(_map: Word, _address: Word) { OK }
}
