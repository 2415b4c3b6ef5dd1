//! The trait of a report, and the answer that a command prints.

use memtrace_trace::text::shell_word;
use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::options::{Flag, Options};
use crate::read::input::Input;
use crate::read::stream::TraceFile;
use crate::render::footer::Footer;
use crate::render::printer::{Cell, Printer, Style};
use crate::state::replay_trace::Replayed;

/// A command that answers one question about a trace, or a [`View`] of a command.
pub trait Report: Sync {
    /// Returns the name of the command or, for a view, the words that select it, such as `summary --stats`.
    fn name(&self) -> &'static str;

    /// Returns one line for the help.
    fn about(&self) -> &'static str;

    /// Returns example command lines for the help, without `memtrace`, each with a description.
    fn examples(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }

    /// Returns the options of this report alone, in addition to the shared options.
    fn flags(&self) -> &'static [Flag] {
        &[]
    }

    /// Returns the views of the command: its other answers. Options select a view.
    fn views(&self) -> &'static [View] {
        &[]
    }

    /// Returns the placeholders of the traces that the command takes, for the help. Their number is the
    /// number of traces.
    fn inputs(&self) -> &'static [&'static str] {
        &["TRACE"]
    }

    /// Returns the option with which the command takes only the first of its traces, such as `--steps` of
    /// `diff`; `None` if there is no such option.
    fn only_first_with(&self) -> Option<&'static str> {
        None
    }

    /// Returns true if the answer includes host memory, so that `--device cpu` and `--device -1`
    /// select something.
    fn takes_host(&self) -> bool {
        false
    }

    /// Returns what the command must do before this report runs or with its answer.
    ///
    /// # Errors
    /// If the value of an option is invalid.
    fn needs(&self, _options: &Options) -> Result<Needs> {
        Ok(Needs::default())
    }

    /// Answers from `inputs`: as many traces as [`Report::inputs`] names, or only the first of them if the
    /// option of [`Report::only_first_with`] is set. Does not check that `options` select anything;
    /// [`answer`](super::answer) does.
    ///
    /// # Errors
    /// When a trace cannot be read, or the request is invalid.
    fn run(&self, inputs: &[Input], options: &Options) -> Result<Answer>;
}

/// Work for a report that only the command can do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// True if the trace of a killed process must be read as it is, without completing it first.
    pub as_it_is: bool,
    /// A search that a running process must make first. The report then reads the trace that contains its
    /// result.
    pub search: Option<SearchRequest>,
    /// True if the reserved memory of the changed program must be added to the answer.
    pub reserved: bool,
}

/// A request to a running process to search for what holds memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SearchRequest {
    /// The id of the process.
    pub pid: u32,
    /// The maximum time to wait for the next step of the process, in seconds.
    pub patience_s: u64,
}

/// Another answer of a command, which replaces the default answer.
#[derive(Clone, Copy)]
pub struct View {
    /// The options that select this view; any one of them is enough. They have no defaults.
    pub asked_by: &'static [Flag],
    /// The report that answers. Its [`flags`](Report::flags) do not repeat `asked_by`.
    pub report: &'static dyn Report,
}

impl View {
    /// Returns true if `options` ask for this view.
    #[must_use]
    pub fn is_asked(&self, options: &Options) -> bool {
        self.asked_by.iter().any(|flag| options.is_set(flag.name))
    }
}

/// The verdict of an answer, which decides the exit status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verdict {
    /// No problem: exit status 0.
    #[default]
    Fine,
    /// The trace contradicts itself or cannot be read to its end: exit status 1.
    Problem,
    /// A limit was exceeded: exit status 3.
    OverLimit,
}

/// The answer of a report.
#[derive(Debug)]
pub struct Answer {
    /// The text, without the footer.
    pub body: Printer,
    /// The JSON object for `--json`, without the footer.
    pub json: Value,
    /// Notes on how far the data can be trusted, such as lost events.
    pub footer: Footer,
    /// Commands that show more.
    pub next: Vec<String>,
    /// The verdict.
    pub verdict: Verdict,
    /// True if this is a list for other programs. Its text then has no footer, and its JSON has no figures
    /// about the trace.
    pub is_list: bool,
}

impl Answer {
    /// Returns an answer without commands that show more, and with the verdict [`Verdict::Fine`].
    #[must_use]
    pub fn new(body: Printer, json: Value, footer: Footer) -> Answer {
        Answer { body, json, footer, next: Vec::new(), verdict: Verdict::Fine, is_list: false }
    }

    /// Returns the whole text, with the footer and the next commands.
    #[must_use]
    pub fn text(&self) -> String {
        let mut printer = self.body.clone();
        if self.is_list {
            return printer.text().to_owned();
        }
        printer.gap();
        self.footer.print(&mut printer);
        for next in &self.next {
            printer.line([Cell::new("next: ", Style::Faint), Cell::new(next.clone(), Style::Command)]);
        }
        printer.text().to_owned()
    }

    /// Returns the whole answer as JSON: the report's own fields and the footer's fields.
    #[must_use]
    pub fn to_json(&self, report: &str) -> Value {
        let mut all = json!({
            "report": report,
            "lost_events": self.footer.lost,
            "unattributed_share": self.footer.unattributed_share(),
            "unattributed_share_ever": self.footer.unattributed_share_ever(),
            "phantom": self.footer.phantom.json(),
            "notes": self.footer.all_notes().collect::<Vec<_>>(),
        });
        if self.is_list {
            all = json!({ "report": report, "notes": self.footer.all_notes().collect::<Vec<_>>() });
        }
        if let (Value::Object(all), Value::Object(own)) = (&mut all, &self.json) {
            all.extend(own.clone());
        }
        all
    }
}

/// Returns the answer about each process of `input`, with the JSON of all in `processes`. `process` prints the part of
/// the process with this index, and returns its JSON.
///
/// # Errors
/// Returns the first error of `process`.
pub(super) fn for_each_process(
    input: &Input,
    options: &Options,
    mut process: impl FnMut(usize, &TraceFile, &mut Printer, &mut Footer) -> Result<Value>,
) -> Result<Answer> {
    let (mut body, mut footer, mut processes) = (options.printer(), Footer::of([input]), Vec::new());
    for (index, trace) in input.traces.iter().enumerate() {
        processes.push(process(index, trace, &mut body, &mut footer)?);
    }
    Ok(Answer::new(body, json!({ "processes": processes }), footer))
}

/// Returns the command line `memtrace REPORT TRACE MORE`.
#[must_use]
pub(super) fn next(report: &str, input: &Input, more: &str) -> String {
    let path = shell_word(&input.path.display().to_string());
    format!("memtrace {report} {path} {more}").trim_end().to_owned()
}

/// Checks that a trace is complete, so that limits can be checked against it.
///
/// # Errors
/// If the trace is unfinished or damaged, or if events or parts are missing.
pub(super) fn vouch(trace: &TraceFile, replayed: &Replayed) -> Result<()> {
    let (problems, summary) = (&replayed.replay.problems, &replayed.summary);
    let why = if !summary.read_errors.is_empty() {
        "it cannot be read to its end"
    } else if problems.unfinished {
        "it has no end row: its program still runs, the disk was full, or the file was cut"
    } else if replayed.replay.counts.lost > 0 {
        "events were lost"
    } else if problems.seq_gaps > 0
        || summary.skipped > 0
        || summary.shortened
        || !summary.wrong_openings.is_empty()
    {
        "it is damaged"
    } else if !summary.removed.is_empty() && trace.meta.keep.is_empty() {
        "parts of it are missing"
    } else {
        return Ok(());
    };
    Err(Error::usage(format!("{}: the limit cannot be checked: {why}", trace.path.display())))
}
