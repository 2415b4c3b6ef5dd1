//! What the user asks for, before any trial runs.

pub(super) mod candidates;
pub(super) mod command_line;
pub(super) mod largest_input;
pub(super) mod mode;
pub(super) mod placeholders;
pub(super) mod plan;
pub(super) mod prices;
