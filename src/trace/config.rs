//! The table of all `MEMTRACE_*` variables.
//!
//! The preloaded library reads them once, at load. `memtrace run` sets them under the same names for its
//! child. A test compares the documentation with the table.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use crate::detail::Detail;
use crate::keep::Keep;
use memtrace_util::names::distance;
use memtrace_util::phantom_variables;

use crate::text::printable;
use crate::units::parse_bytes;

/// The maximum value of `MEMTRACE_BUFFER` in bytes.
pub const LARGEST_BUFFER: u64 = 4 << 30;

/// An environment variable of memtrace.
#[derive(Clone, Copy, Debug)]
pub struct Variable {
    /// The name, such as `MEMTRACE_OPS`.
    pub name: &'static str,
    /// The value that is used if the variable is unset or invalid, as a user would write it.
    pub default: &'static str,
    /// The effect, in one line.
    pub help: &'static str,
}

impl Variable {
    /// Returns the name of the command-line option without dashes: `sample-ms` for `MEMTRACE_SAMPLE_MS`.
    #[must_use]
    pub fn option(&self) -> String {
        self.name.trim_start_matches(PREFIX).to_ascii_lowercase().replace('_', "-")
    }
}

/// The messages that the library prints to stderr. Each level includes the previous ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// No messages.
    Off,
    /// Failures of tracing.
    Error,
    /// Warnings: the holders of memory at an OOM, and missing capabilities of this process.
    Warn,
    /// The path of the trace and of each part, and the removal of parts.
    Info,
    /// The first exception of each type at each place in memtrace's own Python code.
    Debug,
}

/// A switch that may depend on the terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Auto {
    /// Always.
    On,
    /// Never.
    Off,
    /// On if stderr is a terminal.
    Terminal,
}

/// The default time limit of a search for the holders of memory, in milliseconds.
const RETAINED_MS: u64 = 2000;

/// How torch's ops are recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ops {
    /// Not recorded: allocations have no op.
    Off,
    /// Allocations have their op, and each outermost op has a row.
    Top,
    /// Same as `Top`, and each nested op also has a row.
    All,
    /// Same as `All`, and the storages that ops read and write and the memory of module calls also have rows.
    Io,
}

impl Ops {
    /// Returns true if torch's op callbacks are installed. Each outermost op then has a row.
    #[must_use]
    pub fn callbacks(self) -> bool {
        self != Ops::Off
    }

    /// Returns true if all ops have rows.
    #[must_use]
    pub fn all(self) -> bool {
        matches!(self, Ops::All | Ops::Io)
    }

    /// Returns the value as the variable spells it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Ops::Off => "off",
            Ops::Top => "top",
            Ops::All => "all",
            Ops::Io => "io",
        }
    }

    /// Returns true if the storages that ops read and write have rows.
    #[must_use]
    pub fn io(self) -> bool {
        self == Ops::Io
    }
}

/// The frames of a stack in addition to ops and modules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stacks {
    /// No further frames.
    Ops,
    /// The Python lines on the call stack.
    Python,
}

/// The compression of a finished trace or part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// No compression.
    Off,
    /// gzip.
    Gz,
    /// Zstandard.
    Zst,
}

impl Compression {
    /// Returns the ending that is appended to the file name, such as `.gz`; empty without compression.
    #[must_use]
    pub fn suffix(self) -> &'static str {
        match self {
            Compression::Off => "",
            Compression::Gz => ".gz",
            Compression::Zst => ".zst",
        }
    }
}

/// The settings of the preloaded library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// `MEMTRACE_ENABLED`
    pub enabled: bool,
    /// `MEMTRACE_OUT`
    pub out: PathBuf,
    /// `MEMTRACE_NAME`
    pub name: String,
    /// `MEMTRACE_ROTATE`, in bytes; 0 to never rotate by size
    pub rotate_bytes: u64,
    /// `MEMTRACE_ROTATE_SECS`; 0 to never rotate by time
    pub rotate_secs: u64,
    /// `MEMTRACE_KEEP`
    pub keep: Keep,
    /// `MEMTRACE_COMPRESS`
    pub compress: Compression,
    /// `MEMTRACE_HOST_TENSORS`
    pub host_tensors: bool,
    /// `MEMTRACE_LOG_FILE`
    pub log_file: Option<PathBuf>,
    /// `MEMTRACE_PHASES`
    pub phases: Vec<String>,
    /// `MEMTRACE_SUMMARY`
    pub summary: Auto,
    /// `MEMTRACE_LOG`
    pub log: Level,
    /// `MEMTRACE_BUFFER`, in bytes
    pub buffer_bytes: usize,
    /// `MEMTRACE_FLUSH_MS`
    pub flush_ms: u64,
    /// `MEMTRACE_OPS`
    pub ops: Ops,
    /// `MEMTRACE_DETAIL`
    pub detail: Detail,
    /// `MEMTRACE_RETAINED`: the time limit of one search in milliseconds; 0 to disable the search
    pub retained_ms: u64,
    /// True if searches because memory grows take at most 1% of the run's time so far: no time limit was given
    /// in `MEMTRACE_RETAINED`
    pub retained_is_bounded: bool,
    /// `MEMTRACE_BRIEF`
    pub brief: bool,
    /// `MEMTRACE_MODULES`
    pub modules: bool,
    /// `MEMTRACE_WRAPPERS`
    pub wrappers: bool,
    /// `MEMTRACE_STACKS`
    pub stacks: Stacks,
    /// `MEMTRACE_NVTX`
    pub nvtx: bool,
    /// `MEMTRACE_DLSYM`
    pub dlsym: bool,
    /// `MEMTRACE_DRIVER`
    pub driver: bool,
    /// `MEMTRACE_SAMPLE_MS`; 0 to disable samples
    pub sample_ms: u64,
    /// `MEMTRACE_RUN_ID`
    pub run_id: String,
}

impl Default for Settings {
    fn default() -> Self {
        Settings::from_lookup(|_| None::<OsString>).0
    }
}

/// An entry of the table: a variable and the function that parses its value.
struct Entry {
    variable: Variable,
    set: Set,
}

/// The function that parses a value.
enum Set {
    /// Parses a value that must be text.
    Text(fn(&mut Settings, &str) -> Result<(), String>),
    /// Parses a path, which may be any bytes.
    Path(fn(&mut Settings, &OsStr) -> Result<(), String>),
}

impl Set {
    fn call(&self, settings: &mut Settings, value: &OsStr) -> Result<(), String> {
        match (self, value.to_str()) {
            (Set::Text(set), Some(text)) => set(settings, text.trim()),
            (Set::Text(_), None) => Err("expected UTF-8".to_owned()),
            (Set::Path(set), Some(text)) => set(settings, text.trim().as_ref()),
            (Set::Path(set), None) => set(settings, value),
        }
    }
}

macro_rules! entry {
    (@$kind:ident $name:literal, $default:literal, $help:literal, $set:expr) => {
        Entry { variable: Variable { name: $name, default: $default, help: $help }, set: Set::$kind($set) }
    };
    (path $($parts:tt)*) => { entry!(@Path $($parts)*) };
    ($($parts:tt)*) => { entry!(@Text $($parts)*) };
}

const TABLE: &[Entry] = &[
    entry!("MEMTRACE_ENABLED", "1", "0 switches tracing off", |s, v| flag(v).map(|on| s.enabled = on)),
    entry!(path
        "MEMTRACE_OUT",
        "memtrace-out",
        "the folder of the traces, created when it does not exist",
        |s, v| {
            if v.is_empty() {
                return Err("expected a folder".to_owned());
            }
            s.out = PathBuf::from(v);
            Ok(())
        }
    ),
    entry!(
        "MEMTRACE_NAME",
        "{host}.r{rank}.{pid}",
        "the name of a process's trace, without `.csv`; {host}, {rank}, {pid} and {run} are replaced by \
         their values",
        |s, v| {
            check_name(v)?;
            s.name = v.to_owned();
            Ok(())
        }
    ),
    entry!(
        "MEMTRACE_ROTATE",
        "0",
        "the size at which a trace continues in a new part, such as 512m; 64k or more, or 0 for never",
        |s, v| {
            let bytes = parse_bytes(v)?;
            if bytes != 0 && bytes < 64 << 10 {
                return Err("expected 0, or a size of 64k or more".to_owned());
            }
            s.rotate_bytes = bytes as u64;
            Ok(())
        }
    ),
    entry!(
        "MEMTRACE_ROTATE_SECS",
        "0",
        "the time in seconds after which a trace continues in a new part; 0 for never",
        |s, v| {
            s.rotate_secs = v.parse().map_err(|_| "expected a number of seconds".to_owned())?;
            Ok(())
        }
    ),
    entry!(
        "MEMTRACE_KEEP",
        "0",
        "how many finished parts to keep, as a total size such as 2g or an age such as 48h or 7d; older \
         parts are removed, except the first part, parts with the highest peak, and parts with an OOM (up to \
         half of the size); 0 keeps all",
        |s, v| {
            s.keep = Keep::parse(v)?;
            Ok(())
        }
    ),
    entry!(
        "MEMTRACE_COMPRESS",
        "off",
        "the compression of each part while it is written: off, gz or zst",
        |s, v| {
            s.compress = match v.to_ascii_lowercase().as_str() {
                "off" | "0" | "no" | "false" => Compression::Off,
                "gz" | "gzip" => Compression::Gz,
                "zst" | "zstd" => Compression::Zst,
                _ => return Err("expected off, gz or zst".to_owned()),
            };
            Ok(())
        }
    ),
    entry!(
        "MEMTRACE_HOST_TENSORS",
        "0",
        "1 also records CPU tensors, as the device `cpu` (-2), with their owners: `host_alloc` and `host_free` rows with the api `cpu_allocator`. Each of at least 1 MiB has its Python line",
        |s, v| flag(v).map(|on| s.host_tensors = on)
    ),
    entry!(
        "MEMTRACE_PHASES",
        "",
        "names of further ranges to record as phases, separated by commas",
        |s, v| {
            s.phases =
                v.split(',').map(str::trim).filter(|word| !word.is_empty()).map(str::to_owned).collect();
            Ok(())
        }
    ),
    entry!(
        "MEMTRACE_SUMMARY",
        "off",
        "on prints a summary to stderr at exit; auto does so when stderr is a terminal",
        |s, v| {
            s.summary = if v.eq_ignore_ascii_case("auto") {
                Auto::Terminal
            } else {
                match flag(v) {
                    Ok(true) => Auto::On,
                    Ok(false) => Auto::Off,
                    Err(_) => return Err("expected on, off or auto".to_owned()),
                }
            };
            Ok(())
        }
    ),
    entry!(
        "MEMTRACE_LOG",
        "warn",
        "the level of messages on stderr: off, error, warn, info or debug (or 0 to 4, or Python's 10 to 50)",
        |s, v| {
            s.log = level(v)?;
            Ok(())
        }
    ),
    entry!(path
        "MEMTRACE_LOG_FILE",
        "",
        "a file for the messages, instead of stderr; its name may have the placeholders of MEMTRACE_NAME",
        |s, v| {
            s.log_file = (!v.is_empty()).then(|| PathBuf::from(v));
            Ok(())
        }
    ),
    entry!("MEMTRACE_BUFFER", "16m", "the size of the buffer of events not yet written, 1m to 4g", |s, v| {
        let bytes = parse_bytes(v)?;
        if !(1 << 20..=LARGEST_BUFFER).contains(&(bytes as u64)) {
            return Err("expected a size from 1m to 4g".to_owned());
        }
        s.buffer_bytes = bytes as usize;
        Ok(())
    }),
    entry!(
        "MEMTRACE_FLUSH_MS",
        "200",
        "the interval in ms at which buffered events are written, 1 to 60000",
        |s, v| {
            match v.parse() {
                Ok(ms @ 1..=60_000) => s.flush_ms = ms,
                _ => return Err("expected 1 to 60000 ms".to_owned()),
            }
            Ok(())
        }
    ),
    entry!(
        "MEMTRACE_OPS",
        "top",
        "ops of torch: off; top (the op of each allocation, a row per outermost op); all (a row per op); io \
         (also rows for the tensors that ops read and write, and for the memory of modules)",
        |s, v| {
            s.ops = match v.to_ascii_lowercase().as_str() {
                "off" | "0" => Ops::Off,
                "top" | "1" | "on" => Ops::Top,
                "all" => Ops::All,
                "io" => Ops::Io,
                _ => return Err("expected off, top, all or io".to_owned()),
            };
            Ok(())
        }
    ),
    entry!(
        "MEMTRACE_DETAIL",
        "full",
        "the steps with ops, modules, tags and stacks: full (every step), steps:A-B, every:N, peak (only \
         the step after a new peak or an OOM; steps and every add these, too), several joined by commas, or \
         off; the other steps have memory and phases only",
        |s, v| {
            s.detail = Detail::parse(v)?;
            Ok(())
        }
    ),
    entry!(
        "MEMTRACE_RETAINED",
        "on",
        "search for the Python objects that keep memory of earlier steps: at an OOM, when memory grows from \
         step to step, and on demand; on, off, or the time limit of one search in seconds (on: 2, and for growing \
         memory 1% of the run's time so far)",
        |s, v| {
            let text = v.to_ascii_lowercase();
            let retained_ms = match text.as_str() {
                "on" => RETAINED_MS,
                "off" => 0,
                seconds => match seconds.parse::<f64>() {
                    Ok(seconds) if (0.0..=3600.0).contains(&seconds) => (seconds * 1000.0).round() as u64,
                    _ => return Err("expected on, off, or seconds up to 3600".to_owned()),
                },
            };
            (s.retained_ms, s.retained_is_bounded) = (retained_ms, text == "on");
            Ok(())
        }
    ),
    entry!(
        "MEMTRACE_BRIEF",
        "1",
        "1 writes only the sum of short-lived blocks, in the steps without detail (MEMTRACE_DETAIL) that set \
         no new peak; 0 writes the rows of every block",
        |s, v| flag(v).map(|on| s.brief = on)
    ),
    entry!(
        "MEMTRACE_MODULES",
        "1",
        "0 installs no hooks in Python: no module paths, no tags of parameters, gradients and optimizer \
         state",
        |s, v| flag(v).map(|on| s.modules = on)
    ),
    entry!(
        "MEMTRACE_WRAPPERS",
        "0",
        "1 keeps the names of wrappers (DDP, FSDP, compiled) in module paths",
        |s, v| flag(v).map(|on| s.wrappers = on)
    ),
    entry!(
        "MEMTRACE_STACKS",
        "ops",
        "the content of `stack_id`: ops (op stack and module, and for some allocations the lines of Python), or \
         python (the lines of all)",
        |s, v| {
            s.stacks = match v.to_ascii_lowercase().as_str() {
                "ops" | "off" | "0" => Stacks::Ops,
                "python" | "on" | "1" => Stacks::Python,
                _ => return Err("expected ops or python".to_owned()),
            };
            Ok(())
        }
    ),
    entry!("MEMTRACE_NVTX", "1", "0 installs no hooks in NVTX: no ranges", |s, v| flag(v)
        .map(|on| s.nvtx = on)),
    entry!(
        "MEMTRACE_DLSYM",
        "1",
        "0 does not intercept dlsym: functions looked up with dlopen and dlsym, including most driver \
         functions, are not traced",
        |s, v| flag(v).map(|on| s.dlsym = on)
    ),
    entry!(
        "MEMTRACE_DRIVER",
        "1",
        "0 does not intercept the driver: memory of cuBLAS, cuDNN, NCCL and Triton is not traced, nor are \
         the segments of expandable_segments",
        |s, v| flag(v).map(|on| s.driver = on)
    ),
    entry!(
        "MEMTRACE_SAMPLE_MS",
        "1000",
        "the interval in ms at which device memory is sampled through NVML or the driver, and the host's memory through \
         the kernel, 10 or more; 0 for never",
        |s, v| {
            s.sample_ms = match v.parse() {
                Ok(ms @ (0 | 10..)) => ms,
                _ => return Err("expected 0, or at least 10 ms".to_owned()),
            };
            Ok(())
        }
    ),
    entry!(
        "MEMTRACE_RUN_ID",
        "",
        "an identifier that all processes of one launch share; memtrace run sets it",
        |s, v| {
            s.run_id = v.to_owned();
            Ok(())
        }
    ),
];

/// Variables that the launcher or the simulated GPU reads.
const OTHERS: &[Variable] = &[
    Variable {
        name: phantom_variables::CARD_VARIABLE,
        default: "",
        help: "the card of the simulated GPU; memtrace run --phantom sets it",
    },
    Variable {
        name: phantom_variables::FAULT_VARIABLE,
        default: "",
        help: "faults that the simulated GPU injects, such as oom@step:3, with commas between; --phantom-fault \
            sets it",
    },
    Variable {
        name: phantom_variables::PAST_OOM_VARIABLE,
        default: "0",
        help: "1 lets the program continue past the capacity of the simulated GPU; --past-oom sets it",
    },
    Variable {
        name: phantom_variables::HOST_VALUES_VARIABLE,
        default: "1",
        help: "0 keeps no values of floating-point CPU tensors of 1 MiB or more, on a simulated GPU; \
            --no-host-values sets it",
    },
    Variable {
        name: phantom_variables::MACHINE_VARIABLE,
        default: "",
        help: "an identifier: processes with the same identifier and card share the memory of the simulated \
               GPUs; memtrace run --phantom sets it",
    },
    Variable {
        name: phantom_variables::DYNAMIC_VARIABLE,
        default: "full",
        help: "result sizes that depend on values (nonzero, unique, masks) on a simulated GPU: full, half or \
            empty; --phantom-dynamic sets it",
    },
    Variable {
        name: phantom_variables::RANKS_VARIABLE,
        default: "",
        help: "the ranks that run and the total number of ranks, such as 0,7/512; memtrace run --ranks sets \
               it",
    },
    Variable {
        name: phantom_variables::STORE_VARIABLE,
        default: "",
        help: "the port of the rendezvous store that answers for stand-ins; memtrace run --ranks sets it",
    },
    Variable {
        name: phantom_variables::PATIENCE_VARIABLE,
        default: "60",
        help: "seconds that a rank among stand-ins may wait for another rank before it is ended with a \
               message; 0 for no limit",
    },
    Variable {
        name: phantom_variables::STEP_MS_VARIABLE,
        default: "0",
        help: "milliseconds of a training step on the timer of NCCL's watchdog, which frees every 100 ms: the \
               result is then the same in every run; 0 for the wall clock",
    },
    Variable {
        name: phantom_variables::READS_VARIABLE,
        default: "20000",
        help: "how often a program may read the same uncomputed value from the same place, without giving \
               the device new input, before the simulated GPU stops it; 0 for no limit",
    },
];

/// The prefix of all variables.
const PREFIX: &str = "MEMTRACE_";

/// Variables that commands, scripts and tests of this project set for internal use. Users do not set them.
const INTERNAL: &[&str] =
    &["MEMTRACE_BENCH_INSIDE", "MEMTRACE_BLESS", "MEMTRACE_CACHE", "MEMTRACE_HELLO", "MEMTRACE_MIRI_SEEDS"];

/// The prefix of variables that tests use.
const OF_TESTS: &str = "MEMTRACE_TEST_";

/// Returns the variables of [`Settings`] that are also options of `memtrace run`: all except the variables
/// that `memtrace run` sets itself.
pub fn options() -> impl Iterator<Item = &'static Variable> {
    let set_by_run = ["MEMTRACE_ENABLED", "MEMTRACE_OUT", "MEMTRACE_RUN_ID"];
    TABLE.iter().map(|entry| &entry.variable).filter(move |variable| !set_by_run.contains(&variable.name))
}

/// Checks the value of a variable of [`Settings`]. Accepts every value of any other variable.
///
/// # Errors
/// Returns the accepted values if the given one is invalid.
pub fn check(variable: &Variable, value: &OsStr) -> Result<(), String> {
    let entry = TABLE.iter().find(|entry| entry.variable.name == variable.name);
    entry.map_or(Ok(()), |entry| entry.set.call(&mut Settings::default(), value))
}

/// Returns one line per environment variable that starts with `MEMTRACE_` but is not a known setting.
pub fn unknown(names: impl IntoIterator<Item = OsString>) -> Vec<String> {
    let known = || variables().map(|variable| variable.name);
    let line = |name: OsString| {
        let name = name.to_str()?;
        let is_known = known().chain(INTERNAL.iter().copied()).any(|known| known == name);
        if !name.starts_with(PREFIX) || name.starts_with(OF_TESTS) || is_known {
            return None;
        }
        let nearest = known().min_by_key(|known| distance(known, name))?;
        Some(format!(
            "{}: there is no such variable; the nearest is {nearest} (memtrace help variables lists all)",
            printable(name)
        ))
    };
    names.into_iter().filter_map(line).collect()
}

/// Returns all variables, for the documentation and `memtrace help variables`.
pub fn variables() -> impl Iterator<Item = &'static Variable> {
    TABLE.iter().map(|entry| &entry.variable).chain(OTHERS)
}

impl Settings {
    /// Reads the settings through `lookup`. The second result has one line per invalid value.
    pub fn from_lookup<T: Into<OsString>>(lookup: impl Fn(&str) -> Option<T>) -> (Settings, Vec<String>) {
        let mut settings = Settings {
            enabled: true,
            out: PathBuf::new(),
            name: String::new(),
            rotate_bytes: 0,
            rotate_secs: 0,
            keep: Keep::All,
            compress: Compression::Off,
            host_tensors: false,
            log_file: None,
            phases: Vec::new(),
            summary: Auto::Off,
            log: Level::Warn,
            buffer_bytes: 0,
            flush_ms: 0,
            ops: Ops::Top,
            detail: Detail::Full,
            retained_ms: RETAINED_MS,
            retained_is_bounded: true,
            brief: true,
            modules: true,
            wrappers: false,
            stacks: Stacks::Ops,
            nvtx: true,
            dlsym: true,
            driver: true,
            sample_ms: 0,
            run_id: String::new(),
        };
        let mut warnings = Vec::new();
        for Entry { variable, set } in TABLE {
            set.call(&mut settings, variable.default.as_ref()).ok();
            let Some(value) = lookup(variable.name).map(T::into) else { continue };
            if let Err(why) = set.call(&mut settings, &value) {
                let Variable { name, default, .. } = variable;
                warnings.push(format!("{name}={value:?}: {why}; using the default {default:?}"));
            }
        }
        (settings.rotate_bytes, settings.rotate_secs) =
            settings.keep.rotation(settings.rotate_bytes, settings.rotate_secs);
        (settings, warnings)
    }

    /// Returns true if the trace may have `brief` rows, because some steps are not detailed.
    #[must_use]
    pub fn has_brief_steps(&self) -> bool {
        self.brief && self.detail != Detail::Full
    }

    /// Reads the settings from the environment. The second result has one line per invalid value or unknown
    /// variable.
    #[must_use]
    pub fn from_env() -> (Settings, Vec<String>) {
        let (settings, mut warnings) = Settings::from_lookup(|name| std::env::var_os(name));
        warnings.extend(unknown(std::env::vars_os().map(|(name, _)| name)));
        (settings, warnings)
    }
}

/// Parses a level: its name, memtrace's number (0 to 4, from least to most verbose), or the number of
/// Python's `logging` (10 to 50, from most to least verbose).
fn level(value: &str) -> Result<Level, String> {
    Ok(match value.to_ascii_lowercase().as_str() {
        "off" | "0" | "critical" => Level::Off,
        "error" | "1" => Level::Error,
        "warn" | "warning" | "2" => Level::Warn,
        "info" | "3" => Level::Info,
        "debug" | "4" => Level::Debug,
        number => match number.parse::<u32>() {
            Ok(5..=10) => Level::Debug,
            Ok(11..=20) => Level::Info,
            Ok(21..=30) => Level::Warn,
            Ok(31..=40) => Level::Error,
            Ok(41..) => Level::Off,
            _ => return Err("expected off, error, warn, info or debug".to_owned()),
        },
    })
}

/// The placeholders of `MEMTRACE_NAME`, without their braces.
const PLACEHOLDERS: [&str; 4] = ["host", "rank", "pid", "run"];

fn check_name(pattern: &str) -> Result<(), String> {
    if pattern.is_empty() || pattern.contains(['/', '\0']) || pattern.starts_with('.') {
        return Err("expected a file name: not empty, no slash, no dot at its start".to_owned());
    }
    let mut rest = pattern;
    while let Some((_, after)) = rest.split_once('{') {
        let place = after.split_once('}');
        let Some((_, after)) = place.filter(|(place, _)| PLACEHOLDERS.contains(place)) else {
            return Err(format!(
                "expected {} in braces",
                PLACEHOLDERS.map(|p| format!("{{{p}}}")).join(", ")
            ));
        };
        rest = after;
    }
    let filled =
        PLACEHOLDERS.iter().fold(pattern.to_owned(), |name, p| name.replace(&format!("{{{p}}}"), "1"));
    if !crate::files::is_trace_of_its_own(&filled) {
        return Err(
            "the name must not end in `.stacks`, or in `.part` and a number: files that belong to a trace \
                    have such names"
                .to_owned(),
        );
    }
    Ok(())
}

/// Returns `pattern` with its placeholders replaced.
///
/// ```
/// let name = memtrace_trace::config::fill("{host}.r{rank}.{pid}", "node7", 3, 4711, "");
/// assert_eq!(name, "node7.r3.4711");
/// ```
#[must_use]
pub fn fill(pattern: &str, host: &str, rank: i32, pid: u32, run: &str) -> String {
    let values = [host, &rank.to_string(), &pid.to_string(), run];
    PLACEHOLDERS
        .iter()
        .zip(values)
        .fold(pattern.to_owned(), |name, (place, value)| name.replace(&format!("{{{place}}}"), value))
}

/// Same as [`fill`], for a path, which may be any bytes.
#[must_use]
pub fn fill_path(pattern: &Path, host: &str, rank: i32, pid: u32, run: &str) -> PathBuf {
    // A placeholder is valid UTF-8, so it can occur only in the valid chunks.
    let mut path = Vec::new();
    for chunk in pattern.as_os_str().as_bytes().utf8_chunks() {
        path.extend(fill(chunk.valid(), host, rank, pid, run).into_bytes());
        path.extend(chunk.invalid());
    }
    OsString::from_vec(path).into()
}

fn flag(value: &str) -> Result<bool, String> {
    match value.to_ascii_lowercase().as_str() {
        "1" | "on" | "true" | "yes" => Ok(true),
        "0" | "off" | "false" | "no" => Ok(false),
        _ => Err("expected 1 or 0".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_default_of_a_variable_is_a_valid_value() {
        let mut settings = Settings::default();
        for Entry { variable, set } in TABLE {
            assert_eq!(set.call(&mut settings, variable.default.as_ref()), Ok(()), "{}", variable.name);
        }
    }

    fn with(name: &str, value: &str) -> (Settings, Vec<String>) {
        Settings::from_lookup(|asked| (asked == name).then(|| value.to_owned()))
    }

    #[test]
    fn a_log_level_is_a_name_or_a_number_of_memtrace_or_python() {
        for (value, level) in [
            ("debug", Level::Debug),
            ("10", Level::Debug),
            ("20", Level::Info),
            ("3", Level::Info),
            ("WARNING", Level::Warn),
            ("30", Level::Warn),
            ("40", Level::Error),
            ("50", Level::Off),
            ("0", Level::Off),
        ] {
            assert_eq!(with("MEMTRACE_LOG", value), (Settings { log: level, ..Settings::default() }, vec![]));
        }
        assert_eq!(with("MEMTRACE_LOG", "-1").1.len(), 1);
    }

    #[test]
    fn a_trace_name_is_a_file_name_with_known_placeholders() {
        assert_eq!(fill("{run}-{host}.r{rank}.{pid}", "h", 3, 7, "x"), "x-h.r3.7");
        for bad in
            ["", "a/b", ".hidden", "{user}", "{pid", "../x", "{run}.stacks", "run.part2", "run.part{rank}"]
        {
            let (settings, warnings) = with("MEMTRACE_NAME", bad);
            assert_eq!((settings.name.as_str(), warnings.len()), ("{host}.r{rank}.{pid}", 1), "{bad}");
        }
        for good in ["trace", "run.part", "run.parts", "stacks", "part2"] {
            assert_eq!(with("MEMTRACE_NAME", good).0.name, good);
        }
    }

    #[test]
    fn a_path_may_be_any_bytes_and_other_values_are_text() {
        let value = OsString::from_vec(b"/tmp/\xff{pid}".to_vec());
        for name in ["MEMTRACE_OUT", "MEMTRACE_LOG_FILE"] {
            let (settings, warnings) = Settings::from_lookup(|asked| (asked == name).then(|| value.clone()));
            assert!(warnings.is_empty(), "{warnings:?}");
            assert!(
                settings.out == Path::new(&value) || settings.log_file.as_deref() == Some(Path::new(&value))
            );
        }
        let filled = fill_path(Path::new(&value), "h", 3, 7, "x");
        assert_eq!(filled.as_os_str().as_bytes(), b"/tmp/\xff7");
        let (settings, warnings) =
            Settings::from_lookup(|asked| (asked == "MEMTRACE_NAME").then(|| value.clone()));
        assert_eq!((settings.name.as_str(), warnings.len()), ("{host}.r{rank}.{pid}", 1));
        assert!(warnings[0].contains(r"\xFF") && warnings[0].contains("expected UTF-8"), "{warnings:?}");
    }

    #[test]
    fn the_warning_about_an_invalid_value_names_the_default() {
        let (settings, warnings) =
            Settings::from_lookup(|name| (name == "MEMTRACE_BUFFER").then(|| "lots".to_owned()));
        assert_eq!(settings.buffer_bytes, 16 << 20);
        assert_eq!(warnings.len(), 1);
        assert!(warnings[0].contains("MEMTRACE_BUFFER=\"lots\"") && warnings[0].contains("\"16m\""));
    }

    #[test]
    fn an_invalid_value_leaves_the_default_settings() {
        for Entry { variable, .. } in TABLE {
            // Any text is valid for some variables.
            let any = ["MEMTRACE_LOG_FILE", "MEMTRACE_PHASES", "MEMTRACE_RUN_ID"].contains(&variable.name);
            let invalid = if variable.name == "MEMTRACE_OUT" { "" } else { "in/valid" };
            let (settings, warnings) = with(variable.name, invalid);
            assert_eq!(warnings.is_empty(), any, "{warnings:?}");
            assert!(any || settings == Settings::default(), "{}: {settings:?}", variable.name);
        }
    }

    #[test]
    fn unknown_variables_are_reported_with_the_nearest_name() {
        let lines = |name: &str| unknown([name.into()]);
        let line = lines("MEMTRACE_STACK").remove(0);
        assert!(line.starts_with("MEMTRACE_STACK: ") && line.contains("MEMTRACE_STACKS "), "{line}");
        assert!(lines("MEMTRACE_").remove(0).contains("there is no such variable"));
        for known in ["MEMTRACE_STACKS", "MEMTRACE_PHANTOM", "MEMTRACE_HELLO", "MEMTRACE_TEST_TORCH", "PATH"]
        {
            assert_eq!(lines(known), [""; 0], "{known}");
        }
        assert!(!lines("MEMTRACE_\x1b[31m").remove(0).contains('\x1b'));
        let no_text = OsString::from_vec(b"MEMTRACE_\xff".to_vec());
        assert_eq!(unknown([no_text]), [""; 0]);
    }

    #[test]
    fn options_are_the_variables_that_a_launcher_does_not_set_and_are_checked_like_them() {
        let names: Vec<String> = options().map(Variable::option).collect();
        assert!(names.contains(&"sample-ms".to_owned()) && !names.contains(&"out".to_owned()), "{names:?}");
        let ops = options().find(|variable| variable.name == "MEMTRACE_OPS").unwrap();
        assert_eq!(check(ops, "io".as_ref()), Ok(()));
        assert!(check(ops, "some".as_ref()).unwrap_err().contains("off, top, all or io"));
    }
}
