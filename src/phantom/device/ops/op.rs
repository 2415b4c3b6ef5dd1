//! The properties of an op that its schema and its name show.

use std::collections::HashMap;
use std::sync::{LazyLock, RwLock};

use crate::core::lock;
use crate::ops::ordinary::Question;
use crate::ops::samples::Sample;
use crate::ops::torch::{Operator, Torch};
use crate::ops::values::Value;
use crate::ops::{cxx, record, schema};

/// The properties of an op.
pub(super) struct Op {
    /// The op for the second run, if the op is followed. For an in-place op, it is the variant that creates a
    /// new tensor.
    pub(super) second: Option<Operator>,
    /// True for each argument that the op writes.
    pub(super) writes: Vec<bool>,
    /// The number of arguments of the second run: all but the results that the caller passes (`out=`).
    pub(super) arguments: usize,
    /// True if the op does not read its first argument.
    pub(super) overwrites: bool,
    /// True if the size of the output depends on values and is determined inside the op.
    pub(super) has_count: bool,
    /// True if the op reads a flag or a size on which the program then acts.
    pub(super) is_decision: bool,
    /// The question that the op asks about values that nothing computed.
    pub(super) question: Option<Question>,
    /// The output of the op if nothing computes it.
    pub(super) sample: Option<Sample>,
    /// The name without a namespace.
    pub(super) base: &'static str,
}

/// Ops that are not run a second time: they draw random numbers, or leave memory unchanged.
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

/// Name prefixes of more ops that are not run a second time.
const EXCLUDED_FAMILIES: [&str; 8] =
    ["_amp_", "_cudnn", "_efficient", "_flash", "_scaled_dot_product", "_triton", "resize", "rrelu"];

/// Namespaces whose ops are followed.
const NAMESPACES: [&str; 2] = ["aten::", "torchvision::"];

/// Parts of the names of ops that change a tensor or replace its memory without a mark in their schema.
const SILENT_WRITERS: [&str; 6] = ["batch_norm", "instance_norm", "_rnn", "_amp_", "resize", "set_"];

/// Ops whose output size depends on values and is determined inside the op.
const COUNTING: [&str; 6] =
    ["_unique", "_unique2", "nonzero", "unique_consecutive", "unique_dim", "unique_dim_consecutive"];

/// Ops that read a flag or a size on which the program then acts. `is_nonzero` is `bool(tensor)`.
const DECISIONS: [&str; 5] = ["allclose", "equal", "is_nonzero", "masked_select", "repeat_interleave"];

impl Op {
    /// Returns the properties of the op with this schema, or `None` if nothing is known about it.
    ///
    /// # Safety
    /// `schema` is the address of a live `FunctionSchema`.
    unsafe fn for_schema(torch: &Torch, schema: usize) -> Option<Self> {
        if !schema::is_known(torch) {
            return None;
        }
        // SAFETY: by the contract; a schema begins with two strings.
        let (name, overload) = unsafe { (cxx::text(schema), cxx::text(schema + torch.string_size())) };
        let name = std::str::from_utf8(name).ok()?;
        let base = NAMESPACES.iter().find_map(|space| name.strip_prefix(space))?;
        // SAFETY: by the contract.
        let writes = unsafe { schema::writes(torch, schema) };
        if writes.is_empty() || SILENT_WRITERS.iter().any(|part| base.contains(part)) {
            return None;
        }
        let is_in_place = base.ends_with('_') && !base.ends_with("__");
        let functional = if is_in_place { name.strip_suffix('_')? } else { name };
        let plain = base.trim_end_matches('_');
        let is_excluded = EXCLUDED.contains(&plain)
            || EXCLUDED_FAMILIES.iter().any(|family| plain.starts_with(family))
            || plain.ends_with("_backward");
        // A plain in-place op writes only its first argument. Other plain ops write no argument.
        let is_plain =
            writes.iter().enumerate().all(|(index, &writes)| writes == (is_in_place && index == 0));
        let second = match () {
            () if is_excluded => None,
            () if is_plain => torch.find(functional.as_bytes(), overload),
            // SAFETY: by the contract.
            () if !is_in_place => unsafe { Self::without_out(torch, name, overload, &writes) },
            () => None,
        };
        let overwrites =
            matches!(base, "copy_" | "fill_" | "zero_" | "_foreach_zero_" | "_foreach_copy_") && is_in_place;
        let arguments = match is_plain {
            true => writes.len(),
            false => writes.iter().position(|writes| *writes).unwrap_or(writes.len()),
        };
        let (has_count, question) = (COUNTING.contains(&base), Question::for_op(base));
        let is_decision = DECISIONS.contains(&base);
        let sample = Sample::for_op(base);
        Some(Self { second, arguments, writes, overwrites, has_count, is_decision, question, sample, base })
    }

    /// Returns the variant of an `out=` op that creates its results. Returns `None` if the op has none with the
    /// same other arguments.
    ///
    /// # Safety
    /// The dispatcher's handles have the layout of [`Operator`].
    unsafe fn without_out(torch: &Torch, name: &str, overload: &[u8], writes: &[bool]) -> Option<Operator> {
        let first = writes.iter().position(|writes| *writes)?;
        let overload = overload.strip_suffix(b"out")?;
        let overload = overload.strip_suffix(b"_").unwrap_or(overload);
        if !writes[first..].iter().all(|writes| *writes) {
            return None;
        }
        [overload, b"Tensor"].into_iter().find_map(|overload| {
            // SAFETY: by the contract.
            let (operator, writes) = unsafe { schema::find(torch, name.as_bytes(), overload) }?;
            (writes.len() == first).then_some(operator)
        })
    }

    /// Like [`for_schema`](Self::for_schema), but caches the result.
    ///
    /// # Safety
    /// Same as for [`for_schema`](Self::for_schema).
    pub(super) unsafe fn cached(torch: &Torch, schema: usize, inputs: &[Value]) -> Option<&'static Self> {
        type Ops = HashMap<usize, Option<&'static Op>, rustc_hash::FxBuildHasher>;
        static OPS: LazyLock<RwLock<Ops>> = LazyLock::new(RwLock::default);
        let known = lock::read(&OPS).get(&schema).copied();
        known.unwrap_or_else(|| {
            // SAFETY: by the contract.
            let op = unsafe {
                record::learn(cxx::text(schema), inputs);
                Self::for_schema(torch, schema)
            };
            let op = op.map(|op| &*Box::leak(Box::new(op)));
            lock::write(&OPS).insert(schema, op);
            op
        })
    }
}
