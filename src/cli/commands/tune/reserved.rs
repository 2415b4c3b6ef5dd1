//! The reserved memory of a changed program: `memtrace advise --reserved`.

use std::ffi::OsString;

use anyhow::{Result, bail};
use memtrace_analysis::options::Options;
use memtrace_analysis::read::input::Input;
use memtrace_analysis::read::stream::TraceFile;
use memtrace_analysis::reports::Answer;
use memtrace_analysis::requests::Requests;
use memtrace_analysis::selection::select;
use memtrace_analysis::state::replay::Window;
use memtrace_analysis::whatif::{self, Change};
use serde_json::{Value, json};

use super::replays::{self, Capacity};
use super::uses_caching_allocator;

/// Adds the predicted reserved memory to the answer of `memtrace advise`: for each process, on the device
/// with the most reserved memory.
///
/// # Errors
/// When only a part of the run is selected, the run did not use PyTorch's caching allocator, or the Python
/// has no torch.
pub(in crate::commands) fn add(answer: &mut Answer, input: &Input, options: &Options) -> Result<()> {
    if options.window != Window::default() {
        bail!("--reserved: the allocator's segments come from the whole run; leave out --window and --step");
    }
    for trace in &select(input, options, false)?.traces {
        if !uses_caching_allocator(trace) {
            bail!("--reserved: {}: this run did not use PyTorch's caching allocator", trace.path.display());
        }
        let Ok(base) = Requests::read(trace, options) else { continue };
        let found = predict(trace, &base, options)?;
        answer.body.plain(text(&base, &found, options));
        let file = trace.path.display().to_string();
        let devices = answer.json["devices"].as_array_mut().into_iter().flatten();
        for device in devices.filter(|one| one["file"] == *file && one["device"] == base.device) {
            device["reserved"] = found.clone();
        }
    }
    Ok(())
}

/// Replays the changed requests, and returns the result as JSON.
fn predict(trace: &TraceFile, base: &Requests, options: &Options) -> Result<Value> {
    let changes = whatif::parse(|name| options.text(name))?;
    let changes = whatif::with_units(trace, &changes, options)?;
    let requests = whatif::changed_requests(trace, &changes, base, options)?;
    let is_low = changes.iter().any(|change| matches!(change, Change::Checkpoint(_) | Change::Shard { .. }));
    let python = match options.text("python") {
        "" => "python3",
        path => path,
    };
    let settings = [trace.meta.allocator.conf.clone()];
    let capacity = Capacity::from_trace(trace, base);
    let replays = replays::run(&OsString::from(python), &requests, &settings, capacity, |_| ())?;
    let answer = &replays.answers[0];
    if let Some(why) = answer["failed"].as_str() {
        bail!("--reserved: the requests could not be replayed: {why}");
    }
    let stopped = &answer["stopped"];
    Ok(json!({
        "before_bytes": base.peak_reserved,
        "peak_bytes": answer["peak_reserved_bytes"],
        "requests": requests.requests,
        "torch": replays.torch,
        "is_lower_bound": is_low,
        "out_of_memory_step": stopped["step"],
        "out_of_memory_bytes": stopped["requested_bytes"],
    }))
}

fn text(base: &Requests, found: &Value, options: &Options) -> String {
    let size = |value: &Value| options.units.show(value.as_i64().unwrap_or(0)).to_string();
    let peak = format!(
        "device {}: peak of reserved memory {} instead of {}",
        base.device,
        size(&found["peak_bytes"]),
        options.units.show(base.peak_reserved)
    );
    let by = format!("replayed with the allocator of torch {}", found["torch"].as_str().unwrap_or_default());
    match found["out_of_memory_bytes"].as_i64() {
        Some(bytes) => {
            format!("{peak}, then out of memory at a request of {}, {by}", options.units.show(bytes))
        }
        None if found["is_lower_bound"] == true => {
            format!(
                "{peak}, {by}: a lower bound, because blocks of a second forward or of a gathered unit come and go in turn"
            )
        }
        None => format!("{peak}, {by}; it fits"),
    }
}
