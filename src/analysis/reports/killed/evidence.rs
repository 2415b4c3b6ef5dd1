//! What held a process's memory when it ran out, and what to do.

use memtrace_trace::host::parts::CPU_TENSORS;

use super::super::host_owners::allocated_at;
use super::super::ledger::host::{CHANGE, HostPart, HostState, others_of, part_about};
use super::{Killed, Killer};
use crate::options::Options;
use crate::render::numbers::{counted, duration};
use crate::state::host_memory::{FullSample, KINDS, ProcessesSample, QuickSample, WITHOUT_FILE};
use crate::state::moment::NamedMoment;

/// The time before the end, in ns, in which growth is measured.
const LAST_NS: i64 = 5_000_000_000;
/// Advice about children that grow, and about the workers of a DataLoader.
pub(in crate::reports) const WORKERS: &str = "fewer DataLoader workers; give them arrays instead of Python objects, which each copies when it reads them";
/// The greatest age of a list of other processes that counts.
const OLDEST_LIST_NS: i64 = 10_000_000_000;
/// Advice if other processes hold more memory than this one and its children.
const OTHERS: &str = "end the other processes, or give this program a container of its own: they hold more than it and its children";
/// The phase in which a program saves its state, and the advice if memory runs out in it.
const CHECKPOINT: &str = "checkpoint";
const SAVE_LESS: &str = "save the checkpoint without a second copy on the host; with several ranks on one rank only (rank0_only=True), or sharded (torch.distributed.checkpoint)";
/// Growth of less than this many bytes is not reported.
const LEAST_GROWTH: i64 = 16 << 20;

/// The maximum number of parts that are named.
const MOST_PARTS: usize = 3;

/// The parts of a process's memory that grew between a full sample and the end: their names and growth in bytes,
/// the largest growth first.
pub(super) struct GrownParts<'a> {
    pub(super) from_ns: i64,
    to_ns: i64,
    parts: Vec<(&'a str, i64)>,
}

impl Killed<'_> {
    /// Returns sentences about the largest holders at the last sample before the kill, the growth, the limit,
    /// and the remedy.
    pub(super) fn evidence(&self, options: &Options) -> Vec<String> {
        let show = |bytes: i64| options.units.show(bytes).to_string();
        let mut all = Vec::new();
        let end = self.end();
        let at = NamedMoment::Time(end.ts_ns);
        let Some(last) = self.memory.quick_at(&at) else {
            return vec!["the host's memory is unknown: no sample was taken".to_owned()];
        };
        let (container, machine) = (last.container, last.machine);
        let ago = duration((end.ts_ns - last.when.ts_ns).max(0));
        if let Some(left) = container.left() {
            let (limit, left) = (show(container.limit), show(left.max(0)));
            all.push(format!("limit of the container {limit}; {left} left at the last sample, {ago} before"));
        } else if machine.available >= 0 {
            let (available, total) = (show(machine.available), show(machine.total));
            all.push(format!(
                "no limit of a container is known; the machine had {available} available of {total} at the last sample, \
                 {ago} before"
            ));
        }
        let Some(state) = &self.state else {
            all.push("its holders are unknown: no full sample was taken".to_owned());
            return all;
        };
        let mut parts: Vec<_> = state.parts.iter().filter(|part| part.pss > 0).collect();
        parts.sort_by_key(|part| -part.pss);
        let held: Vec<String> =
            parts.iter().take(MOST_PARTS).map(|part| format!("{} {}", show(part.pss), part.what)).collect();
        let mut text = format!("held most ({} resident): {}", show(last.rss), held.join(", "));
        if let Some(children) = self.memory.children_near(last.when.ts_ns).filter(|all| all.processes > 0) {
            let number = counted(children.processes.cast_unsigned(), "child process");
            text += &format!("; {} in {number}", show(children.bytes()));
        }
        all.push(text);
        for part in parts.iter().take(MOST_PARTS) {
            all.extend(state.owners_of(part, options));
        }
        // An older list may name processes that have ended.
        let others = self.memory.others_at(last.when.ts_ns);
        let others = others.filter(|others| last.when.ts_ns - others.when.ts_ns <= OLDEST_LIST_NS);
        if let Some(others) = others.filter(|others| !others.largest.is_empty()) {
            let named = others.largest.iter().take(MOST_PARTS);
            let named: Vec<String> =
                named.map(|it| format!("{} {} (pid {})", show(it.rss), it.name, it.pid)).collect();
            all.push(format!("{}: {}", others_of(others, Some(last), options), named.join(", ")));
        }
        let grown = self.grown(last);
        let grown_parts = self.grown_parts();
        if let Some((what, bytes, ns)) = grown {
            let mut text = format!("grew in the last {}: {what} by {}", duration(ns), show(bytes));
            if let Some(GrownParts { from_ns, to_ns, parts }) = &grown_parts {
                let parts: Vec<String> = parts
                    .iter()
                    .map(|(name, bytes)| {
                        let owners = allocated_at(&self.grown_tensors, options);
                        let owners = owners.filter(|_| name.starts_with(CPU_TENSORS));
                        let owners = owners.map_or_else(String::new, |owners| format!(", {owners}"));
                        format!("{name} by {}{owners}", show(*bytes))
                    })
                    .collect();
                text +=
                    &format!("; from {} to {}: {}", duration(*from_ns), duration(*to_ns), parts.join("; "));
            }
            all.push(text);
        }
        if self.is_out_of_memory() {
            let children = self.children_alone(last);
            // The limit of an address space belongs to one process.
            let is_shared = self.killer != Some(Killer::Refused);
            let named: i64 = others.map_or(0, |others| others.largest.iter().map(|other| other.rss).sum());
            let advice = self.advice(state, last, children);
            let is_of_others = is_shared && named > last.held() + children;
            if is_of_others {
                all.push(format!("try: {OTHERS}"));
            }
            // Beside others that hold more, only what grows is a cause, too.
            all.extend(
                advice.filter(|_| !is_of_others || grown.is_some()).map(|text| format!("try: {text}")),
            );
        }
        all
    }

    /// Returns the remedy for what this process and its children hold.
    fn advice(&self, state: &HostState<'_>, last: &QuickSample, children: i64) -> Option<String> {
        let grown = self.grown(last);
        match grown {
            _ if children > last.held() => return Some(format!("child processes: {WORKERS}")),
            Some(("child processes", ..)) => return Some(format!("child processes: {WORKERS}")),
            Some(("shared memory", ..)) => {
                return Some(format!("shared memory: {}", part_about("shared", false).1));
            }
            Some((WITHOUT_FILE, ..)) if self.memory.symbols.or_dash(self.end().phase) == CHECKPOINT => {
                return Some(SAVE_LESS.to_owned());
            }
            _ => {}
        }
        let can_shrink =
            |part: &&HostPart| !["libraries", CHANGE, "memtrace", "simulated"].contains(&part.group);
        let largest = || state.parts.iter().filter(can_shrink).max_by_key(|part| part.pss);
        let changes = state.parts.iter().filter(|part| part.group == CHANGE);
        let change = changes.map(|part| part.rss).max().unwrap_or(0);
        let grown_parts = self.grown_parts().filter(|_| grown.is_some());
        let (name, bytes) = grown_parts.map_or(("", 0), |grown| grown.parts[0]);
        // What has changed since the last full sample may be far larger than what is known to have grown.
        let is_unknown = grown.is_some() && change > 2 * bytes;
        if is_unknown && 2 * state.tensors_in_change > change {
            return Some(format!("{CPU_TENSORS}: {}", part_about(CPU_TENSORS, true).1));
        }
        let of_name = state.parts.iter().filter(can_shrink).find(|part| part.what == name && !is_unknown);
        let part = of_name.or_else(largest);
        part.map(|part| format!("{}: {}", part.what, part.advice))
    }

    /// Returns at most the bytes that the children have for themselves. Pages that they share with this process
    /// since a fork are in the children's resident memory, but only once in that of the container.
    fn children_alone(&self, last: &QuickSample) -> i64 {
        let listed = self.memory.children_near(last.when.ts_ns).map_or(0, ProcessesSample::bytes);
        let container = last.container;
        if container.current < 0 {
            return listed;
        }
        listed.min(container.current - container.file.max(0) - last.held()).max(0)
    }

    /// Returns the kind of memory that grew most in the seconds before a sample, its growth in bytes, and the
    /// duration in ns. Returns `None` if no kind grew by at least [`LEAST_GROWTH`].
    fn grown(&self, last: &QuickSample) -> Option<(&'static str, i64, i64)> {
        let (from, to) = (last.when.ts_ns - LAST_NS, last.when.ts_ns);
        let earlier = self.memory.quick.iter().rfind(|sample| sample.when.ts_ns <= from);
        let before = earlier.or(self.memory.quick.first())?;
        // A value of -1 is unknown. An unknown value before the growth does not count.
        let changes =
            last.kinds.iter().zip(before.kinds).map(|(now, then)| if then < 0 { 0 } else { now - then });
        let mut growth: Vec<(&'static str, i64)> = KINDS.into_iter().zip(changes).collect();
        let mut children =
            self.memory.children.iter().filter(|sample| (from..=to).contains(&sample.when.ts_ns));
        if let Some(first) = children.next() {
            let latest = children.next_back().unwrap_or(first);
            growth.push(("child processes", latest.rss - first.rss));
        }
        let most =
            growth.into_iter().filter(|(_, bytes)| *bytes >= LEAST_GROWTH).max_by_key(|(_, bytes)| *bytes);
        most.map(|(what, bytes)| (what, bytes, to - before.when.ts_ns))
    }

    /// Returns the parts of the process that grew most between a full sample in the seconds before the end and
    /// the end. Returns `None` if no part grew by at least [`LEAST_GROWTH`].
    pub(super) fn grown_parts(&self) -> Option<GrownParts<'_>> {
        let state = self.state.as_ref()?;
        let to_ns = state.when.ts_ns;
        let until: Vec<&FullSample> = self.memory.whole().filter(|full| full.when.ts_ns < to_ns).collect();
        let before = until.iter().rfind(|full| full.when.ts_ns <= to_ns - LAST_NS).or(until.first())?;
        let mut parts: Vec<(&str, i64)> = state
            .parts
            .iter()
            .filter(|part| part.group != CHANGE)
            .map(|part| {
                let then = before.parts.iter().find(|then| then.name == part.what);
                (part.what.as_str(), part.rss - then.map_or(0, |then| then.rss))
            })
            .filter(|(_, bytes)| *bytes >= LEAST_GROWTH)
            .collect();
        parts.sort_by_key(|(name, bytes)| (-bytes, *name));
        parts.truncate(MOST_PARTS);
        let found = GrownParts { from_ns: before.when.ts_ns, to_ns, parts };
        (!found.parts.is_empty()).then_some(found)
    }
}
