//! Kernels: registration, attributes, occupancy and launches that do nothing but take device time.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::core::ffi::{Dim3, INVALID_VALUE, OK, Out, Status, Text, Word};
use crate::core::host_state::{current, fail, lock, machine};
use crate::core::vram::Use;
use crate::cuda::device_properties::limits;
use crate::cuda::stream::stream;
use crate::kernels::fatbin;
use crate::kernels::kernel_effects;
use crate::table::call_table::answers;

static LAUNCHES: AtomicU64 = AtomicU64::new(0);

/// Kernels launched so far.
pub(crate) fn launches() -> u64 {
    LAUNCHES.load(Ordering::Relaxed)
}

/// What a kernel is taken to cost: the gap between two launches, and one microsecond for each
/// full load of the card. Invented, but the same in every run, so that autotuners decide alike.
fn cost(grid: Dim3, block: Dim3) -> u64 {
    let threads = grid.product().saturating_mul(block.product());
    let load = u64::from(machine().spec.sms) * 2048;
    2_000 + (threads / load.max(1)).min(1_000_000) * 1_000
}

/// Queues a kernel of which nothing is known.
pub(crate) fn launch(grid: Dim3, block: Dim3, on: usize) -> Status {
    queue(cost(grid, block), on);
    kernel_effects::unknown();
    stream(on).device().disturb();
    OK
}

fn queue(cost: u64, on: usize) {
    LAUNCHES.fetch_add(1, Ordering::Relaxed);
    stream(on).launch(cost);
}

/// Queues a kernel of the program's own.
fn launch_function(function: usize, grid: Dim3, block: Dim3, arguments: usize, on: usize) -> Status {
    queue(cost(grid, block), on);
    // What is captured is only done when the graph is launched.
    if stream(on).capturing().is_none() {
        kernel_effects::launched(function, arguments, on);
    }
    OK
}

/// Queues work of a library: one kernel of an unknown shape.
pub(crate) fn launch_library(on: usize) -> Status {
    queue(20_000, on);
    kernel_effects::unknown();
    stream(on).device().disturb();
    OK
}

/// A launch written `kernel<<<...>>>` passes its shape through here.
#[derive(Clone, Copy)]
pub(crate) struct Configuration {
    grid: Dim3,
    block: Dim3,
    shared: usize,
    stream: usize,
}

/// Launches never nest deeper than the arguments of one launch that launch another.
const NESTING: usize = 8;
const NOTHING: Configuration =
    Configuration { grid: Dim3 { x: 1, y: 1, z: 1 }, block: Dim3 { x: 1, y: 1, z: 1 }, shared: 0, stream: 0 };

thread_local! {
    static PUSHED: Cell<([Configuration; NESTING], usize)> = const { Cell::new(([NOTHING; NESTING], 0)) };
}

fn push(configuration: Configuration) {
    let _ = PUSHED.try_with(|cell| {
        let (mut stack, depth) = cell.get();
        if depth < NESTING {
            stack[depth] = configuration;
        }
        cell.set((stack, depth + 1));
    });
}

fn pop() -> Configuration {
    PUSHED
        .try_with(|cell| {
            let (stack, depth) = cell.get();
            let depth = depth.saturating_sub(1);
            cell.set((stack, depth));
            stack.get(depth).copied().unwrap_or(NOTHING)
        })
        .unwrap_or(NOTHING)
}

/// `cudaFuncAttributes`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct FunctionAttributes {
    shared: usize,
    constant: usize,
    local: usize,
    most_threads: c_int,
    registers: c_int,
    ptx: c_int,
    binary: c_int,
    cache_mode: c_int,
    most_dynamic_shared: c_int,
    others: [c_int; 23],
}

fn function_attributes(kernel: usize) -> FunctionAttributes {
    let version = fatbin::version(kernel) as c_int;
    FunctionAttributes {
        shared: 0,
        constant: 0,
        local: 0,
        most_threads: 1024,
        registers: 32,
        ptx: version,
        binary: version,
        cache_mode: 0,
        most_dynamic_shared: limits().shared_per_block_optin as c_int,
        others: [0; 23],
    }
}

/// One `CU_FUNC_ATTRIBUTE`.
pub(crate) fn function_attribute(attribute: c_int) -> c_int {
    let all = function_attributes(0);
    match attribute {
        0 => all.most_threads,
        4 => all.registers,
        5 => all.ptx,
        6 => all.binary,
        8 => all.most_dynamic_shared,
        _ => 0,
    }
}

/// Blocks of that many threads that fit on a multiprocessor, by threads alone: what registers and
/// shared memory would allow is in the kernel's code, which nobody loaded.
pub(crate) fn occupancy(threads: c_int) -> c_int {
    let limits = limits();
    if threads <= 0 {
        return 1;
    }
    (limits.threads_per_sm as c_int / threads).clamp(1, limits.blocks_per_sm as c_int)
}

/// `cudaLaunchConfig_t`, as far as needed.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct LaunchConfiguration {
    grid: Dim3,
    block: Dim3,
    shared: usize,
    stream: usize,
}

/// The place of a kernel's global variable, the same one for the same name.
pub(crate) fn global(key: &[u8], size: usize) -> usize {
    use std::collections::HashMap;
    use std::sync::{LazyLock, Mutex};
    type Places = HashMap<(usize, Vec<u8>), usize>;
    static PLACES: LazyLock<Mutex<Places>> = LazyLock::new(Mutex::default);
    let device = current();
    *lock(&PLACES)
        .entry((device.index, key.to_vec()))
        .or_insert_with(|| device.vram().allocate(size, Use::Global).unwrap_or(0))
}

/// What a variable of unknown size gets.
pub(crate) const GLOBAL: usize = 64 << 10;

answers! {
    Real fn __cudaRegisterFatBinary(binary: Word) -> usize { fatbin::register(binary) }
    Real fn __cudaRegisterFatBinaryEnd(_handle: Word) -> () {}
    Real fn __cudaUnregisterFatBinary(_handle: Word) -> () {}
    Real fn __cudaRegisterFunction(handle: Word, host: Word, _device: Word, name: Text) -> () {
        fatbin::register_kernel(handle, host, name.bytes());
        kernel_effects::register(host, name.bytes());
    }
    Real fn __cudaRegisterVar(_handle: Word, _host: Word, _device: Word, _name: Text) -> () {}
    Real fn __cudaRegisterManagedVar(_handle: Word, _host: Word, _device: Word, _name: Text) -> () {}
    Real fn __cudaInitModule(_handle: Word) -> c_int { 1 }
    Real fn __cudaPushCallConfiguration(grid: Dim3, block: Dim3, shared: usize, stream: Word) -> u32 {
        push(Configuration { grid, block, shared, stream });
        0
    }
    Real fn __cudaPopCallConfiguration(grid: Out<Dim3>, block: Out<Dim3>, shared: Out<usize>, stream: Out<usize>) {
        let popped = pop();
        grid.put(popped.grid);
        block.put(popped.block);
        shared.put(popped.shared);
        stream.put(popped.stream);
        OK
    }
    Real fn __cudaGetKernel(out: Out<usize>, function: Word) { out.give(function) }
    Success fn __cudaLaunchKernel(kernel: Word, grid: Dim3, block: Dim3, arguments: Word, _shared: usize, on: Word) {
        launch_function(kernel, grid, block, arguments, on)
    }
    Success fn cudaLaunchKernel(function: Word, grid: Dim3, block: Dim3, arguments: Word, _shared: usize, on: Word) {
        launch_function(function, grid, block, arguments, on)
    }
    Success fn cudaLaunchCooperativeKernel(
        _function: Word, grid: Dim3, block: Dim3, _arguments: Word, _shared: usize, on: Word,
    ) {
        launch(grid, block, on)
    }
    Success fn cudaLaunchKernelExC(configuration: Out<LaunchConfiguration>, function: Word, arguments: Word) {
        match configuration.get() {
            Some(shape) => launch_function(function, shape.grid, shape.block, arguments, shape.stream),
            None => fail(INVALID_VALUE),
        }
    }
    Guess fn cudaFuncGetAttributes(out: Out<FunctionAttributes>, function: Word) {
        out.give(function_attributes(function))
    }
    Success fn cudaFuncSetAttribute(_function: Word, _attribute: c_int, _value: c_int) { OK }
    Success fn cudaFuncSetCacheConfig(_function: Word, _mode: c_int) { OK }
    Success fn cudaFuncSetSharedMemConfig(_function: Word, _mode: c_int) { OK }
    Real fn cudaFuncGetName(out: Out<usize>, _function: Word) { out.give(c"phantom".as_ptr() as usize) }
    Real fn cudaGetFuncBySymbol(out: Out<usize>, function: Word) { out.give(function) }
    Guess fn cudaOccupancyMaxActiveBlocksPerMultiprocessor(out: Out<c_int>, _function: Word, threads: c_int, _shared: usize) {
        out.give(occupancy(threads))
    }
    Guess fn cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        out: Out<c_int>, _function: Word, threads: c_int, _shared: usize, _flags: u32,
    ) {
        out.give(occupancy(threads))
    }
    Guess fn cudaOccupancyMaxActiveClusters(out: Out<c_int>, _function: Word, _configuration: Word) { out.give(1) }
    Guess fn cudaOccupancyMaxPotentialClusterSize(out: Out<c_int>, _function: Word, _configuration: Word) { out.give(8) }
    Guess fn cudaGetSymbolAddress(out: Out<usize>, symbol: Word) { out.give(global(&symbol.to_le_bytes(), GLOBAL)) }
    Guess fn cudaGetSymbolSize(out: Out<usize>, _symbol: Word) { out.give(GLOBAL) }
}
