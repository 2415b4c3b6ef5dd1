//! A row as the analysis stores it: its numbers, and symbols for its texts.

use memtrace_trace::columns::{COLUMNS, Reading, Shape, index_of};
use memtrace_trace::memory::{Effect, MemoryKind, Metric};
use memtrace_trace::text::{NONE, UNKNOWN};
use memtrace_trace::{Category, Event, EventName};

use crate::read::symbols::Symbol;

/// A set of columns. A reader parses only these columns; all others keep their defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Columns(u64);

impl Columns {
    /// Every column.
    pub const ALL: Columns = Columns(u64::MAX >> (64 - COLUMNS.len()));

    /// Returns the columns with the given names.
    ///
    /// # Panics
    /// While compiling, when the schema has no column of a name.
    #[must_use]
    pub const fn of(names: &[&str]) -> Columns {
        let mut set = 0;
        let mut i = 0;
        while i < names.len() {
            set |= 1 << index_of(names[i]);
            i += 1;
        }
        Columns(set)
    }

    /// Returns the columns with the given [`Shape`].
    #[must_use]
    pub(crate) const fn of_shape(shape: Shape) -> Columns {
        let mut set = 0;
        let mut i = 0;
        while i < COLUMNS.len() {
            if COLUMNS[i].shape as u8 == shape as u8 {
                set |= 1 << i;
            }
            i += 1;
        }
        Columns(set)
    }

    /// Returns the columns with the given [`Reading`].
    #[must_use]
    pub(crate) const fn of_reading(reading: Reading) -> Columns {
        let mut set = 0;
        let mut i = 0;
        while i < COLUMNS.len() {
            if COLUMNS[i].reading as u8 == reading as u8 {
                set |= 1 << i;
            }
            i += 1;
        }
        Columns(set)
    }

    /// Returns the union of both sets.
    #[must_use]
    pub const fn and(self, more: Columns) -> Columns {
        Columns(self.0 | more.0)
    }

    /// Returns true if the column at `index` is in the set.
    #[must_use]
    pub const fn has(self, index: usize) -> bool {
        self.0 >> index & 1 == 1
    }

    /// Returns true if one of `others` is in the set.
    #[must_use]
    pub const fn has_any(self, others: Columns) -> bool {
        self.0 & others.0 != 0
    }

    /// Returns true if all of `others` are in the set.
    #[must_use]
    pub const fn has_all(self, others: Columns) -> bool {
        self.0 & others.0 == others.0
    }

    /// Returns the indices of the first and the last column of the set, whose columns are adjacent.
    ///
    /// # Panics
    /// While compiling, when the set is empty or has a gap.
    #[must_use]
    pub(crate) const fn span(self) -> (usize, usize) {
        let (first, last) = (self.0.trailing_zeros(), self.0.ilog2());
        assert!(self.0.count_ones() == last - first + 1, "the columns are not adjacent");
        (first as usize, last as usize)
    }
}

/// The columns that a report needs, by event, because an op row needs fewer columns than an allocation.
#[derive(Clone, Copy, Debug)]
pub struct Wanted([Columns; EventName::ALL.len()]);

impl Wanted {
    /// Returns a set with the same columns for every event.
    #[must_use]
    pub const fn all_events(columns: Columns) -> Wanted {
        Wanted([columns; EventName::ALL.len()])
    }

    /// Replaces the columns of one event.
    #[must_use]
    pub const fn except(mut self, event: EventName, columns: Columns) -> Wanted {
        self.0[event as usize] = columns;
        self
    }

    /// Adds columns to one event.
    #[must_use]
    pub const fn plus(mut self, event: EventName, more: Columns) -> Wanted {
        self.0[event as usize] = self.0[event as usize].and(more);
        self
    }

    /// Adds columns to every event.
    #[must_use]
    pub fn and(mut self, more: Columns) -> Wanted {
        for columns in &mut self.0 {
            *columns = columns.and(more);
        }
        self
    }

    /// Returns the columns of both sets for each event.
    #[must_use]
    pub fn or(mut self, other: &Wanted) -> Wanted {
        for (columns, more) in self.0.iter_mut().zip(&other.0) {
            *columns = columns.and(*more);
        }
        self
    }

    /// Removes the columns with an index of `width` or more. A file from an older version has only the first
    /// `width` columns.
    #[must_use]
    pub(crate) fn within(mut self, width: usize) -> Wanted {
        for columns in &mut self.0 {
            columns.0 &= u64::MAX.checked_shr(64_u32.saturating_sub(width as u32)).unwrap_or(0);
        }
        self
    }

    /// Returns the columns of one event.
    #[must_use]
    pub fn columns(&self, event: EventName) -> Columns {
        self.0[event as usize]
    }
}

/// The Rust type of a field of [`Record`], from the type of its column.
macro_rules! field_type {
    (bytes) => {
        i64
    };
    (request) => {
        i64
    };
    (text) => {
        Symbol
    };
    ($type:ident) => {
        $type
    };
}

macro_rules! field_default {
    (text $default:expr) => {
        Symbol::of_placeholder($default)
    };
    ($type:ident $default:expr) => {
        $default
    };
}

macro_rules! record {
    ($($block:ident($($cache:ident)?) { $(
        $(#[$doc:meta])+
        $name:ident: $type:ident = $default:expr, $shape:ident, $reading:ident, $writing:ident $(($of:ident))?;
    )+ })+) => {
        /// One row, with a field for each column.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct Record {
            $($($(#[$doc])+ pub $name: field_type!($type),)+)+
            /// True for the meta row that follows removed parts. The reader sets it; it is not a column.
            pub follows_removed_parts: bool,
        }

        impl Default for Record {
            fn default() -> Self {
                Record { $($($name: field_default!($type $default),)+)+ follows_removed_parts: false }
            }
        }
    };
}

memtrace_trace::columns!(record);

impl Record {
    /// Returns true if the row is the allocation of a block on a GPU or of a CPU tensor.
    #[inline]
    #[must_use]
    pub fn allocates_tensor(&self) -> bool {
        self.event == EventName::Alloc
            || (self.event == EventName::HostAlloc && self.device == i32::from(Event::CPU))
    }

    /// Returns [`Effect::Alloc`] or [`Effect::Free`] if the row allocates or frees memory that counts as a block
    /// of its device ([`is_counted`]), and `None` for every other row.
    #[inline]
    #[must_use]
    pub fn counted_effect(&self, metric: Metric) -> Option<Effect> {
        let (kind, effect) = MemoryKind::changed_by(self.event)?;
        let is_block =
            matches!(effect, Effect::Alloc | Effect::Free) && is_counted(kind, self.device, metric);
        is_block.then_some(effect)
    }
}

/// Returns true if memory of `kind` counts as blocks of the device `ordinal`. Host memory counts on the host, and
/// memory outside torch's allocator counts only if `metric` is the memory in use. Segments have no blocks.
#[inline]
#[must_use]
pub const fn is_counted(kind: MemoryKind, ordinal: i32, metric: Metric) -> bool {
    match kind {
        MemoryKind::Block => true,
        MemoryKind::External => matches!(metric, Metric::Used),
        // GPUs have the ordinals from 0 on.
        MemoryKind::Host => ordinal < 0,
        MemoryKind::Segment | MemoryKind::Mapped => false,
    }
}
