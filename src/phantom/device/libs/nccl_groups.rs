//! The distribution of a communicator's ranks over machines.
//!
//! NCCL asks the other ranks for the distribution. Stand-ins cannot answer, so it is taken from PyTorch's
//! process groups: `memtrace_phantom_place_group` receives the name of each group and the number of its ranks
//! on this machine. In this rank's store, the key that holds the id of a communicator contains the name of its
//! group.

use std::collections::HashMap;
use std::ffi::{CStr, c_char};
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::sync::Mutex;
use std::time::Duration;

use memtrace_machine::STORE_VARIABLE;

use crate::core::host_state::host_state;
use crate::core::lock::lock;
use crate::libs::stand_ins;

/// The position of a rank in its communicator, and the distribution of the ranks over machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RankPlace {
    pub(crate) ranks: usize,
    pub(crate) rank: usize,
    /// The number of ranks on this machine, including this one.
    pub(crate) near: usize,
}

impl RankPlace {
    /// Returns true if a rank is on this machine. The ranks of a machine have consecutive numbers in NCCL.
    pub(crate) fn is_near(&self, rank: usize) -> bool {
        rank / self.near.max(1) == self.rank / self.near.max(1)
    }

    /// Creates the position of `rank` among `ranks` ranks. `near` is the number of ranks on this machine, if
    /// known. The default is the number of cards if the other ranks are stand-ins, otherwise
    /// `LOCAL_WORLD_SIZE`, or all ranks if that variable is not set.
    pub(crate) fn new(ranks: usize, rank: usize, near: Option<usize>) -> RankPlace {
        let number = |name: &str| std::env::var(name).ok()?.trim().parse().ok().filter(|number| *number > 0);
        let of_machine = match stand_ins::exist() {
            true => Some(host_state().spec.count as usize),
            // Without stand-ins, the ranks that run on this machine may simulate several machines.
            // `LOCAL_WORLD_SIZE` is the number of ranks of one of these.
            false => number("LOCAL_WORLD_SIZE"),
        };
        let near = near.filter(|near| *near > 0).or(of_machine).unwrap_or(ranks);
        RankPlace { ranks, rank, near: near.clamp(1, ranks.max(1)) }
    }
}

/// The number of ranks on this machine in each group, by the group's name.
static GROUPS: Mutex<Option<HashMap<String, usize>>> = Mutex::new(None);

/// Records that PyTorch makes a group of this name, with `near` ranks on this machine.
///
/// # Safety
/// `name` is null or a C string.
// SAFETY: only this library defines the name.
#[unsafe(no_mangle)]
unsafe extern "C" fn memtrace_phantom_place_group(name: *const c_char, near: usize) {
    if name.is_null() {
        return;
    }
    // SAFETY: the caller's promise.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    lock(&GROUPS).get_or_insert_default().insert(name, near);
}

/// Returns how many ranks are on this machine in the group whose communicator has this id.
pub(crate) fn near_of_id(id: &[u8]) -> Option<usize> {
    if !stand_ins::exist() || lock(&GROUPS).is_none() {
        return None;
    }
    let group = group_of_key(&key_of_id(id)?)?.to_owned();
    lock(&GROUPS).as_ref()?.get(&group).copied()
}

/// Returns the key in this rank's store that has the id as its value.
fn key_of_id(id: &[u8]) -> Option<String> {
    let port = std::env::var(STORE_VARIABLE).ok()?.parse().ok()?;
    let mut store = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok()?;
    store.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    let hex: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
    store.write_all(format!("key {hex}\n").as_bytes()).ok()?;
    let mut line = String::new();
    BufReader::new(store).read_line(&mut line).ok()?;
    Some(line.trim().to_owned()).filter(|line| !line.is_empty())
}

/// Returns the name of the group to which a key belongs. In a key, the name precedes the device.
fn group_of_key(key: &str) -> Option<&str> {
    key.split("/cuda/").next()?.split('/').rev().find(|part| !part.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_group_of_a_communicator_is_found_by_the_key_of_its_id() {
        assert_eq!(group_of_key("default_pg/0//cuda//0"), Some("0"));
        assert_eq!(group_of_key("worker/1/mesh_tp//cuda//0:17"), Some("mesh_tp"));
        assert_eq!(group_of_key(""), None);
    }

    #[test]
    fn the_ranks_of_a_machine_follow_one_another() {
        let place = RankPlace { ranks: 64, rank: 9, near: 8 };
        assert_eq!([7, 8, 15, 16].map(|rank| place.is_near(rank)), [false, true, true, false]);
        let place = RankPlace { ranks: 4, rank: 2, near: 1 };
        assert_eq!([1, 2, 3].map(|rank| place.is_near(rank)), [false, true, false]);
    }
}
