//! Finds the reason why the dynamic loader did not load the tracer into a program.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use memtrace_trace::elf::{self, Loader};

use crate::search_path::find_program;

/// Returns the likely reason why `program` ran without the tracer, and a solution. Both are derived from the
/// program's file.
pub(crate) fn reason(program: &OsStr) -> String {
    let Some(path) = resolved(program) else {
        return "the reason is unknown, because the program's file was not found; give its full path"
            .to_owned();
    };
    let shown = path.display();
    let head = head_of(&path).unwrap_or_default();
    if elf::refuses_preload(&head) {
        return format!("{shown} is not built for 64-bit glibc; trace a program that is");
    }
    if fs::metadata(&path).is_ok_and(|file| file.permissions().mode() & 0o6000 != 0) {
        return format!(
            "{shown} is a set-user-id program, for which the loader ignores LD_PRELOAD; run the program that \
             it starts directly"
        );
    }
    match elf::loader(&head) {
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

/// Returns the file that a shell would run for `program`, with links resolved, or `None` if there is no such file.
fn resolved(program: &OsStr) -> Option<PathBuf> {
    find_program(program)?.canonicalize().ok()
}

/// Returns true if `program` cannot load the tracer; see [`elf::refuses_preload`].
pub(crate) fn refuses_preload(program: &OsStr) -> bool {
    resolved(program).and_then(|path| head_of(&path)).is_some_and(|head| elf::refuses_preload(&head))
}

/// Returns the start of a file, which has the headers of a program, or `None` if it cannot be read.
fn head_of(path: &Path) -> Option<Vec<u8>> {
    let mut head = Vec::new();
    File::open(path).ok()?.take(4096).read_to_end(&mut head).ok()?;
    Some(head)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_static_program_is_distinguished_from_a_dynamic_one_and_from_a_script() {
        let own = head_of(&std::env::current_exe().unwrap()).unwrap();
        assert!(matches!(elf::loader(&own), Some(Loader::Named(name)) if name.starts_with(b"/")));
        assert_eq!(elf::loader(&head_of(Path::new("Cargo.toml")).unwrap()), None);
    }
}
