//! Splits the used memory of a device into the memory of traced calls and the rest. The ledger report, the
//! exit summary and the OOM message use this split.

use crate::sample::Sample;

/// The name of [`Rest::host`] in reports.
pub const HOST: &str = "host memory of the process";

/// The memory of a device that the traced calls of a process explain, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accounted {
    /// Segments of torch's allocator.
    pub reserved: i64,
    /// Memory outside torch's allocator. Managed memory is excluded, because it resides where it was last
    /// accessed.
    pub outside: i64,
}

/// The used memory of a device in addition to [`Accounted`], in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rest {
    /// Free memory held by the driver's memory pool.
    pub pool: i64,
    /// Memory held for the memory nodes of CUDA graphs.
    pub graphs: i64,
    /// The CUDA context of the process, its loaded kernels, and the driver's rounding; `None` if the memory
    /// of the process is unknown.
    pub context: Option<i64>,
    /// The memory of other processes.
    pub others: Option<i64>,
    /// For a device that shares the host's memory: the host memory of the process and its children.
    pub host: Option<i64>,
    /// Memory without a known holder. It includes `context` and `others` when these are unknown.
    pub unexplained: Option<i64>,
}

impl Rest {
    /// Returns the memory in `sample` in addition to the memory `accounted` for at the same time.
    #[must_use]
    pub fn new(sample: &Sample, accounted: Accounted) -> Rest {
        let pool = match (sample.pool_reserved, sample.pool_used) {
            (Some(reserved), Some(used)) => (reserved - used).max(0),
            _ => 0,
        };
        let graphs = sample.graphs.unwrap_or(0);
        let known = accounted.reserved + accounted.outside + pool + graphs;
        let context = sample.process.map(|process| (process - known).max(0));
        let others = sample.others;
        let host = sample.host;
        let named = context.unwrap_or(0) + others.unwrap_or(0) + host.unwrap_or(0);
        let unexplained = sample.used().map(|used| (used - known - named).max(0));
        Rest { pool, graphs, context, others, host, unexplained }
    }

    /// Returns the sum of all parts.
    #[must_use]
    pub fn total(&self) -> i64 {
        let Rest { pool, graphs, context, others, host, unexplained } = *self;
        let parts = [context, others, host, unexplained];
        pool + graphs + parts.into_iter().flatten().sum::<i64>()
    }

    /// Returns the nonzero parts with their names.
    #[must_use]
    pub fn parts(&self) -> Vec<(&'static str, i64)> {
        let parts = [
            ("in the driver's pool, not given out", Some(self.pool)),
            ("held for CUDA graphs", Some(self.graphs)),
            ("context and modules", self.context),
            ("other processes", self.others),
            (HOST, self.host),
            (self.unexplained_name(), self.unexplained),
        ];
        parts
            .into_iter()
            .filter_map(|(name, bytes)| Some((name, bytes.filter(|bytes| *bytes > 0)?)))
            .collect()
    }

    /// Returns the name of `unexplained`, which depends on which other parts are known.
    #[must_use]
    pub fn unexplained_name(&self) -> &'static str {
        match (self.context, self.others) {
            (Some(_), _) if self.host.is_some() => "the system and other programs",
            (None, _) if self.host.is_some() => "context and modules, the system and other programs",
            (Some(_), Some(_)) => "unexplained",
            (Some(_), None) => "other processes, or unexplained",
            (None, Some(_)) => "context and modules, or unexplained",
            (None, None) => "context, modules and other processes",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ledger_counts_each_used_byte_once() {
        let sample = Sample {
            total: Some(1000),
            free: Some(300),
            process: Some(500),
            others: Some(150),
            pool_reserved: Some(60),
            pool_used: Some(20),
            ..Sample::default()
        };
        let accounted = Accounted { reserved: 300, outside: 50 };
        let rest = Rest::new(&sample, accounted);
        assert_eq!(
            (rest.pool, rest.context, rest.others, rest.unexplained),
            (40, Some(110), Some(150), Some(50))
        );
        assert_eq!(accounted.reserved + accounted.outside + rest.total(), 700);
        let container = Rest::new(&Sample { process: None, others: None, ..sample }, accounted);
        assert_eq!(container.parts().last(), Some(&("context, modules and other processes", 310)));
        assert_eq!(container.total(), rest.total());
        let unified = Sample { others: None, bar1: None, cache: Some(100), host: Some(50), ..sample };
        let rest = Rest::new(&unified, accounted);
        // 1000 bytes in all, minus 300 free, 100 of page cache, 500 of the process on the device and 50 of
        // the process on the host -> 50 are unexplained.
        assert_eq!((rest.host, rest.unexplained), (Some(50), Some(50)));
        assert_eq!(rest.parts().last(), Some(&("the system and other programs", 50)));
    }
}
