//! `memtrace kernel`: Jupyter kernels that are traced.

use std::path::{Path, PathBuf};
use std::process::{Command as Process, ExitCode, Stdio};

use anyhow::{Context, Result, anyhow, bail};
use clap::{Arg, ArgAction, ArgMatches, Command, ValueHint, value_parser};
use serde_json::{Value, json};

use crate::child_env::check_card;
use crate::libraries::{PHANTOM, TRACER, library};
use crate::terminal;

/// The script that the kernel's Python runs.
const INSTALL: &str = include_str!("install.py");
/// Its exit status when that Python lacks a package.
const MISSING: i32 = 3;
/// The name of a kernel on the GPU of this machine.
const NAME: &str = "memtrace";

/// The arguments of `memtrace kernel`.
pub(crate) fn command() -> Command {
    let python = Arg::new("python")
        .long("python")
        .value_name("PATH")
        .value_parser(value_parser!(PathBuf))
        .value_hint(ValueHint::ExecutablePath)
        .help(
            "The Python of the kernel [default: the first that has ipykernel and memtrace, of python3 and python \
             on the PATH and those beside this command]",
        );
    let text = |name: &'static str, value: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name(value).help(help)
    };
    let install = Command::new("install")
        .about("Add a kernel: Jupyter shows it as Python (memtrace)")
        .after_help("On a simulated GPU, which needs none:  memtrace kernel install --phantom h100-80g")
        .arg(text("phantom", "CARD", "On this simulated GPU; memtrace run --phantom list lists the cards"))
        .arg(python.clone())
        .arg(text("name", "NAME", "The kernel's name [default: memtrace, or memtrace-CARD]"))
        .arg(text("display-name", "NAME", "Its name in the menu [default: Python (memtrace)]"))
        .arg(
            Arg::new("sys-prefix")
                .long("sys-prefix")
                .action(ArgAction::SetTrue)
                .help("For the environment of that Python [default: for this user]"),
        )
        .arg(
            Arg::new("prefix")
                .long("prefix")
                .value_name("DIR")
                .value_parser(value_parser!(PathBuf))
                .value_hint(ValueHint::DirPath)
                .conflicts_with("sys-prefix")
                .help("For the environment in this folder"),
        );
    let remove = Command::new("remove")
        .about("Remove a kernel that install added")
        .arg(Arg::new("name").value_name("NAME").default_value(NAME).help("The kernel's name"))
        .arg(python);
    Command::new("kernel")
        .about("Add a Jupyter kernel that is traced, or remove it")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(install)
        .subcommand(remove)
}

/// Installs or removes a kernel.
///
/// # Errors
/// When there is no such card, when no Python has what a kernel needs, or when Jupyter refuses.
pub(crate) fn run(matches: &ArgMatches) -> Result<ExitCode> {
    let Some((action, matches)) = matches.subcommand() else { bail!("install or remove a kernel") };
    let request = if action == "remove" {
        json!({ "remove": true, "name": matches.get_one::<String>("name") })
    } else {
        install_request(matches)?
    };
    let pythons = match matches.get_one::<PathBuf>("python") {
        Some(python) => vec![python.clone()],
        None => pythons()?,
    };
    let mut reasons = Vec::new();
    for python in pythons {
        match install(&python, &request)? {
            Outcome::Done(said) => {
                terminal::print_line(&said)?;
                return Ok(ExitCode::SUCCESS);
            }
            Outcome::Unsuited(why) => reasons.push(why),
        }
    }
    bail!(
        "a kernel needs a Python with ipykernel and memtrace: {}; install both in one of them (PYTHON -m pip install \
         ipykernel gpu-memtrace), or name another with --python",
        reasons.join("; ")
    )
}

/// The kernel that the options of `memtrace kernel install` describe.
fn install_request(matches: &ArgMatches) -> Result<Value> {
    let text = |name: &str| matches.get_one::<String>(name).map(String::as_str);
    let own = std::env::current_exe().context("cannot find the command memtrace")?;
    let own = own.to_str().ok_or_else(|| anyhow!("{} is not UTF-8, as Jupyter needs it", own.display()))?;
    library(TRACER)?;
    let mut command = vec![own, "run", "--quiet"];
    let (mut name, mut display) = (NAME.to_owned(), "Python (memtrace)".to_owned());
    if let Some(card) = text("phantom") {
        // A wrong name would end the kernel before Jupyter hears of it.
        check_card(card)?;
        library(PHANTOM)?;
        command.extend(["--phantom", card]);
        name = format!("{NAME}-{}", slug(card));
        display = format!("Python (memtrace, {card})");
    }
    command.push("--");
    let prefix = matches.get_one::<PathBuf>("prefix").map(std::path::absolute).transpose()?;
    Ok(json!({
        "remove": false,
        "name": text("name").unwrap_or(&name),
        "display_name": text("display-name").unwrap_or(&display),
        "command": command,
        "arguments": ["-m", "ipykernel_launcher", "--ext=memtrace", "-f", "{connection_file}"],
        "sys_prefix": matches.get_flag("sys-prefix"),
        "prefix": prefix,
    }))
}

/// The result of one Python.
enum Outcome {
    /// The text for the user.
    Done(String),
    /// The reason why it can have no kernel.
    Unsuited(String),
}

/// Runs the script in a Python.
///
/// # Errors
/// When Jupyter refuses.
fn install(python: &Path, request: &Value) -> Result<Outcome> {
    let mut script = Process::new(python);
    script.arg("-c").arg(INSTALL).arg(request.to_string()).stdin(Stdio::null());
    let shown = python.display();
    let output = match script.output() {
        Ok(output) => output,
        Err(error) => return Ok(Outcome::Unsuited(format!("cannot run {shown}: {error}"))),
    };
    let stderr = String::from_utf8_lossy(&output.stderr);
    let last = stderr.trim_end().lines().last().unwrap_or("it says nothing on stderr");
    let said = String::from_utf8_lossy(&output.stdout).trim_end().to_owned();
    match output.status.code() {
        // A program that is no Python may succeed too, but does not say so.
        Some(0) if !said.is_empty() => Ok(Outcome::Done(said)),
        Some(MISSING) => Ok(Outcome::Unsuited(format!("{shown} lacks {last}"))),
        Some(1) => bail!("{last}"),
        _ => Ok(Outcome::Unsuited(format!(
            "{shown} is not a Python, or it failed ({}): {last}",
            output.status
        ))),
    }
}

/// The Pythons that a user may mean, the likeliest first.
fn pythons() -> Result<Vec<PathBuf>> {
    let own = std::env::current_exe().context("cannot find the command memtrace")?;
    let beside = own.parent().unwrap_or(Path::new("/"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    let mut found = Vec::new();
    for name in ["python3", "python"] {
        found.extend(folders.iter().map(|folder| folder.join(name)).find(|path| path.is_file()));
    }
    found.extend(Some(beside.join("python3")).filter(|path| path.is_file()));
    let mut seen = Vec::new();
    found.retain(|path| {
        let new = !seen.contains(path);
        seen.push(path.clone());
        new
    });
    if found.is_empty() {
        bail!("there is no python3 on the PATH; name one with --python");
    }
    Ok(found)
}

/// A card as part of a kernel's name, in which few characters are allowed.
fn slug(card: &str) -> String {
    let allowed = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '.' | '_');
    card.chars().map(|letter| if allowed(letter) { letter } else { '-' }).collect()
}
