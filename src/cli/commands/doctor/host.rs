//! What the machine has, whatever the Python.

use std::fs;
use std::path::Path;

use memtrace_trace::config::Settings;
use memtrace_trace::units::Unit;

use super::findings::{Findings, State};

/// The machine: what is out of scope, and where events go before they are written.
pub(super) fn system(found: &mut Findings) {
    let linux = cfg!(all(target_os = "linux", target_arch = "x86_64"));
    found.check(
        "system",
        linux && cfg!(target_env = "gnu"),
        "Linux on x86-64 with glibc",
        (State::Missing, "not Linux on x86-64 with glibc", "musl and other systems are out of scope"),
    );
    if Path::new("/dev/kfd").exists() && !Path::new("/proc/driver/nvidia/version").exists() {
        found.add("system", State::Missing, "an AMD GPU", "ROCm is out of scope");
    }
    let wanted = Settings::from_env().0.buffer_bytes as u64;
    let free = rustix::fs::statvfs("/dev/shm").map_or(0, |stat| stat.f_bavail * stat.f_frsize);
    let show = |bytes: u64| Unit::Auto.show(bytes as i64).to_string();
    found.check(
        "journal",
        free / 4 >= wanted,
        format!("/dev/shm has {} free, the journal takes {}", show(free), show(wanted)),
        (
            State::Degraded,
            &format!("/dev/shm has {} free: the journal of {} goes to a disk", show(free), show(wanted)),
            "give the container more (docker run --shm-size 1g), or set MEMTRACE_BUFFER=4m",
        ),
    );
}

/// Can traces be written there?
pub(super) fn out_folder(found: &mut Findings, folder: &Path) {
    let shown = folder.display();
    let made = !folder.exists();
    let there = fs::create_dir_all(folder);
    let file = folder.join(format!(".memtrace-doctor-{}", std::process::id()));
    let written = there.and_then(|()| fs::File::create_new(&file));
    let _ = fs::remove_file(&file);
    if made {
        let _ = fs::remove_dir(folder);
    }
    match written {
        Ok(_) => found.ok("traces", format!("can be written to {shown}")),
        Err(error) => found.add(
            "traces",
            State::Missing,
            format!("cannot be written to {shown}: {error}"),
            "set MEMTRACE_OUT, or memtrace run -o, to a folder that can be written",
        ),
    }
}
