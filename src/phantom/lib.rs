//! libmemtrace_phantom.so: a CUDA device that is not there.
//!
//! Preloaded under an unmodified CUDA build of PyTorch, it answers for the CUDA runtime, the driver
//! and the math libraries. Kernels do nothing; memory is address space that costs nothing until it
//! is touched; capacity is what `MEMTRACE_PHANTOM` says. PyTorch's own caching allocator decides
//! every segment, split and out-of-memory error as it would on a card.
//!
//! One file per family of calls, each with its table ([`table::call_table`]); what no file answers by hand is
//! in the generated list ([`table::generated`]). It depends on nothing that traces.

mod core;
mod cuda;
mod kernels;
mod libs;
mod table;
