//! The name of each process of a run, which has its rank, its script, or both.

use memtrace_trace::command::script;

use crate::read::input::Input;
use crate::read::stream::TraceFile;

/// Returns the name of the process of `trace` among the processes of `input`, with its process id: `rank 1 of
/// this run (pid 4711)`. The name has the rank if the run has several ranks. It has the script if the run has
/// one rank, or if another process of the run started this one.
pub(crate) fn process_name(trace: &TraceFile, input: &Input) -> String {
    let meta = &trace.meta;
    let is_worker = parent(trace, input).is_some();
    let script = script(&meta.argv);
    let name = match (meta.world_size > 1, is_worker) {
        (true, false) => format!("rank {} of this run", meta.rank),
        (true, true) => format!("worker process of rank {}, {script}", meta.rank),
        (false, true) => format!("worker process of this run, {script}"),
        (false, false) => format!("process of this run, {script}"),
    };
    format!("{name} (pid {})", trace.pid())
}

/// Returns `rank 1`, or the name of the process if other processes of `input` have that rank too.
pub(crate) fn rank_or_name(trace: &TraceFile, input: &Input) -> String {
    let rank = trace.meta.rank;
    let same = input.traces.iter().filter(|other| other.meta.rank == rank).count();
    if same > 1 { process_name(trace, input) } else { format!("rank {rank}") }
}

/// Returns true if the processes of `input` have several ranks, so that `--rank` chooses between them.
pub(crate) fn several_ranks(input: &Input) -> bool {
    let mut ranks = input.traces.iter().map(|trace| trace.meta.rank);
    let first = ranks.next();
    ranks.any(|rank| Some(rank) != first)
}

/// Returns a line for a report that shows only `trace` of the processes of `input`, such as `rank 1 has the highest peak
/// of 4; --rank shows another`: `what` is `highest peak`. `when` follows the number. `None` if there is only one process.
pub(crate) fn chosen_of(trace: &TraceFile, input: &Input, what: &str, when: &str) -> Option<String> {
    let number = input.traces.len();
    let another = if several_ranks(input) { "--rank shows another" } else { "name a file to see another" };
    (number > 1)
        .then(|| format!("{} has the {what} of {number}{when}; {another}", rank_or_name(trace, input)))
}

/// Returns the nearest ancestor of the process of `trace` that has a trace in `input`.
pub(crate) fn parent<'a>(trace: &TraceFile, input: &'a Input) -> Option<&'a TraceFile> {
    // Compares numbers before names, because a run of thousands of ranks makes millions of comparisons.
    let process = |pid: u32| {
        let is_it = |other: &&TraceFile| other.pid > 0 && u32::try_from(other.pid) == Ok(pid);
        input.traces.iter().filter(is_it).find(|other| other.meta.host == trace.meta.host)
    };
    trace.meta.ancestors.iter().find_map(|ancestor| process(*ancestor))
}
