//! Replays records into the state of memory over time, and computes views of that state.
//!
//! - [`replay_trace`]: the loop that all reports use; [`replay`]: the state of a trace at one row.
//! - [`block`], [`live_blocks`], [`device`], [`layout`]: memory blocks, totals, and the addresses of segments.
//! - [`categories`], [`group`], [`module_layers`], [`stacks`]: the owners of blocks, and how answers group them.
//! - [`moment`], [`marks`]: the moments that `--at` names.
//! - [`progress`], [`levels`], [`step_inputs`], [`detail`]: phases and steps, the memory and the largest input of each
//!   step, and the steps with details.
//! - [`op_calls`], [`op_allocations`], `model_facts`: the calls of ops, what they allocate, and facts of the model.
//! - [`host_memory`], [`retained`], [`last_oom`]: samples of host memory, objects that keep memory, the last OOM.
//! - [`series`], `stacked_series`, `fitted_line`: curves over time, and the line through a curve.
//! - [`problems`]: contradictions between rows; [`live_run`]: a run that is still being written.

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
pub mod step_inputs;
