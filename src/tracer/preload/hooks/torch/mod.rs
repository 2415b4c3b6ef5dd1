//! Functions of torch: reports of its allocator, callbacks of its ops.

pub(crate) mod allocator;
mod callback_state;
mod op_callbacks;
