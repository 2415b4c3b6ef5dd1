//! libmemtrace_phantom.so: a simulated CUDA device.
//!
//! Preloaded under an unmodified CUDA build of PyTorch, it answers the calls of the CUDA runtime, the driver
//! and the math libraries. Kernels do nothing. Memory is address space that costs nothing until it is
//! touched, with the capacity that `MEMTRACE_PHANTOM` sets. PyTorch's own caching allocator decides every
//! segment, every split and every out-of-memory error, as it would on a card.
//!
//! The modules depend on each other in one direction: `core` is the machine, `cuda` the runtime and the
//! driver on it, `kernels` and `libs` the work that programs launch, `table` the list of all calls. Each file
//! has one family of calls and its table (`core::call_table`); `table::generated` has the names that no file
//! answers by hand. The library depends on no other crate of memtrace but the presets.

mod core;
mod cuda;
mod kernels;
mod libs;
mod ops;
mod table;
