//! The facts about the process that the recorder needs; the preloaded library fills them in at load.

use std::path::{Path, PathBuf};

use memtrace_trace::config::{Compression, Settings, fill, fill_path};
use memtrace_trace::rounding::Rounding;
use memtrace_trace::sample::Sample;
use memtrace_trace::{Api, Meta};

/// Samples devices.
pub type SampleDevices = fn(&[i8]) -> Vec<SampledDevice>;

/// The sample of a device.
pub struct SampledDevice {
    /// The CUDA ordinal.
    pub device: i8,
    /// The API that provided the sample.
    pub api: Api,
    /// The values.
    pub sample: Sample,
    /// The other processes on the device that the driver lists, with their bytes.
    pub others: Vec<(u32, Option<i64>)>,
    /// True if `/proc` has the ids of `others`. In a PID namespace, it has other ids.
    pub has_names: bool,
}

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
    /// Fills in the fields of the meta row that are known only while CUDA runs; called on the writer thread.
    pub describe: fn(&mut Meta),
    /// Returns additional `key=value` words for the end row; called on the writer thread at each flush and at
    /// the end.
    pub conclude: fn() -> String,
    /// Samples devices, given by CUDA ordinal; called on the writer thread.
    pub sample: SampleDevices,
    /// Resets the state of the preloaded library in a child in which no handler of `pthread_atfork` ran.
    pub start_anew: fn(),
    /// Prints a line on stderr with the prefix `memtrace: `.
    pub say: fn(&str),
    /// Prints the reason why the trace could not be written, and reports the failure to the launcher.
    pub fail: fn(&str),
}

impl Session {
    /// Fills in the placeholders of a name from the settings, such as the rank and the host.
    #[must_use]
    pub fn named(&self, pattern: &str) -> String {
        fill(pattern, &self.host, self.rank, std::process::id(), &run_in_name(&self.settings.run_id))
    }

    /// Fills in the placeholders of a path from the settings; see [`Session::named`].
    #[must_use]
    pub fn named_path(&self, pattern: &Path) -> PathBuf {
        fill_path(pattern, &self.host, self.rank, std::process::id(), &run_in_name(&self.settings.run_id))
    }

    /// Returns the name of the trace without its extension. The name never begins with `.` or `-`.
    #[must_use]
    pub fn trace_name(&self) -> String {
        plain_file_name(self.named(&self.settings.name))
    }

    /// Returns the path at which a message tells the user to read the trace. This is the folder if the trace
    /// has several parts or is compressed: then the file `trace` may be only one part, and may be compressed
    /// or removed when the user reads it.
    pub(crate) fn path_for_user<'a>(&'a self, trace: &'a Path) -> &'a Path {
        let settings = &self.settings;
        let is_split = settings.rotate_bytes > 0 || settings.rotate_secs > 0;
        if is_split || settings.compress != Compression::Off { &self.out } else { trace }
    }
}

/// Returns a name that is not the name of a hidden file and that no command takes for an option. `name` may
/// begin with the id of the run, which may be empty.
fn plain_file_name(name: String) -> String {
    if name.starts_with(['.', '-']) { format!("_{name}") } else { name }
}

/// The maximum number of characters of a run's id in a file name. The file system allows 255 characters in
/// all.
const MAX_RUN: usize = 100;

/// Returns the id of a run as a part of a file name. The id comes from the environment and may hold any
/// character.
fn run_in_name(run: &str) -> String {
    let plain = |(index, c): (usize, char)| {
        let is_plain = c.is_ascii_alphanumeric() || "-_".contains(c) || (c == '.' && index > 0);
        if is_plain { c } else { '_' }
    };
    run.chars().take(MAX_RUN).enumerate().map(plain).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a session of rank 0 with these variables.
    fn session(variables: &[(&str, &str)]) -> Session {
        let value = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
        Session {
            settings: Settings::from_lookup(value).0,
            out: PathBuf::from("/out"),
            host: "host".to_owned(),
            rank: 0,
            rounding: Rounding::default(),
            caching: true,
            describe: |_| {},
            conclude: String::new,
            sample: |_| Vec::new(),
            start_anew: || {},
            say: |_| {},
            fail: |_| {},
        }
    }

    #[test]
    fn a_message_names_the_folder_of_a_trace_that_is_split_or_compressed() {
        let trace = Path::new("/out/t.csv");
        assert_eq!(session(&[]).path_for_user(trace), trace);
        for variable in [
            ("MEMTRACE_COMPRESS", "zst"),
            ("MEMTRACE_ROTATE", "1m"),
            ("MEMTRACE_ROTATE_SECS", "60"),
            ("MEMTRACE_KEEP", "2g"),
        ] {
            assert_eq!(session(&[variable]).path_for_user(trace), Path::new("/out"), "{variable:?}");
        }
    }

    #[test]
    fn the_id_of_a_run_makes_no_hidden_file_and_no_other_folder() {
        for (run, shown) in [
            ("", ""),
            (".hidden", "_hidden"),
            ("..", "_."),
            ("../x", "_._x"),
            ("a.b-c_1", "a.b-c_1"),
            ("ä/", "__"),
        ] {
            assert_eq!(run_in_name(run), shown, "{run}");
        }
        assert_eq!(run_in_name(&"x".repeat(1000)).len(), MAX_RUN);
    }

    #[test]
    fn the_name_of_a_trace_is_no_hidden_file_and_no_option() {
        for (name, shown) in [("host.1", "host.1"), (".host.1", "_.host.1"), ("-rf.1", "_-rf.1")] {
            assert_eq!(plain_file_name(name.to_owned()), shown);
        }
        let without_run = session(&[("MEMTRACE_NAME", "{run}.{pid}")]);
        assert_eq!(without_run.trace_name(), format!("_.{}", std::process::id()));
    }
}
