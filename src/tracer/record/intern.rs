//! Interns texts, contexts and stacks, so that an event carries four bytes for each.
//!
//! Numbers are valid for the life of the process and after a fork. The thread that gets a new number records
//! the definition in its lane ([`crate::recorder`]). So recovery can read the events of a killed process.
//! Definitions are kept to the end of the process, so their number is limited; names beyond the limit share
//! the text `(too many names)`.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use memtrace_trace::Event;
pub use memtrace_trace::context::{Context, ContextId, Frame, StackId, TextId};
use memtrace_trace::context::{MAX_CONTEXTS, MAX_TEXT_BYTES};
use memtrace_trace::event::bytes::text_events_len;
pub use memtrace_trace::stacks::FrameKind;
use memtrace_trace::text::{MAX_TEXT, cut};
use rustc_hash::FxHashMap;

use crate::fork_lock::ForkLock;

/// The text that replaces every text beyond the limit.
pub(crate) const TOO_MANY: &str = "(too many names)";

/// The number of contexts that still get a number beyond the limit. Such a context has no stack, and no op or
/// module other than `(too many names)`, so there are few of them.
const MORE_CONTEXTS: usize = 1 << 10;

/// The number of bytes of the limit that are reserved for texts of at most [`SHORT_TEXT`] bytes. So a short
/// text, such as the name of a phase, still gets a number after long texts have used up the rest.
const SHORT_TEXTS_BYTES: usize = 4 << 10;
const SHORT_TEXT: usize = 64;

/// The minimum size of the buffer from which the limits are computed. A smaller buffer would leave no room
/// for the names of one model.
const LEAST_BUFFER: usize = if cfg!(test) { 64 << 10 } else { 8 << 20 };

/// The size of the buffer of events, which limits the definitions.
static BUFFER: AtomicUsize = AtomicUsize::new(16 << 20);

/// The number of requests to intern a text, context or stack that got no number of their own because of the
/// limits.
static REFUSED: AtomicU64 = AtomicU64::new(0);

/// Sets the size of the buffer of events, before anything is interned. The definitions of a process are
/// limited to 5/4 of this size. Their file is in the same folder as the journal, usually `/dev/shm`, and
/// takes memory from the program there.
pub fn set_buffer(bytes: usize) {
    BUFFER.store(bytes, Ordering::Relaxed);
}

/// Returns the number of requests to intern a text, context or stack that got no number of their own because
/// of the limits.
pub(crate) fn refused() -> u64 {
    REFUSED.load(Ordering::Relaxed)
}

/// The limits of interned data.
#[derive(Clone, Copy)]
struct Limits {
    /// The total size in bytes of the definitions of texts.
    text_bytes: usize,
    contexts: usize,
    stacks: usize,
}

impl Limits {
    /// Returns the limits of a process whose event buffer has `bytes` bytes.
    fn for_buffer(bytes: usize) -> Limits {
        let (bytes, slot) = (bytes.max(LEAST_BUFFER), size_of::<Event>());
        Limits {
            text_bytes: (bytes / 2).min(MAX_TEXT_BYTES),
            contexts: (bytes / 2 / slot).min(MAX_CONTEXTS - MORE_CONTEXTS),
            stacks: (bytes / 4 / slot).min(MAX_CONTEXTS),
        }
    }
}

/// The interned texts, contexts and stacks.
pub struct Tables {
    limits: Limits,
    text_bytes: usize,
    texts: FxHashMap<Box<str>, TextId>,
    text_list: Vec<Box<str>>,
    contexts: FxHashMap<Context, ContextId>,
    context_list: Vec<Context>,
    stacks: FxHashMap<Frame, StackId>,
    stack_list: Vec<Frame>,
}

impl Tables {
    /// Creates the tables of a process whose event buffer has `buffer` bytes. Their first text is
    /// [`TOO_MANY`], which replaces names beyond the limit.
    fn new(buffer: usize) -> Tables {
        let mut tables = Tables {
            limits: Limits::for_buffer(buffer),
            text_bytes: 0,
            texts: FxHashMap::default(),
            text_list: Vec::new(),
            contexts: FxHashMap::default(),
            context_list: Vec::new(),
            stacks: FxHashMap::default(),
            stack_list: Vec::new(),
        };
        tables.text(TOO_MANY);
        tables
    }

    /// Returns the number of `text`, and whether the number is new, so that the caller must record the
    /// definition. An empty text has the number 0. Beyond the limit, a new text gets the number of
    /// [`TOO_MANY`].
    pub fn text(&mut self, text: &str) -> (TextId, bool) {
        if text.is_empty() {
            return (0, false);
        }
        let text = cut(text, MAX_TEXT);
        if let Some(id) = self.texts.get(text) {
            return (*id, false);
        }
        let bytes = text_events_len(text) * size_of::<Event>();
        let reserved = if text.len() <= SHORT_TEXT { 0 } else { SHORT_TEXTS_BYTES };
        if self.text_bytes + bytes + reserved > self.limits.text_bytes && text != TOO_MANY {
            refuse();
            return self.text(TOO_MANY);
        }
        self.text_bytes += bytes;
        self.text_list.push(text.into());
        let id = self.text_list.len() as TextId;
        self.texts.insert(text.into(), id);
        (id, true)
    }

    /// Returns the number of `context`, and true if the number is new. The default context has the number 0.
    /// Beyond the limit, a new context gets the number of a less detailed one with the same phase, or 0.
    pub fn context(&mut self, context: Context) -> (ContextId, bool) {
        if context == Context::default() {
            return (0, false);
        }
        if let Some(id) = self.contexts.get(&context) {
            return (*id, false);
        }
        if self.context_list.len() >= self.limits.contexts {
            refuse();
            let too_many = self.text(TOO_MANY).0;
            let less_of = |text: TextId| if text == 0 { 0 } else { too_many };
            let less =
                Context { op: less_of(context.op), module: less_of(context.module), stack: 0, ..context };
            if less != context {
                return self.context(less);
            }
            if self.context_list.len() >= self.limits.contexts + MORE_CONTEXTS {
                return (0, false);
            }
        }
        self.context_list.push(context);
        let id = self.context_list.len() as ContextId;
        self.contexts.insert(context, id);
        (id, true)
    }

    /// Returns the number of the stack with the innermost `frame`, and true if the number is new. Beyond the
    /// limit, a new stack gets the number of its parent.
    pub fn stack(&mut self, frame: Frame) -> (StackId, bool) {
        if let Some(id) = self.stacks.get(&frame) {
            return (*id, false);
        }
        if self.stack_list.len() >= self.limits.stacks {
            refuse();
            return (frame.parent, false);
        }
        self.stack_list.push(frame);
        let id = self.stack_list.len() as StackId;
        self.stacks.insert(frame, id);
        (id, true)
    }

    /// Returns the text with this number, or an empty text if no text has this number.
    #[must_use]
    pub fn text_of(&self, id: TextId) -> &str {
        id.checked_sub(1).and_then(|index| self.text_list.get(index as usize)).map_or("", |text| text)
    }

    /// Returns true if the text of a frame of this stack passes the test.
    pub fn has_frame(&self, mut stack: StackId, test: impl Fn(&str) -> bool) -> bool {
        while let Some(frame) = stack.checked_sub(1).and_then(|index| self.stack_list.get(index as usize)) {
            if test(self.text_of(frame.text)) {
                return true;
            }
            stack = frame.parent;
        }
        false
    }

    /// Returns every text with its number.
    pub fn texts(&self) -> impl Iterator<Item = (TextId, &str)> {
        self.text_list.iter().enumerate().map(|(index, text)| (index as TextId + 1, &**text))
    }

    /// Returns every stack with its number. Each stack comes after the stack that surrounds it.
    pub fn stacks(&self) -> impl Iterator<Item = (StackId, Frame)> {
        self.stack_list.iter().enumerate().map(|(index, frame)| (index as StackId + 1, *frame))
    }

    /// Returns every context with its number.
    pub fn contexts(&self) -> impl Iterator<Item = (ContextId, Context)> {
        self.context_list.iter().enumerate().map(|(index, context)| (index as ContextId + 1, *context))
    }
}

fn refuse() {
    REFUSED.fetch_add(1, Ordering::Relaxed);
}

/// The tables of this process, created at the first use.
static TABLES: ForkLock<Option<Tables>> = ForkLock::new(None);

/// Interns `text`. Calls `define` to record the text if its number is new.
pub(crate) fn text_id(text: &str, define: impl FnOnce(TextId, &str)) -> TextId {
    with_tables(|tables| {
        let (id, new) = tables.text(text);
        if new {
            define(id, tables.text_of(id));
        }
        id
    })
}

/// Runs `work` on the tables of this process. `work` must intern through these tables only, because their
/// lock is held.
pub fn with_tables<R>(work: impl FnOnce(&mut Tables) -> R) -> R {
    TABLES.with(|tables| work(tables.get_or_insert_with(|| Tables::new(BUFFER.load(Ordering::Relaxed)))))
}

/// Locks the tables before a fork; see [`ForkLock`].
pub fn lock_for_fork() {
    TABLES.lock_for_fork();
}

/// Unlocks the tables after a fork, on both sides.
///
/// # Safety
/// The requirements are the same as for [`ForkLock::unlock_after_fork`], with [`lock_for_fork`] as the
/// earlier call.
pub unsafe fn unlock_after_fork() {
    // SAFETY: by the contract.
    unsafe { TABLES.unlock_after_fork() };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tables() -> Tables {
        Tables::new(64 << 10)
    }

    #[test]
    fn equal_texts_and_contexts_are_interned_once() {
        let mut tables = tables();
        let first = tables.text("a").0;
        assert_eq!(tables.text(""), (0, false));
        assert_eq!(tables.text("a"), (first, false));
        assert_eq!(tables.text("b"), (first + 1, true));
        assert_eq!(tables.text("a"), (first, false));
        assert_eq!(tables.text_of(first + 1), "b");
        assert_eq!(tables.text_of(0), "");
        let context = Context { op: 1, module: 2, ..Context::default() };
        assert_eq!(tables.context(context), (1, true));
        assert_eq!(tables.context(context), (1, false));
        assert_eq!(tables.context(Context::default()), (0, false));
    }

    /// `scripts/miri` runs this test, which finds an ordering of the lock that is too weak.
    #[test]
    fn a_text_that_threads_intern_at_once_is_defined_once() {
        use std::sync::Mutex;
        let defined = Mutex::new(Vec::new());
        let intern = || {
            let name = |number| format!("at once {number}");
            (0..10).map(|number| text_id(&name(number), |id, _| defined.lock().unwrap().push(id))).collect()
        };
        let ids: Vec<Vec<TextId>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..3).map(|_| scope.spawn(intern)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(ids.iter().all(|of_thread| *of_thread == ids[0]), "{ids:?}");
        let mut defined = defined.into_inner().unwrap();
        let (mut expected, count) = (ids[0].clone(), defined.len());
        defined.sort_unstable();
        expected.sort_unstable();
        assert_eq!((defined, count), (expected, 10));
    }

    #[test]
    fn the_intern_tables_are_bounded() {
        let mut tables = tables();
        let Limits { contexts, stacks, .. } = tables.limits;
        for number in 1..=contexts as u32 {
            assert!(tables.context(Context { phase: 1, module: number, ..Context::default() }).1);
        }
        for number in 1..=stacks as u32 {
            assert!(tables.stack(Frame::op(0, number)).1);
        }
        // Setup: the number of contexts is at its limit -> an interned context keeps its id, and a new
        // context gets the id of a less detailed one with the same phase.
        assert_eq!(tables.context(Context { phase: 1, module: 7, ..Context::default() }), (7, false));
        for phase in 1..=3 {
            let (id, _) = tables.context(Context { phase, module: u32::MAX, ..Context::default() });
            let (_, context) = tables.contexts().nth(id as usize - 1).unwrap();
            assert_eq!((context.phase, tables.text_of(context.module)), (phase, TOO_MANY));
        }
        for phase in 4..10_000 {
            tables.context(Context { phase, ..Context::default() });
        }
        assert_eq!(tables.context_list.len(), contexts + MORE_CONTEXTS);
        assert_eq!(tables.context(Context { phase: 10_000, ..Context::default() }), (0, false));
        assert_eq!(tables.stack(Frame::op(3, u32::MAX)), (3, false));
        assert!(refused() > 0);
    }

    #[test]
    fn the_interned_texts_take_no_more_than_half_the_buffer() {
        for length in [1, 60, 900, 2 * MAX_TEXT] {
            let mut tables = tables();
            let long = "x".repeat(length);
            let last = (0..2000).map(|number| tables.text(&format!("{number}{long}")).0).last();
            assert_eq!(tables.text_of(last.unwrap_or(0)), TOO_MANY);
            let bytes: usize = tables.texts().map(|(_, text)| text_events_len(text) * 64).sum();
            assert!((16 << 10..=33 << 10).contains(&bytes), "{length}: {bytes}");
            assert_eq!(tables.text("x").0, tables.text("x").0);
        }
    }
}
