//! A row as the analysis sees it: numbers, and symbols for texts.

use memtrace_trace::columns::{COLUMNS, index_of};
use memtrace_trace::{Category, EventName};

use crate::read::symbols::Symbol;

/// A set of columns. A reader parses only these; the others keep their defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Columns(u32);

impl Columns {
    /// All of the schema's.
    pub const ALL: Columns = Columns((1 << COLUMNS.len()) - 1);

    /// The columns of these names.
    ///
    /// # Panics
    /// While compiling, when a name is not in the schema.
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

    /// Both sets.
    #[must_use]
    pub const fn and(self, more: Columns) -> Columns {
        Columns(self.0 | more.0)
    }

    /// Is the column at `index` one of them?
    #[must_use]
    pub const fn has(self, index: usize) -> bool {
        self.0 >> index & 1 == 1
    }

    /// Has it one of `others`?
    #[must_use]
    pub const fn has_any(self, others: Columns) -> bool {
        self.0 & others.0 != 0
    }

    /// Has it all of `others`?
    #[must_use]
    pub const fn has_all(self, others: Columns) -> bool {
        self.0 & others.0 == others.0
    }
}

/// The columns that a reading asks for, by event: an op row needs less than an allocation.
#[derive(Clone, Copy, Debug)]
pub struct Wanted([Columns; EventName::ALL.len()]);

impl Wanted {
    /// The same columns of every event.
    #[must_use]
    pub const fn all_events(columns: Columns) -> Wanted {
        Wanted([columns; EventName::ALL.len()])
    }

    /// With other columns of one event.
    #[must_use]
    pub const fn except(mut self, event: EventName, columns: Columns) -> Wanted {
        self.0[event as usize] = columns;
        self
    }

    /// With these columns of one event too.
    #[must_use]
    pub const fn plus(mut self, event: EventName, more: Columns) -> Wanted {
        self.0[event as usize] = self.0[event as usize].and(more);
        self
    }

    /// With these columns too, of every event.
    #[must_use]
    pub fn and(mut self, more: Columns) -> Wanted {
        for columns in &mut self.0 {
            *columns = columns.and(more);
        }
        self
    }

    /// The columns of one event.
    #[must_use]
    pub fn of(&self, event: EventName) -> Columns {
        self.0[event as usize]
    }
}

/// One row; the fields are the schema's columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "memtrace_trace::columns::COLUMNS documents each field")]
pub struct Record {
    pub seq: i64,
    pub ts_ns: i64,
    pub rank: i32,
    pub pid: i32,
    pub tid: i32,
    pub device: i32,
    pub event: EventName,
    pub category: Category,
    pub status: i32,
    pub api: Symbol,
    pub source: Symbol,
    pub alloc_id: i64,
    pub addr: i64,
    pub requested_bytes: i64,
    pub rounded_bytes: i64,
    pub delta_bytes: i64,
    pub allocated_bytes: i64,
    pub active_bytes: i64,
    pub reserved_bytes: i64,
    pub device_free_bytes: i64,
    pub op: Symbol,
    pub module: Symbol,
    pub phase: Symbol,
    pub name: Symbol,
    pub step: i64,
    pub stream: i64,
    pub pool: i64,
    pub latency_ns: i64,
    pub stack_id: i64,
}

impl Default for Record {
    fn default() -> Self {
        Record {
            seq: 0,
            ts_ns: 0,
            rank: 0,
            pid: 0,
            tid: 0,
            device: -1,
            event: EventName::Mark,
            category: Category::None,
            status: 0,
            api: Symbol::NONE,
            source: Symbol::NONE,
            alloc_id: 0,
            addr: 0,
            requested_bytes: -1,
            rounded_bytes: 0,
            delta_bytes: 0,
            allocated_bytes: 0,
            active_bytes: 0,
            reserved_bytes: 0,
            device_free_bytes: -1,
            op: Symbol::NONE,
            module: Symbol::NONE,
            phase: Symbol::NONE,
            name: Symbol::NONE,
            step: -1,
            stream: 0,
            pool: 0,
            latency_ns: 0,
            stack_id: 0,
        }
    }
}
