//! The module `native` of the tracer: the functions of this library that the tracer calls, and constants for
//! the tracer. Its Python side is documented in `tracer/native.pyi`.

use std::ffi::CStr;

use memtrace_record::Recorder;
use memtrace_record::intern::TextId;
use memtrace_record::recorder::text_id;
use memtrace_trace::communicator::communicator_text;
use memtrace_trace::config::{Level, Stacks};
use memtrace_trace::host::HostFiles;
use memtrace_trace::rounding::MIN_BLOCK;
use memtrace_trace::{Api, Category, Claim, Verdict};

use crate::attribution::python_frames::{self, KnownCode, KnownFrame};
use crate::attribution::{
    backward_passes, block_ages, communicators, context, detail, growth, module_ranges, op_stack, ranges,
    steps,
};
use crate::ffi::cpython::version::{TRIED, is_free_threaded};
use crate::ffi::cpython::{Arguments, Gil, Method, Object, Owned, native_method};
use crate::ffi::phantom;
use crate::python::gradients::record_gradients;
use crate::python::module_calls::{self, Entered};
use crate::python::tags::{self, Tag};
use crate::python::{
    errors, frame_values, hidden, live_objects, op_io, optimizer_steps, own_threads, referrers,
    saved_tensors, sharding_calls,
};
use crate::runtime::{log, session, thread};

static METHODS: [Method; 45] = [
    native_method!("enter_module", module_calls::enter_module),
    native_method!("has_fault_at_next_step", has_fault_at_next_step),
    native_method!("leave_module", module_calls::leave_module),
    native_method!("innermost_module", innermost_module),
    native_method!("assign_path", module_calls::assign_path),
    native_method!("forget_module", module_calls::forget_module),
    native_method!("hook_vectorcall", module_calls::hook_vectorcall),
    native_method!("hook_step", optimizer_steps::hook_step),
    native_method!("hook_sharding", sharding_calls::hook_sharding),
    native_method!("set_sharded_modules", set_sharded_modules),
    native_method!("end_own_threads", own_threads::end_own_threads),
    native_method!("forget_optimizer", forget_optimizer),
    native_method!("hide", hidden::hide),
    native_method!("with_observed_ops", hidden::with_observed_ops),
    native_method!("find_objects", live_objects::find_objects),
    native_method!("text_id", text_id_of),
    native_method!("record_tag", record_tag),
    native_method!("record_gradients", record_gradients),
    native_method!("backward_count", backward_count),
    native_method!("bytes_outside_phases", bytes_outside_phases),
    native_method!("forward_begins_step", forward_begins_step),
    native_method!("is_detailed", is_detailed),
    native_method!("record_server", record_server),
    native_method!("nameable_communicators", nameable_communicators),
    native_method!("name_communicator", name_communicator),
    native_method!("call_after", module_calls::call_after),
    native_method!("record_module_memory", record_module_memory),
    native_method!("find_referrers", referrers::find_referrers),
    native_method!("learn_frame_values", frame_values::learn_frame_values),
    native_method!("frame_values", frame_values::frame_values),
    native_method!("learn_saved_tensor", saved_tensors::learn_saved_tensor),
    native_method!("saved_storages", saved_tensors::saved_storages),
    native_method!("block_step", block_step),
    native_method!("block_bytes", block_bytes),
    native_method!("record_retained", record_retained),
    native_method!("record_model_fact", record_model_fact),
    native_method!("record_script_end", record_script_end),
    native_method!("current_step", current_step),
    native_method!("is_growing", is_growing),
    native_method!("host_memory_left", host_memory_left),
    native_method!("learn_tensor", learn_tensor),
    native_method!("finish_op_layout", finish_op_layout),
    native_method!("learn_frame_layout", learn_frame_layout),
    native_method!("count_failure", count_failure),
    native_method!("log_failure", log_failure),
];

/// The kinds of a module's memory that [`record_module_memory`] can record.
const MODULE_MEMORY: [Api; 4] =
    [Api::ModuleParameters, Api::ModuleBuffers, Api::ModuleInputs, Api::ModuleOutputs];

/// Creates the module. Returns `None` if Python raised an exception.
pub(crate) fn module(gil: Gil) -> Option<Owned> {
    let module = gil.new_module(c"native")?;
    let namespace = module.get().module_namespace()?;
    for method in &METHODS {
        set(namespace, method.name(), gil.new_function(method)?)?;
    }
    for (name, value) in settings() {
        set(namespace, name, gil.integer(value)?)?;
    }
    for entered in [Entered::Inside, Entered::Outermost, Entered::Unknown] {
        set(namespace, entered.name(), gil.integer(entered as i64)?)?;
    }
    let categories = Category::ALL.iter().map(|category| (category.as_str(), category.id().into()));
    set(namespace, c"CATEGORIES", numbers(gil, categories)?)?;
    set(namespace, c"APIS", numbers(gil, MODULE_MEMORY.iter().map(|api| (api.as_str(), *api as i64)))?)?;
    let verdicts = Verdict::ALL.iter().map(|verdict| (verdict.as_str(), verdict.is_retained().into()));
    set(namespace, c"VERDICTS", numbers(gil, verdicts)?)?;
    Some(module)
}

fn set(namespace: Object<'_>, name: &CStr, value: Owned) -> Option<()> {
    namespace.set_item(name, value.get()).then_some(())
}

/// Returns a dict from texts to numbers.
fn numbers<'a>(gil: Gil, items: impl Iterator<Item = (&'a str, i64)>) -> Option<Owned> {
    let dict = gil.new_dict()?;
    for (text, number) in items {
        let text = std::ffi::CString::new(text).ok()?;
        set(dict.get(), &text, gil.integer(number)?)?;
    }
    Some(dict)
}

/// Returns the settings that the tracer reads: the names of the constants in the module `native`, and their
/// values.
fn settings() -> [(&'static CStr, i64); 7] {
    let session = session::session();
    let is = |wanted: fn(&memtrace_record::Session) -> bool| i64::from(session.is_some_and(wanted));
    [
        (c"KEEP_WRAPPERS", is(|session| session.settings.wrappers)),
        (c"HOST_TENSORS", is(|session| session.settings.host_tensors)),
        (c"MODULE_PATHS", is(|session| session.settings.modules)),
        (c"MEMORY_UNIT", session.map_or(0, memory_unit)),
        (c"FREE_THREADED", i64::from(is_free_threaded())),
        (c"RETAINED_MS", session.map_or(0, |session| session.settings.retained_ms as i64)),
        (c"RETAINED_IS_BOUNDED", is(|session| session.settings.retained_is_bounded)),
    ]
}

/// Returns the unit in bytes to which the memory of modules is rounded up, or 0 if the memory of modules is
/// not recorded.
fn memory_unit(session: &memtrace_record::Session) -> i64 {
    match (session.settings.ops.io(), session.rounding.caching) {
        (false, _) => 0,
        (true, true) => MIN_BLOCK as i64,
        (true, false) => 1,
    }
}

fn has_fault_at_next_step(_: Arguments<'_>) -> bool {
    phantom::has_fault_at(steps::current().max(0).saturating_add(1))
}

fn innermost_module(_: Arguments<'_>) -> i64 {
    module_ranges::innermost() as i64
}

fn set_sharded_modules(arguments: Arguments<'_>) {
    op_stack::set_sharded_modules([0, 1].map(|index| arguments.size(index) as TextId));
}

fn text_id_of(arguments: Arguments<'_>) -> i64 {
    text_id(arguments.text(0)).into()
}

fn record_tag(arguments: Arguments<'_>) {
    let [pointer, category, path, name, form] = [0, 1, 2, 3, 4].map(|index| arguments.size(index));
    if let Some(category) = Category::from_id(category as u64) {
        let claim = if arguments.size(5) != 0 { Claim::Weak } else { Claim::Strong };
        let [path, name, form] = [path, name, form].map(|id| id as TextId);
        tags::record(Tag { pointer, category, path, name, form, claim });
    }
}

/// Returns the number of backward functions that have run, or -1 while one runs on this thread. Python hooks
/// of a backward on the CPU may then run the tracer, before the last gradients exist.
fn backward_count(_: Arguments<'_>) -> i64 {
    if thread::runs_backward() { -1 } else { backward_passes::functions() as i64 }
}

fn bytes_outside_phases(_: Arguments<'_>) -> i64 {
    context::bytes_outside_phases() as i64
}

fn record_server(arguments: Arguments<'_>) {
    ranges::mark_without_owner(Api::Server, arguments.text(0));
}

fn nameable_communicators(_: Arguments<'_>) -> i64 {
    communicators::nameable().into()
}

fn name_communicator(arguments: Arguments<'_>) {
    if let Some(number) = communicators::name(arguments.size(0)) {
        ranges::mark_without_owner(Api::Communicator, &communicator_text(number, arguments.text(1)));
    }
}

/// Returns the step in which the live block at an address was allocated; -1 before training. Returns -2 if no
/// known block is at the address.
fn block_step(arguments: Arguments<'_>) -> i64 {
    block_ages::birth_of(arguments.size(0) as u64).map_or(-2, |birth| birth.step.into())
}

fn block_bytes(arguments: Arguments<'_>) -> i64 {
    block_ages::birth_of(arguments.size(0) as u64).map_or(0, |birth| birth.bytes as i64)
}

fn record_retained(arguments: Arguments<'_>) {
    ranges::mark_without_owner(Api::Retained, arguments.text(0));
}

fn record_model_fact(arguments: Arguments<'_>) {
    ranges::mark_without_owner(Api::ModelFact, arguments.text(0));
}

fn record_script_end(arguments: Arguments<'_>) {
    if let Some(recorder) = Recorder::active() {
        let refused = arguments.text(0);
        if !refused.is_empty() {
            recorder.record_refusal(refused);
        }
        ranges::mark_without_owner(Api::Script, "end of the script");
    }
}

fn is_growing(_: Arguments<'_>) -> bool {
    growth::is_growing()
}

fn host_memory_left(_: Arguments<'_>) -> i64 {
    HostFiles::default().left("self").unwrap_or(i64::MAX)
}

fn current_step(_: Arguments<'_>) -> i64 {
    steps::current().into()
}

fn forward_begins_step(_: Arguments<'_>) {
    steps::forward_begins();
}

fn forget_optimizer(arguments: Arguments<'_>) {
    steps::forget_optimizer(arguments.size(0));
}

fn is_detailed(_: Arguments<'_>) -> bool {
    detail::is_on()
}

fn record_module_memory(arguments: Arguments<'_>) {
    let [api, device, bytes, rounded] = [0, 1, 2, 3].map(|index| arguments.size(index));
    if let Some(api) = MODULE_MEMORY.into_iter().find(|known| *known as usize == api) {
        op_io::module_memory(api, device as i8, bytes as i64, rounded as i64);
    }
}

fn learn_tensor(arguments: Arguments<'_>) {
    let [tensor, storage, data, bytes] = [0, 1, 2, 3].map(|index| arguments.size(index));
    op_io::learn::add_tensor(op_io::learn::KnownTensor { tensor, storage, data, bytes });
}

fn finish_op_layout(_: Arguments<'_>) -> bool {
    let is_known = op_io::learn::finish();
    if !is_known {
        log::line_at(Level::Warn, op_io::learn::LOST);
    }
    is_known
}

/// Learns the layout of Python's frames. The arguments are numbers: the address of the calling code, the size
/// of a code object, and the addresses of the first caller's file name, name and line table. Then come three
/// numbers for each caller: the address of its code, the byte of its instruction, and its line.
fn learn_frame_layout(arguments: Arguments<'_>) {
    const LOST: &str = "stacks contain only ops and modules";
    let is_recorded = session::session().is_some_and(|session| session.settings.stacks == Stacks::Python);
    if is_free_threaded() {
        if !is_recorded {
            return;
        }
        let line = format!("MEMTRACE_STACKS=python: this Python is a free-threaded build; {LOST}");
        return log::line_at(Level::Warn, &line);
    }
    let numbers: Vec<usize> = (0..arguments.len()).map(|index| arguments.size(index)).collect();
    let is_known = if let [code, code_size, filename, name, lines, callers @ ..] = &numbers[..] {
        let callers = callers.chunks_exact(3);
        let callers = callers.map(|caller| KnownFrame { code: caller[0], byte: caller[1], line: caller[2] });
        let known = KnownCode {
            code: *code,
            code_size: *code_size,
            filename: *filename,
            name: *name,
            lines: *lines,
            callers: callers.collect(),
        };
        // SAFETY: `known_frames.py` passes the ids of live objects, and its frames run during the call.
        unsafe { python_frames::learn(&known, is_recorded) }
    } else {
        false
    };
    if !is_known && is_recorded {
        let (oldest, newest) = TRIED;
        log::line_at(
            Level::Warn,
            &format!(
                "MEMTRACE_STACKS=python: this interpreter's frames could not be read (CPython 3.{oldest} to 3.{newest} is known); {LOST}"
            ),
        );
    }
}

fn count_failure(arguments: Arguments<'_>) -> bool {
    errors::count(arguments.text(0), arguments.text(1))
}

fn log_failure(arguments: Arguments<'_>) {
    errors::log(arguments.text(0), arguments.text(1), arguments.text(2));
}
