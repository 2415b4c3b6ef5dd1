//! Finds the dynamic loader that a program names, from the start of its ELF file.

/// The dynamic loader of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loader<'a> {
    /// No loader: the program is statically linked.
    Static,
    /// The path of the loader, with its final NUL. Empty if the path is outside the given bytes.
    Named(&'a [u8]),
}

/// Returns the loader that a 64-bit program names. `head` is the start of its file; 4,096 bytes suffice in
/// practice.
///
/// Returns `None` if the file is not a 64-bit ELF file, such as a script, or if `head` is too short. The
/// offsets are those in `Elf64_Ehdr` and `Elf64_Phdr` in elf.h.
#[must_use]
pub fn loader(head: &[u8]) -> Option<Loader<'_>> {
    const PT_INTERP: usize = 3;
    if !head.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let number = |at: usize, bytes: usize| -> Option<usize> {
        let field = head.get(at..at.checked_add(bytes)?)?;
        Some(field.iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte)))
    };
    let (start, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    for index in 0..count {
        let entry = start.checked_add(index * size)?;
        if number(entry, 4)? == PT_INTERP {
            let (place, length) = (number(entry.checked_add(8)?, 8)?, number(entry.checked_add(32)?, 8)?);
            return Some(Loader::Named(head.get(place..place.saturating_add(length)).unwrap_or_default()));
        }
    }
    Some(Loader::Static)
}

/// Returns true if the program cannot load a library built for 64-bit glibc. `head` is the start of its file.
///
/// musl's loader rejects such a library and ends the program with status 127. glibc's 32-bit loader prints a
/// line for each library and continues.
#[must_use]
pub fn refuses_preload(head: &[u8]) -> bool {
    let is_musl = |path: &[u8]| path.windows(b"/ld-musl-".len()).any(|name| name == b"/ld-musl-");
    head.starts_with(b"\x7fELF\x01") || matches!(loader(head), Some(Loader::Named(path)) if is_musl(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the start of a 64-bit program that names the loader `path`.
    fn program(path: &[u8]) -> Vec<u8> {
        let mut head = vec![0; 64 + 56];
        head[..6].copy_from_slice(b"\x7fELF\x02\x01");
        head[32] = 64;
        head[54] = 56;
        head[56] = 1;
        head[64] = 3;
        head[64 + 8] = 120;
        head[64 + 32] = u8::try_from(path.len()).unwrap();
        head.extend_from_slice(path);
        head
    }

    #[test]
    fn programs_of_musl_and_of_32_bits_refuse_a_preloaded_library() {
        assert!(refuses_preload(&program(b"/lib/ld-musl-x86_64.so.1\0")));
        assert!(refuses_preload(b"\x7fELF\x01\x01 a 32-bit program"));
        assert!(!refuses_preload(&program(b"/lib64/ld-linux-x86-64.so.2\0")));
        for other in [&b"#!/bin/sh"[..], b"", b"\x7fELF\x02\x01", b"\x7fELF"] {
            assert!(!refuses_preload(other), "{other:?}");
        }
    }

    #[test]
    fn numbers_that_overflow_are_no_loader() {
        let mut head = program(b"/x\0");
        head[64 + 8..64 + 16].fill(0xff);
        assert_eq!(loader(&head), Some(Loader::Named(b"")));
        head[32..40].fill(0xff);
        assert_eq!(loader(&head), None);
        let mut none = program(b"");
        none[56] = 0;
        assert_eq!(loader(&none), Some(Loader::Static));
    }
}
