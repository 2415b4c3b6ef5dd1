//! Fuzzes reports and exports with arbitrary bytes after a valid header and meta row, sometimes without
//! header and meta row.
#![no_main]

mod every_report;

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use memtrace_analysis::testing::TraceBuilder;

static HEAD: LazyLock<Vec<u8>> = LazyLock::new(|| TraceBuilder::default().unfinished());

fuzz_target!(|bytes: &[u8]| {
    match bytes.split_first() {
        Some((0, bytes)) => every_report::run(bytes),
        Some((_, bytes)) => every_report::run(&[HEAD.as_slice(), bytes].concat()),
        None => {}
    }
});
