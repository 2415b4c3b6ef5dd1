//! The one clock of a trace: `CLOCK_MONOTONIC`, in ns, the same for every process of the host and what Python
//! calls `time.monotonic_ns()`.
//!
//! A read of the system's clock is half of what an event costs. Where the kernel itself keeps time by the
//! processor's time-stamp counter, that counter is read instead, and a straight line turns it into the
//! system's clock. The writer thread draws that line, and a new one when the system's clock is slewed away
//! from it; each begins where the one before it has come to, so time never goes back.

use std::arch::x86_64::{__cpuid, __rdtscp};
use std::sync::atomic::{AtomicPtr, Ordering};

/// Where the system's clock is, by the counter.
struct Line {
    tsc: u64,
    ns: u64,
    /// ns per tick, times 2^32; 0 when the counter is not to be trusted any more: then `ns` is what the system's
    /// clock is behind.
    rate: u64,
}

/// The line that holds; null for the system's clock. A line is never freed (a thread may be in the middle of
/// reading it), and there is a new one at most once a second, of 24 bytes.
static LINE: AtomicPtr<Line> = AtomicPtr::new(std::ptr::null_mut());

/// `CLOCK_MONOTONIC`, in ns, to some 50 ns.
#[inline]
#[must_use]
pub fn now_ns() -> u64 {
    // SAFETY: null, or a line that was leaked whole before it was stored.
    match unsafe { LINE.load(Ordering::Acquire).as_ref() } {
        Some(line) if line.rate != 0 => line.at(ticks()),
        Some(behind) => system_ns() + behind.ns,
        None => system_ns(),
    }
}

/// The system's clock itself, about 24 ns a read.
#[must_use]
pub fn system_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid place for the answer, and this clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// The child of a fork has no writer thread that keeps the line.
pub(crate) fn forget_after_fork() {
    LINE.store(std::ptr::null_mut(), Ordering::Release);
}

impl Line {
    #[inline]
    fn at(&self, tsc: u64) -> u64 {
        // Signed: another core's counter may be some ticks behind the one that the line was drawn by.
        let ticks = i128::from(tsc.wrapping_sub(self.tsc) as i64);
        self.ns.wrapping_add(((ticks * i128::from(self.rate)) >> 32) as u64)
    }
}

/// The counter, read when all that stands before is done: a plain `rdtsc` may come before the lock is
/// taken that orders two events.
#[inline]
fn ticks() -> u64 {
    let mut core = 0;
    // SAFETY: called only once `is_counter_kept` said that this processor has the instruction.
    unsafe { __rdtscp(&raw mut core) }
}

/// One moment by both clocks; `ns` is not before it.
#[derive(Clone, Copy)]
struct Moment {
    tsc: u64,
    ns: u64,
}

impl Moment {
    /// The best of a few tries: whoever is interrupted between the clocks does not know what belongs together.
    fn now() -> Moment {
        let tries = (0..8).map(|_| {
            let (before, tsc, after) = (system_ns(), ticks(), system_ns());
            (after - before, Moment { tsc, ns: after })
        });
        tries.min_by_key(|(width, _)| *width).map_or(Moment { tsc: 0, ns: 0 }, |(_, moment)| moment)
    }
}

/// How far apart two moments are that make a line.
const APART_NS: u64 = 400_000_000;
/// How often a line is held against the system's clock.
const EVERY_NS: u64 = 1_000_000_000;
/// How far a line may be off; some of it is how exactly one moment can be had.
const OFF_NS: i64 = 1_000;
/// A new line meets the system's clock again after this time.
const MEET_NS: i64 = 8_000_000_000;
/// The kernel slews its clock by 500 ppm at most. What is further off has jumped (a machine that slept).
const JUMP_NS: i64 = 2_000_000;

/// Draws the lines; the writer thread has the only one of a process.
pub(crate) struct Ruler {
    last: Option<Moment>,
}

impl Ruler {
    pub(crate) fn new() -> Ruler {
        Ruler { last: is_counter_kept().then(Moment::now) }
    }

    /// To be called again and again: takes a moment when it is time to.
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
        let now = Moment::now();
        self.last = Some(now);
        if let Some(next) = drawn(line, last, now) {
            LINE.store(Box::into_raw(Box::new(next)), Ordering::Release);
        }
    }
}

/// The line from `now` on, when there has to be a new one.
fn drawn(line: Option<&Line>, last: Moment, now: Moment) -> Option<Line> {
    let (ticks, ns) = (now.tsc.wrapping_sub(last.tsc), now.ns - last.ns);
    let rate = u64::try_from((u128::from(ns) << 32).checked_div(u128::from(ticks))?).ok()?;
    let Some(line) = line else { return Some(Line { tsc: now.tsc, ns: now.ns, rate }) };
    let ns = line.at(now.tsc);
    let ahead = ns.wrapping_sub(now.ns) as i64;
    if ahead.abs() > JUMP_NS {
        // Behind the system's clock it can go on at once; ahead of it, it has to stay so.
        return Some(Line { tsc: 0, ns: u64::try_from(ahead).unwrap_or(0), rate: 0 });
    }
    if ahead.abs() <= OFF_NS {
        return None;
    }
    let to_meet = i128::from(rate) * i128::from(MEET_NS - ahead) / i128::from(MEET_NS);
    Some(Line { tsc: now.tsc, ns, rate: u64::try_from(to_meet).ok().filter(|rate| *rate != 0)? })
}

/// Does the kernel keep time by a counter that programs can read? It looked whether the counter runs at
/// one rate, never stops, and is the same on every core.
fn is_counter_kept() -> bool {
    const SOURCE: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    const EXTENDED: u32 = 0x8000_0001;
    const RDTSCP: u32 = 1 << 27;
    let mut readable: libc::c_int = 0;
    // SAFETY: writes an int, and there is a place for it.
    let asked = unsafe { libc::prctl(libc::PR_GET_TSC, &raw mut readable) };
    #[allow(
        unused_unsafe,
        reason = "`__cpuid` is unsafe up to Rust 1.93, and the minimum version is below that"
    )]
    // SAFETY: every x86-64 processor has the CPUID instruction.
    let extended = unsafe { __cpuid(EXTENDED) };
    std::fs::read_to_string(SOURCE).is_ok_and(|source| source.trim() == "tsc")
        && asked == 0
        && readable == libc::PR_TSC_ENABLE
        && extended.edx & RDTSCP != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moment(ns: u64, rate: f64) -> Moment {
        Moment { tsc: (ns as f64 * rate) as u64, ns }
    }

    #[test]
    fn the_first_line_goes_through_both_moments() {
        let (last, now) = (moment(1_000_000_000, 2.5), moment(1_400_000_000, 2.5));
        let line = drawn(None, last, now).unwrap();
        assert!(line.at(last.tsc).abs_diff(last.ns) <= 1);
        assert_eq!(line.at(now.tsc), now.ns);
        assert!(line.at(now.tsc + 2_500_000).abs_diff(now.ns + 1_000_000) <= 1);
    }

    #[test]
    fn a_line_that_is_off_goes_on_without_a_step_and_meets_the_clock() {
        // Drawn for 2.5 ticks a ns; really there are 2.4999, as after a slew.
        let line = Line { tsc: 0, ns: 0, rate: (1u64 << 32) * 2 / 5 };
        let (last, now) = (moment(9_000_000_000, 2.4999), moment(10_000_000_000, 2.4999));
        let next = drawn(Some(&line), last, now).unwrap();
        assert_eq!(next.at(now.tsc), line.at(now.tsc));
        let later = moment(18_000_000_000, 2.4999);
        assert!(next.at(later.tsc).abs_diff(later.ns) < 1000, "{}", next.at(later.tsc));
        assert!(drawn(Some(&next), now, later).is_none());
    }

    #[test]
    fn a_clock_that_jumped_ends_the_use_of_the_counter_and_time_does_not_go_back() {
        let line = Line { tsc: 0, ns: 0, rate: 1 << 32 };
        let (last, now) = (moment(1_000_000_000, 1.0), Moment { tsc: 5_000_000_000, ns: 2_000_000_000 });
        let next = drawn(Some(&line), last, now).unwrap();
        assert_eq!((next.rate, next.ns), (0, 3_000_000_000));
    }

    #[test]
    fn the_counter_keeps_to_the_system_clock() {
        let mut ruler = Ruler::new();
        if ruler.last.is_none() {
            eprintln!("skipped: the kernel does not keep time by the counter here");
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(450));
        ruler.adjust();
        for _ in 0..1000 {
            let (before, own, after) = (system_ns(), now_ns(), system_ns());
            assert!(own + 2_000 > before && own < after + 2_000, "{before} {own} {after}");
        }
    }
}
