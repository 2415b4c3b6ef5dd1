//! Whose the memory of rows is: the columns op, module, phase and category, read as one.
//!
//! They stand side by side and repeat themselves together, so that one look-up of their bytes does for
//! four.

use memtrace_trace::Category;
use rustc_hash::FxHashMap;

use crate::record::Record;
use crate::texts::Symbol;

/// More bytes than this are not remembered: memory stays bounded whatever the rows say.
const MOST_BYTES: usize = 4 << 20;

/// The owners seen so far.
#[derive(Default)]
pub(super) struct Owners {
    known: FxHashMap<Box<[u8]>, Owner>,
    bytes: usize,
    /// That of the row before: most rows repeat it.
    last: (Vec<u8>, Owner),
}

#[derive(Clone, Copy, Default)]
struct Owner {
    op: Symbol,
    module: Symbol,
    phase: Symbol,
    category: Option<Category>,
}

impl Owners {
    /// Sets the record's owner if these bytes were seen.
    #[inline(always)]
    pub(super) fn find(&mut self, bytes: Option<&[u8]>, record: &mut Record) -> bool {
        let Some(bytes) = bytes else { return false };
        if self.last.0 != bytes {
            let Some(owner) = self.known.get(bytes) else { return false };
            self.last.1 = *owner;
            self.last.0.clear();
            self.last.0.extend_from_slice(bytes);
        }
        let Owner { op, module, phase, category: Some(category) } = self.last.1 else { return false };
        (record.op, record.module, record.phase, record.category) = (op, module, phase, category);
        true
    }

    /// Remembers that these bytes are the record's owner.
    #[cold]
    pub(super) fn add(&mut self, bytes: Option<&[u8]>, record: &Record) {
        let Some(bytes) = bytes else { return };
        if self.bytes > MOST_BYTES {
            (self.known, self.bytes) = (FxHashMap::default(), 0);
        }
        // What the table holds for each, beside its bytes.
        const ENTRY: usize = 64;
        self.bytes += bytes.len() + ENTRY;
        let Record { op, module, phase, category, .. } = *record;
        self.known.insert(bytes.into(), Owner { op, module, phase, category: Some(category) });
    }
}
