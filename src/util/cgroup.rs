//! The cgroup whose memory limit applies to a process, version 1 or 2.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::host_memory;

/// A cgroup with a memory counter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroup {
    folder: PathBuf,
    is_v1: bool,
}

/// Returns the bytes that a cgroup's processes can still get before the kernel kills one. The page cache
/// (`file`) is subtracted from the memory in use (`current`), because the kernel can reclaim it.
#[must_use]
pub fn left_in_group(current: i64, limit: i64, file: i64) -> i64 {
    limit - (current - file)
}

/// Returns the bytes that process `pid` can still get before the kernel kills a process, and the limit that
/// applies: those of its cgroup, of a cgroup above it, or of the machine, whichever has the fewest bytes left.
/// `None` if all are unknown.
#[must_use]
pub fn left(proc: &Path, root: &Path, pid: &str) -> Option<(i64, i64)> {
    let in_groups = Cgroup::own_and_above(proc, root, pid).into_iter().filter_map(|group| group.left());
    in_groups.chain(host_memory::available(proc)).min()
}

/// The lowest limit that counts as no limit: without a limit, version 1 reports a huge number.
const UNLIMITED: i64 = 1 << 60;
/// The maximum number of cgroups that are searched, from the process's own upwards. Real paths are shorter,
/// but a hostile path may be long.
const MOST_LEVELS: usize = 64;
/// The maximum number of cgroups whose processes are listed.
const MOST_FOLDERS: usize = 1000;

impl Cgroup {
    /// Finds the cgroup of process `pid` (`self` for this process) below the mount points at `root`
    /// (`/sys/fs/cgroup`). Of this cgroup and its ancestors, returns the one with the lowest limit, or the
    /// process's own if no limit is set. Returns `None` if none of them counts memory.
    ///
    /// The result stays the same while memory grows, so its counts at two times can be compared.
    #[must_use]
    pub fn find(proc: &Path, root: &Path, pid: &str) -> Option<Cgroup> {
        let mut known = Cgroup::own_and_above(proc, root, pid);
        let lowest =
            (0..known.len()).filter(|&at| known[at].limit().is_some()).min_by_key(|&at| known[at].limit());
        if known.is_empty() { None } else { Some(known.swap_remove(lowest.unwrap_or(0))) }
    }

    /// Same as [`Cgroup::find`], but returns the cgroup with the fewest bytes left, in which the process reaches a
    /// limit first.
    #[must_use]
    pub fn fullest(proc: &Path, root: &Path, pid: &str) -> Option<Cgroup> {
        let groups = Cgroup::own_and_above(proc, root, pid);
        groups.into_iter().min_by_key(|group| group.left().map_or(i64::MAX, |(left, _)| left))
    }

    /// Returns the bytes that the processes can still get, and the limit. `None` without a limit.
    fn left(&self) -> Option<(i64, i64)> {
        let (limit, current) = (self.limit()?, self.current()?);
        let file = self.page_cache(&self.text("memory.stat").unwrap_or_default());
        Some((left_in_group(current, limit, file.unwrap_or(0)), limit))
    }

    /// Returns the page cache in bytes, from the text of `memory.stat`. Leaves out shared memory, which the kernel
    /// counts as cached but cannot reclaim.
    fn page_cache(&self, stat: &str) -> Option<i64> {
        let [cached, shared] = if self.is_v1 { ["total_cache", "total_shmem"] } else { ["file", "shmem"] };
        value(stat, cached).map(|cached| (cached - value(stat, shared).unwrap_or(0)).max(0))
    }

    /// Returns the cgroups that count the memory of process `pid`: its own first, then those above it.
    fn own_and_above(proc: &Path, root: &Path, pid: &str) -> Vec<Cgroup> {
        let groups = fs::read_to_string(proc.join(pid).join("cgroup")).unwrap_or_default();
        let mut lines = groups.lines().filter_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            Some((fields.next()?, fields.next()?))
        });
        let v1 = lines.clone().find(|(names, _)| names.split(',').any(|name| name == "memory"));
        let (top, path, is_v1) = match (v1, lines.find(|(names, _)| names.is_empty())) {
            (Some((_, path)), _) => (root.join("memory"), path, true),
            (None, Some((_, path))) => (root.to_owned(), path, false),
            (None, None) => return Vec::new(),
        };
        let own = path.trim_start_matches('/');
        // In a container, the path may be relative to the host, while only the container's own cgroup is
        // visible, as the top. The top is then used.
        let own = if own.split('/').any(|name| name == "..") || !top.join(own).is_dir() { "" } else { own };
        let groups = Path::new(own).ancestors().take(MOST_LEVELS).map(|path| top.join(path));
        groups.map(|folder| Cgroup { folder, is_v1 }).filter(|group| group.current().is_some()).collect()
    }

    /// Returns the cgroup at `folder`, or `None` if it does not count memory.
    #[must_use]
    pub fn at(folder: &Path) -> Option<Cgroup> {
        let groups = [true, false].map(|is_v1| Cgroup { folder: folder.to_owned(), is_v1 });
        groups.into_iter().find(|group| group.current().is_some())
    }

    /// Returns the folder of the cgroup.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the inode of the folder, or 0 if unknown. It identifies the cgroup until the machine restarts.
    #[must_use]
    pub fn id(&self) -> u64 {
        fs::metadata(&self.folder).map_or(0, |folder| folder.ino())
    }

    /// Returns the memory in use in bytes, including page cache.
    #[must_use]
    pub fn current(&self) -> Option<i64> {
        self.number(if self.is_v1 { "memory.usage_in_bytes" } else { "memory.current" })
    }

    /// Returns the limit in bytes, or `None` without a limit.
    #[must_use]
    pub fn limit(&self) -> Option<i64> {
        let limit = self.number(if self.is_v1 { "memory.limit_in_bytes" } else { "memory.max" })?;
        (limit < UNLIMITED).then_some(limit)
    }

    /// Returns the number of processes of the cgroup that the kernel has killed for lack of memory.
    #[must_use]
    pub fn kills(&self) -> Option<i64> {
        value(&self.text(if self.is_v1 { "memory.oom_control" } else { "memory.events" })?, "oom_kill")
    }

    /// Returns the memory in use, the limit, the page cache without shared memory, and the swap in bytes, and the
    /// number of kills.
    #[must_use]
    pub fn values(&self) -> [Option<i64>; 5] {
        let stat = self.text("memory.stat").unwrap_or_default();
        let swap = if self.is_v1 { value(&stat, "total_swap") } else { self.number("memory.swap.current") };
        [self.current(), self.limit(), self.page_cache(&stat), swap, self.kills()]
    }

    /// Returns the ids of the processes in this cgroup and in those below it. A process that is not visible from
    /// here is omitted.
    pub fn processes(&self) -> impl Iterator<Item = u32> {
        let mut folders = vec![self.folder.clone()];
        let of_next_folder = move || {
            let folder = folders.pop()?;
            let inside = fs::read_dir(&folder).into_iter().flatten().flatten();
            // `file_type` does not follow links.
            let is_folder = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
            folders.extend(inside.filter(is_folder).map(|entry| entry.path()));
            let text = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
            Some(text.lines().filter_map(|pid| pid.parse().ok()).filter(|pid| *pid > 0).collect::<Vec<u32>>())
        };
        std::iter::from_fn(of_next_folder).take(MOST_FOLDERS).flatten()
    }

    fn text(&self, file: &str) -> Option<String> {
        fs::read_to_string(self.folder.join(file)).ok()
    }

    /// Reads a file that contains a single number. Returns `None` for `max`.
    fn number(&self, file: &str) -> Option<i64> {
        self.text(file)?.trim().parse().ok()
    }
}

/// Returns the number after `key` at the start of a line.
fn value(text: &str, key: &str) -> Option<i64> {
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
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

    fn find(folder: &TempDir) -> Option<[Option<i64>; 5]> {
        Cgroup::find(&folder.path().join("proc"), &folder.path().join("cg"), "self")
            .map(|group| group.values())
    }

    #[test]
    fn the_tightest_group_of_version_2_is_the_one_that_counts() {
        let folder = TempDir::new().unwrap();
        assert_eq!(find(&folder), None);
        write(&folder, "proc/self/cgroup", "0::/pod/box\n");
        assert_eq!(find(&folder), None);
        // The top cgroup has no counter. Its child `pod` has the only limit, 1000 bytes -> `pod` is found.
        write(&folder, "cg/pod/memory.current", "900\n");
        write(&folder, "cg/pod/memory.max", "1000\n");
        write(&folder, "cg/pod/memory.events", "low 0\noom 3\noom_kill 2\n");
        write(&folder, "cg/pod/memory.stat", "anon 5\nfile 500\nshmem 100\nfile_mapped 9\n");
        write(&folder, "cg/pod/box/memory.current", "800\n");
        write(&folder, "cg/pod/box/memory.max", "max\n");
        assert_eq!(find(&folder), Some([Some(900), Some(1000), Some(400), None, Some(2)]));
        // No cgroup has a limit -> the process's own cgroup is found.
        write(&folder, "cg/pod/memory.max", "max\n");
        assert_eq!(find(&folder), Some([Some(800), None, None, None, None]));
    }

    #[test]
    fn the_group_with_the_least_memory_left_is_the_one_that_ends_the_process() {
        let folder = TempDir::new().unwrap();
        let left = || left(&folder.path().join("proc"), &folder.path().join("cg"), "self");
        write(&folder, "proc/self/cgroup", "0::/pod/box\n");
        assert_eq!(left(), None);
        for (group, limit, current) in [("pod", "8000", "7900"), ("pod/box", "4000", "1000")] {
            write(&folder, &format!("cg/{group}/memory.max"), limit);
            write(&folder, &format!("cg/{group}/memory.current"), current);
        }
        let fullest = || Cgroup::fullest(&folder.path().join("proc"), &folder.path().join("cg"), "self");
        let fullest = || fullest().map(|group| group.folder.strip_prefix(folder.path()).unwrap().to_owned());
        assert_eq!((left(), fullest()), (Some((100, 8000)), Some("cg/pod".into())));
        write(&folder, "cg/pod/memory.stat", "file 3500\nshmem 0\n");
        assert_eq!((left(), fullest()), (Some((3000, 4000)), Some("cg/pod/box".into())));
        write(&folder, "cg/pod/box/memory.max", "max");
        assert_eq!((left(), fullest()), (Some((3600, 8000)), Some("cg/pod".into())));
        write(&folder, "cg/pod/memory.max", "max");
        assert_eq!((left(), fullest()), (None, Some("cg/pod/box".into())), "no limit: the process's own");
    }

    #[test]
    fn a_group_of_version_1_and_one_whose_path_is_hidden_are_found() {
        let folder = TempDir::new().unwrap();
        write(&folder, "proc/self/cgroup", "5:cpu,memory:/docker/abc\n0::/\n");
        write(&folder, "cg/memory/memory.usage_in_bytes", "70\n");
        write(&folder, "cg/memory/memory.limit_in_bytes", "9223372036854771712\n");
        write(&folder, "cg/memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n");
        write(
            &folder,
            "cg/memory/memory.stat",
            "cache 1\nshmem 1\ntotal_cache 50\ntotal_shmem 20\ntotal_swap 4\n",
        );
        assert_eq!(find(&folder), Some([Some(70), None, Some(30), Some(4), Some(1)]));
        for path in ["/../..", "", "nonsense"] {
            write(&folder, "proc/self/cgroup", &format!("5:memory:{path}\n"));
            assert!(find(&folder).is_some(), "{path}");
        }
        write(&folder, "proc/self/cgroup", "nonsense\n\n:::\n");
        assert_eq!(find(&folder), None);
    }
}
