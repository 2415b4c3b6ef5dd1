//! Recognizes files of other programs, so that the error message names them and says what to use instead.

use std::io;
use std::path::Path;

/// The formats that can be recognized by their first bytes.
const MAGIC: &[(&[u8], &str)] = &[
    (
        b"SQLite format 3\0",
        "an SQLite database; an export of Nsight Systems has CUDA's allocations without PyTorch's blocks, so memtrace does not read \
         it: record with memtrace run or torch.cuda.memory._dump_snapshot()",
    ),
    (
        b"PK\x03\x04",
        "a zip archive, such as torch.save() writes; a memory snapshot is the file of torch.cuda.memory._dump_snapshot(), unpacked",
    ),
    (b"\x93NUMPY", "a NumPy array, not a trace"),
    (b"\x7FELF", "a program or a library, not a trace"),
    (b"PAR1", "a Parquet file; use the trace that it was made from"),
    (b"(dp", OLD_PICKLE),
    (b"(lp", OLD_PICKLE),
    (b"}q", OLD_PICKLE),
    (b"]q", OLD_PICKLE),
];

const OLD_PICKLE: &str =
    "a pickle of protocol 0 or 1; load it in Python and save it again with pickle.dump(snapshot, file)";
const REPORT: &str = "a report of Nsight Systems, which has CUDA's allocations without PyTorch's blocks; record with memtrace run or \
                      torch.cuda.memory._dump_snapshot()";
const PAGE: &str = "an HTML page; if it shows a memory snapshot, use the pickle that it was made from";
const JSON: &str =
    "a memory snapshot as JSON; memtrace reads the pickle that torch.cuda.memory._dump_snapshot() writes";

/// Fails if a file is of a known kind that is not a trace. `start` has its first bytes, decompressed.
pub(super) fn refuse(start: &[u8], path: &Path) -> io::Result<()> {
    match kind(start, path) {
        Some(what) => Err(io::Error::new(io::ErrorKind::InvalidData, what)),
        None => Ok(()),
    }
}

fn kind(start: &[u8], path: &Path) -> Option<&'static str> {
    if let Some((_, what)) = MAGIC.iter().find(|(magic, _)| start.starts_with(magic)) {
        return Some(what);
    }
    let extension = path.extension().unwrap_or_default();
    if ["nsys-rep", "qdrep", "qdstrm"].iter().any(|known| extension == *known) {
        return Some(REPORT);
    }
    let text = start.trim_ascii_start();
    let opens = |tag: &[u8]| text.get(..tag.len()).is_some_and(|start| start.eq_ignore_ascii_case(tag));
    if opens(b"<!doctype html") || opens(b"<html") {
        return Some(PAGE);
    }
    let after = text.strip_prefix(b"{").unwrap_or_default().trim_ascii_start();
    let is_snapshot = after.starts_with(b"\"segments\"") || after.starts_with(b"\"device_traces\"");
    is_snapshot.then_some(JSON)
}

#[cfg(test)]
mod tests {
    use super::{JSON, OLD_PICKLE, PAGE, REPORT, kind};
    use std::path::Path;

    #[test]
    fn a_file_of_another_program_is_named_and_a_trace_is_not() {
        let of = |start: &[u8], name: &str| kind(start, Path::new(name));
        assert!(
            of(b"SQLite format 3\0\x10\0", "a.sqlite").is_some_and(|what| what.contains("Nsight Systems"))
        );
        assert!(of(b"PK\x03\x04\0\0", "a.pt").is_some_and(|what| what.contains("torch.save()")));
        assert_eq!(of(b"\x01\x02", "a.nsys-rep"), Some(REPORT));
        assert_eq!(of(b"\n<!DOCTYPE HTML>", "a.html"), Some(PAGE));
        assert_eq!(of(b"{ \"segments\": [", "a.json"), Some(JSON));
        assert_eq!(of(b"(dp0\nVsegments", "a.pickle"), Some(OLD_PICKLE));
        assert_eq!(of(b"{\"schemaVersion\": 1, \"segments\"", "a.json"), None);
        for start in [&b"seq,ts_ns,rank"[..], b"", b"{", b"SQLite", b"\x80\x04"] {
            assert_eq!(of(start, "a.csv"), None, "{start:?}");
        }
    }
}
