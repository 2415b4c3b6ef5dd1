//! Arguments of ops (`c10::IValue`). They are read when an op starts, and copied for the second run.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::ops::partial::Fill;
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

/// `c10::DeviceType::CUDA`. [`HOST_DEVICE`] is the payload of a `c10::Device` for the CPU: type 0 and index
/// -1.
const CUDA: usize = 1;
const HOST_DEVICE: usize = 0xFF00;

impl Value {
    pub(super) fn kind(&self) -> Tag {
        Tag::from_code(self.tag)
    }

    /// Creates a value that is stored in the payload.
    fn plain(payload: usize, tag: u32) -> Self {
        Self { payload, tag, padding: 0 }
    }

    /// Returns the location of the tensor, or `None` if the value is undefined or not a tensor.
    ///
    /// # Safety
    /// `self` is a live `IValue`.
    unsafe fn place(&self, torch: &Torch) -> Option<Place> {
        // SAFETY: by its tag, the payload is the address of a `TensorImpl`.
        (self.kind() == Tag::Tensor && self.is_defined()).then(|| unsafe { place_of(torch, self.payload) })
    }

    /// Returns false for an undefined tensor, which is represented by the address of a static object without
    /// dispatch keys.
    fn is_defined(&self) -> bool {
        self.payload > 0xFFFF && self.payload.is_multiple_of(8)
    }

    /// Returns the value if it is a number, or `None` if it is a flag or anything else.
    pub(super) fn number(&self) -> Option<f64> {
        match self.tag {
            3 => Some(f64::from_bits(self.payload as u64)),
            5 => Some(self.payload as i64 as f64),
            _ => None,
        }
    }

    /// Returns true if the value names a GPU, is a tensor on a GPU, or is a list with one.
    ///
    /// # Safety
    /// `self` is a live `IValue`.
    pub(super) unsafe fn is_on_device(&self, torch: &Torch) -> bool {
        match self.kind() {
            Tag::Device => self.payload & 0xFF == CUDA,
            // SAFETY: by the contract.
            Tag::Tensor => unsafe { self.place(torch) == Some(Place::Device) },
            // SAFETY: by the contract; the elements live as long as the list.
            Tag::List => unsafe {
                self.elements().iter().any(|value| value.place(torch) == Some(Place::Device))
            },
            _ => false,
        }
    }

    /// Visits the memory of each tensor on a device, in this value or in this list.
    ///
    /// # Safety
    /// `self` is a live `IValue`.
    pub(super) unsafe fn each_on_device(&self, torch: &Torch, mut visit: impl FnMut(TensorMemory)) {
        let one = std::slice::from_ref(self);
        // SAFETY: by the contract; the elements of a list live as long as the list.
        let all = unsafe { if self.kind() == Tag::List { self.elements() } else { one } };
        for value in all {
            // SAFETY: as above; the payload of a tensor is a valid `TensorPlace`.
            unsafe {
                if value.place(torch) == Some(Place::Device)
                    && let Some(memory) = TensorMemory::from_tensor(torch, (&raw const value.payload).cast())
                {
                    visit(memory);
                }
            }
        }
    }

    /// Returns the elements of a list.
    ///
    /// # Safety
    /// `self` is a live list.
    pub(super) unsafe fn elements<'a>(&self) -> &'a [Value] {
        // SAFETY: a `ListImpl` is two words, then a vector of `IValue`s.
        unsafe {
            let (begin, end) = *((self.payload + LIST) as *const (usize, usize));
            let count = end.saturating_sub(begin) / size_of::<Value>();
            if count == 0 { &[] } else { std::slice::from_raw_parts(begin as *const Value, count) }
        }
    }
}

/// The offset of the vector in a `ListImpl`, after the vtable and the reference counts.
const LIST: usize = 16;
/// The size of a `ListImpl`: the vector is followed by a type of two words.
const LIST_SIZE: usize = LIST + 24 + 16;

/// Values that the second run owns. They hold one reference to each object on the heap.
pub(super) struct Values {
    torch: &'static Torch,
    list: Vec<Value>,
    /// The memory of the tensors.
    memory: Vec<Box<[u128]>>,
    /// True if one of the values is an answer.
    pub(super) is_answer: bool,
    /// What the values have in place of unknown elements. If unset, all elements must be known.
    fill: Option<Fill>,
    /// The device tensors from which the values were copied.
    pub(super) sources: Vec<TensorMemory>,
}

impl Drop for Values {
    fn drop(&mut self) {
        for value in std::mem::take(&mut self.list) {
            // SAFETY: the value belongs to this list and is no longer used.
            unsafe { release(self.torch, value) };
        }
    }
}

/// Releases a reference.
///
/// # Safety
/// The value owns a reference.
pub(super) unsafe fn release(torch: &Torch, value: Value) {
    if !matches!(value.kind(), Tag::Tensor | Tag::Object | Tag::List) || !value.is_defined() {
        return;
    }
    // SAFETY: an `at::Tensor` on the heap is the address of an object with a reference count, and deleting it
    // releases one reference. For other objects, the vtable has the function that deletes them.
    unsafe {
        let place = (torch.new)(size_of::<usize>()).cast::<usize>();
        place.write(value.payload);
        (torch.delete)(place);
    }
}

impl Values {
    pub(super) fn new(torch: &'static Torch) -> Self {
        Self {
            torch,
            list: Vec::new(),
            memory: Vec::new(),
            is_answer: false,
            fill: None,
            sources: Vec::new(),
        }
    }

    /// Creates a list that takes values with unknown elements, and fills these.
    pub(super) fn filled(torch: &'static Torch, fill: Fill) -> Self {
        let mut values = Self::new(torch);
        values.fill = Some(fill);
        values
    }

    /// Adds a value of an op. Returns `None` if the value is not known, or of a kind that is not followed. If
    /// `is_written` is true, the op does not read the value.
    ///
    /// # Safety
    /// `value` is a live `IValue`.
    pub(super) unsafe fn add(&mut self, value: &Value, is_written: bool) -> Option<()> {
        // SAFETY: by the contract.
        let copied = unsafe { self.copy(value, is_written) }?;
        self.list.push(copied);
        Some(())
    }

    /// Adds unknown indices, or a list that contains some, as indices spread evenly over `places`. For a
    /// list, `places` holds one number for each element.
    ///
    /// # Safety
    /// Same as for [`add`](Self::add).
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
    /// `value` is a live tensor.
    unsafe fn copy_indices(&mut self, value: &Value, places: i64) -> Option<Value> {
        // SAFETY: by the contract; the payload of a value is a valid `TensorPlace`.
        let memory = unsafe {
            (value.place(self.torch) == Some(Place::Device))
                .then(|| TensorMemory::from_tensor(self.torch, (&raw const value.payload).cast()))
        }??;
        let bytes = samples::indices(&memory, places)?;
        let payload = self.tensor(&memory, &bytes)?;
        self.is_answer = true;
        self.sources.push(memory);
        Some(Value { payload, ..*value })
    }

    /// # Safety
    /// Same as for [`add`](Self::add).
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
                        // SAFETY: the elements live as long as their list.
                        Tag::Tensor => unsafe { self.copy_tensor(element, is_written) },
                        _ => None,
                    };
                    match copied {
                        Some(copied) => copies.push(copied),
                        None => {
                            // SAFETY: these values were created here.
                            copies.into_iter().for_each(|copy| unsafe { release(self.torch, copy) });
                            return None;
                        }
                    }
                }
                // SAFETY: the list is alive, and the new list takes over the references.
                Some(unsafe { self.list_like(value, &copies) })
            }
        }
    }

    /// # Safety
    /// `value` is a live tensor.
    unsafe fn copy_tensor(&mut self, value: &Value, is_written: bool) -> Option<Value> {
        // SAFETY: by the contract.
        match unsafe { value.place(self.torch) } {
            Some(Place::Device) => {
                // SAFETY: by the contract; the payload of a value is a valid `TensorPlace`.
                let memory =
                    unsafe { TensorMemory::from_tensor(self.torch, (&raw const value.payload).cast()) };
                let memory = memory.filter(TensorMemory::is_small)?;
                let known = match is_written {
                    true => vec![0; memory.count() * memory.width],
                    false => {
                        let fill = self.fill.map(|fill| fill.byte(&memory));
                        let known = memory.known_elements().or_else(|| memory.filled_elements(fill?))?;
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
                let memory =
                    unsafe { TensorMemory::from_tensor(self.torch, (&raw const value.payload).cast()) };
                memory.filter(TensorMemory::is_small)?;
                // SAFETY: a live object.
                Some(unsafe { hold(value) })
            }
            // PyTorch does not count the references to it.
            Some(Place::Undefined) => Some(*value),
            _ => None,
        }
    }

    /// Creates a host tensor with these elements.
    fn tensor(&mut self, like: &TensorMemory, elements: &[u8]) -> Option<usize> {
        let mut memory = vec![0u128; elements.len().div_ceil(16).max(1)].into_boxed_slice();
        let start = memory.as_mut_ptr().cast::<u8>();
        let strides = like.contiguous_strides();
        let mut place: *mut usize = std::ptr::null_mut();
        // SAFETY: the memory has space for the elements, and outlives the tensor in these values.
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
            // The reference is moved out of the allocated word.
            (self.torch.free)(place.cast());
            Some(tensor)
        }
    }

    /// Creates a list of the same type with these elements. Takes over their references.
    ///
    /// # Safety
    /// `list` is a live list.
    unsafe fn list_like(&self, list: &Value, elements: &[Value]) -> Value {
        // SAFETY: the layout of a `ListImpl`. Its type has reference counts if its second word, the address
        // of the counts of a `std::shared_ptr`, is set.
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

    /// Adds a number or a flag, with the tag of another value of this kind.
    pub(super) fn push(&mut self, payload: usize, tag: u32) {
        self.list.push(Value::plain(payload, tag));
    }

    /// Moves the values into a `std::vector` for PyTorch. The memory of their tensors stays here.
    pub(super) fn take_stack(&mut self) -> [usize; 3] {
        let values = std::mem::take(&mut self.list);
        let bytes = size_of_val(values.as_slice());
        // SAFETY: memory for the values, allocated as C++ frees it.
        unsafe {
            let first = (self.torch.new)(bytes.max(1)) as usize;
            std::ptr::copy_nonoverlapping(values.as_ptr(), first as *mut Value, values.len());
            [first, first + bytes, first + bytes]
        }
    }

    /// Moves the values of a vector back, and frees the vector.
    ///
    /// # Safety
    /// The vector comes from [`take_stack`](Self::take_stack); PyTorch may have changed it.
    pub(super) unsafe fn put_back(&mut self, stack: [usize; 3]) -> &[Value] {
        let [first, end, _] = stack;
        let count = end.saturating_sub(first) / size_of::<Value>();
        if first != 0 {
            // SAFETY: by the contract.
            unsafe {
                self.list = std::slice::from_raw_parts(first as *const Value, count).to_vec();
                (self.torch.free)(first as *mut c_void);
            }
        }
        &self.list
    }
}

/// Returns the value with one more reference.
///
/// # Safety
/// The value is alive.
unsafe fn hold(value: &Value) -> Value {
    if value.is_defined() {
        // SAFETY: in every version, the lower half of an object's second word is its reference count.
        unsafe { &*((value.payload + 8) as *const AtomicU32) }.fetch_add(1, Ordering::Relaxed);
    }
    *value
}
