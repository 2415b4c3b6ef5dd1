//! The storages of tensors that autograd's nodes have saved.
//!
//! A node's attribute `_saved_self` is unsuitable: it runs the program's unpack hooks, recomputes
//! checkpointed forwards, and raises if a tensor was changed. The object in `_raw_saved_self` (a
//! `SavedTensor`) does none of this, and its fields are read directly from memory. The offsets of the fields
//! are learned from a node whose tensor is known. A tensor that a hook of the program has packed has no
//! storage here.

use std::sync::OnceLock;

use crate::ffi::cpython::{Arguments, Owned};
use crate::ffi::guarded_memory::GuardedMemory;

/// The offsets, in words of 8 bytes, of three pointers: from torch's `SavedVariable` to its tensor, from the
/// tensor to its storage, and from the storage to its data.
#[derive(Clone, Copy, Debug)]
struct VariableLayout {
    tensor: usize,
    storage: usize,
    data: usize,
}

static LAYOUT: OnceLock<VariableLayout> = OnceLock::new();

/// The index of the word of a pybind11 object that points to its C++ value. The word follows the object's
/// head.
const VALUE_WORD: usize = 2;
/// The number of words that are searched in each object.
const WORDS: usize = 24;

/// `learn_saved_tensor(saved, tensor, storage, data) -> bool`: learns the offsets from a `SavedTensor` and
/// the addresses of its tensor, its storage and its data. Returns true if the offsets are known.
pub(crate) fn learn_saved_tensor(arguments: Arguments<'_>) -> bool {
    if LAYOUT.get().is_some() {
        return true;
    }
    let Some(memory) = GuardedMemory::open() else { return false };
    let [tensor, storage, data] = [1, 2, 3].map(|index| arguments.size(index));
    let find = |address: usize, wanted: usize| {
        (0..WORDS).find(|word| memory.word(address + word * 8) == Some(wanted))
    };
    let learned = || {
        let value = memory.word(arguments.id(0) + VALUE_WORD * 8)?;
        Some(VariableLayout {
            tensor: find(value, tensor)?,
            storage: find(tensor, storage)?,
            data: find(storage, data)?,
        })
    };
    learned().is_some_and(|layout| LAYOUT.set(layout).is_ok())
}

/// `saved_storages(saved, ...) -> list`: returns the data address of each `SavedTensor` that has data.
pub(crate) fn saved_storages(arguments: Arguments<'_>) -> Option<Owned> {
    let gil = arguments.gil;
    let list = gil.new_list()?;
    let memory = LAYOUT.get().and_then(|_| GuardedMemory::open());
    let (Some(layout), Some(memory)) = (LAYOUT.get(), memory) else { return Some(list) };
    for index in 0..arguments.len() {
        let step = |address: usize, word: usize| memory.word(address + word * 8).filter(|word| *word != 0);
        let found = || {
            let tensor = step(step(arguments.id(index), VALUE_WORD)?, layout.tensor)?;
            step(step(tensor, layout.storage)?, layout.data)
        };
        if let Some(data) = found()
            && !list.get().append(gil.integer(data as i64)?.get())
        {
            return None;
        }
    }
    Some(list)
}
