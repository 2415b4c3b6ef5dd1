//! The memory of processes and of the machine, from `/proc`. A value that cannot be read is `None`.

use std::fs;
use std::path::Path;

/// Parses a line from a `/proc` file, such as `VmRSS:     123 kB`. Returns the value in bytes if the line is
/// the field `name`.
#[must_use]
pub fn kib_of(line: &str, name: &str) -> Option<i64> {
    let rest = line.strip_prefix(name)?.strip_prefix(':')?;
    rest.trim().strip_suffix(" kB")?.trim().parse::<i64>().ok()?.checked_mul(1024)
}

/// Returns the value in bytes of the field `name` in the text of a `/proc` file.
#[must_use]
pub fn value(text: &str, name: &str) -> Option<i64> {
    text.lines().find_map(|line| kib_of(line, name))
}

/// Reads a file of process `pid` (`self` for this process). `proc` is the path of `/proc`.
#[must_use]
pub fn read(proc: &Path, pid: &str, file: &str) -> Option<String> {
    // A file may contain invalid UTF-8, because the name of a process may contain any bytes.
    fs::read(proc.join(pid).join(file)).ok().map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns the resident bytes of a process that the kernel cannot reclaim, namely its anonymous and its
/// shared memory. File pages are left out, because they belong to the page cache. `proc` is the path of
/// `/proc`; `pid` may be `self`.
#[must_use]
pub fn held(proc: &Path, pid: &str) -> Option<i64> {
    let text = read(proc, pid, "status")?;
    Some(value(&text, "RssAnon")?.saturating_add(value(&text, "RssShmem").unwrap_or(0)))
}

/// Returns the bytes that a child process holds in addition to the memory that it shares with its parent, or
/// `None` without `smaps_rollup` (before Linux 4.14). If the file has no private memory, returns all bytes that
/// the process holds.
#[must_use]
pub fn held_alone(proc: &Path, pid: &str) -> Option<i64> {
    value(&read(proc, pid, "smaps_rollup")?, "Private_Dirty").or_else(|| held(proc, pid))
}

/// Returns the machine's memory that programs can still get, and all of its memory, in bytes.
#[must_use]
pub fn available(proc: &Path) -> Option<(i64, i64)> {
    let text = fs::read_to_string(proc.join("meminfo")).ok()?;
    Some((value(&text, "MemAvailable")?, value(&text, "MemTotal")?))
}

/// Returns the machine's page cache in bytes. The kernel reclaims it if memory runs low.
#[must_use]
pub fn page_cache(proc: &Path) -> Option<i64> {
    let text = fs::read_to_string(proc.join("meminfo")).ok()?;
    let of = |name| value(&text, name);
    // Shared memory counts as cached, but can only be swapped.
    let cached = of("Cached")?.saturating_sub(of("Shmem").unwrap_or(0));
    let more = of("Buffers").unwrap_or(0).saturating_add(of("SReclaimable").unwrap_or(0));
    Some(cached.max(0).saturating_add(more))
}

/// Returns the ids of up to `most` descendants of process `pid`, or `None` if the kernel does not list
/// descendants. A process that ends during the search is omitted.
#[must_use]
pub fn descendants(proc: &Path, pid: &str, most: usize) -> Option<Vec<u32>> {
    let mut found = children(proc, pid)?;
    let mut next = 0;
    while next < found.len() && found.len() < most {
        // A process may end during the search and a new process reuse its id, so an id that is already listed
        // is skipped.
        for child in children(proc, &found[next].to_string()).unwrap_or_default() {
            if !found.contains(&child) {
                found.push(child);
            }
        }
        next += 1;
    }
    found.truncate(most);
    Some(found)
}

fn children(proc: &Path, pid: &str) -> Option<Vec<u32>> {
    // A thread may end during the search. But if no thread has this file, the kernel does not provide such files.
    let mut found = None;
    for thread in fs::read_dir(proc.join(pid).join("task")).ok()?.flatten() {
        if let Ok(text) = fs::read_to_string(thread.path().join("children")) {
            let pids = text.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok());
            found.get_or_insert_with(Vec::new).extend(pids);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn held_memory_and_page_cache_are_distinguished() {
        let proc = std::env::temp_dir().join(format!("memtrace-held-{}", std::process::id()));
        fs::create_dir_all(proc.join("7")).unwrap();
        assert_eq!((held(&proc, "7"), held_alone(&proc, "7"), page_cache(&proc)), (None, None, None));
        let write = |file: &str, text: &str| fs::write(proc.join(file), text).unwrap();
        write(
            "7/status",
            "Name:\tx\nVmRSS:\t 90 kB\nRssAnon:\t 30 kB\nRssFile:\t 50 kB\nRssShmem:\t 10 kB\n",
        );
        assert_eq!((held(&proc, "7"), held_alone(&proc, "7")), (Some(40 << 10), None));
        write("7/smaps_rollup", "Pss: 60 kB\nPrivate_Dirty: 5 kB\n");
        assert_eq!(held_alone(&proc, "7"), Some(5 << 10));
        write(
            "meminfo",
            "MemTotal: 1000 kB\nBuffers: 3 kB\nCached: 200 kB\nShmem: 20 kB\nSReclaimable: 7 kB\n",
        );
        assert_eq!(page_cache(&proc), Some(190 << 10));
        // Setup: more shared memory than cached memory -> the page cache is 0. Without `Cached` -> it is
        // unknown.
        write("meminfo", "Cached: 20 kB\nShmem: 200 kB\n");
        assert_eq!(page_cache(&proc), Some(0));
        write("meminfo", "MemTotal: 1000 kB\n");
        assert_eq!(page_cache(&proc), None);
        fs::remove_dir_all(&proc).unwrap();
    }
}
