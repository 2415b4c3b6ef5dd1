//! The names of the files of a trace.
//!
//! | file | name |
//! | --- | --- |
//! | the trace of a process | `NAME.csv` |
//! | a later part of a rotated trace | `NAME.part2.csv`, `NAME.part3.csv`, ... |
//! | the stacks of a trace or of a part, in CSV form | `NAME.stacks`, `NAME.part2.stacks`, ...; older versions wrote `NAME.stacks.csv` |
//! | a finished trace or part, compressed | its name followed by `.gz` or `.zst` |
//! | a part before its opening rows are complete, or a compressed copy before it is complete | its name with `.csv.unfinished` for `.csv` |
//!
//! `NAME` is expanded from `MEMTRACE_NAME`. If any of these files already exists, the writer appends `-2`,
//! `-3`, ... to `NAME` or to the part number.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::config::Compression;

const TRACE: &str = ".csv";
/// The ending of a stacks file. It is not `.csv`, so that `*.csv` in a folder matches only traces.
const STACKS: &str = ".stacks";
/// The ending of a stacks file in older versions.
const OLD_STACKS: &str = ".stacks.csv";
const UNFINISHED: &str = ".unfinished";
/// The word before the part number in the name of a later part.
const PART: &str = "part";

/// Returns the file name of the trace `name`. `suffix` makes it unique, and is usually empty.
#[must_use]
pub fn trace_name(name: &str, suffix: &str) -> String {
    format!("{name}{suffix}{TRACE}")
}

/// Returns true if a file of this name is a trace or a part of one, compressed or not.
#[must_use]
pub fn is_trace(name: &str) -> bool {
    let plain = without_compression(name).0;
    plain.ends_with(TRACE) && !plain.ends_with(OLD_STACKS)
}

/// Returns the compression of a file of this name.
#[must_use]
pub fn compression(name: &str) -> Compression {
    without_compression(name).1
}

/// Returns the name of a trace without the endings that every trace has.
///
/// ```
/// use memtrace_trace::files::{is_trace, stem};
///
/// assert!(is_trace("node7.r0.4711.part2.csv.zst"));
/// assert_eq!(stem("node7.r0.4711.part2.csv.zst"), "node7.r0.4711.part2");
/// assert!(!is_trace("node7.r0.4711.stacks"));
/// ```
#[must_use]
pub fn stem(name: &str) -> &str {
    let plain = without_compression(name).0;
    plain.strip_suffix(TRACE).unwrap_or(plain)
}

/// Returns true if a file that belongs to the trace or part `plain` exists: its rows in any form, or its stacks.
/// A new trace must not take this name.
#[must_use]
pub fn is_taken(plain: &Path) -> bool {
    [
        plain.to_owned(),
        unfinished_copy(plain),
        compressed(plain, Compression::Gz),
        compressed(plain, Compression::Zst),
        stacks(plain),
        stacks_with(plain, OLD_STACKS),
    ]
    .iter()
    // A link that leads nowhere counts, too.
    .any(|path| path.symlink_metadata().is_ok())
}

fn without_compression(name: &str) -> (&str, Compression) {
    [Compression::Gz, Compression::Zst]
        .into_iter()
        .find_map(|how| Some((name.strip_suffix(how.suffix())?, how)))
        .unwrap_or((name, Compression::Off))
}

/// Returns the file that `compressed` replaces, or `None` if `compressed` is not a compressed trace.
#[must_use]
pub fn uncompressed(compressed: &Path) -> Option<PathBuf> {
    let name = compressed.file_name()?.to_str()?;
    (compression(name) != Compression::Off).then(|| compressed.with_extension(""))
}

/// Returns the compressed file that replaces the finished trace or part `plain`.
#[must_use]
pub fn compressed(plain: &Path, how: Compression) -> PathBuf {
    with_ending(plain, how.suffix())
}

/// Returns the path of the compressed copy of `plain` while it is incomplete.
#[must_use]
pub fn unfinished_copy(plain: &Path) -> PathBuf {
    with_ending(plain, UNFINISHED)
}

/// Returns the path of a part, next to the first part, until its opening rows are complete. `suffix` makes
/// the name unique, and is usually empty.
#[must_use]
pub fn unfinished_part(first: &Path, part: u32, suffix: &str) -> PathBuf {
    first.with_extension(format!("{PART}{part}{suffix}{TRACE}{UNFINISHED}"))
}

/// Returns the final path of an unfinished part.
#[must_use]
pub fn finished_part(unfinished: &Path) -> PathBuf {
    unfinished.with_extension("")
}

/// Returns true if a file of this name is an unfinished part or copy of the trace whose first part has this
/// `stem`.
#[must_use]
pub fn is_unfinished_of(name: &str, stem: &str) -> bool {
    name.strip_suffix(UNFINISHED)
        .is_some_and(|plain| plain.ends_with(TRACE) && first_stem(Path::new(plain)).as_os_str() == stem)
}

/// Returns the path of a trace without `.csv` and without the part number.
#[must_use]
pub fn first_stem(part: &Path) -> PathBuf {
    let plain = part.with_extension("");
    if part_number(&plain).is_some() { plain.with_extension("") } else { plain }
}

/// Returns the part number in the path of a later part without `.csv`: 2 for `run.part2` and for `run.part2-2`.
fn part_number(plain: &Path) -> Option<u64> {
    let number = plain.extension()?.to_str()?.strip_prefix(PART)?;
    let (number, suffix) = number.split_once('-').unwrap_or((number, "0"));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    (is_number(number) && is_number(suffix)).then(|| number.parse().unwrap_or(u64::MAX))
}

/// Returns true if the files of a trace with this name are taken for what they are: `run.stacks.csv` would be no
/// trace, and `run.part2.csv` a part of `run`.
#[must_use]
pub fn is_trace_of_its_own(name: &str) -> bool {
    let file = trace_name(name, "");
    is_trace(&file) && first_stem(Path::new(&file)) == Path::new(name)
}

/// Returns the name of a trace or part, compressed or not, without its endings: the trace name of its
/// process.
#[must_use]
pub fn process_name(trace: &Path) -> String {
    let plain = stacks_with(trace, TRACE);
    first_stem(&plain).file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Returns the uncompressed files in the folder of `any`, a trace or a part of one, that can be part number
/// `part` of the same trace. There are several if an earlier trace of the same name left its parts.
#[must_use]
pub fn parts_numbered(any: &Path, part: u64) -> Vec<PathBuf> {
    let stem = first_stem(any);
    if part < 2 {
        return vec![with_ending(&stem, TRACE)];
    }
    let folder = stem.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let is_numbered = |name: &OsStr| {
        let path = Path::new(name);
        path.extension() == Some(OsStr::new(&TRACE[1..]))
            && part_number(&path.with_extension("")) == Some(part)
            && first_stem(path).file_name() == stem.file_name()
    };
    let mut parts: Vec<_> =
        files.filter(|name| is_numbered(name)).map(|name| stem.with_file_name(name)).collect();
    parts.sort();
    parts
}

/// Returns the path of the stacks file of a trace or part. It is not compressed, even if the trace is.
#[must_use]
pub fn stacks(trace: &Path) -> PathBuf {
    stacks_with(trace, STACKS)
}

/// Returns the path of the stacks file of a trace or part. If only a file with the name that older versions
/// used exists, returns the path of that file.
#[must_use]
pub fn written_stacks(trace: &Path) -> PathBuf {
    let (new, old) = (stacks(trace), stacks_with(trace, OLD_STACKS));
    if old.exists() && !new.exists() { old } else { new }
}

fn stacks_with(trace: &Path, ending: &str) -> PathBuf {
    // Works on bytes, because a file name may be invalid UTF-8.
    let name = trace.file_name().unwrap_or_default().as_encoded_bytes();
    let end = name.windows(TRACE.len()).rposition(|part| part == TRACE.as_bytes()).unwrap_or(name.len());
    let mut stem = OsStr::from_bytes(&name[..end]).to_owned();
    stem.push(ending);
    trace.with_file_name(stem)
}

fn with_ending(path: &Path, ending: &str) -> PathBuf {
    let mut path = path.as_os_str().to_owned();
    path.push(ending);
    PathBuf::from(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traces_parts_and_compressed_ones_are_traces() {
        for name in ["host.r0.1.csv", "host.r0.1-2.csv", "host.r0.1.part2.csv", "a.csv.gz", "a.part2.csv.zst"]
        {
            assert!(is_trace(name), "{name}");
        }
        for name in [
            "a.stacks",
            "a.part2.stacks",
            "a.stacks.csv",
            "a.part2.stacks.csv",
            "a.csv.unfinished",
            "a.txt",
            "a.csv.bz2",
            "a.gz",
        ] {
            assert!(!is_trace(name), "{name}");
        }
        assert_eq!(["a.csv", "a.part2.csv.gz", "a.b"].map(stem), ["a", "a.part2", "a.b"]);
        assert_eq!(compression("a.csv.zst"), Compression::Zst);
    }

    #[test]
    fn every_part_names_the_others() {
        for path in ["d/h.r0.1.csv", "d/h.r0.1.part2.csv", "d/h.r0.1.part17.csv", "d/h.r0.1.part2-2.csv"] {
            assert_eq!(first_stem(Path::new(path)), Path::new("d/h.r0.1"));
            assert_eq!(process_name(Path::new(&format!("{path}.zst"))), "h.r0.1");
            assert_eq!(process_name(Path::new(path)), "h.r0.1");
        }
        let unfinished = unfinished_part(Path::new("d/h.r0.1.csv"), 2, "-2");
        assert_eq!(unfinished, Path::new("d/h.r0.1.part2-2.csv.unfinished"));
        assert_eq!(finished_part(&unfinished), Path::new("d/h.r0.1.part2-2.csv"));
        assert!(is_unfinished_of("h.r0.1.part2-2.csv.unfinished", "h.r0.1"));
        assert!(is_unfinished_of("h.r0.1.csv.unfinished", "h.r0.1"));
        for another in
            ["h.r0.11", "h.r0.1.eval", "h.r0.1.eval.part2", "h.r0.1-2", "h.r0.1.part2.part3", "h.r0.1.partx"]
        {
            assert!(!is_unfinished_of(&format!("{another}.csv.unfinished"), "h.r0.1"), "{another}");
        }
        assert_eq!(unfinished_copy(Path::new("d/h.csv")), Path::new("d/h.csv.unfinished"));
    }

    #[test]
    fn parts_of_one_number_are_found_and_no_others() {
        let folder = std::env::temp_dir().join(format!("memtrace-numbered-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let at = |name: &str| folder.join(name);
        for name in ["r.csv", "r.part2.csv", "r.part2-2.csv", "r.part2-3.csv.zst", "r.part2-2.stacks"] {
            std::fs::write(at(name), "").unwrap();
        }
        for name in
            ["r-2.part2.csv", "r.part22.csv", "r.part2-.csv", "rr.part2.csv", "r.part2.csv.unfinished"]
        {
            std::fs::write(at(name), "").unwrap();
        }
        for any in ["r.csv", "r.part2-2.csv", "r.part7.csv"] {
            assert_eq!(parts_numbered(&at(any), 1), [at("r.csv")]);
            assert_eq!(parts_numbered(&at(any), 2), [at("r.part2-2.csv"), at("r.part2.csv")]);
            assert!(parts_numbered(&at(any), 3).is_empty());
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn the_compressed_copy_and_the_stacks_are_beside_the_trace() {
        let trace = Path::new("d.csv/h.r0.1.csv");
        let packed = compressed(trace, Compression::Zst);
        assert_eq!(packed, Path::new("d.csv/h.r0.1.csv.zst"));
        assert_eq!(uncompressed(&packed).as_deref(), Some(trace));
        assert_eq!(uncompressed(trace), None);
        for path in [trace, &packed] {
            assert_eq!(stacks(path), Path::new("d.csv/h.r0.1.stacks"));
        }
        assert_eq!(stacks(Path::new("d/t")), Path::new("d/t.stacks"));
        let odd = OsStr::from_bytes(b"d/\xff.csv.gz");
        assert_eq!(stacks(Path::new(odd)).as_os_str().as_bytes(), b"d/\xff.stacks");
    }

    #[test]
    fn the_stacks_of_an_older_version_are_found() {
        let folder = std::env::temp_dir().join(format!("memtrace-stacks-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let trace = folder.join("h.r0.1.csv");
        assert_eq!(written_stacks(&trace), stacks(&trace));
        std::fs::write(folder.join("h.r0.1.stacks.csv"), "").unwrap();
        assert_eq!(written_stacks(&trace), folder.join("h.r0.1.stacks.csv"));
        std::fs::write(stacks(&trace), "").unwrap();
        assert_eq!(written_stacks(&trace), stacks(&trace));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
