//! Caches formatted fields that repeat across rows: copying a text is several times faster than formatting
//! it.

use super::line::LineBuffer;
use crate::{Category, EventName};

/// The last values of `N` adjacent number columns, and their text. `TEXT` is at least 21 bytes per number
/// (with its comma), rounded up to a size that compiles to a few register copies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Numbers<const N: usize, const TEXT: usize> {
    pub(super) numbers: [i64; N],
    /// Each number followed by a comma.
    pub(super) text: [u8; TEXT],
    pub(super) length: usize,
}

/// The cache of a single number.
pub(super) type One = Numbers<1, 24>;

/// Returns the value of `TEXT` for a cache of `numbers` numbers.
const fn group_text(numbers: usize) -> usize {
    (21 * numbers).next_multiple_of(32)
}

impl<const N: usize, const TEXT: usize> Default for Numbers<N, TEXT> {
    fn default() -> Self {
        const { assert!(21 * N <= TEXT) };
        let mut text = [b'0'; TEXT];
        text.iter_mut().skip(1).step_by(2).for_each(|byte| *byte = b',');
        Numbers { numbers: [0; N], text, length: 2 * N }
    }
}

impl<const N: usize, const TEXT: usize> Numbers<N, TEXT> {
    /// Replaces the numbers and their text.
    pub(super) fn keep(&mut self, numbers: [i64; N], text: [u8; TEXT], length: usize) {
        *self = Numbers { numbers, text, length };
    }
}

impl One {
    /// Advances the cache to `number` if it is the cached number plus 1 and differs only in the last digit,
    /// as nine out of ten such numbers do. Otherwise changes nothing.
    #[inline(always)]
    pub(super) fn count_to(&mut self, number: i64) {
        let [last] = self.numbers;
        // The text ends in a comma, so the last digit is the byte before it.
        let digit = self.length.wrapping_sub(2);
        if last >= 0
            && last.checked_add(1) == Some(number)
            && let Some(digit @ b'0'..=b'8') = self.text.get_mut(digit)
        {
            *digit += 1;
            self.numbers = [number];
        }
    }
}

/// A text that is known at compile time and needs no quotes, followed by a comma.
#[derive(Clone, Copy)]
pub(super) struct CachedWord {
    pub(super) text: [u8; 16],
    pub(super) length: usize,
}

impl CachedWord {
    pub(super) const fn new(word: &str) -> CachedWord {
        let mut text = [b','; 16];
        let mut index = 0;
        while index < word.len() {
            text[index] = word.as_bytes()[index];
            index += 1;
        }
        assert!(index < 16, "a longer word needs a larger array");
        CachedWord { text, length: index + 1 }
    }
}

/// Builds the table of a `text_enum!`'s texts, indexed by value id.
macro_rules! words_of {
    ($kind:ident) => {{
        const WORDS: [CachedWord; $kind::ALL.len()] = {
            let mut words = [CachedWord::new(""); $kind::ALL.len()];
            let mut index = 0;
            while index < words.len() {
                let value = $kind::ALL[index];
                words[value as usize] = CachedWord::new(value.as_str());
                index += 1;
            }
            words
        };
        &WORDS
    }};
}

/// Returns the text of an event.
#[inline(always)]
pub(super) fn event(event: EventName) -> &'static CachedWord {
    &words_of!(EventName)[event as usize]
}

/// Returns the text of a category.
#[inline(always)]
pub(super) fn category(category: Category) -> &'static CachedWord {
    &words_of!(Category)[category as usize]
}

/// The number of cached owners. The index in the cache is `Row::owner` modulo this number.
const OWNERS: usize = 1024;
/// The maximum length of the first piece of a cached owner text. Most texts fit in it.
const FIRST: usize = 64;
/// The maximum length of the second piece.
const REST: usize = 48;

/// The cached text of an owner's columns.
#[derive(Clone, Copy)]
struct CachedOwner {
    /// `Row::owner`; 0 for an empty entry.
    number: u64,
    length: usize,
    first: [u8; FIRST],
    rest: [u8; REST],
}

/// Caches the texts of owners, by `Row::owner`.
#[derive(Default)]
pub(super) struct Owners(Vec<CachedOwner>);

impl Owners {
    /// Writes the columns of an owner. `number` is its `Row::owner`; 0 is never cached.
    #[inline(always)]
    pub(super) fn write<const N: usize>(
        &mut self,
        line: &mut LineBuffer<'_>,
        number: u64,
        columns: [&str; N],
    ) {
        match self.0.get(number as usize % OWNERS) {
            Some(owner) if owner.number == number && number != 0 => {
                line.put(&owner.first, owner.length.min(FIRST));
                if owner.length > FIRST {
                    line.put(&owner.rest, owner.length - FIRST);
                }
            }
            _ => self.write_and_keep(line, number, columns),
        }
    }

    #[inline(never)]
    fn write_and_keep<const N: usize>(&mut self, line: &mut LineBuffer<'_>, number: u64, columns: [&str; N]) {
        let from = line.at();
        columns.into_iter().for_each(|text| line.text(text));
        let length = line.at() - from;
        if number != 0 && length <= FIRST + REST {
            self.0.resize(OWNERS, CachedOwner { number: 0, length: 0, first: [0; FIRST], rest: [0; REST] });
            self.0[number as usize % OWNERS] =
                CachedOwner { number, length, first: line.written(from), rest: line.written(from + FIRST) };
        }
    }
}

/// The type of a column's cache, for its kind of writing.
macro_rules! column_cache {
    (counter) => {
        One
    };
    (shared_prefix) => {
        One
    };
    (repeated) => {
        One
    };
    ($without:ident) => {
        ()
    };
}

macro_rules! column_caches {
    ($($block:ident($($cache:ident)?) { $(
        $(#[$doc:meta])+
        $name:ident: $type:ident = $default:expr, $shape:ident, $reading:ident, $writing:ident $(($of:ident))?;
    )+ })+) => {
        /// The caches of columns, by name.
        #[derive(Default)]
        #[expect(dead_code, reason = "the cache of a column that needs none is empty")]
        pub(super) struct ColumnCaches {
            $($(pub(super) $name: column_cache!($writing),)+)+
        }
    };
}

crate::columns!(column_caches);

/// The type of a block's cache.
macro_rules! block_cache {
    (owner { $($columns:tt)+ }) => { Owners };
    ($group:ident { $(
        $(#[$doc:meta])+
        $name:ident: $type:ident = $default:expr, $shape:ident, $reading:ident, $writing:ident $(($of:ident))?;
    )+ }) => {
        Numbers<{ [$(stringify!($name)),+].len() }, { group_text([$(stringify!($name)),+].len()) }>
    };
}

macro_rules! block_caches {
    ($($block:ident($($cache:ident)?) $columns:tt)+) => {
        /// The caches of blocks, by name.
        #[derive(Default)]
        pub(super) struct BlockCaches {
            $($(pub(super) $cache: block_cache!($block $columns),)?)+
        }
    };
}

crate::columns!(block_caches);

/// All caches of a writer.
#[derive(Default)]
pub(super) struct FieldCache {
    pub(super) columns: ColumnCaches,
    pub(super) blocks: BlockCaches,
}

impl FieldCache {
    /// Resets the caches of numbers, but keeps the texts of owners. Called after a row with clamped numbers,
    /// so that no huge number stays in a cache.
    pub(super) fn forget_numbers(&mut self) {
        let owners = std::mem::take(&mut self.blocks.owners);
        *self = FieldCache {
            columns: ColumnCaches::default(),
            blocks: BlockCaches { owners, ..BlockCaches::default() },
        };
    }
}
