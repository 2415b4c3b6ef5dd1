//! Load, fork and the end of the process.
//!
//! Loading happens in every process that inherits `LD_PRELOAD`, most of which never see a GPU: it reads
//! the settings and opens nothing. The recorder starts with the first event that is worth a trace.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use memtrace_record::{Recorder, Session};
use memtrace_trace::Meta;
use memtrace_trace::config::{Level, Settings};
use memtrace_trace::meta::{Allocator, redact};
use memtrace_trace::rounding::{Rounding, caching_enabled};

use crate::attribution::context;
use crate::capabilities;
use crate::ffi::device;
use crate::ffi::nvml;
use crate::ffi::symbols::real_dlsym;
use crate::hooks;
use crate::runtime::log::say;
use crate::runtime::session;

#[ctor::ctor(unsafe)]
fn load() {
    hello();
    let (mut settings, mut warnings) = Settings::from_env();
    if !settings.enabled || !comes_first() {
        return;
    }
    let here = std::env::current_dir().unwrap_or_default();
    let out = here.join(&settings.out);
    settings.log_file = settings.log_file.map(|file| here.join(file));
    warnings.retain(|_| settings.log >= Level::Warn);
    context::set_phases(settings.phases.clone());
    let nvtx = settings.nvtx;
    let allocator = allocator();
    let session = Session {
        out,
        host: host(),
        rank: number(&["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"]).unwrap_or(0),
        rounding: Rounding {
            caching: allocator.caching,
            power2_divisions: power2_divisions(&allocator.conf),
        },
        caching: allocator.caching && allocator.backend == "native",
        describe: device::describe,
        conclude,
        sample: nvml::sample,
        say,
        settings,
    };
    if !session::begin(session) {
        return;
    }
    warnings.iter().for_each(|warning| say(warning));
    hooks::libc::exec::install();
    // SAFETY: the three handlers take nothing and do no more than change atomics and our own locks.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork_in_child)) };
    // Handlers run last in, first out: this one is among the first, so the program's own come before it.
    // SAFETY: the handler takes nothing and does not unwind.
    unsafe { libc::atexit(at_exit) };
    if nvtx {
        hooks::nvtx::announce();
    }
}

/// Are this library's functions those that the program calls? A child that dropped `LD_PRELOAD` and kept
/// `NVTX_INJECTION64_PATH` loads the library as well, and would have a trace of ranges with no memory.
fn comes_first() -> bool {
    // The program's own scope, with what is preloaded: RTLD_DEFAULT would look from here, where this library is.
    // SAFETY: null is the program; nothing is loaded, and what is open stays so.
    let program = unsafe { libc::dlopen(std::ptr::null(), libc::RTLD_LAZY) };
    // SAFETY: an open handle and a name that ends in 0.
    let found = real_dlsym().map(|dlsym| unsafe { dlsym(program, c"memtrace_is_traced".as_ptr()) });
    found == Some(hooks::c_api::memtrace_is_traced as *mut std::ffi::c_void)
}

extern "C" fn at_exit() {
    finish();
}

/// Ends the trace of this process: for every way out that runs code.
pub(crate) fn finish() {
    if let Some(recorder) = Recorder::active() {
        recorder.finish();
    }
}

extern "C" fn before_fork() {
    hooks::lock_for_fork();
    context::lock_for_fork();
}

extern "C" fn after_fork() {
    context::unlock_after_fork();
    hooks::unlock_after_fork();
}

extern "C" fn after_fork_in_child() {
    after_fork();
    Recorder::forget_after_fork();
    context::untell_after_fork();
}

/// Tells the launcher that the library was loaded: it cannot see it otherwise.
fn hello() {
    let Some(path) = std::env::var_os("MEMTRACE_HELLO") else { return };
    use std::io::Write;
    if let Ok(mut file) = std::fs::OpenOptions::new().append(true).open(path) {
        let _ = file.write_all(b".");
    }
}

fn host() -> String {
    let mut name = [0 as c_char; 256];
    // SAFETY: the buffer is longer than what the call may fill, so its last byte stays 0.
    unsafe { libc::gethostname(name.as_mut_ptr(), 255) };
    // SAFETY: it ends in 0, see above.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let safe: String =
        name.chars().map(|c| if c.is_ascii_alphanumeric() || "-_".contains(c) { c } else { '_' }).collect();
    // A name that begins like an option or is empty is no name for a file.
    let safe = safe.trim_start_matches('-');
    if safe.is_empty() { "host".to_owned() } else { safe.to_owned() }
}

fn number(names: &[&str]) -> Option<c_int> {
    names.iter().find_map(|name| std::env::var(name).ok()?.trim().parse().ok())
}

/// The allocator's settings, from the variables that torch reads.
fn allocator() -> Allocator {
    let conf =
        ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"].iter().find_map(|name| std::env::var(name).ok());
    let conf = conf.unwrap_or_default();
    let backend = option(&conf, "backend").unwrap_or("native").to_owned();
    let caching = caching_enabled(std::env::var("PYTORCH_NO_CUDA_MEMORY_CACHING").ok().as_deref());
    Allocator { caching, backend, conf }
}

/// The value of `name` in `a:1,name:value,b:2`.
fn option<'a>(conf: &'a str, name: &str) -> Option<&'a str> {
    conf.split(',').find_map(|part| {
        let (key, value) = part.split_once(':')?;
        (key.trim() == name).then(|| value.trim())
    })
}

/// `roundup_power2_divisions` when it is one number; 0 for none, or for the form per size.
fn power2_divisions(conf: &str) -> u64 {
    option(conf, "roundup_power2_divisions").and_then(|value| value.parse().ok()).unwrap_or(0)
}

/// What this process says of itself in the meta row.
pub(crate) fn describe(meta: &mut Meta) {
    meta.allocator = allocator();
    meta.world_size =
        number(&["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"]).unwrap_or(1);
    meta.argv = redact(std::env::args_os().map(|word| word.to_string_lossy().into_owned()));
    meta.phantom = phantom();
    if !meta.allocator.caching {
        meta.degraded.push("caching is off: blocks are the runtime's own calls".to_owned());
    }
    if meta.allocator.backend != "native" {
        let backend = &meta.allocator.backend;
        meta.degraded.push(format!("allocator backend {backend}: it reports nothing, so blocks are the runtime's own calls and reserved is what they hold"));
    }
    if let Some(session) = session::session() {
        meta.ops = session.settings.ops.name().to_owned();
        meta.modules = session.settings.modules;
        capabilities::describe(meta, &session.settings);
    }
    if meta.journal.is_empty() {
        meta.degraded.push(
            "no local file for the events: those of the last moment are gone when the process is killed"
                .to_owned(),
        );
    }
}

/// The phantom device's account of itself, once it was asked for the first time; null without one.
static ACCOUNT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// What the phantom device says of itself, when it is there.
fn phantom() -> serde_json::Value {
    let found = crate::ffi::symbols::find_in_loaded("libmemtrace_phantom.so", c"memtrace_phantom_describe");
    ACCOUNT.store(found, Ordering::Release);
    account()
}

/// The same later, when nothing may be looked up any more: another thread may hold the loader's lock.
fn account() -> serde_json::Value {
    let found = ACCOUNT.load(Ordering::Acquire);
    if found.is_null() {
        return serde_json::Value::Null;
    }
    // SAFETY: the function's type: it writes at most `length` bytes of JSON and gives their number. Its
    // library was preloaded, so it stays.
    let write: unsafe extern "C" fn(*mut c_char, usize) -> usize = unsafe { std::mem::transmute(found) };
    let mut text = vec![0u8; 16 << 10];
    // SAFETY: the buffer is as long as is said.
    let length = unsafe { write(text.as_mut_ptr().cast(), text.len()) };
    text.truncate(length);
    let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
    serde_json::from_slice(&text[..end]).unwrap_or(serde_json::Value::Null)
}

/// What the end row says of a phantom run; empty on a real device.
fn conclude() -> String {
    let about = account();
    let Some(reads) = about["invented_reads"].as_u64() else { return String::new() };
    let names = |calls: &str| -> String {
        let names = about[calls].as_object().into_iter().flatten().map(|(name, _)| name.as_str());
        names.collect::<Vec<_>>().join(";")
    };
    let bytes = about["invented_bytes"].as_u64().unwrap_or(0);
    let (guessed, refused) = (names("guessed_calls"), names("refused_calls"));
    format!("invented_reads={reads} invented_bytes={bytes} guessed={guessed} refused={refused}")
}
