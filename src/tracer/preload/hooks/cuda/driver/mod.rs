//! Hooks of the CUDA driver's calls that allocate and free memory. Libraries with their own runtime (cuBLAS,
//! cuDNN, NCCL), programs without a runtime (Triton, CuPy) and expandable segments make such calls.
//!
//! Driver calls that the runtime makes inside one of its own calls are not recorded, because the runtime's
//! hook records the outer call; see [`crate::guard`].

mod arrays;
mod graph_nodes;
mod imported;
mod linear;
mod physical;

use std::ffi::c_int;

use super::stand_in::StandIn;

/// Returns the stand-in for an exported name, or `None` if no function of this name is hooked.
pub(super) fn exported(name: &[u8]) -> Option<StandIn> {
    linear::exported(name)
        .or_else(|| physical::exported(name))
        .or_else(|| arrays::exported(name))
        .or_else(|| imported::exported(name))
        .or_else(|| graph_nodes::exported(name))
}

/// Returns the stand-in for the address that `cuGetProcAddress` returns for `name` of CUDA `version`.
pub(super) fn by_base_name(name: &[u8], version: c_int) -> Option<StandIn> {
    linear::by_base_name(name, version)
        .or_else(|| physical::by_base_name(name, version))
        .or_else(|| arrays::by_base_name(name, version))
        .or_else(|| imported::by_base_name(name, version))
        .or_else(|| graph_nodes::by_base_name(name, version))
}
