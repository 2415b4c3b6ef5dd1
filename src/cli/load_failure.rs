//! Finds the reason why the dynamic loader did not load the tracer into a program.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The likely reason why `program` ran without the tracer, and the way out, judged from its file.
pub(crate) fn reason(program: &OsStr) -> String {
    let Some(path) = find_program(program) else {
        return "the program ended before its libraries were loaded".to_owned();
    };
    let shown = path.display();
    if fs::metadata(&path).is_ok_and(|file| file.permissions().mode() & 0o6000 != 0) {
        return format!(
            "{shown} is a set-user-id program, for which the loader ignores LD_PRELOAD; run the program that \
             it starts directly"
        );
    }
    match is_static(&path) {
        Some(true) => format!(
            "{shown} is statically linked, so LD_PRELOAD has no effect on it; run the program that uses the \
             GPU directly"
        ),
        _ => format!(
            "{shown}, or a program that it starts, removes LD_PRELOAD from the environment; run the program \
             that uses the GPU directly: memtrace run -- python train.py"
        ),
    }
}

/// The file that a shell would run for `program`.
fn find_program(program: &OsStr) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Path::new(program).canonicalize().ok();
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).find_map(|folder| folder.join(program).canonicalize().ok())
}

/// Returns true if the file is a statically linked program: an ELF file that names no loader. `None` when it
/// is not a 64-bit ELF file, such as a script.
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
    fn a_static_program_is_told_from_a_dynamic_one_and_from_a_script() {
        assert_eq!(is_static(&std::env::current_exe().unwrap()), Some(false));
        assert_eq!(is_static(Path::new("Cargo.toml")), None);
    }
}
