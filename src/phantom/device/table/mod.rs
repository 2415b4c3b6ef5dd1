//! All exported functions: their registry, the generated list, and the interface that describes them to the
//! tracer.

pub(crate) mod describe;
pub(crate) mod generated;
pub(crate) mod generated_macros;
pub(crate) mod registry;
