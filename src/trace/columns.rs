//! The columns of the CSV and the row.
//!
//! [`columns!`](crate::columns!) declares each column once. The header, [`Row`], the writer, the command's records, its scanner and
//! its Parquet export are generated from it, and tests hold the documentation to it.
//!
//! Line 1 of a file is the header. The first row is the `meta` row, its `name` holds JSON ([`crate::Meta`]).
//! Columns may be appended; they are never reordered, and never change their type.

use serde::{Deserialize, Serialize};

use crate::text::NONE;
use crate::{Category, EventName};

/// The schema that this version writes, as the meta row has it.
pub const SCHEMA_VERSION: &str = "memtrace/1";

/// The largest distance from 0 of an id, an address, a time or a request: differences of two stay within 64 bits.
/// The writer cuts a larger one to it, so every reader accepts whatever was written.
pub const MAX_NUMBER: u64 = 1 << 62;

/// The largest distance from 0 of a number of bytes that memory has (64 PiB): sums over a trace stay within 64 bits.
/// The writer cuts a larger one to it.
pub const MAX_BYTES: u64 = 1 << 56;

/// The largest distance from 0 of a device's ordinal: an event has one signed byte for it. A reader refuses larger ones,
/// because every report keeps something for each device.
pub const MAX_DEVICE: u64 = i8::MIN.unsigned_abs() as u64;

/// The number of columns that the first files of [`SCHEMA_VERSION`] had. A file may lack any after them: they were
/// appended later, and a reader takes the default of each.
pub const FIRST_COLUMNS: usize = 29;

/// Calls the macro `$callback` with the declarations of all columns, in the order of the file.
///
/// A declaration is `name: type = default, shape, reading, writing;` after the column's documentation.
///
/// - The type is `i32`, `i64` (at most [`columns::MAX_NUMBER`] from 0), `bytes` (an `i64`, at most
///   [`columns::MAX_BYTES`] from 0), `request` (bytes that a program may ask for and nobody has: an `i64` with the
///   bound of numbers), `text`, `EventName` or `Category`.
/// - The shape, for the scanner's parser of numbers and for Parquet's encoding: `any`; `digit`, mostly one digit;
///   `natural`, mostly not negative; `rising`, as `natural`, and mostly larger than in the row before.
/// - The reading, for the scanner: `first`, parsed in every row; `common`; `rare`, few reports want it; `owner`, parsed
///   together with the neighbours that are `owner` too.
/// - The writing: `plain`; `counter`, mostly the number of the row before plus 1; `shared_prefix`, all digits but the
///   last eight are mostly those of the row before; `repeated`, mostly the number of the row before;
///   `repeats(COLUMN)`, mostly the last number of that column or of others that repeat it, the sign apart;
///   `same_as(COLUMN)`, often the number of that column in this row; `mostly_none`.
///
/// Columns are grouped in blocks. `NAME` names the block's cache.
///
/// - `each()` writes each column by itself.
/// - `group(NAME)` holds `plain` numbers that usually all equal the row before; then it writes one copy.
/// - `varying(NAME)` writes one copy if all numbers equal the row before, else each column by itself.
/// - `owner(NAME)` holds texts. It writes one copy when [`columns::Row::owner`] is a known number.
///
/// `any, rare, plain` in a block `each()` is right for a new column. The other words change speed and never a byte.
///
/// [`columns::MAX_BYTES`]: crate::columns::MAX_BYTES
/// [`columns::MAX_NUMBER`]: crate::columns::MAX_NUMBER
/// [`columns::Row::owner`]: crate::columns::Row::owner
#[macro_export]
macro_rules! columns {
    ($callback:ident) => {
        $callback! {
            each() {
                /// the number of the row in its process: 1, 2, 3, ... in file order, without gaps (a gap
                /// means a damaged file); the rows that open a later part of a rotated trace repeat the
                /// numbers before its first new row
                seq: i64 = 0, rising, common, counter;
                /// monotonic ns since the start in the meta row; for `op` rows the end of the op
                ts_ns: i64 = 0, rising, common, shared_prefix;
            }
            group(process) {
                /// the distributed rank, 0 when not distributed
                rank: i32 = 0, any, rare, plain;
                /// process id
                pid: i32 = 0, any, rare, plain;
                /// thread id
                tid: i32 = 0, any, rare, plain;
                /// the CUDA ordinal; -1 is the host
                device: i32 = -1, digit, common, plain;
            }
            each() {
                /// the kind of event; see Events
                event: EventName = EventName::Mark, any, first, plain;
                /// the call's return code, 0 for success
                status: i32 = 0, digit, common, plain;
                /// the call: `cudaMalloc`, `caching_allocator`, ...; for `io` rows the use of the memory; see
                /// Events
                api: text = NONE, any, rare, plain;
                /// the library that made the call: `libc10_cuda.so`, `libnccl.so.2`; for the `range_begin` of a
                /// module's call the class of the module: `Linear`
                source: text = NONE, any, rare, plain;
                /// the `seq` of the row that allocated the block, the same on its `alloc`, `tag` and `free` rows; 0 without
                /// a block; a reused address gets a new id
                alloc_id: i64 = 0, natural, common, same_as(seq);
                /// the address, decimal
                addr: i64 = 0, natural, rare, shared_prefix;
                /// the requested size; -1 when unknown; repeated on the free
                requested_bytes: request = -1, any, rare, repeated;
                /// the requested size, rounded by the allocator to a multiple of 512, unrounded when
                /// caching is off; repeated on the free
                rounded_bytes: request = 0, natural, rare, repeats(requested_bytes);
                /// the signed change: the size of the block, which can exceed `rounded_bytes`; negative on
                /// the free
                delta_bytes: bytes = 0, any, common, repeats(requested_bytes);
            }
            varying(totals) {
                /// the device's total after the event: blocks in use by the program
                allocated_bytes: bytes = 0, natural, common, repeated;
                /// the device's total after the event: blocks in use by the program, and freed blocks still
                /// in use by a stream
                active_bytes: bytes = 0, natural, common, repeats(allocated_bytes);
                /// the device's total after the event: segments held by the allocator
                reserved_bytes: bytes = 0, natural, common, repeated;
                /// free memory on the device; -1 unless sampled
                device_free_bytes: bytes = -1, any, rare, plain;
            }
            owner(owners) {
                /// the innermost op: `aten::mm`; `stack_id` leads to the whole stack
                op: text = NONE, any, owner, plain;
                /// the path from the root class: `GPT.h.0.mlp.fc1`; `(script)` when an op ran outside all
                /// modules
                module: text = NONE, any, owner, plain;
                /// `forward`, `backward`, `optimizer`, `init`, `load`, or the user's own
                phase: text = NONE, any, owner, plain;
            }
            each() {
                /// `parameter buffer gradient activation temporary optimizer_state input autograd_detail kv_cache
                /// cuda_graph workspace script loaded other`
                category: Category = Category::None, any, owner, plain;
            }
            group(position) {
                /// the training step; -1 before the first
                step: i64 = -1, any, common, plain;
                /// the current stream at the allocation; 0 is the default stream
                stream: i64 = 0, digit, rare, plain;
                /// the allocator's private pool (graphs, MemPool), numbered by first use; 0 for the default
                pool: i64 = 0, digit, rare, plain;
            }
            each() {
                /// the duration of the call, or of the op for `op` rows; 0 on block rows
                latency_ns: i64 = 0, natural, rare, plain;
                /// 0, or an id in the `<name>.stacks` beside the trace
                stack_id: i64 = 0, natural, rare, plain;
                /// the text of ranges, marks, `meta` and `lost`; for `ext_alloc` rows what the library works for, such
                /// as `communicator 2: rank 0 of 8`; `live` on the rows that open a part of a
                /// rotated trace; for `op` rows the overload, with `MEMTRACE_OPS=io`
                name: text = NONE, any, rare, mostly_none;
            }
        }
    };
}

/// The type of a column, as a loader sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColumnType {
    /// Decimal, signed 64-bit, never empty.
    Int,
    /// Never empty, and never a text that a loader takes for a missing value or a number.
    Text,
}

/// The usual values of a column of integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Any.
    Any,
    /// Mostly one digit.
    Digit,
    /// Mostly not negative.
    Natural,
    /// Mostly not negative, and larger than in the row before.
    Rising,
}

/// When a reader parses a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    /// In every row, before the others.
    First,
    /// In most reports.
    Common,
    /// In few reports.
    Rare,
    /// Together with the neighbours that are `Owner` too.
    Owner,
}

/// One column of the CSV.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    /// The name in the header.
    pub name: &'static str,
    /// The type of the values.
    pub kind: ColumnType,
    /// The usual values.
    pub shape: Shape,
    /// When a reader parses it.
    pub reading: Reading,
    /// The documentation, one sentence for docs/trace-format.md and `memtrace help columns`.
    pub doc: &'static str,
}

/// The type of a field of [`Row`].
macro_rules! row_type {
    ($lifetime:lifetime bytes) => { i64 };
    ($lifetime:lifetime request) => { i64 };
    ($lifetime:lifetime text) => { &$lifetime str };
    ($lifetime:lifetime $type:ident) => { $type };
}

macro_rules! column_type {
    (text) => {
        ColumnType::Text
    };
    (EventName) => {
        ColumnType::Text
    };
    (Category) => {
        ColumnType::Text
    };
    ($int:ident) => {
        ColumnType::Int
    };
}

macro_rules! shape {
    (any) => {
        Shape::Any
    };
    (digit) => {
        Shape::Digit
    };
    (natural) => {
        Shape::Natural
    };
    (rising) => {
        Shape::Rising
    };
}

macro_rules! reading {
    (first) => {
        Reading::First
    };
    (common) => {
        Reading::Common
    };
    (rare) => {
        Reading::Rare
    };
    (owner) => {
        Reading::Owner
    };
}

macro_rules! schema {
    ($($block:ident($($cache:ident)?) { $(
        $(#[doc = $doc:literal])+
        $name:ident: $type:ident = $default:expr, $shape:ident, $reading:ident, $writing:ident $(($of:ident))?;
    )+ })+) => {
        /// The columns in the order of the file.
        pub const COLUMNS: &[Column] = &[$($(
            Column {
                name: stringify!($name),
                kind: column_type!($type),
                shape: shape!($shape),
                reading: reading!($reading),
                doc: concat!($($doc),+).trim_ascii(),
            },
        )+)+];

        /// One data row. Integers are bytes, ns or ids, as the documentation of the columns says.
        #[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
        pub struct Row<'a> {
            /// Not a column: rows of one writer with the same number, other than 0, have the same op, module and phase.
            #[serde(skip)]
            pub owner: u64,
            $($(
                $(#[doc = $doc])+
                #[serde(borrow)]
                pub $name: row_type!('a $type),
            )+)+
        }

        impl Default for Row<'_> {
            fn default() -> Self {
                Row { owner: 0, $($($name: $default,)+)+ }
            }
        }
    };
}

columns!(schema);

const _: () = assert!(COLUMNS.len() >= FIRST_COLUMNS);

/// A number, cut to the bound of its column.
macro_rules! bounded {
    ($row:ident bytes $name:ident) => {
        $row.$name.clamp(-MAX_BYTES.cast_signed(), MAX_BYTES.cast_signed())
    };
    ($row:ident request $name:ident) => {
        bounded!($row i64 $name)
    };
    ($row:ident i64 $name:ident) => {
        $row.$name.clamp(-MAX_NUMBER.cast_signed(), MAX_NUMBER.cast_signed())
    };
    ($row:ident $type:ident $name:ident) => {
        $row.$name
    };
}

macro_rules! bounds {
    ($($block:ident($($cache:ident)?) { $(
        $(#[doc = $doc:literal])+
        $name:ident: $type:ident = $default:expr, $shape:ident, $reading:ident, $writing:ident $(($of:ident))?;
    )+ })+) => {
        impl Row<'_> {
            /// The row with each number cut to the bound of its column.
            #[cold]
            pub(crate) fn bounded(&self) -> Self {
                Row { owner: self.owner, $($($name: bounded!(self $type $name),)+)+ }
            }
        }
    };
}

columns!(bounds);

/// The index of a column in [`COLUMNS`].
///
/// # Panics
/// When no column has this name; while compiling, in a `const`.
#[must_use]
pub const fn index_of(name: &str) -> usize {
    let mut index = 0;
    while index < COLUMNS.len() {
        if same(COLUMNS[index].name.as_bytes(), name.as_bytes()) {
            return index;
        }
        index += 1;
    }
    panic!("no such column");
}

/// `==`, for constants.
const fn same(a: &[u8], b: &[u8]) -> bool {
    if a.len() != b.len() {
        return false;
    }
    let mut index = 0;
    while index < a.len() {
        if a[index] != b[index] {
            return false;
        }
        index += 1;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_csv_header_is_the_list_of_columns() {
        let mut writer = csv::Writer::from_writer(Vec::new());
        writer.serialize(Row::default()).unwrap();
        let text = String::from_utf8(writer.into_inner().unwrap()).unwrap();
        let names: Vec<&str> = COLUMNS.iter().map(|column| column.name).collect();
        assert_eq!(text.lines().next().unwrap(), names.join(","));
        for (field, column) in text.lines().nth(1).unwrap().split(',').zip(COLUMNS) {
            let is_int = field.parse::<i64>().is_ok();
            assert_eq!(is_int, column.kind == ColumnType::Int, "{}", column.name);
        }
    }
}
