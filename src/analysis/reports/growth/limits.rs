//! How long a run must be for its growth to be measured, and which growth counts.

/// Growth is computed only from at least this many finished steps or, without steps, from at least
/// [`FEWEST_SLICES`] slices of time.
pub(in super::super) const FEWEST_STEPS: usize = 3;
pub(super) const FEWEST_SLICES: usize = 8;
/// Growth counts as flat if it is less than this many bytes (the first number), or less than one part in this
/// many of the memory in use (the second number).
const FLAT: (i64, i64) = (2 << 20, 100);

/// Returns the bytes below which growth counts as flat, if `used` bytes are in use.
pub(super) fn flat_below(used: i64) -> i64 {
    FLAT.0.max(used / FLAT.1)
}
