//! Removes the temporary folders of launches whose command was killed with SIGKILL and could not remove them.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use memtrace_machine::files::running;
use memtrace_trace::private_file;

use crate::child_env::{Scratch, run_id_of};

/// The minimum age of a folder that is removed. A younger folder may belong to a program in another
/// container, whose processes are not visible here.
const MIN_AGE: Duration = Duration::from_secs(24 * 60 * 60);

/// Removes the folders of launches from the temporary folder `place` if they are older than [`MIN_AGE`], no
/// command uses them, and no process of the launch runs.
pub(crate) fn sweep(place: &Path) {
    for entry in fs::read_dir(place).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some((run_id, started)) = name.to_str().and_then(run_id_of) else { continue };
        let is_old = SystemTime::now()
            .duration_since(UNIX_EPOCH + Duration::from_nanos(started))
            .is_ok_and(|age| age > MIN_AGE);
        if is_old && is_unused(&entry.path()) && !is_running(run_id) {
            fs::remove_dir_all(entry.path()).ok();
        }
    }
}

/// Returns true if `folder` belongs to this user and no command of memtrace holds its lock.
fn is_unused(folder: &Path) -> bool {
    let user = rustix::process::geteuid().as_raw();
    fs::symlink_metadata(folder).is_ok_and(|found| found.is_dir() && found.uid() == user)
        && private_file::append(&Scratch::hello_in(folder)).is_ok_and(|hello| hello.try_lock().is_ok())
}

/// Returns true if a process of this launch runs: a process whose environment has the run id, or one that
/// uses a simulated GPU of the launch. The second check finds programs that have overwritten their
/// environment with a process title (setproctitle).
fn is_running(run_id: &str) -> bool {
    let variable = format!("MEMTRACE_RUN_ID={run_id}");
    let has_variable =
        |environment: Vec<u8>| environment.split(|byte| *byte == 0).any(|entry| entry == variable.as_bytes());
    running().iter().any(|machine| machine.id.starts_with(run_id))
        || fs::read_dir("/proc")
            .into_iter()
            .flatten()
            .flatten()
            .any(|process| fs::read(process.path().join("environ")).is_ok_and(has_variable))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::process::Command;

    use super::*;

    #[test]
    fn only_the_folders_of_old_launches_without_a_process_are_removed() {
        let place = tempfile::tempdir().unwrap();
        let make = |name: &str| {
            let folder = place.path().join(name);
            fs::create_dir(&folder).unwrap();
            fs::write(Scratch::hello_in(&folder), "").unwrap();
            folder
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
        let gone = ["memtrace-1000000000000000-1a2b", "memtrace-1000000000000001-1a2b-r17"].map(make);
        let kept = [
            format!("memtrace-{now:x}-1a2b").as_str(),
            "memtrace-libcuda-0-0ca7d2d0",
            "memtrace-1000000000000000-1a2b-x",
            "memtrace-1000000000000000",
            "other-1000000000000000-1a2b",
        ]
        .map(make);
        let locked = make("memtrace-1000000000000002-1a2b");
        let lock = fs::File::open(Scratch::hello_in(&locked)).unwrap();
        lock.lock().unwrap();
        let used = make("memtrace-1000000000000003-1a2b");
        let mut process = Command::new("sleep");
        let mut process = process.arg("600").env("MEMTRACE_RUN_ID", "1000000000000003-1a2b").spawn().unwrap();
        // `elsewhere` is not the folder of a launch. A launch folder that is a link to it, and a launch
        // folder whose `hello` is a link into it, must both stay.
        let elsewhere = make("elsewhere");
        let link = place.path().join("memtrace-1000000000000004-1a2b");
        symlink(&elsewhere, &link).unwrap();
        let inside = place.path().join("memtrace-1000000000000005-1a2b");
        fs::create_dir(&inside).unwrap();
        symlink(Scratch::hello_in(&elsewhere), Scratch::hello_in(&inside)).unwrap();

        sweep(place.path());
        process.kill().unwrap();
        process.wait().unwrap();
        assert_eq!(gone.map(|folder| folder.exists()), [false; 2]);
        for folder in kept.iter().chain([&locked, &used, &elsewhere, &link, &inside]) {
            assert!(Scratch::hello_in(folder).exists(), "{}", folder.display());
        }
        drop(lock);
        sweep(place.path());
        assert_eq!([&locked, &used, &link].map(|folder| folder.exists()), [false, false, true]);
    }
}
