//! The clock of a trace: `CLOCK_MONOTONIC` in ns. This clock is the same for every process of the host and
//! for Python's `time.monotonic_ns()`.
//!
//! Reading the system's clock takes half the time of recording an event. So if the kernel keeps time by the
//! processor's counter (x86-64: the time-stamp counter; aarch64: the virtual count of the generic timer), the
//! recorder reads that counter instead. A linear function (a *line*)
//! converts the counter's value to the system's clock. The writer thread fits the line, and fits a new line
//! when the system's clock is slewed away from the current line. A new line never starts at a time before the
//! current line's time, so time never goes back.

use std::sync::atomic::{AtomicPtr, Ordering};

/// A linear function from the time-stamp counter (`tsc`) to the system's clock (`ns`).
struct ClockLine {
    tsc: u64,
    ns: u64,
    /// ns per tick, times 2^32. If it is 0, the counter is no longer reliable, and `ns` is the amount that is
    /// added to the system's clock.
    rate: u64,
}

/// The current line; null while the system's clock is used directly. A line is never freed, because a thread
/// may be reading it. There is at most one new line per second, and a line has 24 bytes.
static LINE: AtomicPtr<ClockLine> = AtomicPtr::new(std::ptr::null_mut());

/// Returns `CLOCK_MONOTONIC` in ns. The error is usually below 1 us.
#[inline]
#[must_use]
pub fn now_ns() -> u64 {
    // SAFETY: the pointer is null or points to a line that was leaked after it was complete.
    match unsafe { LINE.load(Ordering::Acquire).as_ref() } {
        Some(line) if line.rate != 0 => line.at(ticks()),
        Some(behind) => system_ns() + behind.ns,
        None => system_ns(),
    }
}

/// Returns the time of the system's clock in ns. A read takes about 24 ns.
#[must_use]
pub fn system_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for the answer, and every Linux has this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Returns to the system's clock, in the child of a fork, where no writer thread maintains the line.
pub(crate) fn forget_after_fork() {
    LINE.store(std::ptr::null_mut(), Ordering::Release);
}

impl ClockLine {
    #[inline]
    fn at(&self, tsc: u64) -> u64 {
        // The difference is signed, because the counter of another core may be some ticks behind.
        let ticks = i128::from(tsc.wrapping_sub(self.tsc) as i64);
        self.ns.wrapping_add(((ticks * i128::from(self.rate)) >> 32) as u64)
    }
}

/// Reads the counter after all earlier instructions. A plain read could be executed early, before the thread
/// takes the lock that orders two events.
#[cfg(target_arch = "x86_64")]
#[inline]
fn ticks() -> u64 {
    let mut core = 0;
    // SAFETY: called only after `is_counter_kept` found that this processor has the instruction.
    unsafe { std::arch::x86_64::__rdtscp(&raw mut core) }
}

/// As above. The barrier waits for all earlier instructions.
#[cfg(target_arch = "aarch64")]
#[inline]
fn ticks() -> u64 {
    let ticks;
    // SAFETY: every aarch64 processor has the counter, and Linux lets programs read it.
    unsafe {
        std::arch::asm!("isb", "mrs {}, cntvct_el0", out(reg) ticks, options(nostack, preserves_flags))
    };
    ticks
}

/// A reading of both clocks: first the counter, then `ns`.
#[derive(Clone, Copy)]
struct ClockReading {
    tsc: u64,
    ns: u64,
}

impl ClockReading {
    /// Takes eight readings and returns the most accurate one, which has the least time between the two reads
    /// of the system's clock. An interrupt between these reads makes a reading useless.
    fn now() -> ClockReading {
        let tries = (0..8).map(|_| {
            let (before, tsc, after) = (system_ns(), ticks(), system_ns());
            (after - before, ClockReading { tsc, ns: after })
        });
        tries.min_by_key(|(width, _)| *width).map_or(ClockReading { tsc: 0, ns: 0 }, |(_, reading)| reading)
    }
}

/// The time in ns that must pass between the two readings from which the first line is fitted.
const APART_NS: u64 = 400_000_000;
/// The time in ns between two comparisons of a line with the system's clock.
const EVERY_NS: u64 = 1_000_000_000;
/// The error of a line, in ns, up to which the line is kept. It includes the error of one reading.
const OFF_NS: i64 = 1_000;
/// The time in ns after which a new line meets the system's clock. The line cannot jump to the clock's time,
/// so its rate differs until then.
const MEET_NS: i64 = 8_000_000_000;
/// An error of more ns than this means that the system's clock jumped, for example after a suspend. The
/// kernel slews its clock by at most 500 ppm, which is 0.5 ms between two comparisons.
const JUMP_NS: i64 = 2_000_000;

/// Fits the lines. Only the writer thread of a process has a fitter.
pub(crate) struct ClockFitter {
    last: Option<ClockReading>,
}

impl ClockFitter {
    pub(crate) fn new() -> ClockFitter {
        ClockFitter { last: is_counter_kept().then(ClockReading::now) }
    }

    /// Takes a reading if one is due, and replaces the line if necessary. Must be called regularly.
    pub(crate) fn adjust(&mut self) {
        let Some(last) = self.last else { return };
        // SAFETY: as in `now_ns`.
        let line = unsafe { LINE.load(Ordering::Acquire).as_ref() };
        if line.is_some_and(|line| line.rate == 0) {
            return;
        }
        let wait = if line.is_some() { EVERY_NS } else { APART_NS };
        if system_ns() - last.ns < wait {
            return;
        }
        let now = ClockReading::now();
        self.last = Some(now);
        if let Some(next) = next_line(line, last, now) {
            LINE.store(Box::into_raw(Box::new(next)), Ordering::Release);
        }
    }
}

/// Returns the line that applies after `now`, or `None` if the current line is still accurate enough.
fn next_line(line: Option<&ClockLine>, last: ClockReading, now: ClockReading) -> Option<ClockLine> {
    let (ticks, ns) = (now.tsc.wrapping_sub(last.tsc), now.ns - last.ns);
    let rate = u64::try_from((u128::from(ns) << 32).checked_div(u128::from(ticks))?).ok()?;
    let Some(line) = line else { return Some(ClockLine { tsc: now.tsc, ns: now.ns, rate }) };
    let ns = line.at(now.tsc);
    let ahead = ns.wrapping_sub(now.ns) as i64;
    if ahead.abs() > JUMP_NS {
        // If the recorder's clock is behind the system's clock, it jumps forward at once. If the recorder's
        // clock is ahead, it has to stay ahead, because time must not go back.
        return Some(ClockLine { tsc: 0, ns: u64::try_from(ahead).unwrap_or(0), rate: 0 });
    }
    if ahead.abs() <= OFF_NS {
        return None;
    }
    let to_meet = i128::from(rate) * i128::from(MEET_NS - ahead) / i128::from(MEET_NS);
    Some(ClockLine { tsc: now.tsc, ns, rate: u64::try_from(to_meet).ok().filter(|rate| *rate != 0)? })
}

/// Returns true if the kernel keeps time by the counter, and programs can read it. The kernel checks that the
/// counter has a constant rate, never stops, and is the same on every core.
fn is_counter_kept() -> bool {
    const SOURCE: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    let name = if cfg!(target_arch = "x86_64") { "tsc" } else { "arch_sys_counter" };
    !cfg!(miri)
        && std::fs::read_to_string(SOURCE).is_ok_and(|source| source.trim() == name)
        && is_counter_readable()
}

/// Returns true if programs can read the counter.
#[cfg(target_arch = "aarch64")]
fn is_counter_readable() -> bool {
    true
}

/// Returns true if this process may read the counter, and the processor has the instruction.
#[cfg(target_arch = "x86_64")]
fn is_counter_readable() -> bool {
    const EXTENDED: u32 = 0x8000_0001;
    const RDTSCP: u32 = 1 << 27;
    let mut readable: libc::c_int = 0;
    // SAFETY: `readable` is valid for the int that the call writes.
    let asked = unsafe { libc::prctl(libc::PR_GET_TSC, &raw mut readable) };
    #[allow(
        unused_unsafe,
        reason = "`__cpuid` is unsafe up to Rust 1.93, and the minimum version is below that"
    )]
    // SAFETY: every x86-64 processor has the CPUID instruction.
    let extended = unsafe { std::arch::x86_64::__cpuid(EXTENDED) };
    asked == 0 && readable == libc::PR_TSC_ENABLE && extended.edx & RDTSCP != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(ns: u64, rate: f64) -> ClockReading {
        ClockReading { tsc: (ns as f64 * rate) as u64, ns }
    }

    #[test]
    fn the_first_clock_line_goes_through_both_readings() {
        let (last, now) = (reading(1_000_000_000, 2.5), reading(1_400_000_000, 2.5));
        let line = next_line(None, last, now).unwrap();
        assert!(line.at(last.tsc).abs_diff(last.ns) <= 1);
        assert_eq!(line.at(now.tsc), now.ns);
        assert!(line.at(now.tsc + 2_500_000).abs_diff(now.ns + 1_000_000) <= 1);
    }

    #[test]
    fn a_clock_line_with_an_error_continues_without_a_step_and_converges() {
        // Setup: the line was fitted for 2.5 ticks per ns, but the counter runs at 2.4999, as after a slew ->
        // the next line begins where this one ends, and has an error below 1 us eight seconds later.
        let line = ClockLine { tsc: 0, ns: 0, rate: (1u64 << 32) * 2 / 5 };
        let (last, now) = (reading(9_000_000_000, 2.4999), reading(10_000_000_000, 2.4999));
        let next = next_line(Some(&line), last, now).unwrap();
        assert_eq!(next.at(now.tsc), line.at(now.tsc));
        let later = reading(18_000_000_000, 2.4999);
        assert!(next.at(later.tsc).abs_diff(later.ns) < 1000, "{}", next.at(later.tsc));
        assert!(next_line(Some(&next), now, later).is_none());
    }

    #[test]
    fn after_a_clock_jump_the_counter_is_not_used_and_time_does_not_go_back() {
        let line = ClockLine { tsc: 0, ns: 0, rate: 1 << 32 };
        let (last, now) =
            (reading(1_000_000_000, 1.0), ClockReading { tsc: 5_000_000_000, ns: 2_000_000_000 });
        let next = next_line(Some(&line), last, now).unwrap();
        assert_eq!((next.rate, next.ns), (0, 3_000_000_000));
    }

    #[test]
    fn the_counter_agrees_with_the_system_clock() {
        let mut fitter = ClockFitter::new();
        if fitter.last.is_none() {
            eprintln!("skipped: the kernel does not keep time by the counter here");
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(450));
        fitter.adjust();
        for _ in 0..1000 {
            let (before, own, after) = (system_ns(), now_ns(), system_ns());
            assert!(own + 2_000 > before && own < after + 2_000, "{before} {own} {after}");
        }
    }
}
