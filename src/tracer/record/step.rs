//! The training step of the process.

use std::sync::atomic::AtomicI32;

/// The training step of the process; -1 before the first.
pub static STEP: AtomicI32 = AtomicI32::new(-1);
