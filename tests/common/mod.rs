//! What several tests use. This file compiles C programs on demand, runs them under the preloaded library, and reads
//! and replays their traces.

pub(crate) mod command;
pub(crate) mod commands;
pub(crate) mod copied;
pub(crate) mod installed;
pub(crate) mod pages;
pub(crate) mod parts;
pub(crate) mod pickles;
pub(crate) mod pythons;
pub(crate) mod running;
pub(crate) mod terminal;
pub(crate) mod torch;
pub(crate) mod venv;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};

use memtrace_trace::Api;
use memtrace_trace::csv::RowReader;
use memtrace_trace::{EventName, Row};
use tempfile::TempDir;

/// The path of glibc's dynamic loader on this architecture.
pub(crate) const LOADER: &str =
    if cfg!(target_arch = "aarch64") { "/lib/ld-linux-aarch64.so.1" } else { "/lib64/ld-linux-x86-64.so.2" };

/// Returns the path of a library of this workspace. Prefers the copy among the dependencies, which
/// `cargo test` keeps up to date; the copy next to the command may be stale.
///
/// `scripts/asan` sets `MEMTRACE_TEST_LIBRARY` to a list for `LD_PRELOAD` that replaces the preloaded
/// library.
pub(crate) fn library(name: &str) -> PathBuf {
    if let Some(list) = std::env::var_os("MEMTRACE_TEST_LIBRARY").filter(|_| name == "libmemtrace.so") {
        return list.into();
    }
    let command = Path::new(env!("CARGO_BIN_EXE_memtrace"));
    let beside = command.with_file_name(name);
    let among_dependencies = command.with_file_name("deps").join(name);
    [among_dependencies, beside]
        .into_iter()
        .find(|path| path.exists())
        .unwrap_or_else(|| panic!("{name} is not built"))
}

/// Compiles `tests/programs/<source>` into `<target>`, with further arguments for gcc, and returns its path.
/// A program finds its libraries in its own folder.
pub(crate) fn compiled(source: &str, target: &str, more: &[&str]) -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("programs");
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join(target);
    // Another test run may be executing the old file, so replace it instead of writing into it.
    let fresh = folder.join(format!("{target}.{}", std::process::id()));
    let programs = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs");
    let mut gcc = Command::new("gcc");
    gcc.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-pthread"]);
    if target.contains(".so") {
        gcc.args(["-fPIC", "-shared"]).arg(format!("-Wl,-soname,{target}"));
    }
    gcc.arg("-I").arg(programs.join("include")).arg("-o").arg(&fresh).arg(programs.join(source));
    gcc.current_dir(&folder).args(more).args(["-Wl,-rpath,$ORIGIN", "-ldl"]);
    let output = gcc.output().expect("gcc is there");
    assert!(output.status.success(), "{gcc:?}\n{}", String::from_utf8_lossy(&output.stderr));
    std::fs::rename(&fresh, &path).unwrap();
    path
}

/// A program under the preloaded library, in a folder of its own.
pub(crate) struct Traced {
    command: Command,
    folder: TempDir,
}

impl Traced {
    /// Prepares a run of `program` with these arguments.
    pub(crate) fn new(program: &Path, arguments: &[&str]) -> Traced {
        let folder = TempDir::new().unwrap();
        let mut command = untraced(program, arguments);
        command.env("LD_PRELOAD", library("libmemtrace.so")).env("MEMTRACE_OUT", folder.path().join("out"));
        Traced { command, folder }
    }

    /// Sets an environment variable of the program.
    pub(crate) fn env(mut self, name: &str, value: impl AsRef<std::ffi::OsStr>) -> Traced {
        self.command.env(name, value);
        self
    }

    /// Returns the folder of the program's traces.
    pub(crate) fn out(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    /// Runs the program to its end, whatever its status.
    pub(crate) fn run(mut self) -> TracedRun {
        let output = self.command.output().unwrap();
        TracedRun { output, folder: self.folder }
    }
}

/// Returns a command for `program`, without memtrace and its variables in the environment.
pub(crate) fn untraced(program: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("MEMTRACE_") {
            command.env_remove(name);
        }
    }
    command.args(arguments).env_remove("LD_PRELOAD").env_remove("NVTX_INJECTION64_PATH");
    command
}

/// The result of a run.
pub(crate) struct TracedRun {
    /// Stdout, stderr and the exit status.
    pub(crate) output: Output,
    folder: TempDir,
}

impl TracedRun {
    /// Returns the exit status; a signal counts as 128 + its number, as in a shell.
    pub(crate) fn status(&self) -> i32 {
        use std::os::unix::process::ExitStatusExt;
        let status = self.output.status;
        status.code().or(status.signal().map(|signal| 128 + signal)).unwrap()
    }

    /// Returns the text on stdout.
    pub(crate) fn stdout(&self) -> String {
        String::from_utf8(self.output.stdout.clone()).unwrap()
    }

    /// Returns the text on stderr.
    pub(crate) fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.output.stderr).into_owned()
    }

    /// Returns the numbers on stdout.
    pub(crate) fn numbers(&self) -> Vec<i64> {
        self.stdout().split_whitespace().map(|word| word.parse().unwrap()).collect()
    }

    /// Returns the files of the folder, sorted.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        let Ok(entries) = std::fs::read_dir(self.folder.path().join("out")) else { return Vec::new() };
        let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files
    }

    /// Returns the only trace, which must be complete; see [`Trace::read`].
    pub(crate) fn trace(&self) -> Trace {
        let files = self.files();
        assert_eq!(files.len(), 1, "expected one trace, found {files:?}\n{}", self.stderr());
        Trace::read(&files[0])
    }
}

/// The columns of a row that the tests look at.
#[derive(Clone, Debug)]
pub(crate) struct TraceRow {
    pub(crate) ts_ns: i64,
    pub(crate) tid: i32,
    pub(crate) device: i32,
    pub(crate) event: EventName,
    pub(crate) status: i32,
    pub(crate) api: String,
    pub(crate) source: String,
    pub(crate) alloc_id: i64,
    pub(crate) addr: i64,
    pub(crate) requested: i64,
    pub(crate) delta: i64,
    pub(crate) allocated: i64,
    pub(crate) reserved: i64,
    pub(crate) op: String,
    pub(crate) module: String,
    pub(crate) phase: String,
    pub(crate) step: i64,
    pub(crate) name: String,
}

impl TraceRow {
    fn from_row(row: &Row<'_>) -> TraceRow {
        TraceRow {
            ts_ns: row.ts_ns,
            tid: row.tid,
            device: row.device,
            event: row.event,
            status: row.status,
            api: row.api.to_owned(),
            source: row.source.to_owned(),
            alloc_id: row.alloc_id,
            addr: row.addr,
            requested: row.requested_bytes,
            delta: row.delta_bytes,
            allocated: row.allocated_bytes,
            reserved: row.reserved_bytes,
            op: row.op.to_owned(),
            module: row.module.to_owned(),
            phase: row.phase.to_owned(),
            step: row.step,
            name: row.name.to_owned(),
        }
    }
}

/// A complete trace.
pub(crate) struct Trace {
    /// The rows without the first and the last.
    pub(crate) rows: Vec<TraceRow>,
    /// The text of the last row.
    pub(crate) end: String,
    /// The process id.
    pub(crate) pid: i64,
}

impl Trace {
    /// Reads a complete trace and checks it: `seq` has no gap, the clock never falls, the last row is `end`,
    /// no event was lost, and the rows replay (see [`replay`]).
    pub(crate) fn read(path: &Path) -> Trace {
        let trace = Trace::read_lossy(path);
        for pair in trace.rows.windows(2) {
            assert!(pair[0].ts_ns <= pair[1].ts_ns, "{}: the clock falls at {:?}", path.display(), pair[1]);
        }
        for count in ["lost", "unmatched_frees", "missed_frees", "corrections", "gaps"] {
            assert_eq!(trace.end_count(count), 0, "{}: {}", path.display(), trace.end);
        }
        replay(&trace.rows);
        trace
    }

    /// Reads a complete trace that may have lost events. Checks only that `seq` has no gap and that the last
    /// row is `end`. Skips samples of the host, whose number depends on the clock.
    pub(crate) fn read_lossy(path: &Path) -> Trace {
        let mut reader = RowReader::open(path).unwrap();
        let mut rows = Vec::new();
        let (mut pid, mut seq) = (0, 0);
        while let Some(row) = reader.next_row().unwrap() {
            assert_eq!(row.seq, seq + 1, "{}", path.display());
            pid = i64::from(row.pid);
            seq += 1;
            if row.event != EventName::Sample || row.device >= 0 {
                rows.push(TraceRow::from_row(&row));
            }
        }
        let last = rows.pop().unwrap();
        assert_eq!(last.event, EventName::End, "{}: {last:?}", path.display());
        assert_eq!(rows.remove(0).event, EventName::Meta);
        Trace { rows, end: last.name, pid }
    }

    /// Returns a count of the last row: `lost`, `unmatched_frees`, ...
    pub(crate) fn end_count(&self, name: &str) -> i64 {
        let value = |word: &str| Some(word.strip_prefix(name)?.strip_prefix('=')?.parse().unwrap());
        self.end.split(' ').find_map(value).unwrap_or_else(|| panic!("no {name}: {}", self.end))
    }

    /// Returns the rows of an event.
    pub(crate) fn of(&self, event: EventName) -> Vec<&TraceRow> {
        self.rows.iter().filter(|row| row.event == event).collect()
    }

    /// Returns the only row that allocates `bytes`.
    pub(crate) fn allocation(&self, bytes: i64) -> &TraceRow {
        let found: Vec<_> = self.rows.iter().filter(|row| row.delta == bytes).collect();
        assert_eq!(found.len(), 1, "{bytes} bytes: {found:?}");
        found[0]
    }

    /// Returns the number of rows that allocate memory.
    pub(crate) fn allocations(&self) -> usize {
        self.rows.iter().filter(|row| row.delta > 0).count()
    }

    /// Returns the number of rows that free memory.
    pub(crate) fn frees(&self) -> usize {
        self.rows.iter().filter(|row| row.delta < 0).count()
    }

    /// Returns the bytes that are live at the end.
    pub(crate) fn live(&self) -> i64 {
        self.rows.iter().map(|row| row.delta).sum()
    }
}

/// Checks every row against a replay of the rows before it: each free returns the memory that is live at its
/// address under its id, no live memory is handed out again, and the totals of a device are the sums of its
/// deltas.
fn replay(rows: &[TraceRow]) {
    let mut live: HashMap<(bool, i64), (i64, i64)> = HashMap::new();
    let mut totals: HashMap<i32, (i64, i64)> = HashMap::new();
    for row in rows {
        let block = matches!(row.event, EventName::Alloc | EventName::Free);
        let (allocated, reserved) = totals.entry(row.device).or_default();
        match row.event {
            EventName::Alloc | EventName::Free => {
                *allocated += row.delta;
                // Memory that a runtime call allocated belongs to no segment, so it counts as reserved
                // itself.
                *reserved += if row.api == Api::CachingAllocator.as_str() { 0 } else { row.delta };
            }
            EventName::SegmentAlloc | EventName::SegmentFree => *reserved += row.delta,
            EventName::HostAlloc | EventName::HostFree => {
                *allocated += row.delta;
                *reserved += row.delta;
            }
            _ => {}
        }
        assert_eq!((row.allocated, row.reserved), (*allocated, *reserved), "{row:?}");
        if row.delta > 0 {
            let before = live.insert((block, row.addr), (row.alloc_id, row.delta));
            assert_eq!(before, None, "given out while live: {row:?}");
        } else if row.delta < 0 {
            assert_eq!(live.remove(&(block, row.addr)), Some((row.alloc_id, -row.delta)), "{row:?}");
        }
    }
}
