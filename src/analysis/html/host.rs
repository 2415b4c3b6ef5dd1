//! The samples of host memory of a process, as the page draws them.

use serde_json::{Value, json};

use super::pack::Pack;
use crate::error::Result;
use crate::options::Options;
use crate::read::stream::TraceFile;
use crate::reports::{RunVictims, killed_sentences};
use crate::state::host_memory::{HostMemory, QuickSample};

/// The maximum number of samples of a process on a page. Of neighboring samples, the one with the highest
/// resident memory is kept.
const MOST: usize = 8192;

/// A sample, and the memory of the child processes at that time; -1 is unknown.
struct Point<'a> {
    sample: &'a QuickSample,
    children: i64,
}

/// Returns the samples of `memory` from `from_ns` to `to_ns`, or null if there is no sample. Unknown values
/// are -1.
pub(super) fn timeline(memory: &HostMemory, (from_ns, to_ns): (i64, i64), pack: &mut Pack) -> Value {
    let mut children = memory.children_with_shares().peekable();
    let mut bytes = -1;
    let mut points: Vec<Point<'_>> = Vec::new();
    for sample in &memory.quick {
        while let Some(next) = children.next_if(|next| next.when.ts_ns <= sample.when.ts_ns) {
            bytes = next.bytes();
        }
        if (from_ns..=to_ns).contains(&sample.when.ts_ns) {
            points.push(Point { sample, children: bytes });
        }
    }
    let each = points.len().div_ceil(MOST).max(1);
    let kept: Vec<&Point<'_>> = points
        .chunks(each)
        // Reversed, so that the first of several equal samples is kept.
        .filter_map(|chunk| chunk.iter().rev().max_by_key(|point| point.sample.rss))
        .collect();
    let Some(peak) = kept.iter().rev().max_by_key(|point| point.sample.rss) else { return Value::Null };
    let mut column = |get: &dyn Fn(&Point<'_>) -> i64| pack.column(kept.iter().map(|point| get(point)));
    let when = peak.sample.when;
    json!({
        "ts": column(&|point| point.sample.when.ts_ns),
        "resident": column(&|point| point.sample.rss),
        "anonymous": column(&|point| point.sample.kinds[0]),
        "files": column(&|point| point.sample.kinds[1]),
        "shared": column(&|point| point.sample.kinds[2]),
        "children": column(&|point| point.children),
        "container": column(&|point| container(point.sample)),
        "limit": column(&|point| point.sample.container.limit),
        "peak": {
            "ts_ns": when.ts_ns,
            "bytes": peak.sample.rss,
            "step": when.step,
            "phase": memory.symbols.get(when.phase).to_string(),
        },
    })
}

/// Returns the container's memory without the page cache, which the kernel reclaims before it kills a
/// process; -1 if unknown.
fn container(sample: &QuickSample) -> i64 {
    let container = sample.container;
    if container.current < 0 { -1 } else { (container.current - container.file.max(0)).max(0) }
}

/// Returns sentences that name the killer of the process or of one of its children; null if neither was
/// killed. `victims` must be from the same run.
///
/// # Errors
/// When a trace cannot be read.
pub(super) fn killed(
    trace: &TraceFile,
    memory: &HostMemory,
    victims: &RunVictims<'_>,
    options: &Options,
) -> Result<Value> {
    Ok(killed_sentences(trace, memory, victims, options)?.map_or(Value::Null, Value::from))
}
