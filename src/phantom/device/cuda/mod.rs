//! The calls of the CUDA runtime and driver. Each file answers one family of calls.

pub(crate) mod captures;
pub(crate) mod copy;
pub(crate) mod copy_calls;
pub(crate) mod device_attributes;
pub(crate) mod device_properties;
pub(crate) mod driver;
pub(crate) mod events;
pub(crate) mod graph_instances;
pub(crate) mod graph_memory;
pub(crate) mod graphs;
pub(crate) mod host_functions;
pub(crate) mod ipc;
pub(crate) mod memory;
pub(crate) mod pointer_attributes;
pub(crate) mod pools;
pub(crate) mod reach;
pub(crate) mod streams;
pub(crate) mod torch_reports;
pub(crate) mod vmm;
