//! How each call is answered: the macro that defines exported functions, the registry of all of them, the
//! generated list, and the interface that describes them to the tracer.

pub(crate) mod call_table;
pub(crate) mod describe;
pub(crate) mod generated;
pub(crate) mod generated_macros;
pub(crate) mod registry;
