//! The thresholds by which `memtrace oom` judges.

pub(super) use super::super::growth::FEWEST_STEPS;

/// Memory below this share of the card is too small to be the cause of an OOM.
pub(super) const MATERIAL: f64 = 0.1;
/// The usual upper bound, in bytes, of a CUDA context with the code and workspaces of libraries: they take
/// 300 to 600 MiB on one GPU.
pub(super) const USUAL_CONTEXT: i64 = 600 << 20;
/// An upper bound, in bytes, of the memory that a CUDA context and the code and workspaces of libraries take
/// without a traced call. Unaccounted memory beyond it belongs to another process.
pub(super) const MOST_OF_CONTEXT: i64 = 1 << 30;
/// The minimum number of forwards with a backward that predict the next one.
pub(super) const FEWEST_CYCLES: u64 = 2;
/// A step is larger than the earlier ones if it takes this many times as much memory as usual.
pub(super) const LARGER_STEP: f64 = 1.25;

/// A part of a number of bytes, as its numerator and denominator.
type Part = (i64, i64);

/// The part of the held memory that a change must save so that the rest of the step certainly fits: in a step larger
/// than earlier ones, in the optimizer's step (which comes last), and in any other step. These parts were chosen with
/// the programs of `tests/oom`.
pub(super) const LEAST_SAVING_IN_LARGER_STEP: Part = (1, 2);
pub(super) const LEAST_SAVING_IN_OPTIMIZER: Part = (1, 4);
pub(super) const LEAST_SAVING: Part = (2, 5);
/// A change must save at least this part of the bytes that the whole step lacks. Memory that was not yet allocated counts
/// as saved.
pub(super) const LEAST_OF_SHORT: Part = (5, 4);

/// Returns this part of `bytes`.
pub(super) fn part_of(bytes: i64, (numerator, denominator): Part) -> i64 {
    bytes / denominator * numerator
}
