//! The CSV format, in one file: the columns, their documentation, and the row.
//!
//! Row 1 is the header. The first data row is a `meta` row whose `name` holds JSON ([`crate::Meta`]).
//! Columns may be appended, never reordered or re-typed.

use serde::{Deserialize, Serialize};

/// The schema that this version writes, as it stands in the meta row.
pub const SCHEMA_VERSION: &str = "memtrace/1";

/// The text of a text column that has nothing to say.
pub const NONE: &str = "(none)";

/// The module of what an op allocates outside every module.
pub const SCRIPT: &str = "(script)";

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

/// An enum whose values are words of a text column.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum $name {
            $($(#[$vdoc])* #[serde(rename = $text)] $variant,)*
        }

        impl $name {
            /// Every value, in a fixed order.
            pub const ALL: &'static [$name] = &[$($name::$variant),*];

            /// The word in the file.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $($name::$variant => $text),* }
            }

            /// The value of a word; `None` for a word that this schema does not have.
            #[must_use]
            pub fn parse(word: &str) -> Option<Self> {
                match word { $($text => Some($name::$variant),)* _ => None }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.as_str())
            }
        }
    };
}

words! {
    /// The column `event`.
    EventName {
        /// The caching allocator handed out a block.
        Alloc = "alloc",
        /// A block went back to the allocator.
        Free = "free",
        /// The last stream that used a freed block is done with it.
        FreeCompleted = "free_completed",
        /// The allocator took a segment from CUDA.
        SegmentAlloc = "segment_alloc",
        /// The allocator gave a segment back.
        SegmentFree = "segment_free",
        /// Memory was mapped into an expandable segment.
        SegmentMap = "segment_map",
        /// Memory was unmapped from an expandable segment.
        SegmentUnmap = "segment_unmap",
        /// The allocator gave up on a request.
        Oom = "oom",
        /// Device memory outside torch's allocator.
        ExtAlloc = "ext_alloc",
        /// The same, given back.
        ExtFree = "ext_free",
        /// Pinned host memory.
        HostAlloc = "host_alloc",
        /// The same, given back.
        HostFree = "host_free",
        /// An outermost op ended.
        Op = "op",
        /// A storage that an op reads or writes, or the memory of a module's call.
        Io = "io",
        /// A range opened.
        RangeBegin = "range_begin",
        /// A range closed.
        RangeEnd = "range_end",
        /// A mark.
        Mark = "mark",
        /// A block's owner or category is now known; in pairs, out of the old and into the new.
        Tag = "tag",
        /// What the device shows.
        Sample = "sample",
        /// A block that was live when this part of a rotated trace began.
        Live = "live",
        /// Events were dropped: `name` says how many and why.
        Lost = "lost",
        /// The first row: `name` holds JSON.
        Meta = "meta",
        /// The last row of a complete trace.
        End = "end",
    }
}

words! {
    /// The column `category`: what memory is for.
    Category {
        /// A parameter of a module.
        Parameter = "parameter",
        /// A buffer of a module.
        Buffer = "buffer",
        /// A parameter's gradient.
        Gradient = "gradient",
        /// Made in a forward pass.
        Activation = "activation",
        /// Made in a backward pass.
        Temporary = "temporary",
        /// Held by an optimizer.
        OptimizerState = "optimizer_state",
        /// Given to the model.
        Input = "input",
        /// Made by autograd for itself.
        AutogradDetail = "autograd_detail",
        /// Registered by the user.
        Other = "other",
        /// Not known.
        None = "(none)",
    }
}

impl EventName {
    /// Do the deltas of this event sum to live memory by owner (`groupby` over a prefix of the file)?
    #[must_use]
    pub const fn is_block(self) -> bool {
        matches!(self, EventName::Alloc | EventName::Free | EventName::Tag | EventName::Live)
    }
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

/// The longest text of a column, in bytes; longer ones are cut.
pub const MAX_TEXT: usize = 4096;

/// What pandas takes for a missing value (`pandas._libs.parsers.STR_NA_VALUES`).
const MISSING: &[&str] = &[
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A",
    "NA", "NULL", "NaN", "None", "n/a", "nan", "null",
];

/// A text as it may stand in the file: cut to [`MAX_TEXT`], one line, and quoted when a loader would
/// take it for a missing value, a number or a truth value.
#[must_use]
pub fn safe_text(text: &str) -> String {
    let mut end = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let line: String = text[..end].chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let bare = line.trim();
    if bare.is_empty() {
        return NONE.to_owned();
    }
    let misread = MISSING.contains(&bare)
        || bare.parse::<f64>().is_ok()
        || bare.eq_ignore_ascii_case("true")
        || bare.eq_ignore_ascii_case("false");
    if misread { format!("'{bare}'") } else { bare.to_owned() }
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

    #[test]
    fn no_text_can_be_misread_by_a_loader() {
        assert_eq!(safe_text("NA"), "'NA'");
        assert_eq!(safe_text(" 12 "), "'12'");
        assert_eq!(safe_text("1e5"), "'1e5'");
        assert_eq!(safe_text("inf"), "'inf'");
        assert_eq!(safe_text("True"), "'True'");
        assert_eq!(safe_text("\n"), NONE);
        assert_eq!(safe_text("a\nb"), "a b");
        assert_eq!(safe_text("GPT.h.0"), "GPT.h.0");
        assert!(safe_text(&"é".repeat(5000)).len() <= MAX_TEXT);
    }

    #[test]
    fn words_round_trip() {
        for event in EventName::ALL {
            assert_eq!(EventName::parse(event.as_str()), Some(*event));
        }
        assert_eq!(EventName::parse("alloca"), None);
        assert_eq!(Category::parse("(none)"), Some(Category::None));
    }
}
