//! Why the tracer was not loaded into a program, as far as the program's file shows.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Why the loader may have passed over the library, as far as the program's file tells.
pub(crate) fn why_not(program: &OsStr) -> String {
    let Some(path) = find_program(program) else {
        return "it ended before it could be".to_owned();
    };
    let shown = path.display();
    if fs::metadata(&path).is_ok_and(|file| file.permissions().mode() & 0o6000 != 0) {
        return format!(
            "{shown} is set-user-id, for which the loader ignores LD_PRELOAD; run the program itself"
        );
    }
    match is_static(&path) {
        Some(true) => format!("{shown} is statically linked; start the program that uses the GPU itself"),
        _ => format!(
            "{shown} or what it starts drops LD_PRELOAD from the environment; start the program itself, as in: memtrace run -- python train.py"
        ),
    }
}

/// The file that the shell would run.
fn find_program(program: &OsStr) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Path::new(program).canonicalize().ok();
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).find_map(|folder| folder.join(program).canonicalize().ok())
}

/// Does this ELF file name no loader? `None` for what is no 64-bit ELF file, a script for one.
fn is_static(path: &Path) -> Option<bool> {
    let mut head = Vec::new();
    File::open(path).ok()?.take(4096).read_to_end(&mut head).ok()?;
    if !head.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let number = |at: usize, bytes: usize| -> Option<usize> {
        let field = head.get(at..at + bytes)?;
        Some(field.iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte)))
    };
    // e_phoff, e_phentsize and e_phnum of the header; p_type of each program header.
    const PT_INTERP: usize = 3;
    let (start, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    for index in 0..count {
        if number(start.checked_add(index * size)?, 4)? == PT_INTERP {
            return Some(false);
        }
    }
    Some(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_test_is_linked_dynamically_and_a_script_is_no_program() {
        assert_eq!(is_static(&std::env::current_exe().unwrap()), Some(false));
        assert_eq!(is_static(Path::new("Cargo.toml")), None);
    }
}
