//! Removes the temporary folders of launches whose command was killed with SIGKILL and could not remove them.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use memtrace_machine::files::running;
use memtrace_trace::host::boot_id;
use memtrace_trace::private_file;

use super::{Scratch, run_id_of};

/// The minimum age of a folder that is removed if the processes of its launch may not be visible here, such as
/// those in another container.
const MIN_AGE: Duration = Duration::from_secs(24 * 60 * 60);

/// The name of a link in the folder of a launch, to the [`visible_processes`] of its command. The command
/// creates the link once it holds the folder's lock.
pub(crate) const VISIBLE: &str = "visible-processes";

/// Returns a name for the set of processes that `/proc` shows to this process: those of one PID namespace since
/// one start of the machine. Returns `None` if it is unknown.
pub(crate) fn visible_processes() -> Option<PathBuf> {
    let namespace = fs::read_link("/proc/self/ns/pid").ok()?;
    let boot = boot_id();
    (!boot.is_empty()).then(|| PathBuf::from(format!("{boot} {}", namespace.display())))
}

/// Removes the folders of launches from the temporary folder `place` if no command uses them and no process of
/// the launch runs. Where such a process may not be visible, the folder must also be older than [`MIN_AGE`].
pub(crate) fn sweep(place: &Path) {
    let here = visible_processes();
    for entry in fs::read_dir(place).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let Some((run_id, started)) = run_id_of(name) else { continue };
        let is_old = SystemTime::now()
            .duration_since(UNIX_EPOCH + Duration::from_nanos(started))
            .is_ok_and(|age| age > MIN_AGE);
        let is_visible = || here.is_some() && fs::read_link(entry.path().join(VISIBLE)).ok() == here;
        if (is_old || is_visible()) && is_unused(&entry.path()) && !is_running(name, run_id) {
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

/// Returns true if a process of this launch runs: one whose environment has the run id, one whose command line
/// has the name of the folder (the script of a recipe), or one that uses a simulated GPU of the launch. The last
/// check finds programs that have overwritten their environment with a process title (setproctitle).
fn is_running(name: &str, run_id: &str) -> bool {
    let variable = format!("MEMTRACE_RUN_ID={run_id}");
    let has_variable =
        |environment: Vec<u8>| environment.split(|byte| *byte == 0).any(|entry| entry == variable.as_bytes());
    let has_name = |words: Vec<u8>| words.windows(name.len()).any(|part| part == name.as_bytes());
    running().iter().any(|machine| machine.id.starts_with(run_id))
        || fs::read_dir("/proc").into_iter().flatten().flatten().any(|process| {
            fs::read(process.path().join("environ")).is_ok_and(has_variable)
                || fs::read(process.path().join("cmdline")).is_ok_and(has_name)
        })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::process::{Command, Stdio};

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

        // These launches have just begun. The command of the first one was killed and left no process. The next
        // ones have a process, a command, and another container.
        let new = [6, 7, 8, 9].map(|number| make(&format!("memtrace-{:x}-1a2b", now + number)));
        let [left, with_script, with_command, elsewhere_too] = new;
        let here = visible_processes().unwrap();
        for folder in [&left, &with_script, &with_command] {
            symlink(&here, folder.join(VISIBLE)).unwrap();
        }
        symlink("another pid:[1]", elsewhere_too.join(VISIBLE)).unwrap();
        let command = fs::File::open(Scratch::hello_in(&with_command)).unwrap();
        command.lock().unwrap();
        let mut script = Command::new("sh");
        let script = script.args(["-c", "read line"]).arg(with_script.join("recipe.py"));
        let mut script = script.stdin(Stdio::piped()).spawn().unwrap();

        sweep(place.path());
        let found = [&left, &with_script, &with_command, &elsewhere_too].map(|folder| folder.exists());
        assert_eq!(found, [false, true, true, true]);
        script.kill().unwrap();
        script.wait().unwrap();
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
