//! The mark that names another process on a GPU. Formats and parses its name.

use std::fmt;
use std::path::Path;

use crate::command::script;
use crate::host::HostFiles;
use crate::key_values::{bytes_of, value_of};

/// The maximum number of characters of a user, a container or a command.
const LONGEST: usize = 60;
/// The number of characters of a container's id that are kept, as `docker ps` shows it.
const SHORT_ID: usize = 12;
/// The length of a container's full id.
const FULL_ID: usize = 64;

/// A process on a GPU as the driver lists it, with what `/proc` shows about it. `None` is unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuProcess {
    /// The CUDA ordinal of the GPU.
    pub device: i32,
    /// The process id that the driver lists.
    pub pid: u32,
    /// The memory of the process on the GPU; 0 once the process has left the GPU.
    pub bytes: Option<i64>,
    /// The name of the user, or `uid` and its number if the name is unknown.
    pub user: Option<String>,
    /// The short id of the container, or `job` and the number of the Slurm job.
    pub container: Option<String>,
    /// The script or the program. Its arguments are not read, because they may contain secrets.
    pub command: Option<String>,
}

impl GpuProcess {
    /// Fills in what `files` and the file of users (`/etc/passwd`) show about the process. A process that has
    /// ended, or that `/proc` hides from this user, stays unknown.
    pub fn fill(&mut self, files: &HostFiles, users: &Path) {
        let pid = self.pid.to_string();
        let text = |file: &str| {
            let bytes = std::fs::read(files.path(&pid, file)).ok()?;
            Some(String::from_utf8_lossy(&bytes).into_owned())
        };
        self.user = text("status").and_then(|status| {
            let ids = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
            let uid = ids.split_whitespace().next()?;
            let users = std::fs::read_to_string(users).unwrap_or_default();
            Some(short(user_name(&users, uid).unwrap_or(&format!("uid {uid}"))))
        });
        self.command = text("cmdline")
            .filter(|line| !line.is_empty())
            .map(|line| line.split('\0').map(str::to_owned).collect::<Vec<String>>())
            .map(|argv| short(script(&argv)))
            .or_else(|| files.name(&pid).map(|name| short(&name)))
            .filter(|command| !command.is_empty());
        self.container = text("cgroup").and_then(|groups| container(&groups));
    }

    /// Parses the name of a mark.
    #[must_use]
    pub fn parse(name: &str) -> Option<GpuProcess> {
        let mut found = GpuProcess::default();
        let (numbers, command) = name.split_once(" command=").map_or((name, None), |(a, b)| (a, Some(b)));
        let value = |key: &str| value_of(numbers, key);
        found.device = value("device")?.parse().ok()?;
        found.pid = value("pid")?.parse().ok()?;
        found.bytes = value("bytes").and_then(bytes_of);
        // `Display` wrote a space as `_`. Only these two have a space: the name of a user may contain `uid_`.
        let spaced = |key: &str, prefix: &str| {
            let text = value(key)?;
            let rest = text.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('_'));
            Some(rest.map_or_else(|| text.to_owned(), |rest| format!("{prefix} {rest}")))
        };
        found.user = spaced("user", "uid");
        found.container = spaced("container", "job");
        found.command = command.map(str::to_owned);
        Some(found)
    }
}

impl fmt::Display for GpuProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device={} pid={}", self.device, self.pid)?;
        if let Some(bytes) = self.bytes {
            write!(f, " bytes={bytes}")?;
        }
        for (key, text) in [("user", &self.user), ("container", &self.container)] {
            if let Some(text) = text {
                write!(f, " {key}={}", text.replace(' ', "_"))?;
            }
        }
        self.command.as_ref().map_or(Ok(()), |command| write!(f, " command={command}"))
    }
}

/// Cuts a text to [`LONGEST`] characters and replaces control characters.
fn short(text: &str) -> String {
    text.chars().take(LONGEST).map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Returns the name of a user in the text of `/etc/passwd`.
fn user_name<'a>(users: &'a str, uid: &str) -> Option<&'a str> {
    users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)? == uid).then_some(name)
    })
}

/// Returns the container or the Slurm job in the text of `/proc/PID/cgroup`, the innermost first.
fn container(groups: &str) -> Option<String> {
    let parts =
        || groups.lines().filter_map(|line| line.splitn(3, ':').nth(2)).flat_map(|path| path.rsplit('/'));
    // Docker, containerd, CRI-O and Podman: `ID`, `docker-ID.scope`, `cri-containerd-ID.scope`, `libpod-ID.scope`.
    let id = parts().find_map(|part| {
        let part = part.trim_end_matches(".scope");
        let id = part.rsplit(['-', ':']).next()?;
        (id.len() == FULL_ID && id.bytes().all(|byte| byte.is_ascii_hexdigit()))
            .then(|| id[..SHORT_ID].to_owned())
    });
    id.or_else(|| parts().find(|part| is_slurm_job(part)).map(|part| short(&part.replace('_', " "))))
}

/// Returns true for `job_` and a number.
fn is_slurm_job(part: &str) -> bool {
    part.strip_prefix("job_").is_some_and(|id| !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process() -> GpuProcess {
        GpuProcess { device: 1, pid: 4711, bytes: Some(1 << 30), ..GpuProcess::default() }
    }

    #[test]
    fn the_name_of_a_gpu_process_is_parsed_again() {
        let unknown = GpuProcess { bytes: None, ..process() };
        let named = GpuProcess { user: Some("druid_svc".to_owned()), ..process() };
        assert_eq!(unknown.to_string(), "device=1 pid=4711");
        let known = GpuProcess {
            user: Some("uid 1000".to_owned()),
            container: Some("job 12".to_owned()),
            command: Some("ray::IDLE bytes=7".to_owned()),
            ..process()
        };
        for process in [unknown, named, known] {
            assert_eq!(GpuProcess::parse(&process.to_string()), Some(process));
        }
        for wrong in ["", "pid=1", "device=0 pid=x", "device=0 pid=-1", "command=device=0 pid=1"] {
            assert_eq!(GpuProcess::parse(wrong), None, "{wrong}");
        }
        assert_eq!(GpuProcess::parse("device=0 pid=1 bytes=-5").unwrap().bytes, None);
    }

    #[test]
    fn a_gpu_process_is_named_as_far_as_proc_shows_it() {
        let folder = std::env::temp_dir().join(format!("memtrace-gpu-process-{}", std::process::id()));
        let proc = folder.join("4711");
        std::fs::create_dir_all(&proc).unwrap();
        let write = |name: &str, text: &str| std::fs::write(proc.join(name), text).unwrap();
        let users = folder.join("passwd");
        std::fs::write(&users, "root:x:0:0::/root:/bin/sh\nbroken\nalice:x:1000:1000::/:/bin/sh\n").unwrap();
        let files = HostFiles::at(&folder, &folder);
        let read = || {
            let mut process = process();
            process.fill(&files, &users);
            [process.user, process.container, process.command].map(|text| text.unwrap_or("-".to_owned()))
        };
        assert_eq!(read(), ["-", "-", "-"], "the process has ended, or is hidden");
        let id = "0123456789ab".to_owned() + &"c".repeat(52);
        write("status", "Name:\tpython\nUid:\t1000\t1000\t1000\t1000\n");
        write("cmdline", "/usr/bin/python3\0-u\0/srv/serve.py\0--token\0abc\0");
        write("cgroup", &format!("0::/system.slice/docker-{id}.scope\n"));
        assert_eq!(read(), ["alice", "0123456789ab", "serve.py"]);
        write("status", "Uid:\t1001\t0\t0\t0\n");
        write("cmdline", "bad\x1bname\0");
        write("cgroup", "4:memory:/slurm/uid_1001/job_12/step_0\n1:name=systemd:/\n");
        assert_eq!(read(), ["uid 1001", "job 12", "bad?name"]);
        write("cmdline", "");
        write("comm", "kernel-part\n");
        write("cgroup", &format!("0::/kubepods/burstable/pod1-2/{id}\n"));
        assert_eq!(read()[1..], ["0123456789ab", "kernel-part"]);
        write("cgroup", "0::/user.slice/job_x\ngarbage");
        assert_eq!(read()[1], "-");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
