//! The values of a frame's local variables.
//!
//! `frame.f_locals` is unsuitable: up to Python 3.12, it creates a dict that the frame keeps. The dict keeps
//! every value alive, even after the program has assigned another value to the variable. So the values are
//! read directly from the frame. Their offsets differ between versions of Python (3.10 to 3.15) and are
//! learned from a frame whose values are known.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::ffi::cpython::{Arguments, Owned, RawObject};
use crate::ffi::guarded_memory::GuardedMemory;

/// In Python 3.11 and later, the values are in the interpreter's frame, to which the word with this index in
/// the frame object points. 0 if the values are in the frame object itself.
static THROUGH: AtomicUsize = AtomicUsize::new(0);
/// The index of the word at which the values begin; 0 while it is unknown.
static VALUES: AtomicUsize = AtomicUsize::new(0);

/// The index of the word `_frame.f_frame`, which follows the object's head and `f_back`.
const FRAME_WORD: usize = 3;
/// The number of words of a frame that are searched.
const WORDS: usize = 48;
/// The tag bits of a value. Since Python 3.14, they show how references to the value are counted.
const TAG: usize = 3;
/// The tag of a small integer. Such a value is not a pointer to an object, and is reported as `None`.
const INTEGER: usize = 3;

/// `learn_frame_values(frame, first, second, third) -> bool`: learns the offsets from a running frame whose
/// first three variables have these values.
pub(crate) fn learn_frame_values(arguments: Arguments<'_>) -> bool {
    let Some(memory) = GuardedMemory::open() else { return false };
    let (frame, known) = (arguments.id(0), [1, 2, 3].map(|index| arguments.id(index)));
    let find = |address: usize| {
        let words: Vec<usize> = (0..WORDS).map_while(|word| memory.word(address + word * 8)).collect();
        words.windows(3).position(|window| window.iter().zip(known).all(|(word, id)| word & !TAG == id))
    };
    let inside = memory.word(frame + FRAME_WORD * 8).and_then(&find);
    let (through, values) = match inside {
        Some(values) => (FRAME_WORD, Some(values)),
        None => (0, find(frame)),
    };
    THROUGH.store(through, Ordering::Relaxed);
    VALUES.store(values.unwrap_or(0), Ordering::Release);
    values.is_some_and(|values| values > 0)
}

/// `frame_values(frame, count) -> list`: returns the values of the first `count` variables of a frame, with
/// `None` for a variable without a value. Returns an empty list if the values cannot be read.
pub(crate) fn frame_values(arguments: Arguments<'_>) -> Option<Owned> {
    let gil = arguments.gil;
    let list = gil.new_list()?;
    let (values, through) = (VALUES.load(Ordering::Acquire), THROUGH.load(Ordering::Relaxed));
    let memory = (values != 0).then(GuardedMemory::open).flatten();
    let start = memory.as_ref().and_then(|memory| match through {
        0 => Some(arguments.id(0)),
        word => memory.word(arguments.id(0) + word * 8),
    });
    let (Some(memory), Some(start)) = (memory, start) else { return Some(list) };
    for index in 0..arguments.size(1) {
        let Some(word) = memory.word(start + (values + index) * 8) else { break };
        let raw = if word & TAG == INTEGER { 0 } else { word & !TAG };
        // SAFETY: the layout was learned from this interpreter. While the GIL is held, no frame changes and
        // the values of a frame are alive.
        let value = unsafe { gil.borrowed(raw as RawObject) };
        if !list.get().append(value.unwrap_or_else(|| gil.none())) {
            return None;
        }
    }
    Some(list)
}
