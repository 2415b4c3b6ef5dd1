//! Reads the dynamic section of a loaded library from memory: the symbols that the library defines, and the
//! functions to which the loader has bound its calls.
//!
//! Called during a walk of the loaded libraries, so that the library stays loaded. Nothing is opened or
//! closed and no `dlopen` lock is taken, so no destructor of another library can run here.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicUsize, Ordering};

use libc::{Elf64_Sym, Elf64_Xword};

/// An entry of a dynamic section.
#[repr(C)]
struct Entry {
    tag: Elf64_Xword,
    value: Elf64_Xword,
}

/// A relocation: the address of a word that the loader fills in, and how it computes the value.
#[repr(C)]
struct Relocation {
    offset: Elf64_Xword,
    info: Elf64_Xword,
    addend: i64,
}

const DT_PLTRELSZ: u64 = 2;
const DT_HASH: u64 = 4;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_RELA: u64 = 7;
const DT_RELASZ: u64 = 8;
const DT_JMPREL: u64 = 23;
const DT_GNU_HASH: u64 = 0x6fff_fef5;
const DT_VERSYM: u64 = 0x6fff_fff0;
const DT_RELACOUNT: u64 = 0x6fff_fff9;

/// The types of relocations for which the loader writes the address of a symbol: `R_X86_64_64`, `_GLOB_DAT` and
/// `_JUMP_SLOT`; on aarch64 `R_AARCH64_ABS64`, `_GLOB_DAT` and `_JUMP_SLOT`.
const ADDRESSES: [u64; 3] = if cfg!(target_arch = "aarch64") { [257, 1025, 1026] } else { [1, 6, 7] };
/// The accepted symbol types: no type, data, and function. An indirect function (`STT_GNU_IFUNC`) is
/// excluded, because its symbol is a resolver, which must be called to get the address.
const TYPES: [u8; 3] = [0, 1, 2];
/// The bit of a symbol's version that marks a version that is not the default.
const HIDDEN: u16 = 0x8000;

/// The tables that a dynamic section points to.
pub(crate) struct DynamicSection {
    base: usize,
    symbols: *const Elf64_Sym,
    names: *const c_char,
    versions: *const u16,
    hash: *const u32,
    gnu_hash: *const u32,
    /// The relocations for calls, then the other relocations: start and count.
    relocations: [(*const Relocation, usize); 2],
}

impl DynamicSection {
    /// Reads the section at `address`, of at most `size` bytes. Returns `None` if it has no symbols.
    ///
    /// # Safety
    /// `address` is the dynamic section of a library that the loader has loaded at `base`, and the library
    /// stays loaded while the result is used.
    pub(crate) unsafe fn read(base: usize, address: usize, size: usize) -> Option<DynamicSection> {
        // SAFETY: by the contract.
        let entries =
            unsafe { std::slice::from_raw_parts(address as *const Entry, size / size_of::<Entry>()) };
        let value = |tag| {
            let ends = entries.iter().take_while(|entry| entry.tag != 0);
            ends.into_iter().find(|entry| entry.tag == tag).map_or(0, |entry| entry.value as usize)
        };
        // The loader has made the addresses in the section absolute. It cannot do this in a read-only
        // section, such as the vDSO's, so a value below `base` is relative to `base`.
        let place = |tag| match value(tag) {
            0 => 0,
            at if at < base => base + at,
            at => at,
        };
        let table = |start: u64, bytes: u64, skipped: usize| {
            let count = value(bytes) / size_of::<Relocation>();
            let skipped = skipped.min(count);
            let start = place(start) as *const Relocation;
            if start.is_null() { (null(), 0) } else { (start.wrapping_add(skipped), count - skipped) }
        };
        let section = DynamicSection {
            base,
            symbols: place(DT_SYMTAB) as *const Elf64_Sym,
            names: place(DT_STRTAB) as *const c_char,
            versions: place(DT_VERSYM) as *const u16,
            hash: place(DT_HASH) as *const u32,
            gnu_hash: place(DT_GNU_HASH) as *const u32,
            relocations: [
                table(DT_JMPREL, DT_PLTRELSZ, 0),
                // Skip the first `DT_RELACOUNT` relocations, which have no symbol. A torch library has
                // hundreds of thousands of these.
                table(DT_RELA, DT_RELASZ, value(DT_RELACOUNT)),
            ],
        };
        (!section.symbols.is_null() && !section.names.is_null()).then_some(section)
    }

    /// Returns the address of `name` in its default version, or null if the library itself does not define
    /// it.
    pub(crate) fn find(&self, name: &CStr) -> *mut c_void {
        let is_it = |index: &u32| {
            let symbol = self.symbol(*index);
            // SAFETY: the table has a version for each symbol.
            let is_hidden =
                !self.versions.is_null() && unsafe { *self.versions.add(*index as usize) } & HIDDEN != 0;
            symbol.st_shndx != 0
                && symbol.st_value != 0
                && symbol.st_info >> 4 != 0
                && TYPES.contains(&(symbol.st_info & 15))
                && !is_hidden
                && self.name(symbol) == name
        };
        let found = if self.gnu_hash.is_null() {
            self.candidates(name).find(is_it)
        } else {
            self.gnu_candidates(name).find(is_it)
        };
        found.map_or(null_mut(), |index| self.address(self.symbol(index)) as *mut c_void)
    }

    /// Visits the library's references to functions whose names start with `prefix`. Passes the address that
    /// the loader wrote, and the address of the library's own function of that name, or 0 if it has none.
    pub(crate) fn references(&self, prefix: &str, mut visit: impl FnMut(usize, usize)) {
        for (start, count) in self.relocations {
            for index in 0..count {
                // SAFETY: the table has `count` entries.
                let relocation = unsafe { &*start.add(index) };
                let number = (relocation.info >> 32) as u32;
                let is_address =
                    ADDRESSES.contains(&(relocation.info & 0xffff_ffff)) && relocation.addend == 0;
                if number == 0 || !is_address {
                    continue;
                }
                let symbol = self.symbol(number);
                // SAFETY: the names are C strings in one table; `strncmp` compares no byte after the end of a
                // name.
                let order = unsafe {
                    libc::strncmp(
                        self.names.add(symbol.st_name as usize),
                        prefix.as_ptr().cast(),
                        prefix.len(),
                    )
                };
                if order != 0 {
                    continue;
                }
                let place = self.base.wrapping_add(relocation.offset as usize) as *mut usize;
                // SAFETY: the loader has written this word, and may still bind it on another thread, hence
                // the atomic read.
                let address = unsafe { AtomicUsize::from_ptr(place) }.load(Ordering::Relaxed);
                let own = if symbol.st_shndx == 0 { 0 } else { self.address(symbol) };
                visit(address, own);
            }
        }
    }

    fn address(&self, symbol: &Elf64_Sym) -> usize {
        self.base.wrapping_add(symbol.st_value as usize)
    }

    fn symbol(&self, index: u32) -> &Elf64_Sym {
        // SAFETY: the loader's own tables name the symbol.
        unsafe { &*self.symbols.add(index as usize) }
    }

    fn name(&self, symbol: &Elf64_Sym) -> &CStr {
        // SAFETY: the names are C strings in one table.
        unsafe { CStr::from_ptr(self.names.add(symbol.st_name as usize)) }
    }

    /// Returns the symbols whose names have the same hash as `name` (DT_GNU_HASH).
    fn gnu_candidates(&self, name: &CStr) -> impl Iterator<Item = u32> {
        let hash = name
            .to_bytes()
            .iter()
            .fold(5381u32, |hash, byte| hash.wrapping_mul(33).wrapping_add((*byte).into()));
        // SAFETY: the table begins with four numbers, followed by the words of the filter, the buckets, and
        // the chains of the symbols, starting with the symbol `first`. The last entry of a chain is odd.
        let at = |index: usize| unsafe { *self.gnu_hash.add(index) };
        let (buckets, first, filter) = (at(0), at(1), at(2) as usize);
        let bucket = 4 + 2 * filter;
        let start = if buckets == 0 { 0 } else { at(bucket + (hash % buckets) as usize) };
        let chain = move |index: u32| at(bucket + buckets as usize + (index - first) as usize);
        let is_last = move |index: u32| chain(index) & 1 == 1;
        let all = std::iter::successors((start >= first && start != 0).then_some(start), move |index| {
            (!is_last(*index)).then_some(index + 1)
        });
        all.filter(move |index| chain(*index) | 1 == hash | 1)
    }

    /// Returns the symbols in the bucket of `name` in the older hash table (DT_HASH).
    fn candidates(&self, name: &CStr) -> impl Iterator<Item = u32> {
        let hash = name.to_bytes().iter().fold(0u32, |hash, byte| {
            let hash = (hash << 4).wrapping_add((*byte).into());
            let high = hash & 0xf000_0000;
            (hash ^ (high >> 24)) & !high
        });
        let table = self.hash;
        // SAFETY: the table begins with the number of buckets and the number of chains; the buckets and the
        // chains follow. A chain ends in 0.
        let at = move |index: usize| if table.is_null() { 0 } else { unsafe { *table.add(index) } };
        let buckets = at(0);
        let start = if buckets == 0 { 0 } else { at(2 + (hash % buckets) as usize) };
        let some = |index: u32| (index != 0).then_some(index);
        std::iter::successors(some(start), move |index| some(at(2 + buckets as usize + *index as usize)))
    }
}
