//! The timer of NCCL's watchdog, advanced by training steps instead of the wall clock.
//!
//! The watchdog is a thread of PyTorch's `ProcessGroupNCCL`. Every 100 ms it looks which collectives have ended. It
//! then releases their tensors or, as seen with torch 2.11, leaves that to the next collective. A simulated step
//! takes less time than a real one, and another time in every run, so the position of these frees among the
//! allocations changes. With [`STEP_MS_VARIABLE`] a step takes that time on the timer. The watchdog then looks only at
//! the ends of steps, and the program waits until it has looked. Until the first step, the timer is the wall clock.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::io::Write;
use std::mem::MaybeUninit;
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use memtrace_util::phantom_variables::STEP_MS_VARIABLE;

use crate::core::lock::lock;

/// The period of the watchdog, `kWatchdogThreadSleepMillis` in `ProcessGroupNCCL`.
const PERIOD_MS: u64 = 100;
/// How long the program waits for a watchdog that does not look, and a watchdog for a step that does not end.
const PATIENCE: Duration = Duration::from_secs(20);
/// The time between two checks of a held watchdog.
const CHECK: Duration = Duration::from_millis(5);

/// The watchdogs of this process. A round is one look of each of them.
struct Watchdogs {
    /// The time of the steps since the last round, in milliseconds. `None` before the first step.
    elapsed_ms: Option<u64>,
    /// The number of rounds that were requested.
    rounds: u64,
    /// For each watchdog's thread, the last round that it has completed and the last one that it has begun.
    threads: BTreeMap<libc::pid_t, [u64; 2]>,
    /// The process of `threads`. The child of a fork has no watchdog yet.
    pid: libc::pid_t,
}

static WATCHDOGS: Mutex<Watchdogs> =
    Mutex::new(Watchdogs { elapsed_ms: None, rounds: 0, threads: BTreeMap::new(), pid: 0 });
static LOOKED: Condvar = Condvar::new();

/// Parses the value of [`STEP_MS_VARIABLE`]; 0 stands for the wall clock. Returns `None` if it is invalid.
pub(crate) fn parse_step_ms(text: &str) -> Option<u64> {
    match text.trim() {
        "" => Some(0),
        text => text.parse().ok(),
    }
}

/// Returns the step time that the environment requests, or `None` if it is invalid.
pub(crate) fn requested_step_ms() -> Option<u64> {
    parse_step_ms(&std::env::var(STEP_MS_VARIABLE).unwrap_or_default())
}

/// Returns the time of a step in milliseconds, or 0 for the wall clock.
fn step_ms() -> u64 {
    static STEP_MS: OnceLock<u64> = OnceLock::new();
    *STEP_MS.get_or_init(|| requested_step_ms().unwrap_or(0))
}

impl Watchdogs {
    /// Returns the watchdogs of this process.
    fn of_process(&mut self) -> &mut BTreeMap<libc::pid_t, [u64; 2]> {
        // SAFETY: it has no preconditions.
        let pid = unsafe { libc::getpid() };
        if std::mem::replace(&mut self.pid, pid) != pid {
            self.threads.clear();
        }
        &mut self.threads
    }

    /// Advances the timer by a step. Returns true if the watchdogs must look now.
    fn step_begins(&mut self, step_ms: u64) -> bool {
        let elapsed = self.elapsed_ms.map_or(0, |elapsed| elapsed.saturating_add(step_ms));
        self.elapsed_ms = Some(elapsed % PERIOD_MS);
        let is_due = elapsed >= PERIOD_MS;
        self.rounds += u64::from(is_due);
        is_due
    }
}

/// Advances the timer, because a step of the program begins. Waits until the watchdogs have looked, if they must.
pub(crate) fn step_begins() {
    let step_ms = step_ms();
    if step_ms == 0 {
        return;
    }
    let mut watchdogs = lock(&WATCHDOGS);
    if !watchdogs.step_begins(step_ms) {
        return;
    }
    let round = watchdogs.rounds;
    let is_pending = |all: &mut Watchdogs| all.of_process().values().any(|[completed, _]| *completed < round);
    let (mut watchdogs, waited) =
        LOOKED.wait_timeout_while(watchdogs, PATIENCE, is_pending).unwrap_or_else(PoisonError::into_inner);
    if waited.timed_out() {
        // It may have ended, or it waits for this thread.
        watchdogs.threads.clear();
        let _ = writeln!(
            std::io::stderr(),
            "memtrace: NCCL's watchdog did not look for {} s at the end of a step, so {STEP_MS_VARIABLE} may have no \
             effect",
            PATIENCE.as_secs()
        );
    }
}

/// Returns true if this thread is a watchdog. `ProcessGroupNCCL::ncclCommWatchdog` sets the name.
fn is_watchdog() -> bool {
    let mut name = [0u8; 16];
    // SAFETY: the kernel writes at most 16 bytes.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    name.starts_with(b"pt_nccl_watchd")
}

/// Returns the address of the function that this library's [`pthread_cond_timedwait`] interposes; 0 if there is none.
fn next_timed_wait() -> usize {
    let name = c"pthread_cond_timedwait";
    let version = if cfg!(target_arch = "aarch64") { c"GLIBC_2.17" } else { c"GLIBC_2.3.2" };
    // SAFETY: constant C strings.
    let [next, glibcs] = unsafe {
        [
            libc::dlsym(libc::RTLD_NEXT, name.as_ptr()),
            libc::dlvsym(libc::RTLD_NEXT, name.as_ptr(), version.as_ptr()),
        ]
    };
    let library = |function: *mut c_void| {
        let mut found = MaybeUninit::<libc::Dl_info>::uninit();
        // SAFETY: `dladdr` fills the structure if it does not return 0.
        unsafe { (libc::dladdr(function, found.as_mut_ptr()) != 0).then(|| found.assume_init().dli_fbase) }
    };
    // The next library may be a preloaded one that interposes the function, too. But in glibc before 2.36, `dlsym`
    // finds the oldest version (glibc bug 14932): on x86-64, the one for another `pthread_cond_t`.
    let is_glibcs = !glibcs.is_null() && library(next) == library(glibcs);
    (if is_glibcs { glibcs } else { next }) as usize
}

type TimedWait = unsafe extern "C-unwind" fn(
    *mut libc::pthread_cond_t,
    *mut libc::pthread_mutex_t,
    *const libc::timespec,
) -> c_int;

/// Interposes glibc's function, with which the watchdog sleeps. Every other thread gets glibc's behaviour.
///
/// # Safety
/// Same as for glibc's function.
// SAFETY: only this library defines the name, and the call continues in glibc's function of this type. The ABI
// lets a cancellation unwind through it.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pthread_cond_timedwait(
    condition: *mut libc::pthread_cond_t,
    mutex: *mut libc::pthread_mutex_t,
    until: *const libc::timespec,
) -> c_int {
    static REAL: OnceLock<usize> = OnceLock::new();
    let real = *REAL.get_or_init(next_timed_wait);
    if real == 0 {
        return libc::ENOSYS;
    }
    // SAFETY: glibc's function has this type.
    let real: TimedWait = unsafe { std::mem::transmute(real) };
    if step_ms() == 0 || !is_watchdog() {
        // SAFETY: the caller's promise.
        return unsafe { real(condition, mutex, until) };
    }
    // SAFETY: the caller's promise.
    let deadline = time_of(unsafe { *until });
    // SAFETY: it has no preconditions. glibc has `gettid` since 2.30.
    let thread = unsafe { libc::syscall(libc::SYS_gettid) } as libc::pid_t;
    arrive(thread);
    if deadline <= now() {
        // Not the watchdog's sleep but a lock of Python, which counts by another clock. The program may hold that lock
        // while it waits for the watchdog, so its look counts as completed.
        // SAFETY: the caller's promise.
        return unsafe { real(condition, mutex, until) };
    }
    loop {
        let check = timespec_of(now() + CHECK);
        // SAFETY: the caller's promise; it holds the mutex, also after each wait.
        let status = unsafe { real(condition, mutex, &check) };
        if status != libc::ETIMEDOUT {
            // The group of processes ends, or something else happened that the watchdog must look at.
            lock(&WATCHDOGS).of_process().remove(&thread);
            LOOKED.notify_all();
            return status;
        }
        let now = now();
        // Without a step, it looks at last: PyTorch ends a program whose watchdog is stuck for 480 s, and the capture
        // of a CUDA graph waits until the watchdog has seen all collectives.
        if now >= deadline && (may_look(thread) || now >= deadline + PATIENCE) {
            return libc::ETIMEDOUT;
        }
    }
}

/// Completes the look of a watchdog that waits again. A watchdog that is new has completed all rounds so far.
fn arrive(thread: libc::pid_t) {
    let mut watchdogs = lock(&WATCHDOGS);
    let rounds = watchdogs.rounds;
    let [completed, begun] = watchdogs.of_process().entry(thread).or_insert([rounds; 2]);
    *completed = *begun;
    LOOKED.notify_all();
}

/// Returns true if a round has been requested that this watchdog has not begun, and begins it.
fn may_look(thread: libc::pid_t) -> bool {
    let mut watchdogs = lock(&WATCHDOGS);
    let (rounds, is_started) = (watchdogs.rounds, watchdogs.elapsed_ms.is_some());
    let [_, begun] = watchdogs.of_process().entry(thread).or_insert([rounds; 2]);
    let is_due = *begun < rounds || !is_started;
    *begun = rounds;
    is_due
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn time_of(time: libc::timespec) -> Duration {
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

fn timespec_of(time: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(time.subsec_nanos()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns after which of ten steps of this length the watchdogs look.
    fn looks(step_ms: u64) -> Vec<usize> {
        let mut watchdogs = Watchdogs { elapsed_ms: None, rounds: 0, threads: BTreeMap::new(), pid: 0 };
        assert!(!watchdogs.step_begins(step_ms), "the first step has not ended");
        (1..=10).filter(|_| watchdogs.step_begins(step_ms)).collect()
    }

    #[test]
    fn the_watchdogs_look_after_each_period_of_steps() {
        assert_eq!(looks(250), (1..=10).collect::<Vec<_>>());
        assert_eq!(looks(50), [2, 4, 6, 8, 10]);
        assert_eq!(looks(70), [2, 3, 5, 6, 8, 9, 10]);
    }

    #[test]
    fn step_ms_is_a_number_and_zero_means_the_wall_clock() {
        assert_eq!(["", " 250 ", "0", "x"].map(parse_step_ms), [Some(0), Some(250), Some(0), None]);
    }
}
