//! The functions through which the tracer queries the phantom library for the card, the assumptions and the
//! counts. The tracer finds them by name and writes their text to the trace.

use std::ffi::c_char;
use std::fmt::Write;

use memtrace_cards::CARDS;

use crate::core::call_table::AnswerKind;
use crate::core::faults;
use crate::core::ffi::Out;
use crate::core::host_pages;
use crate::core::host_state::host_state;
use crate::core::past_oom;
use crate::core::pinned_pages;
use crate::core::stream::LAG_NS;
use crate::core::values::invented;
use crate::core::watchdog;
use crate::cuda::streams::waits;
use crate::kernels::kernel::launches;
use crate::libs::{cudnn, nvrtc, stand_ins};
use crate::table::registry;

/// Names, or prefixes followed by `.*`, of functions that are left to the real library.
const PASSED_THROUGH: &str = include_str!("passthrough.txt");

/// Writes the text, cut to `capacity` including its terminating zero, and returns its full length in bytes.
///
/// # Safety
/// `out` is null or good for `capacity` bytes.
unsafe fn write(text: &str, out: Out<c_char>, capacity: usize) -> usize {
    if !out.is_null() {
        // SAFETY: the caller's promise.
        unsafe { out.text(text, capacity) };
    }
    text.len()
}

/// Returns a string without the characters that JSON would escape. The names written here contain none.
fn without_escapes(text: &str) -> String {
    text.chars().filter(|c| !c.is_control() && !matches!(c, '"' | '\\')).collect()
}

/// Returns the description of the card and of the run so far as JSON.
fn description() -> String {
    let host = host_state();
    let spec = &host.spec;
    let (reads, bytes) = invented();
    let (plans, workspace) = cudnn::plans();
    let (compiled, not_compiled) = nvrtc::programs();
    let cudnn = match plans {
        None => "unused",
        Some(true) => "real",
        Some(false) => "guess",
    };
    let mut text = format!(
        "{{\"card\":\"{}\",\"name\":\"{}\",\"capacity_bytes\":{},\"context_bytes\":{},\
         \"context_low_bytes\":{},\"context_high_bytes\":{},\"cc\":\"{}.{}\",\
         \"sms\":{},\"count\":{},\"assumptions\":{{\"dynamic\":\"{}\",\"cudnn\":\"{cudnn}\",\
         \"values\":\"zero\",\"lag_ns\":{}}},\"cudnn_workspace_bytes\":{workspace},\"launches\":{},\
         \"waits\":{},\"invented_reads\":{reads},\"invented_bytes\":{bytes},\
         \"programs_compiled\":{compiled},\"programs_not_compiled\":{not_compiled}",
        spec.base.id,
        without_escapes(&spec.name),
        spec.memory,
        spec.context,
        spec.context_range.0,
        spec.context_range.1,
        spec.cc.0,
        spec.cc.1,
        spec.sms,
        spec.count,
        host.dynamic.name(),
        LAG_NS,
        launches(),
        waits(),
    );
    if let Some((ranks, world)) = stand_ins::ranks() {
        let _ = write!(
            text,
            ",\"ranks\":\"{ranks}\",\"ranks_of\":{world},\"stand_in_answers\":{}",
            stand_ins::answers()
        );
    }
    if let Some(peak) = past_oom::peak() {
        // A program that allocated nothing needs no card, so its context does not count, either.
        let needed = if peak > 0 { peak + spec.context + spec.others } else { 0 };
        let _ = write!(text, ",\"needed_bytes\":{needed}");
    }
    if host_pages::is_on() {
        text.push_str(",\"host_values_kept\":false");
    }
    let absent = pinned_pages::peak_absent();
    if absent > 0 {
        let _ = write!(text, ",\"pinned_not_resident\":{absent}");
    }
    for (label, kind) in [("guessed_calls", AnswerKind::Guess), ("refused_calls", AnswerKind::Unsupported)] {
        let _ = write!(text, ",\"{label}\":{{");
        let called = registry::entries().filter(|entry| entry.kind == kind && entry.calls() > 0);
        for (index, entry) in called.enumerate() {
            let comma = if index == 0 { "" } else { "," };
            let callers = entry.callers().join(",");
            let by = if callers.is_empty() { "" } else { " by " };
            let _ =
                write!(text, "{comma}\"{}{by}{}\":{}", entry.name, without_escapes(&callers), entry.calls());
        }
        text.push('}');
    }
    text.push_str(",\"faults\":[");
    for (index, (fault, failures, first)) in faults::courses().enumerate() {
        let comma = if index == 0 { "" } else { "," };
        let _ = write!(text, "{comma}{{\"fault\":\"{fault}\",\"failures\":{failures},\"call\":\"{first}\"}}");
    }
    text.push_str("]}");
    text
}

/// Returns the presets as a JSON array.
fn cards() -> String {
    let mut text = String::from("[");
    for (index, card) in CARDS.iter().enumerate() {
        let comma = if index == 0 { "" } else { "," };
        let _ = write!(
            text,
            "{comma}{{\"card\":\"{}\",\"name\":\"{}\",\"memory_mib\":{},\"context_mib\":{},\
             \"cc\":\"{}.{}\",\"sms\":{}}}",
            card.id, card.name, card.memory_mib, card.context.typical_mib, card.cc.0, card.cc.1, card.sms
        );
    }
    text.push(']');
    text
}

/// Returns one line per exported function or pass-through name pattern: the kind of answer and the name,
/// sorted.
fn answers() -> String {
    let mut lines: Vec<_> =
        registry::entries().map(|entry| format!("{} {}\n", entry.kind.name(), entry.name)).collect();
    let passed =
        PASSED_THROUGH.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.extend(passed.map(|pattern| format!("passed {pattern}\n")));
    lines.sort_unstable();
    lines.concat()
}

/// Writes JSON about the device and the run so far into a buffer of `capacity` bytes. The text is cut to the
/// bytes that fit before a terminating zero. Returns the length of the full text.
///
/// # Safety
/// `out` is null, to query only the length, or valid for writes of `capacity` bytes.
// SAFETY: only this library defines the name.
#[unsafe(no_mangle)]
unsafe extern "C" fn memtrace_phantom_describe(out: Out<c_char>, capacity: usize) -> usize {
    // SAFETY: the caller's promise.
    unsafe { write(&description(), out, capacity) }
}

/// Writes the presets as a JSON array; see [`memtrace_phantom_describe`] for the buffer.
///
/// # Safety
/// Same as for [`memtrace_phantom_describe`].
// SAFETY: only this library defines the name.
#[unsafe(no_mangle)]
unsafe extern "C" fn memtrace_phantom_cards(out: Out<c_char>, capacity: usize) -> usize {
    // SAFETY: the caller's promise.
    unsafe { write(&cards(), out, capacity) }
}

/// Writes the list of answered calls; see [`memtrace_phantom_describe`] for the buffer. Each line has the
/// kind of answer and the name, or a pattern of names that are left to the real library.
///
/// # Safety
/// Same as for [`memtrace_phantom_describe`].
// SAFETY: only this library defines the name.
#[unsafe(no_mangle)]
unsafe extern "C" fn memtrace_phantom_answers(out: Out<c_char>, capacity: usize) -> usize {
    // SAFETY: the caller's promise.
    unsafe { write(&answers(), out, capacity) }
}

/// Called by the tracer with the number of a training step that begins.
// SAFETY: no other definition of this name is linked into the library; here and below.
#[unsafe(no_mangle)]
extern "C" fn memtrace_phantom_step(step: i64) {
    faults::set_step(step);
    watchdog::step_begins();
}

/// Returns true if an out-of-memory fault is pending for this step or an earlier one. PyTorch's allocator
/// must then have an empty cache; otherwise it may serve every request without a call of the driver.
#[unsafe(no_mangle)]
extern "C" fn memtrace_phantom_fault_at(step: i64) -> bool {
    faults::begins_at_step(step)
}

/// Returns true once after an allocation that failed because of an injected fault.
#[unsafe(no_mangle)]
extern "C" fn memtrace_phantom_take_fault() -> bool {
    faults::take_last().is_some()
}

/// Returns true once after the process's first granted request past the card's capacity (`--past-oom`).
#[unsafe(no_mangle)]
extern "C" fn memtrace_phantom_take_grant() -> bool {
    past_oom::take_grant()
}
