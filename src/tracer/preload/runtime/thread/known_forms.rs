//! The types and shapes of tensors that a thread has used, with the ids of their texts.

use memtrace_record::intern::TextId;
use memtrace_trace::form::MAX_DIMS;

use crate::runtime::cache::Cache;

/// A type and a shape.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) struct FormKey {
    /// The number of the type, plus 1; 0 in an empty slot of the cache.
    pub(crate) dtype: u8,
    /// The number of sizes, or [`WITHOUT_SHAPE`].
    pub(crate) dims: u8,
    pub(crate) sizes: [i64; MAX_DIMS],
}

/// The value of `dims` if the tensor's values do not fill its memory.
pub(crate) const WITHOUT_SHAPE: u8 = u8::MAX;

/// The texts of forms that a thread has used.
pub(crate) type KnownForms = Cache<FormKey, TextId>;
