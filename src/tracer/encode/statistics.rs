//! Collects the statistics for the exit summary.

use std::fmt::Write;

use hdrhistogram::Histogram;
use memtrace_trace::Api;
use memtrace_trace::counts::counted;
use memtrace_trace::units::Unit;
use rustc_hash::FxHashMap;

/// The counts, sizes and latencies of a process.
pub struct Statistics {
    blocks: Sizes,
    calls: FxHashMap<Option<Api>, Calls>,
    peaks: Vec<Peak>,
    /// The number of `oom` rows, including requests that `--past-oom` granted.
    pub ooms: u64,
}

struct Calls {
    latency: Histogram<u64>,
    failed: u64,
}

#[derive(Clone, Copy, Default)]
struct Peak {
    allocated: i64,
    reserved: i64,
}

/// The sizes of blocks. Most programs use few sizes, so a size is first counted in a small table, which takes a fraction
/// of the time.
struct Sizes {
    histogram: Histogram<u64>,
    /// A size and its count, by [`Sizes::slot`].
    counts: [(u64, u64); Sizes::SLOTS],
}

impl Sizes {
    /// A power of two.
    const SLOTS: usize = 64;

    /// Returns the index of a size. Multiplicative hashing: the highest bits depend on all bits of the size.
    #[inline(always)]
    fn slot(bytes: u64) -> usize {
        (bytes.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (64 - Self::SLOTS.ilog2())) as usize
    }

    #[inline(always)]
    fn add(&mut self, bytes: u64) {
        let (size, count) = &mut self.counts[Self::slot(bytes)];
        if *size == bytes {
            *count += 1;
        } else {
            // `record_n` grows the histogram; `saturating_record_n` would clamp the value to the current range of the
            // histogram.
            let _ = self.histogram.record_n(*size, *count);
            (*size, *count) = (bytes, 1);
        }
    }

    /// Returns the histogram of all sizes.
    fn all(&self) -> Histogram<u64> {
        let mut all = self.histogram.clone();
        for (size, count) in self.counts {
            let _ = all.record_n(size, count);
        }
        all
    }
}

/// Creates a histogram with two significant digits, enough for percentiles of latencies.
///
/// This function is not inlined, so that it is the only copy into which the constructor is inlined. The
/// compiler can then evaluate the constructor's logarithms of constants, so the preloaded library does not
/// need libm.
#[inline(never)]
fn histogram() -> Histogram<u64> {
    Histogram::new(2).expect("two digits are within the library's bounds")
}

impl Default for Statistics {
    fn default() -> Self {
        let blocks = Sizes { histogram: histogram(), counts: [(0, 0); Sizes::SLOTS] };
        Statistics { blocks, calls: FxHashMap::default(), peaks: Vec::new(), ooms: 0 }
    }
}

impl Statistics {
    /// Counts an allocated block of `bytes` bytes, for the percentiles of block sizes.
    #[inline]
    pub fn block(&mut self, bytes: i64) {
        self.blocks.add(bytes.max(0) as u64);
    }

    /// Counts a call that returned after `latency_ns` nanoseconds.
    pub fn call(&mut self, api: Option<Api>, latency_ns: u64, failed: bool) {
        let calls = self.calls.entry(api).or_insert_with(|| Calls { latency: histogram(), failed: 0 });
        let _ = calls.latency.record(latency_ns);
        calls.failed += u64::from(failed);
    }

    /// Raises the peaks of a device to its new totals, if these are higher. Ignores the host.
    #[inline(always)]
    pub fn peak(&mut self, device: i8, allocated: i64, reserved: i64) {
        // The host's number makes no index.
        let index = device as usize;
        if index >= self.peaks.len() {
            return self.first_peak(device, Peak { allocated, reserved });
        }
        let peak = &mut self.peaks[index];
        if allocated > peak.allocated || reserved > peak.reserved {
            peak.allocated = peak.allocated.max(allocated);
            peak.reserved = peak.reserved.max(reserved);
        }
    }

    #[cold]
    fn first_peak(&mut self, device: i8, peak: Peak) {
        let Ok(index) = usize::try_from(device) else { return };
        self.peaks.resize(index + 1, Peak::default());
        let Peak { allocated, reserved } = peak;
        self.peaks[index] = Peak { allocated: allocated.max(0), reserved: reserved.max(0) };
    }

    /// Returns the peak allocated and reserved bytes of each device so far, by ordinal.
    pub fn peaks(&self) -> impl Iterator<Item = [i64; 2]> {
        self.peaks.iter().map(|peak| [peak.allocated, peak.reserved])
    }

    /// Returns the lines of the exit summary.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for (device, peak) in self.peaks.iter().enumerate() {
            let Peak { allocated, reserved } = *peak;
            let (allocated, reserved) = (Unit::Auto.show(allocated), Unit::Auto.show(reserved));
            lines.push(format!("GPU {device}: peak allocated {allocated}, peak reserved {reserved}"));
        }
        let blocks = self.blocks.all();
        if !blocks.is_empty() {
            let size = |quantile| Unit::Auto.show(blocks.value_at_quantile(quantile) as i64);
            let blocks = counted(blocks.len(), "block");
            let mut line = format!("{blocks}: p50 {}, p99 {}", size(0.5), size(0.99));
            if self.ooms > 0 {
                let _ = write!(line, "; {}", counted(self.ooms, "OOM"));
            }
            lines.push(line);
        }
        let mut calls: Vec<_> = self.calls.iter().collect();
        calls.sort_by_key(|(api, _)| api.map(|api| api as u8));
        for (api, calls) in calls {
            let name = api.map_or("?", Api::as_str);
            let us = |quantile| calls.latency.value_at_quantile(quantile) as f64 / 1e3;
            let mut line = format!(
                "{name}: {}, p50 {:.1} us, p99 {:.1} us",
                counted(calls.latency.len(), "call"),
                us(0.5),
                us(0.99)
            );
            if calls.failed > 0 {
                let _ = write!(line, ", {} failed", calls.failed);
            }
            lines.push(line);
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_name_peaks_sizes_and_latencies() {
        let mut statistics = Statistics::default();
        statistics.block(512);
        statistics.call(Some(Api::CudaMalloc), 2000, true);
        statistics.peak(0, 512, 2 << 20);
        statistics.peak(0, 0, 2 << 20);
        let lines = statistics.lines();
        assert_eq!(lines[0], "GPU 0: peak allocated 512 B, peak reserved 2.00 MiB");
        // A histogram with two digits reports 512 as a value from 510 to 519.
        assert!(lines[1].starts_with("1 block: p50 51"), "{}", lines[1]);
        assert!(lines[2].contains("p50 2.0 us, p99 2.0 us"), "{}", lines[2]);
        assert!(
            lines[2].starts_with("cudaMalloc: 1 call,") && lines[2].ends_with("1 failed"),
            "{}",
            lines[2]
        );
    }
}
