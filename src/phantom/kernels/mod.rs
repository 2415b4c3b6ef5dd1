//! Kernels: registration, launches and their effects on memory.

pub(crate) mod fatbin;
pub(crate) mod kernel;
pub(crate) mod kernel_effects;
pub(crate) mod reduce;
