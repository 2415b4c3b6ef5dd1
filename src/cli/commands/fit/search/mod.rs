//! Which value is tried next, and when a search is over.

pub(super) mod estimate;
pub(super) mod limit_search;
pub(super) mod row_search;
pub(super) mod scheduler;
