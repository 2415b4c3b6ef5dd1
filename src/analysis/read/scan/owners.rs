//! Interns owners: (op, module, phase, category).
//!
//! These columns are adjacent and repeat together, so one lookup of their bytes replaces four.

use std::sync::Arc;

use memtrace_trace::Category;
use rustc_hash::FxHashMap;

use crate::read::record::Record;
use crate::read::symbols::Symbol;

/// The maximum number of bytes for the known owners. Above it, they are all dropped, so that memory stays
/// bounded for every input.
const MOST_BYTES: usize = 4 << 20;

/// The columns that make an owner.
pub(super) const COLUMNS: [&str; 4] = ["op", "module", "phase", "category"];

/// The owners that were seen.
#[derive(Default)]
pub(super) struct OwnerCache {
    /// The index in `all` of each owner, by the bytes of its columns.
    known: FxHashMap<Arc<[u8]>, usize>,
    all: Vec<KnownOwner>,
    bytes: usize,
    /// The index of the previous row's owner, because many rows repeat it.
    last: usize,
}

struct KnownOwner {
    bytes: Arc<[u8]>,
    owner: OwnerSymbols,
    /// The index of the owner that followed this one last time, because a program repeats its steps.
    next: usize,
}

#[derive(Clone, Copy)]
struct OwnerSymbols {
    op: Symbol,
    module: Symbol,
    phase: Symbol,
    category: Category,
}

impl OwnerCache {
    /// Sets the owner of the record if these bytes are known. Returns whether they are.
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
        let OwnerSymbols { op, module, phase, category } = found.owner;
        (record.op, record.module, record.phase, record.category) = (op, module, phase, category);
        true
    }

    /// Stores the owner of the record, so that [`OwnerCache::find`] finds it by these bytes.
    #[cold]
    pub(super) fn add(&mut self, bytes: Option<&[u8]>, record: &Record) {
        let Some(bytes) = bytes else { return };
        if self.bytes > MOST_BYTES {
            *self = OwnerCache::default();
        }
        // An estimate of the size of an entry in the tables, in bytes, without the entry's text.
        const ENTRY: usize = 128;
        self.bytes += bytes.len() + ENTRY;
        let Record { op, module, phase, category, .. } = *record;
        let (bytes, at): (Arc<[u8]>, usize) = (bytes.into(), self.all.len());
        if let Some(last) = self.all.get_mut(self.last) {
            last.next = at;
        }
        self.last = at;
        self.known.insert(Arc::clone(&bytes), at);
        self.all.push(KnownOwner { bytes, owner: OwnerSymbols { op, module, phase, category }, next: at });
    }
}

/// Returns `a == b`. Inlined, because most owners are short and a call would double the cost.
#[inline(always)]
fn same(a: &[u8], b: &[u8]) -> bool {
    // The last sixteen bytes may overlap the preceding parts.
    let ends = (a.last_chunk::<16>(), b.last_chunk::<16>());
    let (Some(a_end), Some(b_end)) = ends else { return a == b };
    let (a_parts, b_parts) = (a.as_chunks::<16>().0, b.as_chunks::<16>().0);
    a.len() == b.len() && a_end == b_end && a_parts.iter().zip(b_parts).all(|(a, b)| a == b)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the category found for these bytes, and whether they were known.
    fn look(owners: &mut OwnerCache, bytes: &str, category: Category) -> (Category, bool) {
        let mut record = Record::default();
        let seen = owners.find(Some(bytes.as_bytes()), &mut record);
        if !seen {
            record.category = category;
            owners.add(Some(bytes.as_bytes()), &record);
        }
        (record.category, seen)
    }

    #[test]
    fn each_owner_is_found_whatever_owner_came_before_it() {
        let mut owners = OwnerCache::default();
        let (mut state, mut seen) = (0x9E37_79B9_u64, 0);
        for round in 0..3000 {
            // The first rounds repeat the owners in the same order, like training steps. The later rounds use
            // a random order.
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
    fn owners_are_equal_only_when_all_bytes_are() {
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
        let mut owners = OwnerCache::default();
        let long = "x".repeat(MOST_BYTES / 16);
        for n in 0..100 {
            let bytes = format!("{n}{long}");
            assert_eq!(look(&mut owners, &bytes, Category::Gradient), (Category::Gradient, false));
            assert_eq!(look(&mut owners, &bytes, Category::Other), (Category::Gradient, true));
            assert!(owners.all.iter().map(|known| known.bytes.len()).sum::<usize>() < 2 * MOST_BYTES);
        }
    }
}
