//! The simulated machine: its memory, address ranges, known values and per-thread state.

pub(crate) mod dlopen;
pub(crate) mod ffi;
pub(crate) mod host_state;
pub(crate) mod range_allocator;
pub(crate) mod values;
pub(crate) mod vram;
