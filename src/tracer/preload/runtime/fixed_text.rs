//! Constant texts that rows refer to by id.

use std::sync::atomic::{AtomicU32, Ordering};

use memtrace_record::intern::TextId;
use memtrace_record::recorder::text_id;

/// A constant text, interned on first use.
pub(crate) struct FixedText {
    text: &'static str,
    /// The id; 0 until the first use.
    id: AtomicU32,
}

impl FixedText {
    /// Creates a text that is not interned yet.
    pub(crate) const fn new(text: &'static str) -> FixedText {
        FixedText { text, id: AtomicU32::new(0) }
    }

    /// Returns the id of the text. Interns the text at the first call.
    #[inline]
    pub(crate) fn id(&self) -> TextId {
        match self.id.load(Ordering::Relaxed) {
            0 => {
                let id = text_id(self.text);
                self.id.store(id, Ordering::Relaxed);
                id
            }
            id => id,
        }
    }
}
