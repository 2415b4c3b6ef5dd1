//! Starts the ranks of a job and waits for them.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use memtrace_machine::{MACHINE_VARIABLE, RANKS_VARIABLE, STORE_VARIABLE};
use memtrace_trace::text::printable;
use rustix::process::{Pid, Signal};

use crate::child_env::{PhantomArgs, Scratch, TracerFacts, spare_foreign_program, traced_command};
use crate::cluster::job::Job;
use crate::cluster::store::RankStores;
use crate::cluster::store_values::Answered;
use crate::grace_period::GracePeriod;
use crate::signals::Forwarder;
use crate::terminal;

/// The Python files that run inside a rank's process and answer for the other ranks.
const PYTHON: [(&str, &str); 4] = [
    ("sitecustomize.py", include_str!("python/sitecustomize.py")),
    ("memtrace_stand_ins.py", include_str!("python/stand_ins.py")),
    ("memtrace_host_results.py", include_str!("python/host_results.py")),
    ("memtrace_waits.py", include_str!("python/waits.py")),
];
/// The interval at which the ranks are checked.
const INTERVAL: Duration = Duration::from_millis(10);
/// The maximum number of keys that a message about the store names.
const SHOWN: usize = 4;

/// The settings that all ranks of a launch share.
pub(crate) struct Launch<'a> {
    pub(crate) job: &'a Job,
    pub(crate) phantom: &'a PhantomArgs<'a>,
    pub(crate) settings: &'a [(&'static str, OsString)],
    /// The folder of the traces.
    pub(crate) out: &'a Path,
    pub(crate) run_id: &'a str,
}

/// How a launch ended.
#[derive(Debug)]
pub(crate) enum Ended {
    /// The program cannot be started.
    NotStarted(OsString, io::Error),
    /// A signal asked for the end before a rank was started.
    BySignal(i32),
    /// All ranks have ended. The fields are the status of the first rank that failed, or else of the last
    /// rank that ended, and the reports of the tracers.
    With(ExitStatus, TracerFacts),
}

/// A rank that was started, with its temporary folder and its stores.
struct Member {
    rank: u32,
    child: Child,
    scratch: Scratch,
    stores: Arc<RankStores>,
    status: Option<ExitStatus>,
    /// True if the rank was sent SIGTERM, which happens only once.
    asked: bool,
}

impl Launch<'_> {
    /// Runs the requested ranks of the job. If all ranks are real, they need one another, so they run at the
    /// same time. A rank among stand-ins needs no other rank, so at most one per core of the machine runs at
    /// a time.
    ///
    /// # Errors
    /// When a rank cannot be prepared. When this returns, no rank is running.
    pub(crate) fn run(&self) -> Result<Ended> {
        let forwarder = Forwarder::start()?;
        // There is no single main child: `add_child` registers each rank, and signals go to all of them.
        forwarder.no_child();
        let mut running = Vec::new();
        let ended = self.run_all(&mut running, &forwarder);
        // After an error, ranks may still be running. They must end before their members are dropped, because
        // dropping a member removes the folder that its rank uses.
        let ending = GracePeriod::begin();
        while !running.is_empty() {
            end_all(&mut running, ending);
            forwarder.reap_children(|| reap(&mut running));
            running.retain(|member| member.status.is_none());
            std::thread::sleep(INTERVAL);
        }
        forwarder.stop();
        ended
    }

    /// Runs the loop of [`Launch::run`]. After an error, `running` still contains the running ranks.
    fn run_all(&self, running: &mut Vec<Member>, forwarder: &Forwarder) -> Result<Ended> {
        let at_once = match self.job.has_stand_ins() {
            true => std::thread::available_parallelism().map_or(2, usize::from).max(2),
            false => usize::MAX,
        };
        let real_port = if self.job.has_stand_ins() { 0 } else { free_port()? };
        let mut waiting: VecDeque<u32> = self.job.ranks.iter().copied().collect();
        let (mut status, mut tracer) = (None::<ExitStatus>, TracerFacts::default());
        // Begun when the other ranks were asked to end because one had failed; `None` before.
        let mut ending: Option<GracePeriod> = None;
        while !waiting.is_empty() || !running.is_empty() {
            while running.len() < at_once && ending.is_none() && forwarder.asked_to_end().is_none() {
                let Some(rank) = waiting.pop_front() else { break };
                let member = match self.start(rank, real_port)? {
                    Ok(member) => member,
                    Err(error) => {
                        let program = self.job.command(rank).into_iter().next().unwrap_or_default();
                        return Ok(Ended::NotStarted(program, error));
                    }
                };
                forwarder.add_child(member.child.id());
                running.push(member);
                // A signal that arrived during the start of the rank did not reach it, so send the signal
                // now.
                if let Some(signal) = forwarder.asked_to_end().and_then(Signal::from_named_raw) {
                    kill_all(&running[running.len() - 1..], signal);
                }
            }
            if ending.is_some() || forwarder.asked_to_end().is_some() {
                waiting.clear();
            }
            forwarder.reap_children(|| reap(running));
            for member in running.extract_if(.., |member| member.status.is_some()) {
                tracer = tracer.and(member.scratch.tracer());
                note_answered(&member);
                // The message below is only for a rank that ended normally. A rank that failed or was asked
                // to end may have ended before it needed a store.
                let is_whole = member.status.is_some_and(|status| status.success())
                    && forwarder.asked_to_end().is_none();
                if is_whole && self.job.has_stand_ins() && !member.stores.were_joined() {
                    terminal::say(&format!(
                        "rank {} never contacted a stand-in, so it ran as if it were alone: the program \
                         does not use torch.distributed, or its Python does not read PYTHONPATH (python -I, \
                         or a script that sets it anew)",
                        member.rank
                    ));
                }
                if self.job.by_stage && member.rank == 0 {
                    waiting.extend(further_stages(&member.stores, is_whole));
                }
                member.stores.close();
                let Some(ended) = member.status else { continue };
                if status.is_none_or(|status| status.success()) {
                    status = Some(ended);
                }
                // Report only the first failure: later ones are results of the request to end.
                if !ended.success() && (self.job.ranks.len() > 1 || self.job.by_stage) && ending.is_none() {
                    terminal::say(&format!("rank {} failed ({ended})", member.rank));
                    if !self.job.has_stand_ins() {
                        ending = Some(GracePeriod::begin());
                    }
                }
            }
            if let Some(ending) = ending {
                // The other ranks would wait for the failed rank, so end them, as torchrun does.
                end_all(running, ending);
            }
            if !running.is_empty() {
                std::thread::sleep(INTERVAL);
            }
        }
        match (status, forwarder.asked_to_end()) {
            (Some(status), _) => Ok(Ended::With(status, tracer)),
            (None, Some(signal)) => Ok(Ended::BySignal(signal)),
            (None, None) => bail!("no rank was started"),
        }
    }

    /// Starts a rank.
    fn start(&self, rank: u32, real_port: u16) -> Result<Result<Member, io::Error>> {
        let job = self.job;
        let node = rank / job.per_node;
        let scratch = Scratch::new(&format!("{}-r{rank}", self.run_id))?;
        let command = job.command(rank);
        let mut child = traced_command(&scratch, &command, self.out, self.run_id, Some(self.phantom))?;
        child.envs(self.settings.iter().cloned());
        spare_foreign_program(&mut child, &command[0]);
        // The name of the machine has the number of the node, because the ranks of one node share its cards.
        child.env(MACHINE_VARIABLE, format!("{}-n{node}", self.run_id));
        let stores = RankStores::new(job.world(), rank);
        let mut port = real_port;
        if job.has_stand_ins() {
            port = stores.port("").context("cannot serve the rendezvous store")?;
            let folder = python_folder(&scratch)?;
            // An empty entry in PYTHONPATH means the current folder, so do not add one if the variable is
            // empty.
            let existing = std::env::var_os("PYTHONPATH").filter(|paths| !paths.is_empty());
            let mut paths = std::env::join_paths([folder]).context(
                "PYTHONPATH cannot name the folder of temporary files; set TMPDIR to one without a colon",
            )?;
            if let Some(existing) = existing {
                paths.push(":");
                paths.push(existing);
            }
            child.env("PYTHONPATH", paths);
            child.env(STORE_VARIABLE, port.to_string()).env(RANKS_VARIABLE, job.ranks_of_world(rank));
        }
        child.envs(job.environment(rank, port));
        Ok(child.spawn().map(|child| Member { rank, child, scratch, stores, status: None, asked: false }))
    }
}

/// Stores the status of each member that has ended, and returns the process ids of these members.
fn reap(running: &mut [Member]) -> Vec<u32> {
    let mut ended = Vec::new();
    for member in running {
        // A wait for a child of ours does not fail: `keep_status_of_children` sees to it.
        if let Ok(Some(status)) = member.child.try_wait() {
            member.status = Some(status);
            ended.push(member.child.id());
        }
    }
    ended
}

/// Sends SIGTERM to all members that were not sent it yet, or SIGKILL to all if they did not end in time.
fn end_all(running: &mut [Member], ending: GracePeriod) {
    if ending.is_over() {
        return kill_all(running, Signal::KILL);
    }
    for member in running {
        if !std::mem::replace(&mut member.asked, true) {
            kill_all(std::slice::from_ref(member), Signal::TERM);
        }
    }
}

/// Sends a signal to the process of each member, but not to processes that it started.
fn kill_all(running: &[Member], signal: Signal) {
    for member in running {
        // An error means that the process has just ended.
        rustix::process::kill_process(Pid::from_child(&member.child), signal).ok();
    }
}

/// Returns the other ranks of the first rank's pipeline, one per stage, and prints them. Without a pipeline,
/// returns no ranks and, if the first rank ended without an error (`is_whole`), prints an explanation.
fn further_stages(stores: &RankStores, is_whole: bool) -> Vec<u32> {
    let mut stages = stores.pipeline();
    let has_first = stages.remove(&0);
    if !has_first || stages.is_empty() {
        if is_whole {
            terminal::say(
                "--ranks one-per-stage: rank 0 reported no pipeline, so it ran alone: its program created \
                 neither a device mesh with `pp` and another dimension nor a pipeline of Megatron-core. Name \
                 the ranks instead, such as --ranks 0,8",
            );
        }
        return Vec::new();
    }
    let ranks = stages.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
    terminal::say(&format!("running one rank of each other stage of rank 0's pipeline: {ranks}"));
    stages.into_iter().collect()
}

/// Reports the keys for which a rank waited and that a stand-in set, with the lines of the script that
/// waited.
fn note_answered(member: &Member) {
    let (own, empty): (Vec<_>, Vec<_>) =
        member.stores.answered().into_iter().partition(|(_, answered)| answered.is_own);
    let note = |keys: &[(String, Answered)], what: &str| {
        if keys.is_empty() {
            return;
        }
        let key = |(key, answered): &(String, Answered)| match &answered.place {
            Some(place) => format!("{} at {}", printable(key), printable(place)),
            None => printable(key).into_owned(),
        };
        let shown = keys.iter().take(SHOWN).map(key).collect::<Vec<_>>().join(", ");
        let more =
            if keys.len() > SHOWN { format!(" and {} more", keys.len() - SHOWN) } else { String::new() };
        terminal::say(&format!(
            "rank {} waited for keys of the store that no rank set, and got {what}: {shown}{more}",
            member.rank
        ));
    };
    note(&empty, "an empty value");
    note(&own, "its own value instead of another rank's");
}

/// Writes the files of [`PYTHON`] into a folder for `PYTHONPATH`.
fn python_folder(scratch: &Scratch) -> Result<PathBuf> {
    let folder = scratch.folder.join("stand-ins");
    let write = || -> io::Result<()> {
        fs::create_dir(&folder)?;
        PYTHON.iter().try_for_each(|(name, text)| fs::write(folder.join(name), text))
    };
    write().with_context(|| format!("cannot write {}", folder.display()))?;
    Ok(folder)
}

/// Returns a currently free port for the store that rank 0 will serve.
fn free_port() -> Result<u16> {
    let listener = std::net::TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0))
        .context("no port is free for the rendezvous store")?;
    Ok(listener.local_addr()?.port())
}
