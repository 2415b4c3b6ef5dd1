//! What a device holds beside the calls that a trace has: one rule for the ledger, the exit summary and the
//! lines of an OOM.

use crate::sample::Sample;

/// What the calls of a process account for on a device, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accounted {
    /// Segments of torch's allocator.
    pub reserved: i64,
    /// Memory outside it, without managed memory: that lies wherever it was touched last.
    pub outside: i64,
}

/// What a look at the device shows beyond that, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rest {
    /// Held by the driver's memory pool and not given out.
    pub pool: i64,
    /// Held for memory nodes of CUDA graphs.
    pub graphs: i64,
    /// The process's context, its kernels, and what the driver rounds up; `None` when what the process has is
    /// not known.
    pub context: Option<i64>,
    /// What other processes have.
    pub others: Option<i64>,
    /// What nobody has told of. With an unknown `context` or `others` it is in here.
    pub unexplained: Option<i64>,
}

impl Rest {
    /// What `sample` shows beyond what was accounted for at the same moment.
    #[must_use]
    pub fn of(sample: &Sample, accounted: Accounted) -> Rest {
        let pool = match (sample.pool_reserved, sample.pool_used) {
            (Some(reserved), Some(used)) => (reserved - used).max(0),
            _ => 0,
        };
        let graphs = sample.graphs.unwrap_or(0);
        let known = accounted.reserved + accounted.outside + pool + graphs;
        let context = sample.process.map(|process| (process - known).max(0));
        let others = sample.others;
        let unexplained =
            sample.used().map(|used| (used - known - context.unwrap_or(0) - others.unwrap_or(0)).max(0));
        Rest { pool, graphs, context, others, unexplained }
    }

    /// All of it.
    #[must_use]
    pub fn total(&self) -> i64 {
        let Rest { pool, graphs, context, others, unexplained } = *self;
        pool + graphs + context.unwrap_or(0) + others.unwrap_or(0) + unexplained.unwrap_or(0)
    }

    /// Its parts that hold something, each with its name.
    #[must_use]
    pub fn parts(&self) -> Vec<(&'static str, i64)> {
        let parts = [
            ("in the driver's pool, not given out", Some(self.pool)),
            ("held for CUDA graphs", Some(self.graphs)),
            ("context and modules", self.context),
            ("other processes", self.others),
            (self.unexplained_name(), self.unexplained),
        ];
        parts
            .into_iter()
            .filter_map(|(name, bytes)| Some((name, bytes.filter(|bytes| *bytes > 0)?)))
            .collect()
    }

    /// What `unexplained` is, by what is known.
    #[must_use]
    pub fn unexplained_name(&self) -> &'static str {
        match (self.context, self.others) {
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
    fn what_is_used_is_explained_once() {
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
        let rest = Rest::of(&sample, accounted);
        assert_eq!(
            (rest.pool, rest.context, rest.others, rest.unexplained),
            (40, Some(110), Some(150), Some(50))
        );
        assert_eq!(accounted.reserved + accounted.outside + rest.total(), 700);
        let container = Rest::of(&Sample { process: None, others: None, ..sample }, accounted);
        assert_eq!(container.parts().last(), Some(&("context, modules and other processes", 310)));
        assert_eq!(container.total(), rest.total());
    }
}
