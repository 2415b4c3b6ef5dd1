//! The owner of an allocation, and what torch's allocator does not report about a block.
//!
//! | subject | modules |
//! | --- | --- |
//! | the context of an event | [`context`] combines the thread's ranges, the phase of the process and the innermost op ([`op_context`]) |
//! | what changes the context | [`ranges`] of the program, [`shared_ranges`] that any thread may end, [`module_ranges`] and [`op_stack`]; [`range_rows`] records their rows |
//! | steps and phases of the process | [`steps`], with [`updates`] by code other than torch's optimizers; [`phases`] |
//! | backward functions | their forward op [`autograd_seq`], the call of their module [`backward_calls`], the end of a pass [`backward_passes`] |
//! | a block of torch's allocator | its requested size [`requested_sizes`] or [`pinned_sizes`], its tensor [`tensor_forms`], its pool [`private_pools`], its use in a CUDA graph [`graph_captures`], the moment when a block that streams use becomes free [`deferred_frees`] |
//! | libraries | [`communicators`] of NCCL, [`fsdp`] |
//! | the lines of the program | [`python_frames`], also of the first use of a device [`first_uses`], and of reads of made-up values [`acted_reads`] |
//! | what is recorded | the steps with [`detail`]; for the search for holders, whether memory grows ([`growth`]) and the step of each block ([`block_ages`]) |

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
