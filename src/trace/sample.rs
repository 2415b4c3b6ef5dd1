//! The values of a `sample` row.
//!
//! The `name` of the row contains them as `key=value`, in bytes; unknown values are omitted.
//! `device_free_bytes` also contains the free memory.

use std::fmt;

use crate::key_values::{bytes_of, value_of};

/// The state of a device as reported by the driver or NVML, in bytes; `None` is unknown.
///
/// ```
/// use memtrace_trace::sample::Sample;
///
/// let sample = Sample::parse("total=85899345920 free=64424509440 process=20401094656");
/// assert_eq!(sample.used(), Some(20 << 30));
/// assert_eq!(sample.others, None);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// The total memory of the device.
    pub total: Option<i64>,
    /// The free memory.
    pub free: Option<i64>,
    /// The memory of this process, including its context and code.
    pub process: Option<i64>,
    /// The memory of other processes.
    pub others: Option<i64>,
    /// The used part of BAR1, the window through which the host accesses device memory.
    pub bar1: Option<i64>,
    /// The memory held by the device's current memory pool (`cudaMallocAsync`).
    pub pool_reserved: Option<i64>,
    /// The allocated part of the memory pool.
    pub pool_used: Option<i64>,
    /// The memory held for the memory nodes of CUDA graphs.
    pub graphs: Option<i64>,
    /// For a device that shares the host's memory: the page cache, which counts as used but is reclaimed if
    /// memory runs low.
    pub cache: Option<i64>,
    /// For a device that shares the host's memory: the host memory of this process and its children, without
    /// file pages.
    pub host: Option<i64>,
}

/// The keys, in the order of [`Sample::values`].
const KEYS: [&str; 10] =
    ["total", "free", "process", "others", "bar1", "pool_reserved", "pool_used", "graphs", "cache", "host"];

impl Sample {
    fn values(&self) -> [Option<i64>; 10] {
        let Sample { total, free, process, others, bar1, pool_reserved, pool_used, graphs, cache, host } =
            *self;
        [total, free, process, others, bar1, pool_reserved, pool_used, graphs, cache, host]
    }

    /// Parses the text of a `sample` row. Skips unknown keys, and values that no device can have.
    #[must_use]
    pub fn parse(text: &str) -> Sample {
        let value = |key: &str| value_of(text, key).and_then(bytes_of);
        let [total, free, process, others, bar1, pool_reserved, pool_used, graphs, cache, host] =
            KEYS.map(value);
        Sample { total, free, process, others, bar1, pool_reserved, pool_used, graphs, cache, host }
    }

    /// Returns the used memory of the device. Page cache does not count, because an allocation can reclaim
    /// it.
    #[must_use]
    pub fn used(&self) -> Option<i64> {
        Some(self.total? - self.free? - self.cache.unwrap_or(0))
    }

    /// Returns true if the device has no memory of its own: programs and page cache share the host's memory.
    #[must_use]
    pub fn is_unified(&self) -> bool {
        self.cache.is_some()
    }

    /// Returns this sample, updated with the known values of a `later` one.
    #[must_use]
    pub fn updated(self, later: Sample) -> Sample {
        Sample {
            total: later.total.or(self.total),
            free: later.free.or(self.free),
            process: later.process.or(self.process),
            others: later.others.or(self.others),
            bar1: later.bar1.or(self.bar1),
            pool_reserved: later.pool_reserved.or(self.pool_reserved),
            pool_used: later.pool_used.or(self.pool_used),
            graphs: later.graphs.or(self.graphs),
            cache: later.cache.or(self.cache),
            host: later.host.or(self.host),
        }
    }
}

impl fmt::Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut between = "";
        for (key, value) in KEYS.iter().zip(self.values()) {
            if let Some(value) = value {
                write!(f, "{between}{key}={value}")?;
                between = " ";
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_read_as_it_was_written() {
        let sample = Sample { total: Some(100), free: Some(40), others: Some(0), ..Sample::default() };
        assert_eq!(sample.to_string(), "total=100 free=40 others=0");
        assert_eq!(Sample::parse(&sample.to_string()), sample);
        assert_eq!(Sample::parse("more=1 free=x total=7"), Sample { total: Some(7), ..Sample::default() });
        assert_eq!((sample.used(), sample.is_unified()), (Some(60), false));
        let unified = Sample { cache: Some(30), host: Some(20), ..sample };
        assert_eq!(unified.to_string(), "total=100 free=40 others=0 cache=30 host=20");
        assert_eq!((unified.used(), unified.is_unified()), (Some(30), true));
    }
}
