//! Estimates where memory would be full, from the peaks of earlier trials.

use crate::commands::fit::trial::peak::PeakUse;

/// A trial that fitted: its position (see `Candidates::position`) and its peak.
pub(crate) type Point<'a> = (f64, &'a PeakUse);

/// The share of free memory that a program can fill. Torch cannot allocate the memory of the CUDA context,
/// nor fill the rest without gaps.
const USABLE: f64 = 0.97;
/// Of two points, the earlier one is far enough away if its position is at most this share of the later
/// one's.
const FAR: f64 = 0.95;
/// The categories that do not grow with a batch, and that ranks share.
const STATIC: [&str; 3] = ["parameter", "gradient", "optimizer_state"];

/// Returns the position at which memory would be full, according to the line through two points, or `None` if
/// the line does not rise. `room` is the memory in bytes that the second point leaves free.
fn full_at([(a, less), (b, more)]: [(f64, i64); 2], room: i64) -> Option<f64> {
    let slope = (more - less) as f64 / (b - a);
    let room = room as f64 * USABLE;
    (slope > 0.0 && slope.is_finite() && room >= 0.0).then(|| b + room / slope)
}

/// Same as [`full_at`], for several points in ascending order. Draws the line through the last point and the
/// closest earlier point that is far enough away. If that line does not rise, tries the other points. Memory
/// is reserved in pieces, so close points may have the same peak.
pub(crate) fn full_by_line(points: &[(f64, i64)], room: i64) -> Option<f64> {
    let (last, before) = points.split_last()?;
    let far = before.iter().rev().filter(|point| point.0 <= last.0 * FAR);
    let near = before.iter().rev().filter(|point| point.0 > last.0 * FAR);
    far.chain(near).find_map(|point| full_at([*point, *last], room))
}

/// Returns the bytes that a trial needs of the device. If torch's allocator had to empty its cache, the
/// reserved memory shows the size of the device and not the need of the program; in that case, the need is
/// the allocated memory plus the memory outside the allocator.
fn bytes(peak: &PeakUse, was_full: bool) -> i64 {
    if was_full && peak.allocated > 0 { peak.used - peak.reserved + peak.allocated } else { peak.used }
}

/// Returns true if torch's allocator had to empty its cache in any of the trials. [`bytes`] then measures all
/// trials by their allocated memory, so that they are comparable.
fn were_full(points: &[Point<'_>]) -> bool {
    points.iter().any(|(_, peak)| peak.retries > 0)
}

/// Returns the position at which memory would be full, from trials that fitted, in ascending order. Returns
/// `None` if the trials do not show how memory grows.
///
/// With two or more trials, uses the line through two of them. A single trial is split by category into memory
/// that grows and memory that does not. With `are_gpus`, the memory that ranks share grows with the share of
/// each GPU, and activations do not grow.
pub(crate) fn full_by(points: &[Point<'_>], are_gpus: bool) -> Option<f64> {
    let was_full = were_full(points);
    let room = |peak: &PeakUse| peak.capacity - bytes(peak, was_full);
    match points {
        [] => None,
        [(at, peak)] => {
            let fixed = static_bytes(peak);
            // A single trial shows which memory grows only by its categories. A program without torch has no
            // categories.
            let growing = if are_gpus { fixed } else { peak.allocated - fixed };
            if peak.by_category.is_empty() {
                return None;
            }
            full_at([(0.0, peak.allocated - growing), (*at, peak.allocated)], room(peak))
        }
        [.., (_, last)] => {
            let line = |bytes: &dyn Fn(&PeakUse) -> i64| {
                let points: Vec<(f64, i64)> = points.iter().map(|(at, peak)| (*at, bytes(peak))).collect();
                full_by_line(&points, room(last))
            };
            // Segments are large, so the reserved memory of small values may be the same. Then use the
            // allocated memory.
            line(&|peak| bytes(peak, was_full)).or_else(|| line(&|peak| peak.allocated))
        }
    }
}

/// Same as [`full_by`], but from trials on another card or another number of GPUs. The result is for a card of
/// `capacity` bytes and for `shrunk` times as many GPUs, so that each GPU holds `1 / shrunk` of the memory
/// that ranks share.
pub(crate) fn full_elsewhere(
    points: &[Point<'_>],
    are_gpus: bool,
    capacity: i64,
    shrunk: f64,
) -> Option<f64> {
    let moved: Vec<(f64, PeakUse)> = points
        .iter()
        .map(|(at, peak)| {
            let less = (static_bytes(peak) as f64 * (1.0 - 1.0 / shrunk)) as i64;
            // Keep 0, which means that the program does not use torch (see `bytes`).
            let allocated = if peak.allocated > 0 { (peak.allocated - less).max(1) } else { 0 };
            let (reserved, used) = (peak.reserved - less, peak.used - less);
            let moved = PeakUse { allocated, reserved, used, capacity, ..(*peak).clone() };
            (*at, moved)
        })
        .collect();
    let moved: Vec<Point<'_>> = moved.iter().map(|(at, peak)| (*at, peak)).collect();
    full_by(&moved, are_gpus)
}

fn static_bytes(peak: &PeakUse) -> i64 {
    let held = peak.by_category.iter().filter(|(name, _)| STATIC.contains(&name.as_str()));
    held.map(|(_, bytes)| *bytes).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peak(fixed: i64, growing: i64, capacity: i64) -> PeakUse {
        let by_category = vec![("parameter".to_owned(), fixed), ("activation".to_owned(), growing)];
        let all = fixed + growing;
        PeakUse { allocated: all, reserved: all, used: all, capacity, by_category, ..PeakUse::default() }
    }

    #[test]
    fn one_run_shows_the_slope_by_its_categories() {
        // With value 2, the trial uses 400 of 1000 bytes, 200 of them for activations: 100 bytes per value. Of
        // the free 600 bytes, 97 % are 582: enough for 5.82 more values.
        let one = peak(200, 200, 1000);
        assert!((full_by(&[(2.0, &one)], false).unwrap() - 7.82).abs() < 1e-9);
        // On 4 GPUs (position 1/4), each GPU holds 200 bytes of parameters. 582 more bytes are usable: the
        // share of a GPU may grow by the factor 1 + 582 / 200.
        let share = full_by(&[(0.25, &one)], true).unwrap();
        assert!((share - 0.25 * (1.0 + 582.0 / 200.0)).abs() < 1e-9);
        assert_eq!(full_by(&[(1.0, &PeakUse::default())], false), None);
        // No memory grows with the value: no estimate.
        assert_eq!(full_by(&[(1.0, &peak(100, 0, 1000))], false), None);
    }

    #[test]
    fn fit_counts_what_is_used_on_the_device() {
        // The context uses 200 bytes, and torch reserves twice the memory that it allocates.
        let trial = |allocated: i64, retries| {
            let reserved = 2 * allocated;
            let by_category = vec![("activation".to_owned(), allocated)];
            PeakUse {
                allocated,
                reserved,
                used: 200 + reserved,
                capacity: 1000,
                by_category,
                retries,
                ..PeakUse::default()
            }
        };
        let (one, two) = (trial(50, 0), trial(100, 0));
        // Two trials: after value 2, 600 bytes are free, and each further value needs 100 bytes.
        assert!((full_by(&[(1.0, &one), (2.0, &two)], false).unwrap() - 7.82).abs() < 1e-9);
        // One trial: the context does not grow, so each further value needs the 50 bytes that it allocates.
        // After value 1, 700 bytes are free.
        assert!((full_by(&[(1.0, &one)], false).unwrap() - 1.0 - 0.97 * 700.0 / 50.0).abs() < 1e-9);
        // The allocator had to empty its cache, so allocated memory counts: 50 bytes per value. Value 2 uses
        // 300 of 1000 bytes.
        let full = trial(100, 1);
        assert!(
            (full_by(&[(1.0, &one), (2.0, &full)], false).unwrap() - 2.0 - 0.97 * 700.0 / 50.0).abs() < 1e-9
        );
        // Both values fit into one segment, so reserved memory does not grow: the slope is 50 bytes per
        // value, as for allocated memory.
        let in_one = |allocated| PeakUse { reserved: 400, used: 600, ..trial(allocated, 0) };
        let (one, two) = (in_one(50), in_one(100));
        assert!(
            (full_by(&[(1.0, &one), (2.0, &two)], false).unwrap() - 2.0 - 0.97 * 400.0 / 50.0).abs() < 1e-9
        );
    }

    #[test]
    fn a_run_elsewhere_is_moved_to_this_card_and_number_of_gpus() {
        let (one, two) = (peak(400, 100, 1000), peak(400, 200, 1000));
        let points = [(1.0, &one), (2.0, &two)];
        assert!((full_elsewhere(&points, false, 1000, 1.0).unwrap() - 2.0 - 3.88).abs() < 1e-9);
        // On twice as many GPUs, each GPU holds 200 of the 400 bytes that ranks share. After value 2, 200 of
        // the card's 600 bytes are free: enough for 1.94 more values.
        assert!((full_elsewhere(&points, false, 600, 2.0).unwrap() - 2.0 - 1.94).abs() < 1e-9);
        // Without torch, only `used` is known. Each value needs 100 bytes, and 400 of 600 bytes are free
        // after value 2.
        let used = |used| PeakUse { used, capacity: 1000, ..PeakUse::default() };
        let (one, two) = (used(100), used(200));
        let points = [(1.0, &one), (2.0, &two)];
        assert!((full_elsewhere(&points, false, 600, 1.0).unwrap() - 2.0 - 3.88).abs() < 1e-9);
    }
}
