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
    if has_musl_loader(path.as_os_str()) {
        return format!("{shown} runs under musl's loader; trace a program that is built for glibc");
    }
    if fs::metadata(&path).is_ok_and(|file| file.permissions().mode() & 0o6000 != 0) {
        return format!(
            "{shown} is a set-user-id program, for which the loader ignores LD_PRELOAD; run the program that \
             it starts directly"
        );
    }
    match loader_of(&path) {
        Some(Loader::Static) => format!(
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

/// Returns true if `program` runs under the loader of musl: it refuses a library that is made for glibc, and
/// ends the program with status 127.
pub(crate) fn has_musl_loader(program: &OsStr) -> bool {
    let name_of = |loader: &[u8]| loader.windows(b"/ld-musl-".len()).any(|name| name == b"/ld-musl-");
    match find_program(program).and_then(|path| loader_of(&path)) {
        Some(Loader::Named(name)) => name_of(&name),
        _ => false,
    }
}

/// The loader of a program.
#[derive(Debug, PartialEq, Eq)]
enum Loader {
    /// None: the program is statically linked.
    Static,
    /// The file at this path.
    Named(Vec<u8>),
}

/// The loader that an ELF file names. `None` when it is not a 64-bit ELF file, such as a script.
fn loader_of(path: &Path) -> Option<Loader> {
    let mut head = Vec::new();
    File::open(path).ok()?.take(4096).read_to_end(&mut head).ok()?;
    if !head.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let number = |at: usize, bytes: usize| -> Option<usize> {
        let field = head.get(at..at.checked_add(bytes)?)?;
        Some(field.iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte)))
    };
    // e_phoff, e_phentsize and e_phnum of the header; p_type, p_offset and p_filesz of each program header.
    const PT_INTERP: usize = 3;
    let (start, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    for index in 0..count {
        let entry = start.checked_add(index * size)?;
        if number(entry, 4)? == PT_INTERP {
            let (place, length) = (number(entry + 8, 8)?, number(entry + 32, 8)?);
            let name = head.get(place..place.saturating_add(length)).unwrap_or_default();
            return Some(Loader::Named(name.to_owned()));
        }
    }
    Some(Loader::Static)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_static_program_is_told_from_a_dynamic_one_and_from_a_script() {
        let loader = loader_of(&std::env::current_exe().unwrap());
        assert!(matches!(&loader, Some(Loader::Named(name)) if name.starts_with(b"/")), "{loader:?}");
        assert_eq!(loader_of(Path::new("Cargo.toml")), None);
    }
}
