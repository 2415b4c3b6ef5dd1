//! The identity of a process in the table: its id and its start time, because ids are reused.

use std::fs;

use memtrace_util::process::start_of;

/// A process, identified by its id and its start time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    /// The id.
    pub pid: u32,
    /// The start time, in clock ticks since the host started.
    pub start: u64,
}

impl Process {
    /// Returns the calling process.
    #[must_use]
    pub fn current() -> Self {
        let pid = std::process::id();
        Self { pid, start: start_of(pid).unwrap_or(0) }
    }

    /// Returns true if the process exists and is not a zombie. A zombie counts as ended, because a driver
    /// frees the memory of a process when the process ends, not when its parent reads its status.
    #[must_use]
    pub fn is_alive(self) -> bool {
        start_of(self.pid) == Some(self.start)
    }
}

/// Returns the first word of a process's command line, or `None` if it cannot be read.
#[must_use]
pub fn name_of(pid: u32) -> Option<String> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let first = line.split(|&byte| byte == 0).next().filter(|word| !word.is_empty())?;
    Some(String::from_utf8_lossy(first).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_alive_until_it_ends_even_if_nobody_waits_for_it() {
        let me = Process::current();
        assert!(me.is_alive() && me.start > 0);
        assert!(!Process { start: me.start + 1, ..me }.is_alive());
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let process = Process { pid: child.id(), start: start_of(child.id()).unwrap() };
        assert!(process.is_alive());
        child.kill().unwrap();
        // The process ends as a zombie, because its parent has not waited for it -> not alive within a
        // second.
        let ended = (0..1000).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(5));
            !process.is_alive()
        });
        assert!(ended);
        child.wait().unwrap();
        assert!(!Process { pid: 0, start: 0 }.is_alive());
    }
}
