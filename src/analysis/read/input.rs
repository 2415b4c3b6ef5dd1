//! The TRACE argument of a command: a file, or the folder of a run.

use std::path::{Path, PathBuf};

use memtrace_trace::Error as TraceError;
use memtrace_trace::counts::counted;
use memtrace_trace::files as names;
use rustc_hash::FxHashMap;

use crate::error::{Error, Result};
use crate::read::snapshot;
use crate::read::stream::{ProcessKey, TraceFile, process_key};

/// The traces of one run, one per process.
///
/// ```
/// use memtrace_analysis::read::input::Input;
///
/// # let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/sharded");
/// let run = Input::open(&folder)?;
/// let ranks: Vec<i32> = run.traces.iter().map(|trace| trace.meta.rank).collect();
/// assert_eq!(ranks, [0, 1, 2, 3]);
/// # Ok::<(), memtrace_analysis::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Input {
    /// The path that the user gave, or the subfolder of it in which the traces were found.
    pub path: PathBuf,
    /// The traces, in order of rank and start time.
    pub traces: Vec<TraceFile>,
    /// Notes on files that were left out.
    pub notes: Vec<String>,
    /// The files of other runs, which were left out.
    pub others: Vec<PathBuf>,
}

impl Input {
    /// Opens the file or folder at `path`. If a folder has no trace, this opens its PyTorch memory snapshots
    /// or, if it has none, its newest subfolder with a trace. If a folder has several runs, this opens the
    /// newest. Files of a folder that cannot be opened are left out with a note.
    ///
    /// # Errors
    /// When there is no trace, or when the file at `path`, or each file of the folder, cannot be opened.
    pub fn open(path: &Path) -> Result<Input> {
        let io = |source| TraceError::Io { path: path.to_owned(), source };
        if !std::fs::metadata(path).map_err(io)?.is_dir() {
            let trace = TraceFile::open(path)?;
            return Ok(Input {
                path: path.to_owned(),
                traces: vec![trace],
                notes: Vec::new(),
                others: Vec::new(),
            });
        }
        // A process that was killed at its start leaves an empty file, which `memtrace_recover::begin`
        // completes if there is a journal. The other files are still read.
        let has_bytes = |file: &PathBuf| std::fs::metadata(file).map_or(true, |data| data.len() > 0);
        let (files, empty): (Vec<_>, Vec<_>) = trace_files(path)?.into_iter().partition(has_bytes);
        let (mut traces, mut wrong) = opened(&files);
        if traces.is_empty() && empty.is_empty() {
            let (snapshots, wrong_snapshots) = opened(&snapshot_files(path)?);
            traces = snapshots;
            wrong.extend(wrong_snapshots);
        }
        if traces.is_empty() {
            if empty.is_empty()
                && let Some(newest) = newest_run(path)?
            {
                return Input::open(&newest);
            }
            let first = wrong.into_iter().next();
            return Err(first.unwrap_or_else(|| TraceError::NoTrace { path: path.to_owned() }.into()));
        }
        let traces = joined(traces);
        let newest = traces.iter().max_by_key(|trace| trace.meta.start_unix_ns);
        let run = newest.map(|trace| trace.meta.run_id.clone()).unwrap_or_default();
        let mut input = Input { path: path.to_owned(), traces, notes: Vec::new(), others: Vec::new() };
        if !empty.is_empty() {
            let files = counted(empty.len() as u64, "empty file");
            input
                .notes
                .push(format!("ignored {files}: a process is starting, or was killed before its first row"));
        }
        if let Some((first, more)) = wrong.split_first() {
            let more = match more.len() as u64 {
                0 => String::new(),
                more => format!("; and {}", counted(more, "other file")),
            };
            input.notes.push(format!("ignored {first}{more}"));
        }
        let others = input.only_run(&run);
        if others > 0 {
            let files = counted(others as u64, "file");
            input.notes.push(format!("ignored {files} of other runs in this folder"));
        }
        input.traces.sort_by(|a, b| {
            let key = |t: &TraceFile| (t.meta.rank, t.meta.start_unix_ns);
            key(a).cmp(&key(b)).then_with(|| a.path.cmp(&b.path))
        });
        Ok(input)
    }

    /// Returns the files of all traces.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.traces.iter().flat_map(TraceFile::files)
    }

    /// Keeps only the traces of one launch and adds the files of the removed traces to `others`. Returns the
    /// number of removed traces.
    pub fn only_run(&mut self, run_id: &str) -> usize {
        let (own, others): (Vec<_>, Vec<_>) =
            self.traces.drain(..).partition(|trace| trace.meta.run_id == run_id);
        self.traces = own;
        self.others.extend(others.iter().flat_map(TraceFile::files).map(Path::to_owned));
        others.len()
    }

    /// Keeps only the traces of one rank. The result may be empty.
    pub fn only_rank(&mut self, rank: i32) {
        self.traces.retain(|trace| trace.meta.rank == rank);
    }
}

/// Opens the sorted files of a folder. Returns the traces, and the errors of the files that cannot be opened. A file
/// that the recorder removed after the folder was listed (`MEMTRACE_KEEP`) is left out. A file that the recorder
/// compressed meanwhile is opened under its new name.
fn opened(files: &[PathBuf]) -> (Vec<TraceFile>, Vec<Error>) {
    let (mut traces, mut gone, mut wrong) = (Vec::<TraceFile>::new(), Vec::new(), Vec::new());
    for file in files {
        match TraceFile::open(file) {
            // The list has both the plain and the compressed file of this part. The other entry opens it.
            Ok(trace) if trace.path != *file && files.binary_search(&trace.path).is_ok() => {}
            Ok(trace) => traces.push(trace),
            Err(error) if error.is_no_file() => gone.push((file, error)),
            Err(error) => wrong.push(error),
        }
    }
    for (file, error) in gone {
        let process = names::process_name(file);
        let is_of =
            |trace: &TraceFile| !trace.meta.keep.is_empty() && names::process_name(&trace.path) == process;
        if !traces.iter().any(is_of) {
            wrong.push(error);
        }
    }
    (traces, wrong)
}

/// Joins the parts of rotated traces.
fn joined(mut files: Vec<TraceFile>) -> Vec<TraceFile> {
    files.sort_by_key(|file| file.meta.part);
    let mut traces: Vec<TraceFile> = Vec::new();
    // For each process: the indices of its traces (several if files were copied), the number of the current
    // part, and the number of traces that already have that part.
    let mut processes: FxHashMap<ProcessKey, (Vec<usize>, u32, usize)> = FxHashMap::default();
    for file in files {
        let (own, part, taken) = processes.entry(process_key(&file.meta)).or_default();
        if *part != file.meta.part {
            (*part, *taken) = (file.meta.part, 0);
        }
        let left = match own.get(*taken) {
            Some(at) => traces[*at].join(file),
            None => Some(file),
        };
        *taken += 1;
        if let Some(file) = left {
            own.push(traces.len());
            traces.push(file);
        }
    }
    traces
}

/// Returns the trace files in a folder, without its subfolders.
pub(crate) fn trace_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = children(folder)?;
    files.retain(|file| {
        file.file_name().is_some_and(|name| names::is_trace(&name.to_string_lossy())) && file.is_file()
    });
    // A part that is being compressed exists twice. Only the uncompressed file is complete.
    files.retain(|file| !names::uncompressed(file).is_some_and(|plain| plain.exists()));
    files.sort();
    Ok(files)
}

/// Returns the memory snapshots of PyTorch in a folder, without its subfolders.
fn snapshot_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = children(folder)?;
    files.retain(|file| snapshot::is_snapshot_name(file) && file.is_file());
    files.retain(|file| !names::uncompressed(file).is_some_and(|plain| plain.exists()));
    files.sort();
    // Of a snapshot that was compressed twice, one counts.
    files.dedup_by_key(|file| names::uncompressed(file).unwrap_or_else(|| file.clone()));
    Ok(files)
}

/// Returns the subfolder of `folder` whose run began last, among the subfolders that contain a trace. The ranks of
/// a run begin together, so one of its traces tells when.
pub(crate) fn newest_run(folder: &Path) -> Result<Option<PathBuf>> {
    let mut newest = None;
    for child in children(folder)? {
        if !child.is_dir() {
            continue;
        }
        // A subfolder that cannot be listed does not hide the others.
        let files = trace_files(&child).unwrap_or_default();
        if !files.is_empty() {
            let began =
                files.iter().find_map(|file| TraceFile::open(file).ok()).map(|file| file.meta.start_unix_ns);
            newest = newest.max(Some((began, child)));
        }
    }
    Ok(newest.map(|(_, child)| child))
}

fn children(folder: &Path) -> Result<Vec<PathBuf>> {
    let io = |source| TraceError::Io { path: folder.to_owned(), source };
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        paths.push(entry.map_err(io)?.path());
    }
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use memtrace_trace::meta::Meta;

    use super::*;
    use crate::testing::TraceBuilder;
    use crate::testing::pickled::{block, dict, list, segment};

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("memtrace-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    fn trace(start_unix_ns: i64, run_id: &str) -> Vec<u8> {
        TraceBuilder::new(Meta { start_unix_ns, run_id: run_id.to_owned(), ..Meta::default() }).finish()
    }

    #[test]
    fn a_file_that_is_no_trace_is_left_out_with_a_note() {
        let folder = folder("foreign");
        let (own, metrics) = (folder.join("a.csv"), folder.join("metrics.csv"));
        std::fs::write(&metrics, "epoch,loss\n1,2\n").unwrap();
        let alone = Input::open(&folder).map(|_| ()).unwrap_err().to_string();
        std::fs::write(&own, trace(1, "run")).unwrap();
        let header = trace(1, "run").split_inclusive(|byte| *byte == b'\n').next().unwrap().to_vec();
        std::fs::write(folder.join("rank1.csv"), header).unwrap();
        let both = Input::open(&folder);
        let named = Input::open(&metrics).map(|_| ()).unwrap_err().to_string();
        std::fs::remove_dir_all(&folder).unwrap();

        assert!(alone.contains("metrics.csv: not a memtrace trace"), "{alone}");
        assert_eq!(named, alone);
        let both = both.unwrap();
        assert_eq!(both.traces.iter().map(|trace| &trace.path).collect::<Vec<_>>(), [&own]);
        assert_eq!(both.notes, [format!("ignored {named}; and 1 other file")]);
    }

    #[test]
    fn a_file_that_is_no_trace_hides_no_snapshot_and_no_subfolder() {
        let folder = folder("beside");
        std::fs::write(folder.join("metrics.csv"), "epoch,loss\n1,2\n").unwrap();
        std::fs::create_dir(folder.join("run")).unwrap();
        std::fs::write(folder.join("run/a.csv"), trace(1, "run")).unwrap();
        let run = Input::open(&folder).map(|input| input.path);
        std::fs::write(folder.join("tokenizer.pkl"), [0x80, 2, b'.']).unwrap();
        let segments = list(&[dict(&segment(4096, 512, &[block(4096, 512, "active_allocated")]))]);
        let pickle = dict(&vec![("segments", segments), ("device_traces", list(&[list(&[])]))]);
        std::fs::write(folder.join("snapshot.pickle"), [&[0x80, 4], &pickle[..], b"."].concat()).unwrap();
        let snapshot = Input::open(&folder);
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(run.unwrap(), folder.join("run"));
        let snapshot = snapshot.unwrap();
        assert_eq!(snapshot.traces[0].path, folder.join("snapshot.pickle"));
        assert!(snapshot.notes[0].ends_with("; and 1 other file"), "{:?}", snapshot.notes);
    }

    #[test]
    fn the_newest_run_began_last_whichever_folder_changed_last() {
        let folder = folder("newest");
        for (run, start_unix_ns) in [("newer", 2), ("older", 1)] {
            let own = folder.join(run);
            std::fs::create_dir_all(&own).unwrap();
            std::fs::write(own.join("a.csv"), trace(start_unix_ns, run)).unwrap();
            // An empty file of a process that is starting.
            std::fs::write(own.join("0.csv"), "").unwrap();
        }
        let newest = newest_run(&folder);
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(newest.unwrap(), Some(folder.join("newer")));
    }
}
