//! Code of others, as this library calls it: symbols, loaded libraries, vtables, CUDA, NVML, torch and the phantom device.

pub(crate) mod callers;
pub(crate) mod cpython;
pub(crate) mod cuda;
pub(crate) mod guarded_memory;
pub(crate) mod loaded_libraries;
pub(crate) mod nvml;
pub(crate) mod phantom;
pub(crate) mod symbols;
pub(crate) mod torch;
pub(crate) mod vtables;
