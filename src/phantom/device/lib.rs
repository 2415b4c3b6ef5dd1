//! libmemtrace_phantom.so: a simulated CUDA device.
//!
//! Preloaded under an unmodified CUDA build of PyTorch, it answers the calls of the CUDA runtime, the driver
//! and the math libraries. Kernels do nothing. Memory is address space that costs nothing until it is
//! touched, with the capacity that `MEMTRACE_PHANTOM` sets. PyTorch's own caching allocator decides every
//! segment, every split and every out-of-memory error, as it would on a card.
//!
//! The modules are layers: `core` is the simulated machine, `cuda` answers the runtime and the driver,
//! `kernels` and `libs` answer launches and libraries, `ops` computes the values of PyTorch's ops, and
//! `table` lists all calls. Each uses only those before it, with two exceptions: `cuda` starts the
//! observation of ops in `ops`, and asks `libs` whether it counts the memory of handles. Each file that
//! answers a family of calls has its own table (`core::call_table`); `table::generated` has the names that no
//! file answers by hand. Of the other crates of memtrace, the library uses those for the cards, the machine
//! and utilities.

mod core;
mod cuda;
mod kernels;
mod libs;
mod ops;
mod table;
