//! Schedules the samples of devices and of the host, and records the samples of devices.
//!
//! A sample is recorded on the writer thread's own lane, so that its row is ordered by time like every other
//! row. Its time is the time before the query of the driver. A sample that met a call which allocates or frees
//! device memory is taken again, because the trace and the driver may disagree about that call.

use std::time::{Duration, Instant};

use memtrace_encode::Encoder;
use memtrace_trace::{Header, Payload};

use super::gpu_processes::GpuProcesses;
use super::host::HostSampler;
use crate::clock;
use crate::device_calls;
use crate::queue::event_queue::EventQueue;
use crate::session::{SampleDevices, SampledDevice, Session};

/// The minimum time between two samples, however fast memory grows.
const SHORTEST: Duration = Duration::from_millis(100);

/// The number of times that a sample is tried, and the pause between two tries, until no call is in progress.
const TRIES: u32 = 4;
const PAUSE: Duration = Duration::from_millis(1);
/// The time after which no further try begins, because a query of the driver may be slow.
const LONGEST_TRIES: Duration = Duration::from_millis(10);
/// The longest time for which a due sample is put off because of calls in progress, or the interval if that is
/// shorter. `cudaFree` may wait long for the device. After this time, a sample is taken in spite of the call.
const LONGEST_DELAY: Duration = Duration::from_secs(1);

/// The time between two rounds of tries. A query of the driver may delay the program's own calls.
const RETRY: Duration = Duration::from_millis(200);

/// Decides when to sample devices and the host.
pub(crate) struct Sampler {
    host: HostSampler,
    sample: SampleDevices,
    processes: GpuProcesses,
    every: Duration,
    last: Option<Instant>,
    /// The time since when a due sample is put off; `None` if no sample is.
    put_off: Option<Instant>,
    /// The time of the last tries of the sample that is put off.
    tried: Option<Instant>,
    /// The maximum number of bytes that the process held at a sample.
    highest: i64,
}

impl Sampler {
    /// Creates a sampler with the interval of the settings; an interval of 0 means never. `is_simulated` is
    /// true if the devices are simulated.
    pub(crate) fn new(session: &Session, is_simulated: bool) -> Sampler {
        let every = Duration::from_millis(session.settings.sample_ms);
        let host = HostSampler::new(every, is_simulated);
        let processes = GpuProcesses::default();
        Sampler {
            host,
            sample: session.sample,
            processes,
            every,
            last: None,
            put_off: None,
            tried: None,
            highest: 0,
        }
    }

    /// Samples when the interval has passed, or earlier if the process holds at least 1/16 more than at any
    /// earlier sample, and at once if a hook has requested a sample.
    pub(crate) fn sample_when_due(&mut self, queue: &'static EventQueue, encoder: &Encoder) {
        let held = held(encoder);
        let has_grown = held > self.highest + self.highest / 16;
        let due = match self.last.map(|last| last.elapsed()) {
            None => true,
            Some(_) if device_calls::is_sample_requested() => true,
            Some(passed) => passed >= self.every || has_grown && passed >= SHORTEST.min(self.every),
        };
        if !due {
            self.put_off = None;
        } else if self.tried.is_none_or(|tried| tried.elapsed() >= RETRY.min(self.every)) {
            let is_urgent =
                self.put_off.is_some_and(|since| since.elapsed() >= LONGEST_DELAY.min(self.every));
            self.sample_devices(queue, encoder, is_urgent);
        }
        self.host.sample_when_due(queue, encoder);
    }

    /// Samples the devices that the process uses, and the host.
    pub(crate) fn sample(&mut self, queue: &'static EventQueue, encoder: &Encoder) {
        self.sample_devices(queue, encoder, true);
        self.host.sample(queue, encoder);
    }

    /// Samples the host at the end of the trace.
    pub(crate) fn sample_end(&mut self, queue: &'static EventQueue) {
        self.host.sample_end(queue);
    }

    /// Samples the devices. Unless the sample `is_urgent`, it is put off if calls are in progress all the time.
    fn sample_devices(&mut self, queue: &'static EventQueue, encoder: &Encoder, is_urgent: bool) {
        let devices: Vec<i8> = encoder.devices().map(|(device, _)| device as i8).collect();
        // Nothing is sampled before the process uses a device, because a sample costs time.
        if self.every.is_zero() || devices.is_empty() || queue.is_short() {
            return;
        }
        let is_requested = device_calls::is_sample_requested();
        // A short program may end before a second sample is due, so its first one is not put off.
        let taken = self.sample_between_calls(&devices, is_urgent || self.last.is_none());
        let Some((clock_ns, samples)) = taken else {
            if is_requested {
                device_calls::request_sample();
            }
            self.put_off.get_or_insert_with(Instant::now);
            self.tried = Some(Instant::now());
            return;
        };
        (self.put_off, self.tried) = (None, None);
        self.last = Some(Instant::now());
        self.highest = self.highest.max(held(encoder));
        for SampledDevice { device, api, sample, .. } in &samples {
            for payload in Payload::of_sample(sample) {
                let header = Header { step: -1, ..Header::new(clock_ns, *api, *device) };
                queue.commit(payload.pack(header));
            }
        }
        for SampledDevice { device, others, has_names, .. } in samples {
            self.processes.record(queue, i32::from(device), &others, has_names);
        }
    }

    /// Samples the devices while no call that changes their memory is in progress. Returns the samples and
    /// their time. If such calls were in progress at each try, returns `None`, or the last samples if they are
    /// `urgent`.
    fn sample_between_calls(&self, devices: &[i8], urgent: bool) -> Option<(u64, Vec<SampledDevice>)> {
        let began = Instant::now();
        let mut last = None;
        for index in 0..TRIES {
            if index > 0 {
                if began.elapsed() >= LONGEST_TRIES {
                    break;
                }
                std::thread::sleep(PAUSE);
            }
            let before = device_calls::finished();
            if before.is_none() && !urgent {
                continue;
            }
            device_calls::sampled();
            let clock_ns = clock::now_ns();
            let samples = (self.sample)(devices);
            if before.is_some() && device_calls::finished() == before {
                return Some((clock_ns, samples));
            }
            last = Some((clock_ns, samples));
        }
        last.filter(|_| urgent)
    }
}

/// Returns the bytes that calls and reports account for, on all devices.
fn held(encoder: &Encoder) -> i64 {
    encoder.devices().map(|(_, totals)| totals.reserved + totals.outside).sum()
}
