//! Load, fork and exit of the process.
//!
//! The library loads into every process that inherits `LD_PRELOAD`, and most of these never use a GPU. So
//! loading only reads the settings and opens nothing. The first event worth recording starts the recorder.

use std::ffi::c_void;

use memtrace_record::{Recorder, Session, own_page};
use memtrace_trace::config::{Level, Settings};

use crate::attribution::{communicators, detail, phases, ranges};
use crate::ffi::cpython::collector;
use crate::ffi::{device_sample, symbols};
use crate::python::{errors, injection, own_threads};
use crate::runtime::{fork, launcher, log, session};
use crate::{hooks, process_info};

#[ctor::ctor(unsafe)]
fn load() {
    if is_privileged() {
        return;
    }
    launcher::report_load();
    // These lookups must happen at load, because later they may be impossible: in the child of a fork, in a
    // signal handler, or while another thread holds a lock of the loader.
    hooks::libc::exit::install();
    let (mut settings, mut warnings) = Settings::from_env();
    if !settings.enabled || !is_preloaded() {
        return;
    }
    let folder = std::env::current_dir().unwrap_or_default();
    let out = folder.join(&settings.out);
    settings.log_file = settings.log_file.map(|file| folder.join(file));
    warnings.retain(|_| settings.log >= Level::Warn);
    phases::set_more_words(settings.phases.clone());
    detail::set_schedule(&settings.detail);
    memtrace_record::intern::set_buffer(settings.buffer_bytes);
    let nvtx = settings.nvtx;
    let allocator = process_info::allocator();
    let session = Session {
        out,
        host: process_info::host(),
        rank: process_info::rank(),
        rounding: allocator.rounding(),
        caching: allocator.caching && allocator.backend == "native",
        describe: process_info::describe,
        conclude: process_info::conclude,
        sample: device_sample::sample,
        start_anew,
        say: log::line,
        fail: launcher::report_failure,
        settings,
    };
    if !session::begin(session) {
        return;
    }
    own_page::claim();
    warnings.iter().for_each(|warning| log::line(warning));
    hooks::libc::exec::install();
    // SAFETY: the three handlers take no arguments, and change only atomics and memtrace's own locks.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork_in_child)) };
    // Exit handlers run in the reverse order of their registration. Ours is among the first, so the program's
    // handlers run before it.
    // SAFETY: the handler takes no arguments and does not unwind.
    unsafe { libc::atexit(at_exit) };
    if nvtx {
        hooks::nvtx::announce();
    }
}

/// Returns true if the program's calls reach the hooks of this library. A child process without `LD_PRELOAD`
/// but with `NVTX_INJECTION64_PATH` loads the library, too. Its calls of CUDA do not reach the hooks, so its
/// trace would have ranges but no memory.
fn is_preloaded() -> bool {
    symbols::find_in_program(c"memtrace_is_traced") == hooks::c_api::memtrace_is_traced as *mut c_void
}

extern "C" fn at_exit() {
    session::finish();
}

extern "C" fn before_fork() {
    fork::lock_all();
}

extern "C" fn after_fork() {
    // SAFETY: `pthread_atfork` registered this function together with `before_fork`, which ran on this
    // thread.
    unsafe { fork::unlock_all() };
}

extern "C" fn after_fork_in_child() {
    // SAFETY: `before_fork` ran on the thread that forked, and this thread is the copy of that thread.
    unsafe { fork::unlock_all() };
    Recorder::forget_after_fork();
    start_anew();
}

/// Resets the state in the child of a fork, whose memory is a copy of its parent's memory.
fn start_anew() {
    Recorder::start_anew();
    ranges::reset_in_child();
    communicators::reset_in_child();
    errors::reset_in_child();
    collector::reset_in_child();
    injection::reset_in_child();
    own_threads::reset_in_child();
}

/// Returns true if the program runs with more privileges than the user who started it (setuid, setgid,
/// capabilities). That user controls the environment variables, which must not name files that a privileged
/// program writes.
fn is_privileged() -> bool {
    // SAFETY: the function only reads a value that the kernel passed to the program.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}
