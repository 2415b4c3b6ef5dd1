//! The command line of nvidia-smi.

use std::path::PathBuf;

use super::fields::{self, Field};
use super::refusal::{INVALID, Refusal};

/// The text of `-h`.
pub(super) const HELP: &str = "\
nvidia-smi for the simulated GPUs of memtrace run --phantom

    memtrace live --nvidia-smi [OPTION1 [ARG1]] [OPTION2 [ARG2]] ...

Without options it shows the cards, the memory in use and the processes.

    -h,   --help                Print this text.
          --version             Print the versions of the driver and of CUDA.
    -L,   --list-gpus           List the cards and their UUIDs.
    -i,   --id=                 Only these cards: indexes, UUIDs or PCI addresses, with commas between.
    -l,   --loop=               Repeat after this many seconds, until Ctrl+C [default: 5].
    -lms, --loop-ms=            Repeat after this many milliseconds.
    -q,   --query               Print what is known of each card.
    -d,   --display=            With -q, only these parts: MEMORY, UTILIZATION, ECC, PIDS.
          --query-gpu=          Values of each card as CSV; --help-query-gpu lists them.
          --query-compute-apps= Values of each process as CSV; --help-query-compute-apps lists them.
          --format=             For these two: csv, and noheader, nounits.
    -f,   --filename=           Write into this file, not to the terminal.

Inside memtrace run --phantom it shows the cards of that run, elsewhere the cards of all running programs
of this user. Other options of nvidia-smi are not modelled.
";

/// The kind of answer that is requested.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// The cards and the processes, as a table.
    Screen,
    /// `-L`.
    List,
    /// `-q`, with the sections of `-d`.
    Log(Vec<String>),
    /// `--query-gpu`.
    Gpus {
        /// The fields that each line has.
        fields: Vec<&'static Field>,
        /// The format of the CSV lines (`--format`).
        format: Format,
    },
    /// `--query-compute-apps`.
    Apps {
        /// The fields that each line has.
        fields: Vec<&'static Field>,
        /// The format of the CSV lines (`--format`).
        format: Format,
    },
    /// `-h`.
    Help,
    /// `--version`.
    Version,
    /// `--help-query-gpu`.
    HelpGpu,
    /// `--help-query-compute-apps`.
    HelpApps,
}

/// The options of `--format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Format {
    pub(super) header: bool,
    pub(super) units: bool,
}

/// A valid command line.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) mode: Mode,
    /// The cards that `-i` names; `None` means all cards.
    pub(super) ids: Option<Vec<String>>,
    /// The time between two answers in milliseconds; `None` for a single answer.
    pub(super) loop_ms: Option<u64>,
    /// The file that `-f` names; `None` means stdout.
    pub(super) file: Option<PathBuf>,
}

/// The sections that `-d` may name and for which a simulated card has values.
const SECTIONS: [&str; 4] = ["MEMORY", "UTILIZATION", "ECC", "PIDS"];

/// Parses the words after the command's name.
pub(super) fn parse(words: &[String]) -> Result<Request, Refusal> {
    let mut words = words.iter().map(String::as_str).peekable();
    let (mut list, mut log, mut sections) = (false, false, Vec::new());
    let (mut ids, mut loop_ms, mut format, mut file) = (None, None, None, None);
    let (mut gpus, mut apps): (Option<&str>, Option<&str>) = (None, None);
    while let Some(word) = words.next() {
        let (name, attached) = word.split_once('=').map_or((word, None), |(name, value)| (name, Some(value)));
        let mut value = || {
            let value = attached.or_else(|| words.next()).filter(|value| !value.is_empty());
            value.ok_or_else(|| combination(format!("Missing value for option {name}.")))
        };
        match (name, attached) {
            ("-h" | "--help", None) => return alone(Mode::Help),
            ("--version", None) => return alone(Mode::Version),
            ("--help-query-gpu", None) => return alone(Mode::HelpGpu),
            ("--help-query-compute-apps", None) => return alone(Mode::HelpApps),
            ("-L" | "--list-gpus", None) => list = true,
            ("-q" | "--query", None) => log = true,
            (
                "-x" | "--xml-format" | "dmon" | "pmon" | "topo" | "nvlink" | "mig" | "daemon" | "replay",
                _,
            ) => {
                let text = format!(
                    "memtrace: the simulated nvidia-smi has no {word}; nvidia-smi -h lists its options"
                );
                return Err(Refusal::new(text, INVALID));
            }
            ("-d" | "--display", _) => sections = self::sections(value()?)?,
            ("-i" | "--id", _) => ids = Some(value()?.split(',').map(|id| id.trim().to_owned()).collect()),
            ("-l" | "--loop", _) => {
                let number = attached.or_else(|| words.next_if(|next| !next.starts_with('-')));
                loop_ms = Some(whole(name, number.unwrap_or("5"), 1)?.saturating_mul(1000));
            }
            ("-lms" | "--loop-ms", _) => {
                let number = value()?;
                loop_ms = Some(whole(name, number, 1)?);
            }
            ("--query-gpu", _) => gpus = Some(value()?),
            ("--query-compute-apps", _) => apps = Some(value()?),
            ("-f" | "--filename", _) => file = Some(PathBuf::from(value()?)),
            ("--format", _) => format = Some(self::format(value()?)?),
            _ => {
                let text = format!("Option {word} is not recognized. Please run 'nvidia-smi -h'.");
                return Err(combination(text));
            }
        }
    }
    let modes = [list, log, gpus.is_some(), apps.is_some()].into_iter().filter(|&is| is).count();
    if modes > 1 || format.is_some() && gpus.is_none() && apps.is_none() || !sections.is_empty() && !log {
        return Err(combination("Invalid combination of input arguments.".to_owned()));
    }
    let shape = || format.ok_or_else(|| combination("\"--format=\" is required with a query.".to_owned()));
    let mode = match (gpus, apps) {
        (Some(names), _) => Mode::Gpus { fields: fields::parse(names, fields::GPU)?, format: shape()? },
        (_, Some(names)) => Mode::Apps { fields: fields::parse(names, fields::APPS)?, format: shape()? },
        _ if list => Mode::List,
        _ if log => Mode::Log(sections),
        _ => Mode::Screen,
    };
    Ok(Request { mode, ids, loop_ms, file })
}

fn alone(mode: Mode) -> Result<Request, Refusal> {
    Ok(Request { mode, ids: None, loop_ms: None, file: None })
}

fn combination(text: String) -> Refusal {
    let text =
        if text.ends_with("-h'.") { text } else { format!("{text} Please run 'nvidia-smi -h' for help.") };
    Refusal::new(text, INVALID)
}

fn whole(name: &str, value: &str, least: u64) -> Result<u64, Refusal> {
    let number = value.parse().ok().filter(|&number: &u64| number >= least);
    number.ok_or_else(|| combination(format!("Invalid value for option {name}: {value}.")))
}

fn sections(value: &str) -> Result<Vec<String>, Refusal> {
    let names = value.split(',').map(|name| name.trim().to_ascii_uppercase());
    names
        .map(|name| match SECTIONS.contains(&name.as_str()) {
            true => Ok(name),
            false => Err(combination(format!("Invalid display type: {name}."))),
        })
        .collect()
}

fn format(value: &str) -> Result<Format, Refusal> {
    let mut format = Format { header: true, units: true };
    let mut csv = false;
    for word in value.split(',').map(str::trim) {
        match word {
            "csv" => csv = true,
            "noheader" => format.header = false,
            "nounits" => format.units = false,
            _ => return Err(combination(format!("\"{word}\" is not a valid format."))),
        }
    }
    if csv { Ok(format) } else { Err(combination("\"csv\" is missing in --format.".to_owned())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_line(line: &str) -> Result<Request, Refusal> {
        parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn nvidia_smi_takes_the_options_of_nvidias() {
        assert_eq!(parse_line("").unwrap().mode, Mode::Screen);
        assert_eq!(parse_line("-L").unwrap().mode, Mode::List);
        for line in ["-l 2", "--loop=2", "-lms 2000", "--loop-ms=2000"] {
            assert_eq!(parse_line(line).unwrap().loop_ms, Some(2000), "{line}");
        }
        assert_eq!(parse_line("-l").unwrap().loop_ms, Some(5000));
        assert_eq!(parse_line("-i 0,1 -L").unwrap().ids, Some(vec!["0".into(), "1".into()]));
        for line in ["-f out.csv -L", "--filename=out.csv -L"] {
            assert_eq!(parse_line(line).unwrap().file.as_deref(), Some("out.csv".as_ref()), "{line}");
        }
        assert_eq!(parse_line("--version").unwrap().mode, Mode::Version);
        assert_eq!(parse_line("-q -d memory").unwrap().mode, Mode::Log(vec!["MEMORY".into()]));
        let Mode::Gpus { fields, format } =
            parse_line("--query-gpu=gpu_name,memory.used --format=csv,noheader,nounits").unwrap().mode
        else {
            panic!("not a query of cards");
        };
        assert_eq!(fields.iter().map(|field| field.names[0]).collect::<Vec<_>>(), ["name", "memory.used"]);
        assert!(!format.header && !format.units);
    }

    #[test]
    fn nvidia_smi_refuses_as_nvidias() {
        // A real driver prints this text and exits with this status; see issue 37 of
        // CoHDI/composable-resource-operator on GitHub.
        let unknown = parse_line("--query-gpu=name,device_minor --format=csv").unwrap_err();
        assert_eq!(unknown, Refusal::new("Field \"device_minor\" is not a valid field to query.\n", 2));
        for (line, part) in [
            ("--query-gpu=name", "--format"),
            ("--query-gpu= --format=csv", "Missing value"),
            ("--query-gpu=name --format=xml", "\"xml\""),
            ("--query-gpu=name --format=noheader", "\"csv\" is missing"),
            ("--format=csv", "Invalid combination"),
            ("-L -q", "Invalid combination"),
            ("--query-gpu=name --query-compute-apps=pid --format=csv", "Invalid combination"),
            ("-l 0", "Invalid value"),
            ("-lms x", "Invalid value"),
            ("-q -d CLOCK", "Invalid display"),
            ("--frobnicate", "is not recognized"),
            ("-L=3", "Option -L=3 is not recognized"),
            ("--version=1", "is not recognized"),
            ("-i", "Missing value"),
            ("-f", "Missing value"),
            ("pmon -c 1", "has no pmon"),
        ] {
            let refusal = parse_line(line).unwrap_err();
            assert!(refusal.text.contains(part) && refusal.status == 2, "{line}: {refusal:?}");
        }
    }
}
