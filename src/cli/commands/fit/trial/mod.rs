//! The program run with one value, and several such trials side by side.

pub(super) mod launch;
pub(super) mod outcome;
pub(super) mod peak;
pub(super) mod process_tree;
mod progress;
pub(super) mod runner;
