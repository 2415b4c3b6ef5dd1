//! Observes the start and the end of each PyTorch op.
//!
//! PyTorch's dispatcher passes each op through `c10::Dispatcher::runRecordFunction` if a callback observes
//! ops. So a callback is installed, which makes PyTorch pass the inputs and keep the outputs. The function
//! itself is interposed here: its arguments include the op's record, schema and inputs. Only the position of
//! the outputs in a record has to be learned, from the position of the inputs.

use std::cell::RefCell;
use std::ffi::{CStr, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::core::capture;
use crate::core::running_ops::{self, RunningOp};
use crate::core::torch_blocks;
use crate::ops::evaluate::{self, Started};
use crate::ops::replaced::{Replaced, TORCH_CPU};
use crate::ops::torch::{self, Callback, Tag};
use crate::ops::values::Value;

/// `static void c10::Dispatcher::runRecordFunction(at::RecordFunction&, schema_ref_t, DispatchKey,
/// DispatchKeySet, ArrayRef<const IValue>)`, in ATen/core/dispatch/Dispatcher.h.
type Run = unsafe extern "C-unwind" fn(*mut usize, usize, u64, u64, *const Value, usize);

const NAME: &CStr = c"_ZN3c1010Dispatcher17runRecordFunctionERN2at14RecordFunctionESt17reference_wrapperIKNS_14FunctionSchemaEENS_11DispatchKeyENS_14DispatchKeySetENS_8ArrayRefIKNS_6IValueEEE";

static REAL: Replaced = Replaced::new(TORCH_CPU, NAME);

/// True once the callback is installed.
static IS_ON: AtomicBool = AtomicBool::new(false);

/// The index of the word in a record that has the address of the op's inputs; the next word is the number of
/// inputs. The index is 0 until it is known.
static INPUTS: AtomicUsize = AtomicUsize::new(0);

/// The number of words from the inputs to the outputs, with a `std::unordered_map` in between.
const OUTPUTS_AFTER: usize = 2 + 7;

/// The number of words of a record that are searched for its inputs.
const RECORD_WORDS: usize = 96;

/// An op that is running on this thread.
struct Running {
    record: usize,
    started: Started,
}

thread_local! {
    static RUNNING: RefCell<Vec<Running>> = const { RefCell::new(Vec::new()) };
}

/// Starts to observe ops as soon as PyTorch is loaded.
pub(crate) fn install() {
    if IS_ON.load(Ordering::Relaxed) || !torch::load() {
        return;
    }
    let Some(torch) = torch::get() else { return };
    let mut scopes = [0; 10];
    scopes[0] = 1;
    let callback =
        Callback { start: 0, end, probability: 1.0, scopes, needs_inputs: 1, needs_outputs: 1, needs_ids: 0 };
    // SAFETY: the function of the callback lives as long as the process.
    unsafe { (torch.add_callback)(callback) };
    IS_ON.store(true, Ordering::Release);
}

// SAFETY: PyTorch's definition has the same type. It is called with the caller's arguments.
#[unsafe(export_name = "_ZN3c1010Dispatcher17runRecordFunctionERN2at14RecordFunctionESt17reference_wrapperIKNS_14FunctionSchemaEENS_11DispatchKeyENS_14DispatchKeySetENS_8ArrayRefIKNS_6IValueEEE")]
unsafe extern "C-unwind" fn run_record_function(
    record: *mut usize,
    schema: usize,
    key: u64,
    keys: u64,
    inputs: *const Value,
    count: usize,
) {
    // SAFETY: PyTorch's function has this type, and gets the caller's own arguments unchanged.
    unsafe {
        std::mem::transmute::<*mut c_void, Run>(REAL.real())(record, schema, key, keys, inputs, count);
    }
    if IS_ON.load(Ordering::Acquire) && count > 0 && !capture::is_any() {
        let _ = catch_unwind(AssertUnwindSafe(|| {
            // SAFETY: PyTorch's own arguments, alive during this call.
            unsafe { start(record, schema, std::slice::from_raw_parts(inputs, count)) }
        }));
    }
}

/// # Safety
/// `record` is live, `schema` is the schema of its op, and `inputs` are the inputs.
unsafe fn start(record: *mut usize, schema: usize, inputs: &[Value]) {
    if INPUTS.load(Ordering::Relaxed) == 0 {
        // SAFETY: the record is on a caller's stack, so the words after it are readable, too.
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
        acts: started.acts,
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
            // For the ops that started after this one, no end was reported. They are removed, too.
            running.truncate(place + 1);
            running.pop()
        });
        let (Some(running), inputs @ 1..) = (running.ok().flatten(), INPUTS.load(Ordering::Relaxed)) else {
            return;
        };
        // SAFETY: the position was found in such a record, which is alive; the outputs are a vector.
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

/// Learns the tag of a list from the op that creates tensors, whose first input is the list of sizes.
pub(super) fn learn(name: &[u8], inputs: &[Value]) {
    if matches!(name, b"aten::empty" | b"aten::empty_strided")
        && let Some(first) = inputs.first()
    {
        Tag::learn(first.tag);
    }
}
