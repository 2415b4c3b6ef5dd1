//! How a killed process ended: the observation of its parent, and the current counters of the kernel.

use memtrace_trace::Meta;
use memtrace_trace::end_row::{ASKED, KILLS, MACHINE_KILLS, SIGNAL};
use memtrace_trace::host::{Cgroup, HostFiles, boot_id};

/// How a process ended, as its parent observed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fate {
    /// The id of the process. `None` applies to any killed process, because the report came through an
    /// intermediate program.
    pub pid: Option<u32>,
    /// The signal that ended the process.
    pub signal: i32,
    /// The earlier signal that asked the process to end, if any.
    pub requested_signal: Option<i32>,
}

/// Returns the words for the end row of process `pid`: its signal, and the kernel's current counts of
/// processes killed by out-of-memory conditions. Unknown values have no word. Counters are unknown after a
/// reboot or if the cgroup is gone.
pub(crate) fn words(meta: &Meta, pid: u32, fate: Option<Fate>) -> String {
    let mut words = Vec::new();
    if let Some(fate) = fate.filter(|fate| fate.pid.is_none_or(|of| of == pid)) {
        words.push(format!("{SIGNAL}={}", fate.signal));
        words.extend(
            fate.requested_signal
                .filter(|signal| *signal != fate.signal)
                .map(|signal| format!("{ASKED}={signal}")),
        );
    }
    if !meta.boot.is_empty() && boot_id() == meta.boot {
        let group = Cgroup::at(meta.cgroup.as_ref()).filter(|group| group.id() == meta.cgroup_id);
        if let Some(kills) = group.and_then(|group| group.kills()) {
            words.push(format!("{KILLS}={kills}"));
        }
        if let Some(kills) = HostFiles::default().kills() {
            words.push(format!("{MACHINE_KILLS}={kills}"));
        }
    }
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_process_is_reported_for_that_process_and_counters_only_for_this_boot() {
        let mut meta = Meta::default();
        let fate = Fate { pid: Some(7), signal: 9, requested_signal: None };
        assert_eq!(words(&meta, 7, Some(fate)), "signal=9");
        assert_eq!(words(&meta, 8, Some(fate)), "");
        assert_eq!(
            words(&meta, 8, Some(Fate { pid: None, signal: 15, requested_signal: Some(15) })),
            "signal=15"
        );
        assert_eq!(words(&meta, 7, Some(Fate { requested_signal: Some(15), ..fate })), "signal=9 asked=15");
        meta.boot = "another".to_owned();
        assert_eq!(words(&meta, 7, None), "");
        meta.boot = boot_id();
        meta.cgroup = "/nowhere".to_owned();
        assert!(!words(&meta, 7, None).contains(" kills="), "a group that is gone has no counter");
    }
}
