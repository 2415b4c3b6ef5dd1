//! The arguments that several commands share, and their conversion into the options of a report or an export.

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::{Result, anyhow};
use clap::builder::{PossibleValuesParser, RangedU64ValueParser};
use clap::{Arg, ArgAction, ArgMatches, ValueHint, value_parser};
use memtrace_analysis::options::{Flag, Options, parse_steps, parse_window};
use memtrace_analysis::render::formats::Form;
use memtrace_analysis::state::replay::{CPU, Window};
use memtrace_trace::config;
use memtrace_trace::units::Unit;

use crate::terminal;

/// The default folder of the traces.
pub(crate) const DEFAULT_FOLDER: &str = "memtrace-out";

/// The name of the option of [`end_with_parent_arg`].
pub(crate) const END_WITH_PARENT: &str = "end-with-parent";

/// Returns `--phantom` and its options, which run the program on a simulated GPU.
pub(crate) fn phantom_args() -> [Arg; 3] {
    [
        Arg::new("phantom").long("phantom").value_name("CARD").help(
            "Simulate the GPU, no device needed: h100-80g, 8xa100-80g, mem=48g,cc=8.9; `run --phantom list` \
             lists the cards",
        ),
        Arg::new("phantom-dynamic")
            .long("phantom-dynamic")
            .value_name("HOW")
            .requires("phantom")
            .value_parser(PossibleValuesParser::new(["full", "half", "empty"]))
            .help(
                "Assumed size of results that depend on computed values (nonzero, unique, masks) [default: \
                 full]",
            ),
        Arg::new("phantom-fault")
            .long("phantom-fault")
            .value_name("FAULT")
            .requires("phantom")
            .action(ArgAction::Append)
            .help(
                "Make the simulated GPU fail, to test a script's recovery: oom, ecc or lost at step:N, \
                 alloc:N, bytes:SIZE or call:NAME:N, such as oom@step:3 or ecc@call:cudaLaunchKernel:500; \
                 oom*2@alloc:7 fails two calls (repeatable)",
            ),
    ]
}

/// Returns the option `--past-oom`, which lets the program continue past the capacity of the simulated GPU.
pub(crate) fn past_oom_arg() -> Arg {
    Arg::new("past-oom").long("past-oom").requires("phantom").action(ArgAction::SetTrue).help(
        "Let the program continue past the memory of the simulated GPU; the summary shows how much memory \
         it needs",
    )
}

/// Returns the hidden option `--end-with-parent PID`, with which `memtrace mcp` starts this command.
pub(crate) fn end_with_parent_arg() -> Arg {
    Arg::new(END_WITH_PARENT).long(END_WITH_PARENT).hide(true).value_parser(value_parser!(i32))
}

/// Lets the kernel end this process when its parent ends, if `--end-with-parent` is given. Nothing else ends it
/// when the parent is killed.
///
/// # Errors
/// When the parent has ended already.
pub(crate) fn end_with_parent(matches: &ArgMatches) -> Result<()> {
    use rustix::process::{Signal, getppid, set_parent_process_death_signal};
    let Some(parent) = matches.get_one::<i32>(END_WITH_PARENT) else { return Ok(()) };
    set_parent_process_death_signal(Some(Signal::TERM))?;
    if getppid().map(rustix::process::Pid::as_raw_pid) != Some(*parent) {
        return Err(anyhow!("the process {parent}, with which this one should end, is not its parent"));
    }
    Ok(())
}

/// Returns the option `--no-host-values`, with which a program can build a model that is larger than the
/// host's memory.
pub(crate) fn no_host_values_arg() -> Arg {
    Arg::new("no-host-values").long("no-host-values").requires("phantom").action(ArgAction::SetTrue).help(
        "Keep no values of floating-point CPU tensors of 1 MiB or more: a model larger than the host's memory can \
         be built on the CPU, in seconds",
    )
}

/// Returns the option `--ranks`, which names the ranks of a distributed job that run.
pub(crate) fn ranks_arg() -> Arg {
    Arg::new("ranks").long("ranks").value_name("LIST").requires("phantom").allow_hyphen_values(true).help(
        "Start only these ranks of a distributed job, such as 0, 0-3, first,last, all or one-per-stage; the others are stand-ins: \
         --phantom 512xh100-80g --ranks 0 -- torchrun --nnodes 64 --nproc-per-node 8 train.py",
    )
}

/// Returns an option for each environment variable that a user may set for one run.
pub(crate) fn setting_args() -> impl Iterator<Item = Arg> {
    config::options().map(|variable| {
        let option = variable.option();
        let default = if variable.default.is_empty() { "none" } else { variable.default };
        Arg::new(variable.name)
            .long(option)
            .value_name("VALUE")
            .value_parser(value_parser!(OsString))
            .help(format!("{} [default: {default}]", variable.help))
            .help_heading("Settings (each is also a variable, such as MEMTRACE_OPS)")
    })
}

/// Returns the variables that the options of [`setting_args`] set, with their values.
///
/// # Errors
/// When a value is invalid; the message lists the valid values.
pub(crate) fn settings(matches: &ArgMatches) -> Result<Vec<(&'static str, OsString)>> {
    let mut settings = Vec::new();
    for variable in config::options() {
        let Some(value) = matches.get_one::<OsString>(variable.name) else { continue };
        config::check(variable, value)
            .map_err(|why| anyhow!("--{} {}: {why}", variable.option(), value.to_string_lossy()))?;
        settings.push((variable.name, value.clone()));
    }
    Ok(settings)
}

/// Returns the argument for the program to run and its arguments. An unknown option before the program is
/// refused; options after it belong to the program.
pub(crate) fn program_arg() -> Arg {
    Arg::new("command")
        .value_name("COMMAND")
        .num_args(1..)
        .trailing_var_arg(true)
        .value_parser(value_parser!(OsString))
}

/// Returns the option `-o DIR`, the folder of the traces.
pub(crate) fn out_arg(help: &'static str) -> Arg {
    Arg::new("out")
        .short('o')
        .long("out")
        .value_name("DIR")
        .value_parser(value_parser!(PathBuf))
        .value_hint(ValueHint::DirPath)
        .help(help)
}

/// Returns the option `--json`.
pub(crate) fn json_arg() -> Arg {
    Arg::new("json").long("json").action(ArgAction::SetTrue).help(JSON_HELP)
}

const JSON_HELP: &str = "Print the answer as JSON";

/// Returns the argument for the trace to read; [`crate::trace_input::open_arg`] opens it.
pub(crate) fn trace_arg(name: &'static str) -> Arg {
    Arg::new(name).value_name(name).value_parser(value_parser!(PathBuf)).value_hint(ValueHint::AnyPath).help(
        format!("A trace: a file, or the folder of a run [default: the newest run in {DEFAULT_FOLDER}]"),
    )
}

/// Returns the argument for a report's or an export's own option.
pub(crate) fn flag_arg(flag: &Flag) -> Arg {
    let mut arg = Arg::new(flag.name).long(flag.name).help(flag.help);
    match flag.value {
        None => return arg.action(ArgAction::SetTrue),
        Some(value) => arg = arg.value_name(value),
    }
    if !flag.default.is_empty() {
        arg = arg.default_value(flag.default);
    }
    if !flag.choices.is_empty() {
        arg = arg.value_parser(PossibleValuesParser::new(flag.choices));
    }
    arg
}

/// Parses the value of `--device`.
fn device(text: &str) -> std::result::Result<i32, String> {
    if text == "cpu" {
        return Ok(CPU);
    }
    text.parse().map_err(|_| "expected a number, or cpu".to_owned())
}

/// Returns the options that every report takes.
pub(crate) fn shared_args() -> [Arg; 11] {
    let arg = |name: &'static str, value: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name(value).help(help).help_heading("Shared options")
    };
    let switch = |name: &'static str, help: &'static str| {
        Arg::new(name).long(name).action(ArgAction::SetTrue).help(help).help_heading("Shared options")
    };
    [
        switch("json", JSON_HELP),
        arg("format", "FORM", "Print the answer in this form: markdown to paste, csv for its tables alone")
            .default_value("text")
            .value_parser(PossibleValuesParser::new(["text", "markdown", "csv"])),
        arg("top", "N", "Print at most N lines of each list")
            .value_parser(RangedU64ValueParser::<usize>::new().range(1..)),
        arg(
            "device",
            "ORDINAL",
            "Only this device: a GPU's number, cpu for CPU tensors, or -1 for pinned memory",
        )
        .value_parser(device)
        .allow_negative_numbers(true),
        arg("rank", "RANK", "Only this rank").value_parser(value_parser!(i32)).allow_negative_numbers(true),
        arg("window", "T0:T1", "Only this time span, from the start of the trace: 1.5s:2s, 200ms:, :3")
            .allow_hyphen_values(true),
        arg("step", "A:B", "Only these steps, both included: 3:5, 3:, 3").allow_hyphen_values(true),
        arg("units", "UNIT", "Unit of sizes")
            .default_value("auto")
            .value_parser(PossibleValuesParser::new(["auto", "B", "KiB", "MiB", "GiB"])),
        arg("output", "FILE", "Write the answer to this file")
            .short('o')
            .value_parser(value_parser!(PathBuf)),
        arg("color", "WHEN", "Colour the text")
            .default_value("auto")
            .value_parser(PossibleValuesParser::new(["auto", "always", "never"])),
        switch("lenient", "Skip and count invalid lines, and read a broken file up to the error"),
    ]
}

/// Returns the options from the shared arguments and from a report's own `flags`. With `to_stdout`, they
/// include color and the terminal's width.
///
/// # Errors
/// When a value is invalid; the message shows valid values.
pub(crate) fn options(flags: &[Flag], matches: &ArgMatches, to_stdout: bool) -> Result<Options> {
    let text = |name: &str| matches.try_get_one::<String>(name).ok().flatten().map(String::as_str);
    let mut window = Window::default();
    if let Some(range) = text("window") {
        (window.from_ns, window.to_ns) = parse_window(range)?;
    }
    if let Some(range) = text("step") {
        (window.from_step, window.to_step) = parse_steps(range)?;
    }
    let mut options = Options {
        device: matches.get_one("device").copied(),
        // Not every command has this option: `memtrace report` does not.
        top: matches.try_get_one("top").ok().flatten().copied(),
        units: text("units").unwrap_or("auto").parse().map_err(|why: String| anyhow!(why))?,
        window,
        lenient: matches.get_flag("lenient"),
        ..Options::default()
    };
    options.form = match text("format") {
        Some("markdown") => Form::Markdown,
        Some("csv") => Form::Csv,
        _ => Form::Text,
    };
    if options.form == Form::Csv && text("units") == Some("auto") {
        options.units = Unit::B;
    }
    if to_stdout && options.form == Form::Text {
        let stdout = std::io::stdout();
        options.paint = terminal::use_colour(text("color").unwrap_or("auto"), &stdout);
        options.width = terminal::width(&stdout);
    }
    for flag in flags {
        if flag.value.is_none() {
            if matches.get_flag(flag.name) {
                options.values.insert(flag.name, String::new());
            }
        } else if let Some(value) = text(flag.name) {
            options.values.insert(flag.name, value.to_owned());
        }
    }
    Ok(options)
}

/// Formats the examples of a command for the end of its help: each command line without `memtrace`, and its
/// purpose.
pub(crate) fn examples(examples: &[(&str, &str)]) -> String {
    let width = examples.iter().map(|(line, _)| line.len()).max().unwrap_or(0);
    let lines: Vec<String> =
        examples.iter().map(|(line, about)| format!("  memtrace {line:width$}  {about}")).collect();
    format!("Examples:\n{}", lines.join("\n"))
}
