//! The features that cannot be captured with this process's torch and Python, for the meta row.
//!
//! The check runs on the writer thread when the trace begins. It cannot run when memtrace is loaded, because
//! torch is not loaded yet then.

use std::ffi::CStr;

use memtrace_trace::Meta;
use memtrace_trace::config::Settings;

use crate::attribution::{private_pools, requested_sizes};
use crate::ffi::cpython::version::{self, Version};
use crate::ffi::loaded_libraries::loaded_libraries;
use crate::ffi::symbols::find_in_loaded;
use crate::ffi::{cpython, torch};
use crate::python::op_io;

/// The oldest and the newest tested minor version of torch 2.
const TRIED: (u32, u32) = (1, 15);

/// The functions that hooks need: the library, the function, and the consequence if the function is missing.
const NEEDED: &[(&str, &CStr, &str)] = &[
    (
        "libc10.so",
        c"_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE",
        "torch does not report blocks: only the runtime's calls are traced",
    ),
    ("libc10.so", c"_ZN3c1027reportOutOfMemoryToProfilerElmmNS_6DeviceE", "no report of OOMs"),
    ("libc10_cuda.so", c"_ZN3c104cuda20getCurrentCUDAStreamEa", "no streams: stream is 0"),
];

/// The functions that the op callbacks need.
const NEEDED_FOR_OPS: &[&CStr] =
    &[c"_ZN2at17addGlobalCallbackENS_22RecordFunctionCallbackE", c"_ZNK2at14RecordFunction4nameEv"];

/// Adds the features that cannot be captured in this process's Python.
fn describe_python(meta: &mut Meta) {
    let Some(python) = Version::get() else { return };
    let (name, (oldest, newest)) = (format!("Python {}.{}", python.major, python.minor), version::TRIED);
    if !python.was_tried() {
        meta.degraded.push(format!("{name} is untested (tested: 3.{oldest} to 3.{newest})"));
    }
    if python.is_free_threaded {
        meta.degraded.push(format!(
            "{name} is a free-threaded build: no Python lines in stacks, no search for holders (leaks --holders)"
        ));
    }
}

/// Adds torch's version to the meta row, and everything that cannot be captured with this torch and Python.
pub(crate) fn describe(meta: &mut Meta, settings: &Settings) {
    if loaded_libraries("libc10.so").is_empty() {
        return;
    }
    describe_python(meta);
    let version = torch::version();
    if let Some(version) = &version {
        meta.versions.insert("torch".to_owned(), version.clone());
    }
    let numbers = version.as_deref().and_then(torch::major_minor);
    let name = version.map_or("this torch".to_owned(), |version| format!("torch {version}"));
    if let Some((major, minor)) = numbers
        && (major != 2 || !(TRIED.0..=TRIED.1).contains(&minor))
    {
        meta.degraded.push(format!("{name} is untested (tested: 2.{} to 2.{})", TRIED.0, TRIED.1));
    }
    if loaded_libraries("libc10_cuda.so").is_empty() {
        return;
    }
    for (library, symbol, lost) in NEEDED {
        if find_in_loaded(library, symbol).is_null() {
            meta.degraded.push(format!("{name}: {lost}"));
        }
    }
    let has_ops = NEEDED_FOR_OPS.iter().all(|symbol| !find_in_loaded("libtorch_cpu.so", symbol).is_null());
    if settings.ops.callbacks() && !has_ops {
        meta.degraded.push(format!("{name}: no ops, and no phases inferred from ops"));
    }
    if settings.ops.io() && has_ops {
        match op_io::learn::state() {
            op_io::learn::State::Known => {}
            op_io::learn::State::Failed => meta.degraded.push(format!("{name}: {}", op_io::learn::LOST)),
            op_io::learn::State::Waiting if !cpython::is_loaded() => {
                meta.degraded.push(format!(
                    "no Python is loaded, which is needed to learn torch's layout: {}",
                    op_io::learn::LOST
                ));
            }
            op_io::learn::State::Waiting => {}
        }
    }
    if meta.allocator.caching && meta.allocator.backend == "native" && requested_sizes::is_missing() {
        meta.degraded.push(format!("{name}: requested sizes are unknown"));
    }
    if !private_pools::are_known() {
        meta.degraded.push(format!("{name}: private pools are not distinguished: pool is 0"));
    }
}
