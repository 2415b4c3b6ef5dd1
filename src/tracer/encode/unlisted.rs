//! The blocks of brief steps that have no rows of their own ([`crate::brief`]).

use rustc_hash::FxHashMap;

use crate::live::Live;

/// A live block without a row of its own.
#[derive(Clone, Copy)]
pub(crate) struct Unlisted {
    /// Until the block gets its row, `alloc_id` is the number of the allocation among unlisted blocks.
    pub(crate) live: Live,
    pub(crate) tid: u32,
    /// The number of windows that had ended when the block was allocated.
    pub(crate) window: u64,
}

/// The sums of a device.
#[derive(Clone, Copy, Default)]
pub(crate) struct Sums {
    /// The bytes of the unlisted blocks.
    unlisted: i64,
    /// The sum of the `brief` rows so far.
    written: i64,
    /// The text id of the phase in the `brief` rows.
    phase: u32,
    /// The part of `unlisted` whose addresses are unknown: the blocks of a killed process.
    restored: i64,
    /// The number and the bytes of the blocks that the window has allocated.
    pub(crate) allocations: u64,
    pub(crate) bytes: i64,
    /// The highest allocated and reserved bytes that are in the file with all blocks.
    pub(crate) highest: [i64; 2],
}

/// The unlisted blocks of a process.
#[derive(Default)]
pub(crate) struct UnlistedBlocks {
    pub(crate) blocks: FxHashMap<u64, Unlisted>,
    /// Blocks that the program has freed while a stream still uses them.
    pub(crate) deferred: FxHashMap<u64, Unlisted>,
    /// By CUDA ordinal.
    pub(crate) devices: Vec<Sums>,
    /// The number of windows that have ended.
    pub(crate) windows: u64,
    /// The number of unlisted blocks so far.
    pub(crate) born: i64,
    /// The number of windows that were written in full because of a new peak.
    pub(crate) full: u32,
}

impl UnlistedBlocks {
    pub(crate) fn sums(&mut self, device: i8) -> &mut Sums {
        // A damaged journal may contain any ordinal.
        let index = device.max(0) as usize;
        if self.devices.len() <= index {
            self.devices.resize(index + 1, Sums::default());
        }
        &mut self.devices[index]
    }

    /// Returns the bytes of unlisted blocks that no row of the device contains yet; negative if rows contain
    /// blocks that were freed since.
    #[inline]
    pub(crate) fn hidden(&self, device: i8) -> i64 {
        let sums = self.devices.get(device.max(0) as usize);
        sums.map_or(0, |sums| sums.unlisted.wrapping_sub(sums.written))
    }

    /// Adds a block. Returns true if it replaces an unlisted block at this address.
    pub(crate) fn add(&mut self, address: u64, unlisted: Unlisted) -> bool {
        if !self.deferred.is_empty() {
            self.deferred.remove(&address);
        }
        let sums = self.sums(unlisted.live.device);
        sums.unlisted = sums.unlisted.wrapping_add(unlisted.live.bytes);
        let Some(before) = self.blocks.insert(address, unlisted) else { return false };
        let sums = self.sums(before.live.device);
        sums.unlisted = sums.unlisted.wrapping_sub(before.live.bytes);
        true
    }

    #[inline]
    pub(crate) fn remove(&mut self, address: u64) -> Option<Unlisted> {
        let found = self.blocks.remove(&address)?;
        let sums = self.sums(found.live.device);
        sums.unlisted = sums.unlisted.wrapping_sub(found.live.bytes);
        Some(found)
    }

    /// Counts a `brief` row.
    pub(crate) fn count_row(&mut self, device: i8, bytes: i64) {
        let sums = self.sums(device);
        sums.written = sums.written.wrapping_add(bytes);
    }

    /// Counts a `brief` row that is in the file of a killed process. Its blocks are unlisted, and
    /// their addresses are unknown.
    pub(crate) fn restore(&mut self, device: i8, bytes: i64, phase: u32) {
        self.count_row(device, bytes);
        let sums = self.sums(device);
        (sums.unlisted, sums.restored, sums.phase) = (sums.written, sums.written, phase);
    }

    /// Returns the phase in the device's `brief` rows, and the sum of these rows.
    pub(crate) fn phase(&self, device: i8) -> (u32, i64) {
        let sums = self.devices.get(device.max(0) as usize);
        sums.map_or((0, 0), |sums| (sums.phase, sums.written))
    }

    /// Sets the phase of the device's next `brief` rows.
    pub(crate) fn set_phase(&mut self, device: i8, phase: u32) {
        self.sums(device).phase = phase;
    }

    /// Removes a freed block of unknown address from the blocks of a killed process. Returns false if it
    /// cannot be one of them.
    pub(crate) fn take_restored(&mut self, device: i8, bytes: i64) -> bool {
        let sums = self.sums(device);
        let is_there = bytes > 0 && sums.restored >= bytes;
        if is_there {
            sums.restored -= bytes;
            sums.unlisted = sums.unlisted.wrapping_sub(bytes);
        }
        is_there
    }
}
