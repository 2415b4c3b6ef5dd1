//! Checks of the machine, which do not depend on the Python.

use std::fs;
use std::path::Path;

use memtrace_recover::{Leftover, Swept, sweep};
use memtrace_trace::config::Settings;
use memtrace_trace::journal;
use memtrace_trace::units::Unit;

use super::findings::{Findings, State};

/// Checks the operating system, the GPU vendor and the space for the journal.
pub(super) fn check_system(findings: &mut Findings) {
    findings.check(
        "system",
        cfg!(all(target_os = "linux", target_env = "gnu")),
        format!("Linux on {} with glibc", std::env::consts::ARCH),
        (State::Missing, "not Linux with glibc", "no other system is supported"),
    );
    if Path::new("/dev/kfd").exists() && !Path::new("/proc/driver/nvidia/version").exists() {
        findings.add("system", State::Missing, "an AMD GPU", "memtrace does not support ROCm");
    }
    let wanted = Settings::from_env().0.buffer_bytes as u64;
    let free = rustix::fs::statvfs("/dev/shm").map_or(0, |stat| stat.f_bavail * stat.f_frsize);
    let show = |bytes: u64| Unit::Auto.show(bytes as i64).to_string();
    findings.check(
        "journal",
        free / 4 >= wanted,
        format!("/dev/shm has {} free, the journal needs {}", show(free), show(wanted)),
        (
            State::Degraded,
            &format!(
                "/dev/shm has only {} free, so the journal of {} goes to disk",
                show(free),
                show(wanted)
            ),
            "enlarge /dev/shm (docker run --shm-size 1g), or set MEMTRACE_BUFFER=4m",
        ),
    );
}

/// Removes orphaned journals, and lists the journals that a trace still needs.
pub(super) fn check_journals(findings: &mut Findings) {
    let Swept { removed, left } = sweep(&journal::folders(), None);
    let show = |bytes: u64| Unit::Auto.show(bytes as i64);
    if !removed.is_empty() {
        let (count, bytes) = (removed.len(), removed.iter().map(|(_, bytes)| bytes).sum());
        let journals = if count == 1 { "journal" } else { "journals" };
        findings.add(
            "journals",
            State::Note,
            format!("removed {count} {journals} with {}, of killed processes without a trace", show(bytes)),
            "",
        );
    }
    for Leftover { journal, bytes, trace, in_sight } in left {
        let trace = trace.display();
        let message = format!(
            "{} holds {}: the last rows of {trace}, whose process was killed",
            journal.display(),
            show(bytes)
        );
        let advice = if in_sight {
            format!("memtrace check --repair {trace} (it writes the rows and removes the journal)")
        } else {
            format!("run memtrace check --repair where {trace} is; if it was deleted, remove the journal")
        };
        findings.add("journals", State::Note, message, advice);
    }
}

/// Checks that traces can be written to `folder`. Creates a file in the folder or, if the folder does not
/// exist, in its closest existing parent, and removes the file.
pub(super) fn check_out_folder(findings: &mut Findings, folder: &Path) {
    let shown = folder.display();
    let is_there = |place: &&Path| fs::symlink_metadata(place).is_ok();
    let written = std::path::absolute(folder).and_then(|folder| {
        let place = folder.ancestors().find(is_there).unwrap_or(&folder);
        let file = place.join(format!(".memtrace-doctor-{}", std::process::id()));
        fs::File::create_new(&file)?;
        fs::remove_file(&file)
    });
    match written {
        Ok(_) => findings.ok("traces", format!("can be written to {shown}")),
        Err(error) => findings.add(
            "traces",
            State::Missing,
            format!("cannot be written to {shown}: {error}"),
            "choose a writable folder with MEMTRACE_OUT or memtrace run -o",
        ),
    }
}
