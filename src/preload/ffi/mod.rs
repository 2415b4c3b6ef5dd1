//! Foreign code as this library sees it: symbols that the loader knows, libraries that call, and the questions put to
//! CUDA and NVML.

pub(crate) mod callers;
pub(crate) mod device;
pub(crate) mod nvml;
pub(crate) mod symbols;
pub(crate) mod torch_version;
