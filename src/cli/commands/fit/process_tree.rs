//! A program and the processes that it started: their end, and the memory that they take.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use memtrace_trace::host::HostFiles;
use memtrace_util::process::Process;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid};

/// How long the processes may take to end when they are asked to: as in PyTorch's `PContext.close`.
const PATIENCE: Duration = Duration::from_secs(30);

/// The minimum interval between two scans of the processes of a program.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);
/// Scans take at most one part in `LOOK_SHARE` of the time, because a machine may have thousands of
/// processes.
const LOOK_SHARE: u32 = 50;

/// A process: its id, and the clock tick at which it began, because ids are reused.
type Member = (i32, u64);

/// A program in a process group of its own.
pub(super) struct ProcessTree {
    child: Child,
    pid: Pid,
    /// The program and its processes at the last scan, while the program runs.
    seen: HashSet<Member>,
    /// The time of the next scan.
    next_look: Instant,
    /// When the processes were asked to end, and which processes.
    asked: Option<(Instant, HashSet<Member>)>,
    /// The status of the program, once it has ended.
    status: Option<ExitStatus>,
}

impl ProcessTree {
    /// Starts a program. A signal of the terminal does not reach it: see [`end`](Self::end).
    ///
    /// # Errors
    /// When it cannot be started.
    pub(super) fn spawn(mut command: Command) -> io::Result<ProcessTree> {
        let child = command.process_group(0).spawn()?;
        let pid = Pid::from_child(&child);
        let next_look = Instant::now() + LOOK_INTERVAL;
        Ok(ProcessTree { child, pid, seen: HashSet::new(), next_look, asked: None, status: None })
    }

    /// Returns the status of the program once it and its processes have ended. When the program ends by
    /// itself, its remaining processes are asked to end: workers whose launcher died would hold their port
    /// and memory during the next run. These are the rest of its group, and its descendants at the last scan;
    /// a daemon in its own session stays.
    ///
    /// # Errors
    /// When the program cannot be waited for.
    pub(super) fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        if self.status.is_none() && self.has_ended()? {
            // Not waited for yet, so that the number of the group is still its own.
            kill_process_group(self.pid, Signal::TERM).ok();
            let machine = Machine::read();
            let (_, members) =
                self.asked.get_or_insert_with(|| (Instant::now(), std::mem::take(&mut self.seen)));
            members.retain(|member| machine.is_alive(*member));
            // Nobody else can signal processes of other groups any more.
            members.iter().for_each(|member| kill(*member, Signal::TERM));
            members.extend(machine.group(self.pid));
            self.status = Some(self.child.wait()?);
        }
        if self.status.is_none() && Instant::now() > self.next_look {
            self.look()?;
        }
        let Some((since, members)) = &self.asked else { return Ok(self.status) };
        let machine = Machine::read();
        let alive = members.iter().filter(|member| machine.is_alive(**member));
        let mut alive: HashSet<Member> = alive.copied().collect();
        if since.elapsed() > PATIENCE {
            if self.status.is_none() {
                alive.extend(machine.tree(self.pid));
            }
            alive.iter().for_each(|member| kill(*member, Signal::KILL));
            if since.elapsed() > 2 * PATIENCE && self.status.is_some() {
                // Nothing ends these: they belong to another user, or wait for a device.
                alive.clear();
            }
        }
        Ok(self.status.filter(|_| alive.is_empty()))
    }

    /// Remembers the processes of the program.
    fn look(&mut self) -> io::Result<()> {
        let began = Instant::now();
        let members = Machine::read().tree(self.pid);
        // If the program ends during the scan, its processes have another parent already.
        if !self.has_ended()? {
            self.seen = members;
        }
        self.next_look = Instant::now() + LOOK_INTERVAL.max(began.elapsed() * LOOK_SHARE);
        Ok(())
    }

    /// True if the program has ended; it is not waited for.
    fn has_ended(&self) -> io::Result<bool> {
        let how = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        Ok(waitid(WaitId::Pid(self.pid), how)?.is_some())
    }

    /// Asks the program and its processes to end, once; [`ended`](Self::ended) kills them when they do not.
    pub(super) fn end(&mut self, signal: Signal) {
        if self.asked.is_some() {
            return;
        }
        self.asked = Some((Instant::now(), Machine::read().tree(self.pid)));
        if self.status.is_none() {
            kill_process_group(self.pid, signal).ok();
        }
    }

    /// Returns the number of processes at the last scan.
    pub(super) fn processes(&self) -> usize {
        self.seen.len()
    }

    /// Returns the bytes of memory that only the processes of the last scan hold; 0 before the first scan.
    pub(super) fn resident(&self) -> u64 {
        self.seen.iter().map(|(pid, _)| anonymous_bytes(*pid)).sum()
    }
}

impl Drop for ProcessTree {
    /// If this command fails, no process of the program is left running.
    fn drop(&mut self) {
        while let Ok(None) = self.ended() {
            self.end(Signal::TERM);
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Sends a signal to one process; an error means that it has just ended.
fn kill((pid, _): Member, signal: Signal) {
    // Never to 0 or less, which means several processes.
    if let Some(pid) = Some(pid).filter(|pid| *pid > 1).and_then(Pid::from_raw) {
        kill_process(pid, signal).ok();
    }
}

/// The processes of this machine, without zombies.
struct Machine(HashMap<i32, Process>);

impl Machine {
    fn read() -> Machine {
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        Machine(pids.filter_map(|pid| Some((pid.cast_signed(), Process::read(pid)?))).collect())
    }

    fn is_alive(&self, (pid, start): Member) -> bool {
        self.0.get(&pid).is_some_and(|process| process.start == start)
    }

    /// The process `root` and all that descend from it.
    fn tree(&self, root: Pid) -> HashSet<Member> {
        let root = root.as_raw_nonzero().get();
        let descends = |mut pid: i32| {
            // A chain of parents is short; a process that ends meanwhile cannot make it endless.
            for _ in 0..64 {
                if pid == root {
                    return true;
                }
                match self.0.get(&pid) {
                    Some(process) => pid = process.parent,
                    None => return false,
                }
            }
            false
        };
        self.members(|pid, _| descends(pid)).collect()
    }

    /// The processes of a group.
    fn group(&self, leader: Pid) -> impl Iterator<Item = Member> {
        let leader = leader.as_raw_nonzero().get();
        self.members(move |_, process| process.group == leader)
    }

    fn members(&self, is_one: impl Fn(i32, &Process) -> bool) -> impl Iterator<Item = Member> {
        let ones = self.0.iter().filter(move |(pid, process)| is_one(**pid, process));
        ones.map(|(pid, process)| (*pid, process.start))
    }
}

/// Returns the resident bytes of a process that no file backs: `RssAnon` of `/proc/PID/status`.
fn anonymous_bytes(pid: i32) -> u64 {
    let anonymous = HostFiles::default().status(&pid.to_string()).and_then(|[_, anonymous, ..]| anonymous);
    anonymous.map_or(0, i64::cast_unsigned)
}

/// The bytes of memory that this machine has left; `None` where it does not say.
pub(super) fn available_bytes() -> Option<u64> {
    let [_, available, ..] = HostFiles::default().machine()?;
    available.map(i64::cast_unsigned)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::process::Stdio;

    use super::*;

    /// Waits until the tree has ended.
    fn wait(tree: &mut ProcessTree) -> ExitStatus {
        loop {
            if let Some(status) = tree.ended().unwrap() {
                return status;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_program_ends_with_its_own_status() {
        let mut command = Command::new("sh");
        command.args(["-c", "exit 7"]);
        assert_eq!(wait(&mut ProcessTree::spawn(command).unwrap()).code(), Some(7));
        assert!(available_bytes().unwrap() > 0);
    }

    #[test]
    fn what_a_program_leaves_ends_with_it() {
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 600 & setsid sleep 600 & read line; exit 7"]).stdin(Stdio::piped());
        let mut tree = ProcessTree::spawn(command).unwrap();
        while tree.processes() < 3 {
            assert!(tree.ended().unwrap().is_none());
            std::thread::sleep(Duration::from_millis(5));
        }
        let members = tree.seen.clone();
        drop(tree.child.stdin.take());
        assert_eq!(wait(&mut tree).code(), Some(7));
        let machine = Machine::read();
        assert!(members.iter().all(|member| !machine.is_alive(*member)), "{members:?}");

        // A process that no scan saw is found by its group.
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 600 > /dev/null & echo $!"]).stdout(Stdio::piped());
        let mut tree = ProcessTree::spawn(command).unwrap();
        let mut text = String::new();
        tree.child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        wait(&mut tree);
        assert!(Process::read(text.trim().parse().unwrap()).is_none());
    }

    #[test]
    fn a_process_with_half_a_character_in_its_name_is_alive() {
        let mut command = Command::new("sh");
        command.args(["-c", "printf 'a\\303' > /proc/$$/comm; echo; read line"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        let pid = child.id() as i32;
        assert!(fs::read_to_string(format!("/proc/{pid}/stat")).is_err());
        let found = (Process::read(pid.cast_unsigned()).is_some(), anonymous_bytes(pid) > 0);
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!(found, (true, true));
    }

    #[test]
    fn a_program_that_is_asked_to_end_takes_its_processes_along() {
        // The second is in a session of its own, as torchrun's workers are.
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 600 & setsid sleep 600 & wait"]);
        let mut tree = ProcessTree::spawn(command).unwrap();
        let root = tree.pid;
        let members = loop {
            let members = Machine::read().tree(root);
            let sleeps = |pid: i32| {
                fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "sleep\n")
            };
            if members.iter().filter(|(pid, _)| sleeps(*pid)).count() == 2 {
                break members;
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        tree.look().unwrap();
        assert!(tree.resident() > 0);
        tree.end(Signal::TERM);
        wait(&mut tree);
        let machine = Machine::read();
        assert!(members.iter().all(|member| !machine.is_alive(*member)), "{members:?}");
    }
}
