//! A program in a real terminal.

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::common::installed::missing;

fn run(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{command:?}\n{stdout}\n{stderr}");
    stdout.into_owned()
}

/// A terminal: tmux with a server of its own, so that no other test or user shares it.
pub(crate) struct Terminal {
    socket: String,
}

impl Terminal {
    pub(crate) fn open(columns: u32, lines: u32, command: &str) -> Option<Terminal> {
        if Command::new("tmux").arg("-V").stdout(Stdio::null()).status().is_err() {
            missing("no tmux: run scripts/env browser");
            return None;
        }
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let terminal = Terminal { socket: format!("memtrace-test-{}-{number}", std::process::id()) };
        let (columns, lines) = (columns.to_string(), lines.to_string());
        // The shell stays open, so that the final screen can be read.
        let command = format!("{command}; echo LEFT WITH $?; exec sleep 600");
        run(&mut terminal.tmux(&["new-session", "-d", "-x", &columns, "-y", &lines, &command]));
        Some(terminal)
    }

    pub(crate) fn tmux(&self, arguments: &[&str]) -> Command {
        let mut tmux = Command::new("tmux");
        tmux.args(["-f", "/dev/null", "-L", &self.socket]).args(arguments);
        tmux.env("LC_ALL", "C.UTF-8").env("TERM", "xterm-256color").env_remove("TMUX").env_remove("NO_COLOR");
        tmux
    }

    pub(crate) fn keys(&self, keys: &str) {
        run(self.tmux(&["send-keys"]).arg(keys));
    }

    /// Waits until the screen contains `part`; returns the screen.
    pub(crate) fn wait(&self, part: &str) -> String {
        let start = Instant::now();
        loop {
            let screen = run(&mut self.tmux(&["capture-pane", "-p"]));
            if screen.contains(part) {
                return screen;
            }
            assert!(start.elapsed() < Duration::from_secs(60), "waiting for {part:?}:\n{screen}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.tmux(&["kill-server"]).output().ok();
    }
}
