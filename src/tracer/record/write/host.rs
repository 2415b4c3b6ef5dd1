//! Samples host memory on the writer thread.
//!
//! There are four kinds of samples with different costs. A *quick* sample (resident memory, container,
//! machine) reads a few small files. A *full* sample reads the process's mappings, for which the kernel walks
//! all pages of the process. The *children* are read one by one: their resident memory, and less often their
//! proportional memory, for which the kernel walks their pages, too. The *other processes* share the limit of
//! memory with this process. After each sample, the next one of the same kind waits until the processor time that the
//! sample took is a small share of the time that has passed ([`SHARE`]). So a process of 500 GiB or with 500 children
//! is sampled less often.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufReader;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use memtrace_encode::Encoder;
use memtrace_trace::event::bytes::text_events;
use memtrace_trace::host::{HostFiles, HostValues, TOTAL, left_in_group};
use memtrace_trace::{Api, Event, Header, Payload};

use super::known_memory::known_memory;
use super::smaps::{self, PartBytes};
use crate::intern;
use crate::queue::event_queue::EventQueue;
use crate::step::STEP;

/// Quick samples may take one part in `SHARE` of the elapsed time, in processor time of this thread. The shares
/// of all kinds of samples sum to 0.12%, except while memory is short ([`TIGHT_SHARE`]) and at new highs of
/// resident memory ([`HIGH_SHARE`]). The samples at the start ([`CREDIT`]), device samples, and the reads of
/// resident memory ([`POLL`]) come on top. All together take at most 0.2% of a run that lasts some minutes and
/// has few new highs.
const SHARE: u32 = 2500;
/// Same as [`SHARE`], for lists of children, for lists of other processes, and for the children's proportional memory
/// (`CHILDREN_PSS_SHARE`).
const CHILDREN_SHARE: u32 = 10_000;
const CHILDREN_PSS_SHARE: u32 = 5000;
/// The same for full samples: normally, and while little memory is left and usage grows (`TIGHT_SHARE`). In
/// the second case, the process may soon be killed, so this sample may be the last one.
const FULL_SHARE: u32 = 2500;
const TIGHT_SHARE: u32 = 20;
/// The share of full samples at a new high of resident memory. They are few, because the high rises by at
/// least a quarter each time.
const HIGH_SHARE: u32 = 100;
/// The processor time that full samples at the start of a program may take in addition to their share.
const CREDIT: Duration = Duration::from_millis(100);
/// The maximum processor time for reading the proportional memory of the children in one sample. After that,
/// the proportional memory of the remaining children is unknown.
const LONGEST_WALK: Duration = Duration::from_millis(100);
/// Memory is short when less than one part in `TIGHT` is left.
const TIGHT: i64 = 4;
/// The interval at which resident memory is read.
const POLL: Duration = Duration::from_millis(100);
/// The minimum change of resident memory that triggers a sample: `(bytes, part)` means at least `bytes`, and
/// at least the resident memory at the last sample divided by `part`.
const LEAST_CHANGE: (i64, i64) = (8 << 20, 32);
/// The minimum change that triggers a full sample.
const LEAST_FULL_CHANGE: (i64, i64) = (32 << 20, 6);
/// The minimum change that triggers a full sample when little memory is left.
const LEAST_TIGHT_CHANGE: (i64, i64) = (32 << 20, 12);
/// The minimum rise above the resident memory of every earlier full sample that is a new high.
const LEAST_HIGH: (i64, i64) = (32 << 20, 4);
/// The longest time between two full samples of a process that changes little.
const LONGEST_FULL: Duration = Duration::from_secs(10);
/// The maximum number of children, and of other processes, that are read one by one, and of those named.
const MOST_CHILDREN: usize = 1000;
const MOST_OTHERS: usize = 10_000;
const MOST_NAMED: usize = 8;
/// Another process is named if it holds at least this many bytes.
const LEAST_NAMED: i64 = 16 << 20;

/// Limits how often one kind of sample is taken, by its cost in processor time.
struct Budget {
    last: Option<Instant>,
    /// The processor time that may be spent now, in addition to the share of the time that has passed.
    credit: Duration,
    debt: Duration,
    /// The processor time that the last sample took.
    price: Duration,
}

impl Budget {
    fn new(credit: Duration) -> Budget {
        Budget { last: None, credit, debt: Duration::ZERO, price: Duration::ZERO }
    }

    fn elapsed(&self) -> Duration {
        self.last.map_or(Duration::MAX, |last| last.elapsed())
    }

    /// Returns true if a sample that takes as long as the last one keeps the processor time within one part
    /// in `share` of the time that has passed. The first sample is always allowed.
    fn is_affordable(&self, share: u32) -> bool {
        let debt = self.debt.saturating_sub(self.earned(share));
        self.last.is_none() || debt + self.price <= self.credit.max(self.price)
    }

    fn earned(&self, share: u32) -> Duration {
        self.last.map_or(Duration::ZERO, |last| last.elapsed() / share)
    }

    fn pay(&mut self, price: Duration, share: u32) {
        self.debt = self.debt.saturating_sub(self.earned(share)) + price;
        (self.price, self.last) = (price, Some(Instant::now()));
    }
}

/// Samples host memory: decides which samples are due, takes them, and records their rows.
pub(crate) struct HostSampler {
    files: HostFiles,
    every: Duration,
    /// The time of the next quick sample by the interval; `None` before the first one.
    next: Option<Instant>,
    is_simulated: bool,
    quick: Budget,
    full: Budget,
    /// Limits the full samples at a new high of resident memory, so that they delay no other full sample.
    highs: Budget,
    children: Budget,
    shares: Budget,
    others: Budget,
    polled: Option<Instant>,
    /// Resident memory at the last quick and the last full sample, and the highest of all full samples.
    rss: i64,
    full_rss: i64,
    high_rss: i64,
    step: i32,
    /// True if little memory was left at the last quick sample.
    is_tight: bool,
}

fn has_changed(now: i64, then: i64, (bytes, part): (i64, i64)) -> bool {
    let change = (now - then).abs();
    change >= bytes && change >= then / part
}

/// Returns true if `rss` is far enough above `high`, the resident memory of every earlier full sample.
fn is_new_high(rss: i64, high: i64) -> bool {
    rss > high && has_changed(rss, high, LEAST_HIGH)
}

/// Returns the time at which the next sample is due. `due` is the time at which the last sample was due, or
/// `None` before the first sample. The interval counts from `due`, so a late sample does not delay the later
/// ones. If that time has already passed, the interval counts from `now`, so missed samples are not made up.
fn after(due: Option<Instant>, now: Instant, every: Duration) -> Instant {
    due.map(|due| due + every).filter(|next| *next > now).unwrap_or(now + every)
}

/// Returns true if the container or the machine has little memory left.
fn is_tight(container: Option<HostValues>, machine: Option<HostValues>) -> bool {
    let container = match container {
        Some([Some(current), Some(limit), file, ..]) => {
            left_in_group(current, limit, file.unwrap_or(0)) < limit / TIGHT
        }
        _ => false,
    };
    let machine = match machine {
        Some([Some(total), Some(available), ..]) => available < total / TIGHT,
        _ => false,
    };
    container || machine
}

impl HostSampler {
    /// Creates a sampler that takes a quick sample at least once every `every`. If `every` is zero, the
    /// sampler never samples. `is_simulated` is true if the devices are simulated, so that their memory is
    /// host memory.
    pub(crate) fn new(every: Duration, is_simulated: bool) -> HostSampler {
        HostSampler {
            files: HostFiles::default(),
            every,
            next: None,
            is_simulated,
            quick: Budget::new(Duration::ZERO),
            full: Budget::new(CREDIT),
            highs: Budget::new(Duration::ZERO),
            children: Budget::new(Duration::ZERO),
            shares: Budget::new(Duration::ZERO),
            others: Budget::new(Duration::ZERO),
            polled: None,
            rss: 0,
            full_rss: 0,
            high_rss: 0,
            step: -1,
            is_tight: false,
        }
    }

    /// Takes the samples that are due.
    pub(crate) fn sample_when_due(&mut self, queue: &'static EventQueue, encoder: &Encoder) {
        let now = Instant::now();
        let is_time = self.next.is_none_or(|next| now >= next);
        let is_early = !is_time && self.polled.is_some_and(|polled| now - polled < POLL.min(self.every));
        if self.every.is_zero() || is_early || queue.is_short() {
            return;
        }
        self.polled = Some(now);
        // If `/proc` cannot be read, `rss` is 0, and the other values are still sampled at the interval of
        // the settings.
        let rss = self.files.resident("self").unwrap_or(0);
        let step = STEP.load(Ordering::Relaxed);
        let is_new = step != self.step || has_changed(rss, self.rss, LEAST_CHANGE);
        let due = is_time || is_new && self.quick.is_affordable(SHARE);
        if is_time {
            self.next = Some(after(self.next, now, self.every));
        }
        if due {
            self.step = step;
            self.quick(queue, rss);
        }
        // Without growth, a long time since the last full sample is no reason to exceed the normal share.
        let has_grown = rss > self.full_rss && has_changed(rss, self.full_rss, LEAST_TIGHT_CHANGE);
        let is_last_look = self.is_tight && has_grown;
        let share = if is_last_look { TIGHT_SHARE } else { FULL_SHARE };
        let full = is_last_look
            || self.full.elapsed() >= LONGEST_FULL
            || has_changed(rss, self.full_rss, LEAST_FULL_CHANGE);
        let is_in_share = full && self.full.is_affordable(share);
        if is_in_share || is_new_high(rss, self.high_rss) && self.highs.is_affordable(HIGH_SHARE) {
            // A full sample comes with a quick sample of the same moment, so that both show the same memory.
            if !due {
                self.quick(queue, rss);
            }
            let price = self.full(queue, encoder, rss);
            if is_in_share {
                self.full.pay(price, FULL_SHARE);
            } else {
                self.highs.pay(price, HIGH_SHARE);
            }
        }
        // Little memory may be left because of the children.
        let share = if self.is_tight { FULL_SHARE } else { CHILDREN_SHARE };
        if self.children.elapsed() >= self.every && self.children.is_affordable(share) {
            self.children(queue, share);
        }
    }

    /// Takes every sample now, because the program asked for it.
    pub(crate) fn sample(&mut self, queue: &'static EventQueue, encoder: &Encoder) {
        if !self.every.is_zero() && !queue.is_short() {
            // The children take long to read, so they come first: nothing may come between the quick and the
            // full sample, which belong together.
            self.children(queue, SHARE);
            let rss = self.files.resident("self").unwrap_or(0);
            self.quick(queue, rss);
            let price = self.full(queue, encoder, rss);
            self.full.pay(price, FULL_SHARE);
        }
    }

    /// Takes the quick sample at the end of the trace.
    pub(crate) fn sample_end(&mut self, queue: &'static EventQueue) {
        if !self.every.is_zero() && !queue.is_short() {
            self.quick(queue, self.files.resident("self").unwrap_or(0));
        }
    }

    fn quick(&mut self, queue: &'static EventQueue, rss: i64) {
        let start = thread_time();
        self.rss = rss;
        let values = [
            (Api::ProcStatus, self.files.status("self")),
            (Api::Cgroup, self.files.cgroup_values()),
            (Api::Meminfo, self.files.machine()),
        ];
        self.is_tight = is_tight(values[1].1, values[2].1);
        for (source, values) in values {
            if let Some(values) = values {
                record(queue, source, values, "");
            }
        }
        self.quick.pay(thread_time().saturating_sub(start), SHARE);
    }

    /// Takes a full sample, and returns its processor time.
    fn full(&mut self, queue: &'static EventQueue, encoder: &Encoder, rss: i64) -> Duration {
        let start = thread_time();
        self.full_rss = rss;
        self.high_rss = self.high_rss.max(rss);
        let mut known = known_memory(encoder, self.is_simulated);
        let smaps = File::open(self.files.path("self", "smaps"));
        let parts = smaps.and_then(|file| smaps::parts(BufReader::with_capacity(64 << 10, file), &mut known));
        // If the file cannot be read, the next full sample tries again.
        if let Ok(parts) = parts
            && !parts.is_empty()
        {
            record_parts(queue, &parts);
        }
        thread_time().saturating_sub(start)
    }

    /// Lists the children and, if they may take their share of the time, the other processes.
    fn children(&mut self, queue: &'static EventQueue, share: u32) {
        let start = thread_time();
        let mut with_shares = false;
        let descendants = self.files.descendants("self", MOST_CHILDREN);
        if let Some(pids) = &descendants {
            with_shares = pids.len() <= MOST_CHILDREN / 16 && self.shares.is_affordable(CHILDREN_PSS_SHARE);
            let mut each: Vec<(u32, Option<i64>, i64)> = pids
                .iter()
                .filter_map(|&pid| {
                    let name = pid.to_string();
                    let may_walk = with_shares && thread_time().saturating_sub(start) < LONGEST_WALK;
                    match may_walk.then(|| self.files.rollup(&name)).flatten() {
                        Some((pss, rss)) => Some((pid, Some(pss), rss)),
                        None => Some((pid, None, self.files.resident(&name)?)),
                    }
                })
                .collect();
            let pss = each.iter().map(|(_, pss, _)| *pss).sum();
            let rss = each.iter().map(|(_, _, rss)| rss).sum();
            each.sort_unstable_by_key(|(pid, _, rss)| (-rss, *pid));
            record(queue, Api::Child, [pss, Some(rss), None, Some(each.len() as i64), None], TOTAL);
            for (pid, pss, rss) in each.iter().take(MOST_NAMED) {
                let values = [*pss, Some(*rss), Some(i64::from(*pid)), Some(1), None];
                record(queue, Api::Child, values, &self.name(*pid));
            }
        }
        let price = thread_time().saturating_sub(start);
        if with_shares {
            self.shares.pay(price, CHILDREN_PSS_SHARE);
            self.children.pay(Duration::ZERO, CHILDREN_SHARE);
        } else {
            self.children.pay(price, CHILDREN_SHARE);
        }
        if let Some(pids) = descendants
            && self.others.is_affordable(share)
        {
            self.others(queue, &pids);
        }
    }

    /// Lists the processes that share the memory limit with this process and do not belong to the traced job.
    /// `own` are the descendants of this process.
    fn others(&mut self, queue: &'static EventQueue, own: &[u32]) {
        let start = thread_time();
        let others = self.files.others(own, MOST_OTHERS).into_iter();
        let mut each: Vec<(u32, i64)> =
            others.filter_map(|pid| Some((pid, self.files.resident_alone(&pid.to_string())?))).collect();
        each.retain(|(pid, held)| *held < LEAST_NAMED || !self.files.is_of_job(&pid.to_string()));
        each.sort_unstable_by_key(|(pid, held)| (-held, *pid));
        let held = each.iter().map(|(_, held)| held).sum();
        let source = Api::OtherProcess;
        record(queue, source, [Some(held), None, Some(each.len() as i64), None, None], TOTAL);
        for (pid, held) in each.iter().take(MOST_NAMED).filter(|(_, held)| *held >= LEAST_NAMED) {
            record(
                queue,
                source,
                [Some(*held), Some(i64::from(*pid)), Some(1), None, None],
                &self.name(*pid),
            );
        }
        self.others.pay(thread_time().saturating_sub(start), CHILDREN_SHARE);
    }

    fn name(&self, pid: u32) -> String {
        self.files.name(&pid.to_string()).unwrap_or_else(|| "(ended)".to_owned())
    }
}

fn record_parts(queue: &'static EventQueue, parts: &BTreeMap<String, PartBytes>) {
    let mut total = PartBytes::default();
    parts.values().for_each(|part| total.add(*part));
    let values = |part: &PartBytes| [Some(part.pss), Some(part.rss), Some(part.dirty), Some(part.swap), None];
    record(queue, Api::Smaps, values(&total), TOTAL);
    for (name, part) in parts {
        record(queue, Api::Smaps, values(part), name);
    }
}

/// Records one row of host memory. `what` names the process or the part to which `values` belong.
pub(crate) fn record(queue: &'static EventQueue, source: Api, values: HostValues, what: &str) {
    let what = intern::text_id(what, |id, text| queue.define(&text_events(id, text)));
    queue.record(|clock_ns| {
        let header = Header { step: -1, ..Header::new(clock_ns, source, Event::HOST) };
        Payload::HostSample { values, what }.pack(header)
    });
}

/// Returns the processor time of this thread.
fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is valid for the call.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec.max(0) as u64, time.tv_nsec.clamp(0, 999_999_999) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expensive_sample_of_the_host_waits_longer_than_a_cheap_one() {
        let mut budget = Budget::new(Duration::from_millis(30));
        assert!(budget.is_affordable(SHARE));
        budget.pay(Duration::from_millis(10), SHARE);
        budget.pay(Duration::from_millis(10), SHARE);
        assert!(budget.is_affordable(SHARE));
        budget.pay(Duration::from_millis(10), SHARE);
        assert!(!budget.is_affordable(SHARE));
        // Setup: no credit -> the next sample is allowed only when its share of the elapsed time covers the
        // cost of the last sample.
        let mut budget = Budget::new(Duration::ZERO);
        budget.pay(Duration::from_millis(1), SHARE);
        assert!(!budget.is_affordable(SHARE));
        budget.last = Instant::now().checked_sub(Duration::from_millis(2600));
        assert!(budget.is_affordable(SHARE));
    }

    #[test]
    fn a_late_sample_of_the_host_does_not_delay_the_next_one() {
        let (start, every) = (Instant::now(), Duration::from_millis(100));
        let ms = |number| start + Duration::from_millis(number);
        assert_eq!(after(None, ms(7), every), ms(107));
        assert_eq!(after(Some(ms(107)), ms(127), every), ms(207));
        // The next sample is already due, too -> the interval counts from now.
        assert_eq!(after(Some(ms(107)), ms(207), every), ms(307));
        assert_eq!(after(Some(ms(107)), ms(999), every), ms(1099));
    }

    #[test]
    fn new_highs_of_the_host_are_few() {
        assert!(is_new_high(5 << 30, 4 << 30) && !is_new_high((5 << 30) - 1, 4 << 30));
        assert!(!is_new_high(1 << 30, 4 << 30) && !is_new_high(31 << 20, 0) && is_new_high(32 << 20, 0));
        // From 1 GiB to 1 TiB in steps of 64 MiB.
        let (mut highs, mut high) = (0, 1 << 30);
        for rss in (0..1 << 40).step_by(64 << 20) {
            if is_new_high(rss, high) {
                (highs, high) = (highs + 1, rss);
            }
        }
        assert!((25..=32).contains(&highs), "{highs}");
    }

    #[test]
    fn small_changes_of_host_memory_are_no_reason_for_a_sample() {
        assert!(!has_changed(1 << 30, (1 << 30) + (16 << 20), LEAST_CHANGE));
        assert!(has_changed(1 << 30, 1 << 29, LEAST_CHANGE) && has_changed(8 << 20, 0, LEAST_CHANGE));
        assert!(!has_changed(4 << 20, 0, LEAST_CHANGE));
    }

    #[test]
    fn page_cache_of_the_host_does_not_make_memory_short() {
        let container = |current, file| Some([Some(current), Some(100), file, None, None]);
        assert!(is_tight(container(90, Some(1)), None) && is_tight(container(90, None), None));
        assert!(!is_tight(container(90, Some(60)), None) && !is_tight(None, None));
        assert!(is_tight(None, Some([Some(100), Some(5), None, None, None])));
    }
}
