//! Interns texts, contexts and stacks, so that an event carries four bytes for each.
//!
//! Numbers are valid for the life of the process and after a fork. The first use of a number is defined in
//! the lane of its thread ([`crate::recorder`]), so recovery can read the events of a killed process without
//! its memory.

pub use memtrace_trace::context::{Context, ContextId, Frame, StackId, TextId};
use memtrace_trace::context::{MAX_CONTEXTS, MAX_TEXT_BYTES};
pub use memtrace_trace::stacks::FrameKind;
use memtrace_trace::text::MAX_TEXT;
use rustc_hash::FxHashMap;

use crate::fork_lock::ForkLock;

const MOST: usize = if cfg!(test) { 1 << 10 } else { MAX_CONTEXTS };
const MOST_TEXT: usize = if cfg!(test) { 64 << 10 } else { MAX_TEXT_BYTES };
/// The text that stands for those beyond the limit.
const TOO_MANY: &str = "(too many names)";

/// The interned texts, contexts and stacks.
#[derive(Default)]
pub struct Tables {
    text_bytes: usize,
    texts: FxHashMap<Box<str>, TextId>,
    text_list: Vec<Box<str>>,
    contexts: FxHashMap<Context, ContextId>,
    context_list: Vec<Context>,
    stacks: FxHashMap<Frame, StackId>,
    stack_list: Vec<Frame>,
}

impl Tables {
    /// The number of `text`, and whether it is new.
    pub fn text(&mut self, text: &str) -> (TextId, bool) {
        if text.is_empty() {
            return (0, false);
        }
        let text = cut(text);
        if let Some(id) = self.texts.get(text) {
            return (*id, false);
        }
        if self.text_bytes >= MOST_TEXT && text != TOO_MANY {
            return self.text(TOO_MANY);
        }
        self.text_bytes += text.len() + size_of::<Box<str>>();
        self.text_list.push(text.into());
        let id = self.text_list.len() as TextId;
        self.texts.insert(text.into(), id);
        (id, true)
    }

    /// The number of `context`, and whether it is new.
    pub fn context(&mut self, context: Context) -> (ContextId, bool) {
        if context == Context::default() {
            return (0, false);
        }
        if let Some(id) = self.contexts.get(&context) {
            return (*id, false);
        }
        if self.context_list.len() >= MOST {
            // There are few phases and streams.
            let Context { phase, stream, flags, .. } = context;
            let less = Context { phase, stream, flags, ..Context::default() };
            return if less == context { (0, false) } else { self.context(less) };
        }
        self.context_list.push(context);
        let id = self.context_list.len() as ContextId;
        self.contexts.insert(context, id);
        (id, true)
    }

    /// The number of a stack, and whether it is new.
    pub fn stack(&mut self, frame: Frame) -> (StackId, bool) {
        if let Some(id) = self.stacks.get(&frame) {
            return (*id, false);
        }
        if self.stack_list.len() >= MOST {
            return (frame.parent, false);
        }
        self.stack_list.push(frame);
        let id = self.stack_list.len() as StackId;
        self.stacks.insert(frame, id);
        (id, true)
    }

    /// The text of a number.
    #[must_use]
    pub fn text_of(&self, id: TextId) -> &str {
        id.checked_sub(1).and_then(|index| self.text_list.get(index as usize)).map_or("", |text| text)
    }

    /// Every text with its number.
    pub fn texts(&self) -> impl Iterator<Item = (TextId, &str)> {
        self.text_list.iter().enumerate().map(|(index, text)| (index as TextId + 1, &**text))
    }

    /// Every stack with its number; a stack stands behind the one around it.
    pub fn stacks(&self) -> impl Iterator<Item = (StackId, Frame)> {
        self.stack_list.iter().enumerate().map(|(index, frame)| (index as StackId + 1, *frame))
    }

    /// Every context with its number.
    pub fn contexts(&self) -> impl Iterator<Item = (ContextId, Context)> {
        self.context_list.iter().enumerate().map(|(index, context)| (index as ContextId + 1, *context))
    }
}

fn cut(text: &str) -> &str {
    let mut end = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// The tables of this process, made at the first use.
static TABLES: ForkLock<Option<Tables>> = ForkLock::new(None);

/// Runs `work` on the tables of this process. `work` must intern through them only.
pub fn with_tables<R>(work: impl FnOnce(&mut Tables) -> R) -> R {
    TABLES.with(|tables| work(tables.get_or_insert_with(Tables::default)))
}

/// Locks the tables before a fork; see [`ForkLock`].
pub fn lock_for_fork() {
    TABLES.lock_for_fork();
}

/// Unlocks the tables after a fork, on both sides.
///
/// # Safety
/// As for [`ForkLock::unlock_after_fork`], after [`lock_for_fork`].
pub unsafe fn unlock_after_fork() {
    // SAFETY: by the contract.
    unsafe { TABLES.unlock_after_fork() };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_texts_and_contexts_are_interned_once() {
        let mut tables = Tables::default();
        assert_eq!(tables.text(""), (0, false));
        assert_eq!(tables.text("a"), (1, true));
        assert_eq!(tables.text("b"), (2, true));
        assert_eq!(tables.text("a"), (1, false));
        assert_eq!(tables.text_of(2), "b");
        assert_eq!(tables.text_of(0), "");
        let context = Context { op: 1, module: 2, ..Context::default() };
        assert_eq!(tables.context(context), (1, true));
        assert_eq!(tables.context(context), (1, false));
        assert_eq!(tables.context(Context::default()), (0, false));
    }

    #[test]
    fn the_intern_tables_are_bounded() {
        let mut tables = Tables::default();
        for number in 0..MOST as u32 {
            assert!(tables.context(Context { phase: 1, module: number, ..Context::default() }).1);
            assert!(tables.stack(Frame::op(0, number)).1);
        }
        // Interned ones keep their number, and others get a number with less detail.
        assert_eq!(tables.context(Context { phase: 1, module: 7, ..Context::default() }), (8, false));
        assert_eq!(tables.context(Context { phase: 1, module: u32::MAX, ..Context::default() }), (1, false));
        assert_eq!(tables.context(Context { phase: 2, module: u32::MAX, ..Context::default() }), (0, false));
        assert_eq!(tables.stack(Frame::op(3, u32::MAX)), (3, false));
        let long = "x".repeat(MAX_TEXT - 8);
        let last = (0..100).map(|number| tables.text(&format!("{long}{number}")).0).last();
        assert_eq!(tables.text_of(last.unwrap_or(0)), TOO_MANY);
        assert!(tables.text_list.len() < 100);
    }
}
