//! Host memory as the kernel counts it: the values of the `sample` rows of device -1, and the files that they come from.
//!
//! Each row has one source, which its `api` names. The row's `name` has the values as `key=value`; unknown values are left
//! out. A row about one part of a process's memory, about one child process, or about an error, ends with `what=` and its name.

mod cgroup;
mod proc_files;

use std::fmt;

pub use cgroup::Cgroup;
pub use memtrace_util::host_memory::kib_of;
pub use proc_files::HostFiles;

use crate::Api;
use crate::columns::MAX_BYTES;

/// The id of this boot of the machine; empty when unknown.
#[must_use]
pub fn boot_id() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

/// The most values of one row.
pub const VALUES: usize = 5;

/// The values of one row about host memory. Bytes, except `kills`, `pid` and `processes`; `None` is unknown.
pub type HostValues = [Option<i64>; VALUES];

/// The word before the name of a part.
const WHAT: &str = "what=";

/// The first row of a list of [`Api::Smaps`] or [`Api::Child`]: the sum of the rows that follow it.
pub const TOTAL: &str = "(total)";

/// The names of the values of a source; empty for a source that has no host memory.
#[must_use]
pub const fn keys(source: Api) -> &'static [&'static str] {
    match source {
        // Resident memory of the process by kind, and what it has in swap.
        Api::ProcStatus => &["rss", "anon", "file", "shmem", "swap"],
        // What the container uses, its limit, its page cache, its swap, and how many of its processes the kernel killed
        // because memory ran out.
        Api::Cgroup => &["current", "limit", "file", "swap", "kills"],
        // The machine's memory, the part that programs can still get, the unused part, free swap, and the kills.
        Api::Meminfo => &["total", "available", "free", "swap_free", "kills"],
        // A part of the process's memory: its share (PSS), its resident bytes, the resident bytes that differ
        // from a file or have no file, and its bytes in swap.
        Api::Smaps => &["pss", "rss", "dirty", "swap"],
        // A child process, or all of them.
        Api::Child => &["pss", "rss", "pid", "processes"],
        // The address space of a process that ended because the system refused it memory: its limit, its size then, and its
        // largest size.
        Api::Refused => &["limit", "size", "peak"],
        _ => &[],
    }
}

/// The bytes that the processes of a control group can still get before the kernel kills one: page cache can be given up.
#[must_use]
pub fn left_in_group(current: i64, limit: i64, file: i64) -> i64 {
    limit - (current - file)
}

/// Formats the values of a row. `what` is the name of the part, or empty.
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

/// Parses the text of a row: its values, and the name of the part. Unknown keys and impossible values are skipped.
#[must_use]
pub fn parse(source: Api, text: &str) -> (HostValues, &str) {
    let (numbers, what) = match text.strip_prefix(WHAT) {
        Some(what) => ("", what),
        None => text.split_once(" what=").unwrap_or((text, "")),
    };
    let mut values = HostValues::default();
    for word in numbers.split(' ') {
        let Some((key, value)) = word.split_once('=') else { continue };
        let place = keys(source).iter().position(|known| *known == key);
        let value = value.parse::<i64>().ok().filter(|value| (0..MAX_BYTES.cast_signed()).contains(value));
        if let (Some(place), Some(value)) = (place, value) {
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
