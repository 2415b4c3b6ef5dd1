//! The texts, contexts and stacks of ids: those that threads define, and those that the encoder numbers itself.

use memtrace_trace::context::{Context, Frame, MAX_CONTEXTS, MAX_TEXTS, StackId};
use memtrace_trace::form::Form;
use memtrace_trace::stacks::Stack;
use memtrace_trace::text::{NONE, original_text, safe_text};
use memtrace_trace::{Event, Payload};

use crate::live::Owner;
use crate::own_names::{OWN_IDS, OwnNames};
use crate::text::{PhaseKind, Text};

/// Returns the table entry for `id`, and fills missing entries before it with `unknown`. Returns `None` for
/// an id that no process assigns, which a damaged journal may contain.
fn entry<T: Clone>(table: &mut Vec<T>, id: u32, most: usize, unknown: T) -> Option<&mut T> {
    let index = (id as usize).checked_sub(1).filter(|index| *index < most)?;
    if table.len() <= index {
        table.resize(index + 1, unknown);
    }
    table.get_mut(index)
}

/// The name of a range.
#[derive(Clone, Copy)]
pub(crate) struct RangeName {
    /// The text id of the name.
    pub(crate) name: u32,
    /// The text id of the class of a module; 0 if there is no class.
    pub(crate) class: u32,
}

/// The text, context or stack of each id. An id without a definition has an unknown text.
pub struct Definitions {
    texts: Vec<Text>,
    /// The number of texts that look like spreadsheet formulas. `None` in a resumed trace, because the texts
    /// of the first encoder were not counted.
    formulas: Option<u64>,
    contexts: Vec<Context>,
    /// One more than the number of definitions of texts and contexts so far; it wraps; see [`Definitions::key`].
    learned: u32,
    stacks: Vec<Frame>,
    /// The number of entries of `stacks` that are already in the file.
    stacks_written: usize,
    own: OwnNames,
}

impl Default for Definitions {
    fn default() -> Definitions {
        Definitions {
            texts: Vec::new(),
            formulas: Some(0),
            contexts: Vec::new(),
            learned: 1,
            stacks: Vec::new(),
            stacks_written: 0,
            own: OwnNames::default(),
        }
    }
}

impl Definitions {
    /// Stores a definition that a thread recorded. `slots` are the bytes of the event slots after the
    /// definition; they hold the text of a text definition. Any other event is ignored.
    pub fn define(&mut self, definition: &Event, slots: &[u8]) {
        match definition.unpack() {
            Some((_, Payload::DefineText { id, length })) => {
                self.define_text(id, &String::from_utf8_lossy(&slots[..length.min(slots.len())]));
            }
            Some((_, Payload::DefineContext { id, context })) => self.define_context(id, context),
            Some((_, Payload::DefineStack { id, frame })) => self.define_stack(id, frame),
            _ => {}
        }
    }

    /// Stores the text of `id` in the form that is safe for a spreadsheet. Ignores an id beyond the limit.
    pub fn define_text(&mut self, id: u32, text: &str) {
        if let Some(entry) = entry(&mut self.texts, id, MAX_TEXTS, Text::new(NONE.to_owned())) {
            *entry = Text::new(safe_text(text));
            let is_formula = original_text(&entry.text).len() < entry.text.len();
            self.formulas = self.formulas.map(|count| count + u64::from(is_formula));
            self.learned = self.learned.wrapping_add(1);
        }
    }

    /// Stores the context of `id`. Ignores an id beyond the limit.
    pub fn define_context(&mut self, id: u32, context: Context) {
        if let Some(entry) = entry(&mut self.contexts, id, MAX_CONTEXTS, Context::default()) {
            *entry = context;
            self.learned = self.learned.wrapping_add(1);
        }
    }

    /// Stores the innermost frame of the stack `id`. Ignores an id beyond the limit.
    fn define_stack(&mut self, id: StackId, frame: Frame) {
        if let Some(entry) = entry(&mut self.stacks, id, MAX_CONTEXTS, Frame::default()) {
            *entry = frame;
        }
    }

    /// Returns true if some stacks are not yet in the file.
    #[must_use]
    pub fn has_new_stacks(&self) -> bool {
        self.stacks_written < self.stacks.len()
    }

    /// Marks the first `count` stacks as already in the file.
    pub fn set_stacks_written(&mut self, count: usize) {
        self.stacks_written = count.min(self.stacks.len());
    }

    /// Returns the stacks that are not yet in the file, and marks them as written.
    pub fn new_stacks(&mut self) -> Vec<Stack<'_>> {
        let first = std::mem::replace(&mut self.stacks_written, self.stacks.len());
        let ids = first as StackId + 1..self.stacks.len() as StackId + 1;
        ids.map(|id| {
            let mut frames = Vec::new();
            let mut next = id;
            // This loop ends even if the journal is damaged, because only a parent with a smaller id is
            // followed.
            while let Some(frame) = (next as usize).checked_sub(1).and_then(|index| self.stacks.get(index)) {
                frames.push(self.text(frame.text));
                next = if frame.parent < next { frame.parent } else { 0 };
            }
            frames.reverse();
            let Frame { parent, kind, .. } = self.stacks[id as usize - 1];
            Stack { id, parent, kind, frames }
        })
        .collect()
    }

    #[inline(always)]
    pub(crate) fn context(&self, id: u32) -> Context {
        let (contexts, id) =
            if id > OWN_IDS { (&self.own.contexts, id - OWN_IDS) } else { (&self.contexts, id) };
        (id as usize).checked_sub(1).and_then(|index| contexts.get(index)).copied().unwrap_or_default()
    }

    #[inline(always)]
    pub(crate) fn text(&self, id: u32) -> &str {
        self.defined(id).map_or(NONE, |text| text.text.as_str())
    }

    /// Returns the kind of the phase with this text id.
    #[inline(always)]
    pub(crate) fn phase(&self, id: u32) -> PhaseKind {
        self.defined(id).map_or(PhaseKind::Other, Text::phase)
    }

    #[inline(always)]
    fn defined(&self, id: u32) -> Option<&Text> {
        let (texts, id) = if id > OWN_IDS { (&self.own.texts, id - OWN_IDS) } else { (&self.texts, id) };
        texts.get((id as usize).wrapping_sub(1))
    }

    /// Returns the id that the encoder assigns to a text.
    pub(crate) fn own_text(&mut self, text: &str) -> u32 {
        self.own.text(text)
    }

    /// Returns the id that the encoder assigns to a context.
    pub(crate) fn own_context(&mut self, context: Context) -> u32 {
        self.own.id(context)
    }

    /// Stops counting the texts that look like formulas, because another encoder wrote some of them.
    pub(crate) fn forget_formulas(&mut self) {
        self.formulas = None;
    }

    /// Returns the number of texts that look like spreadsheet formulas, if it is known.
    pub(crate) fn formulas(&self) -> Option<u64> {
        self.formulas
    }

    /// Returns the type and shape with a text id; unknown for 0.
    #[inline(always)]
    pub fn form(&self, id: u32) -> Form<'_> {
        match self.defined(id) {
            Some(text) => text.form(),
            None => Form::UNKNOWN,
        }
    }

    /// Returns the [`TextKeys`](memtrace_trace::columns::TextKeys) of a context's or a form's texts. The key changes
    /// with each new definition, because a definition may change the texts.
    #[inline(always)]
    pub(crate) fn key(&self, id: u32) -> u64 {
        u64::from(self.learned) << 32 | u64::from(id)
    }

    /// Returns the texts of the context with this id.
    #[inline(always)]
    #[must_use]
    pub fn owner(&self, context: u32) -> Owner<'_> {
        let Context { op, module, phase, .. } = self.context(context);
        Owner { op: self.text(op), module: self.text(module), phase: self.text(phase) }
    }
}
