//! A command of `memtrace` as a child process, with its output as an answer.

use std::ffi::OsString;
use std::path::Path;
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::Command;

/// The maximum bytes that are kept of each output stream. A program of `run` may print without end.
const MOST_BYTES: u64 = 16 << 20;

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
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let (stdout, stderr) = tokio::try_join!(text(stdout), text(stderr)).map_err(failed)?;
    let status = child.wait().await.map_err(failed)?;
    // A process that the program left behind goes on, as it does after `memtrace run` in a shell.
    group.0 = None;
    let stderr = stderr.trim_end();
    match status.code() {
        Some(REFUSED) if stdout.is_empty() => Err(stderr.to_owned()),
        Some(0) if stderr.is_empty() => Ok(stdout),
        Some(0) => Ok(format!("{stdout}\n{stderr}\n")),
        _ => Ok(format!("{stdout}\n{stderr}\n({status})\n")),
    }
}

/// Reads a stream to its end and returns its first [`MOST_BYTES`] bytes.
async fn text(stream: Option<impl AsyncRead + Unpin>) -> std::io::Result<String> {
    let Some(mut stream) = stream else { return Ok(String::new()) };
    let mut bytes = Vec::new();
    (&mut stream).take(MOST_BYTES).read_to_end(&mut bytes).await?;
    // A full pipe would stop the child.
    tokio::io::copy(&mut stream, &mut tokio::io::sink()).await?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
