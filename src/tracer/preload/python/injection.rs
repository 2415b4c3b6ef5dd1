//! Injection: runs the tracer in the program's Python.
//!
//! The user needs no file, no environment variable and no import. A pending call, which Python runs in its
//! main thread between two instructions, loads the modules under `tracer/`, which are compiled into this
//! library. `tracer/loader.py` runs them in separate namespaces. If another thread uses the GPU, the main
//! thread may be waiting for that thread (`thread.join()`) and run no pending call. In that case, a thread of
//! ours loads the modules.

use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use memtrace_trace::config::{Level, Stacks};

use crate::attribution::autograd_seq;
use crate::ffi::cpython::collector;
use crate::ffi::cpython::{Arguments, Functions, Gil, Method, Object, Owned, native_method};
use crate::guard::shielded;
use crate::python::hidden::hidden;
use crate::python::{callbacks, errors, native, own_threads};
use crate::runtime::{log, session, state_version};

/// A file of the tracer: the name of its module, the file name that tracebacks show, and its source text.
struct Source {
    name: &'static CStr,
    file: &'static CStr,
    text: &'static CStr,
}

macro_rules! source {
    ($name:literal) => {
        Source {
            name: crate::ffi::symbols::c_name(concat!($name, "\0")),
            file: crate::ffi::symbols::c_name(concat!("<memtrace ", $name, ">\0")),
            text: crate::ffi::symbols::c_name(concat!(include_str!(concat!("tracer/", $name, ".py")), "\0")),
        }
    };
}

const LOADER: Source = source!("loader");
/// The modules of the tracer, except `native`.
static SOURCES: [Source; 41] = [
    source!("caches"),
    source!("class_table"),
    source!("communicators"),
    source!("deepspeed"),
    source!("failures"),
    source!("forwards"),
    source!("frames"),
    source!("fsdp1"),
    source!("fsdp2"),
    source!("graphs"),
    source!("held"),
    source!("holder_groups"),
    source!("holder_search"),
    source!("hooks"),
    source!("install"),
    source!("known_frames"),
    source!("known_objects"),
    source!("live_objects"),
    source!("main_code"),
    source!("model_discovery"),
    source!("model_facts"),
    source!("model_storages"),
    source!("module_memory"),
    source!("overridden_calls"),
    source!("paths"),
    source!("reference_paths"),
    source!("retained"),
    source!("script_end"),
    source!("search_targets"),
    source!("sharding"),
    source!("shared"),
    source!("start"),
    source!("steps"),
    source!("storages"),
    source!("subclasses"),
    source!("tags"),
    source!("texts"),
    source!("torch_api"),
    source!("unused_optimizers"),
    source!("verdicts"),
    source!("wrappers"),
];

/// The stage of the injection.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Stage {
    /// The injection is not scheduled yet.
    Waiting = 0,
    /// A pending call waits in Python's queue, or a thread of ours waits for the GIL.
    Scheduled = 1,
    /// The tracer is being loaded and started.
    Running = 2,
    /// The tracer is installed or could not be started, or the process has no Python.
    Over = 3,
}

static STAGE: AtomicU8 = AtomicU8::new(Stage::Waiting as u8);

/// Returns true if the tracer is not scheduled yet. Hooks check this before they call [`schedule`].
#[inline]
pub(crate) fn is_wanted() -> bool {
    STAGE.load(Ordering::Relaxed) == Stage::Waiting as u8
}

/// Schedules the start of the tracer in the program's Python. Hooks call this on any thread, with or without
/// the GIL, because a pending call can be added without the GIL and while Python code runs.
pub(crate) fn schedule() {
    let wanted = |session: &memtrace_record::Session| {
        let settings = &session.settings;
        settings.modules || settings.ops.io() || settings.stacks == Stacks::Python
    };
    if !is_wanted() || !session::session().is_some_and(wanted) {
        return;
    }
    let Some(functions) = Functions::get() else { return STAGE.store(Stage::Over as u8, Ordering::Relaxed) };
    let (waiting, scheduled) = (Stage::Waiting as u8, Stage::Scheduled as u8);
    if STAGE.compare_exchange(waiting, scheduled, Ordering::AcqRel, Ordering::Relaxed).is_err() {
        return;
    }
    // SAFETY: `inject` is made for a pending call.
    let is_called = unsafe { functions.call_soon(inject) };
    let is_called = !own_threads::is_main_thread() && own_threads::call_on_own_thread(inject) || is_called;
    if !is_called {
        // The queue is full, so the next hook that runs tries again.
        STAGE.store(waiting, Ordering::Release);
    }
}

/// Returns a scheduled injection to the stage [`Stage::Waiting`] in the child of a fork, where no thread of
/// ours waits for the GIL.
pub(crate) fn reset_in_child() {
    let (waiting, scheduled) = (Stage::Waiting as u8, Stage::Scheduled as u8);
    let _ = STAGE.compare_exchange(scheduled, waiting, Ordering::Relaxed, Ordering::Relaxed);
}

/// Returns the `key=value` word of the end row that reports that the tracer was scheduled but never
/// installed. Returns an empty text otherwise.
pub(crate) fn end_words() -> String {
    let stage = STAGE.load(Ordering::Relaxed);
    let is_missing = stage == Stage::Scheduled as u8 || stage == Stage::Running as u8;
    if is_missing { format!("{}=1", memtrace_trace::end_row::WITHOUT_MODULES) } else { String::new() }
}

/// Runs in Python's main thread or in a thread of ours, with the GIL. Always returns 0, because -1 would
/// raise an exception in the program.
unsafe extern "C" fn inject(_: *mut c_void) -> c_int {
    let is_main = own_threads::is_main_thread();
    if is_main {
        shielded(autograd_seq::this_is_main);
    }
    let (scheduled, running) = (Stage::Scheduled as u8, Stage::Running as u8);
    if STAGE.compare_exchange(scheduled, running, Ordering::AcqRel, Ordering::Relaxed).is_err() {
        return 0;
    }
    // SAFETY: a pending call runs with the GIL.
    let gil = unsafe { Gil::held() };
    let outcome = gil.and_then(|gil| {
        shielded(|| {
            // The count is learned in a hidden call of its own, because a hidden call can suspend the
            // collector only if the count was known when the call began.
            hidden(gil, || learn_collector(gil));
            hidden(gil, || run(gil))
        })
    });
    let stage = match outcome {
        Some(InjectionOutcome::Installed) => {
            if session::session().is_some_and(|session| session.settings.modules) {
                autograd_seq::modules_are_known();
            }
            if !is_main {
                autograd_seq::main_is_unknown();
            }
            state_version::advance();
            Stage::Over
        }
        Some(InjectionOutcome::TooEarly) => Stage::Waiting,
        Some(InjectionOutcome::Failed) | None => {
            report_failure();
            Stage::Over
        }
    };
    STAGE.store(stage as u8, Ordering::Release);
    0
}

fn report_failure() {
    static IS_REPORTED: AtomicBool = AtomicBool::new(false);
    if !IS_REPORTED.swap(true, Ordering::Relaxed) {
        log::line_at(
            Level::Warn,
            "no module paths and no tags: torch's hooks could not be installed (MEMTRACE_LOG=debug shows why); the trace goes on",
        );
    }
}

enum InjectionOutcome {
    Installed,
    /// torch is still being imported.
    TooEarly,
    Failed,
}

fn run(gil: Gil) -> InjectionOutcome {
    match start(gil) {
        Some(callbacks) if callbacks.get().is_none() => InjectionOutcome::TooEarly,
        Some(callbacks) => {
            callbacks::install(callbacks.get());
            InjectionOutcome::Installed
        }
        None => {
            errors::take(gil, "start");
            InjectionOutcome::Failed
        }
    }
}

/// Finds the garbage collector's count of new containers, which a hidden call needs to suspend the collector.
/// If this fails, the tracer starts nevertheless.
fn learn_collector(gil: Gil) {
    static LEARN: Method = native_method!("learn_collector", collector::learn_collector);
    let learn = || {
        let globals = gil.new_dict()?;
        set(globals.get(), c"__builtins__", &gil.builtins()?)?;
        set(globals.get(), c"learn", &gil.new_function(&LEARN)?)?;
        let text = c"gc = __import__('gc'); learn(*gc.get_count(), *gc.get_threshold())";
        gil.evaluate(gil.compile(text, c"<memtrace>")?.get(), globals.get())
    };
    if learn().is_none() {
        errors::take(gil, "collector");
    }
}

/// Loads the tracer and calls its `start`, which returns the functions that the library calls, or Python's
/// `None` if it is too early. Returns Rust's `None` if Python raised an exception.
fn start(gil: Gil) -> Option<Owned> {
    static RUN_MODULE: Method = native_method!("run_module", run_module);
    let globals = gil.new_dict()?;
    let globals = globals.get();
    let builtins = gil.builtins()?;
    set(globals, c"__builtins__", &builtins)?;
    set(globals, c"native", &native::module(gil)?)?;
    set(globals, c"run_module", &gil.new_function(&RUN_MODULE)?)?;
    for (text, file) in [
        (LOADER.text, LOADER.file),
        (c"callbacks = load(native, run_module, __builtins__)('start').start()", c"<memtrace>"),
    ] {
        let code = gil.compile(text, file)?;
        gil.evaluate(code.get(), globals)?;
    }
    globals.item(c"callbacks")
}

fn set(dict: Object<'_>, key: &CStr, value: &Owned) -> Option<()> {
    dict.set_item(key, value.get()).then_some(())
}

/// `run_module(name, namespace)`: runs a module of the tracer. Python's own `compile` and `exec` would raise
/// audit events in the program.
fn run_module(arguments: Arguments<'_>) -> Option<Owned> {
    let name = arguments.text(0);
    let source = SOURCES.iter().find(|source| source.name.to_bytes() == name.as_bytes())?;
    let code = arguments.gil.compile(source.text, source.file)?;
    arguments.gil.evaluate(code.get(), arguments.get(1)?)
}
