//! What is printed: the answer of one search, of several, and both as JSON.

pub(super) mod json;
pub(super) mod single_search;
pub(super) mod table;
