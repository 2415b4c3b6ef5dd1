//! Finds this process in NVML's lists, which contain the process ids of the host.
//!
//! In a PID namespace (most containers), a process does not know its id on the host. The process is then
//! identified only if it is the single process on the device. Otherwise its memory stays unknown.

use crate::ffi::nvml::ProcessMemory;
use crate::ffi::phantom;

/// The PID namespace of the host (`PROC_PID_INIT_INO`).
const HOST_NAMESPACE: &str = "pid:[4026531836]";

/// Returns the index of this process in `processes`, or `None` if this process cannot be identified.
pub(crate) fn index_in(processes: &[ProcessMemory]) -> Option<usize> {
    index_of(processes, &own_pids(), in_namespace())
}

/// Returns true if the process ids in NVML's lists are those in `/proc`.
pub(crate) fn has_listed_ids() -> bool {
    !in_namespace() || own_pids().len() > 1
}

fn index_of(processes: &[ProcessMemory], pids: &[u32], in_namespace: bool) -> Option<usize> {
    // `pids` has the ids that this process knows, outermost namespace first. In a PID namespace with a single
    // id, that id is only valid inside the namespace, and on the host it may belong to another process. So
    // the list is not searched for it.
    let known: &[u32] = if in_namespace && pids.len() < 2 { &[] } else { &pids[..1.min(pids.len())] };
    match processes.iter().position(|process| known.contains(&process.pid)) {
        None if in_namespace && processes.len() == 1 => Some(0),
        found => found,
    }
}

/// Returns the ids of this process as far as /proc shows them, outermost namespace first.
fn own_pids() -> Vec<u32> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    let pids: Vec<u32> =
        line.unwrap_or_default().split_whitespace().filter_map(|word| word.parse().ok()).collect();
    if pids.is_empty() { vec![std::process::id()] } else { pids }
}

/// Returns true if this process is in another PID namespace than the host, so NVML may list it under an id
/// that the process does not know. Returns false on a phantom device, which lists processes by the ids of
/// their own namespace.
fn in_namespace() -> bool {
    !phantom::is_present()
        && std::fs::read_link("/proc/self/ns/pid").is_ok_and(|link| link.as_os_str() != HOST_NAMESPACE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn processes(pids: &[u32]) -> Vec<ProcessMemory> {
        pids.iter().map(|&pid| ProcessMemory { pid, used: 1, instances: [0; 2] }).collect()
    }

    #[test]
    fn a_process_finds_itself_by_its_id_on_the_host() {
        assert_eq!(index_of(&processes(&[5, 7]), &[7], false), Some(1));
        assert_eq!(index_of(&processes(&[5, 7]), &[8], false), None);
        // In a namespace with the host's /proc, the first id is the id on the host -> found.
        assert_eq!(index_of(&processes(&[5, 7]), &[7, 5], true), Some(1));
        // In a container, the process does not know its id on the host, where id 7 may be another process ->
        // not found.
        assert_eq!(index_of(&processes(&[5, 7]), &[7], true), None);
        assert_eq!(index_of(&processes(&[5]), &[7], true), Some(0));
        assert_eq!(index_of(&[], &[7], true), None);
    }
}
