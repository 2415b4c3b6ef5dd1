//! The fields of torch's objects that op io reads: the inputs of a `RecordFunction`, the storage of a
//! `TensorImpl`, the memory of a `StorageImpl`, and whether a `FunctionSchema` changes an argument.
//!
//! No symbol gives the offsets of these fields, so [`super::learn`] learns the offsets from known objects
//! before any field is read. The order of the fields follows ATen/record_function.h, ATen/core/ivalue.h,
//! ATen/core/function_schema.h, c10/core/TensorImpl.h and c10/core/StorageImpl.h, 2.1 to 2.15.

use std::ffi::{CStr, c_char, c_void};
use std::sync::OnceLock;

use memtrace_trace::Api;

/// The size of an `IValue`: its payload, then its tag.
const IVALUE: usize = 16;
/// The offset of the vector of `IValue`s in a `ListImpl`, after the counts of an `intrusive_ptr_target`.
pub(super) const LIST: usize = 16;
/// The offset of an `Argument`'s alias from the end of its name. The fields for two types, the length of a
/// list (`N_`) and the default value are in between.
pub(super) const ALIAS: usize = 64;
/// The offset of `Argument::is_out_` from the end of the argument's name.
pub(super) const IS_OUT: usize = 73;
/// The size of an `Argument` without its name.
pub(super) const ARGUMENT: usize = 80;
/// The offset of `AliasInfo::isWrite_`, after two sets and a vector.
pub(super) const IS_WRITE: usize = 136;
/// The offset of the device in a `DataPtr`: after a pointer, its context and its deleter.
pub(super) const DEVICE: usize = 24;
/// The maximum number of inputs of an op, or of members of a list. A larger number means that the bytes were
/// misread.
pub(super) const MOST: usize = 1 << 16;

/// `c10::DeviceType::CPU`.
pub(super) const CPU: u8 = 0;
/// `c10::DeviceType::CUDA`.
pub(super) const CUDA: u8 = 1;

/// The offsets and values that differ between versions of torch. Offsets are in bytes, except
/// [`number`](Self::number), which is in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// The index of the word of a `RecordFunction` that holds the sequence number.
    pub(super) number: usize,
    /// The size of a `std::string`, which depends on the C++ ABI that torch was built with.
    pub(super) string: usize,
    /// The tag of an `IValue` that holds a tensor, and the tag of an `IValue` that holds a list.
    pub(super) tags: (u32, u32),
    /// The offset of `TensorImpl::storage_`.
    pub(super) storage: usize,
    /// The offset of `StorageImpl::data_ptr_`.
    pub(super) data: usize,
    /// The offset of `StorageImpl::size_bytes_`.
    pub(super) bytes: usize,
}

/// The layout. It is set once, after all its fields were found and checked.
pub(super) static LAYOUT: OnceLock<Layout> = OnceLock::new();

/// Reads a `T` at `address`.
///
/// # Safety
/// A live object of torch is at `address`, and a `T` at `offset` is within this object.
unsafe fn at<T: Copy>(address: usize, offset: usize) -> T {
    // SAFETY: by the contract; the read need not be aligned.
    unsafe { ((address + offset) as *const T).read_unaligned() }
}

/// Returns true if an object can be at the address: it is aligned, and above the first 64 KiB.
fn is_object(address: usize) -> bool {
    address > 0xFFFF && address.is_multiple_of(8)
}

/// The memory of a storage.
#[derive(Clone, Copy, Debug)]
pub(super) struct Memory {
    pub(super) addr: u64,
    pub(super) bytes: i64,
    /// The `c10::DeviceType` and the device's index.
    pub(super) device: (u8, i8),
}

impl Layout {
    /// Returns the address of an op's `FunctionSchema`, or `None` for a record that has only a name. The
    /// field before the sequence number is a `variant<string, reference>`, whose index is in its last word.
    ///
    /// # Safety
    /// `record` is a live `RecordFunction`.
    pub(super) unsafe fn schema(&self, record: *const c_void) -> Option<usize> {
        // SAFETY: both words are in the record, before the sequence number.
        let (index, schema) = unsafe {
            let number = record as usize + self.number * 8;
            (at::<u8>(number - 8, 0), at::<usize>(number - 8 - self.string, 0))
        };
        (index == 1 && is_object(schema)).then_some(schema)
    }

    /// Returns how an op uses each argument, according to its schema.
    ///
    /// # Safety
    /// `schema` is from [`Layout::schema`].
    pub(super) unsafe fn uses(&self, schema: usize) -> Vec<Api> {
        // SAFETY: the vector of arguments follows two strings; its arguments have the size that was learned,
        // and an alias is an `AliasInfo`.
        unsafe {
            let (begin, end): (usize, usize) = (at(schema, 2 * self.string), at(schema, 2 * self.string + 8));
            let length = self.string + ARGUMENT;
            let count = end.saturating_sub(begin) / length;
            if !is_object(begin) || count > MOST {
                return Vec::new();
            }
            (0..count)
                .map(|index| {
                    let argument = begin + index * length + self.string;
                    let alias: usize = at(argument, ALIAS);
                    if !is_object(alias) || at::<u8>(alias, IS_WRITE) == 0 {
                        Api::Read
                    } else if at::<u8>(argument, IS_OUT) != 0 {
                        Api::Write
                    } else {
                        Api::ReadWrite
                    }
                })
                .collect()
        }
    }

    /// Returns the name of a schema's overload, which lives as long as the schema.
    ///
    /// # Safety
    /// `schema` is from [`Layout::schema`].
    pub(super) unsafe fn overload<'a>(&self, schema: usize) -> &'a [u8] {
        // SAFETY: the second string of the schema; both kinds of string begin with a pointer to characters
        // that end in 0.
        unsafe {
            let text: usize = at(schema, self.string);
            if text < 0x10000 { b"" } else { CStr::from_ptr(text as *const c_char).to_bytes() }
        }
    }

    /// Calls `visit` for each tensor among the inputs of an op that starts, with the index of the argument
    /// and the address of the `TensorImpl`. Tensors in lists are included.
    ///
    /// # Safety
    /// `record` is a live `RecordFunction` whose start callbacks run.
    pub(super) unsafe fn tensors(&self, record: *const c_void, mut visit: impl FnMut(usize, usize)) {
        // SAFETY: the inputs are an `ArrayRef` after the sequence number.
        let (inputs, count): (usize, usize) = unsafe {
            let number = record as usize + self.number * 8;
            (at(number, 8), at(number, 16))
        };
        if !is_object(inputs) || count > MOST {
            return;
        }
        for index in 0..count {
            // SAFETY: the inputs are `count` values, alive while the start callbacks run.
            let (payload, tag) = unsafe { self.value(inputs + index * IVALUE) };
            if tag == self.tags.0 {
                visit(index, payload);
            } else if tag == self.tags.1 && is_object(payload) {
                // SAFETY: the tag says that the payload is a list.
                let (begin, end): (usize, usize) = unsafe { (at(payload, LIST), at(payload, LIST + 8)) };
                let members = end.saturating_sub(begin) / IVALUE;
                if !is_object(begin) || members > MOST {
                    continue;
                }
                for member in 0..members {
                    // SAFETY: a value of the list is at this address.
                    let (payload, tag) = unsafe { self.value(begin + member * IVALUE) };
                    if tag == self.tags.0 {
                        visit(index, payload);
                    }
                }
            }
        }
    }

    /// Returns the payload and the tag of an `IValue`.
    ///
    /// # Safety
    /// An `IValue` is at `address`.
    unsafe fn value(&self, address: usize) -> (usize, u32) {
        // SAFETY: by the contract.
        unsafe { (at(address, 0), at(address, 8)) }
    }

    /// Returns the memory of a tensor's storage. Returns `None` if the tensor is undefined or has no storage
    /// (sparse, opaque), or if its storage has no memory (meta, fake, wrapper subclasses).
    ///
    /// # Safety
    /// `tensor` is the address of a live `TensorImpl`.
    pub(super) unsafe fn memory(&self, tensor: usize) -> Option<Memory> {
        if !is_object(tensor) {
            return None;
        }
        // SAFETY: every `TensorImpl`, also of a subclass, has a storage, which may be null.
        let storage: usize = unsafe { at(tensor, self.storage) };
        if !is_object(storage) {
            return None;
        }
        // SAFETY: the `StorageImpl` is alive, because the tensor holds it.
        let (addr, bytes, device): (u64, i64, (u8, i8)) = unsafe {
            let device = (at(storage, self.data + DEVICE), at(storage, self.data + DEVICE + 1));
            (at(storage, self.data), at(storage, self.bytes), device)
        };
        // A symbolic size is a pointer with its upper bits set.
        (addr != 0).then_some(Memory { addr, bytes: bytes.max(0), device })
    }
}
