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
pub(super) struct Recurring<const N: usize, const TEXT: usize>(Box<[Numbers<N, TEXT>; RECURRING]>);

/// The number of texts of a [`Recurring`], a power of two.
const RECURRING: usize = 256;

impl<const N: usize, const TEXT: usize> Default for Recurring<N, TEXT> {
    fn default() -> Self {
        Recurring(boxed(Numbers::default()))
    }
}

impl<const N: usize, const TEXT: usize> Recurring<N, TEXT> {
    /// Returns the entry that has the text of these numbers if they are in the cache.
    #[inline(always)]
    pub(super) fn of(&mut self, numbers: [i64; N]) -> &mut Numbers<N, TEXT> {
        // Multiplicative hashing; the highest bits depend on all bits of the numbers.
        let mixed = numbers
            .iter()
            .fold(0_u64, |mixed, number| mixed.wrapping_mul(5).wrapping_add(number.cast_unsigned()));
        let hash = mixed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (64 - RECURRING.ilog2());
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

/// The last value of a column that counts, and its text.
pub(super) struct Counter {
    /// The next number, if it differs from the last one only in its last digit, as nine out of ten do; else
    /// [`Counter::NO_NEXT`].
    next: i64,
    /// The last number, followed by a comma.
    pub(super) text: [u8; 32],
    pub(super) length: usize,
}

impl Default for Counter {
    fn default() -> Self {
        Counter { next: Counter::NO_NEXT, text: [b','; 32], length: 1 }
    }
}

impl Counter {
    /// Stands for no next number. `count_to` accepts only numbers from 1 on.
    const NO_NEXT: i64 = 0;

    /// Creates the cache of a number, whose text with its comma has `length` bytes.
    pub(super) fn new(number: i64, text: [u8; 32], length: usize) -> Counter {
        let has_next = number >= 0 && number % 10 < 9;
        Counter { next: if has_next { number.wrapping_add(1) } else { Counter::NO_NEXT }, text, length }
    }

    /// Advances the text to `number` if it is the next number. Otherwise changes nothing and returns false.
    #[inline(always)]
    pub(super) fn count_to(&mut self, number: i64) -> bool {
        if number != self.next || number < 1 {
            return false;
        }
        // The text ends in a comma, so the last digit is the byte before it. The remainder is always the offset itself.
        let digit = &mut self.text[self.length.wrapping_sub(2) % 32];
        *digit += 1;
        self.next = if *digit == b'9' { Counter::NO_NEXT } else { number + 1 };
        true
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

/// Returns an array of `N` equal values, which is never on the stack.
fn boxed<T: Clone, const N: usize>(value: T) -> Box<[T; N]> {
    let values = vec![value; N].into_boxed_slice().try_into();
    values.unwrap_or_else(|_| unreachable!("the vector has as many values as the array"))
}

/// Caches the texts of adjacent columns, by their key ([`TextKeys`]). The index of an entry is its key modulo
/// [`KeyedTexts::MOST`].
pub(super) struct KeyedTexts {
    /// [`KeyedTexts::NO_KEY`] for an empty entry.
    keys: Box<[u64; KeyedTexts::MOST]>,
    /// The texts. The last byte is the length. Entries that were never used take no memory.
    texts: Box<[[u8; KeyedTexts::ENTRY]; KeyedTexts::MOST]>,
}

impl Default for KeyedTexts {
    fn default() -> Self {
        KeyedTexts { keys: boxed(KeyedTexts::NO_KEY), texts: boxed([0; KeyedTexts::ENTRY]) }
    }
}

impl KeyedTexts {
    /// The maximum length of a text in bytes.
    const LONGEST: usize = 112;
    /// The size of an entry in bytes, a power of two.
    const ENTRY: usize = 128;
    /// The number of entries.
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
        self.keys[key as usize % Self::MOST] == key
    }

    /// Writes the columns with this key, which the cache has.
    #[inline(always)]
    pub(super) fn copy(&self, line: &mut LineBuffer<'_>, key: u64) {
        let entry = &self.texts[key as usize % Self::MOST];
        let text: &[u8; Self::LONGEST] = entry.first_chunk().expect("an entry is longer");
        line.put_cached(text, entry[Self::ENTRY - 1].into());
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
            self.keys[index] = key;
            self.texts[index] = line.written(from);
            self.texts[index][Self::ENTRY - 1] = length as u8;
        }
    }
}

/// The type of a column's cache, for its kind of writing.
macro_rules! column_cache {
    (counter) => {
        Counter
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
