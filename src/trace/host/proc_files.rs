//! Reads the files about memory in `/proc` and in cgroups.

use std::fs;
use std::path::{Path, PathBuf};

use memtrace_util::cgroup;
use memtrace_util::host_memory::{self, value};

use super::{Cgroup, HostValues};

/// Returns the size of a page in bytes.
fn page_size() -> i64 {
    rustix::param::page_size() as i64
}

/// The files about the memory of the host, of this process and of its children. A value that cannot be read
/// is unknown.
#[derive(Clone, Debug)]
pub struct HostFiles {
    proc: PathBuf,
    cgroups: PathBuf,
}

impl Default for HostFiles {
    fn default() -> Self {
        HostFiles { proc: "/proc".into(), cgroups: "/sys/fs/cgroup".into() }
    }
}

impl HostFiles {
    /// Creates a reader of files in other folders than `/proc` and `/sys/fs/cgroup`.
    #[must_use]
    pub fn at(proc: &Path, cgroups: &Path) -> HostFiles {
        HostFiles { proc: proc.to_owned(), cgroups: cgroups.to_owned() }
    }

    /// Returns the path of a file of process `pid` (`self` for this process).
    #[must_use]
    pub fn path(&self, pid: &str, file: &str) -> PathBuf {
        self.proc.join(pid).join(file)
    }

    fn text(&self, pid: &str, file: &str) -> Option<String> {
        host_memory::read(&self.proc, pid, file)
    }

    /// Returns the resident bytes of a process, the cheapest value to read. `None` for a process that has
    /// ended but still has an entry.
    #[must_use]
    pub fn resident(&self, pid: &str) -> Option<i64> {
        let pages = self.text(pid, "statm")?.split(' ').nth(1)?.parse::<i64>().ok()?;
        pages.checked_mul(page_size()).filter(|bytes| *bytes > 0)
    }

    /// Returns the values of [`Api::ProcStatus`](crate::Api::ProcStatus) for a process.
    #[must_use]
    pub fn status(&self, pid: &str) -> Option<HostValues> {
        let text = self.text(pid, "status")?;
        let values = ["VmRSS", "RssAnon", "RssFile", "RssShmem", "VmSwap"].map(|name| value(&text, name));
        values[0].is_some().then_some(values)
    }

    /// Returns the values of [`Api::Refused`](crate::Api::Refused) for this process.
    #[must_use]
    pub fn address_space(&self) -> HostValues {
        let limits = self.text("self", "limits").unwrap_or_default();
        let limit =
            limits.lines().find_map(|line| line.strip_prefix("Max address space")?.split_whitespace().next());
        let status = self.text("self", "status").unwrap_or_default();
        let [size, peak] = ["VmSize", "VmPeak"].map(|name| value(&status, name));
        // Without a limit, the text is "unlimited".
        [limit.and_then(|limit| limit.parse().ok()), size, peak, None, None]
    }

    /// Returns the values of [`Api::Meminfo`](crate::Api::Meminfo).
    #[must_use]
    pub fn machine(&self) -> Option<HostValues> {
        let text = fs::read_to_string(self.proc.join("meminfo")).ok()?;
        let [total, available, free, swap_free] =
            ["MemTotal", "MemAvailable", "MemFree", "SwapFree"].map(|name| value(&text, name));
        total.is_some().then_some([total, available, free, swap_free, self.kills()])
    }

    /// Returns the bytes that process `pid` can still get before the kernel kills a process: the smaller of
    /// its cgroup's and the machine's remaining memory. `None` if both are unknown.
    #[must_use]
    pub fn left(&self, pid: &str) -> Option<i64> {
        cgroup::left(&self.proc, &self.cgroups, pid).map(|(left, _)| left)
    }

    /// Returns the number of processes that the kernel has killed for lack of memory since the machine
    /// started.
    #[must_use]
    pub fn kills(&self) -> Option<i64> {
        let text = fs::read_to_string(self.proc.join("vmstat")).ok()?;
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
    }

    /// Returns the cgroup that counts the kills of a process ([`Cgroup::find`]), or `None` if no cgroup counts its
    /// memory.
    #[must_use]
    pub fn cgroup(&self, pid: &str) -> Option<Cgroup> {
        Cgroup::find(&self.proc, &self.cgroups, pid)
    }

    /// Returns the values of [`Api::Cgroup`](crate::Api::Cgroup) for this process: the memory of the cgroup that is
    /// closest to its limit, and the kills in [`HostFiles::cgroup`].
    #[must_use]
    pub fn cgroup_values(&self) -> Option<HostValues> {
        let [current, limit, file, swap, _] = self.fullest_cgroup()?.values();
        Some([current, limit, file, swap, self.cgroup("self").and_then(|group| group.kills())])
    }

    fn fullest_cgroup(&self) -> Option<Cgroup> {
        Cgroup::fullest(&self.proc, &self.cgroups, "self")
    }

    /// Returns the proportional and the resident bytes of a process, from `smaps_rollup`.
    #[must_use]
    pub fn rollup(&self, pid: &str) -> Option<(i64, i64)> {
        let text = self.text(pid, "smaps_rollup")?;
        Some((value(&text, "Pss")?, value(&text, "Rss")?))
    }

    /// Returns the name of a process, which the kernel cuts to 15 bytes. `None` if the name is empty or
    /// cannot be read.
    #[must_use]
    pub fn name(&self, pid: &str) -> Option<String> {
        Some(self.text(pid, "comm")?.trim_end().to_owned()).filter(|name| !name.is_empty())
    }

    /// Returns the descendants of process `pid`, at most `most`. Returns `None` if the kernel does not list
    /// them. A process that ends during the search is omitted.
    #[must_use]
    pub fn descendants(&self, pid: &str, most: usize) -> Option<Vec<u32>> {
        host_memory::descendants(&self.proc, pid, most)
    }

    /// Returns other processes that share the memory limit with this process, at most `most`: the processes of the
    /// cgroup that is closest to its limit ([`Cgroup::fullest`]), or all visible processes of the machine if no cgroup
    /// has a limit. Leaves out the processes in `own`.
    #[must_use]
    pub fn others(&self, own: &[u32], most: usize) -> Vec<u32> {
        let is_other = |pid: &u32| *pid != std::process::id() && !own.contains(pid);
        match self.fullest_cgroup().filter(|group| group.limit().is_some()) {
            Some(group) => group.processes().filter(is_other).take(most).collect(),
            None => {
                let entries = fs::read_dir(&self.proc).into_iter().flatten().flatten();
                let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
                pids.filter(is_other).take(most).collect()
            }
        }
    }

    /// Returns the resident bytes of a process that are neither in files nor shared. `None` for a process that
    /// has ended, and for a thread of the kernel.
    #[must_use]
    pub fn resident_alone(&self, pid: &str) -> Option<i64> {
        let text = self.text(pid, "statm")?;
        let mut pages = text.split_whitespace().skip(1).map_while(|pages| pages.parse::<i64>().ok());
        let (resident, shared) = (pages.next()?, pages.next()?);
        (resident > 0).then(|| (resident - shared).max(0).saturating_mul(page_size()))
    }

    /// Returns true if a process belongs to the traced job of this process: it was started with memtrace's
    /// library, and with the same run id if it has one. Such a process is a launcher, another rank or a worker.
    #[must_use]
    pub fn is_of_job(&self, pid: &str) -> bool {
        let variables = |pid: &str| fs::read(self.path(pid, "environ")).unwrap_or_default();
        let run_id = |variables: &[u8]| {
            let mut all = variables.split(|byte| *byte == 0);
            all.find(|variable| variable.starts_with(b"MEMTRACE_RUN_ID=")).map(<[u8]>::to_vec)
        };
        let (own, other) = (variables("self"), variables(pid));
        let library = b"/libmemtrace.so";
        let is_traced = other.windows(library.len()).any(|text| text == library);
        is_traced && (run_id(&other).is_none() || run_id(&other) == run_id(&own))
    }

    /// Returns the bytes that a process and at most `most` of its descendants hold, without file pages; see
    /// [`host_memory::held`].
    #[must_use]
    pub fn held(&self, pid: &str, most: usize) -> Option<i64> {
        let descendants = self.descendants(pid, most).unwrap_or_default();
        let alone =
            descendants.iter().filter_map(|pid| host_memory::held_alone(&self.proc, &pid.to_string()));
        Some(alone.fold(host_memory::held(&self.proc, pid)?, i64::saturating_add))
    }

    /// Returns the machine's page cache; see [`host_memory::page_cache`].
    #[must_use]
    pub fn page_cache(&self) -> Option<i64> {
        host_memory::page_cache(&self.proc)
    }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    fn write(folder: &TempDir, path: &str, text: &str) {
        let path = folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn the_proc_files_of_this_process_give_its_memory() {
        let files = HostFiles::default();
        let [rss, anon, file, ..] = files.status("self").unwrap();
        assert!(rss.unwrap() > 0 && anon.unwrap() + file.unwrap() <= rss.unwrap() + (1 << 20));
        assert!(files.resident("self").unwrap() > 0 && files.machine().unwrap()[0].unwrap() > 0);
        let (pss, rss) = files.rollup("self").unwrap();
        assert!(pss > 0 && pss <= rss);
    }

    #[test]
    fn without_files_of_the_host_everything_is_unknown() {
        let folder = TempDir::new().unwrap();
        let files = HostFiles::at(folder.path(), folder.path());
        assert_eq!((files.resident("self"), files.status("self"), files.machine()), (None, None, None));
        assert_eq!(
            (files.rollup("1"), files.descendants("self", 9), files.cgroup("self")),
            (None, None, None)
        );
        write(&folder, "self/status", "Name:\tx\nVmRSS:\tmany kB\n");
        write(&folder, "self/statm", "1\n");
        write(&folder, "meminfo", "MemTotal: 99999999999999999999 kB\n");
        assert_eq!((files.resident("self"), files.status("self"), files.machine()), (None, None, None));
        // The kernel provides no `children` files -> the descendants are unknown.
        write(&folder, "self/task/4242/comm", "x");
        assert_eq!(files.descendants("self", 9), None);
    }

    #[test]
    fn the_memory_left_is_the_lower_of_the_group_and_the_machine() {
        let folder = TempDir::new().unwrap();
        let files = HostFiles::at(&folder.path().join("proc"), &folder.path().join("cg"));
        assert_eq!(files.left("self"), None);
        write(&folder, "proc/meminfo", "MemTotal: 9 kB\nMemAvailable: 2 kB\n");
        assert_eq!(files.left("self"), Some(2048));
        write(&folder, "proc/self/cgroup", "0::/box\n");
        write(&folder, "cg/box/memory.current", "900\n");
        write(&folder, "cg/box/memory.max", "max\n");
        assert_eq!(files.left("self"), Some(2048));
        // 900 of 1000 bytes are in use, but 400 of these are page cache, which can be reclaimed -> 500 bytes
        // are left.
        write(&folder, "cg/box/memory.max", "1000\n");
        write(&folder, "cg/box/memory.stat", "file 400\n");
        assert_eq!(files.left("self"), Some(500));
        write(&folder, "proc/meminfo", "MemTotal: 9 kB\nMemAvailable: 0 kB\n");
        assert_eq!(files.left("self"), Some(0));
    }

    #[test]
    fn five_hundred_children_are_listed_and_hidden_shares_are_unknown() {
        let folder = TempDir::new().unwrap();
        let files = HostFiles::at(folder.path(), folder.path());
        let all: Vec<u32> = (1000..1500).collect();
        let text: Vec<String> = all.iter().map(u32::to_string).collect();
        write(&folder, "self/task/4242/children", &text.join(" "));
        assert_eq!(files.descendants("self", 1000), Some(all));
        // Another user's process: its maps are hidden, but its resident memory is visible -> only the
        // resident memory is known.
        write(&folder, "1000/statm", "90 25 1 1 0 1 0\n");
        write(&folder, "1000/smaps_rollup", "");
        assert_eq!((files.resident("1000"), files.rollup("1000")), (Some(25 * page_size()), None));
        // A process that has ended, whose parent has not waited for it yet, has an empty entry -> all values
        // are unknown.
        write(&folder, "1001/statm", "0 0 0 0 0 0 0\n");
        write(&folder, "1001/status", "Name:\tpython\nState:\tZ (zombie)\n");
        assert_eq!((files.resident("1001"), files.status("1001"), files.rollup("1001")), (None, None, None));
    }

    #[test]
    fn children_of_children_are_found_and_one_that_ended_is_left_out() {
        let folder = TempDir::new().unwrap();
        let files = HostFiles::at(folder.path(), folder.path());
        write(&folder, "self/task/4242/children", "5 6 7 ");
        write(&folder, "self/task/9/children", "8");
        // Process 6 has ended and has no entry, and process 7 lists itself as a child -> no process is listed
        // twice.
        write(&folder, "5/task/5/children", "50 51\n");
        write(&folder, "7/task/7/children", "7 x -1");
        let mut found = files.descendants("self", 100).unwrap();
        found.sort_unstable();
        assert_eq!(found, [5, 6, 7, 8, 50, 51]);
        assert_eq!(files.descendants("self", 3).unwrap().len(), 3);
    }

    #[test]
    fn other_processes_are_those_of_the_group_with_the_limit_or_of_the_machine() {
        let folder = TempDir::new().unwrap();
        let files = HostFiles::at(&folder.path().join("proc"), &folder.path().join("cg"));
        assert!(files.others(&[], 9).is_empty());
        let own = std::process::id();
        for pid in [own, 4_000_001, 4_000_002, 4_000_003] {
            write(&folder, &format!("proc/{pid}/statm"), "1 1\n");
        }
        let sorted = |most| {
            let mut found = files.others(&[4_000_002], most);
            found.sort_unstable();
            found
        };
        assert_eq!(sorted(9), [4_000_001, 4_000_003]);
        // What is left out does not count for the limit.
        assert_eq!((sorted(2).len(), sorted(1).len()), (2, 1));
        // A group without a limit shares only the machine's memory.
        write(&folder, "proc/self/cgroup", "0::/box/job\n");
        write(&folder, "cg/box/job/memory.current", "900\n");
        write(&folder, "cg/box/memory.current", "900\n");
        write(&folder, "cg/box/cgroup.procs", "0\nx\n");
        write(&folder, "cg/box/job/cgroup.procs", &format!("{own}\n4000002\n"));
        write(&folder, "cg/box/other/cgroup.procs", "4000003\n");
        assert_eq!(sorted(9), [4_000_001, 4_000_003]);
        write(&folder, "cg/box/memory.max", "1000\n");
        assert_eq!(sorted(9), [4_000_003]);
    }

    #[test]
    fn processes_of_the_traced_job_are_known_by_their_library_and_run() {
        let folder = TempDir::new().unwrap();
        let files = HostFiles::at(folder.path(), folder.path());
        write(&folder, "self/environ", "LD_PRELOAD=/x/libmemtrace.so\0MEMTRACE_RUN_ID=7\0");
        for (pid, variables, is_of_job) in [
            ("1", "LD_PRELOAD=/x/libmemtrace.so\0MEMTRACE_RUN_ID=7\0", true),
            ("2", "LD_PRELOAD=/x/libmemtrace.so\0MEMTRACE_RUN_ID=8\0", false),
            ("3", "LD_PRELOAD=/x/libmemtrace.so\0", true),
            ("4", "MEMTRACE_RUN_ID=7\0", false),
            ("5", "", false),
        ] {
            write(&folder, &format!("{pid}/environ"), variables);
            assert_eq!(files.is_of_job(pid), is_of_job, "{pid}");
        }
        assert!(!files.is_of_job("6"));
        write(&folder, "7/statm", "900 50 20 1 0 3 0\n");
        write(&folder, "8/statm", "0 0 0 0 0 0 0\n");
        assert_eq!(files.resident_alone("7"), Some(30 * page_size()));
        assert_eq!((files.resident_alone("8"), files.resident_alone("9")), (None, None));
    }
}
