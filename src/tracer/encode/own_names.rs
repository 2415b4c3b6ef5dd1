//! Texts and contexts that the encoder numbers itself, for resumed traces and for tags.

use memtrace_trace::context::Context;
use memtrace_trace::text::NONE;
use rustc_hash::FxHashMap;

use crate::text::Text;

/// Ids that the encoder assigns itself are greater than this number, so that they differ from the ids of the
/// process.
pub(crate) const OWN_IDS: u32 = 1 << 31;

/// The texts and contexts to which the encoder has assigned ids, because the process has no ids for them.
#[derive(Default)]
pub(crate) struct OwnNames {
    numbers: FxHashMap<String, u32>,
    pub(crate) texts: Vec<Text>,
    ids: FxHashMap<Context, u32>,
    pub(crate) contexts: Vec<Context>,
}

impl OwnNames {
    fn number(&mut self, text: &str) -> u32 {
        if let Some(number) = self.numbers.get(text) {
            return *number;
        }
        self.texts.push(Text::new(text.to_owned()));
        let number = OWN_IDS + self.texts.len() as u32;
        self.numbers.insert(text.to_owned(), number);
        number
    }

    pub(crate) fn text(&mut self, text: &str) -> u32 {
        if text == NONE { 0 } else { self.number(text) }
    }

    pub(crate) fn id(&mut self, context: Context) -> u32 {
        *self.ids.entry(context).or_insert_with(|| {
            self.contexts.push(context);
            OWN_IDS + self.contexts.len() as u32
        })
    }
}
