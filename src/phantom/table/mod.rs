//! The table of answered calls, and the interface that describes it to the tracer.

pub(crate) mod call_table;
pub(crate) mod describe;
pub(crate) mod generated;
