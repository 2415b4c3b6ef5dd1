//! The simulated GPU (the phantom), and `memtrace run --phantom`.

use std::path::Path;

use memtrace_trace::EventName;
use memtrace_trace::csv::RowReader;

mod calls;
mod cluster;
mod faults;
mod host_values;
mod past_oom;
mod runs;
mod smi;
mod untraced;

/// Returns the rank of a trace, and a line for each memory event, without its time. The line has the address as
/// its third word if `has_addresses` is true.
fn memory_events(trace: &Path, has_addresses: bool) -> (i32, Vec<String>) {
    let mut reader = RowReader::open(trace).unwrap();
    let (mut lines, mut rank) = (Vec::new(), -1);
    while let Some(row) = reader.next_row().unwrap() {
        rank = row.rank;
        if matches!(row.event, EventName::Op | EventName::Sample | EventName::Meta | EventName::End) {
            continue;
        }
        let address = if has_addresses { format!("{} ", row.addr) } else { String::new() };
        lines.push(format!(
            "{} {} {address}{} {} {} {} {} {} {} {}",
            row.event.as_str(),
            row.device,
            row.requested_bytes,
            row.rounded_bytes,
            row.delta_bytes,
            row.allocated_bytes,
            row.active_bytes,
            row.reserved_bytes,
            row.op,
            row.module,
        ));
    }
    (rank, lines)
}
