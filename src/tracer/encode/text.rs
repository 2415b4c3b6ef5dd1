//! A text, with what rows need of it.

use memtrace_trace::form::Form;
use memtrace_trace::text::LOAD;

/// The phases that decide the category of memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum PhaseKind {
    Forward,
    Backward,
    /// The surviving blocks of an optimizer step become optimizer state.
    Optimizer,
    Load,
    Other,
}

impl PhaseKind {
    fn of(phase: &str) -> PhaseKind {
        match phase {
            "forward" => PhaseKind::Forward,
            "backward" => PhaseKind::Backward,
            "optimizer" | "optimizer.step" => PhaseKind::Optimizer,
            LOAD => PhaseKind::Load,
            _ => PhaseKind::Other,
        }
    }
}

/// A text, and what rows need of it if it is the name of a phase or a [`Form`]. Both are found once, not per row.
#[derive(Clone)]
pub(crate) struct Text {
    pub(crate) text: String,
    phase: PhaseKind,
    /// The type and the shape.
    form: Option<[Box<str>; 2]>,
}

impl Text {
    pub(crate) fn new(text: String) -> Text {
        let form = Form::parse(&text);
        let form = (form != Form::UNKNOWN).then(|| [form.dtype.into(), form.shape.into()]);
        Text { phase: PhaseKind::of(&text), text, form }
    }

    #[inline(always)]
    pub(crate) fn phase(&self) -> PhaseKind {
        self.phase
    }

    /// Returns the type and the shape that the text is; unknown for any other text.
    #[inline(always)]
    pub(crate) fn form(&self) -> Form<'_> {
        match &self.form {
            Some([dtype, shape]) => Form { dtype, shape },
            None => Form::UNKNOWN,
        }
    }
}
