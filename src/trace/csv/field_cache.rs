//! Caches formatted fields that repeat across rows: copying a text is several times faster than formatting
//! it.

use super::line::{HUGE, LineBuffer, NINE_DIGITS};
use crate::columns::TextKeys;
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

/// The caches of a column whose numbers have the digits before the last eight in common with a recent number.
pub(super) struct NearRecent([Near; NearRecent::MOST]);

impl Default for NearRecent {
    fn default() -> Self {
        NearRecent([Near::default(); NearRecent::MOST])
    }
}

impl NearRecent {
    /// The number of caches. The index of a number's cache is the digits before the last eight, modulo this number.
    const MOST: usize = 64;

    #[inline(always)]
    pub(super) fn of(&mut self, high: u64) -> &mut Near {
        &mut self.0[high as usize % Self::MOST]
    }
}

/// Caches the texts of `N` adjacent number columns in recent rows, by the numbers.
pub(super) struct Recurring<const N: usize, const TEXT: usize>(Vec<Numbers<N, TEXT>>);

impl<const N: usize, const TEXT: usize> Default for Recurring<N, TEXT> {
    fn default() -> Self {
        Recurring(vec![Numbers::default(); Self::MOST])
    }
}

impl<const N: usize, const TEXT: usize> Recurring<N, TEXT> {
    /// The number of texts, a power of two.
    const MOST: usize = 256;

    /// Returns the entry that has the text of these numbers if they are in the cache.
    #[inline(always)]
    pub(super) fn of(&mut self, numbers: [i64; N]) -> &mut Numbers<N, TEXT> {
        // Multiplicative hashing; the highest bits depend on all bits of the numbers.
        let mixed = numbers
            .iter()
            .fold(0_u64, |mixed, number| mixed.wrapping_mul(5).wrapping_add(number.cast_unsigned()));
        let hash = mixed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (64 - Self::MOST.ilog2());
        &mut self.0[hash as usize]
    }
}

/// The last value of a column whose numbers change mostly in the last eight digits, and its text.
#[derive(Clone, Copy, Debug)]
pub(super) struct Near {
    pub(super) number: i64,
    /// The digits before the last eight, as a number; [`Near::NO_HIGH`] if there are none, or more than eight.
    pub(super) high: u64,
    /// The number followed by a comma.
    pub(super) text: [u8; 32],
    pub(super) length: usize,
}

impl Default for Near {
    fn default() -> Self {
        let mut text = [b','; 32];
        text[0] = b'0';
        Near::new(0, text, 2)
    }
}

impl Near {
    /// No number has these digits before the last eight.
    const NO_HIGH: u64 = u64::MAX;

    /// Creates the cache of a number, whose text with its comma has `length` bytes.
    pub(super) fn new(number: i64, text: [u8; 32], length: usize) -> Near {
        let high = match number.cast_unsigned() {
            number @ NINE_DIGITS..HUGE => number / NINE_DIGITS,
            _ => Near::NO_HIGH,
        };
        Near { number, high, text, length }
    }

    /// Replaces the last eight digits. `low` has their text and a comma.
    #[inline(always)]
    pub(super) fn set_low(&mut self, number: i64, low: u128) {
        // The remainder is always the offset itself; see [`LineBuffer::length`].
        let at = self.length.wrapping_sub(9) % 16;
        self.text[at..at + 16].copy_from_slice(&low.to_le_bytes());
        self.number = number;
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
        if number > 0
            && number - 1 == last
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

/// The cached text of adjacent columns.
#[derive(Clone, Copy)]
struct CachedTexts {
    /// The key ([`TextKeys`]); [`KeyedTexts::NO_KEY`] for an empty entry.
    key: u64,
    length: usize,
    text: [u8; KeyedTexts::LONGEST],
}

/// Caches the texts of adjacent columns, by their key.
#[derive(Default)]
pub(super) struct KeyedTexts(Vec<CachedTexts>);

impl KeyedTexts {
    /// The maximum length of a text in bytes.
    const LONGEST: usize = 112;
    /// The maximum number of entries. The index of an entry is its key modulo this number.
    const MOST: usize = 1024;
    /// No text is kept with this key.
    const NO_KEY: u64 = u64::MAX;

    /// Writes the columns with this key, which `format` formats; 0 is never cached.
    #[inline(always)]
    pub(super) fn write(
        &mut self,
        line: &mut LineBuffer<'_>,
        key: u64,
        format: impl FnOnce(&mut LineBuffer<'_>),
    ) {
        if self.has(key) {
            self.copy(line, key);
        } else {
            line.apart(|line| self.write_and_keep(line, key, format));
        }
    }

    /// Returns true if the cache has the columns with this key.
    #[inline(always)]
    fn has(&self, key: u64) -> bool {
        self.0.get(key as usize % Self::MOST).is_some_and(|texts| texts.key == key)
    }

    /// Writes the columns with this key, which the cache has.
    #[inline(always)]
    pub(super) fn copy(&self, line: &mut LineBuffer<'_>, key: u64) {
        if let Some(texts) = self.0.get(key as usize % Self::MOST) {
            line.put_cached(&texts.text, texts.length);
        }
    }

    #[inline(always)]
    fn write_and_keep(
        &mut self,
        line: &mut LineBuffer<'_>,
        key: u64,
        format: impl FnOnce(&mut LineBuffer<'_>),
    ) {
        let from = line.length();
        format(line);
        let length = line.length() - from;
        if key != 0 && key != Self::NO_KEY && length <= Self::LONGEST {
            let index = key as usize % Self::MOST;
            if self.0.len() <= index {
                let empty = CachedTexts { key: Self::NO_KEY, length: 0, text: [0; Self::LONGEST] };
                self.0.resize(index + 1, empty);
            }
            self.0[index] = CachedTexts { key, length, text: line.written(from) };
        }
    }
}

/// The type of a column's cache, for its kind of writing.
macro_rules! column_cache {
    (counter) => {
        One
    };
    (near) => {
        Near
    };
    (near_recent) => {
        NearRecent
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
    (group { $(
        $(#[$doc:meta])+
        $name:ident: $type:ident = $default:expr, $shape:ident, $reading:ident, $writing:ident $(($of:ident))?;
    )+ }) => {
        Numbers<{ [$(stringify!($name)),+].len() }, { group_text([$(stringify!($name)),+].len()) }>
    };
    (recurring { $(
        $(#[$doc:meta])+
        $name:ident: $type:ident = $default:expr, $shape:ident, $reading:ident, $writing:ident $(($of:ident))?;
    )+ }) => {
        Recurring<{ [$(stringify!($name)),+].len() }, { group_text([$(stringify!($name)),+].len()) }>
    };
    ($key:ident { $($columns:tt)+ }) => { KeyedTexts };
}

/// True if the cache of a block has the texts of its key, or if the block has no key.
macro_rules! has_key {
    ($caches:ident $keys:ident each()) => {
        true
    };
    ($caches:ident $keys:ident group($cache:ident)) => {
        true
    };
    ($caches:ident $keys:ident recurring($cache:ident)) => {
        true
    };
    ($caches:ident $keys:ident $key:ident($cache:ident)) => {
        $caches.$cache.has($keys.$key)
    };
}

macro_rules! block_caches {
    ($($block:ident($($cache:ident)?) $columns:tt)+) => {
        /// The caches of blocks, by name.
        #[derive(Default)]
        pub(super) struct BlockCaches {
            $($(pub(super) $cache: block_cache!($block $columns),)?)+
        }

        impl BlockCaches {
            /// Returns true if the caches have the texts of all these keys.
            #[inline(always)]
            pub(super) fn have(&self, keys: &TextKeys) -> bool {
                true $(&& has_key!(self keys $block($($cache)?)))+
            }
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
