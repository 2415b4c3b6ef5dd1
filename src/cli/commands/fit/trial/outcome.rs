//! The outcome of a trial, and the text that its program printed.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;

use memtrace_analysis::render::phantom_run::PhantomRun;

use super::peak::PeakUse;

/// The files in the folder of a trial with the output of its program.
pub(crate) const STDOUT: &str = "stdout.txt";
pub(crate) const STDERR: &str = "stderr.txt";

/// The maximum number of bytes of an output that are read: a program may print gigabytes.
const MOST_OUTPUT: u64 = 16 << 20;

/// The outcome of a trial with one value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TrialOutcome {
    /// The status is 0, and no request ran out of memory.
    Fits,
    /// The trial ran out of memory. The text describes the request that failed, or is empty if the request is
    /// unknown.
    TooBig(String),
    /// The trial fits on the card, but had more host memory than `--host-mem`. The text has both sizes.
    TooBigForHost(String),
    /// The trial failed for another reason. The fields are its status or signal, and the last lines of its
    /// stderr.
    Failed(String, Vec<String>),
}

impl TrialOutcome {
    /// Returns the outcome in one or a few words, for tables and `--json`.
    pub(crate) fn word(&self) -> &'static str {
        match self {
            TrialOutcome::Fits => "fits",
            TrialOutcome::TooBig(_) | TrialOutcome::TooBigForHost(_) => "out of memory",
            TrialOutcome::Failed(..) => "failed",
        }
    }

    /// Returns true if the trial fits on the card but not in host memory.
    pub(crate) fn exceeds_host(&self) -> bool {
        matches!(self, TrialOutcome::TooBigForHost(_))
    }
}

/// A trial with one value.
pub(crate) struct Trial {
    /// The name of the trial: whatever differs between the trials of the request, such as the value, the card and
    /// the sequence length.
    pub(crate) label: String,
    /// The value of the search, as text; empty if no value is searched for.
    pub(crate) value: String,
    pub(crate) outcome: TrialOutcome,
    pub(crate) took: Duration,
    /// The folder of the trial's traces, as the user would type it.
    pub(crate) folder: PathBuf,
    /// `folder` as an absolute path.
    pub(crate) files: PathBuf,
    /// The peaks; all zero if there is no trace.
    pub(crate) peak: PeakUse,
}

impl Trial {
    /// Returns the folder of the trial's traces as the user would type it, or `None` if it was removed.
    pub(crate) fn existing_folder(&self) -> Option<String> {
        self.files.exists().then(|| self.folder.display().to_string())
    }
}

/// Returns the end of a file with the output of a trial, at most [`MOST_OUTPUT`] bytes; empty if there is no such file.
pub(crate) fn output(folder: &Path, name: &str) -> String {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(folder.join(name))?;
        let size = file.metadata()?.len();
        file.seek(SeekFrom::Start(size.saturating_sub(MOST_OUTPUT)))?;
        let mut bytes = Vec::new();
        file.take(MOST_OUTPUT).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    String::from_utf8_lossy(&read().unwrap_or_default()).into_owned()
}

/// Returns the bytes of weights that the script of a recipe left unwritten on the host, as it prints. They are not
/// resident, and would be if the script had loaded them.
pub(super) fn unwritten_bytes(folder: &Path) -> i64 {
    let text = output(folder, STDOUT);
    let number = |line: &str| {
        let rest = line.strip_prefix("unwritten weights on the host: ")?;
        rest.strip_suffix(" bytes")?.parse().ok().filter(|bytes: &i64| *bytes >= 0)
    };
    text.lines().find_map(number).unwrap_or(0)
}

/// Returns true if a program's stderr reports that GPU memory ran out. This is needed where the trace has no
/// OOM, because the failed allocation was not made by torch's caching allocator but by a library or the
/// cudaMallocAsync backend.
pub(super) fn says_out_of_memory(text: &str) -> bool {
    [
        "CUDA out of memory",
        "CUDA error: out of memory",
        "OutOfMemoryError",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "CUDNN_STATUS_ALLOC_FAILED",
        // vLLM refuses to start when its KV cache is too small.
        "No available memory for the cache blocks",
        "larger than the available KV cache",
        // To print an OOM, PyTorch queries NVML. On a Jetson, NVML cannot list processes, so this assertion
        // fails.
        "NVML_SUCCESS == r INTERNAL ASSERT FAILED",
    ]
    .iter()
    .any(|phrase| text.contains(phrase))
}

/// Returns the note on the figures of trials on simulated `gpus`.
pub(crate) fn note<'t>(trials: impl Iterator<Item = &'t Trial>, gpus: &str) -> String {
    let acted_at = trials.flat_map(|trial| trial.peak.acted_at.iter().cloned()).collect();
    let run = PhantomRun { acted_at, ..PhantomRun::default() };
    let doubt = run.warning().unwrap_or_else(|| {
        format!("simulated {gpus}: allocated memory is exact, because PyTorch computes it")
    });
    format!("note: {doubt}; reserved memory is an estimate")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn of_a_huge_output_only_the_end_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let file = File::create(folder.path().join(STDERR)).unwrap();
        file.set_len(MOST_OUTPUT + 100).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, b"CUDA out of memory", MOST_OUTPUT + 82).unwrap();
        let text = output(folder.path(), STDERR);
        assert_eq!(text.len() as u64, MOST_OUTPUT);
        assert!(says_out_of_memory(&text) && text.ends_with("memory"));
        assert_eq!(output(folder.path(), STDOUT), "");
    }

    #[test]
    fn the_figures_that_recipes_print_are_read() {
        let files = tempfile::tempdir().unwrap();
        for (template, start) in [
            (include_str!("../recipe/scripts/infer.py"), "unwritten weights"),
            (include_str!("../recipe/scripts/serve.py"), "KV cache"),
        ] {
            // The line as the script prints it, with 42 as the figure.
            let (_, rest) = template.split_once(&format!("print(f\"{start}")).unwrap();
            let (before, rest) = rest.split_once('{').unwrap();
            let (_, rest) = rest.split_once('}').unwrap();
            let (after, _) = rest.split_once('"').unwrap();
            fs::write(files.path().join(STDOUT), format!("{start}{before}42{after}\n")).unwrap();
            let trial = Trial {
                label: String::new(),
                value: String::new(),
                outcome: TrialOutcome::Fits,
                took: Duration::ZERO,
                folder: PathBuf::new(),
                files: files.path().to_owned(),
                peak: PeakUse::default(),
            };
            let read = match start {
                "KV cache" => crate::commands::fit::ask::cache_tokens(&trial).map(|tokens| tokens as i64),
                _ => Some(unwritten_bytes(files.path())),
            };
            assert_eq!(read, Some(42), "{start}");
        }
    }
}
