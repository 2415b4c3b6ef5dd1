//! Identifies the library that made a call by the return address.

use std::ffi::c_void;
use std::ops::ControlFlow;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use memtrace_record::intern::TextId;
use memtrace_record::recorder::text_id;

use crate::ffi::{loaded_libraries, phantom};

/// A calling library, as an event names it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Library {
    /// The file name of the library.
    pub(crate) name: TextId,
    /// True if the library contains torch's caching allocator.
    pub(crate) is_torch_allocator: bool,
    /// True if the library is NCCL, whose memory belongs to a communicator.
    pub(crate) is_nccl: bool,
    /// True if the library is the phantom device, which makes calls on behalf of the libraries that it
    /// replaces.
    is_phantom: bool,
}

impl Library {
    /// Returns the library that an event names: this one or, for the phantom device, the library on whose
    /// behalf it handles the current call of the thread.
    fn named(self) -> Library {
        if !self.is_phantom {
            return self;
        }
        match phantom::library_of_call() {
            Some(name) => {
                let name = name.to_string_lossy();
                Library { name: text_id(&name), is_nccl: is_nccl(&name), ..self }
            }
            None => self,
        }
    }
}

fn is_nccl(file: &str) -> bool {
    file.starts_with("libnccl.so")
}

/// An executable segment, and the library that contains it.
struct Range {
    start: usize,
    end: usize,
    library: Library,
}

/// The executable segments of all loaded libraries, sorted by address.
struct Ranges {
    /// The loader's counts of loaded and unloaded libraries at the time of the walk.
    version: (u64, u64),
    ranges: Vec<Range>,
}

/// The table of the code of every loaded library. If a call comes from an address that is not in the table,
/// and libraries were loaded or unloaded since the table was built, a new table replaces it. The old table is
/// never freed.
static RANGES: AtomicPtr<Ranges> = AtomicPtr::new(null_mut());

/// Returns the library that contains the code at `address`, or `(unknown)` for generated code.
pub(crate) fn library_at(address: *const c_void) -> Library {
    let address = address as usize;
    if let Some(library) = look_up(address) {
        return library.named();
    }
    let version = loaded_libraries::version();
    // SAFETY: null or a table, which is never freed or changed.
    let known = unsafe { RANGES.load(Ordering::Acquire).as_ref() };
    // The version is checked first, because generated code is in no library, and its calls must not build a
    // new table each time.
    if known.is_none_or(|known| known.version != version) {
        let fresh = Box::into_raw(Box::new(Ranges { version, ranges: loaded_code() }));
        // The old table (some hundred bytes per library) is leaked, because another thread may be using it.
        RANGES.store(fresh, Ordering::Release);
    }
    let unknown = || Library {
        name: text_id("(unknown)"),
        is_torch_allocator: false,
        is_nccl: false,
        is_phantom: false,
    };
    look_up(address).map_or_else(unknown, Library::named)
}

fn look_up(address: usize) -> Option<Library> {
    // SAFETY: null or a table, which is never freed or changed.
    let ranges = &unsafe { RANGES.load(Ordering::Acquire).as_ref() }?.ranges;
    let index = ranges.partition_point(|range| range.end <= address);
    ranges.get(index).filter(|range| range.start <= address).map(|range| range.library)
}

/// Returns the executable segments of all loaded libraries, sorted by address.
fn loaded_code() -> Vec<Range> {
    let mut found: Vec<(usize, usize, String)> = Vec::new();
    loaded_libraries::walk(|library| {
        let path = library.path.to_string_lossy();
        found.extend(library.code().map(|code| (code.start, code.end, path.clone().into_owned())));
        ControlFlow::Continue(())
    });
    let mut ranges: Vec<Range> = found
        .into_iter()
        .map(|(start, end, path)| {
            let file = path.rsplit('/').next().unwrap_or_default();
            let name = if file.is_empty() { program_name() } else { file.to_owned() };
            let is_torch_allocator = name.starts_with("libc10_cuda.so");
            let is_phantom = name.starts_with("libmemtrace_phantom.so");
            let library =
                Library { name: text_id(&name), is_torch_allocator, is_nccl: is_nccl(&name), is_phantom };
            Range { start, end, library }
        })
        .collect();
    ranges.sort_by_key(|range| range.start);
    ranges
}

fn program_name() -> String {
    let path = std::env::current_exe().ok();
    let name =
        path.as_ref().and_then(|path| path.file_name()).map(|name| name.to_string_lossy().into_owned());
    name.unwrap_or_else(|| "(program)".to_owned())
}
