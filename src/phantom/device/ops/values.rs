//! Arguments of ops (`c10::IValue`): read at an op's start, and made anew for the second run.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::ops::samples;
use crate::ops::tensor::{Place, TensorMemory, place_of};
use crate::ops::torch::{Tag, Torch};

/// A `c10::IValue`: its payload and its tag.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct Value {
    pub(super) payload: usize,
    pub(super) tag: u32,
    padding: u32,
}

const _: () = assert!(size_of::<Value>() == 16);

/// `c10::DeviceType::CUDA`, and a payload for the host.
const CUDA: usize = 1;
const HOST_DEVICE: usize = 0xFF00;

impl Value {
    pub(super) fn kind(&self) -> Tag {
        Tag::of(self.tag)
    }

    /// A value in the payload.
    fn plain(payload: usize, tag: u32) -> Self {
        Self { payload, tag, padding: 0 }
    }

    /// The place of the tensor, `None` when it is undefined or this is no tensor.
    ///
    /// # Safety
    /// This is a live `IValue`.
    unsafe fn place(&self, torch: &Torch) -> Option<Place> {
        // SAFETY: the address of a `TensorImpl`, by the tag.
        (self.kind() == Tag::Tensor && self.is_defined()).then(|| unsafe { place_of(torch, self.payload) })
    }

    /// An undefined tensor is the address of a static object, which is no heap object with keys.
    fn is_defined(&self) -> bool {
        self.payload > 0xFFFF && self.payload.is_multiple_of(8)
    }

    /// The number that this is, not a flag; `None` when it is none.
    pub(super) fn number(&self) -> Option<f64> {
        match self.tag {
            3 => Some(f64::from_bits(self.payload as u64)),
            5 => Some(self.payload as i64 as f64),
            _ => None,
        }
    }

    /// Returns true if this names a GPU, or is a tensor there, or a list with one.
    ///
    /// # Safety
    /// This is a live `IValue`.
    pub(super) unsafe fn is_on_device(&self, torch: &Torch) -> bool {
        match self.kind() {
            Tag::Device => self.payload & 0xFF == CUDA,
            // SAFETY: by the contract.
            Tag::Tensor => unsafe { self.place(torch) == Some(Place::Device) },
            // SAFETY: by the contract; elements of the list are alive with it.
            Tag::List => unsafe {
                self.elements().iter().any(|value| value.place(torch) == Some(Place::Device))
            },
            _ => false,
        }
    }

    /// Visits the memory of each tensor on a device: of this one, or of this list.
    ///
    /// # Safety
    /// This is a live `IValue`.
    pub(super) unsafe fn each_on_device(&self, torch: &Torch, mut visit: impl FnMut(TensorMemory)) {
        let one = std::slice::from_ref(self);
        // SAFETY: by the contract; elements of a list are alive with it.
        let all = unsafe { if self.kind() == Tag::List { self.elements() } else { one } };
        for value in all {
            // SAFETY: as above; the payload of a tensor is its place.
            unsafe {
                if value.place(torch) == Some(Place::Device)
                    && let Some(memory) = TensorMemory::of(torch, (&raw const value.payload).cast())
                {
                    visit(memory);
                }
            }
        }
    }

    /// The elements of a list.
    ///
    /// # Safety
    /// This is a live list.
    pub(super) unsafe fn elements<'a>(&self) -> &'a [Value] {
        // SAFETY: a `ListImpl` is two words, then a vector of `IValue`s.
        unsafe {
            let (begin, end) = *((self.payload + LIST) as *const (usize, usize));
            let count = end.saturating_sub(begin) / size_of::<Value>();
            if count == 0 { &[] } else { std::slice::from_raw_parts(begin as *const Value, count) }
        }
    }
}

/// The vector in a `ListImpl`, after its table of functions and its counts of references.
const LIST: usize = 16;
/// The size of a `ListImpl`: the vector, then a type of two words.
const LIST_SIZE: usize = LIST + 24 + 16;

/// Values of one's own. Each object on the heap has a reference of theirs.
pub(super) struct Values {
    torch: &'static Torch,
    list: Vec<Value>,
    /// The memory of their tensors.
    memory: Vec<Box<[u128]>>,
    /// True if one of the values is an answer.
    pub(super) is_answer: bool,
    /// The tensors on a device of which they are copies.
    pub(super) sources: Vec<TensorMemory>,
}

impl Drop for Values {
    fn drop(&mut self) {
        for value in std::mem::take(&mut self.list) {
            // SAFETY: a value of these, which is not used any more.
            unsafe { release(self.torch, value) };
        }
    }
}

/// Gives a reference back.
///
/// # Safety
/// The value owns one.
pub(super) unsafe fn release(torch: &Torch, value: Value) {
    if !matches!(value.kind(), Tag::Tensor | Tag::Object | Tag::List) || !value.is_defined() {
        return;
    }
    // SAFETY: an `at::Tensor` on the heap is the address of an object with a count of references, and its
    // deletion gives one back; how the object is deleted is in its table of functions.
    unsafe {
        let place = (torch.new)(size_of::<usize>()).cast::<usize>();
        place.write(value.payload);
        (torch.delete)(place);
    }
}

impl Values {
    pub(super) fn new(torch: &'static Torch) -> Self {
        Self { torch, list: Vec::new(), memory: Vec::new(), is_answer: false, sources: Vec::new() }
    }

    /// Adds a value of an op. `None` when it is not known, or of a kind that is not followed. `is_written`: the
    /// op reads nothing there.
    ///
    /// # Safety
    /// A live `IValue`.
    pub(super) unsafe fn add(&mut self, value: &Value, is_written: bool) -> Option<()> {
        // SAFETY: by the contract.
        let copied = unsafe { self.copy(value, is_written) }?;
        self.list.push(copied);
        Some(())
    }

    /// Adds unknown indices, or a list with some, that choose evenly from places: of a list, those of each element.
    ///
    /// # Safety
    /// As for [`add`](Self::add).
    pub(super) unsafe fn add_indices(&mut self, value: &Value, places: &[i64]) -> Option<()> {
        // SAFETY: by the contract.
        unsafe {
            let copied = match value.kind() {
                Tag::Tensor => self.copy_indices(value, *places.first()?)?,
                Tag::List => {
                    let mut copies = Vec::new();
                    for (element, &places) in value.elements().iter().zip(places) {
                        let copied = match element.kind() {
                            Tag::Tensor => self
                                .copy_tensor(element, false)
                                .or_else(|| self.copy_indices(element, places)),
                            Tag::None => Some(*element),
                            _ => None,
                        };
                        let Some(copied) = copied else {
                            copies.into_iter().for_each(|copy| release(self.torch, copy));
                            return None;
                        };
                        copies.push(copied);
                    }
                    self.list_like(value, &copies)
                }
                _ => return None,
            };
            self.list.push(copied);
        }
        Some(())
    }

    /// # Safety
    /// A live tensor.
    unsafe fn copy_indices(&mut self, value: &Value, places: i64) -> Option<Value> {
        // SAFETY: by the contract; the payload of a value is its place.
        let memory = unsafe {
            (value.place(self.torch) == Some(Place::Device))
                .then(|| TensorMemory::of(self.torch, (&raw const value.payload).cast()))
        }??;
        let bytes = samples::indices(&memory, places)?;
        let payload = self.tensor(&memory, &bytes)?;
        self.is_answer = true;
        self.sources.push(memory);
        Some(Value { payload, ..*value })
    }

    /// # Safety
    /// As for [`add`](Self::add).
    unsafe fn copy(&mut self, value: &Value, is_written: bool) -> Option<Value> {
        match value.kind() {
            Tag::None | Tag::Number => Some(*value),
            Tag::Device => Some(Value { payload: HOST_DEVICE, ..*value }),
            // SAFETY: by the contract; the object is alive.
            Tag::Object => Some(unsafe { hold(value) }),
            Tag::Other => None,
            // SAFETY: by the contract.
            Tag::Tensor => unsafe { self.copy_tensor(value, is_written) },
            Tag::List => {
                // SAFETY: by the contract.
                let elements = unsafe { value.elements() };
                if elements.iter().all(|element| element.kind() == Tag::Number) {
                    // SAFETY: as above.
                    return Some(unsafe { hold(value) });
                }
                let mut copies = Vec::with_capacity(elements.len());
                for element in elements {
                    let copied = match element.kind() {
                        Tag::None => Some(*element),
                        // SAFETY: elements are alive with their list.
                        Tag::Tensor => unsafe { self.copy_tensor(element, is_written) },
                        _ => None,
                    };
                    match copied {
                        Some(copied) => copies.push(copied),
                        None => {
                            // SAFETY: values that were made here.
                            copies.into_iter().for_each(|copy| unsafe { release(self.torch, copy) });
                            return None;
                        }
                    }
                }
                // SAFETY: the list is alive, and the new one takes the references.
                Some(unsafe { self.list_like(value, &copies) })
            }
        }
    }

    /// # Safety
    /// A live tensor.
    unsafe fn copy_tensor(&mut self, value: &Value, is_written: bool) -> Option<Value> {
        // SAFETY: by the contract.
        match unsafe { value.place(self.torch) } {
            Some(Place::Device) => {
                // SAFETY: by the contract; the payload of a value is its place.
                let memory = unsafe { TensorMemory::of(self.torch, (&raw const value.payload).cast()) };
                let memory = memory.filter(TensorMemory::is_small)?;
                let known = match is_written {
                    true => vec![0; memory.count() * memory.width],
                    false => {
                        let known = memory.known_elements()?;
                        self.is_answer |= known.is_answer;
                        known.bytes
                    }
                };
                let payload = self.tensor(&memory, &known)?;
                self.sources.push(memory);
                Some(Value { payload, ..*value })
            }
            Some(Place::Host) => {
                // SAFETY: as above.
                let memory = unsafe { TensorMemory::of(self.torch, (&raw const value.payload).cast()) };
                memory.filter(TensorMemory::is_small)?;
                // SAFETY: a live object.
                Some(unsafe { hold(value) })
            }
            _ => None,
        }
    }

    /// A tensor of the host with these elements.
    fn tensor(&mut self, like: &TensorMemory, elements: &[u8]) -> Option<usize> {
        let mut memory = vec![0u128; elements.len().div_ceil(16).max(1)].into_boxed_slice();
        let start = memory.as_mut_ptr().cast::<u8>();
        let strides = like.contiguous_strides();
        let mut place: *mut usize = std::ptr::null_mut();
        // SAFETY: the memory has room for the elements, and outlives the tensor with these values.
        unsafe {
            std::ptr::copy_nonoverlapping(elements.as_ptr(), start, elements.len());
            let status = (self.torch.create_from_blob)(
                start.cast::<c_void>(),
                like.sizes.len() as i64,
                like.sizes.as_ptr(),
                strides.as_ptr(),
                0,
                like.dtype,
                0,
                -1,
                &raw mut place,
            );
            if status != 0 || place.is_null() {
                return None;
            }
            self.memory.push(memory);
            let tensor = *place;
            // The reference moves out of the place.
            (self.torch.free)(place.cast());
            Some(tensor)
        }
    }

    /// A list of the same type with these elements, whose references it takes.
    ///
    /// # Safety
    /// `list` is a live list.
    unsafe fn list_like(&self, list: &Value, elements: &[Value]) -> Value {
        // SAFETY: the layout of a `ListImpl`; its type counts its references if it has a second word, the address
        // of counts of a `std::shared_ptr`.
        unsafe {
            let new = (self.torch.new)(LIST_SIZE) as usize;
            let bytes = size_of_val(elements);
            let first = (self.torch.new)(bytes.max(1)) as usize;
            std::ptr::copy_nonoverlapping(elements.as_ptr(), first as *mut Value, elements.len());
            let word = |offset: usize| *((list.payload + offset) as *const usize);
            let counts = word(LIST + 32);
            if counts > 0xFFFF {
                let uses = &*((counts + 8) as *const AtomicU32);
                uses.fetch_add(1, Ordering::Relaxed);
            }
            let words = [word(0), 1 << 32 | 1, first, first + bytes, first + bytes, word(LIST + 24), counts];
            (new as *mut [usize; 7]).write(words);
            Value { payload: new, ..*list }
        }
    }

    /// Adds a number or a flag: the tag is that of another value.
    pub(super) fn push(&mut self, payload: usize, tag: u32) {
        self.list.push(Value::plain(payload, tag));
    }

    /// Moves the values into a `std::vector` for PyTorch. The memory of their tensors stays here.
    pub(super) fn take_stack(&mut self) -> [usize; 3] {
        let values = std::mem::take(&mut self.list);
        let bytes = size_of_val(values.as_slice());
        // SAFETY: memory for the values, as C++ frees it.
        unsafe {
            let first = (self.torch.new)(bytes.max(1)) as usize;
            std::ptr::copy_nonoverlapping(values.as_ptr(), first as *mut Value, values.len());
            [first, first + bytes, first + bytes]
        }
    }

    /// Takes the values of a vector, and frees it.
    ///
    /// # Safety
    /// The vector is one of [`take_stack`](Self::take_stack), which PyTorch may have changed.
    pub(super) unsafe fn put_back(&mut self, stack: [usize; 3]) -> &[Value] {
        let [first, end, _] = stack;
        let count = end.saturating_sub(first) / size_of::<Value>();
        if first != 0 {
            // SAFETY: the contract.
            unsafe {
                self.list = std::slice::from_raw_parts(first as *const Value, count).to_vec();
                (self.torch.free)(first as *mut c_void);
            }
        }
        &self.list
    }
}

/// The value with one reference more.
///
/// # Safety
/// It is alive.
unsafe fn hold(value: &Value) -> Value {
    if value.is_defined() {
        // SAFETY: the lower half of an object's second word counts its references in every version.
        unsafe { &*((value.payload + 8) as *const AtomicU32) }.fetch_add(1, Ordering::Relaxed);
    }
    *value
}
