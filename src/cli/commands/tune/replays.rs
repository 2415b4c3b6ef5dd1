//! Runs the replays on a simulated GPU, in one Python process per core, up to [`MOST_PROCESSES`].

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, BufWriter};
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use memtrace_analysis::read::stream::TraceFile;
use memtrace_analysis::requests::Requests;
use memtrace_cards::CARD_VARIABLE;
use memtrace_machine::MACHINE_VARIABLE;
use serde_json::{Value, json};

use crate::child_env::{Scratch, python_command, run_id};
use crate::libraries::{PHANTOM, library};
use crate::signals::{self, Forwarder};

/// The Python program that makes the requests.
const PROGRAM: &str = include_str!("replay.py");
/// The maximum number of concurrent processes. Each needs about 500 MB for torch.
const MOST_PROCESSES: usize = 4;
/// The interval between two checks for a signal that asks this command to end.
const INTERVAL: Duration = Duration::from_millis(50);

/// The device on which the requests are repeated.
#[derive(Clone, Copy, Debug)]
pub(super) struct Capacity {
    /// The total memory in bytes.
    pub(super) total: i64,
    /// The memory in bytes that the allocator can get; `None` if unknown.
    pub(super) free_at_start: Option<i64>,
}

impl Capacity {
    /// Returns the capacity of the device of a trace. If it is unknown, assumes twice the memory that the run
    /// reserved.
    pub(super) fn from_trace(trace: &TraceFile, requests: &Requests) -> Capacity {
        let total = trace.meta.total_bytes(requests.device);
        let total = if total > 0 { total } else { requests.peak_reserved * 2 };
        let taken = trace.meta.phantom["context_bytes"].as_i64().or(requests.taken);
        Capacity { total, free_at_start: taken.map(|taken| (total - taken).max(0)) }
    }
}

/// The answers of all replays, in the order of `settings`, and the version of torch that made them.
pub(super) struct Replays {
    pub(super) answers: Vec<Value>,
    pub(super) torch: String,
}

/// The processes that make the replays, each with the indices of its settings. All are killed when dropped.
struct Workers(Vec<(Child, std::vec::IntoIter<usize>)>);

impl Drop for Workers {
    fn drop(&mut self) {
        for (child, _) in &mut self.0 {
            // An error means that the process has ended.
            child.kill().ok();
            child.wait().ok();
        }
    }
}

/// Makes the requests once with each of `settings`. Calls `progress` with the number of finished replays. A signal that
/// asks this command to end also ends the replays.
///
/// # Errors
/// When `python` cannot be run, has no torch with CUDA, or fails. No replay is running then.
pub(super) fn run(
    python: &OsString,
    requests: &Requests,
    settings: &[String],
    capacity: Capacity,
    progress: impl FnMut(usize),
) -> Result<Replays> {
    let forwarder = Forwarder::start()?;
    // Do not forward signals: this process ends the replays itself.
    forwarder.no_child();
    let replays = run_all(python, requests, settings, capacity, &forwarder, progress);
    if let Some(signal) = forwarder.asked_to_end() {
        signals::end_by(signal);
    }
    forwarder.stop();
    replays
}

/// Does the work of [`run`]. Stops all replays and returns an error if a signal asks this command to end.
fn run_all(
    python: &OsString,
    requests: &Requests,
    settings: &[String],
    capacity: Capacity,
    forwarder: &Forwarder,
    mut progress: impl FnMut(usize),
) -> Result<Replays> {
    let scratch = Scratch::new(&run_id())?;
    let path = |name: &str| scratch.folder.join(name);
    let program = path("replay.py");
    fs::write(&program, PROGRAM).with_context(|| program.display().to_string())?;
    let operations = path("requests");
    let file = File::create_new(&operations).with_context(|| operations.display().to_string())?;
    requests.write(BufWriter::new(file)).context("cannot write the requests into the temporary folder")?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let processes = cores.min(MOST_PROCESSES).min(settings.len());
    let mut workers = Workers(Vec::new());
    let (sender, receiver) = mpsc::channel();
    for worker in 0..processes {
        let own: Vec<usize> = (worker..settings.len()).step_by(processes).collect();
        let plan = path(&format!("plan{worker}"));
        let texts: Vec<&String> = own.iter().map(|index| &settings[*index]).collect();
        let text = json!({
            "settings": texts,
            "slots": requests.slots,
            "streams": requests.streams,
            "peak_index": requests.peak_index,
            "free_at_start": capacity.free_at_start,
        });
        fs::write(&plan, text.to_string()).with_context(|| plan.display().to_string())?;
        // Use a file for stderr: nothing reads a pipe while the replays run, so a full pipe would block them.
        let errors = path(&format!("stderr{worker}"));
        let stderr = File::create_new(&errors).with_context(|| errors.display().to_string())?;
        let mut child = start(&scratch, python, [&program, &operations, &plan], worker, (capacity, stderr))?;
        let stdout = child.stdout.take();
        workers.0.push((child, own.into_iter()));
        let stdout = stdout.context("the replay has no output")?;
        let sender = sender.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                // A library may print lines of its own, even JSON.
                let Ok(line @ Value::Object(_)) = serde_json::from_str::<Value>(&line) else { continue };
                if sender.send((worker, line)).is_err() {
                    break;
                }
            }
        });
    }
    drop(sender);
    let mut answers = vec![None; settings.len()];
    let mut torch = String::new();
    let mut done = 0;
    loop {
        if forwarder.asked_to_end().is_some() {
            bail!("a signal asked memtrace to end");
        }
        let (worker, line) = match receiver.recv_timeout(INTERVAL) {
            Ok(received) => received,
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => break,
        };
        if let Some(why) = line["no_torch"].as_str() {
            let python = line["python"].as_str().unwrap_or_default();
            bail!(
                "{python} has no PyTorch for CUDA ({why}); name a Python that has it: memtrace tune --python PATH"
            );
        }
        if let Some(version) = line["torch"].as_str() {
            torch = version.to_owned();
        } else if line["settings"].is_string()
            && let Some(index) = workers.0[worker].1.next()
        {
            answers[index] = Some(line);
            done += 1;
            progress(done);
        }
    }
    for (worker, (child, _)) in workers.0.iter_mut().enumerate() {
        let status = child.wait().context("cannot wait for a replay")?;
        if !status.success() {
            let stderr = fs::read(path(&format!("stderr{worker}"))).unwrap_or_default();
            let stderr = String::from_utf8_lossy(&stderr);
            let last = stderr.lines().last().unwrap_or("stderr is empty");
            bail!("{} failed: {status}: {last}", Path::new(python).display());
        }
    }
    let answers: Option<Vec<Value>> = answers.into_iter().collect();
    let answers = answers.ok_or_else(|| anyhow!("a replay ended without an answer"))?;
    Ok(Replays { answers, torch })
}

/// Starts the process that makes the replays of one worker. Each process has its own simulated machine,
/// because the processes of a machine would share its memory.
fn start(
    scratch: &Scratch,
    python: &OsString,
    arguments: [&std::path::PathBuf; 3],
    worker: usize,
    (capacity, stderr): (Capacity, File),
) -> Result<Child> {
    let mut command = python_command(scratch, python, &[library(PHANTOM)?])?;
    command
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(stderr)
        // These would change the devices or the allocator.
        .env_remove("CUDA_VISIBLE_DEVICES")
        .env_remove("PYTORCH_NO_CUDA_MEMORY_CACHING")
        .env(CARD_VARIABLE, format!("mem={},context=0", capacity.total))
        .env(MACHINE_VARIABLE, format!("{}-{worker}", run_id()));
    command.spawn().with_context(|| {
        format!(
            "cannot run {}; name a Python with PyTorch: memtrace tune --python PATH",
            Path::new(python).display()
        )
    })
}
