//! The simulated machine: the processes of one launch share its cards.
//!
//! Each launch of `memtrace run --phantom` is a machine of its own. A table in shared memory
//! ([`files`]) has a slot for each of its processes with the memory that the process uses on each card
//! ([`table`]). The simulated GPU writes it, and subtracts what others use from what it can give. NVML's
//! answers and `memtrace live --nvidia-smi` read it.
//!
//! Only this user can open the table. Its content is checked as input all the same: a wrong number in it
//! may make an answer wrong and never a process fail.
#![forbid(unsafe_code)]

pub mod files;
pub mod identity;
pub mod libcuda;
pub mod process;
pub mod table;

/// The environment variable with the identifier of the machine. Processes with the same one and the same card
/// share its cards.
pub const MACHINE_VARIABLE: &str = "MEMTRACE_PHANTOM_MACHINE";

/// The environment variable with the ranks of a job that run and the number of all, such as `0,7,504-511/512`; the others
/// are stand-ins.
pub const RANKS_VARIABLE: &str = "MEMTRACE_PHANTOM_RANKS";
/// The port of the rendezvous store of a rank among stand-ins.
pub const STORE_VARIABLE: &str = "MEMTRACE_PHANTOM_STORE";

/// The version of the simulated driver.
pub const DRIVER_VERSION: &str = "580.00";

/// The CUDA version of the driver until a process reports another: 1000 times the major version, and 10 times
/// the minor one.
pub const DEFAULT_CUDA_VERSION: u32 = 13_000;
