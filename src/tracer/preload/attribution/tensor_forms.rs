//! The type and shape of a tensor whose memory is allocated now: the column `dtype` and the column `shape` of
//! its block.
//!
//! torch makes nearly every CUDA tensor in `at::detail::empty_generic` or `empty_strided_generic`, which ask
//! the allocator for the memory. Their hooks ([`crate::hooks::torch::empty_tensors`]) note the arguments here,
//! and the report of the block takes the note. Other memory (workspaces, storages that are resized) has none.

use std::collections::HashMap;
use std::ffi::c_void;

use memtrace_record::intern::TextId;
use memtrace_record::recorder::text_id;
use memtrace_trace::form::{MAX_DIMS, SCALAR_TYPES};
use memtrace_trace::text::UNKNOWN;
use rustc_hash::{FxBuildHasher, FxHashMap};

use crate::attribution::{detail, requested_sizes};
use crate::guard::shielded;
use crate::runtime::fork::ForkSafe;
use crate::runtime::thread::known_forms::{FormKey, WITHOUT_SHAPE};
use crate::runtime::thread::{self, ThreadState};

/// The bytes from which on a tensor's form is noted. The blocks that make a peak are larger.
const LEAST_BYTES: i64 = 1 << 20;
/// The number of forms whose shape gets a text. Lengths that vary would need a text each, and texts are limited.
const MOST_FORMS: usize = 1 << 13;

/// The text of each form that any thread has used.
static FORMS: ForkSafe<FxHashMap<FormKey, TextId>> = ForkSafe::new(HashMap::with_hasher(FxBuildHasher));

/// The arguments of the function that makes a tensor.
#[derive(Clone, Copy)]
pub(crate) struct Asked<'a> {
    /// `c10::ScalarType`.
    pub(crate) dtype: i8,
    pub(crate) sizes: &'a [i64],
    /// One for each size; `None` if the tensor is contiguous in some order.
    pub(crate) strides: Option<&'a [i64]>,
}

impl Asked<'_> {
    /// Returns the key of the form, or `None` if the tensor is small or its type is unknown.
    #[inline]
    fn key(self) -> Option<FormKey> {
        let index = usize::try_from(self.dtype).ok()?;
        let &(_, item) = SCALAR_TYPES.get(index)?;
        let mut bytes = item;
        let mut whole = 0_i64;
        // torch refuses negative sizes and strides after the hook.
        let is_negative = |values: &[i64]| values.iter().any(|value| *value < 0);
        if is_negative(self.sizes) || self.strides.is_some_and(is_negative) {
            return None;
        }
        for (index, size) in self.sizes.iter().enumerate() {
            bytes = bytes.checked_mul(*size)?;
            if let Some(strides) = self.strides {
                whole = whole.checked_add(size.checked_sub(1)?.checked_mul(strides[index])?)?;
            }
        }
        let memory = match self.strides {
            Some(_) => whole.checked_add(1)?.checked_mul(item)?,
            None => bytes,
        };
        if item == 0 || bytes <= 0 || memory < LEAST_BYTES {
            return None;
        }
        let mut key = FormKey { dtype: self.dtype as u8 + 1, dims: WITHOUT_SHAPE, ..FormKey::default() };
        if memory == bytes && self.sizes.len() <= MAX_DIMS {
            key.dims = self.sizes.len() as u8;
            key.sizes[..self.sizes.len()].copy_from_slice(self.sizes);
        }
        Some(key)
    }
}

/// Notes the form of the tensor that the thread is about to make with `allocator`, if this is torch's CUDA
/// allocator and the tensor is large enough.
#[inline]
pub(crate) fn note(allocator: *const c_void, asked: Asked<'_>) {
    if !requested_sizes::is_hooked(allocator) {
        return;
    }
    let key = if detail::is_on() { asked.key() } else { None };
    // A note without an allocation, after an error of torch, does not stay for the next tensor.
    shielded(|| {
        thread::with(|state| {
            let known = |key: FormKey| state.forms.borrow_mut().get(&key, || intern(key));
            state.form.set(key.map_or(0, known));
        })
    });
}

/// Returns the text id of the form of the block that is reported now; 0 if unknown or too large for an event.
#[inline]
pub(crate) fn of_block(state: &ThreadState) -> u16 {
    u16::try_from(state.form.get()).unwrap_or(0)
}

/// Returns the text id of a form that the thread has not used yet. Beyond the limit, the text has no shape.
#[cold]
fn intern(key: FormKey) -> TextId {
    FORMS.with(|forms| {
        if let Some(id) = forms.get(&key) {
            return *id;
        }
        let key = if forms.len() < MOST_FORMS { key } else { FormKey { dims: WITHOUT_SHAPE, ..key } };
        let id = text_id(&text_of(key));
        if forms.len() < MOST_FORMS {
            forms.insert(key, id);
        }
        id
    })
}

/// Returns the text of a form, such as `bfloat16 [8x1024]`.
fn text_of(key: FormKey) -> String {
    let dtype = usize::from(key.dtype).checked_sub(1).and_then(|index| SCALAR_TYPES.get(index));
    let dtype = dtype.map_or(UNKNOWN, |(name, _)| name);
    match key.sizes.get(..usize::from(key.dims)) {
        Some(sizes) => {
            let sizes: Vec<String> = sizes.iter().map(i64::to_string).collect();
            format!("{dtype} [{}]", sizes.join("x"))
        }
        None => format!("{dtype} {UNKNOWN}"),
    }
}
