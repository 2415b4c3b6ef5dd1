//! The names of the environment variables of the simulated GPU.
//!
//! The command sets them, the simulated GPU reads them, and the tracer lists them among the known variables.

/// The requested card, as the user typed it.
pub const CARD_VARIABLE: &str = "MEMTRACE_PHANTOM";

/// The requested faults.
pub const FAULT_VARIABLE: &str = "MEMTRACE_PHANTOM_FAULT";

/// Whether a program may continue past the card's capacity: 0 or 1.
pub const PAST_OOM_VARIABLE: &str = "MEMTRACE_PHANTOM_PAST_OOM";

/// Whether large CPU tensors keep their values: 0 or 1.
pub const HOST_VALUES_VARIABLE: &str = "MEMTRACE_PHANTOM_HOST_VALUES";

/// The identifier of the machine. Processes with the same identifier and the same card request share the cards.
pub const MACHINE_VARIABLE: &str = "MEMTRACE_PHANTOM_MACHINE";

/// The assumption about sizes that depend on unknown values: full, half or empty.
pub const DYNAMIC_VARIABLE: &str = "MEMTRACE_PHANTOM_DYNAMIC";

/// The real ranks of a job and the number of all ranks, such as `0,7,504-511/512`. The other ranks are stand-ins.
pub const RANKS_VARIABLE: &str = "MEMTRACE_PHANTOM_RANKS";

/// The port of the rendezvous store of a rank among stand-ins.
pub const STORE_VARIABLE: &str = "MEMTRACE_PHANTOM_STORE";

/// The number of seconds that a rank among stand-ins may wait for another rank; 0 for no limit.
pub const PATIENCE_VARIABLE: &str = "MEMTRACE_PHANTOM_PATIENCE";

/// The time of a training step in milliseconds, for what NCCL's watchdog does by the clock; 0 for the wall clock.
pub const STEP_MS_VARIABLE: &str = "MEMTRACE_PHANTOM_STEP_MS";

/// The number of times that a program may read the same uncomputed value from the same place; 0 for no limit.
pub const READS_VARIABLE: &str = "MEMTRACE_PHANTOM_READS";
