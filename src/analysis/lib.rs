//! Reads traces and answers questions about them.
//!
//! The modules, in a good order to read them:
//!
//! - [`read`]: the files of a run, as a stream of records.
//! - [`state`]: the replay of the records: the live memory at each moment, its owners, and the totals. Nearly
//!   every answer starts here.
//! - [`profile`]: a second replay that follows the flow of data between ops: the categories and actions of
//!   `torch.profiler`.
//! - [`requests`]: the program's requests to the caching allocator, in order, so that they can be repeated.
//! - [`whatif`]: the replay with other sizes and lifetimes, which predicts the peak of a changed program.
//! - [`selection`]: the part of a run that the user selects.
//! - [`render`]: the output of answers as text for a terminal, as Markdown and as CSV.
//! - [`reports`], [`exports`] and [`html`]: the answers. Each report and each export has its own file or
//!   folder, and one line in a table ([`reports::REPORTS`], [`exports::EXPORTS`]), which the command, its
//!   help and its tests read.
//!
//! No other module imports from the last three: [`reports`], [`exports`] and [`html`].
//!
//! From a trace to an answer:
//!
//! ```
//! use memtrace_analysis::options::Options;
//! use memtrace_analysis::read::input::Input;
//! use memtrace_analysis::reports;
//!
//! # let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/gpt");
//! let run = Input::open(&folder)?;
//! let peak = reports::find("peak").expect("a report of this name");
//! let answer = reports::answer(peak, &[run], &Options::default())?;
//! assert!(answer.text().contains("device 0: peak of allocated memory 119.00 MiB"));
//! assert_eq!(answer.to_json("peak")["peak"]["bytes"], 124_781_568);
//! # Ok::<(), memtrace_analysis::Error>(())
//! ```
//!
//! This crate neither prints nor parses arguments. The only unsafe code is in `read/scan/cpu.rs`, for
//! instructions without a safe equivalent.
#![deny(unsafe_code)]
#![warn(clippy::too_many_lines)]

pub mod error;
pub mod exports;
pub mod html;
pub mod options;
pub mod profile;
pub mod read;
pub mod render;
pub mod reports;
pub mod requests;
pub mod selection;
pub mod state;
#[doc(hidden)]
pub mod testing;
pub mod whatif;

pub use error::{Error, Result};
