//! Determines who ended a process that was killed or refused memory, when this happened, and what held the
//! host's memory then.

mod evidence;
mod rank;
mod signals;

use std::fmt::Write as _;

pub(super) use evidence::WORKERS;
use memtrace_trace::end_row::{self, ASKED, Ending, KILLS, MACHINE_KILLS, SIGNAL};
use serde_json::{Value, json};

pub(crate) use self::rank::RunVictims;
use self::rank::{SIGKILL, Victim, kills_after, victim_instead};
use self::signals::{about_signal, signal_name};

use super::host_owners::Allocated;
use super::ledger::host::HostState;
use crate::error::Result;
use crate::options::Options;
use crate::read::stream::TraceFile;
use crate::read::symbols::Symbol;
use crate::render::numbers::{duration, step_or_dash};
use crate::render::printer::{Cell, Printer, Style};
use crate::state::host_memory::{HostMemory, ListedProcess, QuickSample, Refusal, When};
use crate::state::moment::NamedMoment;

/// Memory is nearly full when less than one part in `NEARLY_FULL` is left.
const NEARLY_FULL: i64 = 20;
/// Who ended the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Killer {
    /// The kernel, because the container's memory ran out, as the container's counter shows.
    ContainerOom,
    /// The kernel, because the machine's memory ran out, as the machine's counter shows.
    MachineOom,
    /// Probably the kernel: memory was nearly full at the last sample, and no counter can be read.
    ProbablyOom,
    /// A launcher, after the kernel had killed another rank. The fields are that rank and its resident
    /// memory.
    AfterRank(i64, i64),
    /// Another process sent SIGKILL: no counter of the kernel has risen, so the kernel did not. The field is
    /// the signal that asked the program to end before, or `None` if there was no such signal.
    Sent(Option<i32>),
    /// The program ended with an error, because the system refused it memory.
    Refused,
    /// The process ended by another signal.
    Signal(i32),
    /// The cause is unknown.
    Unknown,
}

/// A child process that was killed because memory ran out, while this process continued to run.
struct KilledChild {
    /// The first sample that shows the kill.
    when: When,
    /// The time of the sample before `when`, in ns.
    before_ns: i64,
    child: Option<ListedProcess>,
    /// A rank of the run that the kernel may have killed, and its resident memory, if no child is missing.
    rank: Option<(i64, i64)>,
}

/// Returns the verdict on a trace of the run of `victims` as sentences; `None` if neither its process nor a child was
/// killed, and the process was not refused memory.
///
/// # Errors
/// When a trace cannot be read.
pub(crate) fn killed_sentences(
    trace: &TraceFile,
    memory: &HostMemory,
    victims: &RunVictims<'_>,
    options: &Options,
) -> Result<Option<Vec<String>>> {
    Ok(Killed::find(trace, memory, victims, options)?.map(|killed| killed.sentences(options)))
}

/// The verdict on a process.
pub(super) struct Killed<'a> {
    /// `None` if the process itself was neither killed nor refused memory.
    killer: Option<Killer>,
    when: When,
    child: Option<KilledChild>,
    /// The ranks between which the samples do not decide, the killed one among them; empty if it is certain.
    alike: Vec<i64>,
    /// The memory of the process at the end; `None` without a full sample.
    state: Option<HostState<'a>>,
    /// The code of the CPU tensors that it allocated in the last seconds.
    grown_tensors: Vec<Allocated>,
    /// The signal that ended the process, if `memtrace run` or a repair recorded it.
    signal: Option<i64>,
    memory: &'a HostMemory,
}

impl<'a> Killed<'a> {
    /// Returns the verdict on a trace of the run of `victims`; `None` if neither its process nor a child was killed, and
    /// the process was not refused memory.
    ///
    /// # Errors
    /// When a trace cannot be read.
    pub(super) fn find(
        trace: &TraceFile,
        memory: &'a HostMemory,
        victims: &RunVictims<'_>,
        options: &Options,
    ) -> Result<Option<Killed<'a>>> {
        let text = trace.ending().unwrap_or_default();
        let word = |key: &str| end_row::number::<i64>(&text, key);
        let was_killed = Ending::from_text(&text) == Some(Ending::Killed);
        let mut child = killed_child(memory);
        let mut alike = Vec::new();
        let killer = match memory.refusal {
            _ if was_killed => {
                let asked = word(ASKED).map(|signal| signal as i32);
                let last = memory.quick.last();
                let by = killer(last, word(SIGNAL), asked, word(KILLS), word(MACHINE_KILLS));
                let of_kernel = matches!(by, Killer::ContainerOom | Killer::MachineOom | Killer::Unknown);
                let rise = last.and_then(|last| Some((last.rss, kills_after(&text, last)?)));
                match rise.filter(|_| of_kernel) {
                    Some((rss, rise)) => {
                        let own = Victim { rss, rank: i64::from(trace.meta.rank) };
                        let instead;
                        (instead, alike) = victim_instead(own, rise, victims.beside(trace)?);
                        Some(instead.map_or(by, |Victim { rss, rank }| Killer::AfterRank(rank, rss)))
                    }
                    None => Some(by),
                }
            }
            Some(_) => Some(Killer::Refused),
            None => None,
        };
        if let Some(killed) = child.as_mut().filter(|killed| killed.child.is_none()) {
            killed.rank = victims.beside(trace)?.into_iter().max().map(|it| (it.rank, it.rss));
        }
        // This process counted the kill of the other rank.
        if matches!(killer, Some(Killer::AfterRank(..))) && child.as_ref().is_some_and(|it| it.rank.is_some())
        {
            child = None;
        }
        if killer.is_none() && child.is_none() {
            return Ok(None);
        }
        let (when, grown_tensors) = (memory.end(), Vec::new());
        let signal = word(SIGNAL).filter(|_| was_killed);
        let mut killed = Killed { killer, when, child, alike, state: None, grown_tensors, signal, memory };
        killed.state = HostState::new(memory, &NamedMoment::Time(killed.end().ts_ns));
        if killed.is_out_of_memory() {
            let before_ns = killed.grown_parts().map(|grown| grown.from_ns);
            if let Some(state) = &mut killed.state {
                killed.grown_tensors = state.name_owners(trace, memory, before_ns, options)?;
            }
        }
        Ok(Some(killed))
    }

    /// Returns the last moment with the memory that ran out: the end, or the time before the sample that shows
    /// the kill of a child, because this sample no longer includes the child.
    fn end(&self) -> When {
        match (&self.child, self.killer) {
            (Some(child), None) => When { ts_ns: child.before_ns, ..child.when },
            _ => self.when,
        }
    }

    /// Returns true if memory ran out: the kernel killed (or probably killed) the process or a child, or the
    /// system refused the process memory.
    pub(super) fn is_out_of_memory(&self) -> bool {
        let by_kernel = [Killer::ContainerOom, Killer::MachineOom, Killer::ProbablyOom, Killer::Refused];
        self.child.is_some() || self.killer.is_some_and(|killer| by_kernel.contains(&killer))
    }

    /// Returns true if the process itself was killed or refused memory. Returns false if only a child was
    /// killed.
    pub(super) fn is_of_process(&self) -> bool {
        self.killer.is_some()
    }

    fn sentences(&self, options: &Options) -> Vec<String> {
        let show = |bytes: i64| options.units.show(bytes).to_string();
        let mut all = Vec::new();
        if let Some(child) = &self.child {
            let who = match (&child.child, child.rank) {
                (Some(ListedProcess { name, pid, rss, .. }), _) => {
                    format!("the child process {name} (pid {pid}, {} resident before)", show(*rss))
                }
                (None, Some((rank, rss))) => format!("rank {rank} ({} resident)", show(rss)),
                (None, None) => "a child process, or another process in the container".to_owned(),
            };
            all.push(format!(
                "the kernel killed {who} at {}, step {}, because memory ran out",
                duration(child.when.ts_ns),
                step_or_dash(child.when.step)
            ));
        }
        let Some(killer) = self.killer else {
            all.extend(self.evidence(options));
            return all;
        };
        let symbols = &self.memory.symbols;
        let mut when = format!(
            "at {}, step {}, {}",
            duration(self.when.ts_ns),
            step_or_dash(self.when.step),
            symbols.or_dash(self.when.phase)
        );
        if self.when.test != Symbol::NONE {
            let _ = write!(when, ", in the test {}", symbols.get(self.when.test));
        }
        all.push(match killer {
            Killer::ContainerOom => format!(
                "killed {when}: by the kernel, because the memory of the container ran out (its count of such kills rose)"
            ),
            Killer::MachineOom => format!(
                "killed {when}: by the kernel, because the machine's memory ran out (its count of such kills rose)"
            ),
            Killer::ProbablyOom => format!(
                "killed {when}: probably by the kernel, because memory ran out: it was nearly full, and no count of kills can be read"
            ),
            Killer::Sent(Some(asked)) => format!(
                "killed {when}: by SIGKILL, after {} had asked it to end and it continued: a scheduler at \
                 its time limit, or a person who gave up waiting. Memory did not run out: the kernel counted \
                 no such kill",
                signal_name(asked)
            ),
            Killer::AfterRank(rank, rss) => format!(
                "killed {when}: not by the kernel, which killed rank {rank} ({} resident). A launcher such as torchrun \
                 ends the other ranks when one has failed",
                show(rss)
            ),
            Killer::Refused => self.refusal(&when, options),
            Killer::Sent(None) => format!(
                "killed {when}: by SIGKILL, and not because memory ran out (the kernel counts no such kill). Somebody sent it: a person, a \
                 scheduler at its limit, or a launcher that ends the other ranks when one has failed"
            ),
            Killer::Signal(signal) => format!("ended {when}: {}", about_signal(signal)),
            Killer::Unknown if self.signal.is_some() => format!(
                "killed {when}: by SIGKILL. By whom is unknown: the trace has no count of the kernel's kills from before"
            ),
            Killer::Unknown => format!(
                "killed {when}: by whom is unknown. memtrace run knows the signal of a program that it starts, not of one that a launcher \
                 starts: torchrun ends the other ranks when one has failed. The kernel's count of kills is known on the machine where it ran"
            ),
        });
        if !self.alike.is_empty() {
            let mut ranks: Vec<String> = self.alike.iter().map(i64::to_string).collect();
            ranks.dedup();
            // Processes that a launcher other than torchrun starts may all have rank 0.
            let which = match ranks.len() {
                1 => format!("which of {} processes with rank {}", self.alike.len(), ranks[0]),
                _ => format!("which of the ranks {}", ranks.join(", ")),
            };
            all.push(format!(
                "{which} the kernel killed is uncertain: at their last samples, which are from before the kill, \
                 they are about as large"
            ));
        }
        if !matches!(killer, Killer::Signal(_) | Killer::AfterRank(..)) || self.child.is_some() {
            all.extend(self.evidence(options));
        }
        all
    }

    /// Describes the end of a program to which the system refused memory.
    fn refusal(&self, when: &str, options: &Options) -> String {
        let show = |bytes: i64| options.units.show(bytes).to_string();
        let Some(Refusal { error, limit, size, peak, .. }) = &self.memory.refusal else {
            return String::new();
        };
        let why = if *limit >= 0 {
            format!(
                "its address space is limited to {} (ulimit -v, RLIMIT_AS), and its size was {}. Unlike a container's limit, this \
                 limit also counts memory that is reserved and never used",
                show(*limit),
                show(*size.max(peak))
            )
        } else if *size >= 0 {
            "no limit of its address space is set, so one request was larger than the machine grants (vm.overcommit_memory)".to_owned()
        } else {
            "whether its address space has a limit is unknown".to_owned()
        };
        format!("ended {when} with {error}, because the system refused it memory of the host: {why}")
    }

    /// Prints the sentences of the verdict, the first one as an alarm.
    pub(super) fn print(&self, printer: &mut Printer, options: &Options) {
        for (at, sentence) in self.sentences(options).into_iter().enumerate() {
            match at {
                0 => printer.line([Cell::new(sentence, Style::Alarm)]),
                _ => printer.plain(format!("  {sentence}")),
            }
        }
    }

    pub(super) fn json(&self, options: &Options) -> Value {
        let by = match self.killer {
            None => "",
            Some(Killer::ContainerOom) => "container_oom",
            Some(Killer::MachineOom) => "machine_oom",
            Some(Killer::ProbablyOom) => "probably_oom",
            Some(Killer::AfterRank(..)) => "after_rank",
            Some(Killer::Sent(_)) => "sent",
            Some(Killer::Refused) => "refused",
            Some(Killer::Signal(_)) => "signal",
            Some(Killer::Unknown) => "unknown",
        };
        // The kernel always kills with SIGKILL.
        let is_by_kernel = matches!(self.killer, Some(Killer::ContainerOom | Killer::MachineOom));
        let signal = self.signal.or(is_by_kernel.then_some(SIGKILL));
        json!({
            "by": by,
            "signal": signal,
            "ts_ns": self.when.ts_ns,
            "step": self.when.step,
            "phase": self.memory.symbols.or_dash(self.when.phase),
            "child": self.child.as_ref().map(|killed| json!({
                "ts_ns": killed.when.ts_ns,
                "step": killed.when.step,
                "name": killed.child.as_ref().map(|child| child.name.clone()),
                "pid": killed.child.as_ref().map(|child| child.pid),
            })),
            "sentences": self.sentences(options),
        })
    }
}

/// Determines who ended a killed process. `last` is the last sample and `signal` the signal that ended the
/// process. `asked` is a signal that asked it to end before. `kills` and `machine_kills` are the kernel's
/// counts of OOM kills after the end, in the container and on the machine.
fn killer(
    last: Option<&QuickSample>,
    signal: Option<i64>,
    asked: Option<i32>,
    kills: Option<i64>,
    machine_kills: Option<i64>,
) -> Killer {
    if let Some(signal) = signal.filter(|signal| *signal != SIGKILL) {
        return Killer::Signal(signal as i32);
    }
    // A count of 0 has not risen, even if no sample has the count before.
    let rose = |before: Option<i64>, after: Option<i64>| match (before.filter(|kills| *kills >= 0), after?) {
        (_, 0) => Some(false),
        (before, after) => before.map(|before| after > before),
    };
    let in_container = rose(last.map(|last| last.container.kills), kills);
    let on_machine = rose(last.map(|last| last.machine.kills), machine_kills);
    match (in_container, on_machine) {
        (Some(true), _) => Killer::ContainerOom,
        (None, Some(true)) => Killer::MachineOom,
        // The container's counter includes every OOM kill of its processes, whether the container or the
        // machine ran out of memory. So if it did not rise, the machine's counter is irrelevant.
        (Some(false), _) | (None, Some(false)) if signal.is_some() => Killer::Sent(asked),
        (None, None) if last.is_some_and(is_nearly_full) => Killer::ProbablyOom,
        _ => Killer::Unknown,
    }
}

fn is_nearly_full(sample: &QuickSample) -> bool {
    let container = sample.container.left().is_some_and(|left| left < sample.container.limit / NEARLY_FULL);
    container
        || (sample.machine.available >= 0 && sample.machine.available < sample.machine.total / NEARLY_FULL)
}

/// Finds the kill of a child process: the container's count of OOM kills rose while this process continued to
/// run. The killed child is in the list of children before the kill and missing in the next list.
fn killed_child(memory: &HostMemory) -> Option<KilledChild> {
    let pair = memory.quick.windows(2).find(|pair| {
        let [before, after] = [pair[0].container.kills, pair[1].container.kills];
        before >= 0 && after > before
    })?;
    let (from, to) = (pair[0].when, pair[1].when);
    // Children are listed less often than the counter is read. So compare each list with the next one, from
    // the last list before the earlier sample to the last list before `to`, the latest list first.
    let until = |ns: i64| memory.children.partition_point(|sample| sample.when.ts_ns <= ns);
    let lists = until(from.ts_ns).saturating_sub(1)..until(to.ts_ns);
    let listed = memory.children.get(lists.clone())?;
    let has_none = listed.iter().all(|sample| sample.processes == 0);
    if has_none && from.ts_ns <= listed.last()?.when.ts_ns {
        return None;
    }
    let gone_after = |at: usize| {
        let next = memory.children.get(at + 1);
        let is_gone = |child: &&ListedProcess| {
            next.is_none_or(|next| next.largest.iter().all(|other| other.pid != child.pid))
        };
        memory.children[at].largest.iter().find(is_gone)
    };
    let child = lists.rev().find_map(gone_after).cloned();
    Some(KilledChild { when: to, before_ns: from.ts_ns, child, rank: None })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::host_memory::{Container, Machine};

    fn sample(left: i64, kills: i64) -> QuickSample {
        QuickSample {
            when: When::default(),
            rss: 1,
            kinds: [1, 0, 0],
            swap: 0,
            container: Container { current: 1000 - left, limit: 1000, file: 0, swap: 0, kills },
            machine: Machine { total: 9000, available: 5000, free: 1, swap_free: 0, kills: 7 },
        }
    }

    #[test]
    fn a_kill_is_known_from_the_counters_and_unknown_without_them() {
        let roomy = sample(900, 2);
        let of = |signal, kills, machine| killer(Some(&roomy), signal, None, kills, machine);
        assert_eq!(of(Some(9), Some(3), Some(8)), Killer::ContainerOom);
        assert_eq!(of(None, Some(3), Some(8)), Killer::ContainerOom);
        assert_eq!(of(Some(9), None, Some(8)), Killer::MachineOom);
        assert_eq!(of(Some(9), Some(2), Some(8)), Killer::Sent(None));
        assert_eq!(of(Some(9), None, Some(7)), Killer::Sent(None));
        assert_eq!(killer(Some(&roomy), Some(9), Some(15), Some(2), None), Killer::Sent(Some(15)));
        assert_eq!(of(None, Some(2), None), Killer::Unknown);
        assert_eq!(of(Some(15), Some(3), Some(8)), Killer::Signal(15));
        assert_eq!(of(Some(9), None, None), Killer::Unknown);
        assert_eq!(killer(Some(&sample(10, -1)), Some(9), None, None, None), Killer::ProbablyOom);
        assert_eq!(killer(None, Some(9), None, Some(1), Some(1)), Killer::Unknown);
        assert_eq!(killer(None, Some(9), None, Some(0), Some(0)), Killer::Sent(None));
    }
}
