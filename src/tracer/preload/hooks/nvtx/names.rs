//! The names that a program gives to NVTX: messages, registered strings, domains and categories.

use std::ffi::{CStr, c_char};

pub(super) use cudarc::nvtx::sys::nvtxEventAttributes_v2 as Attributes;
use cudarc::nvtx::sys::nvtxMessageType_t as MessageType;
use memtrace_trace::ranges::{LIBRARY, LIBRARY_DOMAINS};
use memtrace_trace::text::MAX_TEXT;
use rustc_hash::FxHashMap;

use crate::guard::shielded;
use crate::runtime::fork::ForkSafe;

// `nvtxEventAttributes_t` has this size in versions 1 to 3 of NVTX.
const _: () = assert!(size_of::<Attributes>() == 48);

/// The names that the program registered: strings and domains by handle, categories by domain and id.
#[derive(Default)]
struct Names {
    strings: FxHashMap<usize, String>,
    domains: FxHashMap<usize, String>,
    categories: FxHashMap<(usize, u32), String>,
    /// The number of handles that [`handle`] has assigned without an earlier tool.
    handles: usize,
}

static NAMES: ForkSafe<Option<Names>> = ForkSafe::new(None);

fn with_names<R>(work: impl FnOnce(&mut Names) -> R) -> R {
    NAMES.with(|names| work(names.get_or_insert_with(Names::default)))
}

/// Returns a string of 1-byte characters as text; empty for null.
///
/// # Safety
/// `text` is null or a C string.
pub(super) unsafe fn ascii(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: by the contract.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Returns a string of `wchar_t` as text, cut at [`MAX_TEXT`] characters; empty for null.
///
/// # Safety
/// `text` is null or a string of 4-byte characters that ends in 0.
pub(super) unsafe fn wide(text: *const u32) -> String {
    let mut out = String::new();
    if text.is_null() {
        return out;
    }
    for index in 0..MAX_TEXT {
        // SAFETY: by the contract; the loop ends at the 0.
        match unsafe { *text.add(index) } {
            0 => break,
            code => out.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)),
        }
    }
    out
}

/// Returns the message of a call's attributes and its category. Only our own domain and the domains of known
/// libraries have a category; for the latter it is [`LIBRARY`].
///
/// # Safety
/// `attributes` is null or the program's own, as it passed them to NVTX.
pub(super) unsafe fn message_of(domain: usize, attributes: *const Attributes) -> (String, Option<String>) {
    const ASCII: i32 = MessageType::NVTX_MESSAGE_TYPE_ASCII as i32;
    const UNICODE: i32 = MessageType::NVTX_MESSAGE_TYPE_UNICODE as i32;
    const REGISTERED: i32 = MessageType::NVTX_MESSAGE_TYPE_REGISTERED as i32;
    // SAFETY: by the contract; every version of the struct begins with its version and size.
    if attributes.is_null() || usize::from(unsafe { (*attributes).size }) < size_of::<Attributes>() {
        return (String::new(), None);
    }
    // SAFETY: the pointer is not null, the struct has at least this size, and it has no enum.
    let attributes = unsafe { &*attributes };
    // SAFETY: every member of the union is one pointer.
    let pointer = unsafe { attributes.message.ascii };
    let message = match attributes.messageType {
        // SAFETY: `messageType` gives the kind of the string.
        ASCII => unsafe { ascii(pointer) },
        // SAFETY: as above.
        UNICODE => unsafe { wide(pointer.cast()) },
        REGISTERED => with_names(|names| names.strings.get(&(pointer as usize)).cloned().unwrap_or_default()),
        _ => String::new(),
    };
    let category = with_names(|names| match names.domains.get(&domain).map(String::as_str) {
        Some("memtrace") => names.categories.get(&(domain, attributes.category)).cloned(),
        Some(name) if LIBRARY_DOMAINS.contains(&name) => Some(LIBRARY.to_owned()),
        _ => None,
    });
    (message, category)
}

/// Stores the program's name for the category with the id `category` in `domain`.
pub(super) fn name_category(domain: usize, category: u32, name: impl FnOnce() -> String) {
    shielded(|| {
        let name = name();
        with_names(|names| names.categories.insert((domain, category), name));
    });
}

/// Returns the handle for the program: the earlier tool's handle if there is one, otherwise an odd number,
/// which cannot equal the address of an object.
fn handle(theirs: Option<usize>, names: &mut Names) -> usize {
    theirs.filter(|handle| *handle != 0).unwrap_or_else(|| {
        names.handles += 1;
        names.handles * 2 + 1
    })
}

/// Registers a string and returns the program's handle for it.
pub(super) fn register_string(text: String, theirs: Option<usize>) -> usize {
    with_names(|names| {
        let handle = handle(theirs, names);
        names.strings.insert(handle, text);
        handle
    })
}

/// Creates a domain and returns the program's handle for it.
pub(super) fn create_domain(name: String, theirs: Option<usize>) -> usize {
    with_names(|names| {
        let handle = handle(theirs, names);
        names.domains.insert(handle, name);
        handle
    })
}
