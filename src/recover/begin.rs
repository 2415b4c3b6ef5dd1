//! Traces whose process was killed before they had a meta row: the journal has it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf, absolute};

use memtrace_trace::csv::RowWriter;
use memtrace_trace::files;
use memtrace_trace::journal::{HEADER_BYTES, JournalName, MAGIC, folders, layout, mount_namespace};
use rustix::fs::OFlags;

use crate::journal::{is_running, meta_of, run_of, trace_of, u64_at};
use crate::repair::FileRows;

/// Gives the traces at `path`, a file or a folder, their meta row from their journals where the process was killed
/// before it wrote one. Returns the number of these traces; [`crate::repair`] finishes them.
///
/// # Errors
/// When a trace cannot be written.
pub fn begin(path: &Path) -> io::Result<u64> {
    // A trace with a meta row says itself where its journal is, so mostly there is nothing to look for.
    if path.is_file() && has_meta_row(path) {
        return Ok(0);
    }
    // The folder of a trace that was never created may not be there either.
    let wanted = fs::canonicalize(path).or_else(|_| absolute(path))?;
    let mut begun = 0;
    for folder in folders() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if let Some(JournalName::Journal(_)) = JournalName::parse(&entry.file_name()) {
                begun += u64::from(begin_from(&entry.path(), &wanted)?);
            }
        }
    }
    Ok(begun)
}

/// Writes the header and the meta row of the trace of one journal, if the trace is `wanted` or lies in it and has none.
fn begin_from(journal: &Path, wanted: &Path) -> io::Result<bool> {
    let Some((file, header)) = read_header(journal) else { return Ok(false) };
    let never_wrote = u64_at(&header, layout::CHECKPOINTS) == 0;
    let (Some(trace), Some(json)) = (trace_of(&header).and_then(at_its_place), meta_of(&header)) else {
        return Ok(false);
    };
    if !never_wrote
        || !trace.starts_with(wanted)
        || has_meta_row(&trace)
        || is_running(&file, &run_of(&header))
    {
        return Ok(false);
    }
    // In another mount namespace the path of the trace means another file.
    let namespace = u64_at(&header, layout::MOUNT_NAMESPACE);
    if namespace != 0 && namespace != mount_namespace() {
        return Ok(false);
    }
    let Ok(owner) = file.metadata().map(|data| data.uid()) else { return Ok(false) };
    if !is_of(owner, &trace) {
        return Ok(false);
    }
    if let Some(folder) = trace.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    let mut options = OpenOptions::new();
    options.write(true).create(true).mode(0o600).custom_flags(OFlags::NOFOLLOW.bits() as i32);
    let trace = options.open(&trace)?;
    // In one write, and over what a killed write left: a reader sees the row or no row.
    let run = run_of(&header);
    let encoder = &mut memtrace_encode::Encoder::new(
        run.start_ns,
        run.rank as i32,
        run.pid,
        memtrace_trace::rounding::Rounding::default(),
        false,
    );
    let mut rows = FileRows { writer: RowWriter::new(Vec::new()), rows: 0 };
    encoder.meta(json, &mut rows)?;
    rows.writer.flush()?;
    trace.set_len(0)?;
    (&trace).write_all(rows.writer.get_ref())?;
    Ok(true)
}

/// Returns true if the trace, or its folder while there is no trace, belongs to the owner of the journal: anybody can put
/// a file into `/dev/shm`. What does not exist yet belongs to the caller.
fn is_of(owner: u32, trace: &Path) -> bool {
    let place = fs::symlink_metadata(trace).or_else(|_| fs::metadata(trace.parent().unwrap_or(trace)));
    match place {
        Ok(place) => place.uid() == owner && !place.is_symlink(),
        Err(_) => owner == rustix::process::geteuid().as_raw(),
    }
}

/// The path of a trace, with its folder as it is on the disk if it is there.
fn at_its_place(path: &Path) -> Option<PathBuf> {
    let name = path.file_name().filter(|name| files::is_trace(&name.to_string_lossy()))?;
    let folder = path.parent().filter(|folder| folder.is_absolute())?;
    Some(fs::canonicalize(folder).unwrap_or_else(|_| folder.to_owned()).join(name))
}

/// Opens the journal and reads its header; `None` when it is none, or none of this version.
fn read_header(journal: &Path) -> Option<(File, Vec<u8>)> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(journal).ok()?;
    file.metadata().ok().filter(fs::Metadata::is_file)?;
    let mut header = Vec::new();
    (&file).take(HEADER_BYTES as u64).read_to_end(&mut header).ok()?;
    header.starts_with(&MAGIC).then_some((file, header))
}

/// Returns true if a trace has a header and a whole meta row.
fn has_meta_row(trace: &Path) -> bool {
    let mut start = Vec::new();
    let Ok(file) = File::open(trace) else { return false };
    // A header and the longest meta row; a compressed trace was closed in order.
    let is_plain = trace.extension().is_some_and(|extension| extension == "csv");
    let read = file.take(1 << 20).read_to_end(&mut start).is_ok();
    !is_plain
        || !read
        || start.iter().filter(|byte| **byte == b'\n').nth(1).is_some()
        || start.len() == 1 << 20
}
