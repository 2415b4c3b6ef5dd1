//! Forwards signals to the traced program, and ends this process in the same way as the program ended.
//!
//! The program shares our process group, so a signal from the terminal (Ctrl-C) reaches the program directly.
//! We catch such a signal only so that this process does not end first. A signal sent only to our process id
//! is forwarded. A signal that we inherited as ignored (`nohup`) stays ignored in both processes, except SIGCHLD:
//! see [`keep_status_of_children`].

use std::process::ExitStatus;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::signal as sig;
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::Cause;

use crate::recovery;

/// The forwarded signals: signals that would end us, and signals that programs commonly handle.
const FORWARDED: &[i32] =
    &[sig::SIGINT, sig::SIGTERM, sig::SIGHUP, sig::SIGQUIT, sig::SIGUSR1, sig::SIGUSR2, sig::SIGALRM];

/// The forwarded signals that ask a program to end.
const TERMINATING: &[i32] = &[sig::SIGINT, sig::SIGTERM, sig::SIGHUP, sig::SIGQUIT];

/// Catches signals and forwards them to one child at a time, or to several that run together.
pub(crate) struct Forwarder {
    /// The process id of the child; 0 while the child is being started, -1 if there is no child.
    child: Arc<AtomicI32>,
    /// The process ids of the children that run at the same time as `child`.
    others: Arc<Mutex<Vec<u32>>>,
    /// The last signal that asked us to end; 0 if there was no such signal.
    asked_to_end: Arc<AtomicI32>,
    handle: signal_hook::iterator::Handle,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Forwarder {
    /// Starts to catch signals. A signal is held back until [`Forwarder::set_child`] or
    /// [`Forwarder::no_child`] is called.
    ///
    /// # Errors
    /// When the handlers cannot be installed.
    pub(crate) fn start() -> Result<Forwarder> {
        let ignored = ignored_signals();
        let wanted = FORWARDED.iter().copied().filter(|signal| !contains(ignored, *signal));
        let mut signals = SignalsInfo::<WithOrigin>::new(wanted).context("cannot catch signals")?;
        let handle = signals.handle();
        let child = Arc::new(AtomicI32::new(0));
        let target = Arc::clone(&child);
        let others = Arc::new(Mutex::new(Vec::new()));
        let more_targets: Arc<Mutex<Vec<u32>>> = Arc::clone(&others);
        let asked_to_end = Arc::new(AtomicI32::new(0));
        let asked = Arc::clone(&asked_to_end);
        let watcher = std::thread::Builder::new().name("signals".to_owned());
        let spawned = watcher.spawn(move || {
            for origin in signals.forever() {
                if TERMINATING.contains(&origin.signal) {
                    asked.store(origin.signal, Ordering::Release);
                }
                // A signal from the terminal comes from the kernel, which sends it to the whole process
                // group: the program gets it, too.
                if matches!(origin.cause, Cause::Kernel) {
                    continue;
                }
                // Hold the signal back until the child's process id is known.
                while target.load(Ordering::Acquire) == 0 {
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
                let Some(signal) = Signal::from_named_raw(origin.signal) else { continue };
                // Keep the list locked while the signal is sent. Then `reap_children` cannot reap a child, so
                // no other process can get its id.
                let others = more_targets.lock().unwrap_or_else(PoisonError::into_inner);
                let first = target.load(Ordering::Acquire);
                let pids = others.iter().map(|pid| pid.cast_signed()).chain([first]);
                for pid in pids.filter_map(one_process) {
                    // An error means that the child has just ended.
                    kill_process(pid, signal).ok();
                }
            }
        });
        let thread = spawned.context("cannot start a thread; ulimit -u limits them")?;
        Ok(Forwarder { child, others, asked_to_end, handle, thread: Some(thread) })
    }

    /// Forwards to the process `pid` from now on.
    pub(crate) fn set_child(&self, pid: u32) {
        self.child.store(pid.cast_signed(), Ordering::Release);
    }

    /// Also forwards to this process, in addition to the process of [`Forwarder::set_child`].
    pub(crate) fn add_child(&self, pid: u32) {
        self.others.lock().unwrap_or_else(PoisonError::into_inner).push(pid);
    }

    /// Calls `reap`, which waits for children of [`Forwarder::add_child`] and returns the ids of those that
    /// have ended. Signals are no longer forwarded to those children.
    pub(crate) fn reap_children(&self, reap: impl FnOnce() -> Vec<u32>) {
        let mut others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = reap();
        others.retain(|pid| !ended.contains(pid));
    }

    /// Stops forwarding to the child, which has ended or was not started, because its process id may be
    /// reused.
    pub(crate) fn no_child(&self) {
        self.child.store(-1, Ordering::Release);
    }

    /// Returns the signal that asked us to end, if any.
    pub(crate) fn asked_to_end(&self) -> Option<i32> {
        Some(self.asked_to_end.load(Ordering::Acquire)).filter(|signal| *signal != 0)
    }

    /// Stops catching and forwarding signals. Must be called after the child has ended.
    pub(crate) fn stop(mut self) {
        self.no_child();
        self.handle.close();
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

/// Returns the process with this id, or `None` if `kill` would interpret the number as several processes.
/// `Pid::from_raw` alone would accept -1, which means every process of the user.
fn one_process(pid: i32) -> Option<Pid> {
    if pid > 0 { Pid::from_raw(pid) } else { None }
}

/// Returns the signals that this process inherited as ignored, as a mask; bit 0 is signal 1.
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// Returns true if a mask of [`ignored_signals`] contains this signal.
fn contains(mask: u64, signal: i32) -> bool {
    mask >> (signal - 1) & 1 == 1
}

/// Stops ignoring SIGCHLD, if this process inherited it as ignored: the kernel would drop the exit status of each
/// child, and a wait for one child would wait for all. Programs started later have the default, which ignores
/// the signal, too, but keeps the status.
///
/// # Errors
/// When no handler can be installed.
pub(crate) fn keep_status_of_children() -> Result<()> {
    if contains(ignored_signals(), sig::SIGCHLD) {
        // The handler sets a flag that nobody reads. Any handler keeps the status, and an `exec` removes it.
        signal_hook::flag::register(sig::SIGCHLD, Arc::new(AtomicBool::new(false)))
            .context("cannot catch SIGCHLD")?;
    }
    Ok(())
}

/// Ends this process as the traced program ended: with its status, or by its signal.
pub(crate) fn end_like(status: ExitStatus) -> std::process::ExitCode {
    use std::os::unix::process::ExitStatusExt;
    if let Some(signal) = status.signal() {
        return end_by(signal);
    }
    std::process::ExitCode::from(status.code().unwrap_or(1) as u8)
}

/// Ends this process by a signal, after its temporary files are removed. If that fails, returns the status that a shell
/// would return.
pub(crate) fn end_by(signal: i32) -> std::process::ExitCode {
    recovery::remove_temporary_files();
    // Prevents a core file of this process, because the program has written its own.
    let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
    rustix::process::setrlimit(rustix::process::Resource::Core, none).ok();
    signal_hook::low_level::emulate_default_handler(signal).ok();
    std::process::ExitCode::from(128_u8.wrapping_add(signal as u8))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_child_is_no_process() {
        assert_eq!(one_process(-1), None);
        assert_eq!(one_process(0), None);
        assert_eq!(one_process(7).map(Pid::as_raw_nonzero).map(i32::from), Some(7));
    }
}
