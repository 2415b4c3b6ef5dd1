//! The live memory and the totals, as the encoder keeps them.

use memtrace_trace::Event;
use memtrace_trace::memory::{DeviceTotals, LiveMemory, MemoryState, Totals};
use rustc_hash::FxHashMap;

use crate::live::Live;

/// The memory of the process, by address.
pub(crate) type Memory = MemoryState<LiveByAddress, Devices>;

/// The name of live memory. A segment begins at the address of its first block, so the two need names of their own.
#[derive(Clone, Copy)]
pub(crate) enum Key {
    /// A block that torch's allocator reported.
    Block(u64),
    /// Memory from any other traced call, such as a segment or pinned host memory; see [`crate::keys`].
    Region(u64),
}

/// Live memory by address.
#[derive(Default)]
pub(crate) struct LiveByAddress {
    /// Blocks that torch's allocator reported.
    pub(crate) blocks: FxHashMap<u64, Live>,
    /// The memory of calls.
    pub(crate) regions: FxHashMap<u64, Live>,
    /// Blocks that were freed and are still in use by a stream.
    pub(crate) deferred: FxHashMap<u64, Live>,
}

impl LiveByAddress {
    /// The key of the block at an address, reported or a call's own, or `None` without a block there.
    pub(crate) fn block_at(&self, address: u64) -> Option<(Key, Live)> {
        if let Some(live) = self.blocks.get(&address) {
            return Some((Key::Block(address), *live));
        }
        self.regions.get(&address).filter(|live| live.is_block()).map(|live| (Key::Region(address), *live))
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
            Key::Region(key) => self.regions.insert(key, live),
        }
    }

    #[inline]
    fn remove(&mut self, key: Key, (): ()) -> Option<Live> {
        match key {
            Key::Block(address) => self.blocks.remove(&address),
            Key::Region(key) => self.regions.remove(&key),
        }
    }
}

/// The totals of the devices.
#[derive(Default)]
pub(crate) struct Devices {
    pub(crate) host: Totals,
    /// By CUDA ordinal.
    pub(crate) gpus: Vec<Totals>,
}

impl Devices {
    /// The totals of a device; all zero for one that was never used.
    pub(crate) fn totals(&self, device: i8) -> Totals {
        match usize::try_from(device) {
            Ok(index) => self.gpus.get(index).copied().unwrap_or_default(),
            Err(_) => self.host,
        }
    }
}

impl DeviceTotals for Devices {
    #[inline]
    fn totals_mut(&mut self, device: i32) -> &mut Totals {
        if device == i32::from(Event::HOST) {
            return &mut self.host;
        }
        // The ordinals of a damaged journal fit in a byte too.
        let index = device.clamp(0, i32::from(i8::MAX)) as usize;
        if self.gpus.len() <= index {
            self.gpus.resize(index + 1, Totals::default());
        }
        &mut self.gpus[index]
    }
}
