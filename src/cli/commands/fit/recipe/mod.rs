//! `--recipe`: a script for a model that the user names, run as any other program.
//!
//! A recipe is an ordinary script that uses the user's own packages. Its settings are the constants at its top.

pub(super) mod catalog;
pub(super) mod checks;
pub(super) mod model;
pub(super) mod model_check;
pub(super) mod options;
pub(super) mod prepared;
pub(super) mod settings;
