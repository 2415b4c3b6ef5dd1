//! Traced programs that keep running while a test examines them.

use std::path::{Path, PathBuf};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::common::{Trace, library, untraced};

/// Sends SIGTERM to a process.
pub(crate) fn end(pid: u32) {
    kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), Signal::TERM).unwrap();
}

/// Waits until `is_so` returns true, for at most a minute.
pub(crate) fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let start = std::time::Instant::now();
    while !is_so() {
        assert!(start.elapsed().as_secs() < 60, "waiting for {what}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

/// Runs a command of memtrace that starts Pythons, until `pids` has a line: the process ids that the stand-ins for these
/// Pythons write into it. Then sends SIGTERM to memtrace, which must end by it, with its Pythons and without temporary
/// files.
pub(crate) fn ends_with_its_pythons(command: &mut std::process::Command, pids: &Path) {
    let temporary = TempDir::new().unwrap();
    let quiet = std::process::Stdio::null;
    let mut child = command.env("TMPDIR", temporary.path()).stdout(quiet()).spawn().unwrap();
    let read = || std::fs::read_to_string(pids).unwrap_or_default();
    wait_until("a Python", || read().ends_with('\n'));
    end(child.id());
    assert_eq!(
        std::os::unix::process::ExitStatusExt::signal(&child.wait().unwrap()),
        Some(Signal::TERM.as_raw())
    );
    for pid in read().lines() {
        wait_until(pid, || !Path::new("/proc").join(pid).exists());
    }
    let left = std::fs::read_dir(temporary.path()).unwrap().map(|entry| entry.unwrap().file_name());
    // All runs share this folder of the simulated GPU.
    let left: Vec<_> = left.filter(|name| !name.to_string_lossy().starts_with("memtrace-libcuda-")).collect();
    assert_eq!(left, [""; 0]);
}

/// A traced program that runs until the test creates its end file.
pub(crate) struct Running {
    child: std::process::Child,
    /// Its process id.
    pub(crate) pid: String,
    folder: TempDir,
}

impl Running {
    /// An argument that is replaced by the path of the end file.
    pub(crate) const END: &str = "END";

    /// Starts `program` with these environment variables, and waits for its first line on stdout.
    pub(crate) fn start(program: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Running {
        let folder = TempDir::new().unwrap();
        let end = folder.path().join("end");
        let with_end = |argument: &&str| {
            if *argument == Running::END { end.to_str().unwrap().to_owned() } else { (*argument).to_owned() }
        };
        let arguments: Vec<String> = arguments.iter().map(with_end).collect();
        let mut command = untraced(program, &arguments.iter().map(String::as_str).collect::<Vec<_>>());
        command.env("LD_PRELOAD", library("libmemtrace.so")).envs(variables.iter().copied());
        command.env("MEMTRACE_OUT", folder.path().join("out")).stdout(std::process::Stdio::piped());
        let child = command.spawn().unwrap();
        let mut running = Running { pid: child.id().to_string(), child, folder };
        let mut line = String::new();
        let stdout = running.child.stdout.as_mut().unwrap();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(stdout), &mut line).unwrap();
        running
    }

    /// Returns the folder of the program's traces.
    pub(crate) fn out(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    /// Ends the program, which must succeed.
    pub(crate) fn end(&mut self) {
        std::fs::write(self.folder.path().join("end"), "").unwrap();
        assert!(self.child.wait().unwrap().success());
    }

    /// Ends the program and reads its only trace.
    pub(crate) fn trace(mut self) -> Trace {
        self.end();
        let files = std::fs::read_dir(self.out()).unwrap();
        let files: Vec<PathBuf> = files.map(|entry| entry.unwrap().path()).collect();
        Trace::read(files.iter().find(|file| file.extension().is_some_and(|end| end == "csv")).unwrap())
    }
}

impl Drop for Running {
    /// Kills the program, so that a failed test leaves no process.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
