//! The meta row, and the journal's copy of it for a process that is killed before its trace has the row.

use std::time::{SystemTime, UNIX_EPOCH};

use memtrace_trace::{Meta, SCHEMA_VERSION, files};

use crate::clock;
use crate::queue::chunk_pool::ChunkPool;
use crate::queue::journal_header::MetaText;
use crate::session::Session;

/// Returns the fields of the meta row that are known at the start.
pub(crate) fn first(session: &Session, pool: &ChunkPool, start_ns: u64) -> Meta {
    Meta {
        schema: SCHEMA_VERSION.to_owned(),
        memtrace: env!("CARGO_PKG_VERSION").to_owned(),
        start_unix_ns: unix_ns_at(start_ns),
        host: session.host.clone(),
        run_id: session.settings.run_id.clone(),
        rank: session.rank,
        part: 1,
        keep: session.settings.keep.to_string(),
        journal: pool.path().map(|path| path.display().to_string()).unwrap_or_default(),
        ..Meta::default()
    }
}

/// Stores the name of the trace in the journal before the first event, because a process may be killed before
/// the writer thread runs. The writer thread corrects the name if it is taken.
pub(crate) fn announce(session: &Session, pool: &ChunkPool, start_ns: u64) {
    keep(pool, MetaText::First, &first(session, pool, start_ns));
    pool.set_trace(&session.out.join(files::trace_name(&session.trace_name(), "")));
}

/// Stores the JSON of the meta row in the journal. If the JSON is too long, it is stored without the
/// arguments of the program after the first.
pub(crate) fn keep(pool: &ChunkPool, place: MetaText, meta: &Meta) {
    let json = |meta: &Meta| meta.to_json().unwrap_or_default();
    if !pool.set_meta(place, &json(meta)) {
        let argv = meta.argv.iter().take(1).cloned().collect();
        pool.set_meta(place, &json(&Meta { argv, ..meta.clone() }));
    }
}

/// Returns the wall clock time, in ns since the Unix epoch, at a reading of the monotonic clock.
fn unix_ns_at(clock_ns: u64) -> i64 {
    let ago = clock::now_ns().saturating_sub(clock_ns);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos() as i64);
    now - ago as i64
}
