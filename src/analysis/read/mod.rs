//! From the files of a run to records: which files make up a run, the rows of each in order, and their texts.

pub mod input;
mod ordered_pool;
pub mod record;
pub(crate) mod scan;
pub mod stream;
pub mod symbols;
pub(crate) mod tail;
