//! What every report shares: the trait, and the answer that a command prints.

use serde_json::{Value, json};

use crate::error::Result;
use crate::options::{Flag, Options};
use crate::read::input::Input;
use crate::render::footer::Footer;
use crate::render::printer::{Cell, Printer, Style};

/// One question, answered.
pub trait Report: Sync {
    /// What the user types.
    fn name(&self) -> &'static str;

    /// One line for the help.
    fn about(&self) -> &'static str;

    /// The options that it has beside the shared ones.
    fn flags(&self) -> &'static [Flag] {
        &[]
    }

    /// What its traces are called in the help; how many there are, it takes.
    fn inputs(&self) -> &'static [&'static str] {
        &["TRACE"]
    }

    /// Reads the traces, as many as [`Report::inputs`] names, and answers.
    ///
    /// # Errors
    /// When a trace cannot be read or what was asked for makes no sense.
    fn run(&self, inputs: &[Input], options: &Options) -> Result<Answer>;
}

/// How a command that asked for an answer ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing to complain of.
    #[default]
    Fine,
    /// The trace contradicts itself.
    Problem,
    /// A limit was broken.
    OverLimit,
}

/// What a report found.
#[derive(Debug, Default)]
pub struct Answer {
    /// For people, without the footer.
    pub body: Printer,
    /// For programs: an object.
    pub json: Value,
    /// How far it can be trusted.
    pub footer: Footer,
    /// What to type next.
    pub next: Vec<String>,
    /// How the command ends.
    pub verdict: Verdict,
}

impl Answer {
    /// The whole screen.
    #[must_use]
    pub fn text(&self) -> String {
        let mut printer = self.body.clone();
        printer.gap();
        self.footer.print(&mut printer);
        for next in &self.next {
            printer.line([Cell::new("next: ", Style::Faint), Cell::new(next.clone(), Style::Command)]);
        }
        printer.text().to_owned()
    }

    /// The whole answer as JSON: the report's own fields, and those of the footer.
    #[must_use]
    pub fn to_json(&self, report: &str) -> Value {
        let mut all = json!({
            "report": report,
            "lost_events": self.footer.lost,
            "unattributed_share": self.footer.unattributed_share(),
            "unattributed_share_ever": self.footer.unattributed_share_ever(),
            "phantom": self.footer.phantom.json(),
            "notes": self.footer.notes,
        });
        if let (Value::Object(all), Value::Object(own)) = (&mut all, &self.json) {
            all.extend(own.clone());
        }
        all
    }
}

/// The command that shows more: `memtrace REPORT TRACE MORE`.
#[must_use]
pub(super) fn next(report: &str, input: &Input, more: &str) -> String {
    let path = input.path.display().to_string();
    let path = if path.contains([' ', '\'', '"', '(', '&', ';']) {
        format!("'{}'", path.replace('\'', "'\\''"))
    } else {
        path
    };
    format!("memtrace {report} {path} {more}").trim_end().to_owned()
}
