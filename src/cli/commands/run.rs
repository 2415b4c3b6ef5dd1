//! `memtrace run`: runs a program with the tracer preloaded, and prints the summary of its trace.
//!
//! The program keeps its standard streams, its signals and its exit status. This command writes only to
//! stderr, and only before the program starts or after it has ended.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus};

use anyhow::{Context, Result, bail};
use clap::{Arg, ArgAction, ArgMatches, Command};
use memtrace_analysis::options::Options;
use memtrace_analysis::read::input::Input;
use memtrace_analysis::render::printer::{Printer, Side, Table};
use memtrace_analysis::reports;
use memtrace_cards::{CARDS, Spec};
use memtrace_recover::Fate;
use memtrace_trace::config::Settings;
use memtrace_trace::host::HostFiles;
use memtrace_trace::text::printable;
use memtrace_trace::units::Unit;

use crate::child_env::{
    PhantomArgs, Scratch, TracerFacts, gib, has_gpu, run_id, spare_foreign_program, traced_command,
};
use crate::cluster::job::Job;
use crate::cluster::members::{Ended, Launch};
use crate::error_message::message;
use crate::libraries::TRACER;
use crate::out_folder::OutFolder;
use crate::{args, load_failure, recovery, signals, terminal, trace_input};

/// Returns the definition of the command `memtrace run`.
pub(crate) fn command() -> Command {
    Command::new("run")
        .about("Run a program, trace it, and print the summary")
        .after_help(args::examples(&[
            ("run -- python train.py", "trace on the GPU, into a new folder in memtrace-out"),
            ("run -o out --phantom h100-80g -- python train.py", "on a simulated GPU, no device needed"),
            (
                "run --ops io -- torchrun --nproc-per-node 8 train.py",
                "every rank, with the tensors of each op",
            ),
            ("run --phantom list", "the cards that can be simulated"),
        ]))
        .arg(args::out_arg("Write the traces to this folder [default: a new folder in memtrace-out]"))
        .args(args::phantom_args())
        .arg(args::past_oom_arg())
        .arg(args::no_host_values_arg())
        .arg(args::ranks_arg())
        .arg(
            Arg::new("quiet")
                .short('q')
                .long("quiet")
                .action(ArgAction::SetTrue)
                .help("Print no summary at the end"),
        )
        .args(args::setting_args())
        .arg(args::end_with_parent_arg())
        .arg(args::program_arg().help("The program and its arguments"))
}

/// Runs the program, and exits as it did.
///
/// # Errors
/// When the program cannot be traced. A program that cannot be started gives status 127 or 126. If only the
/// trace cannot be read, a message is printed and the exit status is the program's.
pub(crate) fn run(matches: &ArgMatches) -> Result<ExitCode> {
    if matches.get_one::<String>("phantom").is_some_and(|card| card == "list") {
        return list_cards();
    }
    args::end_with_parent(matches)?;
    let command: Vec<&OsString> = matches.get_many("command").into_iter().flatten().collect();
    let Some(program) = command.first() else {
        bail!("no program was given; for example: memtrace run -- python train.py");
    };
    if let Some(ranks) = matches.get_one::<String>("ranks") {
        return run_ranks(matches, ranks, &command);
    }
    let phantom = PhantomArgs::from_matches(matches)?;
    let settings = args::settings(matches)?;
    let run_id = run_id();
    let scratch = Scratch::new(&run_id)?;
    let out = OutFolder::new(matches.get_one::<PathBuf>("out"))?;
    let mut child = traced_command(&scratch, &command, &out.folder, &run_id, phantom.as_ref())?;
    child.envs(settings);
    spare_foreign_program(&mut child, program);
    if let Some(phantom) = phantom.as_ref().filter(|_| !matches.get_flag("quiet")) {
        terminal::say(&format!("simulated GPU {}: {}", phantom.card, phantom.free_at_start()));
    }
    let forwarder = signals::Forwarder::start()?;
    let kills = Kills::now();
    let mut child = match child.spawn() {
        Ok(child) => child,
        Err(error) => return Ok(not_started(program, &error)),
    };
    forwarder.set_child(child.id());
    let pid = child.id();
    let status = child.wait().context("cannot wait for the program")?;
    let asked = forwarder.asked_to_end();
    forwarder.stop();

    let tracer = scratch.tracer();
    let fate = fate_of(pid, status, asked);
    let reason = || {
        let killed = fate.and_then(|fate| kills.reason(fate));
        killed.unwrap_or_else(|| no_trace_reason(program, tracer, phantom.is_some(), status, fate))
    };
    show_trace(matches, out, &run_id, fate, reason);
    drop(scratch);
    Ok(signals::end_like(status))
}

/// Runs some ranks of a distributed job on a simulated cluster, and exits with the status of the first rank
/// that failed, if any.
fn run_ranks(matches: &ArgMatches, ranks: &str, command: &[&OsString]) -> Result<ExitCode> {
    let card = matches.get_one::<String>("phantom").context("--ranks needs --phantom")?;
    let job = Job::new(card, ranks, command, |name| std::env::var(name).ok())?;
    let phantom = PhantomArgs::of_card(matches, &job.card)?;
    let settings = args::settings(matches)?;
    let run_id = run_id();
    let out = OutFolder::new(matches.get_one::<PathBuf>("out"))?;
    if !matches.get_flag("quiet") {
        terminal::say(&format!("simulated cluster {card}: {}", job.summary()));
        terminal::say(&format!("each node has {}; on each card: {}", phantom.card, phantom.free_at_start()));
    }
    let launch =
        Launch { job: &job, phantom: &phantom, settings: &settings, out: &out.folder, run_id: &run_id };
    let (status, tracer) = match launch.run()? {
        Ended::With(status, tracer) => (status, tracer),
        Ended::NotStarted(program, error) => return Ok(not_started(&program, &error)),
        Ended::BySignal(signal) => {
            drop(out);
            return Ok(signals::end_by(signal));
        }
    };
    let program = job.command(0).into_iter().next().unwrap_or_default();
    show_trace(matches, out, &run_id, None, || no_trace_reason(&program, tracer, true, status, None));
    Ok(signals::end_like(status))
}

/// Reports that a program cannot be started. Returns the status that a shell has for "not found" or "found,
/// but not executable".
fn not_started(program: &OsStr, error: &io::Error) -> ExitCode {
    terminal::say(&format!("cannot run {}: {error}", Path::new(program).display()));
    ExitCode::from(if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 })
}

/// How many processes the kernel has killed because memory ran out: in this container, and on this machine.
/// `None` if unknown.
struct Kills {
    files: HostFiles,
    container: Option<i64>,
    machine: Option<i64>,
}

impl Kills {
    fn now() -> Kills {
        let files = HostFiles::default();
        let container = files.cgroup("self").and_then(|group| group.kills());
        Kills { container, machine: files.kills(), files }
    }

    /// Returns the reason why a program left no trace, if the kernel probably killed it because memory ran
    /// out. The program died by SIGKILL, and the number of such kills has grown since it started. It had not
    /// used a GPU yet, because otherwise its trace would exist.
    fn reason(&self, fate: Fate) -> Option<String> {
        let now = Kills::now();
        let rose = |before: Option<i64>, now: Option<i64>| before.zip(now).map(|(before, now)| now > before);
        let whose = match (rose(self.container, now.container), rose(self.machine, now.machine)) {
            _ if fate.signal != rustix::process::Signal::KILL.as_raw() => return None,
            (Some(true), _) => "the memory of the container",
            (None, Some(true)) => "the machine's memory",
            _ => return None,
        };
        let limit = self.files.cgroup("self").and_then(|group| group.limit());
        let limit = limit.map_or_else(String::new, |limit| format!(" (limit {})", Unit::Auto.show(limit)));
        Some(format!(
            "the kernel killed the program, because {whose} ran out{limit}, before it allocated GPU memory; \
             MEMTRACE_HOST_TENSORS=1 traces the time before"
        ))
    }
}

/// Returns the signal that ended the program, or `None` if it ended by itself. A shell whose child was killed
/// ends with 128 plus the signal, which counts, too. `asked` is the signal that asked this command to end.
fn fate_of(pid: u32, status: ExitStatus, asked: Option<i32>) -> Option<Fate> {
    if let Some(signal) = status.signal() {
        return Some(Fate { pid: Some(pid), signal, requested_signal: asked });
    }
    let signal = status.code()? - 128;
    (1..32).contains(&signal).then_some(Fate { pid: None, signal, requested_signal: asked })
}

/// Prints the summary of the trace, or why there is no trace. Removes `out` if it is empty.
fn show_trace(
    matches: &ArgMatches,
    out: OutFolder,
    run_id: &str,
    fate: Option<Fate>,
    reason: impl FnOnce() -> String,
) {
    let shown = trace_of(&out, run_id, fate).and_then(|input| match input {
        Some(_) if matches.get_flag("quiet") => Ok(()),
        Some(input) => print_summary(input, &out),
        None => {
            terminal::say(&format!("no trace: {}", reason()));
            Ok(())
        }
    });
    if let Err(error) = shown {
        terminal::say(&message(&error));
    }
}

/// Returns the traces of this launch, or `None` if it wrote none. The traces of killed processes are
/// completed.
fn trace_of(out: &OutFolder, run_id: &str, fate: Option<Fate>) -> Result<Option<Input>> {
    recovery::begin(&out.folder);
    let input = match trace_input::open_run(&out.folder, run_id) {
        Ok(input) if input.traces.is_empty() => return Ok(None),
        Ok(_) => recovery::complete(|| Ok(trace_input::open_run(&out.folder, run_id)?), fate)?,
        Err(memtrace_analysis::Error::Trace(error))
            if !matches!(error, memtrace_trace::Error::NoTrace { .. }) =>
        {
            return Err(error.into());
        }
        Err(_) => return Ok(None),
    };
    Ok(Some(Input { path: out.shown.clone(), ..input }))
}

/// Returns the reason why the program left no trace, and the next step.
fn no_trace_reason(
    program: &OsStr,
    tracer: TracerFacts,
    phantom: bool,
    status: ExitStatus,
    fate: Option<Fate>,
) -> String {
    // The simulated GPU is loaded before the tracer. If it cannot meet the request, it ends the program with
    // status 2, so the tracer is never loaded.
    if !tracer.was_loaded && phantom && status.code() == Some(2) {
        return "the program ended with status 2 before the tracer began; see the line above".to_owned();
    }
    if !tracer.was_loaded {
        return format!("{TRACER} was not loaded into the program: {}", load_failure::reason(program));
    }
    if !Settings::from_lookup(|name| std::env::var_os(name)).0.enabled {
        let value = std::env::var_os("MEMTRACE_ENABLED").unwrap_or_default();
        return format!("tracing is switched off: MEMTRACE_ENABLED={}", printable(&value.to_string_lossy()));
    }
    if tracer.failed {
        return "it could not be written; see memtrace's message above".to_owned();
    }
    if let Some(fate) = fate {
        return match fate.requested_signal.map(ExitStatus::from_raw) {
            Some(asked) => format!(
                "memtrace was asked to end ({asked}), and passed this on to the program before it allocated GPU \
                 memory"
            ),
            None => format!(
                "the program was killed ({}) before it allocated GPU memory",
                ExitStatus::from_raw(fate.signal)
            ),
        };
    }
    if !status.success() {
        return format!(
            "the program failed ({status}) before it allocated GPU memory; its own error is above"
        );
    }
    let mut reason = "the program allocated no GPU memory".to_owned();
    if !phantom && !has_gpu() {
        reason.push_str(
            "; this machine has no NVIDIA GPU: simulate one with memtrace run --phantom h100-80g -- ...",
        );
    }
    reason
}

fn print_summary(input: Input, out: &OutFolder) -> Result<()> {
    let report = reports::find("summary").context("there is no report summary")?;
    let stderr = io::stderr();
    let options = Options {
        paint: terminal::use_colour("auto", &stderr),
        width: terminal::width(&stderr),
        ..Options::default()
    };
    let answer = report.run(&[input], &options)?;
    let folder = out.shown.display().to_string();
    let text = format!("\nmemtrace: traced into {}\n{}", printable(&folder), answer.text());
    // An error means that stderr is closed.
    stderr.lock().write_all(text.as_bytes()).ok();
    Ok(())
}

fn list_cards() -> Result<ExitCode> {
    let mut stdout = io::stdout().lock();
    let mut page = Printer::new(terminal::use_colour("auto", &stdout), terminal::width(&stdout));
    let mut table = Table::new(&[
        ("card", Side::Left),
        ("GiB", Side::Right),
        ("free at the start", Side::Left),
        ("cc", Side::Right),
        ("SMs", Side::Right),
        ("name", Side::Left),
    ]);
    for card in CARDS {
        let [free, least, most] = Spec::from_card(card).free_at_start().map(gib);
        table.row([
            card.id.into(),
            gib(card.memory_mib << 20).into(),
            format!("{free} ({least} to {most})").into(),
            format!("{}.{}", card.cc.0, card.cc.1).into(),
            card.sms.to_string().into(),
            card.name.into(),
        ]);
    }
    page.table(&table);
    page.gap();
    page.plain("Several devices: 8xh100-80g");
    page.plain("Another size: h100-80g,mem=40g");
    page.plain("Another card: mem=48g,cc=8.9");
    page.plain("Another context: h100-80g,context=600m (the memory in use at the start)");
    stdout.write_all(page.text().as_bytes())?;
    Ok(ExitCode::SUCCESS)
}
