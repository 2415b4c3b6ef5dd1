//! What was found, line by line.

use memtrace_analysis::render::printer::Style;
use serde_json::Value;

/// How a thing is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// As it should be.
    Ok,
    /// The trace will lack something.
    Degraded,
    /// There will be no trace.
    Missing,
    /// Good to know.
    Note,
}

impl State {
    pub(super) fn word(self) -> (&'static str, Style) {
        match self {
            State::Ok => ("ok", Style::Strong),
            State::Degraded => ("degraded", Style::Alarm),
            State::Missing => ("missing", Style::Alarm),
            State::Note => ("note", Style::Faint),
        }
    }
}

pub(super) struct Line {
    pub(super) what: &'static str,
    pub(super) state: State,
    pub(super) says: String,
    pub(super) todo: String,
}

#[derive(Default)]
pub(super) struct Findings {
    pub(super) lines: Vec<Line>,
    /// How the phantom answers each name, by kind; null without one.
    pub(super) answers: Value,
}

impl Findings {
    pub(super) fn add(
        &mut self,
        what: &'static str,
        state: State,
        says: impl Into<String>,
        todo: impl Into<String>,
    ) {
        self.lines.push(Line { what, state, says: says.into(), todo: todo.into() });
    }

    pub(super) fn ok(&mut self, what: &'static str, says: impl Into<String>) {
        self.add(what, State::Ok, says, "");
    }

    /// Good, or `otherwise` with what to do.
    pub(super) fn check(
        &mut self,
        what: &'static str,
        good: bool,
        says: impl Into<String>,
        bad: (State, &str, &str),
    ) {
        if good { self.ok(what, says) } else { self.add(what, bad.0, bad.1, bad.2) }
    }
}
