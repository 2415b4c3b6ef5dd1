//! The blocks of brief steps that have no rows of their own ([`crate::BriefPlan`]).

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
struct Sums {
    /// The bytes of the unlisted blocks.
    unlisted: i64,
    /// The sum of the `brief` rows so far.
    written: i64,
    /// The text id of the phase in the `brief` rows.
    phase: u32,
    /// The part of `unlisted` whose addresses are unknown: the blocks of a killed process.
    restored: i64,
    /// The number and the bytes of the blocks that the window has allocated.
    allocations: u64,
    bytes: i64,
    /// The highest allocated and reserved bytes that are in the file with all blocks.
    highest: [i64; 2],
}

/// The unlisted blocks of a process.
#[derive(Default)]
pub(crate) struct UnlistedBlocks {
    blocks: FxHashMap<u64, Unlisted>,
    /// Blocks that the program has freed while a stream still uses them.
    deferred: FxHashMap<u64, Unlisted>,
    /// By CUDA ordinal.
    devices: Vec<Sums>,
    /// The number of windows that have ended.
    windows: u64,
    /// The number of unlisted blocks so far.
    born: i64,
    /// The number of windows that were written in full because of a new peak.
    full: u32,
}

impl UnlistedBlocks {
    fn sums(&mut self, device: i8) -> &mut Sums {
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

    /// Adds a block that thread `tid` has allocated in this window. Returns true if it replaces an unlisted
    /// block at this address.
    pub(crate) fn add(&mut self, address: u64, tid: u32, live: Live) -> bool {
        if !self.deferred.is_empty() {
            self.deferred.remove(&address);
        }
        self.born += 1;
        let sums = self.sums(live.device);
        sums.unlisted = sums.unlisted.wrapping_add(live.bytes);
        sums.allocations += 1;
        sums.bytes = sums.bytes.wrapping_add(live.bytes);
        let live = Live { alloc_id: self.born, ..live };
        let unlisted = Unlisted { live, tid, window: self.windows };
        let Some(before) = self.blocks.insert(address, unlisted) else { return false };
        let sums = self.sums(before.live.device);
        sums.unlisted = sums.unlisted.wrapping_sub(before.live.bytes);
        true
    }

    /// Returns the unlisted block at an address, to change it.
    pub(crate) fn get_mut(&mut self, address: u64) -> Option<&mut Unlisted> {
        self.blocks.get_mut(&address)
    }

    /// Returns the unlisted blocks, without deferred ones.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = &Unlisted> {
        self.blocks.values()
    }

    /// Adds a block that the program has freed while a stream still uses it.
    pub(crate) fn defer(&mut self, address: u64, unlisted: Unlisted) {
        self.deferred.insert(address, unlisted);
    }

    /// Returns true if a stream still uses an unlisted block that the program has freed.
    pub(crate) fn has_deferred(&self) -> bool {
        !self.deferred.is_empty()
    }

    /// Removes the deferred block at an address, which no stream uses any more. Returns false if there is
    /// none.
    pub(crate) fn complete(&mut self, address: u64) -> bool {
        self.deferred.remove(&address).is_some()
    }

    /// Removes the blocks that `is_listed` selects, and all deferred blocks. Returns them in the order of their
    /// allocation, each with its address and whether it is deferred.
    pub(crate) fn take(&mut self, is_listed: &dyn Fn(u64, &Unlisted) -> bool) -> Vec<(u64, Unlisted, bool)> {
        let addresses = self.blocks.iter().filter(|(address, unlisted)| is_listed(**address, unlisted));
        let addresses: Vec<u64> = addresses.map(|(address, _)| *address).collect();
        let mut taken: Vec<_> =
            addresses.into_iter().filter_map(|at| Some((at, self.remove(at)?, false))).collect();
        taken.extend(self.deferred.drain().map(|(address, unlisted)| (address, unlisted, true)));
        taken.sort_by_key(|(_, unlisted, _)| unlisted.live.alloc_id);
        taken
    }

    /// Returns every device up to the highest one with unlisted blocks so far.
    pub(crate) fn devices(&self) -> impl Iterator<Item = i8> + use<> {
        (0..self.devices.len()).map(|device| device as i8)
    }

    /// Returns the number and the bytes of the blocks that the window has allocated on a device, and begins to
    /// count anew.
    pub(crate) fn take_allocations(&mut self, device: i8) -> (u64, i64) {
        let sums = self.sums(device);
        (std::mem::take(&mut sums.allocations), std::mem::take(&mut sums.bytes))
    }

    /// Ends a window, and returns the number of windows that have ended. `ages` is true if the blocks become
    /// older by it.
    pub(crate) fn end_window(&mut self, ages: bool) -> u64 {
        self.windows += u64::from(ages);
        self.windows
    }

    /// Returns the highest allocated and reserved bytes of a device that are in the file with all blocks.
    pub(crate) fn listed_peaks(&mut self, device: i8) -> [i64; 2] {
        self.sums(device).highest
    }

    /// Raises the highest bytes of a device that are in the file with all blocks.
    pub(crate) fn note_listed_peaks(&mut self, device: i8, peaks: [i64; 2]) {
        let highest = &mut self.sums(device).highest;
        *highest = [highest[0].max(peaks[0]), highest[1].max(peaks[1])];
    }

    /// Returns the number of windows that were written in full because of a new peak.
    pub(crate) fn full_windows(&self) -> u32 {
        self.full
    }

    /// Counts a window that is written in full because of a new peak.
    pub(crate) fn count_full_window(&mut self) {
        self.full += 1;
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
