//! One simulated device.

use std::sync::{Arc, Mutex, MutexGuard};

use memtrace_cards::Spec;

use crate::core::async_pool::AsyncPool;
use crate::core::clock::DeviceClock;
use crate::core::lock::lock;
use crate::core::machine::Share;
use crate::core::stream::Stream;
use crate::core::values::KnownValues;
use crate::core::vram::Vram;

/// A device and its state. It lives as long as the process.
pub(crate) struct Device {
    /// The position of the device in the list of visible devices.
    pub(crate) index: usize,
    /// The position of the card in the machine, which `CUDA_VISIBLE_DEVICES` does not change.
    pub(crate) card: usize,
    share: Arc<Share>,
    /// The legacy default stream.
    pub(crate) stream: Stream,
    clock: Arc<DeviceClock>,
    vram: Mutex<Vram>,
    values: Mutex<KnownValues>,
    pool: Mutex<AsyncPool>,
}

impl Device {
    /// Creates a device with empty memory.
    pub(crate) fn new(index: usize, card: usize, spec: &Spec) -> Self {
        let clock = Arc::new(DeviceClock::default());
        let share = Arc::new(Share::new(card, spec, Arc::clone(&clock)));
        let limit = spec.memory - spec.context - spec.others;
        Self {
            index,
            card,
            stream: Stream::new(index, Arc::clone(&clock), 0, 0),
            clock,
            vram: Mutex::new(Vram::new(index, limit, Some(Arc::clone(&share)))),
            share,
            values: Mutex::default(),
            pool: Mutex::default(),
        }
    }

    /// Returns this process's share of the card.
    pub(crate) fn share(&self) -> &Share {
        &self.share
    }

    /// Returns the clock of the device, which its streams share.
    pub(crate) fn clock(&self) -> &Arc<DeviceClock> {
        &self.clock
    }

    /// Locks the memory of the device.
    pub(crate) fn vram(&self) -> MutexGuard<'_, Vram> {
        lock(&self.vram)
    }

    /// Locks the known content of the device's memory.
    pub(crate) fn values(&self) -> MutexGuard<'_, KnownValues> {
        lock(&self.values)
    }

    /// Locks the default memory pool. A caller that needs both locks takes this one
    /// before [`vram`](Self::vram).
    pub(crate) fn pool(&self) -> MutexGuard<'_, AsyncPool> {
        lock(&self.pool)
    }

    /// Allocates from the default memory pool. Returns `None` if the device is full.
    pub(crate) fn alloc_from_pool(&self, size: usize) -> Option<usize> {
        self.pool().alloc(&self.vram, size)
    }

    /// Trims the default memory pool until at most `keep` bytes are reserved.
    pub(crate) fn trim_pool(&self, keep: u64) {
        self.pool().trim(&self.vram, keep);
    }

    /// Trims the default memory pool to its release threshold. Called when the program has waited for the
    /// device.
    pub(crate) fn synchronize_pool(&self) {
        self.pool().synchronize(&self.vram);
    }
}

/// The lowest context handle. [`CONTEXT_STEP`] is the distance between two handles.
const CONTEXT_BASE: usize = 0x10_0000;
const CONTEXT_STEP: usize = 0x1000;

/// Returns the handle of a device's primary context. The handle encodes only the device.
pub(crate) fn context_handle(device: usize) -> usize {
    CONTEXT_BASE + device * CONTEXT_STEP
}

/// Returns the index of the device whose primary context has this handle. The index may be out of range,
/// because the handle is not checked.
pub(crate) fn device_of_context(context: usize) -> usize {
    context.wrapping_sub(CONTEXT_BASE) / CONTEXT_STEP
}
