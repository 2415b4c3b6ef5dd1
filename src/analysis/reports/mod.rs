//! The reports: one table, a file each.
//!
//! A new report is a file here and a line in [`REPORTS`]; the command, its help and the tests walk the
//! table.

mod actions;
mod budget;
mod check;
mod diff;
mod frag;
mod leaks;
mod ledger;
mod modules;
mod oom;
mod peak;
mod ranks;
mod snapshot;
mod stats;
mod summary;
mod timeline;
mod top_ops;

use serde_json::{Value, json};

use crate::error::Result;
use crate::options::{Flag, Options};
use crate::read::input::Input;
use crate::render::text::{Cell, Page, Style};
use crate::state::replay_trace::Footer;

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

/// Every report, in the order of the help.
pub const REPORTS: &[&dyn Report] = &[
    &summary::Summary,
    &peak::Peak,
    &oom::Oom,
    &ledger::Ledger,
    &modules::Modules,
    &snapshot::Snapshot,
    &top_ops::TopOps,
    &frag::Frag,
    &leaks::Leaks,
    &stats::Stats,
    &actions::Actions,
    &diff::Diff,
    &budget::Budget,
    &ranks::Ranks,
    &timeline::Timeline,
    &check::Check,
];

/// The report of that name.
#[must_use]
pub fn find(name: &str) -> Option<&'static dyn Report> {
    REPORTS.iter().copied().find(|report| report.name() == name)
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
    pub page: Page,
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
        let mut page = self.page.clone();
        page.gap();
        self.footer.print(&mut page);
        for next in &self.next {
            page.line([Cell::new("next: ", Style::Faint), Cell::new(next.clone(), Style::Command)]);
        }
        page.text().to_owned()
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
fn next(report: &str, input: &Input, more: &str) -> String {
    let path = input.path.display().to_string();
    let path = if path.contains([' ', '\'', '"', '(', '&', ';']) {
        format!("'{}'", path.replace('\'', "'\\''"))
    } else {
        path
    };
    format!("memtrace {report} {path} {more}").trim_end().to_owned()
}
