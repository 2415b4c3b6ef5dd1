//! The start and the end of each op of PyTorch.
//!
//! PyTorch's dispatcher passes each op through `c10::Dispatcher::runRecordFunction` when somebody listens to
//! ops. So there is a callback, which makes PyTorch pass the inputs and keep the outputs, and the function is
//! interposed here: it has the op's record, schema and inputs as arguments. Only the place of the outputs in a
//! record is learned, from that of the inputs.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

use crate::core::capture;
use crate::core::running_ops::{self, RunningOp};
use crate::core::torch_blocks;
use crate::ops::evaluate::{self, Started};
use crate::ops::torch::{self, Callback, Tag};
use crate::ops::values::Value;

/// `static void c10::Dispatcher::runRecordFunction(at::RecordFunction&, schema_ref_t, DispatchKey,
/// DispatchKeySet, ArrayRef<const IValue>)`, in ATen/core/dispatch/Dispatcher.h of PyTorch 2.6 to 2.13.
type Run = unsafe extern "C-unwind" fn(*mut usize, usize, u64, u64, *const Value, usize);

const NAME: &CStr = c"_ZN3c1010Dispatcher17runRecordFunctionERN2at14RecordFunctionESt17reference_wrapperIKNS_14FunctionSchemaEENS_11DispatchKeyENS_14DispatchKeySetENS_8ArrayRefIKNS_6IValueEEE";

static REAL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Set when the callback is there.
static IS_ON: AtomicBool = AtomicBool::new(false);

/// The word of a record at which its inputs are, an address and a number; 0 before it is known.
static INPUTS: AtomicUsize = AtomicUsize::new(0);

/// The words from the inputs to the outputs: a `std::unordered_map` is between them.
const OUTPUTS_AFTER: usize = 2 + 7;

/// The words of a record in which its inputs are looked for.
const RECORD_WORDS: usize = 96;

/// An op that runs on this thread.
struct Running {
    record: usize,
    started: Started,
}

thread_local! {
    static RUNNING: RefCell<Vec<Running>> = const { RefCell::new(Vec::new()) };
}

/// Listens to ops as soon as PyTorch is loaded.
pub(crate) fn install() {
    if IS_ON.load(Ordering::Relaxed) || !torch::load() {
        return;
    }
    let Some(torch) = torch::get() else { return };
    let mut scopes = [0; 10];
    scopes[0] = 1;
    let callback =
        Callback { start: 0, end, probability: 1.0, scopes, needs_inputs: 1, needs_outputs: 1, needs_ids: 0 };
    // SAFETY: the callback's function lives as long as the process.
    unsafe { (torch.add_callback)(callback) };
    IS_ON.store(true, Ordering::Release);
}

/// The function in whose place the one below is.
fn real() -> Option<Run> {
    let mut found = REAL.load(Ordering::Relaxed);
    if found.is_null() {
        // SAFETY: look-ups without side effects; a library that is not loaded stays so.
        found = unsafe {
            let library = libc::dlopen(c"libtorch_cpu.so".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
            match library.is_null() {
                true => libc::dlsym(libc::RTLD_NEXT, NAME.as_ptr()),
                false => libc::dlsym(library, NAME.as_ptr()),
            }
        };
        REAL.store(found, Ordering::Relaxed);
    }
    // SAFETY: PyTorch's function has this type.
    (!found.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, Run>(found) })
}

// SAFETY: PyTorch's definition has the same type, and is called with the caller's arguments.
#[unsafe(export_name = "_ZN3c1010Dispatcher17runRecordFunctionERN2at14RecordFunctionESt17reference_wrapperIKNS_14FunctionSchemaEENS_11DispatchKeyENS_14DispatchKeySetENS_8ArrayRefIKNS_6IValueEEE")]
unsafe extern "C-unwind" fn run_record_function(
    record: *mut usize,
    schema: usize,
    key: u64,
    keys: u64,
    inputs: *const Value,
    count: usize,
) {
    if let Some(real) = real() {
        // SAFETY: the caller's own arguments, passed on unchanged.
        unsafe { real(record, schema, key, keys, inputs, count) };
    }
    if IS_ON.load(Ordering::Acquire) && count > 0 && !capture::is_any() {
        let _ = catch_unwind(AssertUnwindSafe(|| {
            // SAFETY: PyTorch's own arguments, alive during this call.
            unsafe { start(record, schema, std::slice::from_raw_parts(inputs, count)) }
        }));
    }
}

/// # Safety
/// A live record, the schema of its op, and its inputs.
unsafe fn start(record: *mut usize, schema: usize, inputs: &[Value]) {
    if INPUTS.load(Ordering::Relaxed) == 0 {
        // SAFETY: the record is on the stack of a caller, so the words after it can be read, too.
        let place = (1..RECORD_WORDS).find(|&word| unsafe {
            record.add(word).read() == inputs.as_ptr() as usize && record.add(word + 1).read() == inputs.len()
        });
        INPUTS.store(place.unwrap_or(0), Ordering::Relaxed);
    }
    // SAFETY: by the contract.
    let started = unsafe { evaluate::start(schema, inputs) };
    let record = record as usize;
    running_ops::push(RunningOp {
        record,
        blocks: started.is_trusted().then(torch_blocks::count),
        written: started.written.iter().map(|memory| memory.data).collect(),
    });
    let _ = RUNNING.try_with(|running| running.borrow_mut().push(Running { record, started }));
}

unsafe extern "C" fn end(record: *const c_void, _context: *mut c_void) {
    running_ops::pop(record as usize);
    let _ = catch_unwind(AssertUnwindSafe(|| {
        let running = RUNNING.try_with(|running| {
            let mut running = running.borrow_mut();
            let place = running.iter().rposition(|running| running.record == record as usize)?;
            // Those after it ended without a word.
            running.truncate(place + 1);
            running.pop()
        });
        let (Some(running), inputs @ 1..) = (running.ok().flatten(), INPUTS.load(Ordering::Relaxed)) else {
            return;
        };
        // SAFETY: the place was found in such a record, which is alive; the outputs are a vector.
        let outputs = unsafe {
            let [first, end] = *record.cast::<usize>().add(inputs + OUTPUTS_AFTER).cast::<[usize; 2]>();
            match end.wrapping_sub(first) / size_of::<Value>() {
                count @ 1..=64 if first > 0xFFFF => std::slice::from_raw_parts(first as *const Value, count),
                _ => &[],
            }
        };
        if !capture::is_any() {
            // SAFETY: the op's own outputs, which are alive.
            unsafe { evaluate::end(running.started, outputs) };
        }
    }));
}

/// The text at an address of a schema's string, of either layout.
///
/// # Safety
/// A live `std::string` is there.
pub(super) unsafe fn text<'a>(string: usize) -> &'a [u8] {
    // SAFETY: both layouts begin with the address of characters that end in 0.
    unsafe { CStr::from_ptr(*(string as *const *const c_char)) }.to_bytes()
}

/// Learns what a list looks like from the op that makes each tensor: its first input is the list of sizes.
pub(super) fn learn(name: &[u8], inputs: &[Value]) {
    if matches!(name, b"aten::empty" | b"aten::empty_strided")
        && let Some(first) = inputs.first()
    {
        Tag::learn(first.tag);
    }
}
