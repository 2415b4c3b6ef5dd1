//! The blocks that were live at the last OOM, with categories inferred from their lives up to the end of the
//! trace.

use crate::read::record::Record;
use crate::state::block::{Block, Owner};
use crate::state::replay::Replay;

/// An OOM that may be the last one of a trace, and the blocks that were live then and were freed later.
pub struct LastOom {
    /// The `seq` of the row of the OOM.
    pub seq: i64,
    /// The owner of the request that failed.
    pub owner: Owner,
    gone: Vec<Block>,
}

impl LastOom {
    /// Starts at the OOM in `row`.
    #[must_use]
    pub fn new(row: &Record) -> LastOom {
        LastOom { seq: row.seq, owner: Owner::from_row(row), gone: Vec::new() }
    }

    /// Records the block that the current row freed, if that block was live at the OOM.
    pub fn feed(&mut self, replay: &Replay) {
        self.gone.extend(replay.freed().filter(|freed| freed.id < self.seq));
    }

    /// Returns the blocks that were live on a device at the OOM, with their last owners and the categories
    /// inferred from all rows so far.
    #[must_use]
    pub fn blocks(&self, replay: &Replay, ordinal: i32) -> Vec<Block> {
        replay.at(ordinal, self.seq, &self.gone)
    }
}
