//! memtrace's own threads inside the traced process.

use std::io;
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::RecvTimeoutError;
use memtrace_util::process::Process;

use crate::control::{Command, Control};

/// The interval at which a writer thread without a trace checks if it is the last thread of the process.
const CHECK_ALONE: Duration = Duration::from_millis(500);

/// Starts a thread with a stack of `stack` bytes and every signal blocked, because the program's signal
/// handlers must not run on it.
pub(crate) fn start_thread<T: Send + 'static>(
    name: &str,
    stack: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    // SAFETY: a signal set is a plain struct for which all zero is valid.
    let mut before: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: all pointers are valid for the calls.
    unsafe {
        let mut all = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
    }
    let thread = std::thread::Builder::new().name(name.to_owned()).stack_size(stack).spawn(work);
    // SAFETY: `before` is the mask that the first call stored.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut()) };
    thread
}

/// Returns true if this is the last thread of the process. The main thread may end by `pthread_exit` while
/// other threads continue; the process ends with the last of these threads, and the writer thread must not
/// keep the process alive.
pub(crate) fn is_alone() -> bool {
    Process::own().is_some_and(is_last_thread_of)
}

/// Returns true if a process has only this thread and its main thread, which has ended.
fn is_last_thread_of(process: Process) -> bool {
    process.has_main_ended && process.threads == 2
}

/// Ends the process with the exit status of its main thread, if that status is not 0 and this is the last
/// thread. The kernel gives a process the status of its last thread. Without memtrace, the last thread would
/// be the main thread, for example in a child that `clone` started and that ends by the system call `exit`.
pub(crate) fn end_like_main_thread() {
    let Some(process) = Process::own().filter(|process| is_last_thread_of(*process)) else { return };
    let status = process.main_status;
    if libc::WIFEXITED(status) && libc::WEXITSTATUS(status) != 0 {
        // SAFETY: the call ends the process, in which no thread is left that could have work to do.
        unsafe { libc::syscall(libc::SYS_exit_group, libc::WEXITSTATUS(status)) };
    }
}

/// Answers requests after the trace has ended, until the process ends.
pub(crate) fn answer_until_finish(control: &Control) {
    control.note_ready();
    loop {
        match control.commands().recv_timeout(CHECK_ALONE) {
            Ok(Command::Finish) | Err(RecvTimeoutError::Disconnected) => return,
            Ok(Command::Suspend(done)) => drop(done.send(())),
            // The trace ended early, so it lacks the events recorded since then.
            Ok(Command::Flush(done)) => drop(done.send(false)),
            Ok(Command::Nudge | Command::Resume) => {}
            Err(RecvTimeoutError::Timeout) if is_alone() => return control.detach(),
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}
