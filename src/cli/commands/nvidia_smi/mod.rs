//! `memtrace live --nvidia-smi`: nvidia-smi for the simulated GPUs of this user's running programs.
//!
//! Inside `memtrace run --phantom` the program's `PATH` leads to this command under the name `nvidia-smi`,
//! and the command shows the machine of that run. Elsewhere, it shows every machine on which a process of
//! this user runs. Options, layout, error texts and exit statuses are the same as in nvidia-smi, so that
//! scripts that read its output work.

mod arguments;
mod fields;
mod log;
mod machines;
mod query;
mod refusal;
mod screen;
mod value;

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::{Arg, ArgMatches, value_parser};
use memtrace_machine::files::Machine;

use arguments::{Mode, Request};
use machines::Measured;
use refusal::{INVALID, LOST, NOT_FOUND, Refusal};

/// Returns the option of `memtrace live` that answers as nvidia-smi would. The option takes the rest of the
/// command line: nvidia-smi's own options, which [`arguments`] parses.
pub(crate) fn arg() -> Arg {
    Arg::new("nvidia-smi")
        .long("nvidia-smi")
        .value_name("OPTION")
        .num_args(0..)
        .allow_hyphen_values(true)
        .value_parser(value_parser!(OsString))
        .help(
            "Show the simulated GPUs of running programs as nvidia-smi would, and exit. Its own options follow: -L, -q, -i, \
             -l, -f, --version, --query-gpu=, --query-compute-apps=, --format=",
        )
}

/// Answers as nvidia-smi would.
///
/// # Errors
/// When stdout cannot be written.
pub(crate) fn run(matches: &ArgMatches) -> Result<ExitCode> {
    let words: Vec<&OsString> = matches.get_many("nvidia-smi").into_iter().flatten().collect();
    answer(words.into_iter().map(|word| word.to_string_lossy().into_owned()))
}

/// Answers as nvidia-smi, for a program that called the command by that name.
///
/// # Errors
/// Same as for [`run`].
pub(crate) fn answer(words: impl Iterator<Item = String>) -> Result<ExitCode> {
    let words: Vec<String> = words.collect();
    let request = match arguments::parse(&words) {
        Ok(request) => request,
        Err(refusal) => return refuse(&refusal),
    };
    match &request.mode {
        Mode::Help => print(arguments::HELP)?,
        Mode::HelpGpu => print(&fields::help("--query-gpu=", fields::GPU))?,
        Mode::HelpApps => print(&fields::help("--query-compute-apps=", fields::APPS))?,
        _ => return repeat(&request),
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the answer, or writes it into the file of `-f`; once, or in a loop with `-l`.
fn repeat(request: &Request) -> Result<ExitCode> {
    let mut is_first = true;
    let mut file = None;
    loop {
        let machines = match machines::selected() {
            Ok(machines) => machines,
            Err(refusal) => return refuse(&refusal),
        };
        let page = match page(request, &machines, is_first) {
            Ok(page) => page,
            Err(refusal) => return refuse(&refusal),
        };
        // The file is created only now, so that a request without an answer leaves an existing file as it is.
        if let Some(path) = request.file.as_deref().filter(|_| is_first) {
            file = match File::create(path) {
                Ok(file) => Some(file),
                Err(error) => {
                    let text = format!("memtrace: {} cannot be written: {error}", path.display());
                    return refuse(&Refusal::new(text, INVALID));
                }
            };
        }
        match &mut file {
            Some(file) => file.write_all(page.as_bytes())?,
            None => print(&page)?,
        }
        let Some(milliseconds) = request.loop_ms else { return Ok(ExitCode::SUCCESS) };
        is_first = false;
        std::thread::sleep(Duration::from_millis(milliseconds));
    }
}

/// Returns the text of one answer, for all machines. Only the first answer of a loop (`is_first`) has a CSV
/// header. Fails if `-i` names a card that no machine has, or a lost one.
fn page(request: &Request, machines: &[Measured], is_first: bool) -> std::result::Result<String, Refusal> {
    let mut text = String::new();
    let mut found = false;
    for measured in machines {
        let cards = cards_of(request, &measured.machine)?;
        found |= !cards.is_empty();
        let is_only = machines.len() == 1;
        match &request.mode {
            Mode::Gpus { fields, format } => {
                let header = format.header && is_first && text.is_empty();
                text += &query::gpus(measured, &cards, fields, *format, header);
            }
            Mode::Apps { fields, format } => {
                let header = format.header && is_first && text.is_empty();
                text += &query::apps(measured, &cards, fields, *format, header);
            }
            Mode::Version if text.is_empty() => text = log::versions(measured),
            Mode::Version => {}
            _ if cards.is_empty() => {}
            Mode::List => text += &log::list(&measured.machine, &cards),
            Mode::Log(sections) => text += &log::log(measured, &cards, sections),
            _ => {
                if !is_only {
                    text += &format!("memtrace: machine {}\n", measured.machine.id);
                }
                text += &screen::screen(measured, &cards);
            }
        }
    }
    let is_known = |id: &String| {
        machines.iter().any(|it| machines::card_of_id(id, it.machine.spec.count as usize).is_some())
    };
    if found && request.ids.iter().flatten().all(is_known) {
        Ok(text)
    } else {
        Err(Refusal::new("No devices were found", NOT_FOUND))
    }
}

/// Returns the cards of a machine that `-i` selects. If one of them is lost, returns the error of nvidia-smi.
fn cards_of(request: &Request, machine: &Machine) -> std::result::Result<Vec<usize>, Refusal> {
    let count = machine.spec.count as usize;
    let cards: Vec<usize> = match &request.ids {
        None => (0..count).collect(),
        Some(ids) => ids.iter().filter_map(|id| machines::card_of_id(id, count)).collect(),
    };
    match cards.iter().find(|&&card| machine.cards[card].lost) {
        // The text of the drivers since 515, from public reports of Xid 79.
        Some(&card) => Err(Refusal::new(
            format!(
                "Unable to determine the device handle for GPU{card}: {}: Unknown Error",
                memtrace_machine::identity::bus_id(card)
            ),
            LOST,
        )),
        None => Ok(cards),
    }
}

fn refuse(refusal: &Refusal) -> Result<ExitCode> {
    // The text goes to stdout, as with nvidia-smi, because scripts look for it there.
    print(&format!("{}\n", refusal.text))?;
    Ok(ExitCode::from(refusal.status))
}

fn print(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()?;
    Ok(())
}
