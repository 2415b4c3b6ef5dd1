//! The rank that the kernel killed, among the killed ranks of a run.

use std::cell::OnceCell;

use memtrace_trace::end_row::{self, Ending, KILLS, MACHINE_KILLS, SIGNAL};

use crate::error::Result;
use crate::options::Options;
use crate::read::stream::TraceFile;
use crate::state::host_memory::{HostMemory, QuickSample};

pub(super) const SIGKILL: i64 = 9;
/// The sizes of two processes are alike if they differ by less than one part in `ALIKE`.
const ALIKE: i64 = 4;

/// Returns by how much the kernel's count of kills rose after the last sample of a process whose end row has
/// this text: the container's count, or else the machine's. `None` if neither is known.
pub(super) fn kills_after(text: &str, last: &QuickSample) -> Option<i64> {
    let rise = |before: i64, key| Some(end_row::number::<i64>(text, key)? - before).filter(|_| before >= 0);
    rise(last.container.kills, KILLS).or_else(|| rise(last.machine.kills, MACHINE_KILLS))
}

/// A process of the run that the kernel may have killed, in the order of size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Victim {
    /// The resident memory at the last sample.
    pub(super) rss: i64,
    pub(super) rank: i64,
}

impl Victim {
    /// Returns true if the sizes of two processes differ by less than one part in [`ALIKE`], so that the
    /// kernel may have seen another order.
    fn is_like(&self, other: &Victim) -> bool {
        ALIKE * (self.rss - other.rss).abs() < self.rss.max(other.rss)
    }
}

/// The processes of a run that the kernel may have killed. They are read when they are first needed, and only once.
pub(crate) struct RunVictims<'a> {
    run: &'a [TraceFile],
    options: &'a Options,
    /// The victim of each trace of `run`, if it is one.
    found: Vec<OnceCell<Option<Victim>>>,
}

impl<'a> RunVictims<'a> {
    pub(crate) fn new(run: &'a [TraceFile], options: &'a Options) -> RunVictims<'a> {
        RunVictims { run, options, found: vec![OnceCell::new(); run.len()] }
    }

    /// Returns the other killed processes in the container of `trace` that the kernel may have killed.
    pub(super) fn beside(&self, trace: &TraceFile) -> Result<Vec<Victim>> {
        let group = |of: &TraceFile| (of.meta.boot.clone(), of.meta.cgroup_id);
        let mut victims = Vec::new();
        for (other, found) in self.run.iter().zip(&self.found) {
            if other.path == trace.path || group(other) != group(trace) {
                continue;
            }
            victims.extend(match found.get() {
                Some(known) => *known,
                None => {
                    let victim = self.victim(other)?;
                    *found.get_or_init(|| victim)
                }
            });
        }
        Ok(victims)
    }

    /// Returns the process of `trace` if the kernel may have killed it. A process whose last sample already has the
    /// kernel's final count lived after all kills, so the kernel did not kill it.
    fn victim(&self, trace: &TraceFile) -> Result<Option<Victim>> {
        let text = trace.ending().unwrap_or_default();
        let is_other_signal = end_row::number::<i64>(&text, SIGNAL).is_some_and(|signal| signal != SIGKILL);
        if Ending::from_text(&text) != Some(Ending::Killed) || is_other_signal {
            return Ok(None);
        }
        let memory = HostMemory::read(trace, self.options)?;
        let last = memory.quick.last().filter(|last| kills_after(&text, last).is_some_and(|rise| rise > 0));
        Ok(last.map(|last| Victim { rss: last.rss, rank: i64::from(trace.meta.rank) }))
    }
}

/// Returns the largest process that the kernel killed instead of `own`, and the ranks between which the sizes
/// do not decide. `rise` is the number of kills after the last sample of `own`, and `others` are the other
/// possible victims.
///
/// The kernel kills the largest process first. If at least `rise` possible victims were larger than `own`,
/// the kernel killed those instead. Otherwise it also killed `own`. If `rise` is 0, `own` was still running
/// when the kernel had killed its victim.
pub(super) fn victim_instead(own: Victim, rise: i64, mut others: Vec<Victim>) -> (Option<Victim>, Vec<i64>) {
    let larger = others.iter().filter(|other| rise <= 0 || other.rss > own.rss);
    let is_spared = larger.clone().count() as i64 >= rise;
    let instead = larger.max().copied().filter(|_| is_spared);
    if rise > 0 {
        others.push(own);
    }
    let killed = instead.unwrap_or(own);
    let mut alike: Vec<i64> = others.iter().filter(|it| it.is_like(&killed)).map(|it| it.rank).collect();
    alike.sort_unstable();
    // If there are as many kills as possible victims, the kernel killed all of them.
    if alike.len() < 2 || others.len() as i64 <= rise {
        alike.clear();
    }
    (instead, alike)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sizes_of_killed_ranks_decide_only_if_they_differ() {
        let of = |own: (i64, i64), rise, others: &[(i64, i64)]| {
            let victim = |(rank, rss)| Victim { rss, rank };
            let (instead, alike) =
                victim_instead(victim(own), rise, others.iter().copied().map(victim).collect());
            (instead.map(|it| it.rank), alike)
        };
        assert_eq!(of((0, 100), 1, &[(1, 300)]), (Some(1), vec![]));
        assert_eq!(of((0, 300), 1, &[(1, 100)]), (None, vec![]));
        assert_eq!(of((0, 290), 1, &[(1, 300), (2, 90)]), (Some(1), vec![0, 1]));
        assert_eq!(of((0, 300), 1, &[(1, 290)]), (None, vec![0, 1]));
        // Two kills and two possible victims.
        assert_eq!(of((0, 300), 2, &[(1, 290)]), (None, vec![]));
        // This rank lived after the kill.
        assert_eq!(of((0, 300), 0, &[(1, 290)]), (Some(1), vec![]));
        assert_eq!(of((0, 300), 0, &[(1, 290), (2, 280)]), (Some(1), vec![1, 2]));
        assert_eq!(of((0, 300), 0, &[]), (None, vec![]));
    }
}
