//! Derives the meaning of a range from its name.
//!
//! The same rules apply to NVTX push/pop and start/end ranges, domain ranges, and the C functions. The
//! documentation of ranges describes them.

use crate::Category;

/// The attribute that a range sets for the memory allocated inside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning<'a> {
    /// The phase of the process, such as `forward` or `backward`.
    Phase(&'a str),
    /// A complete module path, which replaces the levels around it.
    ModulePath(&'a str),
    /// One level that is appended to the module path.
    Level(&'a str),
    /// An op, such as `aten::mm`.
    Op(&'a str),
    /// The number of a training step.
    Step(i64),
    /// A library's marker for its own work. It gets a row but sets no attribute.
    Library,
    /// A range in which a library gathers parameters or reduces gradients.
    Sharding(Category),
}

/// NVTX domains in which libraries mark their own kernels: CUB and Thrust, which torch uses, and NCCL, whose
/// `ncclCommInitRankConfig` opens a range that it never closes on the same thread (2.28.9).
pub const LIBRARY_DOMAINS: &[&str] = &["CCCL", "CUB", "Thrust", "NCCL"];

/// The names that DeepSpeed gives to its ranges (`instrument_w_nvtx` in deepspeed/utils/nvtx.py, 0.19): the
/// names of its functions. A name that ends with `*` stands for all names with this beginning.
const DEEPSPEED: &[&str] = &[
    "AllGatherCoalescedHandle.*",
    "AllReduceCoalescedHandle.*",
    "DeepSpeedEngine.*",
    "DeepSpeedZeRoOffload.*",
    "DeepSpeedZeroOptimizer*",
    "Init._*",
    "PartitionedParameterCoordinator.*",
    "_VariableFunctionsClass.cat",
    "allgather_fn",
    "assert_ints_same_as_other_ranks",
    "assert_lst_len_same_as_other_ranks",
    "free_param",
    "get_all_parameters",
    "pybind11_detail_function_record_*",
    "reduce_scatter_coalesced",
    "reduce_scatter_fn",
];

/// What the ranges of DeepSpeed whose names contain these texts allocate.
const DEEPSPEED_SHARDING: [(&str, Category); 6] = [
    ("all_gather_coalesced", Category::AllGather),
    ("Init._all_gather", Category::UnshardedParameter),
    ("AllGatherCoalescedHandle.wait", Category::UnshardedParameter),
    ("allreduce_gradients", Category::ReduceScatter),
    ("_scatter_", Category::ReduceScatter),
    ("__reduce_and_partition", Category::ReduceScatter),
];

/// The category name for ranges in [`LIBRARY_DOMAINS`].
pub const LIBRARY: &str = "library";

/// The start of a name that is followed by the number of a step. The mark that begins a step has this text alone,
/// because the table of texts has no room for a text per step; its row has the number, too.
pub const STEP: &str = "step:";

/// Plain names that are phases. `MEMTRACE_PHASES` adds more.
pub const PHASE_WORDS: &[&str] = &[
    "forward",
    "backward",
    "optimizer",
    "optimizer.step",
    "zero_grad",
    "dataloader",
    "eval",
    "train",
    "validation",
    "loss",
    "init",
    "checkpoint",
    "inference",
    "prefill",
    "decode",
];

/// Returns the meaning of a range name. `category` is the name of the NVTX category if the range is in the
/// domain `memtrace`, otherwise `None`. `more_phases` contains the words in `MEMTRACE_PHASES`.
///
/// ```
/// use memtrace_trace::ranges::{Meaning, meaning};
///
/// assert!(matches!(meaning("phase: warmup", None, &[]), Meaning::Phase("warmup")));
/// assert!(matches!(meaning("step: 7", None, &[]), Meaning::Step(7)));
/// ```
#[must_use]
pub fn meaning<'a>(name: &'a str, category: Option<&str>, more_phases: &[String]) -> Meaning<'a> {
    match category {
        Some("phase") => return Meaning::Phase(name),
        Some("module") => return Meaning::ModulePath(name),
        Some("op") => return Meaning::Op(name),
        Some(LIBRARY) => return Meaning::Library,
        Some("step") => {
            if let Ok(step) = name.trim().parse() {
                return Meaning::Step(step);
            }
        }
        _ => {}
    }
    if let Some(rest) = name.strip_prefix("phase:") {
        return Meaning::Phase(rest.trim());
    }
    if let Some(rest) = name.strip_prefix("module:") {
        return Meaning::ModulePath(rest.trim());
    }
    if let Some(rest) = name.strip_prefix("op:") {
        return Meaning::Op(rest.trim());
    }
    if let Some(step) = name.strip_prefix(STEP).and_then(|rest| rest.trim().parse().ok()) {
        return Meaning::Step(step);
    }
    if PHASE_WORDS.contains(&name) || more_phases.iter().any(|word| word == name) {
        return Meaning::Phase(name);
    }
    if let Some(step) = bare_step(name) {
        return Meaning::Step(step);
    }
    if let Some(op) = emit_nvtx_op(name) {
        return Meaning::Op(op);
    }
    deepspeed(name).unwrap_or(Meaning::Level(name))
}

/// Returns the meaning of a range of DeepSpeed, or `None` if it is not one.
fn deepspeed(name: &str) -> Option<Meaning<'_>> {
    let is_known =
        |known: &&str| known.strip_suffix('*').map_or(name == *known, |start| name.starts_with(start));
    DEEPSPEED.iter().find(|known| is_known(known))?;
    let sharding = DEEPSPEED_SHARDING.iter().find(|(part, _)| name.contains(part));
    Some(sharding.map_or(Meaning::Library, |(_, category)| Meaning::Sharding(*category)))
}

/// Parses `step 12`, `step_12`, `iteration_12`, `iter 12`, `ProfilerStep#12`.
fn bare_step(name: &str) -> Option<i64> {
    let digits = name
        .strip_prefix("ProfilerStep#")
        .or_else(|| ["step", "iteration", "iter"].iter().find_map(|word| separated(name, word)))?;
    digits.parse().ok().filter(|step| *step >= 0)
}

fn separated<'a>(name: &'a str, word: &str) -> Option<&'a str> {
    name.get(..word.len()).filter(|head| head.eq_ignore_ascii_case(word))?;
    name[word.len()..].strip_prefix([' ', '_', '#', '-'])
}

/// Returns the op in a name that `torch.autograd.profiler.emit_nvtx` pushes:
/// `aten::mul, seq = 8, op_id = 107`.
fn emit_nvtx_op(name: &str) -> Option<&str> {
    let (op, rest) = name.split_once(", ")?;
    (rest.starts_with("seq = ") || rest.starts_with("op_id = ")).then_some(op)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(name: &str) -> Meaning<'_> {
        meaning(name, None, &[])
    }

    #[test]
    fn a_prefix_of_a_range_name_decides_its_meaning() {
        assert_eq!(plain("phase:warmup"), Meaning::Phase("warmup"));
        assert_eq!(plain("module:GPT.h.0"), Meaning::ModulePath("GPT.h.0"));
        assert_eq!(plain("op:fused"), Meaning::Op("fused"));
        assert_eq!(plain("step:7"), Meaning::Step(7));
        assert_eq!(plain("step:seven"), Meaning::Level("step:seven"));
    }

    #[test]
    fn a_range_named_by_a_phase_word_is_a_phase() {
        assert_eq!(plain("forward"), Meaning::Phase("forward"));
        assert_eq!(plain("sampling"), Meaning::Level("sampling"));
        assert_eq!(meaning("sampling", None, &["sampling".into()]), Meaning::Phase("sampling"));
    }

    #[test]
    fn ranges_with_numbered_steps_are_steps() {
        for name in ["step 12", "iteration_12", "ProfilerStep#12", "Step_12", "iter-12"] {
            assert_eq!(plain(name), Meaning::Step(12), "{name}");
        }
        for name in ["step", "step x", "stepper_12", "step -1"] {
            assert_eq!(plain(name), Meaning::Level(name), "{name}");
        }
    }

    #[test]
    fn ranges_of_emit_nvtx_are_ops() {
        assert_eq!(plain("aten::mul, seq = 8, op_id = 107"), Meaning::Op("aten::mul"));
        assert_eq!(plain("aten::empty, op_id = 1"), Meaning::Op("aten::empty"));
        assert_eq!(plain("hello, world"), Meaning::Level("hello, world"));
    }

    #[test]
    fn ranges_of_deepspeed_are_no_levels() {
        assert_eq!(plain("DeepSpeedEngine.forward"), Meaning::Library);
        assert_eq!(plain("free_param"), Meaning::Library);
        assert_eq!(plain("free_params"), Meaning::Level("free_params"));
        let sharding = |name: &'static str| match plain(name) {
            Meaning::Sharding(category) => category,
            other => panic!("{name}: {other:?}"),
        };
        let gathers = "Init._convert_to_deepspeed_param.<locals>.all_gather_coalesced";
        assert_eq!(sharding(gathers), Category::AllGather);
        assert_eq!(sharding("AllGatherCoalescedHandle.wait"), Category::UnshardedParameter);
        assert_eq!(sharding("DeepSpeedZeroOptimizer_Stage3.__avg_scatter_grads"), Category::ReduceScatter);
    }

    #[test]
    fn the_nvtx_category_of_the_memtrace_domain_decides_first() {
        assert_eq!(meaning("GPT.h", Some("module"), &[]), Meaning::ModulePath("GPT.h"));
        assert_eq!(meaning("12", Some("step"), &[]), Meaning::Step(12));
        assert_eq!(meaning("12", Some("unknown"), &[]), Meaning::Level("12"));
        assert_eq!(meaning("cub::DeviceScan", Some(LIBRARY), &[]), Meaning::Library);
    }
}
