//! Reads PyTorch's schemas of ops (`c10::FunctionSchema`) from memory: which arguments an op writes.
//!
//! No exported function gives this, so the code below uses the offsets of the versions that [`ops`](crate::ops) names.
//! They are checked once, with three ops whose answers are known.

use std::sync::OnceLock;

use crate::ops::cxx;
use crate::ops::torch::{Operator, Torch};

/// The ops by which the layout is checked, each with its overload and the arguments that it writes.
const KNOWN: [(&[u8], &[u8], &[bool]); 3] = [
    (b"aten::add_", b"Tensor", &[true, false, false]),
    (b"aten::view", b"", &[false, false]),
    (b"aten::add", b"out", &[false, false, false, true]),
];

/// Returns true if schemas have the layout that this file reads. If not, no op is followed, and the memory that
/// ops write becomes unknown.
pub(super) fn is_known(torch: &Torch) -> bool {
    static IS_KNOWN: OnceLock<bool> = OnceLock::new();
    *IS_KNOWN.get_or_init(|| {
        KNOWN.iter().all(|(name, overload, expected)| {
            // SAFETY: the dispatcher returned the handle. The words that are read are inside the entry, or
            // behind addresses that a schema with this name has.
            unsafe { find(torch, name, overload) }.is_some_and(|(_, writes)| writes == *expected)
        })
    })
}

/// Returns the op with this name and overload, and for each of its arguments whether the op writes it.
///
/// # Safety
/// The dispatcher's handles have the layout of [`Operator`].
pub(super) unsafe fn find(torch: &Torch, name: &[u8], overload: &[u8]) -> Option<(Operator, Vec<bool>)> {
    let operator = torch.find(name, overload)?;
    // An entry of the dispatcher begins with its name and overload; its schema, with the same two strings,
    // follows.
    let (entry, size) = (operator[0], torch.string_size());
    // SAFETY: by the contract; an entry is larger than a schema.
    unsafe {
        let is = |string: usize, wanted: &[u8]| cxx::text(string) == wanted;
        let schema = entry + 2 * size;
        let is_schema = is(entry, name)
            && *(schema as *const usize) > 0xFFFF
            && is(schema, name)
            && is(schema + size, overload);
        is_schema.then(|| (operator, writes(torch, schema)))
    }
}

/// Returns for each argument of an op whether the op writes it.
///
/// # Safety
/// `schema` is the address of a live `FunctionSchema`.
pub(super) unsafe fn writes(torch: &Torch, schema: usize) -> Vec<bool> {
    /// The offset of the alias in an `Argument`, after its name, two types, a number and a default.
    const ALIAS: usize = 64;
    /// The size of an `Argument` without its name.
    const ARGUMENT: usize = 80;
    /// The offset of `AliasInfo::isWrite_`, after two sets and a vector.
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
