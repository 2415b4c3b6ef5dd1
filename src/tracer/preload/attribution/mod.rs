//! The owner of an allocation: ranges and phases, ops, autograd's sequence numbers, private pools, requested
//! sizes.
//!
//! From the bottom up: [`steps`], [`phases`] and [`updates`] belong to the process; [`range_rows`] records
//! the rows of ranges and marks; [`shared_ranges`] holds the ranges that any thread may end; [`op_context`]
//! resolves the innermost op; [`context`] combines all of this into the context of an event; [`ranges`],
//! [`module_ranges`] and [`op_stack`] change that context.

pub(crate) mod acted_reads;
pub(crate) mod autograd_seq;
pub(crate) mod backward_calls;
pub(crate) mod backward_passes;
pub(crate) mod block_ages;
pub(crate) mod communicators;
pub(crate) mod context;
pub(crate) mod deferred_frees;
pub(crate) mod detail;
pub(crate) mod first_uses;
pub(crate) mod fsdp;
pub(crate) mod graph_captures;
pub(crate) mod growth;
pub(crate) mod module_ranges;
pub(crate) mod op_context;
pub(crate) mod op_stack;
pub(crate) mod phases;
pub(crate) mod pinned_sizes;
pub(crate) mod private_pools;
pub(crate) mod python_frames;
pub(crate) mod range_rows;
pub(crate) mod ranges;
pub(crate) mod requested_sizes;
pub(crate) mod shared_ranges;
pub(crate) mod steps;
pub(crate) mod tensor_forms;
pub(crate) mod updates;
