//! Orphaned journals: the process has ended, and its trace was deleted.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use memtrace_trace::journal::{CHUNK_BYTES, MAGIC, layout, names_path};

use crate::journal::{is_running, run_of, u64_at};

/// Removes the orphaned journals beside `own`: their processes have ended and their traces were deleted. The others
/// stay for `memtrace check --repair`.
pub fn sweep(own: &Path) {
    let Some(folder) = own.parent() else { return };
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with("memtrace-")
            && name.ends_with(".journal")
            && entry.path() != own
            && is_orphan(&entry.path()).unwrap_or(false)
        {
            let _ = fs::remove_file(names_path(&entry.path()));
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Returns true if a journal is orphaned; `None` when that cannot be known.
fn is_orphan(journal: &Path) -> Option<bool> {
    let mut header = Vec::new();
    // The journal of another user cannot be opened.
    let file = File::open(journal).ok()?;
    (&file).take(CHUNK_BYTES as u64).read_to_end(&mut header).ok()?;
    if !header.starts_with(&MAGIC) || is_running(&file, &run_of(&header)) {
        return None;
    }
    let end = layout::TRACE.saturating_add(u64_at(&header, layout::TRACE_LEN) as usize);
    let path = header.get(layout::TRACE..end).filter(|path| !path.is_empty())?;
    let first = Path::new(OsStr::from_bytes(path));
    // The first part may be compressed by now, or deleted while later parts stay.
    let (folder, stem) = (first.parent()?, first.file_stem()?.as_bytes());
    let Ok(entries) = fs::read_dir(folder) else { return Some(!first.exists()) };
    let of_trace = |name: &[u8]| name.strip_prefix(stem).is_some_and(|rest| rest.first() == Some(&b'.'));
    Some(!entries.flatten().any(|entry| of_trace(entry.file_name().as_bytes())))
}
