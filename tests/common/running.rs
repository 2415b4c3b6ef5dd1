//! Traced programs that keep running while a test examines them.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::common::{Trace, library, untraced};

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
