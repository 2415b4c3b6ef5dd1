//! The findings of `memtrace doctor`.

use memtrace_analysis::render::printer::Style;
use serde_json::{Value, json};

/// The state of one subject that was checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The subject works.
    Ok,
    /// The trace will lack something.
    Degraded,
    /// There will be no trace.
    Missing,
    /// Information only.
    Note,
}

impl State {
    /// Returns the word for text and `--json`.
    pub(super) fn word(self) -> &'static str {
        match self {
            State::Ok => "ok",
            State::Degraded => "degraded",
            State::Missing => "missing",
            State::Note => "note",
        }
    }

    pub(super) fn style(self) -> Style {
        match self {
            State::Ok => Style::Strong,
            State::Degraded | State::Missing => Style::Alarm,
            State::Note => Style::Faint,
        }
    }
}

/// The result of one check, which is one line of the answer.
#[derive(PartialEq, Eq)]
pub(super) struct Finding {
    pub(super) subject: &'static str,
    pub(super) state: State,
    pub(super) message: String,
    /// The next step for the user; empty if there is nothing to do.
    pub(super) advice: String,
}

impl Finding {
    pub(super) fn json(&self) -> Value {
        json!({
            "what": self.subject,
            "state": self.state.word(),
            "says": self.message,
            "todo": self.advice,
        })
    }
}

/// All findings so far.
#[derive(Default)]
pub(super) struct Findings {
    pub(super) list: Vec<Finding>,
    /// The names of the functions that the simulated GPU answers, grouped by the kind of answer; null without
    /// a simulated GPU.
    pub(super) phantom_answers: Value,
}

impl Findings {
    pub(super) fn add(
        &mut self,
        subject: &'static str,
        state: State,
        message: impl Into<String>,
        advice: impl Into<String>,
    ) {
        let finding = Finding { subject, state, message: message.into(), advice: advice.into() };
        // Several checks may produce the same finding. List it once.
        if !self.list.contains(&finding) {
            self.list.push(finding);
        }
    }

    pub(super) fn ok(&mut self, subject: &'static str, message: impl Into<String>) {
        self.add(subject, State::Ok, message, "");
    }

    /// Adds a finding about `subject`. If `good`, it is `message` with the state [`State::Ok`]; otherwise it
    /// has the state, message and advice of `bad`.
    pub(super) fn check(
        &mut self,
        subject: &'static str,
        good: bool,
        message: impl Into<String>,
        bad: (State, &str, &str),
    ) {
        if good { self.ok(subject, message) } else { self.add(subject, bad.0, bad.1, bad.2) }
    }
}
