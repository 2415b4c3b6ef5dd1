//! Schedules the samples of devices and of the host, and records the samples of devices.
//!
//! A sample is recorded on the writer thread's own lane, so that its row is ordered by time like every other
//! row.

use std::time::{Duration, Instant};

use memtrace_encode::Encoder;
use memtrace_trace::{Header, Payload};

use super::gpu_processes::GpuProcesses;
use super::host::HostSampler;
use crate::queue::event_queue::EventQueue;
use crate::session::{SampleDevices, SampledDevice, Session};

/// The minimum time between two samples, however fast memory grows.
const SHORTEST: Duration = Duration::from_millis(100);

/// Decides when to sample devices and the host.
pub(crate) struct Sampler {
    host: HostSampler,
    sample: SampleDevices,
    processes: GpuProcesses,
    every: Duration,
    last: Option<Instant>,
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
        Sampler { host, sample: session.sample, processes, every, last: None, highest: 0 }
    }

    /// Samples when the interval has passed, or earlier if the process holds at least 1/16 more than at any
    /// earlier sample.
    pub(crate) fn sample_when_due(&mut self, queue: &'static EventQueue, encoder: &Encoder) {
        let held = held(encoder);
        let has_grown = held > self.highest + self.highest / 16;
        let due = match self.last.map(|last| last.elapsed()) {
            None => true,
            Some(passed) => passed >= self.every || has_grown && passed >= SHORTEST.min(self.every),
        };
        if due {
            self.sample_devices(queue, encoder);
        }
        self.host.sample_when_due(queue, encoder);
    }

    /// Samples the devices that the process uses, and the host.
    pub(crate) fn sample(&mut self, queue: &'static EventQueue, encoder: &Encoder) {
        self.sample_devices(queue, encoder);
        self.host.sample(queue, encoder);
    }

    /// Samples the host at the end of the trace.
    pub(crate) fn sample_end(&mut self, queue: &'static EventQueue) {
        self.host.sample_end(queue);
    }

    fn sample_devices(&mut self, queue: &'static EventQueue, encoder: &Encoder) {
        let devices: Vec<i8> = encoder.devices().map(|(device, _)| device as i8).collect();
        // Nothing is sampled before the process uses a device, because a sample costs time.
        if self.every.is_zero() || devices.is_empty() || queue.is_short() {
            return;
        }
        self.last = Some(Instant::now());
        self.highest = self.highest.max(held(encoder));
        for SampledDevice { device, api, sample, others, has_names } in (self.sample)(&devices) {
            self.processes.record(queue, i32::from(device), &others, has_names);
            for payload in Payload::of_sample(&sample) {
                queue.record(|clock_ns| {
                    payload.pack(Header { step: -1, ..Header::new(clock_ns, api, device) })
                });
            }
        }
    }
}

/// Returns the bytes that calls and reports account for, on all devices.
fn held(encoder: &Encoder) -> i64 {
    encoder.devices().map(|(_, totals)| totals.reserved + totals.outside).sum()
}
