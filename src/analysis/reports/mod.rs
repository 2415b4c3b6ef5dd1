//! The reports, a file or folder for each.
//!
//! A new report is a file here and a line in [`REPORTS`]. The command line, its help and the tests read that
//! table.

mod actions;
mod advise;
mod budget;
mod check;
mod diff;
pub(crate) mod frag;
mod group_table;
pub(crate) mod leaks;
mod ledger;
mod mem_tracker;
mod modules;
mod oom;
mod peak;
mod peaks_each;
mod ranks;
mod report;
mod retained;
mod serving;
mod snapshot;
mod stats;
mod summary;
mod timeline;
mod top_ops;
mod whatif;

use crate::error::Result;
use crate::options::Options;
use crate::read::input::Input;
use crate::selection::select;
pub use report::{Answer, Report, Verdict};

/// Every report, in the order of the help.
pub const REPORTS: &[&dyn Report] = &[
    &summary::Summary,
    &peak::Peak,
    &oom::Oom,
    &whatif::WhatIf,
    &advise::Advise,
    &ledger::Ledger,
    &serving::Serving,
    &modules::Modules,
    &snapshot::Snapshot,
    &top_ops::TopOps,
    &frag::Frag,
    &leaks::Leaks,
    &retained::Retained,
    &stats::Stats,
    &actions::Actions,
    &diff::Diff,
    &budget::Budget,
    &ranks::Ranks,
    &timeline::Timeline,
    &check::Check,
];

/// The report called `name`.
#[must_use]
pub fn find(name: &str) -> Option<&'static dyn Report> {
    REPORTS.iter().copied().find(|report| report.name() == name)
}

/// The answer of `report` for the part of `inputs` that `options` select.
///
/// # Errors
/// As [`Report::run`]. Also when a selector matches nothing.
pub fn answer(report: &dyn Report, inputs: &[Input], options: &Options) -> Result<Answer> {
    let selected: Result<Vec<Input>> =
        inputs.iter().map(|input| select(input, options, report.takes_host())).collect();
    report.run(&selected?, options)
}
