//! The second run of an op with PyTorch's own kernels for the CPU.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{LazyLock, RwLock};

use crate::cuda::copy::Known;
use crate::kernels::kernel_effects;
use crate::ops::cxx;
use crate::ops::ordinary::{self, Flags, Question, Related, Relation};
use crate::ops::record;
use crate::ops::samples::{self, Arguments, Sample};
use crate::ops::tensor::{Part, Place, TensorMemory, keep, place_of};
use crate::ops::torch::{self, Operator, Tag, Torch};
use crate::ops::values::{Value, Values};

/// An op.
struct Op {
    /// The op for the second run, if it is followed: of one that works in place the one that makes a new
    /// tensor.
    second: Option<Operator>,
    /// Whether it writes each of its arguments.
    writes: Vec<bool>,
    /// True if it does not read its first argument.
    overwrites: bool,
    /// The size of its output depends on values, and is asked inside.
    has_count: bool,
    /// The question that the op asks about values that nothing computed.
    question: Option<Question>,
    /// What the op gives when nothing computes it.
    sample: Option<Sample>,
    /// Its name without a namespace.
    base: &'static str,
}

/// Ops that are not run a second time: they draw random numbers, or leave memory as it was.
const EXCLUDED: [&str; 56] = [
    "_copy_from",
    "_copy_from_and_resize",
    "_cudnn_rnn",
    "_fill_mem_eff_dropout_mask",
    "_fused_dropout",
    "_lazy_clone",
    "_local_scalar_dense",
    "_nested_tensor_softmax_with_shape",
    "_pin_memory",
    "_resize_output",
    "_sample_dirichlet",
    "_scaled_dot_product_attention_math",
    "_standard_gamma",
    "alpha_dropout",
    "bernoulli",
    "binomial",
    "cauchy",
    "data",
    "detach",
    "dropout",
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_quantized",
    "empty_strided",
    "equal",
    "exponential",
    "feature_alpha_dropout",
    "feature_dropout",
    "geometric",
    "gru",
    "is_nonzero",
    "item",
    "log_normal",
    "lstm",
    "multinomial",
    "native_dropout",
    "new_empty",
    "new_empty_strided",
    "normal",
    "normal_functional",
    "poisson",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "random",
    "randperm",
    "record_stream",
    "rnn_relu",
    "rnn_tanh",
    "scaled_dot_product_attention",
    "set",
    "uniform",
];

/// Beginnings of names of further ops that are not run a second time.
const EXCLUDED_FAMILIES: [&str; 8] =
    ["_amp_", "_cudnn", "_efficient", "_flash", "_scaled_dot_product", "_triton", "resize", "rrelu"];

/// Namespaces whose ops are followed.
const NAMESPACES: [&str; 2] = ["aten::", "torchvision::"];

/// Parts of the names of ops that change a tensor, or give it other memory, without a mark in their schema.
const SILENT_WRITERS: [&str; 6] = ["batch_norm", "instance_norm", "_rnn", "_amp_", "resize", "set_"];

/// Ops whose output has a size that depends on values, and that ask it inside.
const COUNTING: [&str; 6] =
    ["_unique", "_unique2", "nonzero", "unique_consecutive", "unique_dim", "unique_dim_consecutive"];

impl Op {
    /// The op of a schema; `None` when nothing is known of it.
    ///
    /// # Safety
    /// The address of a live `FunctionSchema`.
    unsafe fn of(torch: &Torch, schema: usize) -> Option<Self> {
        // SAFETY: by the contract; a schema begins with two strings.
        let (name, overload) = unsafe { (record::text(schema), record::text(schema + torch.string_size())) };
        let name = std::str::from_utf8(name).ok()?;
        let base = NAMESPACES.iter().find_map(|space| name.strip_prefix(space))?;
        // SAFETY: by the contract.
        let writes = unsafe { Self::writes(torch, schema) };
        if writes.is_empty() || SILENT_WRITERS.iter().any(|part| base.contains(part)) {
            return None;
        }
        let is_in_place = base.ends_with('_') && !base.ends_with("__");
        let functional = if is_in_place { name.strip_suffix('_')? } else { name };
        let plain = base.trim_end_matches('_');
        let is_excluded = EXCLUDED.contains(&plain)
            || EXCLUDED_FAMILIES.iter().any(|family| plain.starts_with(family))
            || plain.ends_with("_backward");
        // One that works in place writes its first argument, and others none.
        let is_plain =
            writes.iter().enumerate().all(|(index, &writes)| writes == (is_in_place && index == 0));
        let second =
            (is_plain && !is_excluded).then(|| torch.find(functional.as_bytes(), overload)).flatten();
        let overwrites =
            matches!(base, "copy_" | "fill_" | "zero_" | "_foreach_zero_" | "_foreach_copy_") && is_in_place;
        let (has_count, question) = (COUNTING.contains(&base), Question::of(base));
        let sample = Sample::of(base);
        Some(Self { second, writes, overwrites, has_count, question, sample, base })
    }

    /// Whether an op writes each of its arguments.
    ///
    /// # Safety
    /// The address of a live `FunctionSchema`.
    unsafe fn writes(torch: &Torch, schema: usize) -> Vec<bool> {
        /// The alias of an `Argument`, after its name, two types, a number and a default.
        const ALIAS: usize = 64;
        /// The size of an `Argument` without its name.
        const ARGUMENT: usize = 80;
        /// `AliasInfo::isWrite_`, after two sets and a vector.
        const IS_WRITE: usize = 136;
        let size = torch.string_size();
        // SAFETY: by the contract; the vector of arguments follows two strings.
        unsafe {
            let [begin, end] = *((schema + 2 * size) as *const [usize; 2]);
            let count = end.saturating_sub(begin) / (size + ARGUMENT);
            let alias = |index: usize| *((begin + index * (size + ARGUMENT) + size + ALIAS) as *const usize);
            (0..count.min(256))
                .map(|index| match alias(index) {
                    0 => false,
                    alias => *((alias + IS_WRITE) as *const u8) != 0,
                })
                .collect()
        }
    }

    /// Like [`of`](Self::of), but keeps the result for the next call.
    ///
    /// # Safety
    /// As for [`of`](Self::of).
    unsafe fn cached(torch: &Torch, schema: usize, inputs: &[Value]) -> Option<&'static Self> {
        type Ops = HashMap<usize, Option<&'static Op>, rustc_hash::FxBuildHasher>;
        static OPS: LazyLock<RwLock<Ops>> = LazyLock::new(RwLock::default);
        let known = OPS.read().unwrap_or_else(std::sync::PoisonError::into_inner).get(&schema).copied();
        known.unwrap_or_else(|| {
            // SAFETY: by the contract.
            let op = unsafe {
                record::learn(record::text(schema), inputs);
                Self::of(torch, schema)
            };
            let op = op.map(|op| &*Box::leak(Box::new(op)));
            OPS.write().unwrap_or_else(std::sync::PoisonError::into_inner).insert(schema, op);
            op
        })
    }
}

/// An op that runs.
#[derive(Default)]
pub(super) struct Started {
    op: Option<&'static Op>,
    /// The arguments, when all are known.
    values: Option<Values>,
    /// The memory that it writes, of its arguments.
    pub(super) written: Vec<TensorMemory>,
    /// The known contents of the blocks around these.
    kept: Vec<Part>,
    /// The known part of the flags that the op asks about.
    flags: Vec<Flags>,
    /// How the first of its inputs is related to the second.
    relation: Option<Relation>,
    /// What it gives if nothing computes it.
    sample: Option<(Sample, Arguments)>,
    /// The addresses of its tensors on a device.
    inputs: Vec<usize>,
}

impl Started {
    /// Returns true if the op writes its new memory and the arguments that its schema names, and nothing else.
    pub(super) fn is_trusted(&self) -> bool {
        self.op.is_some()
    }
}

/// An op starts.
///
/// # Safety
/// A live schema, and the inputs of the op.
pub(super) unsafe fn start(schema: usize, inputs: &[Value]) -> Started {
    let untrusted = Started::default();
    let Some(torch) = torch::get() else { return untrusted };
    // SAFETY: by the contract.
    let op = unsafe { Op::cached(torch, schema, inputs) };
    let Some(op) = op.filter(|_| Tag::are_known()) else { return untrusted };
    let first = inputs.len().checked_sub(op.writes.len());
    let Some(inputs) = first.and_then(|first| inputs.get(first..)) else { return untrusted };
    let mut started = Started { op: Some(op), ..untrusted };
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
    for value in inputs {
        // SAFETY: by the contract.
        unsafe { value.each_on_device(torch, |memory| started.inputs.push(memory.data)) };
    }
    // SAFETY: by the contract.
    started.sample = op.sample.map(|sample| (sample, unsafe { Arguments::of(torch, inputs) }));
    let Some(operator) = op.second else { return started };
    let mut values = Values::new(torch);
    let are_known = inputs.iter().zip(0..).all(|(value, index)| {
        // SAFETY: by the contract.
        unsafe {
            values.add(value, index == 0 && op.overwrites).is_some()
                || samples::places(torch, op.base, index, inputs)
                    .is_some_and(|places| values.add_indices(value, &places).is_some())
        }
    });
    if are_known && op.has_count {
        // SAFETY: the values are those of the op.
        let count = outside_sight(torch, || unsafe { first_size(torch, &operator, inputs) }).flatten();
        kernel_effects::set_count(count);
    } else if let (Some((Sample::Nonzero, arguments)), true) = (&started.sample, op.has_count) {
        kernel_effects::set_count(arguments.nonzero());
    }
    if op.question.is_some() && !are_known {
        for value in inputs {
            // SAFETY: by the contract.
            unsafe { value.each_on_device(torch, |memory| started.flags.push(Flags::of(&memory))) };
        }
        started.relation = last.and_then(|last| last.between(&started.inputs));
    }
    if are_known {
        (started.sample, started.values) = (None, Some(values));
    }
    started
}

/// The first size of the first output of an op; `None` when it is not known.
///
/// # Safety
/// The op's live inputs.
unsafe fn first_size(torch: &'static Torch, operator: &Operator, inputs: &[Value]) -> Option<u64> {
    let mut values = Values::new(torch);
    for value in inputs {
        // SAFETY: by the contract.
        unsafe { values.add(value, false) }?;
    }
    // SAFETY: the values are arguments of the op; its results are alive with them.
    unsafe {
        let results = run(torch, operator, &mut values)?;
        let first = results.first().filter(|first| first.kind() == Tag::Tensor)?;
        let memory = TensorMemory::of(torch, (&raw const first.payload).cast())?;
        memory.sizes.first().and_then(|&size| u64::try_from(size).ok())
    }
}

/// The op ends.
///
/// # Safety
/// `outputs` are its live outputs.
pub(super) unsafe fn end(started: Started, outputs: &[Value]) {
    let Some(torch) = torch::get() else { return };
    let Started { op: Some(op), values, written, kept, flags, relation, sample, inputs } = started else {
        return;
    };
    if op.has_count {
        kernel_effects::set_count(None);
    }
    // The bytes beside the written ones are as before.
    keep(&kept, &written);
    if let Some(output) = outputs.first() {
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
    if let (Some(question), false, None) = (op.question, flags.is_empty(), &values) {
        // SAFETY: by the contract.
        let output = outputs.first().and_then(|output| unsafe { target(torch, output, &[]) });
        return output.iter().for_each(|output| ordinary::answer(question, &flags, relation, output));
    }
    let (Some(mut values), Some(operator)) = (values, op.second) else { return };
    let targets: Option<Vec<TensorMemory>> = match written.is_empty() {
        false => Some(written),
        // SAFETY: by the contract.
        true => outputs.iter().map(|output| unsafe { target(torch, output, &values.sources) }).collect(),
    };
    let Some(targets) = targets.filter(|targets| !targets.is_empty()) else { return };
    // A part of the op, which ran inside, or the memory's own copy was followed already.
    if targets.iter().all(|target| target.known_elements().is_some()) {
        return;
    }
    let is_answer = values.is_answer;
    let found = outside_sight(torch, || {
        // SAFETY: the values are those of the op.
        let results = unsafe { run(torch, &operator, &mut values) }?;
        let mut found = Vec::new();
        for (target, result) in targets.iter().zip(&results) {
            // SAFETY: a live tensor.
            found.push(unsafe { elements(torch, result, target, &mut Values::new(torch)) });
        }
        (results.len() == targets.len()).then_some(found)
    });
    for (target, bytes) in targets.iter().zip(found.flatten().unwrap_or_default()) {
        if let Some(bytes) = bytes {
            target.write(Known { bytes, is_answer });
        }
    }
}

/// The memory of an output; `None` when its values are not followed, or when it shares the memory of an input.
///
/// # Safety
/// A live value.
unsafe fn target(torch: &Torch, output: &Value, sources: &[TensorMemory]) -> Option<TensorMemory> {
    if output.kind() != Tag::Tensor {
        return None;
    }
    // SAFETY: by the contract.
    let memory = unsafe {
        match place_of(torch, output.payload) {
            Place::Device => TensorMemory::of(torch, (&raw const output.payload).cast()),
            _ => None,
        }
    }?;
    (memory.is_small() && !sources.iter().any(|source| source.overlaps(&memory))).then_some(memory)
}

/// Runs an op on values of the host, and returns its tensors.
///
/// # Safety
/// The values are arguments of the op.
unsafe fn run(torch: &Torch, operator: &Operator, values: &mut Values) -> Option<Vec<Value>> {
    let mut stack = values.take_stack();
    // SAFETY: the stack has the arguments of the op.
    let ran = cxx::catching(|| unsafe { (torch.run_on_cpu)(operator, &raw mut stack, false, torch.cpu_key) })
        .is_some();
    // SAFETY: the stack from above: the results, or what is left of the arguments.
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

/// The elements of a result in the type of the output.
///
/// # Safety
/// A live value.
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
        TensorMemory::of(torch, (&raw const result.payload).cast())?
    };
    if memory.sizes != target.sizes {
        return None;
    }
    if memory.dtype == target.dtype {
        // SAFETY: memory of a live tensor of the host.
        return Some(unsafe { memory.host_elements() });
    }
    /// The tags of `None` and of an integer.
    const NOTHING: u32 = 0;
    const INTEGER: u32 = 5;
    let operator = torch.find(b"aten::_to_copy", b"")?;
    // SAFETY: the reference of the result is given back by its values; this is another one.
    unsafe { spare.add(result, false) }?;
    spare.push(target.dtype as usize, INTEGER);
    for _ in 0..3 {
        spare.push(0, NOTHING);
    }
    spare.push(0, Tag::flag());
    spare.push(0, NOTHING);
    // SAFETY: the arguments of the op: a tensor, its new type, three that are not set, a flag, and another.
    let results = unsafe { run(torch, &operator, spare) }?;
    let result = results.first()?;
    // SAFETY: a live tensor of the host.
    let memory = unsafe { TensorMemory::of(torch, (&raw const result.payload).cast()) }?;
    // SAFETY: as above.
    (memory.dtype == target.dtype && memory.sizes == target.sizes).then(|| unsafe { memory.host_elements() })
}

/// Runs `work` where the program does not see it: its callbacks, its modes, its gradients and its warnings are
/// off, and no thread starts.
fn outside_sight<R>(torch: &Torch, work: impl FnOnce() -> R) -> Option<R> {
    let keys = torch.thread_keys()?;
    // SAFETY: the thread's own state, which is as before when this returns.
    unsafe {
        let (saved_keys, callbacks) = (keys.read(), (torch.callbacks_enabled)());
        let (gradients, warnings) = ((torch.gradients)(), (torch.warnings)());
        let threads = (torch.threads)();
        keys.write([0; 2]);
        (torch.enable_callbacks)(false);
        (torch.set_gradients)(false);
        (torch.set_warnings)((&raw const SILENT).cast());
        if let Some(set) = torch.set_threads {
            set(1);
        }
        let result = work();
        if let Some(set) = torch.set_threads {
            set(threads);
        }
        (torch.set_warnings)(warnings);
        (torch.set_gradients)(gradients);
        (torch.enable_callbacks)(callbacks);
        keys.write(saved_keys);
        Some(result)
    }
}

/// A `c10::WarningHandler` that discards warnings: the address of a table of two destructors and `process`.
struct Silent(
    #[expect(dead_code, reason = "read by C++")]
    &'static [unsafe extern "C" fn(*const c_void, *const c_void); 3],
);

static SILENT: Silent = Silent(&[ignore, ignore, ignore]);

unsafe extern "C" fn ignore(_handler: *const c_void, _warning: *const c_void) {}
