//! Kernels: registration, attributes, occupancy and launches. A launch takes device time but runs no code.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{c_char, c_int};
use std::mem::zeroed;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex};

use cudarc::driver::sys::CUfunction_attribute;
use cudarc::runtime::sys::{cudaFuncAttributes, cudaLaunchConfig_t};

use crate::core::call_table::{answers, by_contract};
use crate::core::ffi::{Dim3, Handle, INVALID_VALUE, In, OK, Out, Status, Text, Word, codes, volume};
use crate::core::host_state::{current, fail, host_state};
use crate::core::lock::lock;
use crate::core::past_oom::{self, Caller};
use crate::core::stream::Stream;
use crate::core::vram::BlockPurpose;
use crate::cuda::device_attributes::capability_limits;
use crate::cuda::graphs::graph_of;
use crate::cuda::reach::{Launch, forget_everything};
use crate::cuda::streams::StreamHandle;
use crate::cuda::torch_reports;
use crate::kernels::fatbin::{self, FatBinary};
use crate::kernels::{elementwise, kernel_effects, signature};

static LAUNCHES: AtomicU64 = AtomicU64::new(0);

/// Returns the number of kernels launched so far.
pub(crate) fn launches() -> u64 {
    LAUNCHES.load(Ordering::Relaxed)
}

/// Returns the assumed duration of a kernel in nanoseconds: the gap between two launches, plus one
/// microsecond for each time that the threads fill the card. The duration does not depend on the run, so
/// autotuners always make the same choices.
fn cost_ns(grid: Dim3, block: Dim3) -> u64 {
    let threads = volume(grid).saturating_mul(volume(block));
    let full_load = u64::from(host_state().spec.sms) * 2048;
    2_000 + (threads / full_load.max(1)).min(1_000_000) * 1_000
}

/// The assumed duration of a math library call, in nanoseconds.
const LIBRARY_COST_NS: u64 = 20_000;

/// Marks the memory that a launch reaches as unknown, or all memory if the launch is not known.
fn apply(launch: Option<&Launch>) {
    elementwise::launched_unknown();
    match launch {
        Some(launch) => launch.apply(),
        None => forget_everything(),
    }
}

/// Queues work that takes `cost_ns` nanoseconds. Captured work takes effect when its graph is launched, on
/// the memory that it reaches now. `describe` is called only if the work is captured.
fn queue(
    cost_ns: u64,
    stream: StreamHandle,
    effect: impl FnOnce(&'static Stream),
    describe: impl FnOnce() -> Option<Launch>,
) -> Status {
    let stream = match stream.for_work() {
        Ok(stream) => stream,
        Err(status) => return status,
    };
    LAUNCHES.fetch_add(1, Ordering::Relaxed);
    past_oom::request_ends();
    match stream.capturing() {
        None => {
            stream.launch(cost_ns);
            effect(stream);
        }
        Some(capture) => {
            if let Some(graph) = graph_of(capture).get() {
                let launch = describe();
                graph.add_effect(Box::new(move |_| {
                    apply(launch.as_ref());
                    OK
                }));
            }
            stream.launch(cost_ns);
        }
    }
    OK
}

/// Launches a kernel. `launch` is `None` if its arguments are not known.
pub(crate) fn launch(grid: Dim3, block: Dim3, stream: StreamHandle, launch: Option<Launch>) -> Status {
    let launch = std::cell::OnceCell::from(launch);
    queue(
        cost_ns(grid, block),
        stream,
        |_| apply(launch.get().and_then(Option::as_ref)),
        || launch.get().cloned().flatten(),
    )
}

/// Launches the work of a math library as one kernel of unknown shape. `launch` is `None` if its
/// arguments are not known. The library has no status code for a refused launch, so the next call of the
/// runtime reports the refusal.
pub(crate) fn launch_library(stream: StreamHandle, launch: Option<Launch>) -> Status {
    let launch = launch.map(Launch::of_library);
    queue(LIBRARY_COST_NS, stream, |_| apply(launch.as_ref()), || launch.clone());
    OK
}

/// Launches library work on the default stream, for calls with an unknown stream.
pub(crate) fn launch_library_on_default_stream(launch: Option<Launch>) -> Status {
    let stream = StreamHandle::DEFAULT.stream();
    LAUNCHES.fetch_add(1, Ordering::Relaxed);
    stream.launch(LIBRARY_COST_NS);
    apply(launch.map(Launch::of_library).as_ref());
    OK
}

/// Launches a registered kernel, and applies the effect known for its name.
///
/// # Safety
/// `arguments` is the argument list in a launch of this function: an array with the address of each argument.
unsafe fn launch_function(
    function: usize,
    grid: Dim3,
    block: Dim3,
    arguments: In<usize>,
    stream: StreamHandle,
) -> Status {
    queue(
        cost_ns(grid, block),
        stream,
        // SAFETY: the caller's promise.
        |stream| unsafe { kernel_effects::launched(function, arguments, grid.x, stream) },
        // SAFETY: as above.
        || unsafe { kernel_effects::launch_of(function, arguments, grid.x) },
    )
}

/// Launches a registered kernel with the shape and the stream of a configuration.
///
/// # Safety
/// `config` is null or contains a stream handle; `arguments` is as for [`launch_function`].
unsafe fn launch_with(config: In<cudaLaunchConfig_t>, function: usize, arguments: In<usize>) -> Status {
    let Some(config) = config.get() else { return fail(INVALID_VALUE) };
    // SAFETY: the caller's promise.
    unsafe {
        let stream = StreamHandle::from_address(config.stream as usize);
        launch_function(function, config.gridDim, config.blockDim, arguments, stream)
    }
}

/// The configuration of a launch in the form `kernel<<<...>>>`. It is pushed before the
/// call and popped inside it.
#[derive(Clone, Copy)]
struct CallConfiguration {
    grid: Dim3,
    block: Dim3,
    shared: usize,
    stream: usize,
}

/// The maximum number of configurations on the stack. It can hold several, because the arguments of one
/// launch may contain other launches.
const MAX_NESTING: usize = 8;

const EMPTY_CONFIGURATION: CallConfiguration = CallConfiguration {
    grid: Dim3 { x: 1, y: 1, z: 1 },
    block: Dim3 { x: 1, y: 1, z: 1 },
    shared: 0,
    stream: 0,
};

thread_local! {
    /// The pushed configurations, and their number.
    static PUSHED: Cell<([CallConfiguration; MAX_NESTING], usize)> =
        const { Cell::new(([EMPTY_CONFIGURATION; MAX_NESTING], 0)) };
}

fn push(configuration: CallConfiguration) {
    let _ = PUSHED.try_with(|cell| {
        let (mut stack, depth) = cell.get();
        if depth < MAX_NESTING {
            stack[depth] = configuration;
        }
        cell.set((stack, depth + 1));
    });
}

fn pop() -> CallConfiguration {
    PUSHED
        .try_with(|cell| {
            let (stack, depth) = cell.get();
            let depth = depth.saturating_sub(1);
            cell.set((stack, depth));
            stack.get(depth).copied().unwrap_or(EMPTY_CONFIGURATION)
        })
        .unwrap_or(EMPTY_CONFIGURATION)
}

// The struct has the same layout in CUDA 12 and 13.
const _: () = assert!(size_of::<cudaFuncAttributes>() == 144 && align_of::<cudaFuncAttributes>() == 8);
const _: () = assert!(size_of::<cudaLaunchConfig_t>() == 56 && align_of::<cudaLaunchConfig_t>() == 8);

/// Returns the assumed attributes of a kernel.
fn function_attributes(kernel: usize) -> cudaFuncAttributes {
    let version = fatbin::version(kernel) as c_int;
    // SAFETY: a struct of integers, for which all zero is valid.
    let zero: cudaFuncAttributes = unsafe { zeroed() };
    cudaFuncAttributes {
        maxThreadsPerBlock: 1024,
        numRegs: 32,
        ptxVersion: version,
        binaryVersion: version,
        maxDynamicSharedSizeBytes: capability_limits().shared_per_block_optin as c_int,
        ..zero
    }
}

codes!(CUfunction_attribute {
    CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
    CU_FUNC_ATTRIBUTE_NUM_REGS,
    CU_FUNC_ATTRIBUTE_PTX_VERSION,
    CU_FUNC_ATTRIBUTE_BINARY_VERSION,
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
});

/// Returns the value of a `CUfunction_attribute`.
pub(crate) fn function_attribute(attribute: c_int) -> c_int {
    let all = function_attributes(0);
    match attribute {
        CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK => all.maxThreadsPerBlock,
        CU_FUNC_ATTRIBUTE_NUM_REGS => all.numRegs,
        CU_FUNC_ATTRIBUTE_PTX_VERSION => all.ptxVersion,
        CU_FUNC_ATTRIBUTE_BINARY_VERSION => all.binaryVersion,
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES => all.maxDynamicSharedSizeBytes,
        _ => 0,
    }
}

/// Returns the number of blocks of `threads` threads that fit on a multiprocessor. Only threads are
/// considered, because registers and shared memory depend on the kernel's code, which is not loaded.
pub(crate) fn occupancy(threads: c_int) -> c_int {
    let limits = capability_limits();
    if threads <= 0 {
        return 1;
    }
    (limits.threads_per_sm as c_int / threads).clamp(1, limits.blocks_per_sm as c_int)
}

/// The assumed size of a global variable in bytes. The real size is in the code.
pub(crate) const GLOBAL_SIZE: usize = 64 << 10;

/// Returns the address of a kernel's global variable on the current device. The same key always gets the same
/// address.
pub(crate) fn global_variable(key: &[u8], size: usize) -> usize {
    type Addresses = HashMap<(usize, Vec<u8>), usize>;
    static ADDRESSES: LazyLock<Mutex<Addresses>> = LazyLock::new(Mutex::default);
    let device = current();
    *lock(&ADDRESSES)
        .entry((device.index, key.to_vec()))
        .or_insert_with(|| device.vram().alloc(size, BlockPurpose::Global, Caller::GivesUp).unwrap_or(0))
}

answers! {
    Real fn __cudaRegisterFatBinary(wrapper: Word) -> Handle<FatBinary> {
        by_contract!(fatbin::register(wrapper))
    }
    /// PyTorch's report function is looked up here, because the library that contains this binary has just
    /// been loaded. If it is one of PyTorch's libraries, the library with that function is loaded, too.
    Real fn __cudaRegisterFatBinaryEnd(_handle: Word) -> () {
        torch_reports::find_report();
    }
    Real fn __cudaUnregisterFatBinary(_handle: Word) -> () {}
    Real fn __cudaRegisterFunction(handle: Handle<FatBinary>, host: Word, _device: Word, name: Text) -> () {
        fatbin::register_kernel(handle, host, name.bytes());
        kernel_effects::register(host, name.bytes());
        by_contract!(signature::register(host, handle, name.address()));
    }
    Real fn {__cudaRegisterVar, __cudaRegisterManagedVar}(
        _handle: Word, _host: Word, _device: Word, _name: Text,
    ) -> () {}
    Real fn __cudaInitModule(_handle: Word) -> c_int { 1 }
    Real fn __cudaPushCallConfiguration(grid: Dim3, block: Dim3, shared: usize, stream: Word) -> u32 {
        push(CallConfiguration { grid, block, shared, stream });
        0
    }
    Real fn __cudaPopCallConfiguration(
        grid: Out<Dim3>, block: Out<Dim3>, shared: Out<usize>, stream: Out<usize>,
    ) {
        let popped = pop();
        grid.put(popped.grid);
        block.put(popped.block);
        shared.put(popped.shared);
        stream.put(popped.stream);
        OK
    }
    Real fn {__cudaGetKernel, cudaGetFuncBySymbol}(out: Out<usize>, function: Word) { out.give(function) }
    Success fn __cudaLaunchKernel(
        kernel: Word, grid: Dim3, block: Dim3, arguments: In<usize>, _shared: usize, stream: StreamHandle,
    ) {
        by_contract!(launch_function(kernel, grid, block, arguments, stream))
    }
    Success fn {cudaLaunchKernel, cudaLaunchCooperativeKernel}(
        function: Word, grid: Dim3, block: Dim3, arguments: In<usize>, _shared: usize, stream: StreamHandle,
    ) {
        by_contract!(launch_function(function, grid, block, arguments, stream))
    }
    Success fn cudaLaunchKernelExC(config: In<cudaLaunchConfig_t>, function: Word, arguments: In<usize>) {
        by_contract!(launch_with(config, function, arguments))
    }
    Guess fn cudaFuncGetAttributes(out: Out<cudaFuncAttributes>, function: Word) {
        out.give(function_attributes(function))
    }
    Success fn cudaFuncSetAttribute(_function: Word, _attribute: c_int, _value: c_int) { OK }
    Success fn {cudaFuncSetCacheConfig, cudaFuncSetSharedMemConfig}(_function: Word, _mode: c_int) { OK }
    Real fn cudaFuncGetName(out: Out<*const c_char>, _function: Word) { out.give(c"phantom".as_ptr()) }
    Guess fn cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        out: Out<c_int>, _function: Word, threads: c_int, _shared: usize,
    ) {
        out.give(occupancy(threads))
    }
    Guess fn cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        out: Out<c_int>, _function: Word, threads: c_int, _shared: usize, _flags: u32,
    ) {
        out.give(occupancy(threads))
    }
    Guess fn cudaOccupancyMaxActiveClusters(out: Out<c_int>, _function: Word, _config: Word) { out.give(1) }
    Guess fn cudaOccupancyMaxPotentialClusterSize(out: Out<c_int>, _function: Word, _config: Word) {
        out.give(8)
    }
    Guess fn cudaGetSymbolAddress(out: Out<usize>, symbol: Word) {
        out.give(global_variable(&symbol.to_le_bytes(), GLOBAL_SIZE))
    }
    Guess fn cudaGetSymbolSize(out: Out<usize>, _symbol: Word) { out.give(GLOBAL_SIZE) }
}
