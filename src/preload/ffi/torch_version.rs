//! Which torch the process has.

use std::path::Path;

use crate::ffi::symbols::loaded_libraries;

/// The version in `torch/version.py`, beside the folder of torch's libraries: `2.11.0+cu130`.
pub(crate) fn version() -> Option<String> {
    let c10 = loaded_libraries("libc10.so").into_iter().next()?;
    let folder = Path::new(c10.to_str().ok()?).parent()?.parent()?.to_owned();
    let text = std::fs::read_to_string(folder.join("version.py")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("__version__ = "))?;
    Some(line.trim().trim_matches(['\'', '"']).to_owned())
}

/// Its first two numbers.
pub(crate) fn numbers(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}
