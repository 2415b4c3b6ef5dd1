//! Compiles the program `processes/parts.c`, which several tests share.

use std::path::{Path, PathBuf};

use crate::common::compiled;

/// Compiles `tests/programs/processes/parts.c` into `target`, with imitations of torch's and CUDA's libraries.
pub(crate) fn parts_program(target: &str) -> PathBuf {
    parts_program_with(target, &[])
}

/// Same as [`parts_program`], with more arguments of the compiler.
pub(crate) fn parts_program_with(target: &str, more: &[&str]) -> PathBuf {
    const RUNTIME: &str = "libcudart.so.12";
    compiled("fakes/cudart.c", RUNTIME, &[]);
    compiled("fakes/c10.c", "libc10.so", &[]);
    compiled("fakes/c10_cuda.c", "libc10_cuda.so", &["libc10.so", RUNTIME]);
    let include = format!("-I{}", Path::new(env!("CARGO_MANIFEST_DIR")).join("include").display());
    let arguments = [&[include.as_str(), "libc10_cuda.so", "libc10.so", RUNTIME][..], more].concat();
    compiled("processes/parts.c", target, &arguments)
}
