//! Exports, which convert a trace for other tools. Each export has its own source file or folder.
//!
//! To add an export, add a source file here and a line to [`EXPORTS`]. The command line, its help, the docs
//! and the tests read that table. An export writes through [`Out`], and never over the trace that it reads.
//! The memory use of most exports does not grow with the trace.

mod chrome;
mod csv;
pub mod digest;
mod downsample;
mod export;
mod folded;
mod memory_tracker;
mod out;
mod parquet;
pub mod pickle;
mod picture;
mod plots;
mod snapshot;
mod timeline;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use memtrace_trace::text::shell_word;
use serde_json::{Map, Value, json};

use crate::error::{Error, Result};
use crate::options::Options;
use crate::read::input::Input;
use crate::read::stream::TraceFile;
use crate::render::footer::Footer;
use crate::render::heading::heading;
use crate::render::printer::{Cell, Style};
use crate::reports::Answer;
use crate::selection::{select, with_default_device};
use export::trace_stem;
pub use export::{Export, Job, OutputKind};
pub use out::{Out, STDOUT, is_stdout};

/// Every export, in the order of the help.
pub const EXPORTS: &[&dyn Export] = &[
    &snapshot::Snapshot,
    &chrome::Chrome,
    &parquet::Parquet,
    &digest::Digest,
    &csv::Csv,
    &folded::Speedscope,
    &folded::Collapsed,
    &timeline::Timeline,
    &timeline::Raw,
    &timeline::Html,
    &memory_tracker::MemoryTracker,
    &plots::Plots,
];

/// Returns the export called `name`.
#[must_use]
pub fn find(name: &str) -> Option<&'static dyn Export> {
    EXPORTS.iter().copied().find(|export| export.name() == name)
}

/// Exports `input` to `place` or, without a `place`, to a file in the working directory that is named after
/// the trace.
///
/// ```
/// use memtrace_analysis::exports;
/// use memtrace_analysis::options::Options;
/// use memtrace_analysis::read::input::Input;
///
/// # let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/gpt");
/// # let place = std::env::temp_dir().join(format!("memtrace-example-{}.folded", std::process::id()));
/// let stacks = exports::find("collapsed").expect("an export of this name");
/// exports::run(stacks, &Input::open(&folder)?, &Options::default(), Some(&place))?;
/// let written = std::fs::read_to_string(&place).expect("the file was written");
/// let bytes = written.lines().map(|line| line.rsplit(' ').next().unwrap().parse::<i64>().unwrap());
/// assert_eq!(bytes.sum::<i64>(), 124_781_568); // the peak
/// # std::fs::remove_file(&place).expect("the file is there");
/// # Ok::<(), memtrace_analysis::Error>(())
/// ```
///
/// # Errors
/// As for [`Export::write`]. Also when a selector matches nothing, when `place` is one of the traces, or when
/// `place` is one file but the export writes several.
pub fn run(export: &dyn Export, input: &Input, options: &Options, place: Option<&Path>) -> Result<Answer> {
    let options = &if export.takes_host() { with_default_device(input, options)? } else { options.clone() };
    let input = &select(input, options, export.takes_host())?;
    let mut printer = options.printer();
    if let Some(trace) = input.traces.first() {
        heading(&mut printer, input, &trace.meta);
    }
    printer.gap();
    let mut footer = Footer::of([input]);
    let mut written = Vec::new();
    let mut folder = PathBuf::new();
    for (of_job, place) in jobs(export.output_kind(options), input, place)? {
        let mut job = Job { input: &of_job, whole: input, options, place: &place, footer, written };
        export.write(&mut job)?;
        Job { footer, written, .. } = job;
        folder = place;
    }
    let mut files = Vec::new();
    for (path, bytes, content) in &written {
        printer.line([
            "wrote ".into(),
            Cell::new(path.display().to_string(), Style::Strong),
            Cell::new(format!("  {}: {content}", options.units.show(*bytes as i64)), Style::Faint),
        ]);
        files.push(json!({ "file": path.display().to_string(), "bytes": bytes, "holds": content }));
    }
    let file = written.first().map_or(&folder, |(path, ..)| path);
    let open_with = open_command(export.open_with(), file, &folder);
    printer.line([Cell::new("open it: ", Style::Faint), Cell::new(open_with, Style::Command)]);
    let mut json = Map::new();
    json.insert("to".to_owned(), export.name().into());
    json.insert("files".to_owned(), files.into());
    Ok(Answer::new(printer, Value::Object(json), footer))
}

/// Returns the path of each file or folder to write, with the processes whose data it gets.
fn jobs(kind: OutputKind, input: &Input, place: Option<&Path>) -> Result<Vec<(Input, PathBuf)>> {
    let (OutputKind::OneFile(ending)
    | OutputKind::FileEach(ending)
    | OutputKind::FilePerTrace(ending)
    | OutputKind::Folder(ending)) = kind;
    let stem = trace_stem(&input.path);
    let stream = place.filter(|place| out::is_stream(place));
    let per_trace = matches!(kind, OutputKind::FilePerTrace(_));
    let each = (per_trace || matches!(kind, OutputKind::FileEach(_))) && input.traces.len() != 1;
    if let Some(stream) = stream.filter(|_| each || matches!(kind, OutputKind::Folder(_))) {
        return Err(Error::usage(format!(
            "-o {}: this export writes several files; name a folder{}",
            stream.display(),
            if each { ", or choose one process with --rank" } else { "" }
        )));
    }
    // In an existing folder, or in a path that ends in `/`, files are named after the trace.
    let folder = place.filter(|place| place.is_dir() || place.as_os_str().as_encoded_bytes().ends_with(b"/"));
    if per_trace && (place.is_none() || folder.is_some()) {
        let folder = folder.unwrap_or(Path::new(""));
        let job = |trace: &TraceFile| {
            (alone(input, trace), folder.join(format!("{}{ending}", trace_stem(&trace.path))))
        };
        return Ok(input.traces.iter().map(job).collect());
    }
    let file = match (kind, place, folder) {
        // `FOLDER/**` in the command that opens the export needs a path that does not end in `/`.
        (OutputKind::Folder(_), Some(place), _) => place.components().collect(),
        (_, _, Some(folder)) => folder.join(format!("{stem}{ending}")),
        (_, Some(place), None) => place.to_owned(),
        (_, None, _) => PathBuf::from(format!("{stem}{ending}")),
    };
    if !each {
        return Ok(vec![(input.clone(), file)]);
    }
    let ranks: BTreeSet<i32> = input.traces.iter().map(|trace| trace.meta.rank).collect();
    let unique = ranks.len() == input.traces.len();
    let jobs = input.traces.iter().map(|trace| {
        // Processes that share a rank are labeled with the names of their traces.
        let label = if unique {
            format!("r{}", trace.meta.rank)
        } else {
            trace.path.file_name().map_or_else(String::new, |_| trace_stem(&trace.path))
        };
        (alone(input, trace), labelled(&file, &label, ending))
    });
    Ok(jobs.collect())
}

/// Returns an input with only this process of `input`.
fn alone(input: &Input, trace: &TraceFile) -> Input {
    Input { path: input.path.clone(), traces: vec![trace.clone()], notes: Vec::new(), others: Vec::new() }
}

/// Adds a label to a file name: `run.snapshot.pickle` with the label `r1` becomes `run.r1.snapshot.pickle`.
fn labelled(file: &Path, label: &str, ending: &str) -> PathBuf {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let named = match name.strip_suffix(ending) {
        Some(stem) => format!("{stem}.{label}{ending}"),
        None => match name.rsplit_once('.') {
            Some((stem, ending)) => format!("{stem}.{label}.{ending}"),
            None => format!("{name}.{label}"),
        },
    };
    file.with_file_name(named)
}

/// Returns the command that opens an export, from [`Export::open_with`] and the paths of the file and of the folder. A
/// path is one word of the shell. Between apostrophes, it is a text of SQL in a word with double quotes.
fn open_command(open_with: &str, file: &Path, folder: &Path) -> String {
    for (name, path) in [("FILE", file), ("FOLDER", folder)] {
        let Some((before, after)) = open_with.split_once(name) else { continue };
        let path = path.display().to_string();
        let path = match before.ends_with('\'') {
            false => shell_word(&path),
            true => {
                let escape = |c: char| "\\\"$`".contains(c).then_some('\\').into_iter().chain([c]);
                path.replace('\'', "''").chars().flat_map(escape).collect()
            }
        };
        return format!("{before}{path}{after}");
    }
    open_with.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TraceBuilder;

    #[test]
    fn an_export_label_comes_before_the_ending() {
        let name = |file: &str| labelled(Path::new(file), "r1", ".snapshot.pickle").display().to_string();
        assert_eq!(name("a/run.snapshot.pickle"), "a/run.r1.snapshot.pickle");
        assert_eq!(name("a/mine.pickle"), "a/mine.r1.pickle");
        assert_eq!(name("mine"), "mine.r1");
    }

    #[test]
    fn the_command_that_opens_an_export_quotes_its_path() {
        let of = |open_with: &str, path: &str| open_command(open_with, Path::new(path), Path::new(path));
        assert_eq!(of("flamegraph.pl FILE > flame.svg", "a/b.txt"), "flamegraph.pl a/b.txt > flame.svg");
        assert_eq!(of("show FILE", "it's FOLDER"), "show 'it'\\''s FOLDER'");
        assert_eq!(of("duckdb -c \"from 'FILE'\"", "it's $a"), "duckdb -c \"from 'it''s \\$a'\"");
    }

    /// Exports a trace without GPU memory.
    fn export_of_nothing(export: &str, place: &Path) -> Result<Answer> {
        let (process, thread) = (std::process::id(), std::thread::current().id());
        let trace =
            std::env::temp_dir().join(format!("memtrace-{export}-of-nothing-{process}-{thread:?}.csv"));
        std::fs::write(&trace, TraceBuilder::default().finish()).unwrap();
        let input = Input::open(&trace).unwrap();
        let answer = run(find(export).unwrap(), &input, &Options::default(), Some(place));
        std::fs::remove_file(&trace).unwrap();
        answer
    }

    #[test]
    fn an_export_without_content_is_refused() {
        for export in ["speedscope", "collapsed", "timeline"] {
            let place = std::env::temp_dir().join(format!("memtrace-{export}-{}", std::process::id()));
            let error = export_of_nothing(export, &place).unwrap_err().to_string();
            assert!(error.ends_with("used no GPU") && !place.exists(), "{export}: {error}");
        }
    }

    #[test]
    fn the_path_of_a_folder_has_no_slash_at_its_end() {
        let place = |text: &str| {
            let path = Path::new("run.csv").to_owned();
            let input = Input { path, traces: Vec::new(), notes: Vec::new(), others: Vec::new() };
            jobs(OutputKind::Folder(".parquet"), &input, Some(Path::new(text))).unwrap().remove(0).1
        };
        for text in ["out/a", "out/a/", "out//a//"] {
            assert_eq!(place(text).as_os_str(), "out/a");
        }
        assert_eq!(place("/").as_os_str(), "/");
    }

    #[test]
    fn an_error_of_a_file_names_its_path_once() {
        let place = std::env::temp_dir().join(format!("memtrace-no-folder-{}", std::process::id()));
        std::fs::write(&place, "").unwrap();
        let error = export_of_nothing("parquet", &place.join("inside")).unwrap_err().to_string();
        std::fs::remove_file(&place).unwrap();
        assert!(error.matches("memtrace-no-folder").count() == 1 && !error.contains("Parquet"), "{error}");
    }

    #[test]
    fn an_output_never_replaces_a_file_that_is_read() {
        let place = std::env::temp_dir().join(format!("memtrace-itself-{}.csv", std::process::id()));
        std::fs::write(&place, TraceBuilder::default().finish()).unwrap();
        let linked = place.with_extension("link");
        std::fs::hard_link(&place, &linked).unwrap();
        let input = Input::open(&place).unwrap();
        for path in [&place, &linked] {
            let error = Out::beside(path, input.files()).err().unwrap().to_string();
            assert!(error.contains("is the trace itself"), "{error}");
        }
        std::fs::remove_file(&place).unwrap();
        std::fs::remove_file(&linked).unwrap();
    }

    #[test]
    fn a_flag_of_several_exports_is_the_same_in_each() {
        for (at, export) in EXPORTS.iter().enumerate() {
            for flag in export.flags() {
                let others = EXPORTS[at + 1..].iter().flat_map(|export| export.flags());
                for other in others.filter(|other| other.name == flag.name) {
                    assert_eq!((other.help, other.default), (flag.help, flag.default), "{}", flag.name);
                }
            }
        }
    }
}
