//! The host's use of a memory that the device shares with the machine ([`memtrace_cards::Unified`]).
//!
//! The simulated machine runs the programs that use its device, and the processes that they started. The
//! kernel's counts of these processes give their host memory. The page cache of the machine that runs the
//! simulation counts as the page cache of the simulated machine. It takes free memory, but no allocation fails
//! because of it.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use memtrace_machine::table::Table;
use memtrace_util::host_memory;

use crate::core::lock::lock;

const PROC: &str = "/proc";
/// The maximum number of descendants that are counted for each program. Programs on such a machine have
/// fewer.
const MAX_PROCESSES: usize = 256;
/// A measurement is reused for `HOLDS` times the time that it took. So measurements take less than 1/20 of a
/// program's time.
const HOLDS: u32 = 20;
/// The kernel keeps one part in `KEPT_FREE` of the memory free of page cache: 3 of 121 GiB on a GB10 full of
/// page cache (<https://github.com/unslothai/unsloth/pull/10705>).
const KEPT_FREE: u64 = 40;

struct Reading {
    bytes: u64,
    at: Instant,
    holds: Duration,
}

/// Returns the bytes that the programs of the machine, which `table` lists, hold on the
/// host, without file pages.
pub(crate) fn host_bytes(table: Option<Table<'_>>) -> u64 {
    static LAST: Mutex<Option<Reading>> = Mutex::new(None);
    let mut last = lock(&LAST);
    if let Some(reading) = last.as_ref().filter(|reading| reading.at.elapsed() < reading.holds) {
        return reading.bytes;
    }
    let start = Instant::now();
    let bytes = read_host_bytes(table);
    *last = Some(Reading { bytes, at: Instant::now(), holds: start.elapsed() * HOLDS });
    bytes
}

fn read_host_bytes(table: Option<Table<'_>>) -> u64 {
    let proc = Path::new(PROC);
    let mut users = vec![std::process::id()];
    if let Some(table) = table {
        users.extend(table.processes(0).into_iter().map(|user| user.process.pid));
    }
    users.sort_unstable();
    users.dedup();
    let mut started: Vec<u32> = users
        .iter()
        .flat_map(|pid| host_memory::descendants(proc, &pid.to_string(), MAX_PROCESSES).unwrap_or_default())
        .filter(|pid| !users.contains(pid))
        .collect();
    started.sort_unstable();
    started.dedup();
    let held = users.iter().filter_map(|pid| host_memory::held(proc, &pid.to_string()));
    let alone = started.iter().filter_map(|pid| host_memory::held_alone(proc, &pid.to_string()));
    held.chain(alone).map(|bytes| bytes.max(0).cast_unsigned()).fold(0, u64::saturating_add)
}

/// The bytes of page cache that the last call of [`free_of`] subtracted.
static LAST_CACHE: AtomicU64 = AtomicU64::new(0);

/// Returns how many of the `left` bytes are free now. The page cache takes the rest, but an allocation can
/// still get these bytes, because the kernel then drops page cache.
pub(crate) fn free_of(left: u64) -> u64 {
    let cache = host_memory::page_cache(Path::new(PROC)).unwrap_or(0).max(0).cast_unsigned();
    let cache = cache.min(left - left / KEPT_FREE);
    LAST_CACHE.store(cache, Ordering::Relaxed);
    left - cache
}

/// Returns the bytes of page cache that the last answer about free memory counted as used.
#[unsafe(no_mangle)]
extern "C" fn memtrace_phantom_page_cache() -> u64 {
    LAST_CACHE.load(Ordering::Relaxed)
}
