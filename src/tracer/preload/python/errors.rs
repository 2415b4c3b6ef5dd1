//! Counts the exceptions that the tracer's Python code raised.
//!
//! No such exception reaches the program. An exception loses the rows that its hook would have recorded. So
//! the trace's end row has the number of exceptions, and `MEMTRACE_LOG=debug` logs the first exception of
//! each type at each place.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use memtrace_trace::config::Level;
use rustc_hash::FxHashMap;

use crate::ffi::cpython::Gil;
use crate::runtime::{log as log_file, session};

static TOTAL: AtomicU64 = AtomicU64::new(0);
/// The number of exceptions, by place and type. Only a thread that holds the GIL takes the lock. Python holds
/// the GIL when it forks, so the lock is free in a child that continues with Python.
static BY_KIND: Mutex<Option<FxHashMap<(String, String), u64>>> = Mutex::new(None);

/// Counts an exception of type `kind` raised at `place`. Returns true if the caller must log it: the log
/// level is debug, and the exception is the first of its type at this place.
pub(crate) fn count(place: &str, kind: &str) -> bool {
    TOTAL.fetch_add(1, Ordering::Relaxed);
    let mut by_kind = BY_KIND.lock().unwrap_or_else(PoisonError::into_inner);
    let number = by_kind.get_or_insert_default().entry((place.to_owned(), kind.to_owned())).or_default();
    *number += 1;
    *number == 1 && session::session().is_some_and(|session| session.settings.log >= Level::Debug)
}

/// Logs an exception for which [`count`] returned `true`.
pub(crate) fn log(place: &str, kind: &str, text: &str) {
    log_file::line(&format!(
        "an exception in memtrace's own Python code ({place}), which the program does not see: {kind}: {text}"
    ));
}

/// Clears the exception that Python has raised, counts it, and logs it if it is the first of its type at
/// `place`.
pub(crate) fn take(gil: Gil, place: &str) {
    let (kind, text) = gil.fetch_error().describe(gil);
    if count(place, &kind) {
        log(place, &kind, &text);
    }
}

/// Returns the end row's entry with the number of exceptions; empty if no exception was raised.
pub(crate) fn end_words() -> String {
    match TOTAL.load(Ordering::Relaxed) {
        0 => String::new(),
        errors => format!("python_errors={errors}"),
    }
}

/// Resets the count in the child of a fork, whose own trace must not have the errors of its parent.
pub(crate) fn reset_in_child() {
    TOTAL.store(0, Ordering::Relaxed);
}
