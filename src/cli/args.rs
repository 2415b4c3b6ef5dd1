//! The command line. The reports come from their table; nothing here knows one by name.

use clap::{Arg, ArgAction, Command, ValueHint, builder::PossibleValuesParser, value_parser};
use memtrace_analysis::exports::EXPORTS;
use memtrace_analysis::options::Flag;
use memtrace_analysis::reports::{REPORTS, Report};
use std::path::PathBuf;

/// Where the traces are when nobody says.
pub(crate) const DEFAULT_FOLDER: &str = "memtrace-out";

/// The whole command.
pub(crate) fn command() -> Command {
    let help = Command::new("help")
        .about("What the variables and the columns mean, or the help of a command")
        .arg(Arg::new("topic").value_name("variables|columns|COMMAND"));
    Command::new("memtrace")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Where the GPU memory of a PyTorch run goes, with no change to the script")
        .after_help("Start with:  memtrace run -- python train.py")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .disable_help_subcommand(true)
        .infer_subcommands(true)
        .subcommand(run())
        .subcommand(fit())
        .subcommands(REPORTS.iter().map(|report| of_report(*report)))
        .subcommand(export())
        .subcommand(live())
        .subcommand(page())
        .subcommand(doctor())
        .subcommand(help)
}

fn run() -> Command {
    Command::new("run")
        .about("Run a program, trace it, and show the summary")
        .arg(
            Arg::new("out")
                .short('o')
                .long("out")
                .value_name("DIR")
                .value_parser(value_parser!(PathBuf))
                .value_hint(ValueHint::DirPath)
                .help("Where the traces go [default: a new folder in memtrace-out]"),
        )
        .args(phantom())
        .arg(
            Arg::new("quiet")
                .short('q')
                .long("quiet")
                .action(ArgAction::SetTrue)
                .help("No summary at the end"),
        )
        .arg(program().help("The program and its arguments"))
}

/// The device that is not there.
fn phantom() -> [Arg; 2] {
    [
        Arg::new("phantom").long("phantom").value_name("CARD").help(
            "Run on a device that is not there: h100-80g, 8xa100-80g, mem=48g,cc=8.9; `run --phantom list` shows all",
        ),
        Arg::new("phantom-dynamic")
            .long("phantom-dynamic")
            .value_name("HOW")
            .requires("phantom")
            .value_parser(PossibleValuesParser::new(["full", "half", "empty"]))
            .help("How much nonzero, unique and masks find on it: their size depends on values [default: full]"),
    ]
}

/// What is to run.
fn program() -> Arg {
    Arg::new("command")
        .value_name("COMMAND")
        .num_args(1..)
        .trailing_var_arg(true)
        .allow_hyphen_values(true)
        .value_parser(value_parser!(std::ffi::OsString))
}

fn fit() -> Command {
    let number = |name: &'static str, help: &'static str| {
        Arg::new(name)
            .long(name)
            .value_name("N")
            .value_parser(value_parser!(u64).range(1..=1 << 40))
            .conflicts_with("values")
            .help(help)
    };
    Command::new("fit")
        .about("The largest value with which a program fits, and what holds the memory there")
        .after_help(
            "Example:  memtrace fit --phantom h100-80g -- python train.py --batch {}\n\n\
             The program runs once for each value tried, as short as it can be: a step or two show the peak. A value fits \
             when it ends with status 0 and nothing ran out of memory. Exit status: 0, 1 when the program fails for another \
             reason, 3 when not even the first value fits.",
        )
        .arg(
            Arg::new("out")
                .short('o')
                .long("out")
                .value_name("DIR")
                .value_parser(value_parser!(PathBuf))
                .value_hint(ValueHint::DirPath)
                .help("Where the traces at the two ends go [default: a new folder in memtrace-out]"),
        )
        .args(phantom())
        .arg(number("min", "The first value [default: 1]"))
        .arg(number("max", "The last value to try"))
        .arg(number("multiple-of", "Only multiples of this"))
        .arg(
            Arg::new("values")
                .long("values")
                .value_name("LIST")
                .help("These values and no others, each needing more than the one before: 512,1024,2048"),
        )
        .arg(Arg::new("json").long("json").action(ArgAction::SetTrue).help("The answer for programs"))
        .arg(program().help("The program and its arguments, {} where the value goes"))
}

fn live() -> Command {
    let mut command = Command::new("live")
        .about("The running trace, refreshed: who holds how much, the step, how far it is to the end")
        .arg(
            Arg::new("trace")
                .value_name("DIR")
                .value_parser(value_parser!(PathBuf))
                .value_hint(ValueHint::AnyPath)
                .help(format!(
                    "The folder of the run, there or not yet [default: the newest in {DEFAULT_FOLDER}]"
                )),
        )
        .arg(
            Arg::new("by")
                .long("by")
                .value_name("KEY")
                .default_value("module")
                .value_parser(PossibleValuesParser::new(["module", "category", "op", "phase", "step"]))
                .help("What to group the live blocks by; the key b changes it"),
        )
        .arg(
            Arg::new("interval")
                .long("interval")
                .value_name("SECONDS")
                .default_value("1")
                .value_parser(value_parser!(f64))
                .help("How often to look"),
        )
        .arg(
            Arg::new("once").long("once").action(ArgAction::SetTrue).help("One look, for scripts and pipes"),
        );
    for arg in shared() {
        if matches!(arg.get_id().as_str(), "rank" | "units" | "color") {
            command = command.arg(arg);
        }
    }
    command
}

fn page() -> Command {
    let trace =
        |id: &'static str| Arg::new(id).value_parser(value_parser!(PathBuf)).value_hint(ValueHint::AnyPath);
    Command::new("report")
        .about("One HTML page to look around in: the curve, who holds what, segments, steps, ranks")
        .arg(trace("trace").value_name("TRACE").num_args(0..=2).help(format!(
            "A trace: a file, or the folder of a run; two are compared [default: the newest in {DEFAULT_FOLDER}]"
        )))
        .arg(
            trace("against")
                .long("against")
                .value_name("TRACE")
                .help("Another run to compare with: peak against peak, step against step"),
        )
        .args(shared().into_iter().filter(|arg| !matches!(arg.get_id().as_str(), "json" | "top" | "color")).map(
            |arg| match arg.get_id().as_str() {
                "output" => arg.help("The page's file [default: report.html]").value_hint(ValueHint::FilePath),
                _ => arg,
            },
        ))
}

fn doctor() -> Command {
    Command::new("doctor")
        .about("Would programs of this Python be traced here, and what of them would be seen?")
        .arg(Arg::new("json").long("json").action(ArgAction::SetTrue).help("The answer for programs"))
        .arg(
            Arg::new("out")
                .short('o')
                .long("out")
                .value_name("DIR")
                .value_parser(value_parser!(PathBuf))
                .value_hint(ValueHint::DirPath)
                .help("Where traces would go [default: MEMTRACE_OUT, or memtrace-out]"),
        )
        .arg(
            Arg::new("phantom")
                .long("phantom")
                .value_name("CARD")
                .num_args(0..=1)
                .require_equals(true)
                .default_missing_value("h100-80g")
                .help("Try it on a device that is not there: --phantom, --phantom=a100-80g"),
        )
        .arg(
            Arg::new("command")
                .value_name("PYTHON")
                .num_args(1..)
                .last(true)
                .value_parser(value_parser!(std::ffi::OsString))
                .help("The Python, and what comes before a script [default: python3]"),
        )
}

fn of_report(report: &'static dyn Report) -> Command {
    let many = report.inputs().len() > 1;
    let mut command = Command::new(report.name()).about(report.about());
    for name in report.inputs() {
        command = command.arg(if many {
            trace(name).required(true).help("A trace: a file, or the folder of a run")
        } else {
            trace(name)
        });
    }
    command.args(report.flags().iter().map(of_flag)).args(shared())
}

/// A trace; the newest when none is named.
fn trace(name: &'static str) -> Arg {
    Arg::new(name)
        .value_name(name)
        .value_parser(value_parser!(PathBuf))
        .value_hint(ValueHint::AnyPath)
        .help(format!("A trace: a file, or the folder of a run [default: the newest in {DEFAULT_FOLDER}]"))
}

fn export() -> Command {
    let mut list = String::from("Exports:\n");
    let width = EXPORTS.iter().map(|export| export.name().len()).max().unwrap_or(0);
    for export in EXPORTS {
        list.push_str(&format!("  {:width$}  {}\n", export.name(), export.about()));
    }
    list.push_str(
        "\nThose of the timeline and the plots, like `memtrace actions`, hold every block of the trace: some 60 MB\nof memory for a million rows. The memory of the others does not grow with the trace.\n",
    );
    let to = Arg::new("to")
        .long("to")
        .short('t')
        .value_name("EXPORT")
        .required(true)
        .hide_possible_values(true)
        .value_parser(PossibleValuesParser::new(EXPORTS.iter().map(|export| export.name())))
        .help("What to make of it; see below");
    let mut flags: Vec<Arg> = Vec::new();
    for flag in EXPORTS.iter().flat_map(|export| export.flags()) {
        if flags.iter().all(|known| known.get_id() != flag.name) {
            let of: Vec<&str> = EXPORTS
                .iter()
                .filter(|export| export.flags().iter().any(|own| own.name == flag.name))
                .map(|export| export.name())
                .collect();
            flags.push(of_flag(flag).help(format!("{} ({})", flag.help, of.join(", "))));
        }
    }
    Command::new("export")
        .about("The trace as what other tools open: memory_viz, Perfetto, DuckDB, speedscope, pictures")
        .after_help(list)
        .arg(to)
        .arg(trace("TRACE"))
        .args(flags)
        .args(shared().into_iter().map(|arg| match arg.get_id().as_str() {
            "output" => {
                arg.value_name("PATH").help(
                    "Where it goes; - is standard output, and .gz packs it [default: TRACE.EXPORT here]",
                )
            }
            _ => arg,
        }))
}

fn of_flag(flag: &Flag) -> Arg {
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

/// The options that every report takes.
fn shared() -> [Arg; 10] {
    let arg = |name: &'static str, value: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name(value).help(help).help_heading("Shared options")
    };
    let switch = |name: &'static str, help: &'static str| {
        Arg::new(name).long(name).action(ArgAction::SetTrue).help(help).help_heading("Shared options")
    };
    [
        switch("json", "The answer for programs"),
        arg("top", "N", "How many lines a list has").value_parser(value_parser!(usize)),
        arg("device", "ORDINAL", "Only this device").value_parser(value_parser!(i32)),
        arg("rank", "RANK", "Only this rank").value_parser(value_parser!(i32)),
        arg("window", "T0:T1", "Only this part: 1.5s:2s, 200ms:, :3").allow_hyphen_values(true),
        arg("step", "A:B", "Only these steps: 3:5, 3:, 3").allow_hyphen_values(true),
        arg("units", "UNIT", "auto, B, KiB, MiB or GiB").default_value("auto"),
        arg("output", "FILE", "Write the answer to a file").short('o').value_parser(value_parser!(PathBuf)),
        arg("color", "WHEN", "auto, always or never")
            .default_value("auto")
            .value_parser(PossibleValuesParser::new(["auto", "always", "never"])),
        switch("lenient", "Count and pass over lines that are not rows"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        command().debug_assert();
    }
}
