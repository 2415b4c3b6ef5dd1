//! The rule for values that no kernel computed: they are ordinary, so the checks of a program pass.
//!
//! - A number is finite and not NaN.
//! - It equals no other: a test for equality is expected to fail, for each of its elements. "Not", "and", "or"
//!   and the largest or smallest of such flags follow.
//! - "All" of other flags is true and "any" is false, for any number of flags, also along a dimension: with
//!   these, programs check that their data is sound.
//!
//! Known values of some of the flags come first.
//!
//! - The indices of the largest elements (`topk`) are spread evenly over all places, row by row. So a router gives
//!   each expert its share.

use crate::cuda::copy::{self, Known};
use crate::kernels::elementwise;
use crate::ops::tensor::TensorMemory;

/// The question that an op asks about its inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Question {
    /// Whether a number is finite, infinite or NaN. The answer about an ordinary one.
    Kind(bool),
    /// Whether two are equal (true) or unequal (false).
    Equality(bool),
    All,
    Any,
    Not,
    And,
    Or,
    /// The largest or the smallest.
    Extreme,
    /// The places of the largest.
    Places,
}

impl Question {
    /// The question of an op, by the name without a namespace.
    pub(super) fn of(base: &str) -> Option<Self> {
        Some(match base.trim_end_matches('_').trim_start_matches('_') {
            "isfinite" | "isreal" => Self::Kind(true),
            "isnan" | "isinf" | "isposinf" | "isneginf" => Self::Kind(false),
            "eq" | "isin" => Self::Equality(true),
            "ne" | "not_equal" => Self::Equality(false),
            "all" | "is_all_true" => Self::All,
            "any" | "is_any_true" => Self::Any,
            "logical_not" | "bitwise_not" => Self::Not,
            "logical_and" | "bitwise_and" | "and" | "iand" => Self::And,
            "logical_or" | "bitwise_or" | "or" | "ior" => Self::Or,
            "topk" => Self::Places,
            "max" | "min" | "amax" | "amin" => Self::Extreme,
            _ => return None,
        })
    }
}

/// The known or expected flags of a tensor before an op.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Flags {
    /// All of them, if they are the same.
    expected: Option<bool>,
    /// All are known to be the same.
    is_known: bool,
    /// One of them is known to be true, and one to be false.
    has: [bool; 2],
}

/// `c10::ScalarType::Bool`.
const BOOL: i32 = 11;

impl Flags {
    /// Looks at the flags of a tensor. An integer is a flag, too: whether it is another than 0.
    pub(super) fn of(memory: &TensorMemory) -> Self {
        if !matches!(memory.dtype, 0..=4 | BOOL) || !memory.is_small() || memory.count() == 0 {
            return Self::default();
        }
        if let Some(known) = memory.known_elements() {
            let is_true = |element: &[u8]| element.iter().any(|&byte| byte != 0);
            let has = [false, true]
                .map(|flag| known.bytes.chunks_exact(memory.width).any(|one| is_true(one) == flag));
            let same = has[0] != has[1];
            return Self { expected: same.then_some(has[1]), is_known: same, has: [has[1], has[0]] };
        }
        let Some(device) = copy::device_of(memory.data) else { return Self::default() };
        let values = device.values();
        // `torch.equal` compares inside, with no op of its own.
        let is_equality = elementwise::is_last_equality(memory.data);
        let expected = values.expected(memory.data, memory.span()).or(is_equality.then_some(false));
        let mut has = [false; 2];
        if memory.dtype == BOOL && memory.is_contiguous() {
            for (start, end) in values.known_parts(memory.data, memory.span()) {
                // SAFETY: a mapped part of the tensor.
                let flags = unsafe { std::slice::from_raw_parts(start as *const u8, end - start) };
                has[0] |= flags.iter().any(|&flag| flag != 0);
                has[1] |= flags.contains(&0);
            }
        }
        Self { expected, is_known: false, has }
    }
}

/// Answers the question of an op that ended, whose inputs are not all known, for its output.
pub(super) fn answer(question: Question, inputs: &[Flags], output: &TensorMemory) {
    if !output.is_small() || output.count() == 0 {
        return;
    }
    if output.dtype != BOOL {
        // No bit is left.
        let is_zero = |flags: &Flags| flags.is_known && flags.expected == Some(false);
        if question == Question::And && inputs.iter().any(is_zero) {
            let bytes = vec![0; output.count() * output.width];
            output.write(Known { bytes, is_answer: false });
        }
        return;
    }
    let Some(device) = copy::device_of(output.data) else { return };
    let first = inputs.first().copied().unwrap_or_default();
    let second = inputs.get(1).copied().unwrap_or_default();
    let is = |flags: Flags, wanted: bool| flags.expected == Some(wanted);
    // Whether the answer is certain, and whether it is one about values that nothing computed.
    let (flag, is_certain, is_answer) = match question {
        Question::Kind(flag) => (flag, true, false),
        Question::Equality(is_equal) => (!is_equal, false, true),
        Question::All => (!first.has[1] && first.expected.unwrap_or(true), true, !first.has[1]),
        Question::Any => (first.has[0] || first.expected.unwrap_or(false), true, !first.has[0]),
        Question::Not | Question::Extreme => match first.expected {
            Some(flag) => (flag != (question == Question::Not), false, true),
            None => return,
        },
        Question::And | Question::Or => {
            let decisive = question == Question::Or;
            if is(first, decisive) && first.is_known || is(second, decisive) && second.is_known {
                (decisive, true, false)
            } else if is(first, decisive) || is(second, decisive) {
                (decisive, false, true)
            } else if is(first, !decisive) && is(second, !decisive) {
                (!decisive, false, true)
            } else {
                return;
            }
        }
        Question::Places => return,
    };
    if !is_certain {
        if output.known_elements().is_none() {
            device.values().expect(output.data, output.span(), flag);
        }
        return;
    }
    // A comparison of two tensors, or a reduction that is recognized by its kernel's name, has left an
    // answer.
    let is_reduction = matches!(question, Question::All | Question::Any);
    let is_answered = device.values().result(output.data).is_some();
    if is_reduction && is_answered && first.expected.is_none() && first.has == [false; 2] {
        return;
    }
    if !is_reduction && output.known_elements().is_some() {
        return;
    }
    output.write(Known { bytes: vec![u8::from(flag); output.count()], is_answer });
}

/// The most places among which indices are spread: the experts of a router. The words of a language are more.
const MOST_PLACES: i64 = 4096;

/// Spreads the indices of the largest elements in each row of a tensor with these sizes evenly.
pub(super) fn spread(sizes: &[i64], output: &TensorMemory) {
    /// `c10::ScalarType::Long`.
    const LONG: i32 = 4;
    let (Some((&places, rows)), Some((_, output_rows))) = (sizes.split_last(), output.sizes.split_last())
    else {
        return;
    };
    let is_of_interest = output.dtype == LONG && rows == output_rows && (1..=MOST_PLACES).contains(&places);
    if !is_of_interest || !output.is_small() || output.known_elements().is_some() {
        return;
    }
    let bytes = (0..output.count() as i64).flat_map(|index| (index % places).to_le_bytes()).collect();
    output.write(Known { bytes, is_answer: true });
}
