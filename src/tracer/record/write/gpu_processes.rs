//! Records marks that name the other processes on each GPU, from the driver's list and `/proc`.

use std::path::Path;

use memtrace_trace::event::bytes::text_events;
use memtrace_trace::gpu_process::GpuProcess;
use memtrace_trace::host::HostFiles;
use memtrace_trace::{Api, Event, Header, Payload};
use rustc_hash::FxHashMap;

use crate::intern;
use crate::queue::event_queue::EventQueue;

/// A process is recorded again when its memory has changed by more than one part in this many.
const CHANGE: i64 = 8;
/// The maximum number of marks, because each one has a name of its own in the trace's table of names.
const MOST_MARKS: usize = 4096;

/// The other processes on the GPUs, as the last sample found them.
#[derive(Default)]
pub(super) struct GpuProcesses {
    /// By device and process id.
    known: FxHashMap<(i32, u32), GpuProcess>,
    marks: usize,
}

impl GpuProcesses {
    /// Records the processes on a device that are new, whose memory has changed, or that have left the device.
    /// `has_names` is true if `/proc` has these process ids.
    pub(super) fn record(
        &mut self,
        queue: &'static EventQueue,
        device: i32,
        listed: &[(u32, Option<i64>)],
        has_names: bool,
    ) {
        let complete = |mark: &mut GpuProcess| {
            if has_names {
                mark.fill(&HostFiles::default(), Path::new("/etc/passwd"));
            }
        };
        for mark in self.take_changes(device, listed, complete) {
            let name = intern::text_id(&mark.to_string(), |id, text| queue.define(&text_events(id, text)));
            queue.record(|clock_ns| {
                let header = Header { step: -1, ..Header::new(clock_ns, Api::GpuProcess, Event::HOST) };
                Payload::Mark { name }.pack(header)
            });
        }
    }

    /// Stores the changes on a device, and returns those that get a mark. `complete` adds the names of a
    /// process that is new.
    fn take_changes(
        &mut self,
        device: i32,
        listed: &[(u32, Option<i64>)],
        complete: impl Fn(&mut GpuProcess),
    ) -> Vec<GpuProcess> {
        let mut marks = Vec::new();
        for mut mark in self.changes(device, listed) {
            if mark.bytes != Some(0) && mark.user.is_none() && mark.command.is_none() {
                complete(&mut mark);
            }
            self.known.insert((device, mark.pid), mark.clone());
            if self.marks < MOST_MARKS {
                self.marks += 1;
                marks.push(mark);
            }
        }
        self.known.retain(|_, process| process.bytes != Some(0));
        marks
    }

    /// Returns the processes of a device that are new, whose memory has changed, or that have left the device.
    fn changes(&self, device: i32, listed: &[(u32, Option<i64>)]) -> Vec<GpuProcess> {
        let mut changes = Vec::new();
        for &(pid, bytes) in listed {
            match self.known.get(&(device, pid)) {
                Some(known) if !has_changed(known.bytes, bytes) => {}
                Some(known) => changes.push(GpuProcess { bytes, ..known.clone() }),
                // A mark without bytes means that the process has left the GPU.
                None if bytes == Some(0) => {}
                None => changes.push(GpuProcess { device, pid, bytes, ..GpuProcess::default() }),
            }
        }
        let is_gone = |process: &&GpuProcess| {
            process.device == device && listed.iter().all(|(pid, _)| *pid != process.pid)
        };
        let mut gone: Vec<GpuProcess> = self.known.values().filter(is_gone).cloned().collect();
        gone.sort_unstable_by_key(|process| process.pid);
        changes.extend(gone.into_iter().map(|process| GpuProcess { bytes: Some(0), ..process }));
        changes
    }
}

/// Returns true if memory has changed by more than one part in [`CHANGE`].
fn has_changed(before: Option<i64>, now: Option<i64>) -> bool {
    match (before, now) {
        (Some(before), Some(now)) => (now - before).saturating_abs() > before / CHANGE,
        (before, now) => before != now,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpu_processes_are_recorded_when_they_come_change_and_leave() {
        let mut processes = GpuProcesses::default();
        let mut changes = |listed: &[(u32, Option<i64>)]| -> Vec<(u32, Option<i64>)> {
            let changes = processes.take_changes(0, listed, |_| {});
            changes.into_iter().map(|process| (process.pid, process.bytes)).collect()
        };
        assert_eq!(changes(&[(7, Some(800)), (8, None)]), [(7, Some(800)), (8, None)]);
        assert_eq!(changes(&[(7, Some(900)), (8, None)]), [], "an eighth more");
        assert_eq!(changes(&[(7, Some(901)), (8, Some(1))]), [(7, Some(901)), (8, Some(1))]);
        assert_eq!(changes(&[(8, Some(1))]), [(7, Some(0))]);
        assert_eq!(changes(&[(8, Some(1))]), []);
        assert_eq!(changes(&[(7, Some(5)), (8, Some(1))]), [(7, Some(5))], "the id is used again");
        // The driver lists a process that has no memory.
        let listed = |bytes| [(7, Some(bytes)), (8, Some(1)), (11, Some(0))];
        assert_eq!(changes(&listed(0)), [(7, Some(0))]);
        assert_eq!(changes(&listed(0)), []);
        assert_eq!(changes(&listed(5)), [(7, Some(5))]);
        // The processes of another device stay.
        assert_eq!(processes.changes(1, &[]), []);
        // After the last mark, the processes are still followed.
        processes.marks = MOST_MARKS;
        assert_eq!(processes.take_changes(0, &[(7, Some(5)), (9, None)], |_| {}), []);
        assert_eq!(processes.known.len(), 2);
        processes.marks = 0;
        let left = processes.take_changes(0, &[(7, Some(5))], |_| {});
        assert_eq!(left.iter().map(|process| process.pid).collect::<Vec<_>>(), [9]);
    }
}
