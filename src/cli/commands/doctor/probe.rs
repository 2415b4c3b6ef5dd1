//! Runs the Python with the tracer preloaded, and checks its answers.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};
use memtrace_cards::CARD_VARIABLE;
use memtrace_trace::config::Compression;
use memtrace_trace::files;
use memtrace_trace::hello::HELLO;
use serde_json::Value;

use super::findings::{Findings, State};
use super::torch::{check_device, check_symbols, check_torch};
use super::trace_check::{TraceCounts, check_trace};
use crate::child_env::{Scratch, python_command, run_id};
use crate::libraries::{PHANTOM, library};
use crate::signals::Forwarder;

/// The script that the Python interpreter runs.
const PROBE: &str = include_str!("probe.py");
/// The prefix of the script's output line with the answers as JSON.
const ANSWER_PREFIX: &str = "memtrace-doctor ";

/// Runs the Python with the tracer preloaded, and adds findings from its answers and its trace. Signals go to that
/// Python.
///
/// # Errors
/// When the temporary folder cannot be created, or the trace cannot be read.
pub(super) fn run_probe(
    findings: &mut Findings,
    tracer: &Path,
    python: &[OsString],
    card: Option<&String>,
    forwarder: &Forwarder,
) -> Result<()> {
    let scratch = Scratch::new(&run_id())?;
    let out = scratch.folder.join("out");
    let [program, ..] = python else { return Ok(()) };
    let mut command = probe_command(&scratch, &out, tracer, python, card)?;
    let shown = Path::new(program).display().to_string();
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    if let Ok(child) = &child {
        forwarder.set_child(child.id());
    }
    let output = child.and_then(Child::wait_with_output);
    forwarder.no_child();
    let output = match output {
        Ok(output) => output,
        Err(error) => {
            findings.add(
                "python",
                State::Missing,
                format!("cannot run {shown}: {error}"),
                "name a Python: memtrace doctor -- PYTHON",
            );
            return Ok(());
        }
    };
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    let answer = stdout.lines().rev().find_map(|line| line.strip_prefix(ANSWER_PREFIX));
    let Some(answer) = answer.and_then(|text| serde_json::from_str::<Value>(text).ok()) else {
        let last = stderr.lines().last().unwrap_or("stderr is empty");
        let message = format!("{shown} is not a Python, or it failed: {}: {last}", output.status);
        findings.add(
            "python",
            State::Missing,
            message,
            "name a Python, with the arguments that it needs: memtrace doctor -- PYTHON",
        );
        return Ok(());
    };
    check_python(findings, &answer, tracer, scratch.tracer_was_loaded());
    if answer["no_torch"].is_string() {
        let message = answer["no_torch"].as_str().unwrap_or_default();
        findings.add(
            "torch",
            State::Missing,
            message,
            "name a Python with PyTorch: memtrace doctor -- PYTHON",
        );
        return Ok(());
    }
    check_torch(findings, &answer);
    let counts = counts_in(&out)?;
    check_device(findings, &answer, card.is_some());
    match counts {
        Some(counts) => check_trace(findings, &counts, &answer),
        None if answer["cuda"] == true => {
            let message = stderr.lines().find(|line| line.starts_with("memtrace:"));
            let message = message.unwrap_or("memtrace: no message on stderr");
            findings.add("trace", State::Missing, format!("the training step left no trace: {message}"), "");
        }
        None => check_symbols(findings, &answer),
    }
    if let Some(errors) = answer["errors"].as_object() {
        for (question, error) in errors {
            findings.add(
                "probe",
                State::Note,
                format!("{question}: {}", error.as_str().unwrap_or_default()),
                "",
            );
        }
    }
    Ok(())
}

/// Returns the command that runs the probe, with its trace in `out`. `python` is not empty.
fn probe_command(
    scratch: &Scratch,
    out: &Path,
    tracer: &Path,
    python: &[OsString],
    card: Option<&String>,
) -> Result<Command> {
    let mut libraries = vec![tracer.to_owned()];
    if card.is_some() {
        libraries.push(library(PHANTOM)?);
    }
    let mut command = python_command(scratch, &python[0], &libraries)?;
    command.args(&python[1..]).args(["-c", PROBE]);
    command.env("MEMTRACE_OUT", out).env(HELLO, scratch.hello());
    if let Some(card) = card {
        command.env(CARD_VARIABLE, card);
    }
    Ok(command)
}

/// Adds findings about the interpreter, and whether the tracer was loaded into it.
fn check_python(findings: &mut Findings, answer: &Value, tracer: &Path, was_loaded: bool) {
    let list_of = |name: &str| -> Vec<String> {
        let of = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        answer[name].as_array().map_or(Vec::new(), |list| list.iter().map(of).collect())
    };
    findings.ok("python", list_of("python").join(" "));
    if answer["subinterpreter"] == true {
        findings.add(
            "python",
            State::Degraded,
            "this is a subinterpreter",
            "module names are traced in the main interpreter only",
        );
    }
    let loaded = was_loaded && !list_of("preloaded").is_empty();
    findings.check(
        "library",
        loaded,
        format!("{} is loaded into this Python", tracer.display()),
        (
            State::Missing,
            &format!("{} is not loaded into this Python", tracer.display()),
            "it is set-user-id or static, or a wrapper removes LD_PRELOAD; name the interpreter itself",
        ),
    );
    let libc = list_of("libc");
    if loaded && libc.first().is_some_and(|name| name != "glibc") {
        findings.add(
            "library",
            State::Missing,
            format!("its libc is {}", libc.join(" ")),
            "only glibc is supported",
        );
    }
}

/// Returns what the trace of the probe has, or `None` without a trace.
fn counts_in(out: &Path) -> Result<Option<TraceCounts>> {
    match fs::read_dir(out) {
        Ok(entries) => entries
            .flatten()
            .map(|file| file.path())
            .find(|file| {
                let name = file.to_string_lossy();
                files::is_trace(&name) && files::compression(&name) == Compression::Off
            })
            .map(|file| TraceCounts::read(&file).context("the trace cannot be read"))
            .transpose(),
        Err(_) => Ok(None),
    }
}
