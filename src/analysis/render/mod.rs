//! The output of reports as text for a terminal, as Markdown and as CSV: styled lines, tables, curves,
//! headings and footers.

pub mod curve;
pub mod footer;
pub mod formats;
pub mod heading;
pub mod margin;
pub mod numbers;
pub mod phantom_run;
pub mod printer;
pub(crate) mod process_names;
pub(crate) mod rst;
pub mod table;
pub mod wrap;
