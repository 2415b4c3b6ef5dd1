//! Hooks of torch: the reports of its allocator and the callbacks of its ops.

pub(crate) mod allocator;
mod callback_state;
mod empty_tensors;
mod op_callbacks;
