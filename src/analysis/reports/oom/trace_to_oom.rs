//! A trace, read up to its last OOM.

use memtrace_trace::EventName;

use super::super::advise::predictions::FirstAdvice;
use super::super::ledger;
use super::rows_before::RowsBefore;
use super::step_groups;
use super::whole_trace::WholeTrace;
use crate::error::Result;
use crate::options::Options;
use crate::read::record::{Columns, Record, Wanted};
use crate::read::stream::TraceFile;
use crate::read::symbols::SymbolTable;
use crate::state::layout::{self, Layout};
use crate::state::levels::Levels;
use crate::state::model_facts::is_module;
use crate::state::moment::replay_to_oom;
use crate::state::replay::{self, Replay};
use crate::state::replay_trace::Replayed;
use crate::state::retained::RetainedSearch;
use crate::whatif::{Change, MOST_ROWS, Predictor, with_columns};

/// The ops that copy a tensor from the CPU to the GPU.
const COPIES: [&str; 2] = ["aten::empty_strided", "aten::_to_copy"];

/// Returns the columns that this reading needs. Most rows are ops, blocks and calls of modules: of these, it parses only
/// what they need.
fn wanted() -> Wanted {
    let rare = Columns::of(&["api", "device_free_bytes", "dtype", "name", "shape", "stack_id"]);
    let block = layout::COLUMNS.and(step_groups::COLUMNS);
    let mut wanted = replay::COLUMNS.and(block).and(rare);
    for event in [EventName::Alloc, EventName::Free] {
        wanted = wanted.except(event, replay::COLUMNS.columns(event).and(block));
    }
    for event in [EventName::Op, EventName::RangeBegin, EventName::RangeEnd] {
        wanted = wanted.except(event, replay::COLUMNS.columns(event));
    }
    with_columns(wanted)
}

/// What a trace shows about its last OOM.
pub(super) struct TraceToOom<'a> {
    pub(super) trace: &'a TraceFile,
    /// The request.
    pub(super) row: Record,
    /// The replay up to the request.
    pub(super) replayed: Replayed,
    pub(super) layout: Layout,
    pub(super) levels: Levels,
    pub(super) seen: RowsBefore,
    /// The changes of `memtrace advise` that save most on the device of the request, or the reason why it fails.
    pub(super) advice: Result<Vec<FirstAdvice>>,
    /// The first reading of the trace.
    pub(super) whole: &'a WholeTrace,
}

impl<'a> TraceToOom<'a> {
    /// Replays `trace` up to its last OOM. Returns `None` if `whole`, the first reading of the trace, found no OOM.
    pub(super) fn read(
        trace: &'a TraceFile,
        whole: &'a WholeTrace,
        options: &Options,
    ) -> Result<Option<Self>> {
        let Some(oom) = &whole.oom else { return Ok(None) };
        let mut layout = Layout::default();
        let mut seen = RowsBefore::default();
        let mut levels = Levels::new(options.device);
        let lists: Vec<Vec<Change>> = whole.changes.iter().map(|change| vec![change.clone()]).collect();
        let mut predictor = Predictor::new(trace, &lists, options, MOST_ROWS);
        let mut visit = |row: &Record, replay: &Replay| {
            layout.feed(row);
            levels.feed(row, replay);
            seen.feed(row, replay, trace);
        };
        // The rows of the ops that failed come after the OOM.
        let mut predict = |row: &Record, replay: &Replay| predictor.feed(row, replay);
        let replayed = replay_to_oom(trace, oom, wanted(), options, &mut visit, Some(&mut predict))?;
        let Some(row) = seen.oom else { return Ok(None) };
        if seen.shares_host(row.device)
            && let Some(host) = ledger::host_at(trace, options, &row)?
        {
            seen.host_grew(row.device, host);
        }
        let advice = predictor.finish(trace, &replayed, options).map(|predictions| {
            let here = predictions.into_iter().find(|prediction| prediction.device == row.device);
            let all = |prediction| FirstAdvice::of(&prediction, &whole.changes, whole.ended_in_oom);
            here.map_or(Vec::new(), all)
        });
        Ok(Some(TraceToOom { trace, row, replayed, layout, levels, seen, advice, whole }))
    }

    /// Returns the search for kept memory at the OOM, if there was one.
    pub(super) fn search(&self) -> Option<&RetainedSearch> {
        self.whole.searches.at_oom()
    }

    pub(super) fn symbols(&self) -> &SymbolTable {
        &self.replayed.symbols
    }

    /// Returns the op of the request.
    pub(super) fn op(&self) -> String {
        self.symbols().get(self.row.op).to_string()
    }

    /// Returns the path of the request's module.
    pub(super) fn module(&self) -> String {
        self.symbols().get(self.row.module).to_string()
    }

    /// Returns the phase of the request.
    pub(super) fn phase(&self) -> String {
        self.symbols().get(self.row.phase).to_string()
    }

    pub(super) fn is_in_forward(&self) -> bool {
        self.phase() == "forward"
    }

    /// Returns true if the request is outside of all modules.
    pub(super) fn is_outside_modules(&self) -> bool {
        !is_module(&self.symbols().or_dash(self.row.module))
    }

    /// Returns true if the request was made outside of all modules after the first step had begun.
    pub(super) fn is_in_script(&self) -> bool {
        self.is_outside_modules() && self.row.step >= 0
    }

    /// Returns true if the request copies a tensor from the CPU to the GPU outside of all modules.
    pub(super) fn is_copy(&self) -> bool {
        COPIES.contains(&&*self.op()) && self.is_outside_modules()
    }

    /// Returns true if the request is in a forward and no backward has run so far.
    pub(super) fn is_untrained(&self) -> bool {
        self.is_in_forward() && !self.seen.forwards.has_backward
    }

    /// Returns true if the latest call of the request's model was in evaluation mode.
    pub(super) fn evaluates(&self) -> bool {
        self.seen.facts.facts_at(&self.module()).evaluates
    }

    /// Returns the model whose parameters the program moves to the GPU, and the bytes that are still on the
    /// CPU.
    pub(super) fn being_moved(&self) -> Option<(&str, i64)> {
        self.whole.found.being_moved().filter(|_| self.is_copy() && self.row.step < 0)
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_evidence::{GIB, MIB};
    use super::super::test_trace::{OomTrace, owner};

    #[test]
    fn advice_is_for_the_device_of_the_request() {
        let forward = owner("Net", "forward", 0);
        let mut trace = OomTrace::new(24 * GIB);
        trace.block_on_another_device(60 * GIB, forward);
        trace.fill(512 * MIB, forward);
        trace.fails(GIB, forward);
        trace.prints(&[
            "try: the whole model in bf16 (code: memtrace advise --dtype bf16 TRACE): saves at least 12.00 GiB, may not be enough \
             alone; costs: less precision, in the parameters and the optimizer's state too",
        ]);
    }
}
