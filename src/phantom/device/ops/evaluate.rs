//! Runs an op a second time, with PyTorch's own CPU kernels.

use std::ffi::{c_int, c_void};

use crate::core::host_state::host_state;
use crate::core::running_ops::{self, Count};
use crate::cuda::copy::Known;
use crate::ops::cxx;
use crate::ops::op::Op;
use crate::ops::ordinary::{self, Flags, Related, Relation};
use crate::ops::partial::Partial;
use crate::ops::samples::{self, Arguments, Sample};
use crate::ops::tensor::{Part, Place, TensorMemory, keep, place_of};
use crate::ops::torch::{self, Operator, Tag, Torch};
use crate::ops::values::{Value, Values};

/// The state of an op from its start to its end.
#[derive(Default)]
pub(super) struct Started {
    op: Option<&'static Op>,
    /// The arguments, if all of them are known.
    values: Option<Values>,
    /// The arguments, if some of their elements are known.
    partial: Option<Partial>,
    /// The memory of the arguments that the op writes.
    pub(super) written: Vec<TensorMemory>,
    /// The known contents of the blocks around the written memory.
    kept: Vec<Part>,
    /// The known or expected flags of the op's inputs.
    flags: Vec<Flags>,
    /// The relation between the first and the second input.
    relation: Option<Relation>,
    /// The sample that becomes the output if nothing computes it, and the arguments of the op.
    sample: Option<(Sample, Arguments)>,
    /// The addresses of the input tensors on a device.
    inputs: Vec<usize>,
    /// True if the program acts on a value that the op reads.
    pub(super) acts: bool,
}

impl Started {
    /// Returns true if the op writes only its new memory and the arguments that its schema marks.
    pub(super) fn is_trusted(&self) -> bool {
        self.op.is_some()
    }
}

/// Handles the start of an op.
///
/// # Safety
/// `schema` is live, and `inputs` are the inputs of the op.
pub(super) unsafe fn start(schema: usize, inputs: &[Value]) -> Started {
    let untrusted = Started::default();
    let Some(torch) = torch::get() else { return untrusted };
    // SAFETY: by the contract.
    let op = unsafe { Op::cached(torch, schema, inputs) };
    let Some(op) = op.filter(|_| Tag::are_known()) else { return untrusted };
    let first = inputs.len().checked_sub(op.writes.len());
    let Some(inputs) = first.and_then(|first| inputs.get(first..)) else { return untrusted };
    // SAFETY: by the contract.
    let acts = op.is_decision || op.has_count || op.base == "item" && unsafe { is_whole(torch, inputs) };
    let mut started = Started { op: Some(op), acts, ..untrusted };
    // SAFETY: by the contract.
    if !inputs.iter().any(|value| unsafe { value.is_on_device(torch) }) {
        return started;
    }
    for (value, _) in inputs.iter().zip(&op.writes).filter(|(_, writes)| **writes) {
        // SAFETY: by the contract.
        unsafe {
            value.each_on_device(torch, |memory| {
                memory.add_known(&mut started.kept);
                started.written.push(memory);
            });
        }
    }
    let last = Related::take_last();
    // Only the listed ops are examined further. Other ops may take tensors whose memory must not be
    // inspected, such as the outputs of a CUDA graph's earlier run.
    if op.question.is_some() || op.sample.is_some() || Related::is_made_by(op.base) {
        for value in inputs {
            // SAFETY: by the contract.
            unsafe { value.each_on_device(torch, |memory| started.inputs.push(memory.data)) };
        }
    }
    // SAFETY: by the contract.
    started.sample = op.sample.map(|sample| (sample, unsafe { Arguments::read(torch, inputs) }));
    let Some(operator) = op.second else { return started };
    let mut values = Values::new(torch);
    let arguments = &inputs[..op.arguments];
    let are_known = arguments.iter().zip(0..).all(|(value, index)| {
        // SAFETY: by the contract.
        unsafe {
            values.add(value, index == 0 && op.overwrites).is_some()
                || samples::places(torch, op.base, index, inputs)
                    .is_some_and(|places| values.add_indices(value, &places).is_some())
        }
    });
    if are_known && op.has_count {
        // SAFETY: the values are the inputs of the op.
        let number = outside_sight(torch, || unsafe { first_size(torch, &operator, arguments) }).flatten();
        let is_computed = !values.is_answer;
        running_ops::set_count(number.map(|number| Count { number, is_computed }));
    } else if let (Some((Sample::Nonzero, arguments)), true) = (&started.sample, op.has_count) {
        let count = arguments.nonzero().map(|number| Count { number, is_computed: false });
        running_ops::set_count(count);
    } else if op.has_count {
        // SAFETY: by the contract.
        let all = unsafe { counted(torch, op.base, inputs) };
        let number = all.map(|all| host_state().dynamic.count_of(all));
        running_ops::set_count(number.map(|number| Count { number, is_computed: false }));
    }
    if op.question.is_some() && !are_known {
        let mut layouts = Vec::new();
        for value in inputs {
            // SAFETY: by the contract.
            unsafe {
                value.each_on_device(torch, |memory| {
                    started.flags.push(Flags::from_tensor(&memory));
                    layouts.push((memory.data, memory.sizes, memory.strides));
                });
            }
        }
        // A check that a number is not NaN compares a tensor with itself.
        let is_itself = matches!(layouts.as_slice(), [first, second] if first == second);
        let relation = last.and_then(|last| last.between(&started.inputs));
        started.relation = if is_itself { Some(Relation::Form) } else { relation };
    }
    if !are_known && !op.has_count {
        // SAFETY: by the contract.
        started.partial = unsafe { Partial::read(torch, op.question, op.overwrites, arguments) };
    }
    if are_known {
        (started.sample, started.values) = (None, Some(values));
    }
    started
}

/// Returns true if the first input of an op is a tensor of integers or flags.
///
/// # Safety
/// `inputs` are the live inputs of an op.
unsafe fn is_whole(torch: &Torch, inputs: &[Value]) -> bool {
    let mut is_whole = false;
    if let Some(value) = inputs.first() {
        // SAFETY: by the contract.
        unsafe { value.each_on_device(torch, |memory| is_whole = memory.is_whole()) };
    }
    is_whole
}

/// Returns the number of elements, or of parts along a dimension, among which an op counts the different ones.
///
/// # Safety
/// `inputs` are the live inputs of an op.
unsafe fn counted(torch: &Torch, base: &str, inputs: &[Value]) -> Option<u64> {
    let mut sizes = Vec::new();
    // SAFETY: by the contract.
    unsafe { inputs.first()?.each_on_device(torch, |memory| sizes = memory.sizes) };
    let dimension = base.starts_with("unique_dim").then(|| inputs.get(1).and_then(Value::number)).flatten();
    let count = match dimension {
        None => sizes.iter().product(),
        Some(dimension) => {
            let from_end = if dimension < 0.0 { sizes.len() as i64 } else { 0 };
            *sizes.get(usize::try_from(dimension as i64 + from_end).ok()?)?
        }
    };
    u64::try_from(count).ok()
}

/// Returns the first size of the first output of an op, or `None` if it is not known.
///
/// # Safety
/// `inputs` are the live inputs of the op.
unsafe fn first_size(torch: &'static Torch, operator: &Operator, inputs: &[Value]) -> Option<u64> {
    let mut values = Values::new(torch);
    for value in inputs {
        // SAFETY: by the contract.
        unsafe { values.add(value, false) }?;
    }
    // SAFETY: the values are arguments of the op, and its results live as long as they do.
    unsafe {
        let results = run(torch, operator, &mut values)?;
        let first = results.first().filter(|first| first.kind() == Tag::Tensor)?;
        let memory = TensorMemory::from_tensor(torch, (&raw const first.payload).cast())?;
        memory.sizes.first().and_then(|&size| u64::try_from(size).ok())
    }
}

/// Handles the end of an op.
///
/// # Safety
/// `outputs` are the live outputs of the op.
pub(super) unsafe fn end(started: Started, outputs: &[Value]) {
    let Some(torch) = torch::get() else { return };
    let Started { op: Some(op), values, partial, written, kept, flags, relation, sample, inputs, .. } =
        started
    else {
        return;
    };
    if op.has_count {
        running_ops::set_count(None);
    }
    // The op changed only the written memory. The rest of the blocks around it is known again.
    keep(&kept, &written);
    if let Some(output) = outputs.first().filter(|_| Related::is_made_by(op.base)) {
        // SAFETY: by the contract.
        unsafe { output.each_on_device(torch, |memory| Related::note(op.base, &inputs, memory.data)) };
    }
    if let Some((sample, arguments)) = &sample {
        match (written.first(), outputs.get(sample.output())) {
            (Some(output), _) => sample.write(arguments, output),
            // SAFETY: by the contract.
            (None, Some(output)) => unsafe {
                output.each_on_device(torch, |memory| {
                    if !inputs.contains(&memory.data) {
                        sample.write(arguments, &memory);
                    }
                });
            },
            _ => {}
        }
    }
    let sources = values.as_ref().or(partial.as_ref().and_then(|partial| partial.runs.first()));
    let targets: Option<Vec<TensorMemory>> = sources.and_then(|values| match written.is_empty() {
        false => Some(written),
        // SAFETY: by the contract.
        true => outputs.iter().map(|output| unsafe { target(torch, output, &values.sources) }).collect(),
    });
    let targets = targets.unwrap_or_default();
    // A result may be known already, from an op that ran inside this one or from the tracking of copies.
    let is_open = targets.iter().any(|target| target.known_elements().is_none());
    let mut are_all_known = false;
    if let (Some(partial), Some(operator), true) = (partial, op.second, is_open) {
        are_all_known = write_partial(torch, &operator, partial, &targets);
    }
    if let (Some(question), false, None) = (op.question, flags.is_empty() || are_all_known, &values) {
        // SAFETY: by the contract.
        let output = outputs.first().and_then(|output| unsafe { target(torch, output, &[]) });
        return output.iter().for_each(|output| ordinary::answer(question, &flags, relation, output));
    }
    let (Some(mut values), Some(operator), true) = (values, op.second, is_open) else { return };
    let is_answer = values.is_answer;
    let found = outside_sight(torch, || results(torch, &operator, &mut values, &targets)).flatten();
    for (target, bytes) in targets.iter().zip(found.unwrap_or_default()) {
        if let Some(bytes) = bytes {
            target.write(Known { bytes, is_answer });
        }
    }
}

/// Runs an op on host values. Returns for each target the elements of its result, or `None` if they do not
/// fit. Returns `None` if the op fails or has another number of results.
fn results(
    torch: &'static Torch,
    operator: &Operator,
    values: &mut Values,
    targets: &[TensorMemory],
) -> Option<Vec<Option<Vec<u8>>>> {
    // SAFETY: the values are the inputs of the op, and the results are live.
    unsafe {
        let results = run(torch, operator, values)?;
        let found = targets
            .iter()
            .zip(&results)
            .map(|(target, result)| elements(torch, result, target, &mut Values::new(torch)));
        let found = found.collect();
        (results.len() == targets.len()).then_some(found)
    }
}

/// Writes the known elements of an op whose inputs are partly known. Returns true if all elements of its
/// outputs are known then.
fn write_partial(
    torch: &'static Torch,
    operator: &Operator,
    mut partial: Partial,
    targets: &[TensorMemory],
) -> bool {
    let mut runs = Vec::new();
    for values in &mut partial.runs {
        match outside_sight(torch, || results(torch, operator, values, targets)).flatten() {
            Some(found) => runs.push(found),
            None => return false,
        }
    }
    let mut are_all_known = true;
    for (index, target) in targets.iter().enumerate() {
        let results: Option<Vec<Vec<u8>>> =
            runs.iter_mut().map(|run| run.get_mut(index).and_then(Option::take)).collect();
        are_all_known &= results.is_some_and(|results| partial.write(target, &results));
    }
    are_all_known
}

/// Returns the memory of an output. Returns `None` if its values are not followed, or if it shares memory
/// with an input.
///
/// # Safety
/// `output` is live.
unsafe fn target(torch: &Torch, output: &Value, sources: &[TensorMemory]) -> Option<TensorMemory> {
    if output.kind() != Tag::Tensor {
        return None;
    }
    // SAFETY: by the contract.
    let memory = unsafe {
        match place_of(torch, output.payload) {
            Place::Device => TensorMemory::from_tensor(torch, (&raw const output.payload).cast()),
            _ => None,
        }
    }?;
    (memory.is_small() && !sources.iter().any(|source| source.overlaps(&memory))).then_some(memory)
}

/// Runs an op on host values. Returns its results, or `None` if it threw an exception. A list of tensors is
/// returned as its elements.
///
/// # Safety
/// The values are arguments of the op.
unsafe fn run(torch: &Torch, operator: &Operator, values: &mut Values) -> Option<Vec<Value>> {
    let mut stack = values.take_stack();
    // SAFETY: the stack contains the arguments of the op.
    let ran = cxx::catching(|| unsafe { (torch.run_on_cpu)(operator, &raw mut stack, false, torch.cpu_key) })
        .is_some();
    // SAFETY: the stack from above, with the results or the remaining arguments.
    let left = unsafe { values.put_back(stack) };
    if !ran {
        return None;
    }
    match left {
        // SAFETY: a live list.
        [list] if list.kind() == Tag::List => Some(unsafe { list.elements() }.to_vec()),
        _ => Some(left.to_vec()),
    }
}

/// Returns the elements of a result, converted to the type of the output. Returns `None` if the sizes differ
/// or the conversion fails. `spare` gets the arguments of the conversion.
///
/// # Safety
/// `result` is live.
unsafe fn elements(
    torch: &Torch,
    result: &Value,
    target: &TensorMemory,
    spare: &mut Values,
) -> Option<Vec<u8>> {
    // SAFETY: by the contract.
    let memory = unsafe {
        if result.kind() != Tag::Tensor || place_of(torch, result.payload) != Place::Host {
            return None;
        }
        TensorMemory::from_tensor(torch, (&raw const result.payload).cast())?
    };
    if memory.sizes != target.sizes {
        return None;
    }
    if memory.dtype == target.dtype {
        // SAFETY: the memory of a live tensor on the host.
        return Some(unsafe { memory.host_elements() });
    }
    /// The tag of `None`.
    const NOTHING: u32 = 0;
    /// The tag of an integer.
    const INTEGER: u32 = 5;
    let operator = torch.find(b"aten::_to_copy", b"")?;
    // SAFETY: the values that own the result release its reference; `spare` holds another one.
    unsafe { spare.add(result, false) }?;
    spare.push(target.dtype as usize, INTEGER);
    for _ in 0..3 {
        spare.push(0, NOTHING);
    }
    spare.push(0, Tag::flag());
    spare.push(0, NOTHING);
    // SAFETY: the arguments of the op: a tensor, its new type, three unset values, a flag, and another unset
    // value.
    let results = unsafe { run(torch, &operator, spare) }?;
    let result = results.first()?;
    // SAFETY: a live tensor of the host.
    let memory = unsafe { TensorMemory::from_tensor(torch, (&raw const result.payload).cast()) }?;
    // SAFETY: as above.
    (memory.dtype == target.dtype && memory.sizes == target.sizes).then(|| unsafe { memory.host_elements() })
}

/// Runs `work` invisibly to the program: without its callbacks, modes, gradients and warnings, and without
/// starting threads.
fn outside_sight<R>(torch: &Torch, work: impl FnOnce() -> R) -> Option<R> {
    let keys = torch.thread_keys()?;
    // SAFETY: the state belongs to this thread, and `ThreadState` restores it, after a panic in `work`, too.
    let _restored = unsafe {
        let state = ThreadState {
            torch,
            keys: (keys, keys.read()),
            callbacks: (torch.callbacks_enabled)(),
            gradients: (torch.gradients)(),
            warnings: (torch.warnings)(),
            threads: (torch.threads)(),
        };
        keys.write([0; 2]);
        (torch.enable_callbacks)(false);
        (torch.set_gradients)(false);
        (torch.set_warnings)((&raw const SILENT).cast());
        if let Some(set) = torch.set_threads {
            set(1);
        }
        state
    };
    Some(work())
}

/// PyTorch's state of this thread, which is restored when the value is dropped.
struct ThreadState<'torch> {
    torch: &'torch Torch,
    /// The address of the dispatch keys, and the keys.
    keys: (*mut [u64; 2], [u64; 2]),
    callbacks: bool,
    gradients: bool,
    warnings: *const c_void,
    threads: c_int,
}

impl Drop for ThreadState<'_> {
    fn drop(&mut self) {
        let torch = self.torch;
        // SAFETY: the functions of PyTorch have these types. The keys belong to this thread, because the value is
        // never sent to another thread.
        unsafe {
            if let Some(set) = torch.set_threads {
                set(self.threads);
            }
            (torch.set_warnings)(self.warnings);
            (torch.set_gradients)(self.gradients);
            (torch.enable_callbacks)(self.callbacks);
            self.keys.0.write(self.keys.1);
        }
    }
}

/// A `c10::WarningHandler` that discards warnings: the address of a table with two destructors and `process`.
struct Silent(
    #[expect(dead_code, reason = "read by C++")]
    &'static [unsafe extern "C" fn(*const c_void, *const c_void); 3],
);

static SILENT: Silent = Silent(&[ignore, ignore, ignore]);

unsafe extern "C" fn ignore(_handler: *const c_void, _warning: *const c_void) {}
