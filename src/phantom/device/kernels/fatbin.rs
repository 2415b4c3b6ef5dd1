//! Fat binaries: the architectures for which a program's kernels were compiled, and the parameters of the
//! kernels.
//!
//! A card runs the newest code that is not newer than the card, and the attributes of a kernel report the
//! version of this code: an RTX 4090 (8.9) runs the code that PyTorch compiled for 8.6. CUB queries an empty
//! kernel in each library for the version, and rejects a version for which it was not compiled.
//!
//! NVIDIA does not document the layout. The code here follows the output of `cuobjdump` and ZLUDA's
//! description. A binary with another layout counts as compiled for every card, and the parameters
//! of its kernels are unknown.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ffi::{CStr, c_char};
use std::os::unix::fs::FileExt;
use std::sync::{LazyLock, Mutex};

use crate::core::bytes::contains;
use crate::core::ffi::Handle;
use crate::core::host_state::host_state;
use crate::core::lock::lock;
use crate::kernels::cubin::{self, KernelParameters, Parameter};

/// The magic number of a `__fatBinC_Wrapper_t`.
const WRAPPER_MAGIC: u32 = 0x4662_43b1;
/// The magic number of the header to which a `__fatBinC_Wrapper_t` points.
const BINARY_MAGIC: u32 = 0xba55_ed50;

/// The minimum size of an entry header in bytes.
const ENTRY_HEADER: usize = 64;

/// A fat binary that the program registered.
pub(crate) struct FatBinary {
    /// The code for each architecture. The number of an architecture is 86 for 8.6.
    entries: Vec<Entry>,
    /// The parameters of the kernels in the entries that were read so far, in the order of the entries. An
    /// entry is read on demand.
    read: Mutex<Vec<KernelParameters>>,
}

/// The binaries of empty kernels, by the kernel's host address.
static EMPTY_KERNELS: LazyLock<Mutex<HashMap<usize, &'static FatBinary>>> = LazyLock::new(Mutex::default);

/// Reads an integer at an address.
///
/// # Safety
/// `T` is an integer type, and `address` is valid for a read of a `T`.
unsafe fn read<T: Copy>(address: usize) -> T {
    // SAFETY: the caller's promise.
    unsafe { (address as *const T).read_unaligned() }
}

/// An entry of a binary: the code for one architecture.
#[derive(Debug, Clone, Copy)]
struct Entry {
    kind: u16,
    architecture: u32,
    flags: u64,
    /// The address of the code.
    code: usize,
    /// The size of the stored code in bytes.
    size: usize,
    /// The size of the code after decompression, in bytes.
    whole_size: usize,
}

/// The entry kind of PTX text.
const PTX: u16 = 1;
/// The entry kind of compiled code.
const CUBIN: u16 = 2;
/// The entry flag of code that is compressed with LZ4.
const LZ4: u64 = 0x2000;
/// The entry flag of code that is compressed with zstd.
const ZSTD: u64 = 0x8000;
/// The maximum size of code that is decompressed, in bytes. The largest code in PyTorch has 40 MB.
const MAX_CODE: usize = 512 << 20;

impl Entry {
    /// Returns the code after decompression.
    ///
    /// # Safety
    /// The binary that contains the entry is still loaded.
    unsafe fn decompressed(&self) -> Option<Cow<'static, [u8]>> {
        // SAFETY: `entries` checked that the code is inside the binary, which is still loaded by the caller's
        // promise.
        let code: &'static [u8] = unsafe { std::slice::from_raw_parts(self.code as *const u8, self.size) };
        if self.whole_size > MAX_CODE {
            return None;
        }
        match self.flags & (LZ4 | ZSTD) {
            0 => Some(Cow::Borrowed(code)),
            LZ4 => lz4_flex::block::decompress(code, self.whole_size).ok().map(Cow::Owned),
            ZSTD => zstd::bulk::decompress(code, self.whole_size).ok().map(Cow::Owned),
            _ => None,
        }
    }
}

/// Reads the entries of a binary.
///
/// # Safety
/// `header` is the address of a fat binary, whose header starts with [`BINARY_MAGIC`].
unsafe fn entries(header: usize) -> Vec<Entry> {
    let mut all = Vec::new();
    // SAFETY: each read is inside the header, or inside an entry that ends before the end stated in the
    // header. The magic number and the sizes are checked before the next read.
    unsafe {
        if header == 0 || read::<u32>(header) != BINARY_MAGIC {
            return all;
        }
        // The header has the version and the header size in 16 bits each, followed by the size of all
        // entries.
        let mut entry = header + (read::<u32>(header + 4) >> 16) as usize;
        let end = entry + read::<usize>(header + 8);
        while entry + ENTRY_HEADER <= end {
            // An entry begins with its kind and its version (16 bits each), its header size and its payload
            // size. At offset 16 is the length of compressed code, at 28 the architecture, at 40 the flags,
            // and at 56 the decompressed length.
            let (header_size, payload) = (read::<u32>(entry + 4) as usize, read::<usize>(entry + 8));
            let size = header_size.saturating_add(payload);
            let architecture: u32 = read(entry + 28);
            if size < ENTRY_HEADER || size > end - entry || !(20..1000).contains(&architecture) {
                break;
            }
            let flags: u64 = read(entry + 40);
            let compressed = flags & (LZ4 | ZSTD) != 0;
            let stated = read::<u32>(entry + 16) as usize;
            all.push(Entry {
                kind: read(entry),
                architecture,
                flags,
                code: entry + header_size,
                size: if compressed { stated.min(payload) } else { payload },
                whole_size: if compressed { read(entry + 56) } else { payload },
            });
            entry += size;
        }
    }
    all
}

/// Returns the size of a fat binary, as the 16 bytes of its header state it.
fn binary_size(header: &[u8]) -> Option<usize> {
    let number = |at: usize, length: usize| header.get(at..at + length);
    let own = u16::from_le_bytes(number(6, 2)?.try_into().ok()?);
    let entries = u64::from_le_bytes(number(8, 8)?.try_into().ok()?);
    usize::try_from(entries).ok()?.checked_add(own.into())
}

/// Returns the address of the header to which a `__fatBinC_Wrapper_t` points, or 0.
///
/// # Safety
/// `wrapper` is null or the address of a `__fatBinC_Wrapper_t`, as nvcc generates it.
unsafe fn header_of(wrapper: usize) -> usize {
    // SAFETY: the caller's promise.
    unsafe { if wrapper != 0 && read::<u32>(wrapper) == WRAPPER_MAGIC { read(wrapper + 8) } else { 0 } }
}

/// Returns the parameters of the kernels in a piece of code.
fn parameters_in(kind: u16, code: &[u8]) -> KernelParameters {
    match kind {
        CUBIN => cubin::of_cubin(code),
        PTX => cubin::of_ptx(&String::from_utf8_lossy(code)),
        _ => KernelParameters::new(),
    }
}

impl FatBinary {
    /// Returns the parameters of a kernel. Decompresses entries in their order until one contains the
    /// kernel. One architecture is enough, because the source determines the parameters, so they are the
    /// same in all architectures.
    ///
    /// # Safety
    /// The binary is still loaded.
    pub(crate) unsafe fn parameters(&self, kernel: &[u8]) -> Option<Box<[Parameter]>> {
        let mut read = lock(&self.read);
        loop {
            if let Some(found) = read.iter().find_map(|parameters| parameters.get(kernel)) {
                return Some(found.clone());
            }
            let entry = self.entries.get(read.len())?;
            // SAFETY: the caller's promise.
            let code = unsafe { entry.decompressed() };
            read.push(code.map(|code| parameters_in(entry.kind, &code)).unwrap_or_default());
        }
    }
}

/// Returns the parameters of the kernels in an image that a program loads: a cubin, a fat binary with or
/// without its wrapper, or PTX.
///
/// # Safety
/// `image` is null or the address of such an image.
pub(crate) unsafe fn image_parameters(image: usize) -> KernelParameters {
    if image == 0 {
        return KernelParameters::new();
    }
    // SAFETY: by the caller's promise, the image starts with a magic number or is a zero-terminated text;
    // each format states its own length.
    unsafe {
        let magic: [u8; 4] = read(image);
        let wrapped = header_of(image);
        if magic == *cubin::ELF_MAGIC {
            let header: [u8; 64] = read(image);
            let part = |at: usize, length: usize| {
                Some(std::slice::from_raw_parts((image + at) as *const u8, length).to_vec())
            };
            let Some(length) = cubin::elf_length(&header, part) else { return KernelParameters::new() };
            return cubin::of_cubin(std::slice::from_raw_parts(image as *const u8, length));
        }
        let header = if wrapped != 0 { wrapped } else { image };
        let mut all = KernelParameters::new();
        if u32::from_le_bytes(magic) == BINARY_MAGIC || wrapped != 0 {
            for entry in entries(header) {
                if let Some(code) = entry.decompressed() {
                    all.extend(parameters_in(entry.kind, &code));
                }
            }
        } else if is_text(&magic) {
            all = cubin::of_ptx(&CStr::from_ptr(image as *const c_char).to_string_lossy());
        }
        all
    }
}

/// Returns the parameters of the kernels in a file that a program loads: a cubin, a fat binary or PTX. Returns
/// `None` if the file is truncated, and no kernels if its format is unknown.
pub(crate) fn file_parameters(file: &[u8]) -> Option<KernelParameters> {
    let magic = file.first_chunk::<4>()?;
    if magic == cubin::ELF_MAGIC {
        let part = |at: usize, length: usize| Some(file.get(at..at.checked_add(length)?)?.to_vec());
        let length = cubin::elf_length(file.first_chunk()?, part)?;
        return (length <= file.len()).then(|| cubin::of_cubin(file));
    }
    if u32::from_le_bytes(*magic) == BINARY_MAGIC {
        binary_size(file).filter(|&size| size <= file.len())?;
        let address = file.as_ptr() as usize;
        // SAFETY: the whole binary is in the file, and its parameters are copied before the file is dropped.
        return Some(unsafe { image_parameters(address) });
    }
    Some(if is_text(magic) { parameters_in(PTX, file) } else { KernelParameters::new() })
}

/// Returns true if an image that begins with these bytes is a text: PTX.
fn is_text(magic: &[u8; 4]) -> bool {
    magic.iter().all(|&byte| byte.is_ascii_graphic() || byte.is_ascii_whitespace())
}

/// Returns the offset from the library's base and the length of the section with fat binaries (`.nv_fatbin`) of
/// a library's file.
pub(crate) fn section_of_file(path: &str) -> Option<(usize, usize)> {
    let file = std::fs::File::open(path).ok()?;
    let read = |at: usize, length: usize| {
        let mut bytes = vec![0; length];
        file.read_exact_at(&mut bytes, at as u64).ok().map(|()| bytes)
    };
    cubin::address_of_section(&read(0, 64)?.try_into().ok()?, read, b".nv_fatbin")
}

/// Returns the compiled code for one architecture (90 for 9.0) in a sequence of fat binaries.
///
/// # Safety
/// The range is loaded memory that stays loaded.
pub(crate) unsafe fn cubins_in(start: usize, length: usize, architecture: u32) -> Vec<Cow<'static, [u8]>> {
    let mut all = Vec::new();
    let mut at = start.next_multiple_of(8);
    while at + 16 <= start + length {
        // SAFETY: the address is inside the range. Behind a magic number, `entries` stays inside the size that
        // the header states.
        unsafe {
            if read::<u32>(at) != BINARY_MAGIC {
                at += 8;
                continue;
            }
            let size = binary_size(std::slice::from_raw_parts(at as *const u8, 16));
            let Some(size) = size.filter(|&size| size <= start + length - at) else { break };
            let code = entries(at).into_iter();
            let code = code.filter(|entry| entry.kind == CUBIN && entry.architecture == architecture);
            all.extend(code.filter_map(|entry| entry.decompressed()));
            at = (at + size).next_multiple_of(8);
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
    let mut entries = unsafe { entries(header_of(wrapper)) };
    // Compiled code comes before PTX and small code before large code, because entries are read in this order
    // until one contains the kernel.
    entries.sort_by_key(|entry| (entry.kind != CUBIN, entry.whole_size));
    Handle::new(FatBinary { entries, read: Mutex::default() })
}

/// Registers a kernel of a binary, by the address of its host stub.
pub(crate) fn register_kernel(binary: Handle<FatBinary>, kernel: usize, name: &[u8]) {
    if !contains(name, b"EmptyKernel") {
        return;
    }
    if let Some(binary) = binary.get() {
        lock(&EMPTY_KERNELS).insert(kernel, binary);
    }
}

/// Returns the version of a kernel's code that the card runs: the card's own version, unless the kernel's
/// binary is known to be compiled for other versions.
pub(crate) fn version(kernel: usize) -> u32 {
    let (major, minor) = host_state().spec.cc;
    let card = major * 10 + minor;
    let known = lock(&EMPTY_KERNELS).get(&kernel).copied();
    known
        .and_then(|binary| {
            binary.entries.iter().map(|entry| entry.architecture).filter(|&version| version <= card).max()
        })
        .unwrap_or(card)
}
