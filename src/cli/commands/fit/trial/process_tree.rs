//! A program and the processes that it started: ends them and measures their memory.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use memtrace_trace::host::HostFiles;
use memtrace_util::process::Process;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid};

use crate::grace_period::GracePeriod;

/// The minimum interval between two scans for the processes of a program.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);
/// The interval between two scans is at least this many times the duration of a scan, because a machine may
/// have thousands of processes.
const LOOK_SHARE: u32 = 50;

/// A process: its id, and the clock tick at which it started. The tick distinguishes processes that had the
/// same id one after the other.
type Member = (i32, u64);

/// A program in a process group of its own.
pub(crate) struct ProcessTree {
    child: Child,
    pid: Pid,
    /// The program and its processes at the last scan, while the program runs.
    seen: HashSet<Member>,
    /// The time of the next scan.
    next_look: Instant,
    /// Begun when the processes were asked to end, with these processes; `None` before.
    asked: Option<(GracePeriod, HashSet<Member>)>,
    /// The status of the program, once it has ended.
    status: Option<ExitStatus>,
}

impl ProcessTree {
    /// Starts a program. A signal from the terminal does not reach the program; see [`end`](Self::end).
    ///
    /// # Errors
    /// When the program cannot be started.
    pub(crate) fn spawn(mut command: Command) -> io::Result<ProcessTree> {
        let child = command.process_group(0).spawn()?;
        let pid = Pid::from_child(&child);
        let next_look = Instant::now() + LOOK_INTERVAL;
        Ok(ProcessTree { child, pid, seen: HashSet::new(), next_look, asked: None, status: None })
    }

    /// Returns the status of the program once it and its processes have ended, and `None` before.
    ///
    /// If the program ends by itself, its remaining processes are asked to end: workers whose launcher died
    /// would keep their port and memory during the next trial. The remaining processes are the rest of the
    /// program's group, and its descendants at the last scan. A daemon in its own session keeps running if no
    /// scan found it.
    ///
    /// # Errors
    /// When the program cannot be waited for.
    pub(crate) fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        if self.status.is_none() && self.has_ended()? {
            // The program is not reaped yet, so no other process group can have its id.
            kill_process_group(self.pid, Signal::TERM).ok();
            let machine = Machine::read();
            let (_, members) =
                self.asked.get_or_insert_with(|| (GracePeriod::begin(), std::mem::take(&mut self.seen)));
            members.retain(|member| machine.is_alive(*member));
            // Processes in other groups need a signal of their own, because the launcher that could have
            // ended them has ended.
            members.iter().for_each(|member| kill(*member, Signal::TERM));
            members.extend(machine.group(self.pid));
            self.status = Some(self.child.wait()?);
        }
        if self.status.is_none() && Instant::now() > self.next_look {
            self.look()?;
        }
        let Some((grace, members)) = &self.asked else { return Ok(self.status) };
        let machine = Machine::read();
        let alive = members.iter().filter(|member| machine.is_alive(**member));
        let mut alive: HashSet<Member> = alive.copied().collect();
        if grace.is_over() {
            if self.status.is_none() {
                alive.extend(machine.tree(self.pid));
            }
            alive.iter().for_each(|member| kill(*member, Signal::KILL));
            if grace.is_hopeless() && self.status.is_some() {
                alive.clear();
            }
        }
        Ok(self.status.filter(|_| alive.is_empty()))
    }

    /// Scans for the processes of the program and stores them.
    fn look(&mut self) -> io::Result<()> {
        let began = Instant::now();
        let members = Machine::read().tree(self.pid);
        // If the program ended during the scan, its processes got another parent, so the scan may have missed
        // them.
        if !self.has_ended()? {
            self.seen = members;
        }
        self.next_look = Instant::now() + LOOK_INTERVAL.max(began.elapsed() * LOOK_SHARE);
        Ok(())
    }

    /// Returns true if the program has ended. Does not reap the program.
    fn has_ended(&self) -> io::Result<bool> {
        let how = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        Ok(waitid(WaitId::Pid(self.pid), how)?.is_some())
    }

    /// Asks the program and its processes to end, once. [`ended`](Self::ended) kills the processes that do
    /// not end in time.
    pub(crate) fn end(&mut self, signal: Signal) {
        if self.asked.is_some() {
            return;
        }
        self.asked = Some((GracePeriod::begin(), Machine::read().tree(self.pid)));
        if self.status.is_none() {
            kill_process_group(self.pid, signal).ok();
        }
    }

    /// Returns the number of processes at the last scan.
    pub(crate) fn processes(&self) -> usize {
        self.seen.len()
    }

    /// Returns the anonymous memory of the processes of the last scan, in bytes; 0 before the first scan.
    pub(crate) fn resident(&self) -> u64 {
        self.seen.iter().map(|(pid, _)| anonymous_bytes(*pid)).sum()
    }
}

impl Drop for ProcessTree {
    /// Ends the program and waits for it, so that none of its processes outlives this command, even after an
    /// error.
    fn drop(&mut self) {
        while let Ok(None) = self.ended() {
            self.end(Signal::TERM);
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Sends a signal to one process. Ignores an error, because the process may just have ended.
fn kill((pid, _): Member, signal: Signal) {
    // To `kill`, an id of 0 or less means several processes. Process 1 is init, which is never a process of
    // the program.
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

    /// Returns the process `root` and all its descendants.
    fn tree(&self, root: Pid) -> HashSet<Member> {
        let root = root.as_raw_nonzero().get();
        let descends = |mut pid: i32| {
            // Chains of parents are short. The limit prevents an endless loop if ids are reused during the
            // scan.
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

    /// Returns the processes of a group.
    fn group(&self, leader: Pid) -> impl Iterator<Item = Member> {
        let leader = leader.as_raw_nonzero().get();
        self.members(move |_, process| process.group == leader)
    }

    fn members(&self, is_one: impl Fn(i32, &Process) -> bool) -> impl Iterator<Item = Member> {
        let ones = self.0.iter().filter(move |(pid, process)| is_one(**pid, process));
        ones.map(|(pid, process)| (*pid, process.start))
    }
}

/// Returns the resident bytes of a process that are not backed by a file: `RssAnon` in `/proc/PID/status`.
fn anonymous_bytes(pid: i32) -> u64 {
    let anonymous = HostFiles::default().status(&pid.to_string()).and_then(|[_, anonymous, ..]| anonymous);
    anonymous.map_or(0, i64::cast_unsigned)
}

/// Returns the memory in bytes that is available on this machine, or `None` if it is unknown.
pub(crate) fn available_bytes() -> Option<u64> {
    let [_, available, ..] = HostFiles::default().machine()?;
    available.map(i64::cast_unsigned)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::process::Stdio;

    use super::*;

    /// Waits until the program and its processes have ended, and returns the program's status.
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

        // `sh` ends before the first scan, so `sleep` is known only by its process group: it is ended, too.
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
        // The second `sleep` is in a session of its own, as torchrun's workers are: both are ended.
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
