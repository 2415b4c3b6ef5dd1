//! What one reading of the whole trace shows to `memtrace oom`, before the replay up to the last OOM.

use super::found_at_oom::FoundAtOom;
use super::server_limit::{ServerMarks, ServerPart};
use crate::error::Result;
use crate::options::Options;
use crate::profile::flow_categories;
use crate::read::stream::TraceFile;
use crate::read::symbols::SymbolTable;
use crate::state::detail::DetailedSteps;
use crate::state::host_memory::HostMemory;
use crate::state::moment::{FoundOom, find_oom};
use crate::state::replay_trace::Replayed;
use crate::state::retained::RetainedSearches;
use crate::whatif::{Change, Contents};

/// The results of the first reading.
pub(super) struct WholeTrace {
    /// The last OOM, or `None` if no request ran out of memory.
    pub(super) oom: Option<FoundOom>,
    pub(super) searches: RetainedSearches,
    /// The share of the card to which a server (vLLM) limits itself, if the trace records it.
    pub(super) server: Option<ServerPart>,
    /// The optimizers and models that were found after the OOM.
    pub(super) found: FoundAtOom,
    pub(super) host: HostMemory,
    pub(super) detail: DetailedSteps,
    /// The changes that could lower the peak.
    pub(super) changes: Vec<Change>,
    /// See [`crate::state::replay::Replay::ended_in_oom`].
    pub(super) ended_in_oom: bool,
}

impl WholeTrace {
    /// Reads `trace`. Also returns its replay, for the footer of a report.
    pub(super) fn read(trace: &TraceFile, options: &Options) -> Result<(WholeTrace, Replayed)> {
        let symbols = SymbolTable::default();
        let (mut searches, mut server) = (RetainedSearches::default(), ServerMarks::default());
        let (mut found, mut host) = (FoundAtOom::default(), HostMemory::new(&symbols));
        let mut contents = Contents::new(trace);
        let known = flow_categories(trace, options)?;
        let (replayed, oom) = find_oom(
            trace,
            options,
            &known,
            &symbols,
            &mut [&mut searches, &mut server, &mut found, &mut host, &mut contents],
        )?;
        let whole = WholeTrace {
            oom,
            searches,
            server: server.part(),
            found,
            host,
            detail: replayed.replay.detail.clone(),
            changes: contents.candidates(&symbols),
            ended_in_oom: replayed.replay.ended_in_oom(),
        };
        Ok((whole, replayed))
    }
}
