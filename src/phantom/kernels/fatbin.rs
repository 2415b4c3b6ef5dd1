//! For which architectures a program's kernels were compiled.
//!
//! A card runs the newest code that is not newer than itself, and a kernel's attributes name that code's
//! version: an RTX 4090 (8.9) runs what PyTorch compiled for 8.6. CUB asks an empty kernel of each library for
//! it and refuses a version that it was not compiled for.
//!
//! The layout is not documented; it is as `cuobjdump` shows it, and as ZLUDA describes it. What does not look
//! like it counts as compiled for every card.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};

use crate::core::ffi::{Out, leak};
use crate::core::host_state::{lock, machine};

/// `__fatBinC_Wrapper_t` and the header of what it points to.
const WRAPPER_MAGIC: u32 = 0x4662_43b1;
const BINARY_MAGIC: u32 = 0xba55_ed50;

/// The architectures of a library's kernels, as `86` for 8.6.
type Architectures = Vec<u32>;

/// The empty kernels by their host address, and the architectures of their libraries.
static EMPTY_KERNELS: LazyLock<Mutex<HashMap<usize, &'static Architectures>>> = LazyLock::new(Mutex::default);

fn number(place: usize) -> u32 {
    Out::<u32>::from_address(place).get().unwrap_or(0)
}

/// Reads the architectures of a registered binary.
fn architectures(wrapper: usize) -> Architectures {
    let mut all = Vec::new();
    let Some(header) =
        Out::<usize>::from_address(wrapper + 8).get().filter(|_| number(wrapper) == WRAPPER_MAGIC)
    else {
        return all;
    };
    if header == 0 || number(header) != BINARY_MAGIC {
        return all;
    }
    // Version and the header's size in 16 bits each, then the size of all entries.
    let mut entry = header + (number(header + 4) >> 16) as usize;
    let end = entry + Out::<usize>::from_address(header + 8).get().unwrap_or(0);
    while entry + 64 <= end {
        // Kind and version in 16 bits each, the header's size, the payload's, ..., the architecture at 28.
        let size = number(entry + 4) as usize + Out::<usize>::from_address(entry + 8).get().unwrap_or(0);
        let architecture = number(entry + 28);
        if size < 64 || !(20..1000).contains(&architecture) {
            break;
        }
        if !all.contains(&architecture) {
            all.push(architecture);
        }
        entry += size;
    }
    all
}

/// A binary is registered: its handle.
pub(crate) fn register(wrapper: usize) -> usize {
    leak(architectures(wrapper))
}

/// A kernel of the binary with that handle is registered.
pub(crate) fn register_kernel(handle: usize, kernel: usize, name: &[u8]) {
    if !name.windows(11).any(|part| part == b"EmptyKernel") {
        return;
    }
    // SAFETY: the handle came from `register`, which leaks what it points to.
    if let Some(architectures) = unsafe { (handle as *const Architectures).as_ref() } {
        lock(&EMPTY_KERNELS).insert(kernel, architectures);
    }
}

/// The version of the code that this card would run of a kernel: the card's own unless its library is known
/// to have been compiled for others.
pub(crate) fn version(kernel: usize) -> u32 {
    let (major, minor) = machine().spec.cc;
    let card = major * 10 + minor;
    let known = lock(&EMPTY_KERNELS).get(&kernel).copied();
    known.and_then(|all| all.iter().copied().filter(|&there| there <= card).max()).unwrap_or(card)
}
