//! The assumption about results whose size depends on unknown values.

/// The assumption about results whose size depends on unknown values: the results of `nonzero`, `unique` and
/// boolean masks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DynamicSizes {
    /// Every element is nonzero, unique or selected. This gives the largest possible
    /// result and is the default.
    Full,
    /// Every second element is nonzero, unique or selected.
    Half,
    /// No element is nonzero, unique or selected.
    Empty,
}

impl DynamicSizes {
    /// Parses the value of `MEMTRACE_PHANTOM_DYNAMIC`. Returns `None` if it is invalid.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        match text.trim() {
            "" | "full" => Some(Self::Full),
            "half" => Some(Self::Half),
            "empty" => Some(Self::Empty),
            _ => None,
        }
    }

    /// Returns the text that [`parse`](Self::parse) reads.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Half => "half",
            Self::Empty => "empty",
        }
    }

    /// Fills a mask that has one byte for each flag.
    pub(crate) fn fill_mask(self, mask: &mut [u8]) {
        match self {
            Self::Full => mask.fill(1),
            Self::Half => mask.iter_mut().enumerate().for_each(|(index, flag)| *flag = (index % 2) as u8),
            Self::Empty => mask.fill(0),
        }
    }

    /// Returns the assumed number of elements out of `all`.
    pub(crate) fn count_of(self, all: u64) -> u64 {
        match self {
            Self::Full => all,
            Self::Half => all / 2,
            Self::Empty => 0,
        }
    }
}
