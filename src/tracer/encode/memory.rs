//! The encoder's live memory and totals.

use std::collections::BTreeMap;

use memtrace_trace::Event;
use memtrace_trace::memory::{DeviceTotals, LiveMemory, MemoryKind, MemoryState, Totals};
use rustc_hash::FxHashMap;

use crate::keys::{CPU_TENSOR, address};
use crate::live::Live;

/// The memory of the process, by address.
pub(crate) type Memory = MemoryState<LiveByAddress, Devices>;

/// The key of live memory. A segment begins at the address of its first block, so segments and blocks need
/// separate keys.
#[derive(Clone, Copy)]
pub(crate) enum Key {
    /// A block that torch's allocator reported.
    Block(u64),
    /// Memory from any other traced call, such as a segment or pinned host memory; see [`crate::keys`].
    Region(u64),
}

impl Key {
    /// Returns the address of the memory.
    pub(crate) fn address(self) -> u64 {
        match self {
            Key::Block(address) => address,
            Key::Region(key) => address(key),
        }
    }
}

/// Live memory by address.
#[derive(Default)]
pub(crate) struct LiveByAddress {
    /// Blocks that torch's allocator reported.
    blocks: FxHashMap<u64, Live>,
    /// Memory that traced calls allocated.
    regions: FxHashMap<u64, Live>,
    /// Blocks that the program has freed while a stream still uses them.
    deferred: FxHashMap<u64, Live>,
    /// The segments and mapped pieces of private pools: the end and the pool, by the first address.
    private: BTreeMap<u64, (u64, u16)>,
}

impl LiveByAddress {
    /// Returns the private pool of the segment that contains `address`; 0 for the default pool.
    #[inline]
    pub(crate) fn pool_at(&self, address: u64) -> u16 {
        if self.private.is_empty() {
            return 0;
        }
        let before = self.private.range(..=address).next_back();
        before.filter(|(_, (end, _))| address < *end).map_or(0, |(_, (_, pool))| *pool)
    }

    /// Returns the key of the block or CPU tensor at an address, whether torch reported it or a call
    /// allocated it, or `None` if neither is there.
    pub(crate) fn block_at(&self, address: u64) -> Option<(Key, Live)> {
        if let Some(live) = self.blocks.get(&address) {
            return Some((Key::Block(address), *live));
        }
        if let Some(live) = self.regions.get(&(address | CPU_TENSOR)) {
            return Some((Key::Region(address | CPU_TENSOR), *live));
        }
        self.regions.get(&address).filter(|live| live.is_block()).map(|live| (Key::Region(address), *live))
    }

    /// Returns the live memory with this key.
    pub(crate) fn get(&self, key: Key) -> Option<&Live> {
        match key {
            Key::Block(address) => self.block(address),
            Key::Region(key) => self.region(key),
        }
    }

    /// Returns the block at an address that torch's allocator reported.
    #[inline]
    pub(crate) fn block(&self, address: u64) -> Option<&Live> {
        self.blocks.get(&address)
    }

    /// Returns the memory with this key that a traced call allocated.
    #[inline]
    pub(crate) fn region(&self, key: u64) -> Option<&Live> {
        self.regions.get(&key)
    }

    /// Returns the blocks that torch's allocator reported, by address.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = (u64, &Live)> {
        self.blocks.iter().map(|(address, live)| (*address, live))
    }

    /// Returns the memory that traced calls allocated, by key.
    pub(crate) fn regions(&self) -> impl Iterator<Item = (u64, &Live)> {
        self.regions.iter().map(|(key, live)| (*key, live))
    }

    /// Returns the blocks that the program has freed while a stream still uses them, by address.
    pub(crate) fn deferred(&self) -> impl Iterator<Item = (u64, &Live)> {
        self.deferred.iter().map(|(address, live)| (*address, live))
    }

    /// Keeps a block that the program has freed while a stream still uses it.
    pub(crate) fn defer(&mut self, address: u64, live: Live) {
        self.deferred.insert(address, live);
    }

    /// Removes a block that no stream uses any more, and returns it.
    #[inline]
    pub(crate) fn take_deferred(&mut self, address: u64) -> Option<Live> {
        // Fast path, because frees are rarely deferred.
        if self.deferred.is_empty() { None } else { self.deferred.remove(&address) }
    }
}

impl LiveMemory for LiveByAddress {
    type Key = Key;
    type Block = Live;
    type Replaced = Option<Live>;
    type Cause = ();
    type Freed = Live;

    #[inline]
    fn insert(&mut self, key: Key, live: Live) -> Option<Live> {
        match key {
            Key::Block(address) => self.blocks.insert(address, live),
            Key::Region(key) => {
                if live.pool > 0 && matches!(live.kind, MemoryKind::Segment | MemoryKind::Mapped) {
                    let start = address(key);
                    self.private.insert(start, (start.saturating_add_signed(live.bytes), live.pool));
                }
                self.regions.insert(key, live)
            }
        }
    }

    #[inline]
    fn remove(&mut self, key: Key, (): ()) -> Option<Live> {
        match key {
            Key::Block(address) => self.blocks.remove(&address),
            Key::Region(key) => {
                let removed = self.regions.remove(&key);
                if removed.is_some_and(|live| live.pool > 0) {
                    self.private.remove(&address(key));
                }
                removed
            }
        }
    }
}

/// The totals of the devices.
#[derive(Default)]
pub(crate) struct Devices {
    host: Totals,
    /// The CPU tensors.
    cpu: Totals,
    /// The GPUs, by CUDA ordinal.
    gpus: Vec<Totals>,
}

impl Devices {
    /// Returns the totals of a device; all zero if it was never used.
    #[inline(always)]
    pub(crate) fn totals(&self, device: i8) -> Totals {
        match usize::try_from(device) {
            Ok(index) => self.gpus.get(index).copied().unwrap_or_default(),
            Err(_) if device == Event::CPU => self.cpu,
            Err(_) => self.host,
        }
    }

    pub(crate) fn host(&self) -> &Totals {
        &self.host
    }

    /// Returns the totals of the host, of the CPU tensors, or of a GPU that is new.
    #[cold]
    fn other_totals_mut(&mut self, device: i32) -> &mut Totals {
        if device == i32::from(Event::HOST) {
            return &mut self.host;
        }
        if device == i32::from(Event::CPU) {
            return &mut self.cpu;
        }
        // A damaged journal may contain any ordinal.
        let index = device.clamp(0, i32::from(i8::MAX)) as usize;
        if self.gpus.len() <= index {
            self.gpus.resize(index + 1, Totals::default());
        }
        &mut self.gpus[index]
    }

    /// Returns the totals of the GPUs, by CUDA ordinal.
    pub(crate) fn gpus(&self) -> &[Totals] {
        &self.gpus
    }
}

impl DeviceTotals for Devices {
    #[inline(always)]
    fn totals_mut(&mut self, device: i32) -> &mut Totals {
        // A negative number makes no index.
        let index = device as usize;
        if index < self.gpus.len() { &mut self.gpus[index] } else { self.other_totals_mut(device) }
    }
}
