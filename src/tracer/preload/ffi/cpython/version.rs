//! The version of the Python in this process, and whether this Python is a free-threaded build.

use std::ffi::{CStr, c_char};

use crate::ffi::symbols::{find_global, function};

/// The oldest and the newest tested minor version of Python 3.
pub(crate) const TRIED: (u32, u32) = (9, 15);

/// A version of Python.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Version {
    pub(crate) major: u32,
    pub(crate) minor: u32,
    /// True for a build without the GIL. The objects of such a build have a header of four words instead of
    /// two, and another thread may change an object at any time.
    pub(crate) is_free_threaded: bool,
}

impl Version {
    /// Returns the version of the Python in this process, or `None` if the process has no Python.
    pub(crate) fn get() -> Option<Version> {
        // SAFETY: the type is the one in Include/pylifecycle.h.
        let text: unsafe extern "C" fn() -> *const c_char =
            unsafe { function(find_global(c"Py_GetVersion")) }?;
        // SAFETY: the function returns a C string that lives as long as the process, and any thread may call
        // it.
        Version::parse(&unsafe { CStr::from_ptr(text()) }.to_string_lossy())
    }

    /// Parses the result of `Py_GetVersion`: `3.14.2 free-threading build (main, ...) [GCC ...]`.
    fn parse(text: &str) -> Option<Version> {
        let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().ok());
        let is_free_threaded = text.contains(" free-threading build");
        Some(Version { major: numbers.next()??, minor: numbers.next()??, is_free_threaded })
    }

    /// Returns true if memtrace was tested with this version of Python.
    pub(crate) fn was_tried(self) -> bool {
        self.major == 3 && (TRIED.0..=TRIED.1).contains(&self.minor)
    }
}

/// Returns true if this process has a free-threaded Python.
pub(crate) fn is_free_threaded() -> bool {
    Version::get().is_some_and(|version| version.is_free_threaded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_of_each_build_is_parsed_and_no_other_text() {
        let parsed =
            |text| Version::parse(text).map(|v| (v.major, v.minor, v.is_free_threaded, v.was_tried()));
        assert_eq!(parsed("3.9.18 (main, May  9 2026) [GCC 12.2.0]"), Some((3, 9, false, true)));
        assert_eq!(parsed("3.15.0a7+ (heads/main) [Clang]"), Some((3, 15, false, true)));
        assert_eq!(parsed("3.16.0b1 (main) [GCC]"), Some((3, 16, false, false)));
        assert_eq!(parsed("3.13.1 experimental free-threading build (main)"), Some((3, 13, true, true)));
        assert_eq!(parsed("3.14.2 free-threading build (main)"), Some((3, 14, true, true)));
        assert_eq!(parsed("2.7.18 (default)"), Some((2, 7, false, false)));
        assert_eq!((parsed(""), parsed("main"), parsed("3")), (None, None, None));
        assert_eq!(parsed("99999999999.1"), None);
    }
}
