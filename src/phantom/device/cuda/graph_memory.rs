//! Memory nodes of graphs: allocations and frees that are captured or added, and that take place at a launch.
//!
//! A node has an address from its creation, and memory from the launch. NVIDIA documents the calls but not
//! the amounts of memory. Assumed here: at its first launch a graph reserves pages for the largest total of
//! bytes that its nodes hold at one time. The reservation stays with the device when the graph is destroyed
//! and serves the next graph; `cudaDeviceGraphMemTrim` returns it. Neither applies to memory that is still
//! allocated: "physical pages cannot be reused if they are bound to [...] a graph allocation which remains
//! unfreed" (CUDA C++ Programming Guide, Physical Memory Management and Sharing).

use std::collections::{HashMap, HashSet};
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

use cudarc::driver::sys::CUgraphMem_attribute_enum;

use crate::core::device::Device;
use crate::core::ffi::{INVALID_DEVICE, INVALID_VALUE, OK, OUT_OF_MEMORY, Out, Status, codes};
use crate::core::host_state::{device, fail};
use crate::core::lock::lock;
use crate::core::past_oom::Caller;
use crate::core::vram::{BlockPurpose, PAGE};

/// The memory nodes of a graph.
#[derive(Default)]
pub(crate) struct GraphMemory {
    /// The nodes, in the order of their creation.
    steps: Mutex<Vec<MemoryStep>>,
    /// The number of an executable graph, which is unique in the process. 0 for other graphs.
    id: u64,
    /// True if a launch frees the memory that earlier launches left allocated. Only executable graphs use it.
    auto_free: bool,
    /// The graph from which an executable graph was instantiated, and which owns the
    /// addresses. `None` for other graphs.
    origin: Option<Arc<GraphMemory>>,
}

/// A memory node and its address.
#[derive(Clone, Copy)]
enum MemoryStep {
    Alloc(usize),
    Free(usize),
}

/// The block of an allocation node.
struct NodeBlock {
    device: &'static Device,
    size: u64,
    /// The id of the executable graph whose launch allocated the block. `None` if the block is not allocated.
    live: Option<u64>,
    /// True if a graph with this node exists.
    owned: bool,
}

/// The memory of all graphs on one device, in bytes.
#[derive(Default, Clone, Copy)]
struct DeviceUsage {
    /// The bytes charged to the device.
    reserved: u64,
    /// The bytes that launches allocated and that were not freed since.
    used: u64,
    reserved_high: u64,
    used_high: u64,
}

/// The state of the memory nodes of all graphs.
#[derive(Default)]
struct GraphTables {
    /// The blocks of the allocation nodes, by address.
    blocks: HashMap<usize, NodeBlock>,
    /// The use of each device, by its index.
    devices: HashMap<usize, DeviceUsage>,
    /// The bytes that each launched graph needs on each device, by its id and the device's index.
    launched: HashMap<(u64, usize), u64>,
}

static TABLES: LazyLock<Mutex<GraphTables>> = LazyLock::new(Mutex::default);

impl GraphMemory {
    /// Adds an allocation node and returns its address. Returns `None` if the device has no addresses left.
    pub(crate) fn add_alloc(&self, device: &'static Device, size: usize) -> Option<usize> {
        let size = size.checked_add(511)? & !511;
        let address = device.vram().alloc(size, BlockPurpose::Graph, Caller::GivesUp)?;
        let block = NodeBlock { device, size: size as u64, live: None, owned: true };
        lock(&TABLES).blocks.insert(address, block);
        lock(&self.steps).push(MemoryStep::Alloc(address));
        Some(address)
    }

    /// Adds a free node.
    pub(crate) fn add_free(&self, address: usize) {
        lock(&self.steps).push(MemoryStep::Free(address));
    }

    /// Returns the memory nodes of an executable graph.
    pub(crate) fn instantiate(self: &Arc<Self>, auto_free: bool) -> Arc<GraphMemory> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let (steps, id) = (lock(&self.steps).clone(), NEXT_ID.fetch_add(1, Ordering::Relaxed));
        Arc::new(GraphMemory { steps: Mutex::new(steps), id, auto_free, origin: Some(Arc::clone(self)) })
    }

    /// Runs the allocations and frees of the nodes, in order. Fails if the device has too little memory, or
    /// if memory of an earlier launch is still allocated and the graph does not free it itself.
    pub(crate) fn launch(&self) -> Status {
        let steps = lock(&self.steps);
        if steps.is_empty() {
            return OK;
        }
        let tables = &mut *lock(&TABLES);
        for step in steps.iter() {
            if let MemoryStep::Alloc(address) = step
                && tables.blocks.get(address).is_some_and(|block| block.live.is_some())
            {
                if !self.auto_free {
                    return INVALID_VALUE;
                }
                tables.free(*address);
            }
        }
        let mut needs = tables.needs(&steps);
        needs.retain(|&(device, _)| !tables.launched.contains_key(&(self.id, device)));
        if !tables.reserve(&needs) {
            return OUT_OF_MEMORY;
        }
        tables.launched.extend(needs.into_iter().map(|(device, bytes)| ((self.id, device), bytes)));
        for step in steps.iter() {
            match *step {
                MemoryStep::Alloc(address) => tables.alloc(address, self.id),
                MemoryStep::Free(address) => tables.free(address),
            }
        }
        OK
    }
}

impl Drop for GraphMemory {
    /// Drops the nodes. Live memory stays allocated until it is freed, and the reservation
    /// stays until it is trimmed.
    fn drop(&mut self) {
        let tables = &mut *lock(&TABLES);
        if self.origin.is_some() {
            tables.launched.retain(|&(id, _), _| id != self.id);
            return;
        }
        for step in lock(&self.steps).iter() {
            if let MemoryStep::Alloc(address) = *step
                && let Some(block) = tables.blocks.get_mut(&address)
            {
                block.owned = false;
                tables.release_if_unused(address);
            }
        }
    }
}

impl GraphTables {
    fn usage(&mut self, device: usize) -> &mut DeviceUsage {
        self.devices.entry(device).or_default()
    }

    /// Returns the largest total of bytes that the graph's own allocations hold at one time on each device, in
    /// whole pages. A free of another graph's memory does not lower this total.
    fn needs(&self, steps: &[MemoryStep]) -> Vec<(usize, u64)> {
        let mut own = HashSet::new();
        let mut live_and_peak: HashMap<usize, (u64, u64)> = HashMap::new();
        for step in steps {
            let (MemoryStep::Alloc(address) | MemoryStep::Free(address)) = step;
            let Some(block) = self.blocks.get(address) else { continue };
            let (live, peak) = live_and_peak.entry(block.device.index).or_default();
            match step {
                MemoryStep::Alloc(_) if own.insert(*address) => *live += block.size,
                MemoryStep::Free(_) if own.remove(address) => *live -= block.size,
                MemoryStep::Alloc(_) | MemoryStep::Free(_) => {}
            }
            *peak = (*live).max(*peak);
        }
        live_and_peak
            .into_iter()
            .map(|(device, (_, peak))| (device, peak.next_multiple_of(PAGE as u64)))
            .collect()
    }

    /// Returns the live bytes on a device that no launched graph's needs include, in whole pages. Their graph
    /// was destroyed, or a trim returned its reservation.
    fn live_without_graph(&self, device: usize) -> u64 {
        let outside = |block: &&NodeBlock| {
            block.device.index == device
                && block.live.is_some_and(|id| !self.launched.contains_key(&(id, device)))
        };
        let bytes: u64 = self.blocks.values().filter(outside).map(|block| block.size).sum();
        bytes.next_multiple_of(PAGE as u64)
    }

    /// Charges the bytes that are not reserved yet. If a device has too little free memory, charges nothing and
    /// returns false.
    fn reserve(&mut self, needs: &[(usize, u64)]) -> bool {
        let mut charged: Vec<(&Device, u64)> = Vec::new();
        for &(index, bytes) in needs {
            let launched = self.launched.iter().filter(|&(&(_, device), _)| device == index);
            let needed = launched.map(|(_, bytes)| bytes).sum::<u64>() + self.live_without_graph(index);
            let more = (needed + bytes).saturating_sub(self.usage(index).reserved);
            match device(index as c_int).filter(|device| device.vram().charge(more, Caller::GivesUp)) {
                Some(device) => charged.push((device, more)),
                None => {
                    charged.iter().for_each(|(device, bytes)| device.vram().discharge(*bytes));
                    return false;
                }
            }
        }
        for (device, bytes) in charged {
            let usage = self.usage(device.index);
            usage.reserved += bytes;
            usage.reserved_high = usage.reserved_high.max(usage.reserved);
        }
        true
    }

    fn alloc(&mut self, address: usize, graph: u64) {
        let Some(block) = self.blocks.get_mut(&address).filter(|block| block.live.is_none()) else { return };
        block.live = Some(graph);
        let (index, size) = (block.device.index, block.size);
        let usage = self.usage(index);
        usage.used += size;
        usage.used_high = usage.used_high.max(usage.used);
    }

    fn free(&mut self, address: usize) {
        let Some(block) = self.blocks.get_mut(&address).filter(|block| block.live.is_some()) else { return };
        block.live = None;
        let (device, size) = (block.device, block.size);
        self.usage(device.index).used -= size;
        device.values().free(address, size as usize);
        self.release_if_unused(address);
    }

    /// Gives an address back to the device if no graph owns it and its memory is not allocated.
    fn release_if_unused(&mut self, address: usize) {
        if let Some(block) = self.blocks.get(&address).filter(|block| block.live.is_none() && !block.owned) {
            block.device.vram().free(address);
            self.blocks.remove(&address);
        }
    }
}

/// Returns true if an address belongs to an allocation node.
pub(crate) fn owns(address: usize) -> bool {
    lock(&TABLES).blocks.contains_key(&address)
}

/// Frees memory that a launch left allocated, when the program frees it outside of a graph.
pub(crate) fn free(address: usize) -> Status {
    let mut tables = lock(&TABLES);
    if tables.blocks.get(&address).is_none_or(|block| block.live.is_none()) {
        return fail(INVALID_VALUE);
    }
    tables.free(address);
    OK
}

codes!(CUgraphMem_attribute_enum {
    CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT,
    CU_GRAPH_MEM_ATTR_USED_MEM_HIGH,
    CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT,
    CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH,
});

/// Writes the value of a `CUgraphMem_attribute`, in bytes.
pub(crate) fn attribute(index: c_int, attribute: c_int, out: Out<u64>) -> Status {
    let Some(device) = device(index) else { return fail(INVALID_DEVICE) };
    let usage = *lock(&TABLES).usage(device.index);
    match attribute {
        CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT => out.give(usage.used),
        CU_GRAPH_MEM_ATTR_USED_MEM_HIGH => out.give(usage.used_high),
        CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT => out.give(usage.reserved),
        CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH => out.give(usage.reserved_high),
        _ => fail(INVALID_VALUE),
    }
}

/// Resets a high-water mark to the current value. The only value that a program may write is zero.
pub(crate) fn reset_high_water_mark(index: c_int, attribute: c_int) -> Status {
    let Some(device) = device(index) else { return fail(INVALID_DEVICE) };
    let mut tables = lock(&TABLES);
    let usage = tables.usage(device.index);
    match attribute {
        CU_GRAPH_MEM_ATTR_USED_MEM_HIGH => usage.used_high = usage.used,
        CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH => usage.reserved_high = usage.reserved,
        _ => return fail(INVALID_VALUE),
    }
    OK
}

/// Returns to the device the reserved memory that launches have not left allocated. No launch can be in
/// progress, because a launch is complete when its call returns.
pub(crate) fn trim(index: c_int) -> Status {
    let Some(device) = device(index) else { return fail(INVALID_DEVICE) };
    let tables = &mut *lock(&TABLES);
    // These graphs lose their reservation, so their next launch must reserve memory again.
    tables.launched.retain(|&(_, index), _| index != device.index);
    let usage = tables.usage(device.index);
    let kept = usage.used.next_multiple_of(PAGE as u64);
    let returned = usage.reserved.saturating_sub(kept);
    usage.reserved -= returned;
    device.vram().discharge(returned);
    OK
}
