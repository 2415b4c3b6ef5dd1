//! The functions that stand before the real ones, a file for each library that has them.

mod cuda_runtime;
mod dlsym;
pub(crate) mod nvtx;
mod process;
mod torch_allocator;
