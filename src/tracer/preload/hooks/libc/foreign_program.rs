//! Starts a program without our libraries if it cannot load them: a program built for musl would exit with
//! status 127, and a 32-bit one would print a line for each library ([`elf::refuses_preload`]).
//!
//! Nothing here allocates, because the caller may be the child of a `vfork`, which shares its parent's
//! memory. Such a child could not free an allocation after a successful `exec`, so the parent would leak it.

use std::ffi::{CStr, c_char, c_int};

use memtrace_trace::elf;

use super::exec::Strings;

/// The maximum number of variables in an environment that is rewritten. A larger environment is passed on
/// unchanged.
const MOST_VARIABLES: usize = 1024;

/// The maximum length in bytes of `LD_PRELOAD`, and of the path that a lookup in `PATH` finds. The same
/// number of bytes is read from the start of a program's file.
const MOST_BYTES: usize = 4096;

/// The file of a program to start.
#[derive(Clone, Copy)]
pub(super) enum Program {
    /// The file at a path, relative to the folder that is open as this descriptor.
    At(c_int, *const c_char),
    /// The file that is open as this descriptor.
    Open(c_int),
}

impl Program {
    /// The file at a path, relative to the current folder. The path is null if there is no such file.
    pub(super) const fn at(path: *const c_char) -> Self {
        Self::At(libc::AT_FDCWD, path)
    }

    /// Returns true if the program cannot load our libraries. Returns false if the file cannot be read.
    ///
    /// # Safety
    /// A path is null or a C string.
    unsafe fn refuses_preload(self) -> bool {
        match self {
            Self::Open(file) => file_refuses_preload(file),
            Self::At(_, path) if path.is_null() => false,
            Self::At(folder, path) => {
                let flags = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK;
                // SAFETY: the path is a C string.
                let file = unsafe { libc::openat(folder, path, flags) };
                if file < 0 {
                    return false;
                }
                let refuses = file_refuses_preload(file);
                // SAFETY: the descriptor was opened above and is closed once.
                unsafe { libc::close(file) };
                refuses
            }
        }
    }
}

/// Calls `exec` with `environment`, without our libraries if the program cannot load them.
///
/// # Safety
/// The program's path is null or a C string. `environment` is null or an array of C strings that ends with null.
pub(super) unsafe fn with_fitting_environment<R>(
    program: Program,
    environment: Strings,
    exec: impl FnOnce(Strings) -> R,
) -> R {
    // SAFETY: by the contract of this function.
    if environment.is_null() || unsafe { !program.refuses_preload() } {
        return exec(environment);
    }
    // SAFETY: by the contract of this function. The environment is not null.
    unsafe { without_preload(environment, exec) }
}

/// Returns true if the program in an open file cannot load our libraries. Returns false if the file cannot be
/// read. The position in the file does not change.
fn file_refuses_preload(file: c_int) -> bool {
    let mut head = [0u8; MOST_BYTES];
    // SAFETY: the buffer has room for the requested bytes. The call fails for a descriptor that is not open.
    let length = unsafe { libc::pread(file, head.as_mut_ptr().cast(), MOST_BYTES, 0) };
    usize::try_from(length).is_ok_and(|length| elf::refuses_preload(&head[..length]))
}

/// Calls `exec` with `environment`, with our libraries removed from `LD_PRELOAD`. Not inlined, so that the
/// calls for other programs do not need its large stack frame.
///
/// # Safety
/// `environment` is an array of C strings that ends with null.
#[inline(never)]
unsafe fn without_preload<R>(environment: Strings, exec: impl FnOnce(Strings) -> R) -> R {
    let mut list = [std::ptr::null::<c_char>(); MOST_VARIABLES + 1];
    let mut preload = [0u8; MOST_BYTES];
    let mut length = 0;
    let mut next = environment;
    // SAFETY: the loop ends at the null, and each pointer before it is a C string.
    while let Some(variable) = unsafe { next.as_ref() }.filter(|variable| !variable.is_null()) {
        if length == MOST_VARIABLES {
            return exec(environment);
        }
        // SAFETY: as above.
        let text = unsafe { CStr::from_ptr(*variable) }.to_bytes();
        list[length] = *variable;
        let mut is_kept = true;
        if let Some(libraries) = text.strip_prefix(b"LD_PRELOAD=") {
            let Some(kept) = without_ours(libraries, &mut preload) else { return exec(environment) };
            list[length] = preload.as_ptr().cast();
            is_kept = kept > 0;
        }
        length += usize::from(is_kept);
        // SAFETY: the entry was not the null that ends the array.
        next = unsafe { next.add(1) };
    }
    list[length] = std::ptr::null();
    exec(list.as_ptr())
}

/// Writes `LD_PRELOAD=` and the libraries that are not ours into `place`, with a final NUL. Returns the
/// number of libraries that are left, or `None` if `place` is too small.
fn without_ours(libraries: &[u8], place: &mut [u8; MOST_BYTES]) -> Option<usize> {
    let mut end = 0;
    let mut add = |bytes: &[u8]| {
        place.get_mut(end..end + bytes.len())?.copy_from_slice(bytes);
        end += bytes.len();
        Some(())
    };
    add(b"LD_PRELOAD=")?;
    let mut kept = 0;
    for library in libraries.split(|byte| matches!(byte, b':' | b' ')) {
        let name = library.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        if library.is_empty() || matches!(name, b"libmemtrace.so" | b"libmemtrace_phantom.so") {
            continue;
        }
        if kept > 0 {
            add(b":")?;
        }
        add(library)?;
        kept += 1;
    }
    add(b"\0")?;
    Some(kept)
}

/// A buffer for a path that a lookup in `PATH` finds. It is on the stack, because nothing here may allocate.
pub(super) struct FoundPath([u8; MOST_BYTES]);

impl FoundPath {
    /// Returns an empty buffer.
    pub(super) const fn new() -> Self {
        Self([0; MOST_BYTES])
    }

    /// Returns the path of the program that `execvp` would run for `name`, or null if no such program exists.
    ///
    /// # Safety
    /// `name` is null or a C string.
    pub(super) unsafe fn find(&mut self, name: *const c_char) -> *const c_char {
        if name.is_null() {
            return name;
        }
        // SAFETY: the pointer is not null, so it is a C string by the contract.
        let file = unsafe { CStr::from_ptr(name) }.to_bytes_with_nul();
        if file.contains(&b'/') {
            return if is_program(name) { name } else { std::ptr::null() };
        }
        // SAFETY: the name is a C string; the value is read before anything else runs.
        let folders = unsafe { libc::getenv(c"PATH".as_ptr()) };
        // Without `PATH`, glibc uses this default.
        // SAFETY: `getenv` returns null or a C string.
        let folders = if folders.is_null() { c"/bin:/usr/bin" } else { unsafe { CStr::from_ptr(folders) } };
        for folder in folders.to_bytes().split(|byte| *byte == b':') {
            // An empty entry of `PATH` means the current folder.
            let folder = if folder.is_empty() { b"." } else { folder };
            let end = folder.len() + 1 + file.len();
            let Some(path) = self.0.get_mut(..end) else { continue };
            path[..folder.len()].copy_from_slice(folder);
            path[folder.len()] = b'/';
            path[folder.len() + 1..].copy_from_slice(file);
            if is_program(path.as_ptr().cast()) {
                return self.0.as_ptr().cast();
            }
        }
        std::ptr::null()
    }
}

/// Returns true if the process may execute the file at `path`. Returns false for null.
pub(super) fn is_program(path: *const c_char) -> bool {
    // SAFETY: the kernel reads the path, and returns EFAULT for a bad address.
    unsafe { libc::access(path, libc::X_OK) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs [`without_preload`] on an environment with `value` between two other variables. Returns the new
    /// value of `LD_PRELOAD`, or `None` if the variable was removed, and whether the other two are passed on
    /// in order.
    fn left_of(value: &CStr) -> (Option<String>, bool) {
        left_of_all([c"A=1", value, c"B=LD_PRELOAD=x"])
    }

    fn left_of_all(variables: [&CStr; 3]) -> (Option<String>, bool) {
        let [first, second, third] = variables.map(CStr::as_ptr);
        let variables = [first, second, third, std::ptr::null()];
        let read = |list: Strings| {
            // SAFETY: the list has our own strings, and ends with null.
            let text = |at: usize| unsafe {
                let text = *list.add(at);
                (!text.is_null()).then(|| CStr::from_ptr(text).to_str().unwrap().to_owned())
            };
            let all: Vec<String> = (0..).map_while(text).collect();
            let preload = all.iter().find_map(|text| text.strip_prefix("LD_PRELOAD=")).map(str::to_owned);
            (preload, all.first().unwrap() == "A=1" && all.last().unwrap() == "B=LD_PRELOAD=x")
        };
        // SAFETY: the array ends with null.
        unsafe { without_preload(variables.as_ptr(), read) }
    }

    #[test]
    fn only_our_libraries_leave_the_environment() {
        let both = c"LD_PRELOAD=/a/libmemtrace.so:/a/libmemtrace_phantom.so";
        assert_eq!(left_of(both), (None, true));
        let mixed = c"LD_PRELOAD=/a/libmemtrace.so:/b/libjemalloc.so /c/not-libmemtrace.so";
        assert_eq!(left_of(mixed), (Some("/b/libjemalloc.so:/c/not-libmemtrace.so".to_owned()), true));
        assert_eq!(left_of(c"LD_PRELOAD="), (None, true));
        let long = std::ffi::CString::new(format!("LD_PRELOAD=/a/libmemtrace.so{}", ":/x".repeat(2000)));
        assert!(
            left_of(&long.unwrap()).0.unwrap().starts_with("/a/libmemtrace.so:/x"),
            "too long: unchanged"
        );
        assert_eq!(left_of_all([c"LD_PRELOAD=/a/libmemtrace.so", c"A=1", c"B=LD_PRELOAD=x"]), (None, true));
    }
}
