//! Runs the Python with the library preloaded.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use memtrace_cards::CARD_VARIABLE;
use memtrace_trace::config::Compression;
use memtrace_trace::files;
use serde_json::Value;

use super::findings::{Findings, State};
use super::torch::{device, symbols, torch};
use super::trace_check::{Seen, captured};
use crate::child_env::{HELLO, PHANTOM, Scratch, library, preload_list, run_id};

/// What the Python runs.
const PROBE: &str = include_str!("probe.py");
/// Begins the line with its answers.
const ANSWER: &str = "memtrace-doctor ";

/// Runs the Python with the library preloaded and judges its answers.
pub(super) fn probe(
    found: &mut Findings,
    tracer: &Path,
    python: &[OsString],
    card: Option<&String>,
) -> Result<()> {
    let scratch = Scratch::new(&run_id())?;
    let out = scratch.folder.join("out");
    let mut preload = vec![scratch.loadable(tracer)?];
    if card.is_some() {
        preload.push(scratch.loadable(&library(PHANTOM)?)?);
    }
    let [program, arguments @ ..] = python else { return Ok(()) };
    let mut command = Command::new(program);
    command.args(arguments).args(["-c", PROBE]).stdin(Stdio::null());
    for (name, _) in std::env::vars_os() {
        // The user's settings are looked at by themselves; here they would only stand in the way.
        if name.to_string_lossy().starts_with("MEMTRACE_") {
            command.env_remove(name);
        }
    }
    command.env("LD_PRELOAD", preload_list(&preload, std::env::var_os("LD_PRELOAD").as_deref()));
    command.env("MEMTRACE_OUT", &out).env(HELLO, scratch.hello()).env("PYTHONDONTWRITEBYTECODE", "1");
    if let Some(card) = card {
        command.env(CARD_VARIABLE, card);
    }
    let shown = Path::new(program).display().to_string();
    let output = match command.output() {
        Ok(output) => output,
        Err(error) => {
            found.add(
                "python",
                State::Missing,
                format!("cannot run {shown}: {error}"),
                "memtrace doctor -- PYTHON",
            );
            return Ok(());
        }
    };
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    let loaded = fs::metadata(scratch.hello()).is_ok_and(|file| file.len() > 0);
    let answer = stdout.lines().rev().find_map(|line| line.strip_prefix(ANSWER));
    let Some(answer) = answer.and_then(|text| serde_json::from_str::<Value>(text).ok()) else {
        let last = stderr.lines().last().unwrap_or("it said nothing");
        let says = format!("{shown} is not a Python, or it died: {}: {last}", output.status);
        found.add(
            "python",
            State::Missing,
            says,
            "memtrace doctor -- PYTHON, with the arguments that it needs",
        );
        return Ok(());
    };
    let words = |name: &str| -> Vec<String> {
        let of = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        answer[name].as_array().map_or(Vec::new(), |list| list.iter().map(of).collect())
    };
    found.ok("python", words("python").join(" "));
    if answer["subinterpreter"] == true {
        found.add("python", State::Degraded, "a subinterpreter", "module names come from the main one only");
    }
    let there = loaded && !words("preloaded").is_empty();
    found.check(
        "library",
        there,
        format!("{} is loaded into it", tracer.display()),
        (
            State::Missing,
            &format!("{} is not loaded into it", tracer.display()),
            "a set-user-id or static Python, or a wrapper that drops LD_PRELOAD: name the real one",
        ),
    );
    let libc = words("libc");
    if there && libc.first().is_some_and(|name| name != "glibc") {
        found.add(
            "library",
            State::Missing,
            format!("its libc is {}", libc.join(" ")),
            "musl is out of scope",
        );
    }
    if answer["no_torch"].is_string() {
        let says = answer["no_torch"].as_str().unwrap_or_default();
        found.add("torch", State::Missing, says, "name a Python that has PyTorch: memtrace doctor -- PYTHON");
        return Ok(());
    }
    torch(found, &answer);
    let seen = match fs::read_dir(&out) {
        Ok(entries) => entries
            .flatten()
            .map(|file| file.path())
            .find(|file| {
                let name = file.to_string_lossy();
                files::is_trace(&name) && files::compression(&name) == Compression::Off
            })
            .map(|file| Seen::read(&file).context("the trace cannot be read"))
            .transpose()?,
        Err(_) => None,
    };
    device(found, &answer, card.is_some());
    match seen {
        Some(seen) => captured(found, &seen, &answer),
        None if answer["cuda"] == true => {
            let says = stderr.lines().find(|line| line.starts_with("memtrace:")).unwrap_or("it said nothing");
            found.add("trace", State::Missing, format!("the program left none: {says}"), "");
        }
        None => symbols(found, &answer),
    }
    if let Some(errors) = answer["errors"].as_object() {
        for (what, error) in errors {
            found.add("probe", State::Note, format!("{what}: {}", error.as_str().unwrap_or_default()), "");
        }
    }
    Ok(())
}
