//! Whose the memory of rows is: the columns op, module, phase and category, read as one.
//!
//! They stand side by side and repeat themselves together, so that one look-up of their bytes does for
//! four.

use std::sync::Arc;

use memtrace_trace::Category;
use rustc_hash::FxHashMap;

use crate::read::record::Record;
use crate::read::symbols::Symbol;

/// More bytes than this are not remembered: memory stays bounded whatever the rows say.
const MOST_BYTES: usize = 4 << 20;

/// The columns that make an owner.
pub(super) const COLUMNS: [&str; 4] = ["op", "module", "phase", "category"];

/// The owners seen so far.
#[derive(Default)]
pub(super) struct Owners {
    /// Where each is in `all`.
    known: FxHashMap<Arc<[u8]>, usize>,
    all: Vec<Known>,
    bytes: usize,
    /// That of the row before: many rows repeat it.
    last: usize,
}

struct Known {
    bytes: Arc<[u8]>,
    owner: Owner,
    /// Which one came after it: a program does again what it did before.
    next: usize,
}

#[derive(Clone, Copy)]
struct Owner {
    op: Symbol,
    module: Symbol,
    phase: Symbol,
    category: Category,
}

impl Owners {
    /// Sets the record's owner if these bytes were seen.
    #[inline(always)]
    pub(super) fn find(&mut self, bytes: Option<&[u8]>, record: &mut Record) -> bool {
        let Some(bytes) = bytes else { return false };
        let Some(mut found) = self.all.get(self.last) else { return false };
        if !same(&found.bytes, bytes) {
            let next = found.next;
            let at = match self.all.get(next) {
                Some(next) if same(&next.bytes, bytes) => found.next,
                _ => match self.known.get(bytes) {
                    Some(at) => *at,
                    None => return false,
                },
            };
            if at != next {
                self.all[self.last].next = at;
            }
            self.last = at;
            found = &self.all[at];
        }
        let Owner { op, module, phase, category } = found.owner;
        (record.op, record.module, record.phase, record.category) = (op, module, phase, category);
        true
    }

    /// Remembers that these bytes are the record's owner.
    #[cold]
    pub(super) fn add(&mut self, bytes: Option<&[u8]>, record: &Record) {
        let Some(bytes) = bytes else { return };
        if self.bytes > MOST_BYTES {
            *self = Owners::default();
        }
        // What the tables hold for each, beside its bytes.
        const ENTRY: usize = 128;
        self.bytes += bytes.len() + ENTRY;
        let Record { op, module, phase, category, .. } = *record;
        let (bytes, at): (Arc<[u8]>, usize) = (bytes.into(), self.all.len());
        if let Some(last) = self.all.get_mut(self.last) {
            last.next = at;
        }
        self.last = at;
        self.known.insert(Arc::clone(&bytes), at);
        self.all.push(Known { bytes, owner: Owner { op, module, phase, category }, next: at });
    }
}

/// Are they equal? Looked at here: most are short, and to call somebody takes as long again.
#[inline(always)]
fn same(a: &[u8], b: &[u8]) -> bool {
    // The last sixteen bytes may say again what those before them said.
    let ends = (a.last_chunk::<16>(), b.last_chunk::<16>());
    let (Some(a_end), Some(b_end)) = ends else { return a == b };
    let (a_parts, b_parts) = (a.as_chunks::<16>().0, b.as_chunks::<16>().0);
    a.len() == b.len() && a_end == b_end && a_parts.iter().zip(b_parts).all(|(a, b)| a == b)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The owner of a row whose bytes are new or were seen, and whether they were.
    fn look(owners: &mut Owners, bytes: &str, category: Category) -> (Category, bool) {
        let mut record = Record::default();
        let seen = owners.find(Some(bytes.as_bytes()), &mut record);
        if !seen {
            record.category = category;
            owners.add(Some(bytes.as_bytes()), &record);
        }
        (record.category, seen)
    }

    #[test]
    fn each_is_told_from_the_others_whatever_came_before_it() {
        let mut owners = Owners::default();
        let (mut state, mut seen) = (0x9E37_79B9_u64, 0);
        for round in 0..3000 {
            // In the same order for a while, as the steps of a training are, then in any.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let which = if round < 1000 { round / 2 } else { (state >> 33) as usize } % Category::ALL.len();
            let category = Category::ALL[which];
            let (found, known) = look(&mut owners, &format!("aten::mm,GPT.h.{which},forward,x"), category);
            assert_eq!(found, category, "round {round}");
            seen += usize::from(known);
        }
        assert_eq!(seen, 3000 - Category::ALL.len());
    }

    #[test]
    fn bytes_are_the_same_only_when_all_are() {
        let bytes: Vec<u8> = (0..70).collect();
        for length in 0..70 {
            assert!(same(&bytes[..length], &bytes[..length]));
            assert!(!same(&bytes[..length], &bytes[..=length]));
            for at in 0..length {
                let mut other = bytes[..length].to_vec();
                other[at] ^= 1;
                assert!(!same(&bytes[..length], &other), "{length}, {at}");
            }
        }
    }

    #[test]
    fn memory_for_owners_is_bounded() {
        let mut owners = Owners::default();
        let long = "x".repeat(MOST_BYTES / 16);
        for n in 0..100 {
            let bytes = format!("{n}{long}");
            assert_eq!(look(&mut owners, &bytes, Category::Gradient), (Category::Gradient, false));
            assert_eq!(look(&mut owners, &bytes, Category::Other), (Category::Gradient, true));
            assert!(owners.all.iter().map(|known| known.bytes.len()).sum::<usize>() < 2 * MOST_BYTES);
        }
    }
}
