//! From numbers to text for a terminal: styled lines, tables and curves.

pub mod curve;
pub mod footer;
pub mod heading;
pub mod numbers;
pub mod phantom_run;
pub mod printer;
pub(crate) mod rst;
