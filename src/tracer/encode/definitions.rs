//! Stores definitions: the text, context or stack of each id.

use memtrace_trace::context::{Context, Frame, MAX_CONTEXTS, MAX_TEXTS, StackId};
use memtrace_trace::stacks::Stack;
use memtrace_trace::text::{NONE, original_text, safe_text};
use memtrace_trace::{Event, Payload};

use crate::encoder::Encoder;
use crate::own_names::OWN_IDS;

/// Returns the table entry for `id`, and fills missing entries before it with `unknown`. Returns `None` for
/// an id that no process assigns, which a damaged journal may contain.
fn entry<T: Clone>(table: &mut Vec<T>, id: u32, most: usize, unknown: T) -> Option<&mut T> {
    let index = (id as usize).checked_sub(1).filter(|index| *index < most)?;
    if table.len() <= index {
        table.resize(index + 1, unknown);
    }
    table.get_mut(index)
}

impl Encoder {
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
        if let Some(entry) = entry(&mut self.texts, id, MAX_TEXTS, NONE.to_owned()) {
            *entry = safe_text(text);
            let is_formula = original_text(entry).len() < entry.len();
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

    pub(crate) fn context(&self, id: u32) -> Context {
        let (contexts, id) =
            if id > OWN_IDS { (&self.own_names.contexts, id - OWN_IDS) } else { (&self.contexts, id) };
        (id as usize).checked_sub(1).and_then(|index| contexts.get(index)).copied().unwrap_or_default()
    }

    pub(crate) fn text(&self, id: u32) -> &str {
        let (texts, id) =
            if id > OWN_IDS { (&self.own_names.texts, id - OWN_IDS) } else { (&self.texts, id) };
        (id as usize).checked_sub(1).and_then(|index| texts.get(index)).map_or(NONE, String::as_str)
    }
}
