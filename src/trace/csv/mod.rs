//! Rows to and from the CSV.

mod field_cache;
mod line;
mod reader;
mod writer;

pub use reader::RowReader;
pub use writer::RowWriter;
