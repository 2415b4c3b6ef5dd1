//! The facts about the process that the recorder needs; the preloaded library fills them in at load.

use std::path::{Path, PathBuf};

use memtrace_trace::config::{Settings, fill, fill_path};
use memtrace_trace::rounding::Rounding;
use memtrace_trace::sample::Sample;
use memtrace_trace::{Api, Meta};

/// Samples devices: each with the API that answered.
pub type SampleDevices = fn(&[i8]) -> Vec<(i8, Api, Sample)>;

/// The facts about the process that the recorder needs.
pub struct Session {
    /// The settings.
    pub settings: Settings,
    /// The folder of the trace; absolute, because the program may change its working directory.
    pub out: PathBuf,
    /// The host's name, in characters that a file name may hold.
    pub host: String,
    /// The distributed rank.
    pub rank: i32,
    /// The allocator's rounding rule.
    pub rounding: Rounding,
    /// True if torch's native caching allocator reports blocks. If not, the runtime's calls are the blocks.
    pub caching: bool,
    /// Fills in the fields of the meta row that only a running CUDA knows; called on the writer thread.
    pub describe: fn(&mut Meta),
    /// Additional `key=value` words for the end row; called on the writer thread at the end.
    pub conclude: fn() -> String,
    /// Samples devices, given by CUDA ordinal; called on the writer thread.
    pub sample: SampleDevices,
    /// Resets the state of the caller in a child in which no handler of `pthread_atfork` ran.
    pub start_anew: fn(),
    /// Prints a line on stderr with the prefix `memtrace: `.
    pub say: fn(&str),
}

impl Session {
    /// A name of the settings with its placeholders filled in.
    #[must_use]
    pub fn named(&self, pattern: &str) -> String {
        fill(pattern, &self.host, self.rank, std::process::id(), &self.run())
    }

    /// A path of the settings with its placeholders filled in.
    #[must_use]
    pub fn named_path(&self, pattern: &Path) -> PathBuf {
        fill_path(pattern, &self.host, self.rank, std::process::id(), &self.run())
    }

    /// The id of the run, as it may stand in a file name.
    fn run(&self) -> String {
        // The id of a run comes from the environment and may hold any character.
        let safe = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
        self.settings.run_id.chars().map(safe).collect()
    }
}
