//! Signals on their way to the traced program, and its end as our own.
//!
//! The program shares our process group, so what the terminal sends (Ctrl-C) reaches it without us:
//! such a signal is only kept from ending us first. What somebody sends to our process id alone is
//! passed on. A signal that we were started to ignore (`nohup`) stays ignored on both sides.

use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::signal as sig;
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::Cause;

/// What is passed on: what would end us, and what people send a program to have it do something.
const PASSED_ON: &[i32] =
    &[sig::SIGINT, sig::SIGTERM, sig::SIGHUP, sig::SIGQUIT, sig::SIGUSR1, sig::SIGUSR2, sig::SIGALRM];

/// Those of them by which somebody asks a program to end.
const ENDS: &[i32] = &[sig::SIGINT, sig::SIGTERM, sig::SIGHUP, sig::SIGQUIT];

/// Passes signals on from when it is made.
pub(crate) struct Passing {
    child: Arc<AtomicI32>,
    asked_to_end: Arc<AtomicBool>,
    handle: signal_hook::iterator::Handle,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Passing {
    /// Starts to catch signals; they wait for [`Passing::to`].
    pub(crate) fn start() -> Result<Passing> {
        let ignored = ignored_signals();
        let wanted = PASSED_ON.iter().copied().filter(|signal| ignored >> (signal - 1) & 1 == 0);
        let mut signals = SignalsInfo::<WithOrigin>::new(wanted).context("cannot catch signals")?;
        let handle = signals.handle();
        let child = Arc::new(AtomicI32::new(0));
        let target = Arc::clone(&child);
        let asked_to_end = Arc::new(AtomicBool::new(false));
        let asked = Arc::clone(&asked_to_end);
        let thread = std::thread::spawn(move || {
            for origin in signals.forever() {
                if ENDS.contains(&origin.signal) {
                    asked.store(true, Ordering::Release);
                }
                // The terminal's signals come from the kernel and went to the whole group.
                if matches!(origin.cause, Cause::Kernel) {
                    continue;
                }
                // The child is on its way: a signal must not be lost before it is there.
                while target.load(Ordering::Acquire) == 0 {
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
                let pid = Pid::from_raw(target.load(Ordering::Acquire));
                if let (Some(pid), Some(signal)) = (pid, Signal::from_named_raw(origin.signal)) {
                    // It may have just ended, which is no error.
                    kill_process(pid, signal).ok();
                }
            }
        });
        Ok(Passing { child, asked_to_end, handle, thread: Some(thread) })
    }

    /// From now on they go to the process `pid`.
    pub(crate) fn to(&self, pid: u32) {
        self.child.store(pid.cast_signed(), Ordering::Release);
    }

    /// The child has ended: its process id may soon be another's. True when somebody asked us to end.
    pub(crate) fn stop(mut self) -> bool {
        // Minus one is no process: see `Pid::from_raw`.
        self.child.store(-1, Ordering::Release);
        self.handle.close();
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
        self.asked_to_end.load(Ordering::Acquire)
    }
}

/// The signals that this process was started to ignore, as a mask; bit 0 is signal 1.
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// Ends this process as the traced program ended: with its status, or by its signal.
pub(crate) fn end_like(status: ExitStatus) -> std::process::ExitCode {
    use std::os::unix::process::ExitStatusExt;
    if let Some(signal) = status.signal() {
        // The program's own core is enough.
        let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
        rustix::process::setrlimit(rustix::process::Resource::Core, none).ok();
        signal_hook::low_level::emulate_default_handler(signal).ok();
        return std::process::ExitCode::from(128_u8.wrapping_add(signal as u8));
    }
    std::process::ExitCode::from(status.code().unwrap_or(1) as u8)
}
