//! A command of `memtrace` as a child process, with its output as an answer.

use std::ffi::OsString;
use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::Command;
use tokio::task::JoinHandle;

/// The maximum bytes that are kept of each output stream. A program of `run` may print without end.
const MOST_BYTES: usize = 16 << 20;
/// How long a stream of an ended child is read, if another process keeps it open.
const PATIENCE: Duration = Duration::from_secs(1);

/// The exit status with which `memtrace` refuses a request or cannot read a trace.
const REFUSED: i32 = 2;

/// Kills the process group of a child, which contains the program of `memtrace run`.
struct Group(Option<Pid>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(leader) = self.0.take() {
            let _ = kill_process_group(leader, Signal::KILL);
        }
    }
}

/// Runs `memtrace COMMAND ARGUMENT...` in `folder` and returns what it prints. If the future is dropped, the
/// child and its children are killed.
///
/// # Errors
/// When the command refuses the request: its message.
pub(super) async fn answer(command: &str, arguments: &[OsString], folder: &Path) -> Result<String, String> {
    let failed = |why: std::io::Error| format!("cannot run memtrace {command}: {why}");
    let memtrace = std::env::current_exe().map_err(failed)?;
    let mut child = Command::new(memtrace)
        .arg(command)
        .args(arguments)
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .map_err(failed)?;
    let leader = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
    let mut group = Group(leader);
    let (stdout, stderr) = (Collected::start(child.stdout.take()), Collected::start(child.stderr.take()));
    let status = child.wait().await.map_err(failed)?;
    // A process that the program left behind goes on, as it does after `memtrace run` in a shell. It may keep
    // the pipes open.
    group.0 = None;
    let (stdout, stderr) = (stdout.end().await, stderr.end().await);
    let stderr = stderr.trim_end();
    match status.code() {
        Some(REFUSED) if stdout.is_empty() => Err(stderr.to_owned()),
        Some(0) if stderr.is_empty() => Ok(stdout),
        Some(0) => Ok(format!("{stdout}\n{stderr}\n")),
        _ => Ok(format!("{stdout}\n{stderr}\n({status})\n")),
    }
}

/// The first [`MOST_BYTES`] bytes of a stream, which a task reads to its end.
struct Collected {
    bytes: Arc<Mutex<Vec<u8>>>,
    task: JoinHandle<()>,
}

impl Collected {
    fn start(stream: Option<impl AsyncRead + Unpin + Send + 'static>) -> Collected {
        let bytes = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&bytes);
        let task = tokio::spawn(async move {
            let Some(mut stream) = stream else { return };
            let mut part = vec![0; 1 << 16];
            // Reads on after the last byte that is kept, because a full pipe would stop the child.
            while let Ok(read @ 1..) = stream.read(&mut part).await {
                let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                let left = MOST_BYTES - kept.len();
                kept.extend_from_slice(&part[..read.min(left)]);
            }
        });
        Collected { bytes, task }
    }

    /// Returns the text after the child has ended. Waits for [`PATIENCE`] at most, because another process may keep
    /// the stream open.
    async fn end(mut self) -> String {
        if tokio::time::timeout(PATIENCE, &mut self.task).await.is_err() {
            self.task.abort();
        }
        String::from_utf8_lossy(&self.bytes.lock().unwrap_or_else(PoisonError::into_inner)).into_owned()
    }
}
