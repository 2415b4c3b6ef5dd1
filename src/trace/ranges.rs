//! Derives the meaning of a range from its name.
//!
//! The same rules apply to NVTX push/pop and start/end ranges, domain ranges, and the C functions. The
//! documentation of ranges describes them.

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
    /// A library's marker for its own kernels. It gets a row but sets no attribute.
    Library,
}

/// NVTX domains in which libraries mark their own kernels: CUB and Thrust, which torch uses, and NCCL, whose
/// `ncclCommInitRankConfig` opens a range that it never closes on the same thread (2.28.9).
pub const LIBRARY_DOMAINS: &[&str] = &["CCCL", "CUB", "Thrust", "NCCL"];

/// The category name for ranges in [`LIBRARY_DOMAINS`].
pub const LIBRARY: &str = "library";

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
    if let Some(step) = name.strip_prefix("step:").and_then(|rest| rest.trim().parse().ok()) {
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
    Meaning::Level(name)
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
    fn the_nvtx_category_of_the_memtrace_domain_decides_first() {
        assert_eq!(meaning("GPT.h", Some("module"), &[]), Meaning::ModulePath("GPT.h"));
        assert_eq!(meaning("12", Some("step"), &[]), Meaning::Step(12));
        assert_eq!(meaning("12", Some("unknown"), &[]), Meaning::Level("12"));
        assert_eq!(meaning("cub::DeviceScan", Some(LIBRARY), &[]), Meaning::Library);
    }
}
