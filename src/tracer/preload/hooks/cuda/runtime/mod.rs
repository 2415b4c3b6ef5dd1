//! Hooks of the CUDA runtime's calls that allocate or free memory, or may create a context.

mod arrays;
mod first_use;
mod graph_nodes;
mod imported;
mod linear;

use super::stand_in::StandIn;

/// Returns the stand-in for an exported name, or `None` if no function of this name is hooked.
pub(super) fn exported(name: &[u8]) -> Option<StandIn> {
    linear::exported(name)
        .or_else(|| arrays::exported(name))
        .or_else(|| imported::exported(name))
        .or_else(|| graph_nodes::exported(name))
        .or_else(|| first_use::exported(name))
}
