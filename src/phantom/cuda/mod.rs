//! The CUDA runtime and driver: memory, streams, events, graphs, modules and device properties.

pub(crate) mod copy;
pub(crate) mod device_properties;
pub(crate) mod driver;
pub(crate) mod event;
pub(crate) mod graph;
pub(crate) mod graph_memory;
pub(crate) mod ipc;
pub(crate) mod memory;
pub(crate) mod module;
pub(crate) mod pool;
pub(crate) mod stream;
pub(crate) mod vmm;
