//! Text for a terminal: styled lines, tables, curves, and the heading and footer of reports; and the same as Markdown
//! and CSV.

pub mod curve;
pub mod footer;
pub mod formats;
pub mod heading;
pub mod margin;
pub mod numbers;
pub mod phantom_run;
pub mod printer;
pub(crate) mod rst;
pub mod table;
pub mod wrap;
