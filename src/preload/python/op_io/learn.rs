//! Learns [`Layout`] from objects that are known: `hooks.py` makes two tensors, says where they and their
//! storages are, and runs ops on them whose inputs and schemas are known.
//!
//! Until everything agrees nothing is trusted: an address is read through a pipe, which answers with an
//! error where the program would end.

use std::cell::RefCell;
use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicU8, Ordering};

use memtrace_trace::Api;

use super::layout::{ALIAS, ARGUMENT, CPU, DEVICE, IS_OUT, IS_WRITE, LAYOUT, LIST, Layout, MOST};
use crate::attribution::autograd_seq;
use crate::runtime::thread::running_ops::NameOf;

/// How far learning is.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum State {
    /// Nothing was tried.
    Waiting = 0,
    /// The layout is known.
    Known = 1,
    /// It could not be learned.
    Failed = 2,
}

static STATE: AtomicU8 = AtomicU8::new(State::Waiting as u8);

/// What is lost when it fails.
pub(crate) const LOST: &str = "MEMTRACE_OPS=io could not learn torch's layout: what ops read and write has no rows, ops have those of MEMTRACE_OPS=all";

/// How far it is.
pub(crate) fn state() -> State {
    match STATE.load(Ordering::Acquire) {
        1 => State::Known,
        2 => State::Failed,
        _ => State::Waiting,
    }
}

/// A known tensor: addresses of the `TensorImpl`, the `StorageImpl` and the memory, and its bytes.
#[derive(Clone, Copy)]
pub(crate) struct Known {
    pub(crate) tensor: usize,
    pub(crate) storage: usize,
    pub(crate) data: usize,
    pub(crate) bytes: usize,
}

/// What is found of the ops that are watched.
#[derive(Default)]
struct Watch {
    tensors: Vec<Known>,
    string: Option<usize>,
    tensor_tag: Option<u32>,
    list_tag: Option<u32>,
    /// `add_` writes its first argument, `view` does not, `add(out=)` writes its last.
    add: bool,
    view: bool,
    out: bool,
}

thread_local! {
    static WATCH: RefCell<Option<Watch>> = const { RefCell::new(None) };
}

/// A word at any address; `None` when there is none.
fn word(address: usize) -> Option<usize> {
    let mut ends = [0; 2];
    // SAFETY: a place for two descriptors.
    if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK) } != 0 {
        return None;
    }
    let mut found = 0usize;
    // SAFETY: the kernel reads the address for us and says EFAULT where nothing is; the answer has room.
    let whole = unsafe {
        libc::write(ends[1], address as *const c_void, 8) == 8
            && libc::read(ends[0], (&raw mut found).cast(), 8) == 8
    };
    // SAFETY: both are ours.
    unsafe {
        libc::close(ends[0]);
        libc::close(ends[1]);
    }
    whole.then_some(found)
}

/// The word at `address`, which is one of an array's.
fn word_of(address: usize, index: usize) -> Option<usize> {
    word(address.checked_add(index * 8)?)
}

/// A byte at any address.
fn byte(address: usize) -> Option<u8> {
    Some((word(address & !7)? >> (address % 8 * 8)) as u8)
}

/// `hooks.py` made this tensor on this thread: the ops that follow are about it.
pub(crate) fn tensor(known: Known) {
    let _ = WATCH.try_with(|watch| {
        if let Ok(mut watch) = watch.try_borrow_mut() {
            watch.get_or_insert_default().tensors.push(known);
        }
    });
}

/// An op starts on this thread.
#[cold]
pub(super) fn watch(record: *const c_void, name_of: NameOf) {
    let _ = WATCH.try_with(|watch| {
        let Ok(mut watch) = watch.try_borrow_mut() else { return };
        if let Some(watch) = watch.as_mut()
            && let Some(number) = autograd_seq::place()
        {
            watch.look(record, number, name_of);
        }
    });
}

/// The ops are over: everything was found, or io records are off.
pub(crate) fn finish() -> bool {
    let watch = WATCH.try_with(|watch| watch.try_borrow_mut().ok()?.take()).ok().flatten();
    let layout = watch.as_ref().and_then(Watch::layout);
    if let Some(layout) = layout {
        let _ = LAYOUT.set(layout);
    }
    let state = if layout.is_some() { State::Known } else { State::Failed };
    STATE.store(state as u8, Ordering::Release);
    layout.is_some()
}

impl Watch {
    fn look(&mut self, record: *const c_void, number: usize, name_of: NameOf) {
        let [a, b, ..] = self.tensors.as_slice() else { return };
        let (a, b) = (*a, *b);
        // SAFETY: the op starts, so its record is alive and has a name.
        let name = unsafe { name_of(record) };
        if name.is_null() {
            return;
        }
        // SAFETY: a C string that lives as long as the record.
        let text = unsafe { CStr::from_ptr(name) }.to_bytes();
        let number = record as usize + number * 8;
        let Some(inputs) = inputs(number) else { return };
        let (first, tag) = inputs.first().copied().unwrap_or_default();
        let schema = || {
            self.string.map_or_else(|| schema(number, name as usize), |s| Some((s, word(number - 8 - s)?)))
        };
        match text {
            b"aten::add_" if inputs.len() == 3 && first == a.tensor && inputs[1] == (b.tensor, tag) => {
                self.tensor_tag = Some(tag);
                if let Some((string, schema)) = schema() {
                    self.string = Some(string);
                    self.add = uses(schema, string)
                        .is_some_and(|uses| uses == [Api::ReadWrite, Api::Read, Api::Read]);
                }
            }
            b"aten::view" if first == a.tensor => {
                let uses = schema().and_then(|(string, schema)| uses(schema, string));
                self.view = uses.is_some_and(|uses| uses == [Api::Read, Api::Read]);
            }
            b"aten::add" if inputs.len() == 4 && first == a.tensor => {
                let uses = schema().and_then(|(string, schema)| uses(schema, string));
                self.out = uses.is_some_and(|uses| uses == [Api::Read, Api::Read, Api::Read, Api::Write]);
            }
            b"aten::cat" if inputs.len() == 2 => {
                let members = values(word(first + LIST), word(first + LIST + 8));
                let expected = [a.tensor, b.tensor];
                if members.is_some_and(|members| members.iter().map(|value| value.0).eq(expected)) {
                    self.list_tag = Some(tag);
                }
            }
            _ => {}
        }
    }

    /// The layout, when all of it was found.
    fn layout(&self) -> Option<Layout> {
        let [a, b, ..] = self.tensors.as_slice() else { return None };
        if !(self.add && self.view && self.out) {
            return None;
        }
        let place = |of: fn(&Known) -> (usize, usize)| {
            (1..16).map(|index| index * 8).find(|offset| {
                [a, b].into_iter().all(|known| {
                    let (object, value) = of(known);
                    word(object + offset) == Some(value)
                })
            })
        };
        let storage = place(|known| (known.tensor, known.storage))?;
        let data = place(|known| (known.storage, known.data))?;
        let bytes = place(|known| (known.storage, known.bytes))?;
        // Both are CPU tensors, whose index is 0 or none.
        let device = a.storage + data + DEVICE;
        let is_cpu = byte(device)? == CPU && matches!(byte(device + 1)? as i8, -1 | 0);
        let (tensor_tag, list_tag) = (self.tensor_tag?, self.list_tag?);
        (is_cpu && tensor_tag != list_tag).then_some(Layout {
            number: autograd_seq::place()?,
            string: self.string?,
            tags: (tensor_tag, list_tag),
            storage,
            data,
            bytes,
        })
    }
}

/// The inputs of the record whose number is at `number`: payloads and tags.
fn inputs(number: usize) -> Option<Vec<(usize, u32)>> {
    let (begin, count) = (word_of(number, 1)?, word_of(number, 2)?);
    if count > MOST {
        return None;
    }
    values(Some(begin), begin.checked_add(count * 16))
}

/// The `IValue`s between two addresses.
fn values(begin: Option<usize>, end: Option<usize>) -> Option<Vec<(usize, u32)>> {
    let (begin, end) = (begin?, end?);
    let count = end.checked_sub(begin)? / 16;
    if count > 64 {
        return None;
    }
    (0..count)
        .map(|index| Some((word_of(begin, index * 2)?, word_of(begin, index * 2 + 1)? as u32)))
        .collect()
}

/// The length of torch's strings, and the schema of an op: the one of two places whose schema has the op's
/// own name.
fn schema(number: usize, name: usize) -> Option<(usize, usize)> {
    [32, 8].into_iter().find_map(|string| {
        let schema = word(number - 8 - string)?;
        let is_reference = byte(number - 8)? == 1;
        (is_reference && word(schema) == Some(name)).then_some((string, schema))
    })
}

/// How a schema uses its arguments, by guarded reads.
fn uses(schema: usize, string: usize) -> Option<Vec<Api>> {
    let (begin, end) = (word(schema + 2 * string)?, word(schema + 2 * string + 8)?);
    let length = string + ARGUMENT;
    let whole = end.checked_sub(begin)?;
    if whole > 64 * length || !whole.is_multiple_of(length) {
        return None;
    }
    (0..whole / length)
        .map(|index| {
            let argument = begin + index * length + string;
            let alias = word(argument + ALIAS)?;
            if alias == 0 || byte(alias + IS_WRITE)? == 0 {
                return Some(Api::Read);
            }
            Some(if byte(argument + IS_OUT)? != 0 { Api::Write } else { Api::ReadWrite })
        })
        .collect()
}
