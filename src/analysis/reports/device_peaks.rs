//! An upper bound on the memory that the processes of a rank use on one device at the same time.

use std::collections::BTreeMap;

use crate::read::stream::TraceFile;
use crate::state::replay_trace::Replayed;

/// The rank and the ordinal of a device. The processes of a rank share its devices.
pub(super) type Place = (i32, i32);

/// The peaks of each process on each device, in bytes. `N` is the number of metrics.
#[derive(Default)]
pub(super) struct DevicePeaks<const N: usize> {
    places: BTreeMap<Place, Vec<ProcessPeaks<N>>>,
}

struct ProcessPeaks<const N: usize> {
    /// The times of the first and the last row, in ns since the Unix epoch.
    lifetime: (i64, i64),
    peaks: [i64; N],
}

impl<const N: usize> DevicePeaks<N> {
    /// Adds the peaks of a process on a device.
    pub(super) fn add(&mut self, trace: &TraceFile, replayed: &Replayed, ordinal: i32, peaks: [i64; N]) {
        let start = trace.meta.start_unix_ns;
        let lifetime = (start, start.saturating_add(replayed.replay.ts_ns.max(0)));
        self.places.entry((trace.meta.rank, ordinal)).or_default().push(ProcessPeaks { lifetime, peaks });
    }

    /// Returns, for each device, the largest sum of the peaks of processes that ran at the same time, and the
    /// number of processes on the device. The sum is an upper bound on the memory in use.
    pub(super) fn sums(&self) -> BTreeMap<Place, ([i64; N], usize)> {
        self.places
            .iter()
            .map(|(place, processes)| (*place, (largest_sums(processes), processes.len())))
            .collect()
    }
}

fn largest_sums<const N: usize>(processes: &[ProcessPeaks<N>]) -> [i64; N] {
    let mut changes = Vec::with_capacity(2 * processes.len());
    for (index, process) in processes.iter().enumerate() {
        changes.push((process.lifetime.0, false, index));
        changes.push((process.lifetime.1, true, index));
    }
    // At equal times, a beginning sorts before an end, so a process that ends when another one begins counts
    // as running at the same time.
    changes.sort_unstable();
    let (mut now, mut highest) = ([0_i64; N], [0_i64; N]);
    for (_, ends, index) in changes {
        for (metric, peak) in processes[index].peaks.iter().enumerate() {
            let change = if ends { -peak } else { *peak };
            now[metric] = now[metric].saturating_add(change);
            highest[metric] = highest[metric].max(now[metric]);
        }
    }
    highest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_that_run_at_the_same_time_are_summed_and_others_are_not() {
        let process = |start, end, peak| ProcessPeaks { lifetime: (start, end), peaks: [peak, 2 * peak] };
        let sums = |processes: &[_]| largest_sums(processes);
        assert_eq!(sums(&[process(0, 9, 5), process(10, 19, 7)]), [7, 14]);
        assert_eq!(sums(&[process(0, 10, 5), process(10, 19, 7)]), [12, 24]);
        assert_eq!(sums(&[process(0, 90, 5), process(10, 19, 7), process(20, 29, 6)]), [12, 24]);
        // Without start times in the traces, all processes count as running at the same time.
        assert_eq!(sums(&[process(0, 0, 5), process(0, 0, 7)]), [12, 24]);
        assert_eq!(sums(&[]), [0, 0]);
    }
}
