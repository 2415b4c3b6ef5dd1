//! The simulated machine, whose cards the processes of one launch share.
//!
//! Each launch of `memtrace run --phantom` is a separate machine. A table in shared memory ([`files`]) has a
//! slot for each process, with the memory that the process uses on each card ([`table`]). The simulated GPU
//! writes the table, and subtracts the usage of other processes from the memory that it can allocate. The
//! simulated NVML and `memtrace live --nvidia-smi` read the table.
//!
//! Only this user can open the table. Its contents are still validated like input: a wrong number may lead to
//! a wrong answer but must not crash a process.
#![forbid(unsafe_code)]

pub mod files;
pub mod identity;
pub mod libcuda;
pub mod process;
pub mod table;

pub use memtrace_util::phantom_variables::{MACHINE_VARIABLE, RANKS_VARIABLE, STORE_VARIABLE};

/// The version of the simulated driver, as nvidia-smi and NVML report it.
pub const DRIVER_VERSION: &str = "580.00";

/// The CUDA version of the driver until a process reports another one: 1000 times the major version plus 10
/// times the minor version.
pub const DEFAULT_CUDA_VERSION: u32 = 13_000;
