//! Hooks of CUDA: calls of the runtime and the driver that allocate and free memory, lookups of driver
//! functions, events, graph captures, and the workspaces of cuBLAS.

mod alloc_call;
mod driver;
mod driver_fn;
mod entry_points;
mod events;
mod graphs;
mod libraries;
mod runtime;
pub(super) mod stand_in;

use stand_in::StandIn;

use crate::runtime::session;

/// Returns our stand-in for the runtime or driver function of exactly this name. Returns `None` if memtrace
/// does not hook this function, or if the setting `dlsym` or `driver` disables its stand-in.
pub(super) fn exported(name: &[u8]) -> Option<StandIn> {
    let settings = &session::session()?.settings;
    if !settings.dlsym {
        return None;
    }
    if name.starts_with(b"cuda") {
        runtime::exported(name)
            .or_else(|| events::exported(name))
            .or_else(|| graphs::exported(name))
            .or_else(|| entry_points::of_runtime(name).filter(|_| settings.driver))
    } else if settings.driver {
        entry_points::of_driver(name).or_else(|| driver::exported(name))
    } else {
        None
    }
}
