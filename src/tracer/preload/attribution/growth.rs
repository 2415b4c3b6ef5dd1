//! Detects memory that grows from step to step, by the bytes that are allocated when each step begins.
//!
//! The minimum over the latest steps is compared with the minimum over the early steps, so that a single
//! larger step has no effect.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::runtime::fork::ForkSafe;

/// The maximum number of devices that are counted.
const DEVICES: usize = 64;
/// The early steps. The steps before them fill caches and create optimizer state.
const EARLY: std::ops::RangeInclusive<u64> = 3..=5;
/// The number of latest steps whose minimum is compared.
const RECENT: usize = 4;
/// The minimum growth in bytes, in addition to 1% of the early minimum. Smaller growth is ignored.
const LEAST: u64 = 64 << 10;
/// Growth is checked after this many steps, then at each fourfold multiple.
const FIRST_LOOK: u64 = 10;

/// The bytes that torch's allocator has handed out on each device, as of its last report.
static ALLOCATED: [AtomicU64; DEVICES] = [const { AtomicU64::new(0) }; DEVICES];

struct Steps {
    begun: u64,
    early: u64,
    recent: [u64; RECENT],
    next_look: u64,
}

impl Default for Steps {
    fn default() -> Steps {
        Steps::NEW
    }
}

impl Steps {
    const NEW: Steps = Steps { begun: 0, early: u64::MAX, recent: [0; RECENT], next_look: FIRST_LOOK };

    /// Counts a step that begins with `bytes` allocated. Returns true if a search is due and memory is
    /// growing.
    fn begin(&mut self, bytes: u64) -> bool {
        self.begun += 1;
        if EARLY.contains(&self.begun) {
            self.early = self.early.min(bytes);
        }
        self.recent[self.begun as usize % RECENT] = bytes;
        if self.begun < self.next_look {
            return false;
        }
        self.next_look = self.next_look.saturating_mul(4);
        self.is_growing()
    }

    fn is_growing(&self) -> bool {
        let recent = self.recent.iter().min().copied().unwrap_or(0);
        let least = self.early.saturating_add(self.early / 100).saturating_add(LEAST);
        self.begun > EARLY.end() + RECENT as u64 / 2 && recent > least
    }
}

static STEPS: ForkSafe<Steps> = ForkSafe::new(Steps::NEW);

/// Sets the bytes that torch's allocator has handed out on a device. Ignores a device number of [`DEVICES`]
/// or more.
#[inline]
pub(crate) fn allocated(device: i8, bytes: u64) {
    if let Some(now) = usize::try_from(device).ok().and_then(|device| ALLOCATED.get(device)) {
        now.store(bytes, Ordering::Relaxed);
    }
}

/// The functions that request a search for the holders of memory: one for growing memory, and one for the
/// request of a command. Unset if this process cannot search.
static SEARCHES: OnceLock<[fn(); 2]> = OnceLock::new();

/// Sets the function that requests a search because memory grows, and the function that requests one for a
/// command. Neither function may block.
pub(crate) fn set_searches(grows: fn(), asked: fn()) {
    let _ = SEARCHES.set([grows, asked]);
}

/// Requests a search for the holders of memory, on behalf of a command.
pub(crate) fn search_asked() {
    if let Some([_, asked]) = SEARCHES.get() {
        asked();
    }
}

/// Counts a step that begins. Requests a search if one is due and memory is growing.
pub(crate) fn step_begins() {
    let Some([grows, _]) = SEARCHES.get() else { return };
    let bytes = ALLOCATED.iter().map(|device| device.load(Ordering::Relaxed)).sum();
    if STEPS.with(|steps| steps.begin(bytes)) {
        grows();
    }
}

/// Returns true if memory has grown from step to step so far.
pub(crate) fn is_growing() -> bool {
    STEPS.with(|steps| steps.is_growing())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the steps, counted from 1, at which a search starts, and whether memory is growing at the end.
    fn looks(bytes: impl Fn(u64) -> u64) -> (Vec<u64>, bool) {
        let mut steps = Steps::NEW;
        let looks = (1..=700).filter(|step| steps.begin(bytes(*step))).collect();
        (looks, steps.is_growing())
    }

    #[test]
    fn retained_memory_grows_when_the_least_of_the_latest_steps_is_more_than_that_of_the_early_ones() {
        const MIB: u64 = 1 << 20;
        assert_eq!(looks(|step| 100 * MIB + step * MIB), (vec![10, 40, 160, 640], true));
        assert_eq!(looks(|_| 100 * MIB), (vec![], false));
        assert_eq!(looks(|step| 100 * MIB + step % 3 * 50 * MIB), (vec![], false), "steps of several sizes");
        assert_eq!(looks(|step| if step > 2 { 100 * MIB } else { MIB }), (vec![], false), "optimizer state");
        assert_eq!(looks(|step| step * 1000), (vec![160, 640], true), "slow growth is seen later");
        assert_eq!(looks(|step| u64::MAX - step), (vec![], false));
        assert!(!Steps::NEW.is_growing());
    }
}
