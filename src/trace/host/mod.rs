//! Host memory as the kernel counts it: the values in the `sample` rows of device -1, and the files from
//! which they come.
//!
//! Each row has one source, which its `api` names. The `name` of the row contains the values as `key=value`;
//! unknown values are omitted. A row about a part of a process's memory, a child process or an error ends
//! with `what=` and a name.

pub mod parts;
mod proc_files;

use std::fmt;

pub use memtrace_util::cgroup::{Cgroup, left_in_group};
pub use memtrace_util::host_memory::kib_of;
pub use proc_files::HostFiles;

use crate::Api;
use crate::key_values::{bytes_of, key_values};

/// Returns the id of the machine's current boot; empty if unknown.
#[must_use]
pub fn boot_id() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

/// The maximum number of values in a row.
pub const VALUES: usize = 5;

/// The values of one row about host memory, in bytes except for `kills`, `pid` and `processes`. `None` is
/// unknown.
pub type HostValues = [Option<i64>; VALUES];

/// The key before the name of a part.
const WHAT: &str = "what=";

/// The name in the first row of a list of [`Api::Smaps`], [`Api::Child`] or [`Api::OtherProcess`], which has
/// the sum of the list.
pub const TOTAL: &str = "(total)";

/// Returns the keys of a source's values; empty for a source that does not report host memory.
#[must_use]
pub const fn keys(source: Api) -> &'static [&'static str] {
    match source {
        // Resident memory of the process by kind, and its memory in swap.
        Api::ProcStatus => &["rss", "anon", "file", "shmem", "swap"],
        // The container's memory in use, limit, page cache and swap, and the number of its processes that the
        // kernel has killed for lack of memory.
        Api::Cgroup => &["current", "limit", "file", "swap", "kills"],
        // The machine's memory, the part available to programs, the unused part, the free swap, and the
        // number of killed processes.
        Api::Meminfo => &["total", "available", "free", "swap_free", "kills"],
        // A part of the process's memory: its proportional share (PSS), its resident bytes, the resident
        // bytes that are modified or have no file, and its bytes in swap.
        Api::Smaps => &["pss", "rss", "dirty", "swap"],
        // A child process, or the sum of all child processes.
        Api::Child => &["pss", "rss", "pid", "processes"],
        // Another process that shares the memory limit, or the sum of all of them: its resident bytes that
        // are neither in files nor shared.
        Api::OtherProcess => &["held", "pid", "processes"],
        // The address space of a process that ended because the system refused it memory: its limit, its size
        // at that time, and its peak size.
        Api::Refused => &["limit", "size", "peak"],
        _ => &[],
    }
}

/// Formats the values of a row. `what` is the name of the part; may be empty.
#[must_use]
pub fn text_of(source: Api, values: HostValues, what: &str) -> String {
    Shown(source, values, what).to_string()
}

struct Shown<'a>(Api, HostValues, &'a str);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shown(source, values, what) = self;
        let mut between = "";
        for (key, value) in keys(*source).iter().zip(values) {
            if let Some(value) = value {
                write!(f, "{between}{key}={value}")?;
                between = " ";
            }
        }
        if what.is_empty() { Ok(()) } else { write!(f, "{between}{WHAT}{what}") }
    }
}

/// Parses the text of a row into its values and the name of the part. Skips unknown keys and impossible
/// values.
#[must_use]
pub fn parse(source: Api, text: &str) -> (HostValues, &str) {
    let (numbers, what) = match text.strip_prefix(WHAT) {
        Some(what) => ("", what),
        None => text.split_once(" what=").unwrap_or((text, "")),
    };
    let mut values = HostValues::default();
    for (key, value) in key_values(numbers) {
        let place = keys(source).iter().position(|known| *known == key);
        if let (Some(place), Some(value)) = (place, bytes_of(value)) {
            values[place] = Some(value);
        }
    }
    (values, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_of_the_host_comes_back_from_its_text() {
        let values = [Some(7), None, Some(0), Some(9), None];
        for (source, what) in [(Api::Smaps, "file /a b/c=d what=e"), (Api::ProcStatus, ""), (Api::Child, "x")]
        {
            let text = text_of(source, values, what);
            assert_eq!(parse(source, &text), (values, what), "{text}");
        }
        assert_eq!(text_of(Api::Smaps, HostValues::default(), "stack"), "what=stack");
        assert_eq!(parse(Api::Smaps, "what=stack"), (HostValues::default(), "stack"));
    }

    #[test]
    fn a_hostile_text_of_the_host_gives_unknown_values() {
        for text in ["", "pss", "pss=", "pss=-5", "pss=99999999999999999999", "=1", "current=1 limit"] {
            assert_eq!(parse(Api::Smaps, text), (HostValues::default(), ""), "{text}");
        }
        assert!(keys(Api::CudaMalloc).is_empty());
    }
}
