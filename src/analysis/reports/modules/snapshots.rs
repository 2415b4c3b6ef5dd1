//! Snapshots of memory that later rows correct. As in `MemTracker`, a block counts in its final category
//! since its allocation, even if a `tag` row assigns the category later.

use std::collections::BTreeMap;

use super::super::mem_tracker::Types;

/// The bytes of each device, by reference type.
pub(super) type DeviceTypes = BTreeMap<i32, Types>;

/// The key of one device's bytes: the `seq` of the last row that the bytes include, and a unique number.
type RowPlace = (i64, u64);

/// The memory of all devices at one moment: for each device, the key of its bytes in [`Snapshots`].
#[derive(Clone, Debug, Default)]
pub(super) struct Snapshot(BTreeMap<i32, RowPlace>);

/// The bytes of all snapshots that are kept.
#[derive(Default)]
pub(super) struct Snapshots {
    /// Ordered by time, so that a correction visits only the entries that are younger than its block.
    bytes: BTreeMap<RowPlace, (i32, Types)>,
    next: u64,
}

impl Snapshots {
    /// Stores `now`, the memory after row `seq`, and returns the new snapshot.
    pub(super) fn take(&mut self, now: &DeviceTypes, seq: i64) -> Snapshot {
        Snapshot(now.iter().map(|(device, types)| (*device, self.insert(*device, types, seq))).collect())
    }

    fn insert(&mut self, device: i32, types: &Types, seq: i64) -> RowPlace {
        self.next += 1;
        self.bytes.insert((seq, self.next), (device, *types));
        (seq, self.next)
    }

    /// Replaces the memory of one device in `snapshot` by the memory after row `seq`.
    pub(super) fn replace(&mut self, snapshot: &mut Snapshot, device: i32, types: &Types, seq: i64) {
        let place = self.insert(device, types, seq);
        if let Some(old) = snapshot.0.insert(device, place) {
            self.bytes.remove(&old);
        }
    }

    /// Removes the bytes of `snapshot`.
    pub(super) fn remove(&mut self, snapshot: &Snapshot) {
        for place in snapshot.0.values() {
            self.bytes.remove(place);
        }
    }

    /// Adds `change` to a type in every snapshot that includes the block that row `born` allocated.
    pub(super) fn correct(&mut self, device: i32, born: i64, of_type: usize, change: i64) {
        for (owner, types) in self.bytes.range_mut((born, 0)..).map(|(_, kept)| kept) {
            if *owner == device {
                types[of_type] = types[of_type].wrapping_add(change);
            }
        }
    }

    /// Returns the memory of `snapshot`, with all corrections so far.
    pub(super) fn get(&self, snapshot: &Snapshot) -> DeviceTypes {
        let of_device = |(device, place): (&i32, &RowPlace)| Some((*device, self.bytes.get(place)?.1));
        snapshot.0.iter().filter_map(of_device).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_snapshots_are_corrected_from_the_birth_of_a_block_on() {
        let mut snapshots = Snapshots::default();
        let now = |bytes| {
            let mut types = Types::default();
            types[0] = bytes;
            DeviceTypes::from([(0, types)])
        };
        let ones = Types::default().map(|_| 1);
        let before = snapshots.take(&now(8), 4);
        let mut after = snapshots.take(&now(16), 5);
        snapshots.correct(0, 5, 0, -8);
        snapshots.correct(0, 5, 1, 8);
        snapshots.correct(1, 5, 1, 99);
        assert_eq!(snapshots.get(&before)[&0][..2], [8, 0]);
        assert_eq!(snapshots.get(&after)[&0][..2], [8, 8]);
        snapshots.replace(&mut after, 0, &ones, 9);
        assert_eq!(snapshots.get(&after)[&0], ones);
        snapshots.remove(&after);
        snapshots.remove(&before);
        assert!(snapshots.bytes.is_empty());
    }
}
