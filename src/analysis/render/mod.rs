//! From numbers to text for a terminal: styled lines, tables and curves.

pub mod curve;
pub mod footer;
pub mod heading;
pub mod phantom_run;
pub(crate) mod rst;
pub mod text;
