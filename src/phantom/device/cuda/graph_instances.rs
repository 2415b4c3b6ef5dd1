//! The memory that the driver takes for an instantiated graph, in addition to its memory nodes. The amount is
//! an estimate, because NVIDIA documents no size.
//!
//! - A kernel node takes about 10 KB, which is NVIDIA's own figure in
//!   [cccl#3768](https://github.com/NVIDIA/cccl/pull/3768), of 2025. (With CUDA 11.2 and driver 470 it took
//!   64 KiB: 362, 395 and 458 MB for graphs of 500, 1000 and 2000 empty kernels, [NVIDIA's
//!   forum](https://forums.developer.nvidia.com/t/244901).)
//! - A graph takes about 128 KiB more: [vllm#23184](https://github.com/vllm-project/vllm/pull/23184) logs 6 or 8
//!   MiB, 6.6 on average, for each batch size of Llama 3.1 8B, which is 33 graphs of 8 kernels or fewer.
//!
//! `docs/phantom-fidelity.md` compares the estimate with logs on which it is not based.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};

use crate::core::device::Device;
use crate::core::lock::lock;
use crate::core::past_oom::Caller;
use crate::core::vram::PAGE;
use crate::libs::handle_memory;

/// The estimated bytes that a node takes. [`GRAPH_BYTES`] is the estimate for a graph without nodes.
const NODE_BYTES: u64 = 10 << 10;
const GRAPH_BYTES: u64 = 128 << 10;
/// The bytes that the first graph takes in addition on a card of compute capability 9.0. On an H200 (CUDA
/// 13.0, driver 580), PyTorch's capture and replay of 100 kernels took 70 MiB. Only this total is measured,
/// so which part comes again with another graph is not known.
const FIRST_GRAPH_BYTES: u64 = 68 << 20;

/// The bytes of all instantiated graphs, by device index. Whole pages are charged to the device.
static BYTES: LazyLock<Mutex<HashMap<usize, u64>>> = LazyLock::new(Mutex::default);

/// The memory of an instantiated graph. Dropping the value frees the memory.
pub(crate) struct GraphInstance {
    device: &'static Device,
    bytes: u64,
}

/// Returns the bytes that are charged for this many bytes: whole pages.
const fn pages(bytes: u64) -> u64 {
    bytes.next_multiple_of(PAGE as u64)
}

impl GraphInstance {
    /// Takes the memory of a graph with this many nodes. Returns `None` if the device has too little memory.
    pub(crate) fn new(device: &'static Device, nodes: u64) -> Option<Self> {
        let bytes = GRAPH_BYTES + nodes.saturating_mul(NODE_BYTES);
        let mut all = lock(&BYTES);
        let known = all.get(&device.index).copied();
        let used = known.unwrap_or(0);
        let first = if known.is_none() && handle_memory::is_counted() { FIRST_GRAPH_BYTES } else { 0 };
        let more = pages(used + bytes) - pages(used) + first;
        device.vram().charge(more, Caller::GivesUp).then(|| {
            all.insert(device.index, used + bytes);
            Self { device, bytes }
        })
    }
}

impl Drop for GraphInstance {
    fn drop(&mut self) {
        let mut all = lock(&BYTES);
        let used = all.entry(self.device.index).or_default();
        let returned = pages(*used) - pages(*used - self.bytes);
        *used -= self.bytes;
        self.device.vram().discharge(returned);
    }
}
