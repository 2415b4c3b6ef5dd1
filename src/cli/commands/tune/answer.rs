//! The answer of `memtrace tune`, as text and as JSON.

use memtrace_analysis::read::input::Input;
use memtrace_analysis::read::stream::TraceFile;
use memtrace_analysis::render::heading::heading;
use memtrace_analysis::render::numbers::{count, counted, percent, share};
use memtrace_analysis::render::printer::{Cell, Printer, Side, Style, Table};
use memtrace_analysis::requests::Requests;
use memtrace_trace::units::Unit;
use serde_json::{Value, json};

use super::replays::Replays;

/// A saving below this share of the reserved memory is not worth a change.
const LEAST_SAVING: f64 = 0.01;

/// The settings and the result of one replay.
struct Trial {
    settings: String,
    peak_reserved: i64,
    peak_allocated: i64,
    /// The number of bytes that were reserved but not active at the peak of allocated memory; `None` if the
    /// replay ran out of memory before that peak.
    unused_at_peak: Option<i64>,
    retries: i64,
    /// How many segments the allocator allocated from CUDA and freed again, as one sum. `None` with
    /// expandable segments, which torch does not count.
    driver_calls: Option<i64>,
    outcome: ReplayOutcome,
}

/// The outcome of a replay.
#[derive(PartialEq)]
enum ReplayOutcome {
    Fits,
    /// The replay fits, although this many of its requests ran out of memory in the trace.
    Survives(i64),
    /// The replay ran out of memory. The fields are the step, if the trace has steps, and the size of the
    /// request in bytes.
    OutOfMemory(Option<i64>, i64),
    /// The replay failed for another reason, which the field describes.
    Failed(String),
}

/// The replays of a run, and the trace whose requests they repeat.
pub(super) struct TuneAnswer<'a> {
    input: &'a Input,
    trace: &'a TraceFile,
    requests: &'a Requests,
    torch: String,
    /// The JSON of the replay with the run's own settings.
    own: Value,
    /// The replays from best to worst: replays that fit come first, then those with fewer failed requests,
    /// then those with less reserved memory.
    trials: Vec<Trial>,
    /// The index of the replay with the run's own settings.
    own_index: usize,
}

impl<'a> TuneAnswer<'a> {
    /// Creates the answer from the replays. The first replay has the run's own settings.
    pub(super) fn new(
        input: &'a Input,
        trace: &'a TraceFile,
        requests: &'a Requests,
        settings: &[String],
        replays: Replays,
    ) -> TuneAnswer<'a> {
        let mut trials: Vec<(usize, Trial)> =
            replays.answers.iter().zip(settings).map(trial).enumerate().collect();
        trials.sort_by_key(|(index, trial)| {
            let rank = match trial.outcome {
                ReplayOutcome::Survives(_) | ReplayOutcome::Fits => 0,
                ReplayOutcome::OutOfMemory(..) => 1,
                ReplayOutcome::Failed(_) => 2,
            };
            (rank, trial.lost(requests), trial.peak_reserved, trial.retries, *index)
        });
        let own_index = trials.iter().position(|(index, _)| *index == 0).unwrap_or(0);
        TuneAnswer {
            input,
            trace,
            requests,
            torch: replays.torch,
            own: replays.answers.into_iter().next().unwrap_or_default(),
            trials: trials.into_iter().map(|(_, trial)| trial).collect(),
            own_index,
        }
    }

    fn own(&self) -> &Trial {
        &self.trials[self.own_index]
    }

    /// Returns true if the run fits with some settings, without a request that runs out of memory. `None` if every
    /// replay failed.
    pub(super) fn fits(&self) -> Option<bool> {
        let failed = |trial: &Trial| matches!(trial.outcome, ReplayOutcome::Failed(_));
        (!self.trials.iter().all(failed))
            .then(|| self.trials.iter().any(|trial| trial.fits() && trial.lost(self.requests) == 0))
    }

    /// Returns the replay with the best settings, or `None` if no other settings are better than the run's
    /// own. Better settings save at least [`LEAST_SAVING`], have fewer failed requests, or have fewer
    /// retries.
    fn best(&self) -> Option<&Trial> {
        let (best, own) = (self.trials.first()?, self.own());
        if !best.fits() || self.own_index == 0 || self.own_failure().is_some() {
            return None;
        }
        let saves = share(own.peak_reserved - best.peak_reserved, own.peak_reserved) >= LEAST_SAVING;
        let rescues = !own.fits() || best.lost(self.requests) < own.lost(self.requests);
        (saves || rescues || best.retries < own.retries).then_some(best)
    }

    /// Returns why the replay with the run's own settings has no answer, or `None` if it has one.
    fn own_failure(&self) -> Option<&str> {
        match &self.own().outcome {
            ReplayOutcome::Failed(why) => Some(why),
            _ => None,
        }
    }

    fn differences(&self) -> i64 {
        self.own["differences"].as_i64().unwrap_or(0)
    }

    /// Returns a sentence that says how well the replay with the run's own settings agrees with the trace,
    /// which shows how far all replays can be trusted.
    fn trust(&self) -> String {
        if let Some(why) = self.own_failure() {
            return format!(
                "The replay with the run's own settings failed (torch {}): {why}. So no replay is compared with the trace.",
                self.torch
            );
        }
        let checks = self.own["checks"].as_i64().unwrap_or(0);
        let differences = self.differences();
        let changes = counted(checks.max(0).cast_unsigned(), "change");
        if differences == 0 {
            return format!(
                "With the run's own settings, the replay (torch {}) reserves the same bytes as the trace at \
                 all {changes}.",
                self.torch
            );
        }
        let first = |index: usize| {
            Unit::Auto.show(self.own["first_difference"][index].as_i64().unwrap_or(0)).to_string()
        };
        format!(
            "With the run's own settings, the replay (torch {}) reserves other bytes than the trace at \
             {differences} of {changes}, first {} instead of {}: the version of torch differs, or the trace \
             lacks calls.",
            self.torch,
            first(2),
            first(1)
        )
    }

    /// Returns the answer as text.
    pub(super) fn text(&self, mut page: Printer, units: Unit) -> String {
        heading(&mut page, self.input, &self.trace.meta);
        page.plain(format!(
            "{} of device {}, replayed with {} of the allocator",
            counted(self.requests.requests, "request"),
            self.requests.device,
            counted(self.trials.len() as u64, "setting")
        ));
        page.plain(self.trust());
        page.gap();
        let mut table = Table::new(&[
            ("settings", Side::Left),
            ("peak reserved", Side::Right),
            ("saves", Side::Right),
            ("unused at peak", Side::Right),
            ("retries", Side::Right),
            ("driver calls", Side::Right),
            ("outcome", Side::Left),
        ]);
        for (index, trial) in self.trials.iter().enumerate() {
            let saved = self.own().peak_reserved - trial.peak_reserved;
            let is_own = index == self.own_index;
            let name = if trial.settings.is_empty() { "the defaults" } else { &trial.settings };
            let name = if is_own { format!("{name} (this run's)") } else { name.to_owned() };
            let comparable = trial.fits() && !is_own && self.own_failure().is_none();
            table.row([
                Cell::new(name, if is_own { Style::Strong } else { Style::Plain }),
                units.show(trial.peak_reserved).to_string().into(),
                if comparable { percent(share(saved, self.own().peak_reserved)) } else { String::new() }
                    .into(),
                trial.unused_at_peak.map_or(String::new(), |bytes| units.show(bytes).to_string()).into(),
                trial.retries.to_string().into(),
                trial.driver_calls.map_or(String::new(), |calls| calls.to_string()).into(),
                Cell::new(
                    trial.outcome(units, self.requests),
                    if trial.fits() { Style::Plain } else { Style::Alarm },
                ),
            ]);
        }
        page.table(&table);
        page.gap();
        for line in self.verdict(units) {
            page.plain(line);
        }
        page.text().to_owned()
    }

    fn verdict(&self, units: Unit) -> Vec<String> {
        let Some(best) = self.best() else {
            return vec![if self.fits().is_none() {
                "No replay has an answer: try the torch of the run with --python.".to_owned()
            } else if self.own_failure().is_some() {
                "What other settings save is unknown; the table has the peak with each.".to_owned()
            } else if self.fits() == Some(true) {
                "Keep this run's settings: no others save 1 % or more.".to_owned()
            } else {
                "No settings make it fit: the run needs less allocated memory (memtrace oom, memtrace peak)."
                    .to_owned()
            }];
        };
        let name = if best.settings.is_empty() {
            "Leave PYTORCH_CUDA_ALLOC_CONF unset".to_owned()
        } else {
            format!("Set PYTORCH_CUDA_ALLOC_CONF={}", best.settings)
        };
        let own = self.own();
        let saved = own.peak_reserved - best.peak_reserved;
        let mut lines = vec![if !own.fits() || best.lost(self.requests) < own.lost(self.requests) {
            format!(
                "{name}: the requests that ran out of memory then fit. Request {} is the last one in the trace: \
                 later requests of the run were not tried.",
                count(self.requests.requests)
            )
        } else if saved > 0 {
            format!(
                "{name}: the peak of reserved memory is then {} lower ({}).",
                units.show(saved),
                percent(share(saved, own.peak_reserved))
            )
        } else {
            format!("{name}: the allocator then never has to empty its cache.")
        }];
        if best.settings.contains("roundup_power2") {
            lines.push(
                "Its rounding makes blocks larger, so allocated memory may be higher than in this trace."
                    .to_owned(),
            );
        }
        lines
    }

    /// Returns the answer as JSON.
    pub(super) fn json(&self) -> Value {
        let trials: Vec<Value> = self.trials.iter().map(|trial| trial.json(self.requests)).collect();
        json!({
            "report": "tune",
            "device": self.requests.device,
            "requests": self.requests.requests,
            "failed_requests": self.requests.failed,
            "torch": self.torch,
            "settings": self.trace.meta.allocator.conf,
            "take": self.best().map(|best| &best.settings),
            "fits": self.fits(),
            "replay_checks": self.own["checks"],
            "replay_differences": self.own["differences"],
            "replay_first_difference": self.own["first_difference"],
            "steps": self.own["steps"],
            "trials": trials,
        })
    }
}

impl Trial {
    fn fits(&self) -> bool {
        matches!(self.outcome, ReplayOutcome::Fits | ReplayOutcome::Survives(_))
    }

    /// Returns how many of the requests that ran out of memory in the trace also run out in this replay.
    fn lost(&self, requests: &Requests) -> i64 {
        let failed = requests.failed.cast_signed();
        match self.outcome {
            ReplayOutcome::Survives(survived) => failed - survived,
            _ => failed,
        }
    }

    fn outcome(&self, units: Unit, requests: &Requests) -> String {
        match &self.outcome {
            ReplayOutcome::Fits if requests.failed == 0 => "fits".to_owned(),
            ReplayOutcome::Fits => "runs out of memory as the trace does".to_owned(),
            ReplayOutcome::Survives(survived) => {
                format!("{} of {} failed requests fit", survived, requests.failed)
            }
            ReplayOutcome::OutOfMemory(step, bytes) => {
                let step =
                    step.filter(|step| *step >= 0).map_or(String::new(), |step| format!(" at step {step}"));
                format!("out of memory{step}, request of {}", units.show(*bytes))
            }
            ReplayOutcome::Failed(why) => format!("no answer: {why}"),
        }
    }

    fn json(&self, requests: &Requests) -> Value {
        let (stopped_step, stopped_bytes) = match self.outcome {
            ReplayOutcome::OutOfMemory(step, bytes) => (step, Some(bytes)),
            _ => (None, None),
        };
        json!({
            "settings": self.settings,
            "fits": self.fits(),
            "peak_reserved_bytes": self.peak_reserved,
            "peak_allocated_bytes": self.peak_allocated,
            "unused_at_peak_bytes": self.unused_at_peak,
            "retries": self.retries,
            "driver_calls": self.driver_calls,
            "failed_requests": self.lost(requests),
            "out_of_memory_step": stopped_step,
            "out_of_memory_bytes": stopped_bytes,
            "error": if let ReplayOutcome::Failed(why) = &self.outcome { Some(why) } else { None },
        })
    }
}

/// Returns the result of one replay from its answer in JSON.
fn trial((answer, settings): (&Value, &String)) -> Trial {
    let number = |name: &str| answer[name].as_i64().unwrap_or(0);
    let outcome = if let Some(why) = answer["failed"].as_str() {
        ReplayOutcome::Failed(why.to_owned())
    } else if answer["stopped"].is_object() {
        let stopped = &answer["stopped"];
        ReplayOutcome::OutOfMemory(stopped["step"].as_i64(), stopped["requested_bytes"].as_i64().unwrap_or(0))
    } else if number("survived") > 0 {
        ReplayOutcome::Survives(number("survived"))
    } else {
        ReplayOutcome::Fits
    };
    let at_peak = &answer["at_peak"];
    Trial {
        settings: settings.clone(),
        peak_reserved: number("peak_reserved_bytes"),
        peak_allocated: number("peak_allocated_bytes"),
        unused_at_peak: at_peak["reserved_bytes"]
            .as_i64()
            .zip(at_peak["active_bytes"].as_i64())
            .map(|(reserved, active)| reserved - active),
        retries: number("retries"),
        driver_calls: (!settings.contains("expandable_segments:True"))
            .then(|| number("segments_allocated") + number("segments_freed")),
        outcome,
    }
}
