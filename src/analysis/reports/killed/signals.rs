//! The signals that end programs.

/// The meanings of the signals that end programs.
const SIGNALS: &[(i32, &str, &str)] = &[
    (1, "SIGHUP", "its terminal or its session was closed"),
    (2, "SIGINT", "a person interrupted it (Ctrl-C)"),
    (3, "SIGQUIT", "a person ended it from the terminal"),
    (
        6,
        "SIGABRT",
        "it aborted itself: NCCL's watchdog after a timeout, an assertion, or an error of C++; its last lines say which",
    ),
    (
        7,
        "SIGBUS",
        "a page of memory was not available: /dev/shm is full (DataLoader workers; a larger --shm-size), or \
         a mapped file was cut",
    ),
    (11, "SIGSEGV", "it accessed memory that it does not own"),
    (
        15,
        "SIGTERM",
        "it was asked to end: by a scheduler at its time limit, a launcher, or a person; not because memory \
         ran out",
    ),
    (24, "SIGXCPU", "it reached its limit of processor time (ulimit -t, or the scheduler's)"),
];

pub(super) fn signal_name(signal: i32) -> String {
    let known = SIGNALS.iter().find(|(number, ..)| *number == signal);
    known.map_or_else(|| format!("signal {signal}"), |(_, name, _)| (*name).to_owned())
}

/// Returns the name of a signal that ended a program, and its meaning if known.
pub(super) fn about_signal(signal: i32) -> String {
    let known = SIGNALS.iter().find(|(number, ..)| *number == signal);
    let about = known.map_or_else(String::new, |(.., about)| format!(": {about}"));
    format!("by {}{about}", signal_name(signal))
}
