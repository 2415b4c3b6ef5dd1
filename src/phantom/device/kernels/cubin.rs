//! Reads the offsets and sizes of kernel parameters from compiled code.
//!
//! A cubin is an ELF file. Its section `.nv.info.NAME` contains the attributes of the kernel NAME, including
//! one for each parameter (`EIATTR_KPARAM_INFO`), as `cuobjdump -elf` prints them. NVIDIA does not document
//! the format. PTX is text that declares its parameters.

use std::collections::HashMap;

/// A parameter of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Parameter {
    /// The position of the parameter in the list of arguments.
    pub(crate) index: usize,
    /// The offset of the parameter in the parameter block, in bytes.
    pub(crate) offset: usize,
    /// The size of the parameter in bytes.
    pub(crate) size: usize,
}

/// The parameters of all kernels in a piece of code, by kernel name.
pub(crate) type KernelParameters = HashMap<Box<[u8]>, Box<[Parameter]>>;

pub(crate) const ELF_MAGIC: &[u8] = b"\x7fELF";

/// The size of a section header of a 64-bit ELF file.
const SECTION_HEADER: usize = 64;
/// The format of an attribute whose value consists of the stated number of bytes.
const FORMAT_SIZED: u8 = 4;
/// The type of the table of symbols, the flag of a section that is loaded, and the size of a symbol in bytes.
const SYMBOLS: u64 = 2;
const ALLOCATED: u64 = 2;
const SYMBOL: usize = 24;
/// The attribute with a kernel's symbol and the stack of its threads, in 32 bits each.
const MIN_STACK_SIZE: u8 = 0x12;
/// The attribute of a parameter.
const KPARAM_INFO: u8 = 0x17;
/// The attribute with the total size of the parameters, in 16 bits.
const CBANK_PARAM_SIZE: u8 = 0x19;

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<u64> {
    let mut wide = [0; 8];
    wide[..N].copy_from_slice(bytes.get(at..at.checked_add(N)?)?);
    Some(u64::from_le_bytes(wide))
}

fn size_at(bytes: &[u8], at: usize) -> Option<usize> {
    number::<8>(bytes, at).and_then(|value| usize::try_from(value).ok())
}

/// A section: the offset of its name in the table of names, and its range in the file. A section without data in
/// the file has a range, too.
struct Section {
    name: usize,
    kind: u64,
    flags: u64,
    address: usize,
    start: usize,
    end: usize,
}

fn sections(elf: &[u8]) -> Option<(Vec<Section>, usize)> {
    let table = size_at(elf, 0x28)?;
    let (entry, count) = (number::<2>(elf, 0x3a)? as usize, number::<2>(elf, 0x3c)? as usize);
    let names = number::<2>(elf, 0x3e)? as usize;
    if entry < SECTION_HEADER {
        return None;
    }
    let mut all = Vec::with_capacity(count);
    for index in 0..count {
        let header = table.checked_add(index * entry)?;
        let start = size_at(elf, header.checked_add(0x18)?)?;
        let end = start.checked_add(size_at(elf, header + 0x20)?)?;
        all.push(Section {
            name: number::<4>(elf, header)? as usize,
            kind: number::<4>(elf, header + 4)?,
            flags: number::<8>(elf, header + 8)?,
            address: size_at(elf, header + 0x10)?,
            start,
            end,
        });
    }
    Some((all, names))
}

/// Returns the length of an ELF file: the end of its last section or of the section table. `header` has the
/// first 64 bytes of the file, and `read` returns the bytes at an offset and with a length.
pub(crate) fn elf_length(header: &[u8; 64], read: impl Fn(usize, usize) -> Option<Vec<u8>>) -> Option<usize> {
    let table = size_at(header, 0x28)?;
    let (entry, count) = (number::<2>(header, 0x3a)? as usize, number::<2>(header, 0x3c)? as usize);
    let end = table.checked_add(entry * count)?;
    let headers = read(table, entry * count)?;
    let parts = (0..count).filter_map(|index| {
        // The section has no data in the file (SHT_NOBITS).
        if number::<4>(&headers, index * entry + 4)? == 8 {
            return None;
        }
        size_at(&headers, index * entry + 0x18)?.checked_add(size_at(&headers, index * entry + 0x20)?)
    });
    parts.max().map(|parts| parts.max(end)).or(Some(end))
}

/// Returns the address and the length of a section of an ELF file. `header` has the first 64 bytes of the file,
/// and `read` returns the bytes at an offset and with a length.
pub(crate) fn address_of_section(
    header: &[u8; 64],
    read: impl Fn(usize, usize) -> Option<Vec<u8>>,
    name: &[u8],
) -> Option<(usize, usize)> {
    let table = size_at(header, 0x28)?;
    let (entry, count) = (number::<2>(header, 0x3a)? as usize, number::<2>(header, 0x3c)? as usize);
    let headers = read(table, entry * count)?;
    // A file whose section table is at its beginning.
    let mut elf = header.to_vec();
    elf[0x28..0x30].copy_from_slice(&64u64.to_le_bytes());
    elf.extend(headers);
    let (sections, names) = sections(&elf).filter(|_| header.starts_with(ELF_MAGIC))?;
    let names = sections.get(names)?;
    let names = read(names.start, names.end - names.start)?;
    let found = sections.iter().find(|section| name_at(&names, section.name) == name)?;
    Some((found.address, found.end - found.start))
}

/// Returns the zero-terminated text at an offset, or an empty one.
fn name_at(texts: &[u8], at: usize) -> &[u8] {
    let rest = texts.get(at..).unwrap_or_default();
    rest.split(|&byte| byte == 0).next().unwrap_or_default()
}

/// What the code in a cubin takes on a card.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct CodeSize {
    /// The bytes of code, constants and variables; shared memory is not in them.
    pub(crate) bytes: u64,
    /// The stack of a thread in each kernel, in bytes, by the kernel's name (`EIATTR_MIN_STACK_SIZE`).
    pub(crate) stacks: Vec<(Box<[u8]>, u32)>,
}

impl std::ops::Add for CodeSize {
    type Output = Self;

    fn add(mut self, mut other: Self) -> Self {
        self.bytes += other.bytes;
        self.stacks.append(&mut other.stacks);
        self
    }
}

impl CodeSize {
    /// Reads the sizes of a cubin. Returns no sizes if it cannot be read.
    pub(crate) fn of_cubin(elf: &[u8]) -> Self {
        let mut all = Self::default();
        let Some((sections, names)) = sections(elf).filter(|_| elf.starts_with(ELF_MAGIC)) else {
            return all;
        };
        let part = |section: &Section| elf.get(section.start..section.end).unwrap_or_default();
        let Some(names) = sections.get(names).map(part) else { return all };
        let is = |section: &Section, name: &[u8]| name_at(names, section.name) == name;
        let symbols = sections.iter().find(|section| section.kind == SYMBOLS).map(part).unwrap_or_default();
        let texts = sections.iter().find(|section| is(section, b".strtab")).map(part).unwrap_or_default();
        for section in &sections {
            if section.flags & ALLOCATED != 0 && !name_at(names, section.name).starts_with(b".nv.shared") {
                all.bytes += (section.end - section.start) as u64;
            }
            if is(section, b".nv.info") {
                for (symbol, stack) in min_stacks(part(section)) {
                    let name = number::<4>(symbols, symbol as usize * SYMBOL).unwrap_or(0);
                    all.stacks.push((name_at(texts, name as usize).into(), stack));
                }
            }
        }
        all
    }
}

/// An attribute in a `.nv.info` section: its number, the number in its last two bytes, and the value that follows if
/// that number is a size.
struct Attribute<'a> {
    number: u8,
    short: usize,
    value: Option<&'a [u8]>,
}

/// Returns the attributes in a `.nv.info` section, up to the first value that does not end in it. For that value
/// returns `None`.
fn attributes(mut rest: &[u8]) -> impl Iterator<Item = Option<Attribute<'_>>> {
    std::iter::from_fn(move || {
        let (&[format, number, low, high], values) = rest.split_first_chunk::<4>()?;
        let short = usize::from(u16::from_le_bytes([low, high]));
        let size = if format == FORMAT_SIZED { short } else { 0 };
        let Some((value, after)) = values.split_at_checked(size) else {
            rest = &[];
            return Some(None);
        };
        rest = after;
        Some(Some(Attribute { number, short, value: (format == FORMAT_SIZED).then_some(value) }))
    })
}

/// Returns the numbers of the symbols of kernels and the stack of a thread in each, from the attributes of a file.
fn min_stacks(section: &[u8]) -> Vec<(u32, u32)> {
    let stacks = attributes(section).flatten().filter(|attribute| attribute.number == MIN_STACK_SIZE);
    let numbers = |value| Some((number::<4>(value, 0)? as u32, number::<4>(value, 4)? as u32));
    stacks.filter_map(|attribute| numbers(attribute.value?)).collect()
}

/// Returns the parameters of all kernels in a cubin.
pub(crate) fn of_cubin(elf: &[u8]) -> KernelParameters {
    let mut all = KernelParameters::new();
    let Some((sections, names)) = sections(elf).filter(|_| elf.starts_with(ELF_MAGIC)) else { return all };
    let names = sections.get(names).and_then(|names| elf.get(names.start..names.end));
    let Some(names) = names else { return all };
    for section in &sections {
        if let Some(kernel) = name_at(names, section.name).strip_prefix(b".nv.info.")
            && let Some(attributes) = elf.get(section.start..section.end)
            && let Some(parameters) = of_attributes(attributes)
        {
            all.insert(kernel.into(), parameters);
        }
    }
    all
}

/// Returns the parameters in a list of attributes, or `None` if the list is incomplete: an index is
/// missing, or the last parameter does not end at the stated total. The total may be rounded up by less
/// than the size of an address.
fn of_attributes(section: &[u8]) -> Option<Box<[Parameter]>> {
    let mut all = Vec::new();
    let mut total = None;
    for attribute in attributes(section) {
        let attribute = attribute?;
        if attribute.number == CBANK_PARAM_SIZE {
            total = Some(attribute.short);
        }
        if let (KPARAM_INFO, Some(values)) = (attribute.number, attribute.value) {
            // The value has four fields: an index (unused), the position, the offset, and a word whose bits
            // above the lowest 18 are the size.
            let (index, offset) = (number::<2>(values, 4)? as usize, number::<2>(values, 6)? as usize);
            all.push(Parameter { index, offset, size: (number::<4>(values, 8)? >> 18) as usize });
        }
    }
    all.sort_unstable_by_key(|parameter| parameter.index);
    // The size has 14 bits in this attribute. If a parameter is larger, a newer attribute describes it, so
    // the list is incomplete.
    let end = all.iter().map(|parameter| parameter.offset + parameter.size).max().unwrap_or(0);
    let is_whole = all.iter().enumerate().all(|(index, parameter)| parameter.index == index);
    let missing = total.unwrap_or(0).checked_sub(end)?;
    (is_whole && missing < size_of::<usize>()).then(|| all.into())
}

/// Returns the parameters of all kernels in a PTX text.
pub(crate) fn of_ptx(text: &str) -> KernelParameters {
    let mut all = KernelParameters::new();
    for entry in text.split(".entry").skip(1) {
        let Some((name, rest)) = entry.split_once('(') else { continue };
        let Some((list, _)) = rest.split_once(')') else { continue };
        let mut end = 0usize;
        let parameters = list.split(',').map(str::trim).filter(|text| !text.is_empty()).enumerate();
        let parameters = parameters.map(|(index, text)| {
            let (size, align) = ptx_parameter(text)?;
            let offset = end.next_multiple_of(align);
            end = offset + size;
            Some(Parameter { index, offset, size })
        });
        if let Some(parameters) = parameters.collect::<Option<Vec<_>>>() {
            all.insert(name.trim().as_bytes().into(), parameters.into());
        }
    }
    all
}

/// Returns the size and the alignment of a parameter: `.param .u64 name` or `.param .align 8 .b8 name[32]`.
fn ptx_parameter(text: &str) -> Option<(usize, usize)> {
    let mut words = text.split_whitespace();
    if words.next() != Some(".param") {
        return None;
    }
    let (mut width, mut align) = (None, None);
    while let Some(word) = words.next() {
        match word {
            ".align" => align = words.next()?.parse::<usize>().ok().filter(|align| align.is_power_of_two()),
            ".ptr" | ".global" | ".const" | ".shared" | ".local" => {}
            _ if word.starts_with('.') => {
                let bits: usize =
                    word.trim_start_matches(|byte: char| !byte.is_ascii_digit()).parse().ok()?;
                // After the type of a pointer, the declaration has the alignment of its target.
                width = Some(bits / 8).filter(|width| width.is_power_of_two());
                align = align.or(width);
            }
            _ => {
                let width = width?;
                let count = match word.split_once('[') {
                    Some((_, count)) => count.trim_end_matches(']').parse::<usize>().ok()?,
                    None => 1,
                };
                let align = if count == 1 { width } else { align.unwrap_or(width) };
                return Some((width.checked_mul(count)?, align));
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Builds an ELF file with one `.nv.info.NAME` section.
    fn cubin(kernel: &str, attributes: &[u8]) -> Vec<u8> {
        let names = [b"\0.shstrtab\0.nv.info.", kernel.as_bytes(), b"\0"].concat();
        let mut elf = vec![0u8; 64];
        elf[..4].copy_from_slice(ELF_MAGIC);
        let table = 64 + names.len() + attributes.len();
        elf[0x28..0x30].copy_from_slice(&(table as u64).to_le_bytes());
        elf[0x3a..0x3c].copy_from_slice(&64u16.to_le_bytes());
        elf[0x3c..0x3e].copy_from_slice(&3u16.to_le_bytes());
        elf[0x3e..0x40].copy_from_slice(&1u16.to_le_bytes());
        elf.extend_from_slice(&names);
        elf.extend_from_slice(attributes);
        for (name, start, size) in [(0, 0, 0), (1, 64, names.len()), (11, 64 + names.len(), attributes.len())]
        {
            let mut header = [0u8; 64];
            header[..4].copy_from_slice(&(name as u32).to_le_bytes());
            header[0x18..0x20].copy_from_slice(&(start as u64).to_le_bytes());
            header[0x20..0x28].copy_from_slice(&(size as u64).to_le_bytes());
            elf.extend_from_slice(&header);
        }
        elf
    }

    fn attribute(index: u16, offset: u16, size: u32) -> Vec<u8> {
        let mut bytes = vec![FORMAT_SIZED, KPARAM_INFO, 12, 0, 0, 0, 0, 0];
        bytes.extend_from_slice(&index.to_le_bytes());
        bytes.extend_from_slice(&offset.to_le_bytes());
        bytes.extend_from_slice(&(size << 18 | 0x1_f000).to_le_bytes());
        bytes
    }

    #[test]
    fn the_parameters_of_a_kernel_are_read_from_its_cubin() {
        let total = [3, CBANK_PARAM_SIZE, 24, 0];
        let attributes = [attribute(1, 8, 16), total.to_vec(), attribute(0, 0, 4)].concat();
        let all = of_cubin(&cubin("_Z4workv", &attributes));
        let expected =
            [Parameter { index: 0, offset: 0, size: 4 }, Parameter { index: 1, offset: 8, size: 16 }];
        assert_eq!(all.get(&b"_Z4workv"[..]).map(|parameters| &parameters[..]), Some(&expected[..]));
    }

    #[test]
    fn a_cubin_that_is_cut_or_contradicts_itself_has_no_parameters() {
        let total = [3, CBANK_PARAM_SIZE, 8, 0];
        let whole = cubin("k", &[attribute(0, 0, 8), total.to_vec()].concat());
        assert_eq!(of_cubin(&whole).len(), 1);
        // The last 24 bytes of the file belong to a section header and are not read. Every shorter file ->
        // its kernel has no parameters.
        for length in 0..whole.len() - 24 {
            assert!(of_cubin(&whole[..length]).is_empty(), "{length}");
        }
        for byte in 0..whole.len() {
            let mut hostile = whole.clone();
            hostile[byte] = 0xff;
            // Setup: damaged bytes -> no panic.
            of_cubin(&hostile);
        }
        let larger = [3, CBANK_PARAM_SIZE, 16, 0];
        assert!(of_cubin(&cubin("k", &[attribute(0, 0, 8), larger.to_vec()].concat())).is_empty());
        assert!(of_cubin(&cubin("k", &[attribute(1, 0, 8), total.to_vec()].concat())).is_empty());
    }

    #[test]
    fn the_parameters_of_a_kernel_are_read_from_its_ptx() {
        let text = ".visible .entry add(\n .param .u64 .ptr .global .align 4 add_0,\n .param .u32 add_1,\n \
                    .param .align 8 .b8 add_2[24],\n .param .f32 add_3\n)\n{ ret; }\n.entry none() {}\n\
                    .entry odd(.param .v4 x) {}";
        let all = of_ptx(text);
        let sizes = |name: &str| {
            all.get(name.as_bytes()).map(|parameters| parameters.iter().map(|p| (p.offset, p.size)).collect())
        };
        assert_eq!(sizes("add"), Some(vec![(0, 8), (8, 4), (16, 24), (40, 4)]));
        assert_eq!(sizes("none"), Some(vec![]));
        assert_eq!(sizes("odd"), None);
    }
}
