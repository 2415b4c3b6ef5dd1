//! The CSV format, in one file: the columns, their documentation, and the row.
//!
//! Row 1 is the header. The first data row is a `meta` row whose `name` holds JSON ([`crate::Meta`]).
//! Columns may be appended, never reordered or re-typed.

use serde::{Deserialize, Serialize};

use crate::text::NONE;
use crate::{Category, EventName};

/// The schema that this version writes, as it stands in the meta row.
pub const SCHEMA_VERSION: &str = "memtrace/1";

/// The type of a column, as a loader sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColumnType {
    /// Decimal, signed 64-bit, never empty.
    Int,
    /// Never empty, never something that a loader takes for missing or for a number.
    Text,
}

/// One column of the CSV.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    /// The name in the header.
    pub name: &'static str,
    /// Its type.
    pub kind: ColumnType,
    /// What it means, for the README and `memtrace help columns`.
    pub doc: &'static str,
}

const fn int(name: &'static str, doc: &'static str) -> Column {
    Column { name, kind: ColumnType::Int, doc }
}

const fn text(name: &'static str, doc: &'static str) -> Column {
    Column { name, kind: ColumnType::Text, doc }
}

/// The columns in the order of the file; [`Row`] has a field for each, in the same order.
pub const COLUMNS: &[Column] = &[
    int(
        "seq",
        "1, 2, 3, ... per process, in the order of the file, gapless: a gap means a damaged file; the rows that open a later part of a rotated trace repeat the numbers before its first new row",
    ),
    int("ts_ns", "monotonic ns since the meta row's start; of `op` rows, the end"),
    int("rank", "the distributed rank, 0 when not distributed"),
    int("pid", "process id"),
    int("tid", "thread id"),
    int("device", "CUDA ordinal; -1 is the host"),
    text("event", "what happened; see Events"),
    int("status", "the call's return code, 0 for success"),
    text(
        "api",
        "the call: `cudaMalloc`, `caching_allocator`, ...; of `io` rows, how the memory is used; see Events",
    ),
    text("source", "the library that made the call: `libc10_cuda.so`, `libnccl.so.2`"),
    int(
        "alloc_id",
        "the `seq` of the allocation that this row belongs to; 0 for none; a reused address gets a new one",
    ),
    int("addr", "the address, decimal"),
    int("requested_bytes", "what the caller asked for; -1 when unknown; repeated on the free"),
    int(
        "rounded_bytes",
        "the request under the allocator's rule: up to a multiple of 512, raw when caching is off; repeated on the free",
    ),
    int(
        "delta_bytes",
        "signed change: the block really given (it can exceed `rounded_bytes`), negative on free",
    ),
    int("allocated_bytes", "the device's total after the event: blocks handed out"),
    int(
        "active_bytes",
        "the device's total after the event: blocks handed out or freed and still in use by a stream",
    ),
    int("reserved_bytes", "the device's total after the event: segments held by the allocator"),
    int("device_free_bytes", "free on the device; -1 unless sampled"),
    text("op", "the innermost op: `aten::mm`; its stack goes through `stack_id`"),
    text(
        "module",
        "path from the root class: `GPT.h.0.mlp.fc1`; `(script)` when an op ran outside every module",
    ),
    text("phase", "`forward`, `backward`, `optimizer`, or the user's own"),
    text(
        "category",
        "`parameter buffer gradient activation temporary optimizer_state input autograd_detail other`",
    ),
    int("step", "the training step; -1 before the first"),
    int("stream", "the current stream at the allocation; 0 is the default stream"),
    int("pool", "the allocator's private pool (graphs, MemPool), numbered as they come; 0 for the default"),
    int("latency_ns", "time inside the call; of `op` rows the op's duration; 0 on block rows"),
    int("stack_id", "0, or an id in the `<name>.stacks.csv` beside the trace"),
    text(
        "name",
        "the text of ranges, marks, `meta` and `lost`; `live` on the rows that open a part of a rotated trace; of `op` rows the overload, with `MEMTRACE_OPS=io`",
    ),
];

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

/// One data row. Integers are bytes, ns or ids as [`COLUMNS`] says; text borrows from the record.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "COLUMNS documents each field")]
pub struct Row<'a> {
    /// No column: rows of one writer that have the same number here have the same op, module and phase. 0 says
    /// nothing.
    #[serde(skip)]
    pub owner: u64,
    pub seq: i64,
    pub ts_ns: i64,
    pub rank: i32,
    pub pid: i32,
    pub tid: i32,
    pub device: i32,
    pub event: EventName,
    pub status: i32,
    pub api: &'a str,
    pub source: &'a str,
    pub alloc_id: i64,
    pub addr: i64,
    pub requested_bytes: i64,
    pub rounded_bytes: i64,
    pub delta_bytes: i64,
    pub allocated_bytes: i64,
    pub active_bytes: i64,
    pub reserved_bytes: i64,
    pub device_free_bytes: i64,
    pub op: &'a str,
    pub module: &'a str,
    pub phase: &'a str,
    pub category: Category,
    pub step: i64,
    pub stream: i64,
    pub pool: i64,
    pub latency_ns: i64,
    pub stack_id: i64,
    pub name: &'a str,
}

impl Default for Row<'_> {
    fn default() -> Self {
        Row {
            owner: 0,
            seq: 0,
            ts_ns: 0,
            rank: 0,
            pid: 0,
            tid: 0,
            device: -1,
            event: EventName::Mark,
            status: 0,
            api: NONE,
            source: NONE,
            alloc_id: 0,
            addr: 0,
            requested_bytes: -1,
            rounded_bytes: 0,
            delta_bytes: 0,
            allocated_bytes: 0,
            active_bytes: 0,
            reserved_bytes: 0,
            device_free_bytes: -1,
            op: NONE,
            module: NONE,
            phase: NONE,
            category: Category::None,
            step: -1,
            stream: 0,
            pool: 0,
            latency_ns: 0,
            stack_id: 0,
            name: NONE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_is_the_table() {
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
