//! Detects memory that grows from step to step. Either of two measures shows growth:
//!
//! - The bytes that are allocated when each step begins. The minimum over the latest steps is compared with the
//!   minimum over the early steps, so that a single larger step has no effect.
//! - The bytes of live blocks that were allocated in an earlier step, after the early steps. This measure also
//!   shows a small list where steps of many sizes hide it in the first measure.

use std::ops::RangeInclusive;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::attribution::{block_ages, steps};
use crate::runtime::fork::ForkSafe;

/// The maximum number of devices that are counted.
const DEVICES: usize = 64;
/// The early steps. The steps before them fill caches and create optimizer state.
const EARLY: RangeInclusive<u64> = 3..=5;
/// The number of latest steps whose minimum is compared.
const RECENT: usize = 4;
/// The minimum growth in bytes, in addition to 1% of the early minimum. Smaller growth is ignored.
const LEAST: u64 = 64 << 10;
/// The age in steps from which a block counts as kept. A variable of a loop keeps the last step's tensor until it
/// is assigned again.
const AGE: i32 = 2;
/// Growth is checked after this many steps, then at each fourfold multiple.
const FIRST_LOOK: u64 = 10;

/// The bytes that torch's allocator has handed out on each device, as of its last report.
static ALLOCATED: [AtomicU64; DEVICES] = [const { AtomicU64::new(0) }; DEVICES];

struct Steps {
    begun: u64,
    early: u64,
    /// The number of the last early step.
    early_step: i32,
    recent: [u64; RECENT],
    next_look: u64,
}

impl Default for Steps {
    fn default() -> Steps {
        Steps::NEW
    }
}

impl Steps {
    const NEW: Steps =
        Steps { begun: 0, early: u64::MAX, early_step: i32::MAX, recent: [0; RECENT], next_look: FIRST_LOOK };

    /// Counts `step`, which begins with `bytes` allocated. Returns true if a search is due and memory is growing.
    /// `kept` returns the bytes of the live blocks of a range of steps.
    fn begin(&mut self, step: i32, bytes: u64, kept: impl FnOnce(RangeInclusive<i32>) -> u64) -> bool {
        self.begun += 1;
        if EARLY.contains(&self.begun) {
            self.early = self.early.min(bytes);
            self.early_step = step;
        }
        self.recent[self.begun as usize % RECENT] = bytes;
        if self.begun < self.next_look {
            return false;
        }
        self.next_look = self.next_look.saturating_mul(4);
        self.is_growing(step, kept)
    }

    fn is_growing(&self, step: i32, kept: impl FnOnce(RangeInclusive<i32>) -> u64) -> bool {
        if self.begun <= EARLY.end() + RECENT as u64 / 2 {
            return false;
        }
        let recent = self.recent.iter().min().copied().unwrap_or(0);
        let least = (self.early / 100).saturating_add(LEAST);
        recent > self.early.saturating_add(least)
            || kept(self.early_step.saturating_add(1)..=step.saturating_sub(AGE)) > least
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
    if STEPS.with(|all| all.begin(steps::current(), bytes, block_ages::bytes_of)) {
        grows();
    }
}

/// Returns true if memory has grown from step to step so far.
pub(crate) fn is_growing() -> bool {
    STEPS.with(|all| all.is_growing(steps::current(), block_ages::bytes_of))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the steps, counted from 1, at which a search starts, and whether memory is growing at the end.
    fn looks(bytes: impl Fn(u64) -> u64) -> (Vec<u64>, bool) {
        let mut steps = Steps::NEW;
        let looks = (1..=700).filter(|step| steps.begin(*step as i32, bytes(*step), |_| 0)).collect();
        (looks, steps.is_growing(700, |_| 0))
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
        assert!(!Steps::NEW.is_growing(0, |_| u64::MAX));
    }

    #[test]
    fn a_small_list_is_seen_though_each_step_has_another_size() {
        const MIB: u64 = 1 << 20;
        let each = |step: i32| if step > 100 { MIB / 2 } else { 0 };
        let kept = |steps: RangeInclusive<i32>| steps.map(each).sum::<u64>();
        let mut steps = Steps::NEW;
        let size = |step: i32| 100 * MIB + step as u64 % 4 * 50 * MIB;
        let looks: Vec<_> = (101..800).filter(|step| steps.begin(*step, size(*step), kept)).collect();
        assert_eq!(looks, [110, 140, 260, 740], "steps that a program counts from 101");
        assert!(steps.is_growing(799, kept));
        let bounded = |steps: RangeInclusive<i32>| steps.filter(|step| *step > 797).count() as u64 * MIB;
        assert!(!steps.is_growing(799, bounded), "the last tensors, which the loop replaces");
    }
}
