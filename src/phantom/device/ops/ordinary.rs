//! The rule for values that no kernel computed. They are ordinary, so that a program's checks pass.
//!
//! - A number is finite and not NaN.
//! - It equals no other number: a test for equality is expected to fail for each element. The results of
//!   "not", "and", "or", and of the maximum or minimum of such flags follow from this.
//! - For other flags, "all" and the minimum are true, "any" and the maximum are false, for any number of flags,
//!   also along a dimension, because programs use these to check that their data is valid.
//! - It is positive: a sum is greater than each of its terms.
//! - It has the form that a check expects: a number equals itself, a triangular matrix equals its triangle, and
//!   a whole number equals its floor.
//!
//! Flags with known values take precedence.

use std::cell::Cell;

use crate::cuda::copy::{self, Known};
use crate::kernels::elementwise;
use crate::ops::scalar_type::BOOL;
use crate::ops::tensor::TensorMemory;

/// The question that an op asks about its inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Question {
    /// The op asks whether a number is finite, infinite or NaN. The value is the
    /// answer for an ordinary number.
    Kind(bool),
    /// The op asks whether two values are equal (true) or unequal (false).
    Equality(bool),
    All,
    Any,
    Not,
    And,
    Or,
    /// The op asks for the maximum (true) or the minimum (false).
    Extreme(bool),
    /// The op asks whether one value is greater (true) or less (false) than another.
    Order(bool),
}

impl Question {
    /// Returns the question that an op asks. `base` is its name without a namespace.
    pub(super) fn for_op(base: &str) -> Option<Self> {
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
            "gt" | "ge" => Self::Order(true),
            "lt" | "le" => Self::Order(false),
            "max" | "amax" => Self::Extreme(true),
            "min" | "amin" => Self::Extreme(false),
            _ => return None,
        })
    }
}

/// The known or expected flags of a tensor before an op.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Flags {
    /// The value of all flags, if they are the same.
    expected: Option<bool>,
    /// True if all flags are known and the same.
    is_known: bool,
    /// Whether a flag is known to be true (index 0), and whether a flag is known to be false (index 1).
    has: [bool; 2],
}

impl Flags {
    /// Returns the flags of a tensor. An integer counts as a flag that is true if the integer is not 0.
    pub(super) fn from_tensor(memory: &TensorMemory) -> Self {
        if !memory.is_whole() || !memory.is_small() || memory.count() == 0 {
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
        // `torch.equal` tests for equality and reduces the flags in one op, so only the kernels show the
        // test.
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

/// Answers the question of an op that has ended and whose inputs are not all known, and writes the answer to
/// its output.
pub(super) fn answer(
    question: Question,
    inputs: &[Flags],
    relation: Option<Relation>,
    output: &TensorMemory,
) {
    if !output.is_small() || output.count() == 0 {
        return;
    }
    if output.dtype != BOOL {
        // A bitwise "and" with zeros is zero.
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
    let question = match question {
        // The minimum of flags is "all" and the maximum is "any", as in the checks of torch.distributions.
        Question::Extreme(is_maximum) if inputs.len() == 1 && first.expected.is_none() => {
            if is_maximum {
                Question::Any
            } else {
                Question::All
            }
        }
        question => question,
    };
    // The tuple holds the answer, whether it is certain, and whether it is about
    // values that nothing computed.
    let (flag, is_certain, is_answer) = match question {
        Question::Kind(flag) => (flag, true, false),
        Question::Equality(is_equal) if relation == Some(Relation::Form) => (is_equal, true, true),
        Question::Equality(is_equal) => (!is_equal, false, true),
        Question::All => (!first.has[1] && first.expected.unwrap_or(true), true, !first.has[1]),
        Question::Any => (first.has[0] || first.expected.unwrap_or(false), true, !first.has[0]),
        Question::Not | Question::Extreme(_) => match first.expected {
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
        Question::Order(is_greater) => match relation {
            Some(Relation::Greater) => (is_greater, true, true),
            Some(Relation::Less) => (!is_greater, true, true),
            _ => return,
        },
    };
    if !is_certain {
        if output.known_elements().is_none() {
            device.values().expect(output.data, output.span(), flag);
        }
        return;
    }
    // The output has an answer already if a reduction was recognized by the name of its kernel, or if two
    // tensors were compared.
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

/// The relation of the first input of an op to the second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Relation {
    Greater,
    Less,
    /// One input is the other, or a form of it that a program checks for, such as its triangle or floor.
    Form,
}

/// A result of an op that is related to its inputs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Related {
    result: usize,
    inputs: [usize; 2],
    /// The relation of the result to an input.
    relation: Relation,
}

thread_local! {
    /// The result of the thread's last op.
    static LAST: Cell<Option<Related>> = const { Cell::new(None) };
}

impl Related {
    /// Returns the last op's result if it is related to its inputs. Resets the stored result,
    /// because another op begins.
    pub(super) fn take_last() -> Option<Self> {
        LAST.try_with(Cell::take).ok().flatten()
    }

    /// Returns true if the result of an op of this name is related to its inputs.
    pub(super) fn is_made_by(base: &str) -> bool {
        matches!(base, "add" | "sub" | "tril" | "triu" | "floor" | "ceil" | "round" | "trunc")
    }

    /// Records that the op `base` has created `result` from these inputs.
    pub(super) fn note(base: &str, inputs: &[usize], result: usize) {
        let first = inputs.first().copied().unwrap_or_default();
        let (second, relation) = match base {
            "add" => (inputs.get(1).copied().unwrap_or(first), Relation::Greater),
            "sub" => (first, Relation::Less),
            "tril" | "triu" | "floor" | "ceil" | "round" | "trunc" => (first, Relation::Form),
            _ => return,
        };
        let _ = LAST.try_with(|last| last.set(Some(Self { result, inputs: [first, second], relation })));
    }

    /// Returns the relation of the first of two inputs to the second, if one is this result and the other was
    /// an input of it.
    pub(super) fn between(self, inputs: &[usize]) -> Option<Relation> {
        let &[first, second] = inputs else { return None };
        let is = |result: usize, input: usize| self.result == result && self.inputs.contains(&input);
        match (is(first, second), is(second, first), self.relation) {
            (true, false, relation) => Some(relation),
            (false, true, Relation::Greater) => Some(Relation::Less),
            (false, true, Relation::Less) => Some(Relation::Greater),
            (false, true, Relation::Form) => Some(Relation::Form),
            _ => None,
        }
    }
}
