//! From the program's threads to the writer thread.

pub(crate) mod chunk_pool;
pub(crate) mod lane;
pub(crate) mod merge;
pub(crate) mod overflow;
