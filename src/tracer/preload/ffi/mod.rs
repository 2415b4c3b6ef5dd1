//! Foreign code that this library calls: symbols, loaded libraries, vtables, CUDA, NVML, torch and the
//! phantom device.

pub(crate) mod by_caller;
pub(crate) mod callers;
pub(crate) mod cpython;
pub(crate) mod cuda;
mod cuda_memory;
pub(crate) mod cuda_types;
pub(crate) mod device_sample;
mod dynamic_section;
pub(crate) mod guarded_memory;
pub(crate) mod loaded_libraries;
mod nvml;
mod own_process;
pub(crate) mod phantom;
pub(crate) mod symbols;
pub(crate) mod torch;
pub(crate) mod torch_callbacks;
pub(crate) mod vtables;
