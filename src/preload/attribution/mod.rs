//! Who owns an allocation: ranges and phases, ops, autograd's sequence numbers, private pools and requested sizes.

pub(crate) mod autograd_seq;
pub(crate) mod context;
pub(crate) mod fsdp;
pub(crate) mod op_stack;
pub(crate) mod private_pools;
pub(crate) mod python_frames;
pub(crate) mod requested_sizes;
