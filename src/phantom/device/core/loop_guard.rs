//! Stops programs that loop on invented values: a program that waits for a value that no kernel
//! computes would never end.
//!
//! Two bounds stop such a program. The first counts all small reads of invented values since the last large
//! input from the host. The second counts identical reads (same range, same answer) while every input from
//! the host repeats an earlier one. It stops a program that sends and reads the same values again and again,
//! as a server does whose sequences never grow. A message names such a loop at a tenth of this bound.

use std::collections::HashMap;
use std::hash::Hasher;
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex};

use memtrace_util::phantom_variables::READS_VARIABLE;
use rustc_hash::FxHasher;

use crate::core::lock::lock;

/// An input of at least this many bytes from the host means that the program makes progress.
const PROGRESS_INPUT: usize = 1 << 10;
/// After each multiple of this number of false flags that were invented since the last large input, one flag
/// reads true. A loop that waits for "finished" then ends as it would at its length limit.
const MAX_IDLE_FLAGS: u64 = 4096;
/// After this many small reads (at most 8 bytes) of invented values since the last large input, reads fail.
const MAX_IDLE_READS: u64 = 100_000;

/// The second bound when [`READS_VARIABLE`] is not set.
const DEFAULT_READS: u64 = 20_000;
/// A loop is named at this fraction of the second bound.
const NAMED_AT: u64 = 10;
/// The maximum number of different reads that are counted. A program that loops repeats only a few reads.
const MAX_READ_KEYS: usize = 4096;
/// The number of recent inputs that are remembered.
const RECENT_INPUTS: usize = 4096;

/// The number of small reads of invented values since the last large input ([`PROGRESS_INPUT`]).
/// [`IDLE_FLAGS`] counts the reads of a single byte whose answer was zero.
static IDLE_READS: AtomicU64 = AtomicU64::new(0);
static IDLE_FLAGS: AtomicU64 = AtomicU64::new(0);
/// The key of identical reads: the address, the size and the number that was read.
type ReadKey = (usize, usize, u64);
/// How often each read occurred since the last new input.
static READ_COUNTS: LazyLock<Mutex<HashMap<ReadKey, u64>>> = LazyLock::new(Mutex::default);
/// The hashes of recent inputs. Each is at the index that the hash selects.
static INPUTS: [AtomicU64; RECENT_INPUTS] = [const { AtomicU64::new(0) }; RECENT_INPUTS];

/// Parses the value of [`READS_VARIABLE`], where 0 means no bound. Returns `None` if it is invalid.
pub(crate) fn parse_reads(text: &str) -> Option<u64> {
    match text.trim() {
        "" => Some(DEFAULT_READS),
        text => text.parse().ok(),
    }
}

/// Returns the second bound that the environment requests, or `None` if it is invalid.
pub(crate) fn requested_reads() -> Option<u64> {
    parse_reads(&std::env::var(READS_VARIABLE).unwrap_or_default())
}

/// Returns the second bound. Reads the environment at the first call. 0 means no bound.
fn most_reads() -> u64 {
    static READS: LazyLock<u64> = LazyLock::new(|| requested_reads().unwrap_or(DEFAULT_READS));
    *READS
}

/// The verdict about a read of an invented value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Continue,
    /// The value is a flag that reads true now.
    Flag,
    /// The program loops and must be stopped.
    Stop,
}

/// Counts a read of an invented value: `size` bytes at `address`, which the host reads as the number
/// `answer`.
pub(crate) fn read(address: usize, size: usize, answer: u64) -> Verdict {
    if is_repeated(address, size, answer) {
        return Verdict::Stop;
    }
    if size > 8 {
        return Verdict::Continue;
    }
    if IDLE_READS.fetch_add(1, Ordering::Relaxed) + 1 >= MAX_IDLE_READS {
        return Verdict::Stop;
    }
    let is_idle_flag = size == 1 && answer == 0;
    if is_idle_flag && (IDLE_FLAGS.fetch_add(1, Ordering::Relaxed) + 1).is_multiple_of(MAX_IDLE_FLAGS) {
        return Verdict::Flag;
    }
    Verdict::Continue
}

/// Counts a read, and returns true if identical reads have reached the second bound.
fn is_repeated(address: usize, size: usize, answer: u64) -> bool {
    let most = most_reads();
    if most == 0 {
        return false;
    }
    let mut counts = lock(&READ_COUNTS);
    if counts.len() >= MAX_READ_KEYS {
        counts.clear();
    }
    let count = counts.entry((address, size, answer)).or_default();
    *count += 1;
    let count = *count;
    drop(counts);
    if count == most.div_ceil(NAMED_AT) {
        name_loop(size, count, most);
    }
    count >= most
}

/// Prints once that the program may wait for a value that never comes.
fn name_loop(size: usize, count: u64, most: u64) {
    static PRINTED: AtomicBool = AtomicBool::new(false);
    if !PRINTED.swap(true, Ordering::Relaxed) {
        let _ = writeln!(
            std::io::stderr(),
            "memtrace: the program has read the same {size} bytes, which no kernel computed, {count} times, and \
             gave the device no new input. If it waits for another value, it will not end by itself: the \
             simulated GPU stops it after {most} such reads ({READS_VARIABLE})."
        );
    }
}

/// Resets both bounds, because a copy from the host that is too large to be examined shows progress.
pub(crate) fn count_large_input() {
    IDLE_READS.store(0, Ordering::Relaxed);
    IDLE_FLAGS.store(0, Ordering::Relaxed);
    lock(&READ_COUNTS).clear();
}

/// Records an input from the host. An input of at least [`PROGRESS_INPUT`] bytes resets the first bound. An
/// input that repeats no recent one resets the second bound.
pub(crate) fn count_input(bytes: &[u8]) {
    if bytes.len() >= PROGRESS_INPUT {
        IDLE_READS.store(0, Ordering::Relaxed);
        IDLE_FLAGS.store(0, Ordering::Relaxed);
    }
    let mut hasher = FxHasher::default();
    hasher.write(bytes);
    // Set the lowest bit, because a stored 0 means that the entry is unused.
    let hash = hasher.finish() | 1;
    let place = &INPUTS[(hash >> 1) as usize % RECENT_INPUTS];
    if place.swap(hash, Ordering::Relaxed) != hash {
        lock(&READ_COUNTS).clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_that_gives_one_answer_again_and_again_stops_unless_the_input_is_new() {
        // The counts are process-wide. No other test reads at this address.
        let repeats = |times: u64| (0..times).any(|_| is_repeated(0xabc0, 16, 3));
        count_input(b"a first input");
        assert!(!repeats(DEFAULT_READS / 2));
        count_input(b"another input");
        assert!(!repeats(DEFAULT_READS - 1));
        let input = vec![7; 16];
        count_input(&input);
        assert!((0..DEFAULT_READS).any(|_| {
            count_input(&input);
            is_repeated(0xabc0, 16, 3)
        }));
        count_large_input();
        assert!(!repeats(DEFAULT_READS - 1));
    }

    #[test]
    fn phantom_reads_is_a_number_and_zero_means_no_bound() {
        assert_eq!(parse_reads(""), Some(DEFAULT_READS));
        assert_eq!(parse_reads(" 0 "), Some(0));
        assert_eq!(parse_reads("500"), Some(500));
        for wrong in ["-1", "many", "1e3", "99999999999999999999"] {
            assert_eq!(parse_reads(wrong), None, "{wrong}");
        }
    }
}
