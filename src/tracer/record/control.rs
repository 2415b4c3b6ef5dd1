//! Requests to the writer thread, and its progress.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};

/// The maximum time for which the thread that starts the recorder waits until the trace exists. Usually the
/// wait takes a few ms, longer on a slow disk. The limit is needed when the writer thread waits for a lock of
/// the loader that the waiting thread holds.
const START: Duration = Duration::from_millis(250);

/// The maximum time for which a thread waits for a writer thread that makes no progress.
const STALLED: Duration = Duration::from_secs(5);

/// The time between two looks at a channel.
const POLL: Duration = Duration::from_micros(50);

/// A request to the writer thread.
pub(crate) enum Command {
    /// Write every event recorded so far, and answer whether the file has all of these events.
    Flush(Sender<bool>),
    /// Read the queue now, because the program waits for chunks, or because the lines about an OOM are due on
    /// stderr.
    Nudge,
    /// The process is about to `exec`: end the trace, answer, and wait.
    Suspend(Sender<()>),
    /// The `exec` failed: continue the trace.
    Resume,
    /// Write everything and end.
    Finish,
}

/// The channel to the writer thread, and the writer thread's progress.
pub(crate) struct Control {
    commands: (Sender<Command>, Receiver<Command>),
    thread: Mutex<Option<JoinHandle<()>>>,
    /// The channel that gets a message once the trace exists or cannot be created.
    ready: (Sender<()>, Receiver<()>),
    /// Grows while the writer thread makes progress.
    progress: AtomicU64,
    /// The number of OOMs whose announced tags are not recorded yet.
    tags_due: AtomicU32,
}

impl Control {
    pub(crate) fn new() -> Control {
        Control {
            commands: bounded(64),
            thread: Mutex::new(None),
            ready: bounded(1),
            progress: AtomicU64::new(0),
            tags_due: AtomicU32::new(0),
        }
    }

    /// Sends [`Command::Nudge`], unless other requests are waiting.
    pub(crate) fn nudge(&self) {
        // If nudges could fill the channel, the last request of the program would wait until 64 nudges are
        // processed.
        if self.commands.0.is_empty() {
            let _ = self.commands.0.try_send(Command::Nudge);
        }
    }

    /// Sends [`Command::Flush`]. Returns true if the file has every event recorded so far. Waits up to
    /// `patience` to send the request, and up to `patience` again for the answer.
    pub(crate) fn flush(&self, patience: Duration) -> bool {
        let (done, answer) = bounded(1);
        self.send(Command::Flush(done), patience) && polled(&answer, patience) == Some(true)
    }

    /// Sends [`Command::Suspend`], and waits until the trace has ended or the writer thread stalls. Returns
    /// true if the request was sent. Then [`Control::resume`] must follow, because a writer thread that
    /// stalled may read the request later.
    pub(crate) fn suspend(&self) -> bool {
        let (done, answer) = bounded(1);
        let is_sent = self.send(Command::Suspend(done), STALLED);
        if is_sent {
            self.wait_until(|| !answer.is_empty());
        }
        is_sent
    }

    /// Sends [`Command::Resume`].
    pub(crate) fn resume(&self) {
        self.send(Command::Resume, STALLED);
    }

    /// Sends [`Command::Finish`] and waits until the writer thread ends or stalls.
    pub(crate) fn finish(&self) {
        let Some(thread) = self.thread().take() else { return };
        if self.send(Command::Finish, STALLED) {
            self.wait_until(|| thread.is_finished());
        }
    }

    /// Sends a request. Returns false if the channel has no room for it within `patience`. Polls, as
    /// [`polled`] does and for the same reason.
    fn send(&self, mut command: Command, patience: Duration) -> bool {
        let start = Instant::now();
        loop {
            command = match self.commands.0.try_send(command) {
                Ok(()) => return true,
                Err(error) if start.elapsed() < patience => error.into_inner(),
                Err(_) => return false,
            };
            std::thread::sleep(POLL);
        }
    }

    /// Waits until `is_done` returns true. Returns false if the writer thread made no progress for
    /// [`STALLED`]. This can happen if the process exits from a signal handler that interrupted the holder of
    /// a lock that the writer thread needs. The remaining events are then in the journal.
    fn wait_until(&self, is_done: impl Fn() -> bool) -> bool {
        let (mut progress, mut since) = (0, Instant::now());
        while !is_done() {
            let now = self.progress.load(Ordering::Relaxed);
            if now != progress {
                (progress, since) = (now, Instant::now());
            } else if since.elapsed() > STALLED {
                return false;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        true
    }

    /// Stores the handle of the writer thread and waits, up to [`START`], until the trace exists. If the
    /// process is killed after that, its trace exists and names its journal.
    pub(crate) fn attach(&self, thread: JoinHandle<()>) {
        *self.thread() = Some(thread);
        let _ = polled(&self.ready.1, START);
    }

    /// Forgets the handle of the writer thread. The process ends together with that thread, so no thread has
    /// to wait for it.
    pub(crate) fn detach(&self) {
        drop(self.thread().take());
    }

    /// Returns true if a thread already waits for the end of the writer thread, or if no thread has to wait
    /// for it.
    pub(crate) fn is_finishing(&self) -> bool {
        self.thread().is_none()
    }

    fn thread(&self) -> MutexGuard<'_, Option<JoinHandle<()>>> {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the receiving end of the requests, for the writer thread.
    pub(crate) fn commands(&self) -> &Receiver<Command> {
        &self.commands.1
    }

    /// Records that the writer thread made progress.
    pub(crate) fn note_progress(&self) {
        self.progress.fetch_add(1, Ordering::Relaxed);
    }

    /// Reports that the trace exists, or that it cannot be created.
    pub(crate) fn note_ready(&self) {
        let _ = self.ready.0.try_send(());
    }

    /// Announces that tags will follow an OOM, so that the lines about the OOM wait for these tags.
    pub(crate) fn expect_tags(&self) {
        self.tags_due.fetch_add(1, Ordering::AcqRel);
    }

    /// Reports that announced tags are recorded, or that they will not be; see [`Control::expect_tags`].
    pub(crate) fn tags_recorded(&self) {
        let less = |due: u32| due.checked_sub(1);
        let _ = self.tags_due.fetch_update(Ordering::AcqRel, Ordering::Relaxed, less);
        self.nudge();
    }

    /// Returns true if announced tags are not recorded yet.
    pub(crate) fn expects_tags(&self) -> bool {
        self.tags_due.load(Ordering::Acquire) > 0
    }
}

/// Returns a message that arrives on `channel` within `patience`. Polls the channel at intervals. A blocking
/// wait would create a `thread_local!` with a destructor, which must not happen on a thread of the program
/// (see [`crate::per_thread`]).
pub(crate) fn polled<T>(channel: &Receiver<T>, patience: Duration) -> Option<T> {
    let start = Instant::now();
    loop {
        if let Ok(message) = channel.try_recv() {
            return Some(message);
        }
        if start.elapsed() >= patience {
            return None;
        }
        std::thread::sleep(POLL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_waits_for_room_and_for_its_answer_and_gives_up() {
        let control: &'static Control = Box::leak(Box::new(Control::new()));
        let patience = Duration::from_millis(5);
        // Nobody answers.
        assert!(!control.flush(patience));
        let Ok(Command::Flush(_)) = control.commands().try_recv() else { panic!("the request was sent") };
        while control.send(Command::Nudge, Duration::ZERO) {}
        assert!(!control.flush(patience), "the channel is full");
        let writer = std::thread::spawn(|| {
            while let Ok(command) = control.commands().recv() {
                if let Command::Flush(done) = command {
                    return done.send(true).unwrap();
                }
            }
        });
        assert!(control.flush(Duration::from_secs(60)));
        writer.join().unwrap();
    }

    #[test]
    fn a_suspension_that_is_not_answered_is_resumed() {
        let control = Control::new();
        // Nobody answers, and the request stays in the channel.
        assert!(control.suspend());
        control.resume();
        assert!(matches!(control.commands().try_recv(), Ok(Command::Suspend(_))));
        assert!(matches!(control.commands().try_recv(), Ok(Command::Resume)));
    }
}
