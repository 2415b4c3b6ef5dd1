//! `memtrace run`: starts the program with the library preloaded, waits, and shows what came out.
//!
//! The program keeps its standard streams, its signals and its exit status; the launcher writes to
//! stderr only, and only before the program starts or after it has ended.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, IsTerminal, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::ArgMatches;
use memtrace_analysis::input::Input;
use memtrace_analysis::options::Options;
use memtrace_analysis::page::{Page, Side, Table};
use memtrace_analysis::reports;
use memtrace_cards::CARDS;

use crate::args::DEFAULT_FOLDER;
use crate::traced::{Phantom, Scratch, TRACER, run_id, traced};
use crate::{leftover, signals, terminal};

/// Runs the program.
pub(crate) fn run(matches: &ArgMatches) -> Result<ExitCode> {
    if matches.get_one::<String>("phantom").is_some_and(|card| card == "list") {
        return list_cards();
    }
    let command: Vec<&OsString> = matches.get_many("command").into_iter().flatten().collect();
    let Some(program) = command.first() else {
        bail!("what is to run? memtrace run -- python train.py");
    };
    let phantom = Phantom::wanted(matches)?;
    let run_id = run_id();
    let scratch = Scratch::new(&run_id)?;
    let out = Out::new(matches.get_one::<PathBuf>("out"))?;
    let mut child = traced(&scratch, &command, &out.folder, &run_id, phantom.as_ref())?;
    let passing = signals::Passing::start()?;
    let mut child = match child.spawn() {
        Ok(child) => child,
        Err(error) => {
            eprintln!("memtrace: cannot run {}: {error}", Path::new(program).display());
            out.remove_if_empty();
            // As the shell has it: not found, or found and not runnable.
            return Ok(ExitCode::from(if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 }));
        }
    };
    passing.to(child.id());
    let status = child.wait().context("cannot wait for the program")?;
    passing.stop();

    if let Err(error) = conclude(program, &scratch, &out, &run_id, matches.get_flag("quiet")) {
        eprintln!("memtrace: {error:#}");
    }
    out.remove_if_empty();
    drop(scratch);
    Ok(signals::end_like(status))
}

/// Says what came out, or why nothing did.
fn conclude(program: &OsStr, scratch: &Scratch, out: &Out, run_id: &str, quiet: bool) -> Result<()> {
    let loaded = fs::metadata(scratch.hello()).is_ok_and(|file| file.len() > 0);
    let open = || {
        Input::open(&out.folder).map(|mut input| {
            input.only_run(run_id);
            input
        })
    };
    let traces = open();
    let input = match traces {
        Ok(input) if !input.traces.is_empty() => {
            if leftover::finish(&input)? {
                open()?
            } else {
                input
            }
        }
        Err(memtrace_analysis::Error::Trace(error))
            if !matches!(error, memtrace_trace::Error::NoTrace { .. }) =>
        {
            return Err(error.into());
        }
        _ if loaded => {
            eprintln!(
                "memtrace: no trace: the program took no GPU memory, or tracing was off (MEMTRACE_ENABLED=0). \
                 With no GPU here, try: memtrace run --phantom h100-80g -- ..."
            );
            return Ok(());
        }
        _ => {
            eprintln!("memtrace: no trace: {TRACER} was not loaded into the program: {}", why_not(program));
            return Ok(());
        }
    };
    if quiet {
        return Ok(());
    }
    let report = reports::find("summary").context("no summary")?;
    let stderr = io::stderr();
    let options = Options {
        paint: terminal::paints("auto", &stderr),
        width: terminal::width(&stderr),
        ..Options::default()
    };
    let input = Input { path: out.shown.clone(), ..input };
    let answer = report.run(&[input], &options)?;
    let text = format!("\nmemtrace: traced into {}\n{}", out.shown.display(), answer.text());
    // Nobody reads it any more when this fails.
    stderr.lock().write_all(text.as_bytes()).ok();
    Ok(())
}

/// Where the traces go.
pub(crate) struct Out {
    /// Absolute: the program may change its working directory.
    pub(crate) folder: PathBuf,
    /// As the user would type it.
    pub(crate) shown: PathBuf,
    made: bool,
}

impl Out {
    pub(crate) fn new(wanted: Option<&PathBuf>) -> Result<Out> {
        let (shown, made) = match wanted {
            Some(folder) => {
                let made = !folder.exists();
                fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
                (folder.clone(), made)
            }
            None => (new_folder()?, true),
        };
        let folder = shown.canonicalize().with_context(|| shown.display().to_string())?;
        Ok(Out { folder, shown, made })
    }

    /// A program without a GPU must leave nothing.
    pub(crate) fn remove_if_empty(&self) {
        if self.made && fs::remove_dir(&self.folder).is_ok() && self.shown.starts_with(DEFAULT_FOLDER) {
            fs::remove_dir(DEFAULT_FOLDER).ok();
        }
    }
}

/// `memtrace-out/<date>-<time>`, with a number behind it when it is taken.
fn new_folder() -> Result<PathBuf> {
    let now = jiff::Zoned::now().strftime("%Y%m%d-%H%M%S").to_string();
    fs::create_dir_all(DEFAULT_FOLDER).context(DEFAULT_FOLDER)?;
    for number in 1.. {
        let name = if number == 1 { now.clone() } else { format!("{now}-{number}") };
        let folder = Path::new(DEFAULT_FOLDER).join(name);
        match fs::create_dir(&folder) {
            Ok(()) => return Ok(folder),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error).with_context(|| folder.display().to_string()),
        }
    }
    unreachable!("there is no last number")
}

/// Why the loader may have passed over the library, as far as the program's file tells.
fn why_not(program: &OsStr) -> String {
    let Some(path) = find_program(program) else {
        return "it ended before it could be".to_owned();
    };
    let shown = path.display();
    if fs::metadata(&path).is_ok_and(|file| file.permissions().mode() & 0o6000 != 0) {
        return format!(
            "{shown} is set-user-id, for which the loader ignores LD_PRELOAD; run the program itself"
        );
    }
    match is_static(&path) {
        Some(true) => format!("{shown} is statically linked; start the program that uses the GPU itself"),
        _ => format!(
            "{shown} or what it starts drops LD_PRELOAD from the environment; start the program itself, as in: memtrace run -- python train.py"
        ),
    }
}

/// The file that the shell would run.
fn find_program(program: &OsStr) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Path::new(program).canonicalize().ok();
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).find_map(|folder| folder.join(program).canonicalize().ok())
}

/// Does this ELF file name no loader? `None` for what is no 64-bit ELF file, a script for one.
fn is_static(path: &Path) -> Option<bool> {
    let mut head = Vec::new();
    File::open(path).ok()?.take(4096).read_to_end(&mut head).ok()?;
    if !head.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let number = |at: usize, bytes: usize| -> Option<usize> {
        let field = head.get(at..at + bytes)?;
        Some(field.iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte)))
    };
    // e_phoff, e_phentsize and e_phnum of the header; p_type of each program header.
    const PT_INTERP: usize = 3;
    let (start, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    for index in 0..count {
        if number(start.checked_add(index * size)?, 4)? == PT_INTERP {
            return Some(false);
        }
    }
    Some(true)
}

fn list_cards() -> Result<ExitCode> {
    let mut stdout = io::stdout().lock();
    let mut page = Page::new(stdout.is_terminal() && terminal::paints("auto", &stdout), None);
    let mut table = Table::new(&[
        ("card", Side::Left),
        ("memory", Side::Right),
        ("free at start", Side::Right),
        ("capability", Side::Right),
        ("SMs", Side::Right),
        ("name", Side::Left),
    ]);
    for card in CARDS {
        table.row([
            card.id.into(),
            format!("{:.2} GiB", card.memory_mib as f64 / 1024.0).into(),
            format!("{:.2} GiB", (card.memory_mib - card.context_mib) as f64 / 1024.0).into(),
            format!("{}.{}", card.cc.0, card.cc.1).into(),
            card.sms.to_string().into(),
            card.name.into(),
        ]);
    }
    page.table(&table);
    page.gap();
    page.plain("several: 8xh100-80g    another size: h100-80g,mem=40g    any other card: mem=48g,cc=8.9");
    page.plain(
        "the context takes the rest before the first allocation: a round guess; yours: h100-80g,context=600m",
    );
    stdout.write_all(page.text().as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_test_is_linked_dynamically_and_a_script_is_no_program() {
        assert_eq!(is_static(&std::env::current_exe().unwrap()), Some(false));
        assert_eq!(is_static(Path::new("Cargo.toml")), None);
    }
}
