//! Modules, libraries and links. From code that is compiled at run time (NVRTC, Triton), only the parameters
//! of the kernels are read.

use std::ffi::{OsStr, c_int};
use std::os::unix::ffi::OsStrExt;

use cudarc::driver::sys::CUlaunchConfig;

use crate::core::call_table::{answers, by_contract};
use crate::core::ffi::{
    Dim3, FILE_NOT_FOUND, Handle, INVALID_IMAGE, INVALID_VALUE, In, OK, Out, Status, Text, Word,
    opaque_handle,
};
use crate::cuda::reach::Launch;
use crate::cuda::streams::StreamHandle;
use crate::kernels::cubin::KernelParameters;
use crate::kernels::fatbin;
use crate::kernels::kernel::{GLOBAL_SIZE, function_attribute, global_variable, launch, occupancy};
use crate::kernels::signature::{self, Signature};

/// The module loading mode `CU_MODULE_LAZY_LOADING`.
const LAZY_LOADING: c_int = 2;

fn new_handle(out: Out<usize>) -> Status {
    out.give(opaque_handle())
}

/// A module or library: the parameters of its kernels. It has no kernels if the format of its code is
/// unknown.
#[derive(Default)]
struct Module {
    kernels: KernelParameters,
}

/// Loads an image.
///
/// # Safety
/// `image` is null or the address of a cubin, a fat binary or a PTX text.
unsafe fn load(out: Out<Handle<Module>>, image: usize) -> Status {
    // SAFETY: the caller's promise.
    out.give(Handle::new(Module { kernels: unsafe { fatbin::image_parameters(image) } }))
}

/// Loads an image from a file.
fn load_file(out: Out<Handle<Module>>, path: &Text) -> Status {
    let Ok(image) = std::fs::read(OsStr::from_bytes(path.bytes())) else { return FILE_NOT_FOUND };
    match fatbin::file_parameters(&image) {
        Some(kernels) => out.give(Handle::new(Module { kernels })),
        None => INVALID_IMAGE,
    }
}

/// Writes a new handle for the kernel with this name. A name that the module does not contain gets a handle,
/// too, and a launch of it makes all memory unknown.
fn kernel_of(out: Out<usize>, module: Handle<Module>, name: &Text) -> Status {
    let kernel = opaque_handle();
    let parameters = module.get().and_then(|module| module.kernels.get(name.bytes()));
    signature::set(kernel, parameters.map(|parameters| Signature::new(name.bytes(), parameters)));
    out.give(kernel)
}

/// The keys in the list of launch options (`cuda.h`).
const LAUNCH_PARAM_BUFFER_POINTER: usize = 1;
const LAUNCH_PARAM_BUFFER_SIZE: usize = 2;

/// Returns the launch of a kernel with its arguments in one of the two forms, or `None` if the arguments are
/// not known. `blocks` is the number of blocks in the first dimension.
///
/// # Safety
/// `arguments` and `extra` come from a launch of this kernel. Each is null, an array with the address of each
/// argument, or a list of options.
unsafe fn reach(kernel: usize, arguments: In<usize>, extra: In<usize>, blocks: u32) -> Option<Launch> {
    let signature = signature::for_kernel(kernel)?;
    // SAFETY: by the caller's promise, a list of keys with their values, terminated by a zero. The parameter
    // block has the size that the list states.
    unsafe {
        if arguments.get().is_some() || signature.is_empty() {
            return signature.launch_with(arguments, blocks).map(Launch::of_driver);
        }
        let (mut block, mut size) = (0, 0);
        for pair in 0..2 {
            match (extra.at(2 * pair).get()?, extra.at(2 * pair + 1).get()?) {
                (LAUNCH_PARAM_BUFFER_POINTER, address) => block = address,
                (LAUNCH_PARAM_BUFFER_SIZE, address) if address != 0 => {
                    size = (address as *const usize).read_unaligned()
                }
                _ => break,
            }
        }
        (block != 0 && size != 0)
            .then(|| std::slice::from_raw_parts(block as *const u8, size))
            .map(|block| signature.launch_with_block(block, blocks).of_driver())
    }
}

/// Writes the address and the size of a module's global variable.
fn module_variable(address: Out<usize>, size: Out<usize>, module: usize, name: &Text) -> Status {
    let mut key = module.to_le_bytes().to_vec();
    key.extend_from_slice(name.bytes());
    address.put(global_variable(&key, GLOBAL_SIZE));
    size.put(GLOBAL_SIZE);
    OK
}

/// Writes the result of a link: bytes that start like an ELF file, for callers that check the magic number.
fn linked_image(cubin: Out<usize>, size: Out<usize>) -> Status {
    let mut image = [0u8; 64];
    image[..4].copy_from_slice(b"\x7fELF");
    size.put(image.len());
    cubin.give(Handle::new(image).address())
}

/// Launches a kernel with the shape and the stream in a configuration.
///
/// # Safety
/// `config` is null or contains a stream handle; the other arguments are as for [`reach`].
unsafe fn launch_with(
    config: In<CUlaunchConfig>,
    kernel: usize,
    arguments: In<usize>,
    extra: In<usize>,
) -> Status {
    let Some(config) = config.get() else { return INVALID_VALUE };
    let grid = Dim3 { x: config.gridDimX, y: config.gridDimY, z: config.gridDimZ };
    let block = Dim3 { x: config.blockDimX, y: config.blockDimY, z: config.blockDimZ };
    // SAFETY: the caller's promise.
    unsafe {
        let stream = StreamHandle::from_address(config.hStream as usize);
        launch(grid, block, stream, reach(kernel, arguments, extra, grid.x))
    }
}

/// Returns a tensor map for the memory at an address.
fn tensor_map(address: usize) -> [u64; 16] {
    let mut map = [0; 16];
    map[0] = address as u64;
    map
}

answers! {
    Success fn cuModuleLoad(out: Out<Handle<Module>>, path: Text) { load_file(out, &path) }
    Success fn {cuModuleLoadData, cuModuleLoadFatBinary}(out: Out<Handle<Module>>, image: Word) {
        by_contract!(load(out, image))
    }
    Success fn cuModuleLoadDataEx(
        out: Out<Handle<Module>>, image: Word, _count: u32, _options: Word, _values: Word,
    ) {
        by_contract!(load(out, image))
    }
    Success fn cuModuleUnload(_module: Word) { OK }
    Real fn cuModuleGetLoadingMode(out: Out<c_int>) { out.give(LAZY_LOADING) }
    Success fn cuModuleGetFunction(out: Out<usize>, module: Handle<Module>, name: Text) {
        kernel_of(out, module, &name)
    }
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
        function: Word, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        _shared: u32, stream: StreamHandle, arguments: In<usize>, extra: In<usize>,
    ) {
        let reached = by_contract!(reach(function, arguments, extra, grid_x));
        let (grid, block) = (Dim3 { x: grid_x, y: grid_y, z: grid_z }, Dim3 { x: block_x, y: block_y, z: block_z });
        launch(grid, block, stream, reached)
    }
    Success fn cuLaunchCooperativeKernel(
        function: Word, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        _shared: u32, stream: StreamHandle, arguments: In<usize>,
    ) {
        let reached = by_contract!(reach(function, arguments, In::null(), grid_x));
        let (grid, block) = (Dim3 { x: grid_x, y: grid_y, z: grid_z }, Dim3 { x: block_x, y: block_y, z: block_z });
        launch(grid, block, stream, reached)
    }
    Success fn cuLaunchKernelEx(
        config: In<CUlaunchConfig>, function: Word, arguments: In<usize>, extra: In<usize>,
    ) {
        by_contract!(launch_with(config, function, arguments, extra))
    }
    Success fn cuLibraryLoadData(
        out: Out<Handle<Module>>, code: Word, _options: Word, _values: Word, _count: u32, _more: Word,
        _more_values: Word, _more_count: u32,
    ) {
        by_contract!(load(out, code))
    }
    Success fn cuLibraryLoadFromFile(
        out: Out<Handle<Module>>, path: Text, _options: Word, _values: Word, _count: u32, _more: Word,
        _more_values: Word, _more_count: u32,
    ) {
        load_file(out, &path)
    }
    Success fn cuLibraryUnload(_library: Word) { OK }
    Success fn cuLibraryGetKernel(out: Out<usize>, library: Handle<Module>, name: Text) {
        kernel_of(out, library, &name)
    }
    Real fn cuLibraryGetModule(out: Out<Handle<Module>>, library: Handle<Module>) { out.give(library) }
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
    /// A tensor map has 128 bytes that only kernels read. Here it contains the address of the memory to
    /// which the kernel may write.
    Success fn {cuTensorMapEncodeTiled, cuTensorMapEncodeIm2col}(
        map: Out<[u64; 16]>, _type: c_int, _rank: u32, address: Word,
    ) {
        map.give(tensor_map(address))
    }
    Success fn cuTensorMapReplaceAddress(map: Out<[u64; 16]>, address: Word) { map.give(tensor_map(address)) }
}
