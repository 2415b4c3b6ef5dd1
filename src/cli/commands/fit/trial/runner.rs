//! Makes the trials of `memtrace fit`, some of them side by side, until all trials have ended or a signal asks
//! this command to end.

use std::collections::VecDeque;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::ArgMatches;
use rustix::process::Signal;

use super::launch::{PlannedTrial, RunningTrial, TrialSetup};
use super::outcome::{Trial, TrialOutcome};
use super::process_tree::available_bytes;
use super::progress::Progress;
use crate::child_env::PhantomArgs;
use crate::out_folder::OutFolder;
use crate::signals;

/// The interval between two checks of the trials.
const INTERVAL: Duration = Duration::from_millis(10);
/// The interval between two measurements of the trials' memory.
const MEMORY_INTERVAL: Duration = Duration::from_millis(200);
/// The share of this machine's free memory that new trials may use.
const MEMORY_SHARE: f64 = 0.8;

/// The memory of a trial is unknown if the trial ends before it is measured. After this many trials, several trials
/// may run at once even if no trial was measured.
const UNSEEN: usize = 2;

/// How many trials may be in progress at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Parallelism {
    /// One, because the first trial is not over yet. It runs alone, to show how many processes and how much
    /// memory a trial needs.
    AfterTheFirst,
    /// At most this many, which the cores allow. Another trial starts only while there is memory for it.
    WithMemory(usize),
    /// At most this many, as the user requested.
    Number(usize),
}

/// A trial in progress. The caller of [`TrialRunner::start`] gives the ticket, and gets it back with the result.
struct ActiveTrial<T> {
    ticket: T,
    running: RunningTrial,
    /// The number of GPUs of the trial, or 1 if the trials do not have a process per GPU.
    gpus: u64,
    /// True if another trial was in progress at any time during this trial.
    has_company: bool,
}

/// The trials in progress.
struct ActiveTrials<T>(Vec<ActiveTrial<T>>);

impl<T> Drop for ActiveTrials<T> {
    /// Asks all trials to end. Dropping a trial waits for it, so without this, each would be asked only after the
    /// previous one has ended.
    fn drop(&mut self) {
        self.0.iter_mut().for_each(|active| active.running.tree.end(Signal::TERM));
    }
}

/// Starts the trials, reports each one, and records the signal that ended them.
pub(crate) struct TrialRunner<'a, T> {
    matches: &'a ArgMatches,
    out: OutFolder,
    forwarder: signals::Forwarder,
    progress: Progress,
    parallelism: Parallelism,
    running: ActiveTrials<T>,
    /// The trials that failed while another trial was in progress. Each is repeated alone.
    again: VecDeque<(T, PlannedTrial)>,
    /// True while a trial is repeated alone.
    is_alone: bool,
    /// The maximum number of GPUs of a trial; 1 with `--ranks`, because then every number of GPUs runs the same
    /// ranks.
    most_gpus: u64,
    /// The most memory that one trial has needed so far, in bytes, scaled to a trial on
    /// [`most_gpus`](Self::most_gpus) GPUs.
    resident: u64,
    looked: Instant,
    /// The number of trials begun so far.
    begun: usize,
    ended_by: Option<i32>,
}

impl<'a, T: Copy> TrialRunner<'a, T> {
    /// Prepares trials on at most `most_gpus` GPUs.
    ///
    /// # Errors
    /// When the output folder cannot be created, or signals cannot be received.
    pub(crate) fn new(matches: &'a ArgMatches, most_gpus: u64) -> Result<TrialRunner<'a, T>> {
        let out = OutFolder::new(matches.get_one::<PathBuf>("out"))?;
        let progress = Progress::new(&out.folder);
        let forwarder = signals::Forwarder::start()?;
        // Do not forward signals: each trial is in its own process group, and this command ends it itself.
        forwarder.no_child();
        // On a real GPU, several trials at once would take memory from one another, so they run one at a time.
        let parallelism = match matches.get_one::<u64>("jobs") {
            _ if !matches.contains_id("phantom") => Parallelism::Number(1),
            Some(jobs) => Parallelism::Number(*jobs as usize),
            None => Parallelism::AfterTheFirst,
        };
        Ok(TrialRunner {
            matches,
            out,
            forwarder,
            progress,
            parallelism,
            running: ActiveTrials(Vec::new()),
            again: VecDeque::new(),
            is_alone: false,
            // With `--ranks`, the same ranks run for every number of GPUs, so memory is not scaled by that
            // number.
            most_gpus: if matches.contains_id("ranks") { 1 } else { most_gpus.max(1) },
            resident: 0,
            looked: Instant::now(),
            begun: 0,
            ended_by: None,
        })
    }

    /// Returns the number of trials that may be started now.
    pub(crate) fn room(&self) -> usize {
        if !self.again.is_empty() || self.is_alone || self.forwarder.asked_to_end().is_some() {
            return 0;
        }
        let jobs = match self.parallelism {
            Parallelism::AfterTheFirst => 1,
            Parallelism::WithMemory(jobs) => {
                jobs.min(self.running.0.len().saturating_add(self.room_in_memory()))
            }
            Parallelism::Number(jobs) => jobs,
        };
        jobs.saturating_sub(self.running.0.len())
    }

    /// Returns the number of further trials for which this machine has memory. If no trial is in progress, this
    /// is at least 1, so that the search goes on.
    fn room_in_memory(&self) -> usize {
        let running = &self.running.0;
        let Some(free) = available_bytes().filter(|_| self.resident > 0) else { return usize::MAX };
        // A trial that has just begun has not allocated all its memory yet. Reserve the memory that it is
        // expected to need.
        let owed = running.iter().map(|active| self.resident.saturating_sub(active.running.tree.resident()));
        let free = ((free as f64 * MEMORY_SHARE) as u64).saturating_sub(owed.sum());
        let room = (free / self.resident) as usize;
        if running.is_empty() { room.max(1) } else { room }
    }

    /// Starts a trial.
    ///
    /// # Errors
    /// Same as for [`TrialSetup::start`].
    pub(crate) fn start(&mut self, ticket: T, planned: PlannedTrial) -> Result<()> {
        self.begun += 1;
        let card = planned.card.as_deref().filter(|_| self.most_gpus > 1);
        let gpus = card.and_then(|card| Some(PhantomArgs::of_card(self.matches, card).ok()?.count()));
        let running = TrialSetup { matches: self.matches, out: &self.out }.start(planned)?;
        let has_company = !self.running.0.is_empty();
        self.running.0.iter_mut().for_each(|active| active.has_company = true);
        self.running.0.push(ActiveTrial { ticket, running, gpus: gpus.unwrap_or(1), has_company });
        self.show_progress();
        Ok(())
    }

    /// Waits for a trial to end. Returns `None` if no trial is left, or if a signal has ended all trials; see
    /// [`ended_by`](Self::ended_by).
    ///
    /// # Errors
    /// When a trial cannot be waited for, or its trace cannot be read.
    pub(crate) fn next_ended(&mut self) -> Result<Option<(T, Trial)>> {
        loop {
            // Check here, too, because a signal may have arrived while a trace was read.
            if let Some(signal) = self.forwarder.asked_to_end() {
                self.ended_by = Some(signal);
                self.end_all(Signal::from_named_raw(signal).unwrap_or(Signal::TERM))?;
                return Ok(None);
            }
            if self.running.0.is_empty() {
                let Some((ticket, planned)) = self.again.pop_front() else { return Ok(None) };
                self.is_alone = true;
                self.start(ticket, planned)?;
            }
            self.look_at_memory();
            let mut found = None;
            for (index, active) in self.running.0.iter_mut().enumerate() {
                if let Some(status) = active.running.tree.ended().context("cannot wait for the program")? {
                    found = Some((index, status));
                    break;
                }
            }
            let Some((index, status)) = found else {
                std::thread::sleep(INTERVAL);
                continue;
            };
            let ActiveTrial { ticket, running, gpus, has_company } = self.running.0.remove(index);
            let planned = running.planned.clone();
            let trial = running.finish(status)?;
            self.progress.clear();
            if matches!(trial.outcome, TrialOutcome::Failed(..)) && has_company && !self.is_alone {
                // The other trial may be the cause: both may need the same port, or together more memory than
                // this machine has. So drop the result and repeat the trial alone.
                fs::remove_dir_all(&trial.files).ok();
                self.progress.say(&format!(
                    "{}: failed while another trial was active; it runs again, alone",
                    trial.label
                ));
                self.again.push_back((ticket, planned));
                continue;
            }
            if std::mem::take(&mut self.is_alone) && !matches!(trial.outcome, TrialOutcome::Failed(..)) {
                self.progress.say(
                    "trials of this program interfere with each other: from now on, they run \
                                   one at a time",
                );
                self.parallelism = Parallelism::Number(1);
            }
            self.progress.tried(&trial);
            self.set_parallelism(&trial, gpus);
            self.show_progress();
            return Ok(Some((ticket, trial)));
        }
    }

    /// Ends the unwanted trials in progress, and drops the unwanted trials that were to be repeated.
    ///
    /// # Errors
    /// When a trial cannot be waited for.
    pub(crate) fn cancel(&mut self, unwanted: impl Fn(T) -> bool) -> Result<()> {
        self.again.retain(|(ticket, _)| !unwanted(*ticket));
        let (ending, kept) =
            std::mem::take(&mut self.running.0).into_iter().partition(|active| unwanted(active.ticket));
        self.running.0 = kept;
        self.end(ending, Signal::TERM)
    }

    fn end_all(&mut self, signal: Signal) -> Result<()> {
        let ending = std::mem::take(&mut self.running.0);
        self.end(ending, signal)
    }

    fn end(&mut self, mut ending: Vec<ActiveTrial<T>>, signal: Signal) -> Result<()> {
        ending.iter_mut().for_each(|active| active.running.tree.end(signal));
        for active in &mut ending {
            while active.running.tree.ended().context("cannot wait for the program")?.is_none() {
                std::thread::sleep(INTERVAL);
            }
        }
        self.progress.clear();
        ending.into_iter().for_each(|active| active.running.discard());
        Ok(())
    }

    /// Updates the most memory that one trial has needed. Larger values may need more memory than the first trial
    /// did. Does nothing if the user set the number of trials (`--jobs`).
    fn look_at_memory(&mut self) {
        if !matches!(self.parallelism, Parallelism::Number(_)) && self.looked.elapsed() > MEMORY_INTERVAL {
            self.looked = Instant::now();
            let most = self.running.0.iter().map(|active| {
                scaled(
                    active.running.tree.resident(),
                    active.running.tree.processes(),
                    active.gpus,
                    self.most_gpus,
                )
            });
            self.resident = self.resident.max(most.max().unwrap_or(0));
        }
    }

    /// Sets how many trials may be in progress, once `first` has run alone, on `gpus` GPUs: as many as this
    /// machine's cores allow with the number of processes of `first`.
    ///
    /// If no trial lasted long enough to measure its memory, the next trial is alone, too, but not after
    /// [`UNSEEN`] trials.
    fn set_parallelism(&mut self, first: &Trial, gpus: u64) {
        if self.parallelism == Parallelism::AfterTheFirst && (self.resident > 0 || self.begun >= UNSEEN) {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            let processes = first.peak.processes.max(1);
            let processes = scaled(processes as u64, processes, gpus, self.most_gpus);
            self.parallelism = Parallelism::WithMemory((cores / processes as usize).max(1));
        }
    }

    fn show_progress(&self) {
        let values: Vec<&str> =
            self.running.0.iter().map(|active| active.running.planned.label.as_str()).collect();
        if !values.is_empty() {
            self.progress.trying(&values.join(", "), self.begun);
        }
    }

    /// Returns the signal that ended the trials, or `None` if no signal has ended them.
    pub(crate) fn ended_by(&self) -> Option<i32> {
        self.ended_by
    }

    /// Ends the series of trials. From then on, signals end this command as usual.
    pub(crate) fn stop(self) -> Ended {
        self.forwarder.stop();
        Ended { out: self.out, by: self.ended_by }
    }
}

/// A series of trials that has ended.
pub(crate) struct Ended {
    out: OutFolder,
    by: Option<i32>,
}

impl Ended {
    /// Returns the exit status of this command. It is `status`, unless a signal ended the trials.
    pub(crate) fn status(self, status: ExitCode) -> ExitCode {
        match self.by {
            Some(signal) => {
                drop(self.out);
                signals::end_by(signal)
            }
            None => status,
        }
    }
}

/// Scales `amount` from a trial on `gpus` GPUs to a trial on `most` GPUs. If the trial has fewer processes than
/// GPUs, the amount does not depend on the number of GPUs, and is returned unchanged.
fn scaled(amount: u64, processes: usize, gpus: u64, most: u64) -> u64 {
    if processes as u64 >= gpus { amount.saturating_mul(most) / gpus.max(1) } else { amount }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_on_more_gpus_takes_more_where_each_has_a_process() {
        assert_eq!(scaled(100, 1, 1, 8), 800);
        // 3 processes on 2 GPUs, such as a launcher and one process per GPU: the amount grows with the GPUs.
        assert_eq!(scaled(300, 3, 2, 8), 1200);
        // A single process that uses all 16 GPUs: on 32 GPUs, it needs the same amount.
        assert_eq!(scaled(100, 1, 16, 32), 100);
        assert_eq!(scaled(u64::MAX, 1, 1, 8), u64::MAX);
    }
}
