//! Python, from inside: module paths, and what tensors are for.
//!
//! No file, no variable and no import by the user: a pending call, which Python runs in its main thread
//! between two instructions, compiles `tracer.py` and runs it in a namespace of its own. Its hooks call the
//! functions below, which are C functions to Python. All of Python's API that is used is looked up by name
//! and part of its stable ABI, so one library serves 3.9 to 3.14; a program without Python has none of it.
//! What [`crate::python::module_calls`] has beyond that it can do without.

use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, Ordering};

use memtrace_record::Recorder;
use memtrace_record::recorder::text_id;
use memtrace_trace::config::{Level, Stacks};
use memtrace_trace::rounding::MIN_BLOCK;
use memtrace_trace::{Api, Event, Kind};

use crate::attribution::autograd_seq;
use crate::attribution::backward_passes;
use crate::attribution::module_ranges;
use crate::attribution::op_stack;
use crate::attribution::python_frames::{self, Known, Told};
use crate::ffi::symbols;
use crate::python::gradients::gradients;
use crate::python::module_calls;
use crate::python::op_io;
use crate::runtime::guard::shielded;
use crate::runtime::log;
use crate::runtime::session;
use crate::runtime::state_version;

const SOURCE: &str = concat!(include_str!("tracer.py"), "\0");

/// A `PyObject *`.
pub(crate) type Object = *mut c_void;
/// `PyCFunctionFast`: self, arguments, their number.
type Function = unsafe extern "C" fn(Object, *const Object, isize) -> Object;

/// `PyMethodDef`.
#[repr(C)]
struct Method {
    name: *const c_char,
    function: Function,
    flags: c_int,
    doc: *const c_char,
}

// SAFETY: the pointers are of literals, which never change.
unsafe impl Sync for Method {}

/// `METH_FASTCALL`.
const FASTCALL: c_int = 0x80;

/// What `tracer.py` calls.
static METHODS: [Method; 14] = [
    method(c"enter", module_calls::enter),
    method(c"leave", module_calls::leave),
    method(c"adopt", module_calls::adopt),
    method(c"forget", module_calls::forget),
    method(c"hear", module_calls::hear),
    method(c"number", number),
    method(c"tag", tag),
    method(c"gradients", gradients),
    method(c"innermost", innermost),
    method(c"backwards", backwards),
    method(c"learn", learn),
    method(c"learned", learned),
    method(c"measured", measured),
    method(c"learn_frames", learn_frames),
];

const fn method(name: &'static CStr, function: Function) -> Method {
    Method { name: name.as_ptr(), function, flags: FASTCALL, doc: std::ptr::null() }
}

/// What `tracer.py` gave us to call: when a backward is over, when memory ran out.
static AFTER_BACKWARD: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
static AFTER_OUT_OF_MEMORY: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
/// And when the program registers something.
static TRACK: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

/// Looks functions of Python up and calls them: `python!(name(args) as type)`.
macro_rules! python {
    ($name:ident($($arg:expr),*) as $type:ty) => {{
        let name = std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes());
        let found = $crate::python::injection::symbol(name.unwrap_or_default());
        if found.is_null() {
            return Default::default();
        }
        // SAFETY: the function's type in Python's headers; the GIL is held (see `pending`, and the
        // functions that Python calls).
        unsafe { std::mem::transmute::<*mut std::ffi::c_void, $type>(found)($($arg),*) }
    }};
}
pub(crate) use python;

/// A symbol of the interpreter, which is in the global scope: the program itself, or its libpython.
pub(crate) use crate::ffi::symbols::find_global as symbol;

/// A function of Python's API.
///
/// # Safety
/// `F` is its type.
pub(crate) unsafe fn function_named<F: Copy>(name: &CStr) -> Option<F> {
    // SAFETY: by the contract.
    unsafe { symbols::function(symbol(name)) }
}

/// 0: to be tried; 1: a pending call waits; 2: done or given up.
static STATE: AtomicU8 = AtomicU8::new(0);
/// Was the reason for giving up told?
static TOLD: AtomicBool = AtomicBool::new(false);

/// Has Python run our hooks as soon as it can. Called from hooks, on any thread, with or without the GIL:
/// adding a pending call needs neither the GIL nor an interpreter that is at rest.
pub(crate) fn schedule() {
    let wanted = |session: &memtrace_record::Session| {
        let settings = &session.settings;
        settings.modules || settings.ops.io() || settings.stacks == Stacks::Python
    };
    if STATE.load(Ordering::Relaxed) != 0 || !session::session().is_some_and(wanted) {
        return;
    }
    if symbol_of_pending().is_null() {
        STATE.store(2, Ordering::Relaxed);
        return;
    }
    if STATE.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok() && !call_soon(pending) {
        // The queue is full: the next call of ours tries.
        STATE.store(0, Ordering::Release);
    }
}

/// What `Py_AddPendingCall` takes.
type Pending = unsafe extern "C" fn(*mut c_void) -> c_int;

/// Has Python's main thread call `function` between two of its instructions.
fn call_soon(function: Pending) -> bool {
    let (add, is_initialized) = (symbol_of_pending(), symbol_of_initialized());
    if add.is_null() || is_initialized.is_null() {
        return false;
    }
    // SAFETY: the type in Python's pylifecycle.h; it may be called at any time. A program that embeds Python
    // may not have begun with it, and the end of one has taken the queue's lock away.
    let is_initialized: unsafe extern "C" fn() -> c_int = unsafe { std::mem::transmute(is_initialized) };
    // SAFETY: as above.
    if unsafe { is_initialized() } == 0 {
        return false;
    }
    // SAFETY: the type in Python's ceval.h.
    let add: unsafe extern "C" fn(Pending, *mut c_void) -> c_int = unsafe { std::mem::transmute(add) };
    // SAFETY: any thread may add one, with or without the GIL.
    unsafe { add(function, null_mut()) == 0 }
}

/// Memory ran out: a model that dies while it is loaded shows its parameters. Called before `recorder` is told,
/// whose lines wait for that.
pub(crate) fn out_of_memory(recorder: &Recorder) {
    if !AFTER_OUT_OF_MEMORY.load(Ordering::Relaxed).is_null() {
        recorder.tags_follow();
        if !call_soon(after_out_of_memory) {
            recorder.tags_came();
        }
    }
}

unsafe extern "C" fn after_backward(_: *mut c_void) -> c_int {
    shielded(|| call(&AFTER_BACKWARD, null_mut())).unwrap_or(0)
}

unsafe extern "C" fn after_out_of_memory(_: *mut c_void) -> c_int {
    shielded(|| {
        let result = call(&AFTER_OUT_OF_MEMORY, null_mut());
        if let Some(recorder) = Recorder::active() {
            recorder.tags_came();
        }
        result
    })
    .unwrap_or(0)
}

/// `memtrace.track_external` of `python/memtrace.py`, which calls it with the GIL: `arguments` is a tuple whose one
/// item is the tuple of what is registered. It raises nothing of its own.
#[unsafe(no_mangle)]
unsafe extern "C" fn memtrace_python_track(arguments: *mut c_void) {
    shielded(|| call(&TRACK, arguments));
}

/// Calls what `tracer.py` gave us. It lets nothing out but what is the program's own (a KeyboardInterrupt
/// that came meanwhile), and then -1 raises that.
fn call(function: &AtomicPtr<c_void>, arguments: Object) -> c_int {
    type Call = unsafe extern "C" fn(Object, Object) -> Object;
    let function = function.load(Ordering::Acquire);
    if function.is_null() {
        return 0;
    }
    let result = op_stack::without_rows(|| python!(PyObject_CallObject(function, arguments) as Call));
    release(result);
    if result.is_null() { -1 } else { 0 }
}

/// Is there something left to schedule?
#[inline]
pub(crate) fn is_wanted() -> bool {
    STATE.load(Ordering::Relaxed) == 0
}

/// Runs in Python's main thread with the GIL. It returns 0 whatever happens: anything else would raise
/// in the program.
unsafe extern "C" fn pending(_: *mut c_void) -> c_int {
    let outcome = shielded(|| op_stack::without_rows(run));
    match outcome {
        Some(Outcome::Installed) => {
            if session::session().is_some_and(|session| session.settings.modules) {
                autograd_seq::modules_are_known();
            }
            autograd_seq::this_is_main();
            state_version::advance();
            STATE.store(2, Ordering::Release);
        }
        Some(Outcome::TooEarly) => STATE.store(0, Ordering::Release),
        Some(Outcome::Failed) | None => {
            STATE.store(2, Ordering::Release);
            if !TOLD.swap(true, Ordering::Relaxed) {
                log::line_at(
                    Level::Warn,
                    "no module paths and no tags: torch's hooks could not be installed (MEMTRACE_LOG=debug shows why); the trace goes on",
                );
            }
        }
    }
    0
}

#[derive(Default)]
enum Outcome {
    Installed,
    /// torch is still being imported.
    TooEarly,
    #[default]
    Failed,
}

fn run() -> Outcome {
    type Make = unsafe extern "C" fn() -> Object;
    type SetItem = unsafe extern "C" fn(Object, *const c_char, Object) -> c_int;
    type Compile = unsafe extern "C" fn(*const c_char, *const c_char, c_int) -> Object;
    type Eval = unsafe extern "C" fn(Object, Object, Object) -> Object;
    type NewFunction = unsafe extern "C" fn(*const Method, Object, Object) -> Object;
    const FILE_INPUT: c_int = 257;
    let globals = python!(PyDict_New() as Make);
    let natives = python!(PyDict_New() as Make);
    let builtins = python!(PyEval_GetBuiltins() as Make);
    if globals.is_null() || natives.is_null() || builtins.is_null() {
        return Outcome::Failed;
    }
    python!(PyDict_SetItemString(globals, c"__builtins__".as_ptr(), builtins) as SetItem);
    for method in &METHODS {
        let function = python!(PyCFunction_NewEx(method, null_mut(), null_mut()) as NewFunction);
        python!(PyDict_SetItemString(natives, method.name, function) as SetItem);
        release(function);
    }
    python!(PyDict_SetItemString(globals, c"native".as_ptr(), natives) as SetItem);
    let asked = session::session().map(|session| (&session.settings, session.rounding.caching));
    let numbers = [
        (c"wrappers", asked.is_some_and(|(settings, _)| settings.wrappers).into()),
        (c"modules", asked.is_some_and(|(settings, _)| settings.modules).into()),
        (c"stacks", asked.is_some_and(|(settings, _)| settings.stacks == Stacks::Python).into()),
        // What the allocator rounds up to, when the memory of modules is asked for.
        (c"unit", asked.map_or(0, |(settings, caching)| io_unit(settings.ops.io(), caching))),
    ];
    for (name, number) in numbers {
        let number = integer(number);
        python!(PyDict_SetItemString(globals, name.as_ptr(), number) as SetItem);
        release(number);
    }
    release(natives);
    let mut outcome = Outcome::Failed;
    let call = c"installed = start(native, bool(wrappers), bool(modules), unit, bool(stacks))";
    for (source, name) in [(SOURCE.as_ptr().cast(), c"<memtrace>"), (call.as_ptr(), c"<memtrace start>")] {
        let code = python!(Py_CompileString(source, name.as_ptr(), FILE_INPUT) as Compile);
        let result = if code.is_null() {
            null_mut()
        } else {
            python!(PyEval_EvalCode(code, globals, globals) as Eval)
        };
        release(code);
        if result.is_null() {
            forget_error();
            release(globals);
            return Outcome::Failed;
        }
        release(result);
    }
    type GetItem = unsafe extern "C" fn(Object, *const c_char) -> Object;
    type GetAt = unsafe extern "C" fn(Object, isize) -> Object;
    type Size = unsafe extern "C" fn(Object) -> isize;
    let installed = python!(PyDict_GetItemString(globals, c"installed".as_ptr()) as GetItem);
    if !installed.is_null() {
        let functions = python!(PyTuple_Size(installed) as Size);
        outcome = if functions == 0 { Outcome::TooEarly } else { Outcome::Installed };
        if functions == 3 {
            for (index, place) in [&AFTER_BACKWARD, &AFTER_OUT_OF_MEMORY, &TRACK].into_iter().enumerate() {
                let function = python!(PyTuple_GetItem(installed, index as isize) as GetAt);
                // Kept for as long as the process lives.
                python!(Py_IncRef(function) as unsafe extern "C" fn(Object));
                place.store(function, Ordering::Release);
            }
            backward_passes::set_schedule(|| call_soon(after_backward));
        }
    }
    release(globals);
    outcome
}

/// The multiple that the memory of modules is rounded up to; 0 when nobody asks for it.
fn io_unit(wanted: bool, caching: bool) -> i64 {
    match (wanted, caching) {
        (false, _) => 0,
        (true, true) => MIN_BLOCK as i64,
        (true, false) => 1,
    }
}

/// Is there an interpreter in this process?
pub(crate) fn is_there() -> bool {
    !symbol_of_pending().is_null()
}

/// Drops the error that our code raised, shown first when the log is at debug.
fn forget_error() {
    let debug = session::session().is_some_and(|session| session.settings.log >= Level::Debug);
    if debug {
        python!(PyErr_Print() as unsafe extern "C" fn());
    }
    python!(PyErr_Clear() as unsafe extern "C" fn());
}

pub(crate) fn release(object: Object) {
    let found = symbol_of_release();
    if object.is_null() || found.is_null() {
        return;
    }
    // SAFETY: the type of Py_DecRef; the GIL is held.
    unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(Object)>(found)(object) }
}

/// A number for Python. Null, which raises, only when there is no memory.
pub(crate) fn integer(value: i64) -> Object {
    let found = symbol_of_long();
    if found.is_null() {
        return null_mut();
    }
    // SAFETY: the type of PyLong_FromLong; the GIL is held.
    unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_long) -> Object>(found)(value) }
}

/// The functions that every call of a hook needs are looked up once.
macro_rules! cached {
    ($function:ident, $name:literal) => {
        fn $function() -> *mut std::ffi::c_void {
            static FOUND: std::sync::atomic::AtomicPtr<std::ffi::c_void> =
                std::sync::atomic::AtomicPtr::new(std::ptr::null_mut());
            let mut found = FOUND.load(std::sync::atomic::Ordering::Relaxed);
            if found.is_null() {
                found = $crate::python::injection::symbol($name);
                FOUND.store(found, std::sync::atomic::Ordering::Relaxed);
            }
            found
        }
    };
}
pub(crate) use cached;
cached!(symbol_of_pending, c"Py_AddPendingCall");
cached!(symbol_of_initialized, c"Py_IsInitialized");
cached!(symbol_of_release, c"Py_DecRef");
cached!(symbol_of_long, c"PyLong_FromLong");
cached!(symbol_of_size, c"PyLong_AsSize_t");
cached!(symbol_of_text, c"PyUnicode_AsUTF8AndSize");

/// The `index`th argument as a number; 0 for one that is none.
///
/// # Safety
/// As [`module_calls::enter`].
pub(crate) unsafe fn size(args: *const Object, count: isize, index: isize) -> usize {
    let found = symbol_of_size();
    if index >= count || found.is_null() {
        return 0;
    }
    // SAFETY: the argument is there; the type of PyLong_AsSize_t; the GIL is held.
    unsafe {
        let argument = *args.offset(index);
        std::mem::transmute::<*mut c_void, unsafe extern "C" fn(Object) -> usize>(found)(argument)
    }
}

/// The `index`th argument as a text; empty for one that is none.
///
/// # Safety
/// As [`module_calls::enter`]; the text lives as long as the argument.
pub(crate) unsafe fn text<'a>(args: *const Object, count: isize, index: isize) -> &'a str {
    let found = symbol_of_text();
    if index >= count || found.is_null() {
        return "";
    }
    type AsText = unsafe extern "C" fn(Object, *mut isize) -> *const u8;
    let mut length = 0;
    // SAFETY: the argument is there; the type of PyUnicode_AsUTF8AndSize; the GIL is held. Python keeps
    // the UTF-8 of a string with it.
    unsafe {
        let bytes = std::mem::transmute::<*mut c_void, AsText>(found)(*args.offset(index), &raw mut length);
        if bytes.is_null() {
            return "";
        }
        std::str::from_utf8(std::slice::from_raw_parts(bytes, length as usize)).unwrap_or("")
    }
}

/// The address of the `index`th argument, which is its `id`; 0 for none.
///
/// # Safety
/// As [`module_calls::enter`].
pub(crate) unsafe fn identity(args: *const Object, count: isize, index: isize) -> usize {
    // SAFETY: the argument is there.
    if index < count { unsafe { *args.offset(index) as usize } } else { 0 }
}

/// `backwards() -> int`: how many backward functions ran.
unsafe extern "C" fn backwards(_: Object, _: *const Object, _: isize) -> Object {
    integer(backward_passes::functions() as i64)
}

/// `learn_frames(code, size, filename, name, lines, [code, byte, line]...)`: frames that are known; see
/// [`crate::attribution::python_frames`]. Nothing when they can't be told.
unsafe extern "C" fn learn_frames(_: Object, args: *const Object, count: isize) -> Object {
    // SAFETY: as in `module_calls::enter`.
    let numbers: Vec<usize> = (0..count).map(|index| unsafe { size(args, count, index) }).collect();
    let learned = shielded(|| {
        let [code, code_size, filename, name, lines, callers @ ..] = &numbers[..] else { return false };
        let callers = callers.chunks_exact(3);
        let callers = callers.map(|caller| Known { code: caller[0], byte: caller[1], line: caller[2] });
        python_frames::learn(&Told {
            code: *code,
            code_size: *code_size,
            filename: *filename,
            name: *name,
            lines: *lines,
            callers: callers.collect(),
        })
    });
    if learned != Some(true) {
        log::line_at(
            Level::Warn,
            "MEMTRACE_STACKS=python: this interpreter's frames could not be read (CPython 3.9 to 3.14 is known); stacks hold ops and modules alone",
        );
    }
    integer(0)
}

/// `number(path) -> int`.
unsafe extern "C" fn number(_: Object, args: *const Object, count: isize) -> Object {
    // SAFETY: as in `module_calls::enter`.
    let path = unsafe { text(args, count, 0) };
    integer(i64::from(shielded(|| text_id(path)).unwrap_or(0)))
}

/// `innermost() -> key`: of the module that is open on this thread, 0 for none.
unsafe extern "C" fn innermost(_: Object, _: *const Object, _: isize) -> Object {
    integer(shielded(module_ranges::innermost).unwrap_or(0) as i64)
}

/// `learn(tensor, storage, data, bytes)`: where a tensor is, for io records.
unsafe extern "C" fn learn(_: Object, args: *const Object, count: isize) -> Object {
    // SAFETY: as in `module_calls::enter`.
    let at = |index| unsafe { size(args, count, index) };
    let known = op_io::learn::Known { tensor: at(0), storage: at(1), data: at(2), bytes: at(3) };
    shielded(|| op_io::learn::tensor(known));
    integer(0)
}

/// `learned() -> bool`: the ops that io records are learned from have run.
unsafe extern "C" fn learned(_: Object, _: *const Object, _: isize) -> Object {
    let learned = shielded(op_io::learn::finish).unwrap_or(false);
    if !learned {
        log::line_at(Level::Warn, op_io::learn::LOST);
    }
    integer(i64::from(learned))
}

/// `measured(kind, device, bytes, rounded)`: the memory of the module that is open. `kind` is 0 for its
/// parameters, 1 for its buffers, 2 for what its call was given and 3 for what it returned.
unsafe extern "C" fn measured(_: Object, args: *const Object, count: isize) -> Object {
    // SAFETY: as in `module_calls::enter`.
    let at = |index| unsafe { size(args, count, index) };
    let (kind, device, bytes, rounded) = (at(0), at(1), at(2), at(3));
    shielded(|| {
        let api = match kind {
            0 => Api::ModuleParameters,
            1 => Api::ModuleBuffers,
            2 => Api::ModuleInputs,
            _ => Api::ModuleOutputs,
        };
        op_io::module_memory(api, device as i8, bytes as i64, rounded as u64);
    });
    integer(0)
}

/// `tag(pointer, category, path, name)`: what the block at `pointer` is for; texts by their numbers.
unsafe extern "C" fn tag(_: Object, args: *const Object, count: isize) -> Object {
    // SAFETY: as in `module_calls::enter`.
    let (addr, category) = unsafe { (size(args, count, 0), size(args, count, 1)) };
    // SAFETY: as in `module_calls::enter`.
    let (path, name) = unsafe { (size(args, count, 2), size(args, count, 3)) };
    shielded(|| tell(addr, category, path, name));
    integer(0)
}

/// As [`tag`].
pub(crate) fn tell(addr: usize, category: usize, path: usize, name: usize) {
    // What is not in the trace has no owner to tell of.
    let Some(recorder) = Recorder::active() else { return };
    // The block's context and step are those of its allocation.
    recorder.record(|clock_ns| Event {
        clock_ns,
        kind: Kind::Tag as u8,
        api: Api::Python as u8,
        addr: addr as u64,
        size: category as i64,
        reserved: name as u64,
        extra: path as i64,
        ..Event::default()
    });
}
