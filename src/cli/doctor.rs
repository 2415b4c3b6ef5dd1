//! `memtrace doctor`: would a program of this Python be traced here, and what of it would be seen?
//!
//! It runs that Python with the library preloaded, asks it what there is, has it train for one step
//! where there is a device, and reads the trace. So each line tells what happened, not what should.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, anyhow};
use clap::ArgMatches;
use memtrace_analysis::page::{Cell, Page, Side, Style, Table};
use memtrace_cards::{CARD_VARIABLE, Spec};
use memtrace_trace::config::Settings;
use memtrace_trace::reader::Reader;
use memtrace_trace::units::Unit;
use memtrace_trace::{EventName, Meta};
use serde_json::{Value, json};

use crate::terminal;
use crate::traced::{HELLO, PHANTOM, Scratch, TRACER, library, preload_list, run_id};

/// What the Python runs.
const PROBE: &str = include_str!("doctor.py");
/// Begins the line with its answers.
const ANSWER: &str = "memtrace-doctor ";

/// How a thing is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// As it should be.
    Ok,
    /// The trace will lack something.
    Degraded,
    /// There will be no trace.
    Missing,
    /// Good to know.
    Note,
}

impl State {
    fn word(self) -> (&'static str, Style) {
        match self {
            State::Ok => ("ok", Style::Strong),
            State::Degraded => ("degraded", Style::Alarm),
            State::Missing => ("missing", Style::Alarm),
            State::Note => ("note", Style::Faint),
        }
    }
}

struct Line {
    what: &'static str,
    state: State,
    says: String,
    todo: String,
}

#[derive(Default)]
struct Findings {
    lines: Vec<Line>,
    /// How the phantom answers each name, by kind; null without one.
    answers: Value,
}

impl Findings {
    fn add(&mut self, what: &'static str, state: State, says: impl Into<String>, todo: impl Into<String>) {
        self.lines.push(Line { what, state, says: says.into(), todo: todo.into() });
    }

    fn ok(&mut self, what: &'static str, says: impl Into<String>) {
        self.add(what, State::Ok, says, "");
    }

    /// Good, or `otherwise` with what to do.
    fn check(&mut self, what: &'static str, good: bool, says: impl Into<String>, bad: (State, &str, &str)) {
        if good { self.ok(what, says) } else { self.add(what, bad.0, bad.1, bad.2) }
    }
}

/// What the trace of the step of training has.
#[derive(Default)]
struct Seen {
    events: BTreeMap<&'static str, u64>,
    requested: u64,
    with_op: u64,
    with_module: u64,
    with_stream: u64,
    backward: u64,
    nvtx: bool,
    meta: Meta,
}

impl Seen {
    fn read(path: &Path) -> Result<Seen> {
        let mut reader = Reader::open(path)?;
        let mut seen = Seen { meta: reader.meta().clone(), ..Seen::default() };
        while let Some(row) = reader.next_row()? {
            *seen.events.entry(row.event.as_str()).or_default() += 1;
            seen.nvtx |= row.event == EventName::RangeBegin && row.api == "nvtx";
            if row.event == EventName::Alloc {
                seen.requested += u64::from(row.requested_bytes >= 0);
                seen.with_op += u64::from(row.op.starts_with("aten::"));
                seen.with_module += u64::from(row.module.starts_with("Linear"));
                seen.with_stream += u64::from(row.stream != 0);
                seen.backward += u64::from(row.phase == "backward");
            }
        }
        Ok(seen)
    }

    fn of(&self, event: EventName) -> u64 {
        self.events.get(event.as_str()).copied().unwrap_or(0)
    }
}

/// Looks, and says what it found.
pub(crate) fn run(matches: &ArgMatches) -> Result<ExitCode> {
    let mut found = Findings::default();
    let card = matches.get_one::<String>("phantom");
    if let Some(card) = card {
        Spec::parse(card).map_err(|error| anyhow!("--phantom {card}: {error}"))?;
    }
    let python: Vec<OsString> = match matches.get_many::<OsString>("command") {
        Some(words) => words.cloned().collect(),
        None => vec!["python3".into()],
    };
    system(&mut found);
    let out = matches.get_one::<PathBuf>("out").cloned();
    out_folder(&mut found, &out.unwrap_or_else(|| Settings::from_env().0.out));
    for warning in Settings::from_env().1 {
        found.add("settings", State::Degraded, warning, "");
    }
    match library(TRACER) {
        Ok(tracer) => probe(&mut found, &tracer, &python, card)?,
        Err(error) => found.add("library", State::Missing, format!("{error:#}"), ""),
    }
    let works = found.lines.iter().all(|line| line.state != State::Missing);
    let mut stdout = std::io::stdout().lock();
    if matches.get_flag("json") {
        let lines = found.lines.iter().map(|line| {
            json!({ "what": line.what, "state": line.state.word().0, "says": line.says, "todo": line.todo })
        });
        writeln!(
            stdout,
            "{:#}",
            json!({ "works": works, "findings": lines.collect::<Vec<_>>(), "phantom_answers": found.answers })
        )?;
    } else {
        let mut page = Page::new(terminal::paints("auto", &stdout), None);
        let mut table = Table::new(&[("", Side::Left), ("", Side::Left), ("", Side::Left)]);
        for line in &found.lines {
            let (word, style) = line.state.word();
            table.row([Cell::new(word, style), line.what.into(), line.says.as_str().into()]);
            if !line.todo.is_empty() {
                table.row(["".into(), "".into(), Cell::new(format!("-> {}", line.todo), Style::Command)]);
            }
        }
        page.table(&table);
        page.gap();
        let tried = found.lines.iter().any(|line| line.what == "blocks" && line.state == State::Ok);
        page.plain(match (works, tried) {
            (true, true) => "Programs of this Python are traced here.",
            (true, false) => "Programs of this Python would be traced, as far as can be told.",
            (false, _) => "Tracing would not work.",
        });
        stdout.write_all(page.text().as_bytes())?;
    }
    Ok(ExitCode::from(u8::from(!works)))
}

/// The machine: what is out of scope, and where events go before they are written.
fn system(found: &mut Findings) {
    let linux = cfg!(all(target_os = "linux", target_arch = "x86_64"));
    found.check(
        "system",
        linux && cfg!(target_env = "gnu"),
        "Linux on x86-64 with glibc",
        (State::Missing, "not Linux on x86-64 with glibc", "musl and other systems are out of scope"),
    );
    if Path::new("/dev/kfd").exists() && !Path::new("/proc/driver/nvidia/version").exists() {
        found.add("system", State::Missing, "an AMD GPU", "ROCm is out of scope");
    }
    let wanted = Settings::from_env().0.buffer_bytes as u64;
    let free = rustix::fs::statvfs("/dev/shm").map_or(0, |stat| stat.f_bavail * stat.f_frsize);
    let show = |bytes: u64| Unit::Auto.show(bytes as i64).to_string();
    found.check(
        "journal",
        free / 4 >= wanted,
        format!("/dev/shm has {} free, the journal takes {}", show(free), show(wanted)),
        (
            State::Degraded,
            &format!("/dev/shm has {} free: the journal of {} goes to a disk", show(free), show(wanted)),
            "give the container more (docker run --shm-size 1g), or set MEMTRACE_BUFFER=4m",
        ),
    );
}

/// Can traces be written there?
fn out_folder(found: &mut Findings, folder: &Path) {
    let shown = folder.display();
    let made = !folder.exists();
    let there = fs::create_dir_all(folder);
    let file = folder.join(format!(".memtrace-doctor-{}", std::process::id()));
    let written = there.and_then(|()| fs::File::create_new(&file));
    let _ = fs::remove_file(&file);
    if made {
        let _ = fs::remove_dir(folder);
    }
    match written {
        Ok(_) => found.ok("traces", format!("can be written to {shown}")),
        Err(error) => found.add(
            "traces",
            State::Missing,
            format!("cannot be written to {shown}: {error}"),
            "set MEMTRACE_OUT, or memtrace run -o, to a folder that can be written",
        ),
    }
}

/// Runs the Python with the library preloaded and judges its answers.
fn probe(found: &mut Findings, tracer: &Path, python: &[OsString], card: Option<&String>) -> Result<()> {
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
        Ok(files) => files
            .flatten()
            .map(|file| file.path())
            .find(|file| {
                let name = file.to_string_lossy();
                name.ends_with(".csv") && !name.ends_with(".stacks.csv")
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

fn torch(found: &mut Findings, answer: &Value) {
    let word = |index: usize| answer["torch"][index].as_str().unwrap_or_default();
    let (version, cuda, hip) = (word(0), word(1), word(2));
    if !hip.is_empty() {
        found.add("torch", State::Missing, format!("{version} for ROCm {hip}"), "ROCm is out of scope");
        return;
    }
    if cuda.is_empty() {
        found.add(
            "torch",
            State::Missing,
            format!("{version}, a build without CUDA"),
            "install one with CUDA",
        );
        return;
    }
    let mut numbers = version.split(['.', '+']).map(|part| part.parse::<u32>().unwrap_or(0));
    let number = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let says = format!("{version}, CUDA {cuda}");
    if number < (2, 1) {
        found.add(
            "torch",
            State::Degraded,
            format!("{says}: older than 2.1"),
            "only 2.1 and later are tested",
        );
    } else {
        found.ok("torch", says);
    }
    let cudart = answer["cudart"].as_array().map_or(0, Vec::len);
    found.check(
        "runtime",
        cudart > 0,
        "torch uses a shared libcudart: its calls are seen",
        (
            State::Degraded,
            "torch has a static CUDA runtime in it",
            "segments are told from the allocator's totals",
        ),
    );
}

fn device(found: &mut Findings, answer: &Value, phantom: bool) {
    if answer["cuda"] != true {
        let todo = if phantom { "see the errors below" } else { "without a GPU: memtrace doctor --phantom" };
        let state = if phantom { State::Missing } else { State::Degraded };
        found.add("device", state, "torch sees no GPU here, so nothing was tried", todo);
        return;
    }
    let driver = answer["driver"].as_str().unwrap_or("unknown");
    for (ordinal, device) in answer["devices"].as_array().into_iter().flatten().enumerate() {
        let bytes = Unit::Auto.show(device[1].as_i64().unwrap_or(0));
        let name = device[0].as_str().unwrap_or_default();
        found.ok("device", format!("{ordinal}: {name}, {bytes}, driver {driver}"));
    }
    if let Some(card) = answer["phantom"]["card"].as_str() {
        let list = |name: &str| -> Vec<String> {
            let calls = answer["phantom"][name].as_object();
            calls.map_or(Vec::new(), |calls| calls.iter().map(|(call, n)| format!("{call} {n}x")).collect())
        };
        let (guessed, refused) = (list("guessed_calls"), list("refused_calls"));
        found.add(
            "phantom",
            State::Note,
            format!("this is {card}, which is not there; kernels compute nothing"),
            "",
        );
        if !guessed.is_empty() {
            found.add("phantom", State::Note, format!("guessed in this step: {}", guessed.join(", ")), "");
        }
        if !refused.is_empty() {
            found.add("phantom", State::Note, format!("refused in this step: {}", refused.join(", ")), "");
        }
        answers(found, &answer["answers"]);
        found.answers = answer["answers"].clone();
    }
}

/// How the phantom answers what a program may ask, from its own table.
fn answers(found: &mut Findings, answers: &Value) {
    let names = |kind: &str| -> Vec<&str> {
        answers[kind].as_array().into_iter().flatten().filter_map(Value::as_str).collect()
    };
    for (kind, means) in [
        ("real", "names are answered as the real library would, as far as memory can tell"),
        ("success", "do nothing and succeed: the device would have done the work"),
        ("guess", "are answered by a guess"),
        ("unsupported", "are refused, by name"),
        ("passed", "are left to the real library"),
    ] {
        let all = names(kind);
        let shown = if kind == "guess" { format!(": {}", all.join(", ")) } else { String::new() };
        found.add("answers", State::Note, format!("{} {means}{shown}", all.len()), "");
    }
    let (missing, wanted) = (names("missing"), names("wanted").len());
    found.check(
        "answers",
        missing.is_empty(),
        format!("nothing of the {wanted} names that this torch wants is missing; --json lists all"),
        (
            State::Degraded,
            &format!("missing of the {wanted} names that this torch wants: {}", missing.join(", ")),
            "a program that calls one of them ends there; please report this version",
        ),
    );
}

/// With no device nothing can be tried: what the hooks need is there, or it is not.
fn symbols(found: &mut Findings, answer: &Value) {
    for (what, symbol, lost) in [
        ("reports", "blocks", "no blocks of the caching allocator"),
        ("ooms", "ooms", "no OOMs"),
        ("requested", "allocator", "requested_bytes is -1"),
        ("streams", "streams", "stream is 0"),
        ("ops", "ops", "no ops"),
        ("ops", "op_names", "no ops"),
    ] {
        let state = if symbol == "blocks" { State::Missing } else { State::Degraded };
        let there = answer["symbols"][symbol] == true;
        found.check(
            what,
            there,
            format!("this torch has what is hooked ({symbol})"),
            (
                state,
                &format!("this torch has no symbol for it ({symbol}): {lost}"),
                "please report this version",
            ),
        );
    }
    nvtx_flavour(found, answer, None);
}

fn nvtx_flavour(found: &mut Findings, answer: &Value, seen: Option<bool>) {
    let flavour = match answer["nvtx"].as_str() {
        Some("legacy") => "the legacy library, its calls interposed",
        Some("header") => "header-only, through NVTX_INJECTION64_PATH",
        _ => "none in this torch",
    };
    match seen {
        Some(false) => {
            found.add("ranges", State::Degraded, format!("NVTX ranges are not seen ({flavour})"), "");
        }
        _ => found.ok("ranges", format!("NVTX: {flavour}")),
    }
}

/// Judges the trace of the step of training.
fn captured(found: &mut Findings, seen: &Seen, answer: &Value) {
    let allocs = seen.of(EventName::Alloc);
    let show = |count: u64, what: &str| format!("{count} of {allocs} blocks {what}");
    let reported = seen.meta.allocator.caching && seen.meta.allocator.backend == "native";
    found.check(
        "blocks",
        allocs > 0,
        format!("{allocs} allocations, {} frees of the caching allocator", seen.of(EventName::Free)),
        (
            State::Missing,
            "no block was reported",
            "PYTORCH_CUDA_ALLOC_CONF with another backend, or caching off?",
        ),
    );
    let segments = seen.of(EventName::SegmentAlloc) + seen.of(EventName::SegmentMap);
    found.check(
        "segments",
        segments > 0 || !reported,
        format!("{segments} taken from CUDA"),
        (State::Degraded, "no segment was seen", "reserved memory is not in the trace"),
    );
    let fine = |count: u64| count > 0;
    found.check(
        "requested",
        fine(seen.requested),
        show(seen.requested, "have the size that was asked for"),
        (
            State::Degraded,
            "the size that was asked for is not seen",
            "requested_bytes is -1; please report this version",
        ),
    );
    found.check(
        "ops",
        fine(seen.with_op) && seen.of(EventName::Op) > 0,
        show(seen.with_op, "have an op"),
        (State::Degraded, "ops are not seen", "see MEMTRACE_OPS; please report this version"),
    );
    if seen.meta.ops == "io" {
        found.check(
            "io",
            seen.of(EventName::Io) > 0,
            format!("{} reads, writes and module calls", seen.of(EventName::Io)),
            (
                State::Degraded,
                "what ops read and write is not seen",
                "ops have the rows of MEMTRACE_OPS=all; please report this version",
            ),
        );
    }
    found.check(
        "modules",
        fine(seen.with_module),
        show(seen.with_module, "have a module"),
        (State::Degraded, "modules are not seen", "see MEMTRACE_MODULES; please report this version"),
    );
    found.check(
        "phases",
        fine(seen.backward),
        show(seen.backward, "are of the backward pass"),
        (State::Degraded, "the backward pass is not told apart", "name phases by NVTX ranges"),
    );
    found.check(
        "tags",
        seen.of(EventName::Tag) > 0,
        format!("{} for parameters, gradients and optimizer state", seen.of(EventName::Tag) / 2),
        (State::Degraded, "parameters are not told from activations", "reports infer categories instead"),
    );
    found.check(
        "streams",
        fine(seen.with_stream) && seen.of(EventName::FreeCompleted) > 0,
        "the stream of a block, and the end of its use by others",
        (State::Degraded, "streams are not seen in full", "active_bytes may be early"),
    );
    found.check(
        "pinned",
        seen.of(EventName::HostAlloc) > 0,
        format!("{} allocations of pinned memory", seen.of(EventName::HostAlloc)),
        (State::Degraded, "pinned memory is not seen", ""),
    );
    nvtx_flavour(found, answer, Some(seen.nvtx));
    let journal = &seen.meta.journal;
    found.check(
        "journal",
        !journal.is_empty(),
        format!("was {journal}"),
        (State::Degraded, "there was no place for it", "a killed process loses its last events"),
    );
    for what in &seen.meta.degraded {
        found.add("trace", State::Degraded, what.clone(), "");
    }
    let lost = seen.of(EventName::Lost);
    found.check(
        "trace",
        lost == 0 && seen.of(EventName::End) == 1,
        "complete, and nothing was lost",
        (State::Degraded, "it is incomplete", ""),
    );
}
