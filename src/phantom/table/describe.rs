//! What the phantom says of itself: which card, under which assumptions, how much was invented.
//! The tracer finds these functions by name and puts their text into the trace.

use std::ffi::c_char;
use std::fmt::Write;

use memtrace_cards::CARDS;

use crate::core::ffi::Out;
use crate::core::host_state::machine;
use crate::core::values::invented;
use crate::cuda::stream::waits;
use crate::kernels::kernel::launches;
use crate::libs::cudnn;
use crate::table::call_table::{self, Kind};

/// Names that the real library answers: names, or their beginnings with `.*` behind.
const PASSED_ON: &str = include_str!("passthrough.txt");

/// Writes what fits, with its zero, and tells how long the whole text is.
fn write(text: &str, out: Out<c_char>, capacity: usize) -> usize {
    if out.address() != 0 {
        out.text(text, capacity);
    }
    text.len()
}

/// JSON without quotes or backslashes inside its strings: our names have none.
fn clean(text: &str) -> String {
    text.chars().filter(|c| !c.is_control() && !matches!(c, '"' | '\\')).collect()
}

fn description() -> String {
    let machine = machine();
    let spec = &machine.spec;
    let (reads, bytes) = invented();
    let (real, workspace) = cudnn::chosen_by_real();
    let cudnn = match real {
        None => "unused",
        Some(true) => "real",
        Some(false) => "guess",
    };
    let mut text = format!(
        "{{\"card\":\"{}\",\"name\":\"{}\",\"capacity_bytes\":{},\"context_bytes\":{},\"cc\":\"{}.{}\",\
         \"sms\":{},\"count\":{},\"assumptions\":{{\"dynamic\":\"{}\",\"cudnn\":\"{cudnn}\",\
         \"values\":\"zero\",\"lag_ns\":{}}},\"cudnn_workspace_bytes\":{workspace},\"launches\":{},\
         \"waits\":{},\"invented_reads\":{reads},\"invented_bytes\":{bytes}",
        spec.base.id,
        clean(&spec.name),
        spec.memory,
        spec.context,
        spec.cc.0,
        spec.cc.1,
        spec.sms,
        spec.count,
        machine.dynamic.word(),
        crate::cuda::stream::LAG,
        launches(),
        waits(),
    );
    for (label, kind) in [("guessed_calls", Kind::Guess), ("refused_calls", Kind::Unsupported)] {
        let _ = write!(text, ",\"{label}\":{{");
        let called = call_table::calls().filter(|call| call.kind == kind && call.hits() > 0);
        for (index, call) in called.enumerate() {
            let comma = if index == 0 { "" } else { "," };
            let _ = write!(text, "{comma}\"{}\":{}", call.name, call.hits());
        }
        text.push('}');
    }
    text.push('}');
    text
}

fn cards() -> String {
    let mut text = String::from("[");
    for (index, card) in CARDS.iter().enumerate() {
        let comma = if index == 0 { "" } else { "," };
        let _ = write!(
            text,
            "{comma}{{\"card\":\"{}\",\"name\":\"{}\",\"memory_mib\":{},\"context_mib\":{},\"cc\":\"{}.{}\",\"sms\":{}}}",
            card.id, card.name, card.memory_mib, card.context_mib, card.cc.0, card.cc.1, card.sms
        );
    }
    text.push(']');
    text
}

fn answers() -> String {
    let mut lines: Vec<_> =
        call_table::calls().map(|call| format!("{} {}\n", call.kind.word(), call.name)).collect();
    let passed = PASSED_ON.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.extend(passed.map(|pattern| format!("passed {pattern}\n")));
    lines.sort_unstable();
    lines.concat()
}

/// Writes JSON about the device and the run so far into a buffer of `capacity` bytes, cut to what
/// fits with a zero, and returns the length of the whole text. A null buffer only asks for it.
// SAFETY: the name is ours alone.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn memtrace_phantom_describe(out: *mut c_char, capacity: usize) -> usize {
    write(&description(), Out::from_address(out as usize), capacity)
}

/// The same for the list of cards, as a JSON array.
// SAFETY: the name is ours alone.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn memtrace_phantom_cards(out: *mut c_char, capacity: usize) -> usize {
    write(&cards(), Out::from_address(out as usize), capacity)
}

/// The same for the table of answered calls: a line for each, how it is answered and its name, or a
/// pattern of names that are left to the real library.
// SAFETY: the name is ours alone.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn memtrace_phantom_answers(out: *mut c_char, capacity: usize) -> usize {
    write(&answers(), Out::from_address(out as usize), capacity)
}
