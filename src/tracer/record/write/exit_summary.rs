//! The summary that the traced process prints at its end (`MEMTRACE_SUMMARY`).

use std::io::{self, IsTerminal};
use std::path::Path;

use memtrace_encode::Encoder;
use memtrace_trace::config::Auto;
use memtrace_trace::counts::counted;
use memtrace_trace::units::Unit;

use crate::session::Session;

/// Prints the summary of the trace that began with the file `trace`, if the settings ask for it.
pub(crate) fn print(session: &Session, encoder: &Encoder, trace: &Path) {
    let wanted = match session.settings.summary {
        Auto::On => true,
        Auto::Off => false,
        Auto::Terminal => io::stderr().is_terminal(),
    };
    if wanted {
        let path = session.path_for_user(trace);
        (session.say)(&format!("{} in {}", counted(encoder.rows().unsigned_abs(), "row"), path.display()));
        for line in ledger_lines(encoder) {
            (session.say)(&format!("  {line}"));
        }
        for line in encoder.statistics().lines() {
            (session.say)(&format!("  {line}"));
        }
        (session.say)(&format!("next: memtrace summary {}", session.out.display()));
    }
}

/// Returns one line per sampled device: the memory in use at the last sample, and what holds it.
fn ledger_lines(encoder: &Encoder) -> Vec<String> {
    let show = |bytes| Unit::Auto.show(bytes);
    let line = |device: usize| {
        let (accounted, rest) = encoder.ledger(device as i8);
        let sample = encoder.sampled(device as i8);
        let used = accounted.reserved + accounted.outside + rest.total();
        let mut line = format!("GPU {device} at the end: {} of {} used: ", show(used), show(sample.total?));
        line += &format!("torch {}", show(accounted.reserved));
        if accounted.outside > 0 {
            line += &format!(", libraries {}", show(accounted.outside));
        }
        for (name, bytes) in rest.parts() {
            line += &format!(", {name} {}", show(bytes));
        }
        Some(line)
    };
    encoder.devices().filter_map(|(device, _)| line(device)).collect()
}
