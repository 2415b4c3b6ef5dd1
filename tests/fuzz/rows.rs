//! Fuzzes reports and exports with well-formed rows that contradict one another: ids and sizes that collide, and
//! extremes.
#![no_main]

mod every_report;

use libfuzzer_sys::fuzz_target;
use memtrace_analysis::testing::TraceBuilder;
use memtrace_trace::{Category, EventName, Row};

const NAMES: &[&str] = &[
    "(none)",
    "forward",
    "backward",
    "optimizer",
    "Net",
    "Net.h.0",
    "Net.h.1.mlp",
    "module:Net.h.0",
    "step:3",
    "aten::mm",
    "a, \"b\"",
    "caching_allocator",
    "cudaMalloc",
    ".",
    "..",
    "é",
];

/// Returns a number from two bytes: mostly small, sometimes as large as a column of bytes accepts.
fn number(bytes: [u8; 2]) -> i64 {
    let small = i64::from(bytes[1] % 16);
    match bytes[0] {
        0..=199 => small,
        200..=219 => -small,
        220..=234 => small << 20,
        235..=249 => 1 << (bytes[1] % 57),
        _ => -(1 << (bytes[1] % 57)),
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut trace = TraceBuilder::default();
    let (rows, rest) = bytes.as_chunks::<32>();
    for row in rows.iter().take(400) {
        let pair = |at: usize| number([row[at], row[at + 1]]);
        let name = |at: usize| NAMES[usize::from(row[at]) % NAMES.len()];
        trace.raw(Row {
            event: EventName::ALL[usize::from(row[0]) % EventName::ALL.len()],
            category: Category::ALL[usize::from(row[1]) % Category::ALL.len()],
            device: i32::from(row[2] % 4) - 1,
            status: i32::from(row[3] / 200),
            alloc_id: pair(4),
            addr: pair(6),
            requested_bytes: pair(8),
            rounded_bytes: pair(8),
            delta_bytes: pair(10),
            allocated_bytes: pair(12),
            active_bytes: pair(14),
            reserved_bytes: pair(16),
            step: pair(18),
            ts_ns: pair(20),
            latency_ns: pair(22),
            op: name(24),
            module: name(25),
            phase: name(26),
            name: name(27),
            api: name(28),
            tid: i32::from(row[29] % 3),
            device_free_bytes: pair(30),
            ..Row::default()
        });
    }
    let bytes = if rest.len() > 15 { trace.finish() } else { trace.unfinished() };
    every_report::run(&bytes);
});
