//! libmemtrace_phantom.so: a CUDA device that is not there.
//!
//! Preloaded under an unmodified CUDA build of PyTorch, it answers for the CUDA runtime, the driver
//! and the math libraries. Kernels do nothing; memory is address space that costs nothing until it
//! is touched; capacity is what `MEMTRACE_PHANTOM` says. PyTorch's own caching allocator decides
//! every segment, split and out-of-memory error as it would on a card.
//!
//! One file per family of calls, each with its table ([`answer`]); what no file answers by hand is
//! in the generated list ([`defaults`]). It depends on nothing that traces.

mod answer;
mod copy;
mod cublas;
mod cudnn;
mod cudnn_conv;
mod defaults;
mod describe;
mod device;
mod driver;
mod event;
mod fatbin;
mod ffi;
mod graph;
mod graph_memory;
mod ipc;
mod kernel;
mod libraries;
mod loader;
mod machine;
mod meaning;
mod memory;
mod module;
mod nccl;
mod nvml;
mod peers;
mod pool;
mod reduce;
mod rnn;
mod space;
mod stream;
mod values;
mod vmm;
mod vram;
