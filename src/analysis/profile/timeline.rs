//! The rows of the profiler's exports: `MemoryProfile.timeline` and `MemoryProfileTimeline`.

use super::Profile;
use super::types::{Action, Change, ProfilerCategory};

/// The time of blocks that were allocated before the trace or the window.
const BEFORE: i64 = -1;

/// A row of the coalesced timeline: the Unix time in µs, and the sizes. The sizes start with a 0, followed by
/// the bytes of the eight categories, in the order of their numbers.
pub type Row = (i64, [i64; 9]);

/// An entry of the raw timeline, as `export_memory_timeline_raw` writes it: the Unix time in ns (-1 for
/// preexisting blocks), the number of the action, signed bytes, and the number of the category.
pub type Raw = (i64, u8, i64, u8);

impl Profile {
    /// Returns the timeline of a device, as `export_memory_timeline` writes it (`[times, sizes]`), in order
    /// of time.
    pub fn timeline(&self, device: i32) -> impl Iterator<Item = Row> {
        let time = |change: &Change| match change.time_ns {
            ..0 => BEFORE,
            time_ns => self.micros(time_ns),
        };
        // Preexisting blocks have a separate row, at the time of the first other action.
        let first = self.actions(device).map(time).find(|time| *time != BEFORE).unwrap_or(BEFORE);
        let mut changes = self.actions(device).peekable();
        let mut sizes = [0; 9];
        std::iter::from_fn(move || {
            let now = time(changes.peek()?);
            while let Some(change) = changes.next_if(|change| time(change) == now) {
                let bytes = self.block(change).bytes;
                let mut update = |category: ProfilerCategory, bytes: i64| {
                    let size: &mut i64 = &mut sizes[category as usize + 1];
                    *size = size.wrapping_add(bytes);
                };
                match change.action {
                    Action::Preexisting | Action::Create => update(change.category, bytes),
                    Action::Destroy => update(change.category, -bytes),
                    Action::IncrementVersion => {
                        update(change.category, -bytes);
                        update(change.after, bytes);
                    }
                }
            }
            Some((if now == BEFORE { first } else { now }, sizes))
        })
    }

    /// Returns the raw timeline of a device. A new version has two entries: the old version ends, and the new
    /// one begins.
    pub fn raw(&self, device: i32) -> impl Iterator<Item = Raw> {
        self.actions(device).flat_map(|change| {
            let time =
                if change.time_ns < 0 { -1 } else { self.start_unix_ns.saturating_add(change.time_ns) };
            let bytes = self.block(change).bytes;
            let entry = |bytes, category| (time, change.action as u8, bytes, category as u8);
            let (gone, come) = match change.action {
                Action::Preexisting | Action::Create => (None, Some(entry(bytes, change.category))),
                Action::Destroy => (Some(entry(-bytes, change.category)), None),
                Action::IncrementVersion => {
                    (Some(entry(-bytes, change.category)), Some(entry(bytes, change.after)))
                }
            };
            gone.into_iter().chain(come)
        })
    }

    fn micros(&self, time_ns: i64) -> i64 {
        self.start_unix_ns.saturating_add(time_ns) / 1000
    }
}
