//! What the lines before said: most of a row's fields say what a row just before it said, and to copy a text
//! costs a fraction of making it.

use super::line::Line;
use crate::{Category, EventName, Row};

/// `N` numbers that stand side by side, as they were said last. `TEXT` is no less than the 21 bytes that a number
/// with its comma may have, and what registers copy.
#[derive(Clone, Copy, Debug)]
pub(super) struct Numbers<const N: usize, const TEXT: usize> {
    pub(super) numbers: [i64; N],
    /// With a comma behind each.
    pub(super) text: [u8; TEXT],
    pub(super) length: usize,
}

pub(super) type One = Numbers<1, 24>;
type Three = Numbers<3, 64>;
type Four = Numbers<4, 96>;

impl<const N: usize, const TEXT: usize> Default for Numbers<N, TEXT> {
    fn default() -> Self {
        const { assert!(21 * N <= TEXT) };
        let mut text = [b'0'; TEXT];
        text.iter_mut().skip(1).step_by(2).for_each(|byte| *byte = b',');
        Numbers { numbers: [0; N], text, length: 2 * N }
    }
}

impl<const N: usize, const TEXT: usize> Numbers<N, TEXT> {
    /// These were said.
    pub(super) fn keep(&mut self, numbers: [i64; N], text: [u8; TEXT], length: usize) {
        *self = Numbers { numbers, text, length };
    }
}

impl One {
    /// When `number` is the next and differs in its last digit, as nine of ten do, it is as if it had been said.
    #[inline(always)]
    pub(super) fn count_to(&mut self, number: i64) {
        let [last] = self.numbers;
        // Before the comma.
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

/// A word of the schema's own, with the comma behind it.
#[derive(Clone, Copy)]
pub(super) struct Word {
    pub(super) text: [u8; 16],
    pub(super) length: usize,
}

impl Word {
    pub(super) const fn of(word: &str) -> Word {
        let mut text = [b','; 16];
        let mut index = 0;
        while index < word.len() {
            text[index] = word.as_bytes()[index];
            index += 1;
        }
        assert!(index < 16, "a longer word needs a longer place");
        Word { text, length: index + 1 }
    }
}

/// The words of a column, by the value that they are of.
macro_rules! words_of {
    ($kind:ident) => {{
        const WORDS: [Word; $kind::ALL.len()] = {
            let mut words = [Word::of(""); $kind::ALL.len()];
            let mut index = 0;
            while index < words.len() {
                let value = $kind::ALL[index];
                words[value as usize] = Word::of(value.as_str());
                index += 1;
            }
            words
        };
        &WORDS
    }};
}

/// The word of an event.
#[inline(always)]
pub(super) fn event(event: EventName) -> &'static Word {
    &words_of!(EventName)[event as usize]
}

/// The word of a category.
#[inline(always)]
pub(super) fn category(category: Category) -> &'static Word {
    &words_of!(Category)[category as usize]
}

/// How many owners are remembered: each number has one place.
const OWNERS: usize = 1024;
/// The longest text of an owner that is, in two pieces: most have no second one.
const FIRST: usize = 64;
const REST: usize = 48;

/// The text of an owner: its op, module and phase.
#[derive(Clone, Copy)]
struct Owner {
    /// [`Row::owner`]; 0 for an empty place.
    number: u64,
    length: usize,
    first: [u8; FIRST],
    rest: [u8; REST],
}

/// Owners that were said.
#[derive(Default)]
pub(super) struct Owners(Vec<Owner>);

impl Owners {
    /// Writes the owner of a row.
    #[inline(always)]
    pub(super) fn write(&mut self, line: &mut Line<'_>, row: &Row<'_>) {
        match self.0.get(row.owner as usize % OWNERS) {
            Some(owner) if owner.number == row.owner && row.owner != 0 => {
                line.put(&owner.first, owner.length.min(FIRST));
                if owner.length > FIRST {
                    line.put(&owner.rest, owner.length - FIRST);
                }
            }
            _ => self.learn(line, row),
        }
    }

    #[inline(never)]
    fn learn(&mut self, line: &mut Line<'_>, row: &Row<'_>) {
        let from = line.at();
        [row.op, row.module, row.phase].into_iter().for_each(|text| line.text(text));
        let length = line.at() - from;
        if row.owner != 0 && length <= FIRST + REST {
            self.0.resize(OWNERS, Owner { number: 0, length: 0, first: [0; FIRST], rest: [0; REST] });
            self.0[row.owner as usize % OWNERS] = Owner {
                number: row.owner,
                length,
                first: line.written(from),
                rest: line.written(from + FIRST),
            };
        }
    }
}

/// All that is remembered of the lines before.
#[derive(Default)]
pub(super) struct FieldCache {
    pub(super) seq: One,
    /// All digits but the last eight.
    pub(super) ts_ns: One,
    pub(super) addr: One,
    /// Rank, process, thread, device.
    pub(super) place: Four,
    /// A block's size, which a row of one says up to three times.
    pub(super) bytes: One,
    /// The totals after it, of which two are the same as a rule, and what is free.
    pub(super) totals: Four,
    pub(super) allocated: One,
    pub(super) reserved: One,
    /// Step, stream, pool.
    pub(super) step: Three,
    pub(super) owners: Owners,
}
