//! Stream captures in progress, and the work that they recorded.
//!
//! A capture lives from `cudaStreamBeginCapture` to `cudaStreamEndCapture`. A stream knows its capture by
//! number only, so streams do not depend on graphs.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex};

use crate::core::lock::lock;

/// The work of a graph: its size alone, since kernels do nothing.
#[derive(Debug, Default)]
pub(crate) struct RecordedWork {
    nodes: AtomicU64,
    cost_ns: AtomicU64,
}

impl RecordedWork {
    /// Adds a node that takes `cost_ns` nanoseconds of device time when it is launched.
    pub(crate) fn add_node(&self, cost_ns: u64) {
        self.nodes.fetch_add(1, Ordering::Relaxed);
        self.cost_ns.fetch_add(cost_ns, Ordering::Relaxed);
    }

    /// The number of nodes.
    pub(crate) fn nodes(&self) -> u64 {
        self.nodes.load(Ordering::Relaxed)
    }

    /// The device time of one launch, in nanoseconds.
    pub(crate) fn cost_ns(&self) -> u64 {
        self.cost_ns.load(Ordering::Relaxed)
    }

    /// A copy that later nodes do not change.
    pub(crate) fn snapshot(&self) -> Self {
        Self { nodes: AtomicU64::new(self.nodes()), cost_ns: AtomicU64::new(self.cost_ns()) }
    }
}

/// The captures in progress: their number and the work of the graph that they fill.
static OPEN: LazyLock<Mutex<HashMap<u64, &'static RecordedWork>>> = LazyLock::new(Mutex::default);

/// Begins a capture into `work` and returns its number, which is never 0.
pub(crate) fn begin(work: &'static RecordedWork) -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let capture = NEXT.fetch_add(1, Ordering::Relaxed);
    lock(&OPEN).insert(capture, work);
    capture
}

/// Ends a capture.
pub(crate) fn end(capture: u64) {
    lock(&OPEN).remove(&capture);
}

/// Returns true if a capture is in progress.
pub(crate) fn is_open(capture: u64) -> bool {
    lock(&OPEN).contains_key(&capture)
}

/// Adds a node to the graph of a capture.
pub(crate) fn add_node(capture: u64, cost_ns: u64) {
    let work = lock(&OPEN).get(&capture).copied();
    if let Some(work) = work {
        work.add_node(cost_ns);
    }
}
