//! The architectures that a program's kernels were compiled for.
//!
//! A card runs the newest code that is not newer than itself, and the attributes of a kernel name the version
//! of that code: an RTX 4090 (8.9) runs what PyTorch compiled for 8.6. CUB asks an empty kernel of each
//! library for it and refuses a version that it was not compiled for.
//!
//! NVIDIA does not document the layout. It is read here as `cuobjdump` shows it and as ZLUDA describes it. A
//! binary that does not look like it counts as compiled for every card.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};

use crate::core::ffi::Handle;
use crate::core::host_state::host_state;
use crate::core::lock::lock;

/// The magic numbers of `__fatBinC_Wrapper_t` and of the header that it points to.
const WRAPPER_MAGIC: u32 = 0x4662_43b1;
const BINARY_MAGIC: u32 = 0xba55_ed50;

/// The bytes of the smallest entry header.
const ENTRY_HEADER: usize = 64;

/// A registered binary: the architectures of its kernels, as `86` for 8.6.
pub(crate) struct FatBinary {
    architectures: Vec<u32>,
}

/// Empty kernels by their host address, and the binaries that they belong to.
static EMPTY_KERNELS: LazyLock<Mutex<HashMap<usize, &'static FatBinary>>> = LazyLock::new(Mutex::default);

/// Reads an integer at an address.
///
/// # Safety
/// The address is good for a read of a `T`, which is an integer.
unsafe fn read<T: Copy>(address: usize) -> T {
    // SAFETY: the caller's promise.
    unsafe { (address as *const T).read_unaligned() }
}

/// Reads the architectures of a binary.
///
/// # Safety
/// `wrapper` is null or the address of a `__fatBinC_Wrapper_t`, as nvcc generates it.
unsafe fn architectures(wrapper: usize) -> Vec<u32> {
    let mut all = Vec::new();
    // SAFETY: each read is inside the wrapper, inside the header that it points to, or inside an entry that
    // ends before the end which the header states. The magic numbers and the sizes are checked before the
    // next read.
    unsafe {
        if wrapper == 0 || read::<u32>(wrapper) != WRAPPER_MAGIC {
            return all;
        }
        let header: usize = read(wrapper + 8);
        if header == 0 || read::<u32>(header) != BINARY_MAGIC {
            return all;
        }
        // Version and header size of 16 bits each, then the size of all entries.
        let mut entry = header + (read::<u32>(header + 4) >> 16) as usize;
        let end = entry + read::<usize>(header + 8);
        while entry + ENTRY_HEADER <= end {
            // Kind and version of 16 bits each, the size of the header, the size of the payload, ..., the
            // architecture at 28.
            let size = read::<u32>(entry + 4) as usize + read::<usize>(entry + 8);
            let architecture: u32 = read(entry + 28);
            if size < ENTRY_HEADER || !(20..1000).contains(&architecture) {
                break;
            }
            if !all.contains(&architecture) {
                all.push(architecture);
            }
            entry += size;
        }
    }
    all
}

/// Registers a binary.
///
/// # Safety
/// `wrapper` is null or the address of a `__fatBinC_Wrapper_t`, as nvcc generates it.
pub(crate) unsafe fn register(wrapper: usize) -> Handle<FatBinary> {
    // SAFETY: the caller's promise.
    Handle::new(FatBinary { architectures: unsafe { architectures(wrapper) } })
}

/// Registers a kernel of a binary, by the address of its host stub.
pub(crate) fn register_kernel(binary: Handle<FatBinary>, kernel: usize, name: &[u8]) {
    if !name.windows(11).any(|part| part == b"EmptyKernel") {
        return;
    }
    if let Some(binary) = binary.get() {
        lock(&EMPTY_KERNELS).insert(kernel, binary);
    }
}

/// The version of the code that the card runs of a kernel: the card's own, unless the kernel's binary is
/// known to have been compiled for others.
pub(crate) fn version(kernel: usize) -> u32 {
    let (major, minor) = host_state().spec.cc;
    let card = major * 10 + minor;
    let known = lock(&EMPTY_KERNELS).get(&kernel).copied();
    known
        .and_then(|binary| binary.architectures.iter().copied().filter(|&version| version <= card).max())
        .unwrap_or(card)
}
