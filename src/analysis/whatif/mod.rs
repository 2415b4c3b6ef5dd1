//! Predicts the peak of allocated memory of a run with changes.
//!
//! A prediction processes the rows of a trace once, step by step. In each step, every changed block gets
//! another size or lifetime, and the difference is added to the run's own totals ([`curve`]). A block that no
//! change touches therefore counts exactly as in the run, including the allocator's rounding.

mod autocast;
mod calls;
mod candidates;
mod casts;
mod changes;
mod checkpoint;
mod chunk_loss;
mod claims;
mod contents;
mod curve;
mod in_backward;
mod optimizer;
mod predict;
mod requests;
mod shard;
mod sizes;
mod step;
mod sureness;

pub use candidates::{Advice, advice, sets};
pub use changes::{Change, NewOptimizer, parse};
pub(crate) use contents::Contents;
pub use contents::{candidates_for, with_units};
pub(crate) use predict::Predictor;
pub use predict::{MOST_ROWS, OpsAgain, Outcome, Prediction, changed_requests, predict};
pub(crate) use step::with_columns;
pub use sureness::{ENDED_IN_OOM, Sureness, sureness, sureness_in};
