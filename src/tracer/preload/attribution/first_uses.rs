//! Records a mark with the Python stack of the process's first use of each device.
//!
//! A process that uses one device has no such mark, unless it is a worker process of `multiprocessing`. In a
//! distributed job, a second device usually belongs to another rank, so the process uses it by mistake. The
//! context on this device takes about 500 MiB, even if the call that created the context allocates nothing.

use std::sync::atomic::{AtomicU64, Ordering};

use memtrace_record::intern::{Context, StackId};
use memtrace_record::recorder::{context_id, text_id};
use memtrace_trace::first_use::FirstUse;
use memtrace_trace::{Api, Payload};

use crate::attribution::{context, python_frames, range_rows};
use crate::runtime::{command_line, session, thread};

/// The devices that the process has used, one bit each.
static USED: AtomicU64 = AtomicU64::new(0);
/// The first device that the process used. The lower half has the device number plus one, and the upper half
/// has the Python stack of the use. 0 before the first use. [`RECORDED`] if each further device gets its mark
/// at its first use: after the first two marks, and always in a worker process.
static FIRST: AtomicU64 = AtomicU64::new(0);
const RECORDED: u64 = u64::MAX;

/// Records that the process uses a device. At the first use of a second device, both devices get their marks.
#[inline]
pub(crate) fn note(device: i8) {
    if is_new(device) {
        first_use(device, bit_of(device));
    }
}

/// Returns true if the process has not used the device before. Returns false for a negative number or one
/// above 63.
#[inline]
pub(crate) fn is_new(device: i8) -> bool {
    let bit = bit_of(device);
    bit != 0 && USED.load(Ordering::Relaxed) & bit == 0
}

/// Returns the bit of a device in [`USED`], or 0 for a negative number or one above 63.
fn bit_of(device: i8) -> u64 {
    u32::try_from(device).ok().and_then(|device| 1_u64.checked_shl(device)).unwrap_or(0)
}

#[cold]
fn first_use(device: i8, bit: u64) {
    if USED.fetch_or(bit, Ordering::Relaxed) & bit != 0 {
        return;
    }
    let stack = python_frames::current(0);
    if command_line::is_worker() {
        FIRST.store(RECORDED, Ordering::Relaxed);
    }
    let packed = u64::from(stack) << 32 | (u64::from(device.unsigned_abs()) + 1);
    let Err(first) = FIRST.compare_exchange(0, packed, Ordering::Relaxed, Ordering::Relaxed) else { return };
    if first != RECORDED && FIRST.swap(RECORDED, Ordering::Relaxed) != RECORDED {
        record((first as u32 - 1) as i32, (first >> 32) as StackId);
    }
    record(i32::from(device), stack);
}

fn record(device: i32, stack: StackId) {
    let Some(recorder) = session::recorder() else { return };
    let base = thread::with(context::base).unwrap_or_default();
    let context = context_id(Context { stack, ..base });
    let name = text_id(&FirstUse { device }.to_string());
    range_rows::record(Api::FirstUse, recorder, || Payload::Mark { name }, context);
}
