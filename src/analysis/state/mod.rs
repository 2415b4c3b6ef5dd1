//! Replays records into the state of memory over time, and computes views of that state.

pub mod block;
pub mod categories;
pub mod detail;
pub mod device;
pub(crate) mod fitted_line;
pub mod group;
pub mod host_memory;
pub mod last_oom;
pub mod layout;
pub mod levels;
pub mod live_blocks;
pub mod live_run;
pub mod marks;
pub(crate) mod model_facts;
pub mod module_layers;
pub mod moment;
pub mod op_allocations;
pub mod op_calls;
pub mod problems;
pub mod progress;
pub mod replay;
pub mod replay_trace;
pub mod retained;
pub mod series;
pub(crate) mod stacked_series;
pub mod stacks;
