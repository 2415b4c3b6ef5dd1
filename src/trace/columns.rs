//! The columns of the CSV, and the row.
//!
//! [`columns!`](crate::columns!) declares each column once. The header, [`Row`], the writer, and the
//! command's records, scanner and Parquet export are generated from it. Tests compare the documentation with
//! it.
//!
//! Line 1 of a file is the header. The first row is the `meta` row, whose `name` contains JSON
//! ([`crate::Meta`]). Columns may be appended; they are never reordered, and never change their type.

use serde::{Deserialize, Serialize};

use crate::text::{NONE, UNKNOWN};
use crate::{Category, EventName};

/// The schema that this version writes, as recorded in the meta row.
pub const SCHEMA_VERSION: &str = "memtrace/1";

/// The maximum absolute value of an id, an address, a time or a requested size. Sums of two such values
/// fit in 64 bits, and so do their differences, except one of 2^63: subtract with `wrapping_sub`. The writer clamps
/// larger values, so every reader accepts whatever was written.
pub const MAX_NUMBER: u64 = 1 << 62;

/// The maximum absolute value of a size or a total of allocated memory, in bytes: 64 PiB. Sums over a trace
/// fit in 64 bits. The writer clamps larger values.
pub const MAX_BYTES: u64 = 1 << 56;

/// The maximum absolute value of a device ordinal: an event stores it in one signed byte. A reader rejects
/// larger ones, because every report keeps data for each device.
pub const MAX_DEVICE: u64 = i8::MIN.unsigned_abs() as u64;

/// The number of columns in the first files of [`SCHEMA_VERSION`]. Later columns were appended and may be
/// missing in a file; a reader then uses their defaults.
pub const FIRST_COLUMNS: usize = 29;

/// Calls the macro `$callback` with the declarations of all columns, in file order.
///
/// Each declaration has the form `name: type = default, shape, reading, writing;`, after the documentation of
/// the column.
///
/// - The type is one of: `i32`; `i64` (at most [`columns::MAX_NUMBER`] from 0); `bytes` (an `i64`, at most
///   [`columns::MAX_BYTES`] from 0); `request` (a requested size, which may exceed any memory: an `i64` with
///   the bound of numbers); `text`; `EventName`; `Category`.
/// - The shape is a hint for the scanner's number parser and for Parquet's encoding: `any`; `digit`, usually
///   one digit; `natural`, usually not negative; `rising`, like `natural`, and usually larger than in the
///   previous row.
/// - The reading tells the scanner when to parse: `first`, in every row; `common`, for most reports; `rare`,
///   for few reports; `owner`, together with the neighboring `owner` columns.
/// - The writing selects the writer's cache: `plain`; `counter`, usually the previous row's number plus 1;
///   `near`, usually the previous row's number, or a number of which all digits but the last eight equal the
///   previous row's; `near_recent`, the same with several recent rows; `same_as(COLUMN)`, often that column's
///   number in the same row; `mostly_none`.
///
/// Columns are grouped in blocks. `NAME` is the name of the block's cache.
///
/// - `each()` writes each column separately.
/// - `group(NAME)` contains numbers that usually all equal the previous row's; then one copy writes them all.
/// - `recurring(NAME)` contains numbers that usually all equal those of a recent row; then one copy writes them all.
/// - `KEY(NAME)`, where `KEY` is a field of [`columns::TextKeys`], is written by one copy if a recent row had the same
///   key.
///
/// For a new column, `any, rare, plain` in an `each()` block is a correct choice. The other words affect only
/// speed, never the output.
///
/// [`columns::MAX_BYTES`]: crate::columns::MAX_BYTES
/// [`columns::MAX_NUMBER`]: crate::columns::MAX_NUMBER
/// [`columns::TextKeys`]: crate::columns::TextKeys
#[macro_export]
macro_rules! columns {
    ($callback:ident) => {
        $callback! {
            each() {
                /// the number of the row in its process: 1, 2, 3, ... in file order; a gap means damage or
                /// `MEMTRACE_KEEP`; the rows that open a later part of a rotated trace have numbers of
                /// earlier rows
                seq: i64 = 0, rising, common, counter;
                /// monotonic ns since the start in the meta row; for `op` rows the end of the op
                ts_ns: i64 = 0, rising, common, near;
            }
            group(process) {
                /// the distributed rank, 0 when not distributed
                rank: i32 = 0, any, rare, plain;
                /// process id
                pid: i32 = 0, any, rare, plain;
                /// thread id
                tid: i32 = 0, any, rare, plain;
                /// the CUDA ordinal; -1 is pinned host memory and the process, -2 CPU tensors
                device: i32 = -1, digit, common, plain;
            }
            call(calls) {
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
            }
            each() {
                /// the `seq` of the row that allocated the block or segment, the same on all of its rows (`alloc`,
                /// `tag`, `live`, `free`), and unique in its process; 0 without a block
                alloc_id: i64 = 0, natural, common, same_as(seq);
                /// the address, decimal
                addr: i64 = 0, natural, rare, near_recent;
            }
            recurring(sizes) {
                /// the requested size; -1 when unknown; repeated on the free
                requested_bytes: request = -1, any, rare, plain;
                /// the requested size, rounded by the allocator to a multiple of 512, unrounded when
                /// caching is off; repeated on the free
                rounded_bytes: request = 0, natural, rare, plain;
                /// the signed change: the size of the block, which can exceed `rounded_bytes`; negative on
                /// the free
                delta_bytes: bytes = 0, any, common, plain;
            }
            each() {
                /// the device's total after the event: blocks in use by the program
                allocated_bytes: bytes = 0, natural, common, near;
                /// the device's total after the event: blocks in use by the program, and freed blocks still
                /// in use by a stream
                active_bytes: bytes = 0, natural, common, same_as(allocated_bytes);
            }
            group(held) {
                /// the device's total after the event: segments held by the allocator
                reserved_bytes: bytes = 0, natural, common, plain;
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
                /// cuda_graph workspace script loaded other unsharded_param unsharded_grad all_gather
                /// reduce_scatter`
                category: Category = Category::None, any, owner, plain;
            }
            group(position) {
                /// the training step, -1 before the first; in the `free`, `tag` and `live` rows of a block the
                /// step of its allocation
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
                /// the text of ranges, marks, `meta`, `sample`, `lost` and `end`; for `ext_alloc` rows what the
                /// library works for, such as `communicator 2: rank 0 of 8`; `live` on the rows that open a part of a
                /// rotated trace; for `op` rows the overload, with `MEMTRACE_OPS=io`
                name: text = NONE, any, rare, mostly_none;
            }
            form(forms) {
                /// the type of the tensor in the block: `bfloat16`; for packed values the stored type and the type
                /// that it is decoded to: `nf4(bfloat16)`; `?` when unknown. It is known at the
                /// allocation for tensors of 1 MiB or more that PyTorch makes in a detailed step, and from the `tag`
                /// row on for parameters, buffers, gradients, optimizer state, inputs and caches
                dtype: text = UNKNOWN, any, rare, plain;
                /// the shape of the tensor in the block: `[4096x11008]`; `[]` for a single value; `?` when unknown,
                /// when the tensor is a part of the block or expanded, and beyond 8,192 different shapes
                shape: text = UNKNOWN, any, rare, plain;
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

/// When the scanner parses a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    /// In every row, before the other columns.
    First,
    /// For most reports.
    Common,
    /// For few reports.
    Rare,
    /// Together with the neighboring `Owner` columns.
    Owner,
}

/// The declaration of a column, for the documentation, the scanner and the Parquet export.
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
    /// The documentation, one sentence, for docs/trace-format.md and `memtrace help columns`.
    pub doc: &'static str,
}

/// The keys of adjacent columns, most of them texts. Rows of one writer with the same nonzero key have the same values
/// in these columns. 0 for values without a key. With a key, the writer formats the values once for many rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TextKeys {
    /// The key of `event`, `status`, `api` and `source`.
    pub call: u64,
    /// The key of `op`, `module` and `phase`.
    pub owner: u64,
    /// The key of `dtype` and `shape`.
    pub form: u64,
}

/// The type of a [`Row`] field.
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
        /// The columns in file order.
        pub const COLUMNS: &[Column] = &[$($(
            Column {
                name: stringify!($name),
                kind: column_type!($type),
                shape: shape!($shape),
                reading: reading!($reading),
                doc: concat!($($doc),+).trim_ascii(),
            },
        )+)+];

        /// One data row. The documentation of each column names the unit of its number.
        #[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
        pub struct Row<'a> {
            /// Not a column.
            #[serde(skip)]
            pub keys: TextKeys,
            $($(
                $(#[doc = $doc])+
                #[serde(borrow)]
                pub $name: row_type!('a $type),
            )+)+
        }

        impl Default for Row<'_> {
            fn default() -> Self {
                Row { keys: TextKeys::default(), $($($name: $default,)+)+ }
            }
        }
    };
}

columns!(schema);

const _: () = assert!(COLUMNS.len() >= FIRST_COLUMNS);

/// Clamps a number to the bound of its column, and replaces an empty text.
macro_rules! bounded {
    ($row:ident text $name:ident) => {
        if $row.$name.is_empty() { NONE } else { $row.$name }
    };
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
            /// Returns the row with each number clamped to the bound of its column, and with a placeholder in
            /// place of each empty text.
            #[cold]
            pub(crate) fn bounded(&self) -> Self {
                Row { keys: self.keys, $($($name: bounded!(self $type $name),)+)+ }
            }
        }
    };
}

columns!(bounds);

/// Returns the index of a column in [`COLUMNS`].
///
/// # Panics
/// Panics if no column has this name; in a `const`, the compilation fails.
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

/// Compares two texts byte by byte, because a `const fn` cannot use `==` on slices.
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
