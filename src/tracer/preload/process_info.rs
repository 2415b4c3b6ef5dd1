//! The description of the process in the meta row and the end row: host, rank, allocator, devices,
//! capabilities.

use std::ffi::{CStr, c_char, c_int};

use memtrace_trace::Meta;
use memtrace_trace::end_row::{NEEDED_BYTES, OLD_CUDNN};
use memtrace_trace::meta::{Allocator, redact};
use memtrace_trace::rounding::caching_enabled;
use memtrace_util::process::Process;

use crate::attribution::{acted_reads, steps, updates};
use crate::capabilities;
use crate::ffi::{cuda, phantom};
use crate::python::{errors, injection};
use crate::runtime::{command_line, session};

/// Returns the host name in a form that is safe in a file name.
pub(crate) fn host() -> String {
    let mut name = [0 as c_char; 256];
    // SAFETY: the buffer is longer than the length that is passed, so its last byte stays 0.
    unsafe { libc::gethostname(name.as_mut_ptr(), 255) };
    // SAFETY: the text ends with 0; see above.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let safe: String =
        name.chars().map(|c| if c.is_ascii_alphanumeric() || "-_".contains(c) { c } else { '_' }).collect();
    // The name must not be empty or start like a command-line option.
    let safe = safe.trim_start_matches('-');
    if safe.is_empty() { "host".to_owned() } else { safe.to_owned() }
}

/// Returns the distributed rank from the environment variable of the launcher, or 0 if no such variable is
/// set.
pub(crate) fn rank() -> i32 {
    number(&["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"]).unwrap_or(0)
}

fn number(names: &[&str]) -> Option<c_int> {
    names.iter().find_map(|name| std::env::var(name).ok()?.trim().parse().ok())
}

/// Returns the allocator's settings from the environment variables that torch reads. If both are set,
/// `PYTORCH_ALLOC_CONF` takes precedence.
pub(crate) fn allocator() -> Allocator {
    let conf =
        ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"].iter().find_map(|name| std::env::var(name).ok());
    let conf = conf.unwrap_or_default();
    let caching = caching_enabled(std::env::var("PYTORCH_NO_CUDA_MEMORY_CACHING").ok().as_deref());
    let mut allocator = Allocator { caching, conf, ..Allocator::default() };
    if let Some(backend) = allocator.option("backend") {
        allocator.backend = backend.to_owned();
    }
    allocator
}

/// Fills in the meta row. Runs on the writer thread when the trace begins.
pub(crate) fn describe(meta: &mut Meta) {
    meta.allocator = allocator();
    meta.world_size =
        number(&["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"]).unwrap_or(1);
    meta.ancestors = ancestors();
    meta.argv = redact(command_line::of_program(&meta.ancestors));
    meta.phantom = phantom::describe();
    meta.cwd = std::env::current_dir().map_or_else(|_| String::new(), |path| path.display().to_string());
    if !meta.allocator.caching {
        meta.degraded.push("caching is off: each CUDA allocation of torch is recorded as a block".to_owned());
    }
    if meta.allocator.backend != "native" {
        let backend = &meta.allocator.backend;
        meta.degraded.push(format!(
            "allocator backend {backend} reports no blocks: each CUDA allocation of torch is recorded \
             as a block, and their sum as reserved memory"
        ));
    }
    if let Some(session) = session::session() {
        meta.ops = session.settings.ops.name().to_owned();
        meta.modules = session.settings.modules;
        meta.detail = session.settings.detail.to_string();
        meta.brief = session.settings.has_brief_steps();
        capabilities::describe(meta, &session.settings);
    }
    if meta.journal.is_empty() {
        meta.degraded.push(
            "no local file for the events: the last events are lost if the process is killed".to_owned(),
        );
    }
    cuda::describe(meta);
}

/// The maximum number of ancestors in the meta row.
const MOST_ANCESTORS: usize = 32;

/// Returns the process ids of this process's ancestors, its parent first. The list ends where `/proc` shows
/// no parent, and after [`MOST_ANCESTORS`] entries.
fn ancestors() -> Vec<u32> {
    let parent = |process: u32| {
        Process::read(process).map(|it| it.parent.cast_unsigned()).filter(|parent| *parent != 0)
    };
    std::iter::successors(parent(std::process::id()), |process| parent(*process))
        .take(MOST_ANCESTORS)
        .collect()
}

/// Returns the entries that this library adds to the end row, separated by spaces: the simulated GPU, errors
/// in Python, a tracer that never started, and the number of steps. Empty if no entry applies.
pub(crate) fn conclude() -> String {
    let steps = steps::end_words(updates::is_pending());
    let parts =
        [about_phantom(), acted_reads::end_words(), errors::end_words(), injection::end_words(), steps];
    parts.iter().filter(|words| !words.is_empty()).map(String::as_str).collect::<Vec<_>>().join(" ")
}

/// Returns the entries about a run on a simulated GPU; empty on a real device.
fn about_phantom() -> String {
    let about = phantom::describe_at_end();
    let Some(reads) = about["invented_reads"].as_u64() else { return String::new() };
    let names = |calls: &str| -> String {
        let names = about[calls].as_object().into_iter().flatten().map(|(name, _)| name.as_str());
        names.collect::<Vec<_>>().join(";")
    };
    let bytes = about["invented_bytes"].as_u64().unwrap_or(0);
    let (mut guessed, refused) = (names("guessed_calls"), names("refused_calls"));
    if about["assumptions"]["cudnn"] == "guess" {
        guessed = format!("{OLD_CUDNN};{guessed}");
    }
    // Spaces separate the words of the end row. A call and its caller are separated by `@` there.
    let refused = refused.replace(" by ", "@").replace(' ', "_");
    let mut text =
        format!("invented_reads={reads} invented_bytes={bytes} guessed={guessed} refused={refused}");
    if let Some(answers) = about["stand_in_answers"].as_u64() {
        text.push_str(&format!(" stand_in_answers={answers}"));
    }
    if let Some(bytes) = about["pinned_not_resident"].as_u64() {
        text.push_str(&format!(" pinned_not_resident={bytes}"));
    }
    if let Some(needed) = about[NEEDED_BYTES].as_u64() {
        text.push_str(&format!(" {NEEDED_BYTES}={needed}"));
    }
    let faults = |happened: bool| -> String {
        let faults = about["faults"].as_array().into_iter().flatten();
        let wanted = faults.filter(|fault| (fault["failures"].as_u64() > Some(0)) == happened);
        wanted.filter_map(|fault| fault["fault"].as_str()).collect::<Vec<_>>().join(";")
    };
    for (name, list) in [("injected", faults(true)), ("not_injected", faults(false))] {
        if !list.is_empty() {
            text.push_str(&format!(" {name}={list}"));
        }
    }
    text
}
