//! Provides a loaded library with the name `libnvidia-ml.so.1`, for libraries that are linked against it.
//!
//! The dynamic loader looks for a file of each name in a `NEEDED` entry, unless a library with that soname is
//! loaded (`_dl_map_object` of glibc). A machine without a driver has no such file, and this library has
//! another soname. So an empty library with that soname is loaded from memory. The loader then finds NVML's
//! functions in the global scope, where this library defines them.

use std::ffi::CString;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::Once;

use crate::core::dlopen::Dlopen;

const SONAME: &[u8] = b"libnvidia-ml.so.1\0";

/// The size of the file's header, and of a program header (`elf.h`).
const FILE_HEADER: u64 = 64;
const PROGRAM_HEADER: u64 = 56;
const PROGRAM_HEADERS: u64 = 3;
/// The offsets of the names, the one null symbol and the dynamic section, which follow the headers.
const NAMES: u64 = FILE_HEADER + PROGRAM_HEADERS * PROGRAM_HEADER;
const SYMBOL: u64 = NAMES + 24;
const DYNAMIC: u64 = SYMBOL + 24;
/// The entries of the dynamic section, as pairs of a tag and its value: STRTAB, SYMTAB, STRSZ, SYMENT,
/// SONAME, NULL.
const ENTRIES: [[u64; 2]; 6] =
    [[5, NAMES], [6, SYMBOL], [10, 1 + SONAME.len() as u64], [11, 24], [14, 1], [0, 0]];
/// The processor (`EM_X86_64`, `EM_AARCH64`), and the size of its largest ordinary page.
const MACHINE: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };
const LARGEST_PAGE: u64 = if cfg!(target_arch = "aarch64") { 0x1_0000 } else { 0x1000 };
const SIZE: u64 = DYNAMIC + 16 * ENTRIES.len() as u64;

/// Returns the bytes of the empty library, in the format of `elf.h`.
fn bytes() -> Vec<u8> {
    // Read and write: the loader writes addresses into the dynamic section.
    const READ_WRITE: u32 = 6;
    let mut file = Vec::with_capacity(SIZE as usize);
    // 64 bits, little endian, version 1; a shared object for this processor.
    file.extend(b"\x7fELF\x02\x01\x01");
    file.resize(16, 0);
    file.extend([3u16.to_le_bytes(), MACHINE.to_le_bytes()].concat());
    file.extend(1u32.to_le_bytes());
    // No entry point; the program headers; no sections.
    file.extend([0, FILE_HEADER, 0].map(u64::to_le_bytes).concat());
    file.extend(0u32.to_le_bytes());
    let sizes = [FILE_HEADER as u16, PROGRAM_HEADER as u16, PROGRAM_HEADERS as u16, 64, 0, 0];
    file.extend(sizes.map(u16::to_le_bytes).concat());
    // The whole file (LOAD), the dynamic section (DYNAMIC), a stack that is not executable (GNU_STACK).
    let parts: [(u32, u64, u64, u64); PROGRAM_HEADERS as usize] =
        [(1, 0, SIZE, LARGEST_PAGE), (2, DYNAMIC, SIZE - DYNAMIC, 8), (0x6474_e551, 0, 0, 16)];
    for (kind, start, size, alignment) in parts {
        file.extend([kind, READ_WRITE].map(u32::to_le_bytes).concat());
        file.extend([start, start, start, size, size, alignment].map(u64::to_le_bytes).concat());
    }
    file.push(0);
    file.extend(SONAME);
    file.resize(DYNAMIC as usize, 0);
    file.extend(ENTRIES.concat().iter().flat_map(|word| word.to_le_bytes()));
    file
}

/// Loads the empty library once. If that fails, a library that needs NVML fails to load, and the loader
/// prints the name of the missing file.
pub(crate) fn load(dlopen: Dlopen) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: C strings. `RTLD_NOLOAD` runs nothing.
        unsafe {
            if !dlopen(SONAME.as_ptr().cast(), libc::RTLD_LAZY | libc::RTLD_NOLOAD).is_null() {
                return;
            }
        }
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: `limit` is valid for the answer.
        unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) };
        // A write beyond the limit would raise SIGXFSZ and end the program, although
        // the program wrote nothing.
        if limit.rlim_cur < SIZE {
            return;
        }
        // SAFETY: a C string.
        let file = unsafe { libc::memfd_create(SONAME.as_ptr().cast(), libc::MFD_CLOEXEC) };
        if file < 0 {
            return;
        }
        // SAFETY: a descriptor that nobody else has.
        let mut file = unsafe { std::fs::File::from_raw_fd(file) };
        // The loader compares path names before it opens a file. This descriptor is closed afterwards, so the
        // program may reuse its number and load a library through `/proc/self/fd/N`. The `.` in the path
        // makes sure that the two names differ.
        let path = CString::new(format!("/proc/self/fd/./{}", file.as_raw_fd())).unwrap_or_default();
        if file.write_all(&bytes()).is_ok() {
            // SAFETY: a C string, and a library without code.
            unsafe { dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_GLOBAL) };
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_empty_library_is_loaded_under_its_soname() {
        assert_eq!(bytes().len() as u64, SIZE);
        // SAFETY: C strings, and a library without code.
        unsafe {
            let flags = libc::RTLD_LAZY | libc::RTLD_NOLOAD;
            // The first call of this library's own `dlopen` loads the empty library. `load` itself needs
            // glibc's `dlopen`, which this test does not have.
            libc::dlopen(c"libc.so.6".as_ptr(), flags);
            let loaded = libc::dlopen(SONAME.as_ptr().cast(), flags);
            assert!(!loaded.is_null());
            assert!(libc::dlsym(loaded, c"nvmlInit_v2_absent".as_ptr()).is_null());
        }
    }
}
