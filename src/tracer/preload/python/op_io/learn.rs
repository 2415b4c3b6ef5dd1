//! Learns [`Layout`] from objects that are known: the tracer (`tracer/known_objects.py`) makes two tensors,
//! passes the addresses of their parts, and runs ops on them whose inputs and schemas are known.
//!
//! Until all findings agree, no offset is trusted, so memory is read through [`GuardedMemory`].

use std::cell::RefCell;
use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicU8, Ordering};

use memtrace_record::per_thread::PerThread;
use memtrace_trace::Api;

use super::layout::{ALIAS, ARGUMENT, CPU, DEVICE, IS_OUT, IS_WRITE, LAYOUT, LIST, Layout, MOST};
use crate::attribution::autograd_seq;
use crate::ffi::guarded_memory::GuardedMemory;
use crate::runtime::thread::running_ops::NameOf;

/// The state of learning.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum State {
    /// Learning has not finished, or was never tried.
    Waiting = 0,
    /// The layout is known.
    Known = 1,
    /// The layout could not be learned.
    Failed = 2,
}

static STATE: AtomicU8 = AtomicU8::new(State::Waiting as u8);

/// The warning that is logged if learning fails.
pub(crate) const LOST: &str = "MEMTRACE_OPS=io could not learn torch's layout: reads and writes of ops are \
                               not recorded, as with MEMTRACE_OPS=all";

/// Returns the state of learning.
pub(crate) fn state() -> State {
    match STATE.load(Ordering::Acquire) {
        1 => State::Known,
        2 => State::Failed,
        _ => State::Waiting,
    }
}

/// A known tensor: the addresses of the `TensorImpl`, of the `StorageImpl` and of the data, and the size in
/// bytes.
#[derive(Clone, Copy)]
pub(crate) struct KnownTensor {
    pub(crate) tensor: usize,
    pub(crate) storage: usize,
    pub(crate) data: usize,
    pub(crate) bytes: usize,
}

/// The findings from the ops on known tensors.
struct Findings {
    memory: GuardedMemory,
    tensors: Vec<KnownTensor>,
    /// The value of [`Layout::string`], once it was found.
    string: Option<usize>,
    tensor_tag: Option<u32>,
    list_tag: Option<u32>,
    /// True once an op `add_` was seen whose schema writes its first argument.
    add: bool,
    /// True once an op `view` was seen whose schema writes no argument.
    view: bool,
    /// True once an op `add(out=)` was seen whose schema writes its last argument.
    out: bool,
}

/// The findings of this thread while the tracer runs its ops on the thread; otherwise `None`.
static FINDINGS: PerThread<RefCell<Option<Findings>>> = PerThread::new(|| RefCell::new(None));

/// Adds a tensor that the tracer has made on this thread. The ops that the tracer runs next have this tensor
/// as an input.
pub(crate) fn add_tensor(known: KnownTensor) {
    let _ = FINDINGS.with(|findings| {
        let Ok(mut findings) = findings.try_borrow_mut() else { return };
        if findings.is_none() {
            *findings = GuardedMemory::open().map(Findings::new);
        }
        if let Some(findings) = findings.as_mut() {
            findings.tensors.push(known);
        }
    });
}

/// Learns from an op that starts on this thread while the layout is unknown. Has no effect outside the
/// tracer's ops.
///
/// # Safety
/// `record` is a live `RecordFunction`, and `name_of` gives its name.
#[cold]
pub(super) unsafe fn observe(record: *const c_void, name_of: NameOf) {
    let _ = FINDINGS.with(|findings| {
        let Ok(mut findings) = findings.try_borrow_mut() else { return };
        if let Some(findings) = findings.as_mut()
            && let Some(number) = autograd_seq::place()
        {
            // SAFETY: by the contract; the name is a C string that lives as long as the record, or null.
            unsafe {
                let name = name_of(record);
                if !name.is_null() {
                    findings.look(record as usize + number * 8, CStr::from_ptr(name));
                }
            }
        }
    });
}

/// Ends learning. Returns true if the layout is known, false if op io stays off.
pub(crate) fn finish() -> bool {
    let findings = FINDINGS.with(|findings| findings.try_borrow_mut().ok()?.take()).flatten();
    let layout = findings.as_ref().and_then(Findings::layout);
    if let Some(layout) = layout {
        let _ = LAYOUT.set(layout);
    }
    let state = if layout.is_some() { State::Known } else { State::Failed };
    STATE.store(state as u8, Ordering::Release);
    layout.is_some()
}

impl Findings {
    fn new(memory: GuardedMemory) -> Findings {
        Findings {
            memory,
            tensors: Vec::new(),
            string: None,
            tensor_tag: None,
            list_tag: None,
            add: false,
            view: false,
            out: false,
        }
    }

    /// Compares an op of the tracer with its known inputs and schema. `number` is the address of the sequence
    /// number in the op's record.
    fn look(&mut self, number: usize, name: &CStr) {
        let [a, b, ..] = self.tensors.as_slice() else { return };
        let (a, b) = (*a, *b);
        let Some(inputs) = self.inputs(number) else { return };
        let (first, tag) = inputs.first().copied().unwrap_or_default();
        let name_address = name.as_ptr() as usize;
        match name.to_bytes() {
            b"aten::add_" if inputs.len() == 3 && first == a.tensor && inputs[1] == (b.tensor, tag) => {
                self.tensor_tag = Some(tag);
                if let Some((string, schema)) = self.schema(number, name_address) {
                    self.string = Some(string);
                    self.add = self.uses(schema, string) == Some(vec![Api::ReadWrite, Api::Read, Api::Read]);
                }
            }
            b"aten::view" if first == a.tensor => {
                self.view = self.uses_of_op(number, name_address) == Some(vec![Api::Read, Api::Read]);
            }
            b"aten::add" if inputs.len() == 4 && first == a.tensor => {
                let expected = vec![Api::Read, Api::Read, Api::Read, Api::Write];
                self.out = self.uses_of_op(number, name_address) == Some(expected);
            }
            b"aten::cat" if inputs.len() == 2 => {
                let (begin, end) = (
                    self.memory.word(first.wrapping_add(LIST)),
                    self.memory.word(first.wrapping_add(LIST + 8)),
                );
                let members = self.values(begin, end);
                let expected = [a.tensor, b.tensor];
                if members.is_some_and(|members| members.iter().map(|value| value.0).eq(expected)) {
                    self.list_tag = Some(tag);
                }
            }
            _ => {}
        }
    }

    /// Returns the layout if all its fields were found.
    fn layout(&self) -> Option<Layout> {
        let [a, b, ..] = self.tensors.as_slice() else { return None };
        if !(self.add && self.view && self.out) {
            return None;
        }
        let place = |of: fn(&KnownTensor) -> (usize, usize)| {
            (1..16).map(|index| index * 8).find(|offset| {
                [a, b].into_iter().all(|known| {
                    let (object, value) = of(known);
                    self.memory.word(object + offset) == Some(value)
                })
            })
        };
        let storage = place(|known| (known.tensor, known.storage))?;
        let data = place(|known| (known.storage, known.data))?;
        let bytes = place(|known| (known.storage, known.bytes))?;
        // Both tensors are on the CPU, where the device index is 0 or -1 (unset).
        let device = a.storage + data + DEVICE;
        let is_cpu =
            self.memory.byte(device)? == CPU && matches!(self.memory.byte(device + 1)? as i8, -1 | 0);
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

    /// Returns the payloads and tags of the inputs of the record whose sequence number is at the address
    /// `number`.
    fn inputs(&self, number: usize) -> Option<Vec<(usize, u32)>> {
        let (begin, count) = (self.memory.word(number + 8)?, self.memory.word(number + 16)?);
        if count > MOST {
            return None;
        }
        self.values(Some(begin), begin.checked_add(count * 16))
    }

    /// Returns the payloads and tags of the `IValue`s between two addresses.
    fn values(&self, begin: Option<usize>, end: Option<usize>) -> Option<Vec<(usize, u32)>> {
        let (begin, end) = (begin?, end?);
        let count = end.checked_sub(begin)? / 16;
        if count > 64 {
            return None;
        }
        (0..count)
            .map(|index| {
                let [payload, tag] = self.memory.words(begin + index * 16)?;
                Some((payload, tag as u32))
            })
            .collect()
    }

    /// Returns the size of torch's string type and the address of an op's schema. The position of the
    /// schema's address in the record depends on that size. Until the size is known, the positions for both
    /// possible sizes are tried. The right one leads to a schema whose name is the op's own.
    fn schema(&self, number: usize, name: usize) -> Option<(usize, usize)> {
        if let Some(string) = self.string {
            return Some((string, self.memory.word(number - 8 - string)?));
        }
        [32, 8].into_iter().find_map(|string| {
            let schema = self.memory.word(number - 8 - string)?;
            let is_reference = self.memory.byte(number - 8)? == 1;
            (is_reference && self.memory.word(schema) == Some(name)).then_some((string, schema))
        })
    }

    fn uses_of_op(&self, number: usize, name: usize) -> Option<Vec<Api>> {
        let (string, schema) = self.schema(number, name)?;
        self.uses(schema, string)
    }

    /// Returns how an op uses each argument, according to its schema. This is [`Layout::uses`] with guarded
    /// reads.
    fn uses(&self, schema: usize, string: usize) -> Option<Vec<Api>> {
        let (begin, end) =
            (self.memory.word(schema + 2 * string)?, self.memory.word(schema + 2 * string + 8)?);
        let length = string + ARGUMENT;
        let whole = end.checked_sub(begin)?;
        if whole > 64 * length || !whole.is_multiple_of(length) {
            return None;
        }
        (0..whole / length)
            .map(|index| {
                let argument = begin + index * length + string;
                let alias = self.memory.word(argument + ALIAS)?;
                if alias == 0 || self.memory.byte(alias.wrapping_add(IS_WRITE))? == 0 {
                    return Some(Api::Read);
                }
                Some(if self.memory.byte(argument + IS_OUT)? != 0 { Api::Write } else { Api::ReadWrite })
            })
            .collect()
    }
}
