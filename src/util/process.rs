//! Reads the state of a process from `/proc/PID/stat`.

use std::fs;

/// A process that has not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// The id of the parent process, which may have adopted the process.
    pub parent: i32,
    /// The id of the process group.
    pub group: i32,
    /// The start time, in kernel ticks since boot. Ids are reused, so only the id and the start time together
    /// identify a process.
    pub start: u64,
    /// The number of threads, including a main thread that has ended before the others.
    pub threads: u32,
    /// Whether the main thread has ended.
    pub has_main_ended: bool,
    /// The wait status of the main thread; 0 until it has ended.
    pub main_status: i32,
}

impl Process {
    /// Reads the process with this id.
    ///
    /// Returns `None` if there is no such process, or if it is a zombie: it has ended, but its parent has not
    /// yet read its status. The kernel also shows a process as a zombie if its main thread has ended but
    /// other threads run. Such a process counts as running.
    #[must_use]
    pub fn read(pid: u32) -> Option<Process> {
        Process::of(&pid.to_string())
    }

    /// Reads this process, whichever id it has in the namespace of `/proc`.
    #[must_use]
    pub fn own() -> Option<Process> {
        Process::of("self")
    }

    fn of(pid: &str) -> Option<Process> {
        // Reads bytes, because the kernel cuts the name of a process to 15 bytes, possibly inside a
        // character.
        Process::parse(&fs::read(format!("/proc/{pid}/stat")).ok()?)
    }

    /// Parses the contents of `/proc/PID/stat`; see proc_pid_stat(5).
    fn parse(stat: &[u8]) -> Option<Process> {
        // The second field is the name in parentheses, which may contain anything. The other fields follow
        // the last parenthesis.
        let end = stat.iter().rposition(|byte| *byte == b')')?;
        let fields: Vec<&str> = str::from_utf8(stat.get(end + 1..)?).ok()?.split_ascii_whitespace().collect();
        // Field 3 of the file is the state, field 20 is the number of threads, and the last field is the wait
        // status.
        let threads: u32 = fields.get(17)?.parse().ok()?;
        let has_main_ended = *fields.first()? == "Z";
        if matches!(*fields.first()?, "X" | "x") || has_main_ended && threads <= 1 {
            return None;
        }
        let (parent, group) = (fields.get(1)?.parse().ok()?, fields.get(2)?.parse().ok()?);
        let (start, main_status) = (fields.get(19)?.parse().ok()?, fields.last()?.parse().unwrap_or(0));
        Some(Process { parent, group, start, threads, has_main_ended, main_status })
    }
}

/// Returns the start time of the process with this id, in kernel ticks since boot; see [`Process::read`].
#[must_use]
pub fn start_of(pid: u32) -> Option<u64> {
    Process::read(pid).map(|process| process.start)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat(name: &[u8], state: &str, threads: u32) -> Vec<u8> {
        let rest = format!(") {state} 7 8 9 0 -1 4194304 1 0 0 0 5 6 0 0 20 0 {threads} 0 4711 1000 768\n");
        [b"12 (", name, rest.as_bytes()].concat()
    }

    #[test]
    fn a_process_has_ended_when_its_last_thread_has() {
        let lives = |threads, has_main_ended| {
            Some(Process { parent: 7, group: 8, start: 4711, threads, has_main_ended, main_status: 768 })
        };
        assert_eq!(Process::parse(&stat(b"python", "S", 4)), lives(4, false));
        assert_eq!(
            Process::parse(&stat(b"a) Z 1 (b", "R", 1)),
            lives(1, false),
            "the name may look like the rest"
        );
        assert_eq!(
            Process::parse(&stat(b"r\xc3", "S", 1)),
            lives(1, false),
            "the name may end inside a character"
        );
        assert_eq!(Process::parse(&stat(b"main", "Z", 3)), lives(3, true), "only its main thread has ended");
        for gone in [stat(b"x", "Z", 1), stat(b"x", "Z", 0), stat(b"x", "X", 1)] {
            assert_eq!(Process::parse(&gone), None);
        }
        for damaged in [&b""[..], b"12 (python", b"12 (python) S 1", b")"] {
            assert_eq!(Process::parse(damaged), None);
        }
    }

    #[test]
    fn a_process_is_read_until_it_ends_even_if_nobody_waits_for_it() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let found = Process::read(child.id()).unwrap();
        assert_eq!(found.parent.cast_unsigned(), std::process::id());
        child.kill().unwrap();
        // The process ends as a zombie, because its parent has not waited for it -> `None` within a second.
        let ended = (0..1000).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(5));
            Process::read(child.id()).is_none()
        });
        assert!(ended);
        child.wait().unwrap();
        assert_eq!(start_of(0), None);
    }
}
