//! Detail by schedule (`MEMTRACE_DETAIL`): selects the steps in which ops, modules, tags and stacks are
//! recorded.
//!
//! Outside a detailed step, torch's callbacks for ops and backward functions are disabled, and module calls
//! bypass the tracer. The only known owner of memory is then its phase. Detail is switched when a step
//! begins.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};

use memtrace_record::Recorder;
use memtrace_record::recorder::STEP;
use memtrace_trace::detail::{Detail, DetailMark, Reason};
use memtrace_trace::journal::{DetailAnswer, DetailRequest};
use memtrace_trace::{Api, Event, Header, Payload};

use crate::attribution::growth;
use crate::runtime::fixed_text::FixedText;
use crate::runtime::fork::ForkSafe;
use crate::runtime::state_version;

/// A peak triggers detail if it exceeds the last peak that had detail by more than 1/`GROWTH` of that peak
/// (5%). Memory that grows without end therefore triggers detail less and less often.
const GROWTH: u64 = 20;
/// The number of OOMs at the beginning of a run that each trigger detail. After these, only an OOM whose
/// number is a power of two triggers detail.
const FIRST_OOMS: u32 = 8;
/// The maximum number of devices whose peaks are watched.
const DEVICES: usize = 64;

/// The schedule from `MEMTRACE_DETAIL`; unset until memtrace's library has loaded.
static SCHEDULE: OnceLock<Detail> = OnceLock::new();
/// True while detail is on: ops, modules, tags and stacks are recorded.
static IS_ON: AtomicBool = AtomicBool::new(true);
/// The function that enables and disables torch's callbacks; set when the callbacks are installed.
static SWITCH: OnceLock<fn(bool)> = OnceLock::new();
/// The number of further steps for which detail was requested.
static ASKED: AtomicU32 = AtomicU32::new(0);
/// The reasons, as bits, why the next step is detailed.
static WANTED: AtomicU8 = AtomicU8::new(0);
const BY_PEAK: u8 = 1;
const BY_OOM: u8 = 2;
/// For each device, the highest peak that triggered detail or that occurred in a detailed step.
static PEAKS: [AtomicU64; DEVICES] = [const { AtomicU64::new(0) }; DEVICES];
static OOMS: AtomicU32 = AtomicU32::new(0);
/// Held while detail is switched on or off.
static CHANGING: ForkSafe<()> = ForkSafe::new(());

/// Sets the schedule. Called once, at load.
pub(crate) fn set_schedule(schedule: &Detail) {
    IS_ON.store(schedule.includes(-1), Ordering::Relaxed);
    let _ = SCHEDULE.set(schedule.clone());
}

/// Sets the function that enables and disables torch's callbacks. Called when the callbacks have just been
/// installed, which enables them. Disables them at once if detail is off.
pub(crate) fn set_switch(switch: fn(bool)) {
    CHANGING.with(|()| {
        let _ = SWITCH.set(switch);
        if !is_on() {
            switch(false);
        }
    });
}

/// Returns true while ops, modules, tags and stacks are recorded.
#[inline]
pub(crate) fn is_on() -> bool {
    IS_ON.load(Ordering::Relaxed)
}

/// Returns true if ops are recorded in detailed steps.
pub(crate) fn has_ops() -> bool {
    SWITCH.get().is_some()
}

/// Requests detail for the next `steps` steps. Of several requests, the largest number counts.
pub(crate) fn ask(steps: u32) {
    ASKED.fetch_max(steps, Ordering::Relaxed);
}

/// Switches detail on or off for the step that begins, by the schedule and by requests. Also answers a
/// pending request of a command.
pub(crate) fn step_begins(step: i32) {
    let Some(schedule) = SCHEDULE.get() else { return };
    let answer = DetailAnswer { step, is_full: *schedule == Detail::Full };
    if let Some(steps) = Recorder::active().and_then(|recorder| recorder.take_detail_request(answer)) {
        if steps == DetailRequest::SEARCH {
            growth::search_asked();
        } else {
            ask(steps);
        }
    }
    if *schedule == Detail::Full {
        ASKED.store(0, Ordering::Relaxed);
        return;
    }
    let wanted = WANTED.swap(0, Ordering::Relaxed);
    let asked = ASKED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok();
    let reason = if schedule.includes(step) {
        Some(Reason::Scheduled)
    } else if asked {
        Some(Reason::Asked)
    } else if wanted & BY_OOM != 0 {
        Some(Reason::OutOfMemory)
    } else if wanted & BY_PEAK != 0 {
        Some(Reason::Peak)
    } else {
        None
    };
    change(reason);
}

/// Handles the call of a model outside the detailed steps. If an OOM has requested detail, detail starts at
/// once instead of at the next step, because the program may be retrying.
pub(crate) fn forward_begins() {
    if WANTED.load(Ordering::Relaxed) & BY_OOM != 0 {
        change(Some(Reason::OutOfMemory));
    }
}

/// Switches detail on if there is a reason, otherwise off. A mark is recorded for each detailed step, and
/// when detail is switched off.
fn change(reason: Option<Reason>) {
    let on = reason.is_some();
    let is_new = CHANGING.with(|()| {
        let is_new = IS_ON.swap(on, Ordering::Relaxed) != on;
        if is_new && let Some(switch) = SWITCH.get() {
            switch(on);
        }
        is_new
    });
    if is_new {
        state_version::advance();
    }
    if is_new || on {
        mark(reason.map_or(DetailMark::Off, DetailMark::On));
    }
}

fn mark(mark: DetailMark) {
    static TEXTS: [FixedText; DetailMark::ALL.len()] = {
        let all = DetailMark::ALL;
        [
            FixedText::new(all[0].as_str()),
            FixedText::new(all[1].as_str()),
            FixedText::new(all[2].as_str()),
            FixedText::new(all[3].as_str()),
            FixedText::new(all[4].as_str()),
        ]
    };
    let Some(recorder) = Recorder::active() else { return };
    if let Some(place) = DetailMark::ALL.iter().position(|known| *known == mark) {
        let name = TEXTS[place].id();
        let step = STEP.load(Ordering::Relaxed);
        recorder.record(|clock_ns| {
            let header = Header { clock_ns, api: Some(Api::Detail), device: Event::HOST, context: 0, step };
            Payload::Mark { name }.pack(header)
        });
    }
}

/// Updates the peak of a device from its allocated bytes after an allocation. Outside the detailed steps, a
/// sufficiently high new peak (see [`GROWTH`]) requests detail for the next step, if the schedule follows
/// peaks.
#[inline]
pub(crate) fn allocated(device: i8, bytes: u64) {
    if let Some(peak) = usize::try_from(device).ok().and_then(|device| PEAKS.get(device))
        && bytes > peak.load(Ordering::Relaxed)
    {
        new_peak(peak, bytes);
    }
}

#[cold]
fn new_peak(peak: &AtomicU64, bytes: u64) {
    if is_on() {
        peak.fetch_max(bytes, Ordering::Relaxed);
    } else if SCHEDULE.get().is_some_and(Detail::follows_peaks) {
        let before = peak.load(Ordering::Relaxed);
        if bytes > before.saturating_add(before / GROWTH) {
            peak.fetch_max(bytes, Ordering::Relaxed);
            WANTED.fetch_or(BY_PEAK, Ordering::Relaxed);
        }
    }
}

/// Counts a request that failed for lack of memory outside the detailed steps. Requests detail for the next
/// step if the schedule follows peaks and this OOM qualifies (see [`FIRST_OOMS`]).
pub(crate) fn out_of_memory() {
    if is_on() || !SCHEDULE.get().is_some_and(Detail::follows_peaks) {
        return;
    }
    let number = OOMS.fetch_add(1, Ordering::Relaxed) + 1;
    if number <= FIRST_OOMS || number.is_power_of_two() {
        WANTED.fetch_or(BY_OOM, Ordering::Relaxed);
    }
}
