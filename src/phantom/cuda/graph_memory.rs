//! Memory that graphs take: nodes that allocate and free, captured or added.
//!
//! A node has an address from its making on, and memory from the launch on. What is assumed of the real driver, of
//! which NVIDIA documents the calls and not the amounts: a graph holds, from its first launch on, pages for the
//! most that its nodes have at once; what it held stays with the device when it is destroyed, serves the
//! next graph, and goes back with `cudaDeviceGraphMemTrim`.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{Arc, LazyLock, Mutex};

use crate::core::ffi::{INVALID_DEVICE, INVALID_VALUE, OK, OUT_OF_MEMORY, Out, Status};
use crate::core::host_state::{Device, device, fail, lock};
use crate::core::vram::{PAGE, Use};

/// What a graph does with memory, in order.
#[derive(Default)]
pub(crate) struct Memory {
    steps: Mutex<Vec<Step>>,
    /// Of a graph made ready to launch: what earlier launches left is freed by the next.
    frees_itself: bool,
    /// The graph that it was made from, whose addresses it uses.
    of: Option<Arc<Memory>>,
}

#[derive(Clone, Copy)]
enum Step {
    Take(usize),
    Give(usize),
}

/// An address that a node gave.
struct Node {
    device: &'static Device,
    size: u64,
    /// Taken by a launch and not freed since.
    live: bool,
    /// There is a graph that has it.
    owned: bool,
}

/// What graphs hold of one device.
#[derive(Default, Clone, Copy)]
struct Held {
    /// Charged to the device.
    reserved: u64,
    /// Taken by a launch and not freed since.
    used: u64,
    reserved_high: u64,
    used_high: u64,
}

#[derive(Default)]
struct Tables {
    nodes: HashMap<usize, Node>,
    devices: HashMap<usize, Held>,
    /// What each launched graph needs of each device, by the address of its [`Memory`].
    launched: HashMap<usize, Vec<(usize, u64)>>,
}

static TABLES: LazyLock<Mutex<Tables>> = LazyLock::new(Mutex::default);

impl Memory {
    /// A node that allocates.
    pub(crate) fn take(&self, device: &'static Device, size: usize) -> Option<usize> {
        let size = size.checked_add(511)? & !511;
        let address = device.vram().allocate(size, Use::Graph)?;
        lock(&TABLES).nodes.insert(address, Node { device, size: size as u64, live: false, owned: true });
        lock(&self.steps).push(Step::Take(address));
        Some(address)
    }

    /// A node that frees.
    pub(crate) fn give(&self, address: usize) {
        lock(&self.steps).push(Step::Give(address));
    }

    /// The same, ready to launch.
    pub(crate) fn instantiated(self: &Arc<Self>, frees_itself: bool) -> Arc<Memory> {
        let steps = lock(&self.steps).clone();
        Arc::new(Memory { steps: Mutex::new(steps), frees_itself, of: Some(Arc::clone(self)) })
    }

    /// Takes and gives what the nodes do.
    pub(crate) fn launch(&self) -> Status {
        let steps = lock(&self.steps);
        if steps.is_empty() {
            return OK;
        }
        let tables = &mut *lock(&TABLES);
        for step in steps.iter() {
            if let Step::Take(address) = step
                && tables.nodes.get(address).is_some_and(|node| node.live)
            {
                if !self.frees_itself {
                    return INVALID_VALUE;
                }
                tables.give(*address);
            }
        }
        let key = std::ptr::from_ref(self) as usize;
        if !tables.launched.contains_key(&key) {
            let needs = tables.needs(&steps);
            if !tables.reserve(&needs) {
                return OUT_OF_MEMORY;
            }
            tables.launched.insert(key, needs);
        }
        for step in steps.iter() {
            match *step {
                Step::Take(address) => tables.take(address),
                Step::Give(address) => tables.give(address),
            }
        }
        OK
    }
}

impl Drop for Memory {
    /// What is live stays until it is freed, and what was held until it is trimmed.
    fn drop(&mut self) {
        let tables = &mut *lock(&TABLES);
        tables.launched.remove(&(std::ptr::from_ref(self) as usize));
        if self.of.is_some() {
            return;
        }
        for step in lock(&self.steps).iter() {
            if let Step::Take(address) = *step
                && let Some(node) = tables.nodes.get_mut(&address)
            {
                node.owned = false;
                tables.forget(address);
            }
        }
    }
}

impl Tables {
    fn held(&mut self, device: usize) -> &mut Held {
        self.devices.entry(device).or_default()
    }

    /// The most that the nodes have at once, in pages, on each device.
    fn needs(&self, steps: &[Step]) -> Vec<(usize, u64)> {
        let mut now: HashMap<usize, (u64, u64)> = HashMap::new();
        for step in steps {
            let (Step::Take(address) | Step::Give(address)) = step;
            let Some(node) = self.nodes.get(address) else { continue };
            let (live, most) = now.entry(node.device.index).or_default();
            match step {
                Step::Take(_) => *live += node.size,
                Step::Give(_) => *live = live.saturating_sub(node.size),
            }
            *most = (*live).max(*most);
        }
        now.into_iter().map(|(device, (_, most))| (device, most.next_multiple_of(PAGE as u64))).collect()
    }

    /// Charges what is not held yet. False when a device has too little.
    fn reserve(&mut self, needs: &[(usize, u64)]) -> bool {
        needs.iter().all(|&(index, bytes)| {
            let of_device = |&&(of, _): &&(usize, u64)| of == index;
            let needed: u64 =
                self.launched.values().flatten().filter(of_device).map(|(_, bytes)| bytes).sum();
            let held = self.held(index);
            let more = (needed + bytes).saturating_sub(held.reserved);
            let fits = device(index as c_int).is_some_and(|device| device.vram().charge(more));
            if fits {
                held.reserved += more;
                held.reserved_high = held.reserved_high.max(held.reserved);
            }
            fits
        })
    }

    fn take(&mut self, address: usize) {
        let Some(node) = self.nodes.get_mut(&address).filter(|node| !node.live) else { return };
        node.live = true;
        let (index, size) = (node.device.index, node.size);
        let held = self.held(index);
        held.used += size;
        held.used_high = held.used_high.max(held.used);
    }

    fn give(&mut self, address: usize) {
        let Some(node) = self.nodes.get_mut(&address).filter(|node| node.live) else { return };
        node.live = false;
        let (device, size) = (node.device, node.size);
        self.held(device.index).used -= size;
        device.values().forget(address, size as usize);
        self.forget(address);
    }

    /// An address that no graph has and no launch left goes back.
    fn forget(&mut self, address: usize) {
        if let Some(node) = self.nodes.get(&address).filter(|node| !node.live && !node.owned) {
            node.device.vram().free(address);
            self.nodes.remove(&address);
        }
    }
}

/// Whether a node gave that address.
pub(crate) fn owns(address: usize) -> bool {
    lock(&TABLES).nodes.contains_key(&address)
}

/// Frees, outside a graph, what a launch left.
pub(crate) fn free(address: usize) -> Status {
    let mut tables = lock(&TABLES);
    if tables.nodes.get(&address).is_none_or(|node| !node.live) {
        return fail(INVALID_VALUE);
    }
    tables.give(address);
    OK
}

/// One `CU_GRAPH_MEM_ATTR`.
pub(crate) fn attribute(index: c_int, attribute: c_int, out: Out<u64>) -> Status {
    let Some(device) = device(index) else { return fail(INVALID_DEVICE) };
    let held = *lock(&TABLES).held(device.index);
    match attribute {
        0 => out.give(held.used),
        1 => out.give(held.used_high),
        2 => out.give(held.reserved),
        3 => out.give(held.reserved_high),
        _ => fail(INVALID_VALUE),
    }
}

/// Lets a high-water mark begin anew: the only value that may be written is zero.
pub(crate) fn restart(index: c_int, attribute: c_int) -> Status {
    let Some(device) = device(index) else { return fail(INVALID_DEVICE) };
    let mut tables = lock(&TABLES);
    let held = tables.held(device.index);
    match attribute {
        1 => held.used_high = held.used,
        3 => held.reserved_high = held.reserved,
        _ => return fail(INVALID_VALUE),
    }
    OK
}

/// Gives back what no launch left: every launch here is over when it returns.
pub(crate) fn trim(index: c_int) -> Status {
    let Some(device) = device(index) else { return fail(INVALID_DEVICE) };
    let tables = &mut *lock(&TABLES);
    // Each graph takes its memory anew when it is launched again.
    for needs in tables.launched.values_mut() {
        needs.retain(|&(of, _)| of != device.index);
    }
    tables.launched.retain(|_, needs| !needs.is_empty());
    let held = tables.held(device.index);
    let kept = held.used.next_multiple_of(PAGE as u64);
    let gone = held.reserved.saturating_sub(kept);
    held.reserved -= gone;
    device.vram().discharge(gone);
    OK
}
