//! Divides a process's memory into parts: classifies the mappings in `/proc/PID/smaps` by their use.

use std::collections::BTreeMap;
use std::io::{self, BufRead};
use std::ops::Range;

use memtrace_trace::host::kib_of;
use memtrace_trace::host::parts::{
    ANONYMOUS, ARENAS, DRIVER, FILE, HEAP, LIBRARIES, OTHER_FILES, OWN, SHARED, STACKS,
};

/// The memory of a part of the process, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PartBytes {
    /// The proportional share of the process: memory that several processes map is divided equally between
    /// them.
    pub(crate) pss: i64,
    /// Resident bytes.
    pub(crate) rss: i64,
    /// Resident bytes that differ from a file, or have no file.
    pub(crate) dirty: i64,
    /// Bytes in swap.
    pub(crate) swap: i64,
}

impl PartBytes {
    pub(crate) fn add(&mut self, more: PartBytes) {
        self.pss += more.pss;
        self.rss += more.rss;
        self.dirty += more.dirty;
        self.swap += more.swap;
    }

    /// Takes `rss` resident bytes out of the part, with the corresponding shares of the proportional and the
    /// dirty bytes, and returns them. Bytes in swap stay in the part.
    fn take(&mut self, rss: i64) -> PartBytes {
        let rss = rss.clamp(0, self.rss);
        let share = |bytes: i64| {
            if self.rss == 0 {
                0
            } else {
                (i128::from(bytes) * i128::from(rss) / i128::from(self.rss)) as i64
            }
        };
        let taken = PartBytes { pss: share(self.pss), rss, dirty: share(self.dirty), swap: 0 };
        self.pss -= taken.pss;
        self.rss -= taken.rss;
        self.dirty -= taken.dirty;
        taken
    }
}

/// Memory at known addresses, and the name of the part to which it belongs.
#[derive(Clone, Debug)]
pub(crate) struct KnownMemory {
    /// The range of addresses.
    pub(crate) range: Range<u64>,
    /// The name of the part.
    pub(crate) part: &'static str,
}

/// The maximum number of files and shared memories that are listed by name.
const MOST_NAMED: usize = 12;
/// The size and the alignment of the address range that glibc reserves for an arena of malloc.
const ARENA: u64 = 64 << 20;
/// The maximum size in bytes of the guard before a thread's stack, and of the stack itself.
const MOST_GUARD: u64 = 1 << 20;
const MOST_STACK: u64 = 1 << 30;

/// A mapping of the process, from its entry in `smaps`.
struct Mapping {
    range: Range<u64>,
    /// True if the mapping permits any kind of access. A guard permits none.
    is_open: bool,
    /// True if the mapping has no file and no name from the kernel.
    is_anonymous: bool,
    part: String,
    bytes: PartBytes,
}

/// Reads `smaps` and returns the parts with resident or swapped bytes; the parts sum to the process's memory.
/// `known` is memory whose part is known by its address. In a mapping without a file, this part takes
/// precedence over the part of the mapping.
///
/// # Errors
/// Returns an error if the file cannot be read to its end.
pub(crate) fn parts(
    smaps: impl BufRead,
    known: &mut [KnownMemory],
) -> io::Result<BTreeMap<String, PartBytes>> {
    let mappings = read(smaps)?;
    known.sort_unstable_by_key(|memory| memory.range.start);
    let mut parts: BTreeMap<String, PartBytes> = BTreeMap::new();
    let mut add = |part: &str, bytes: PartBytes| {
        if bytes.rss > 0 || bytes.swap > 0 {
            match parts.get_mut(part) {
                Some(sum) => sum.add(bytes),
                None => drop(parts.insert(part.to_owned(), bytes)),
            }
        }
    };
    // A known range may start before a mapping and reach into it. Such a range starts at most `longest` bytes
    // before the mapping. Several ranges may do so, because ranges may overlap (a pinned tensor).
    let longest = known.iter().map(|memory| memory.range.end - memory.range.start).max().unwrap_or(0);
    for (at, mapping) in mappings.iter().enumerate() {
        let mut bytes = mapping.bytes;
        let is_file = mapping.part == LIBRARIES || mapping.part.starts_with(FILE);
        if !is_file && bytes.rss > 0 {
            let from = mapping.range.start.saturating_sub(longest);
            let first = known.partition_point(|memory| memory.range.start < from);
            for memory in known[first..].iter().take_while(|memory| memory.range.start < mapping.range.end) {
                let start = memory.range.start.max(mapping.range.start);
                let length = memory.range.end.min(mapping.range.end).saturating_sub(start);
                add(memory.part, bytes.take(length as i64));
            }
        }
        let part = if mapping.is_anonymous { anonymous_part(&mappings, at) } else { &mapping.part };
        add(part, bytes);
    }
    Ok(with_few_names(parts))
}

/// Classifies an anonymous mapping by its neighbors.
fn anonymous_part(mappings: &[Mapping], at: usize) -> &'static str {
    let Range { start, end } = mappings[at].range;
    let length = end - start;
    let before = at.checked_sub(1).map(|before| &mappings[before]).filter(|before| before.range.end == start);
    let after = mappings.get(at + 1).filter(|after| after.range.start == end);
    let is_guard = |mapping: &Mapping| !mapping.is_open && mapping.is_anonymous;
    // An arena consists of a used part that is followed by a reserved part.
    let reserved = after.filter(|after| is_guard(after)).map_or(0, |after| after.range.end - end);
    if start.is_multiple_of(ARENA)
        && length <= ARENA
        && (length == ARENA || (length + reserved).is_multiple_of(ARENA))
    {
        return ARENAS;
    }
    let has_guard =
        before.is_some_and(|before| is_guard(before) && before.range.end - before.range.start <= MOST_GUARD);
    if has_guard && length <= MOST_STACK { STACKS } else { ANONYMOUS }
}

/// Merges all files and shared memories except the [`MOST_NAMED`] largest into the part [`OTHER_FILES`].
fn with_few_names(parts: BTreeMap<String, PartBytes>) -> BTreeMap<String, PartBytes> {
    let mut named: Vec<(&String, i64)> = parts
        .iter()
        .filter(|(name, _)| name.starts_with(FILE) || name.starts_with(SHARED))
        .map(|(name, bytes)| (name, -bytes.rss))
        .collect();
    if named.len() <= MOST_NAMED {
        return parts;
    }
    named.sort_by_key(|(_, bytes)| *bytes);
    let small: Vec<String> = named[MOST_NAMED..].iter().map(|(name, _)| (*name).clone()).collect();
    let mut parts = parts;
    for name in small {
        if let Some(bytes) = parts.remove(&name) {
            parts.entry(OTHER_FILES.to_owned()).or_default().add(bytes);
        }
    }
    parts
}

fn read(mut smaps: impl BufRead) -> io::Result<Vec<Mapping>> {
    let mut mappings: Vec<Mapping> = Vec::new();
    let mut line = Vec::new();
    loop {
        line.clear();
        if smaps.read_until(b'\n', &mut line)? == 0 {
            return Ok(mappings);
        }
        // The names of values begin with a capital letter. The first line of a mapping begins with an address
        // in lower case.
        if !line.first().is_some_and(u8::is_ascii_uppercase) {
            let text = String::from_utf8_lossy(&line);
            mappings.extend(mapping(text.trim_end_matches('\n')));
            continue;
        }
        let (Some(mapping), Ok(line)) = (mappings.last_mut(), std::str::from_utf8(&line)) else { continue };
        let bytes = &mut mapping.bytes;
        match line.as_bytes()[0] {
            b'R' => bytes.rss = kib_of(line, "Rss").unwrap_or(bytes.rss),
            b'P' => {
                bytes.pss = kib_of(line, "Pss").unwrap_or(bytes.pss);
                bytes.dirty += kib_of(line, "Private_Dirty").unwrap_or(0);
            }
            b'S' => {
                bytes.dirty += kib_of(line, "Shared_Dirty").unwrap_or(0);
                bytes.swap = kib_of(line, "Swap").unwrap_or(bytes.swap);
            }
            _ => {}
        }
    }
}

/// Parses the first line of a mapping: `START-END rwxp OFFSET DEVICE INODE PATH`.
fn mapping(line: &str) -> Option<Mapping> {
    let (start, rest) = line.split_once('-')?;
    let (end, rest) = rest.split_once(' ')?;
    let address = |text| u64::from_str_radix(text, 16).ok();
    let range = address(start)?..address(end)?;
    let mut fields = rest.splitn(5, ' ');
    let (modes, path) = (fields.next()?, fields.nth(3)?.trim_start());
    let is_anonymous = path.is_empty() || path.starts_with("[anon:");
    let part = if is_anonymous { String::new() } else { part_of(path, modes) };
    (range.start < range.end).then(|| Mapping {
        is_open: !modes.starts_with("---"),
        is_anonymous,
        range,
        part,
        bytes: PartBytes::default(),
    })
}

/// Returns the name of the part to which a mapping with a path belongs.
fn part_of(path: &str, modes: &str) -> String {
    let file = path.strip_suffix(" (deleted)").unwrap_or(path);
    let name = file.rsplit('/').next().unwrap_or(file);
    if path == "[heap]" {
        HEAP.to_owned()
    } else if path.starts_with("[stack") {
        STACKS.to_owned()
    } else if path.starts_with('[') || name.ends_with(".so") || name.contains(".so.") || modes.contains('x') {
        LIBRARIES.to_owned()
    } else if file.starts_with("/dev/nvidia") {
        DRIVER.to_owned()
    } else if name.starts_with("memtrace-") && file.contains("/shm/") {
        OWN.to_owned()
    } else if file.starts_with("/dev/shm/") || file.starts_with("/memfd:") || file.starts_with("/SYSV") {
        format!("{SHARED}{}", family(file))
    } else if file == "/dev/zero" {
        format!("{SHARED}(anonymous)")
    } else {
        format!("{FILE}{file}")
    }
}

/// Returns the name of shared memory without the portion that differs between memories of the same kind:
/// `/dev/shm/torch_*`.
fn family(file: &str) -> String {
    let start = file.rfind('/').map_or(0, |at| at + 1);
    match file[start..].find(['_', '-', '.', '0']) {
        Some(at) if start + at + 1 < file.len() => format!("{}*", &file[..=start + at]),
        _ => file.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(range: &str, modes: &str, path: &str, [pss, rss, dirty, swap]: [i64; 4]) -> String {
        format!(
            "{range} {modes} 00000000 00:00 0    {path}\nSize: 9 kB\nRss: {rss} kB\nPss: {pss} kB\n\
             Pss_Dirty: 0 kB\nShared_Clean: 0 kB\nPrivate_Dirty: {dirty} kB\nSwap: {swap} kB\nSwapPss: 0 kB\n\
             VmFlags: rd wr\n"
        )
    }

    fn sum(parts: &BTreeMap<String, PartBytes>) -> i64 {
        parts.values().map(|part| part.pss >> 10).sum()
    }

    #[test]
    fn the_parts_of_a_process_are_distinguished_and_sum_to_its_memory() {
        let text = [
            entry("400000-500000", "r-xp", "/usr/bin/python3.12", [10, 20, 0, 0]),
            entry("600000-700000", "rw-p", "[heap]", [30, 30, 30, 4]),
            entry("7f0004000000-7f0004100000", "rw-p", "", [40, 40, 40, 0]),
            entry("7f0004100000-7f0008000000", "---p", "", [0, 0, 0, 0]),
            entry("7f0100000000-7f0100001000", "---p", "", [0, 0, 0, 0]),
            entry("7f0100001000-7f0100801000", "rw-p", "", [8, 8, 8, 0]),
            entry("7f0200000000-7f0210000000", "rw-p", "", [100, 100, 100, 0]),
            entry("7f0300000000-7f0310000000", "r--s", "/models/a b.safetensors", [500, 500, 0, 0]),
            entry("7f0400000000-7f0410000000", "rw-s", "/dev/shm/torch_77_12_0 (deleted)", [6, 12, 12, 0]),
            entry("7f0500000000-7f0510000000", "rw-s", "/dev/shm/torch_78_1_0", [6, 12, 12, 0]),
            entry("7f0600000000-7f0610000000", "rw-s", "/dev/nvidiactl", [3, 3, 0, 0]),
            entry("7ffe00000000-7ffe00021000", "rw-p", "[stack]", [2, 2, 2, 0]),
        ]
        .concat();
        let tensor =
            |start: u64, kib: u64| KnownMemory { range: start..start + (kib << 10), part: "tensors" };
        // Setup: the two tensors in the mapping have 140 KiB, but only 100 KiB of the mapping are resident ->
        // the tensors count 100 KiB.
        let mut known = [tensor(0x7f02_0000_1000, 60), tensor(0x7f02_0100_0000, 80), tensor(0x10, 1)];
        let parts = parts(text.as_bytes(), &mut known).unwrap();
        let kib = |name: &str| parts.get(name).map(|part| (part.pss >> 10, part.rss >> 10));
        assert_eq!(kib(LIBRARIES), Some((10, 20)));
        assert_eq!((kib(HEAP), kib(ARENAS)), (Some((30, 30)), Some((40, 40))));
        assert_eq!(kib(STACKS), Some((10, 10)));
        assert_eq!((kib("tensors"), kib(ANONYMOUS)), (Some((100, 100)), None));
        assert_eq!(kib("file /models/a b.safetensors"), Some((500, 500)));
        assert_eq!(kib("shared /dev/shm/torch_*"), Some((12, 24)));
        assert_eq!(kib(DRIVER), Some((3, 3)));
        assert_eq!((parts[HEAP].swap, parts[HEAP].dirty), (4 << 10, 30 << 10));
        assert_eq!(sum(&parts), 10 + 30 + 40 + 8 + 100 + 500 + 12 + 3 + 2);
    }

    #[test]
    fn many_files_become_one_part_and_a_broken_file_ends_nothing() {
        let many: String = (1..=100)
            .map(|n| entry(&format!("{n}000-{n}800"), "r--s", &format!("/data/{n}.bin"), [n, n, 0, 0]))
            .collect();
        let found = parts(many.as_bytes(), &mut []).unwrap();
        assert_eq!(found.len(), MOST_NAMED + 1);
        assert_eq!((sum(&found), found["file /data/100.bin"].rss), (5050, 100 << 10));
        for text in ["", "x", "zz-yy rw-p\n", "9-1 rw-p 0 0:0 0 \nRss: 5 kB\n", "1-2\nPss: kB\n"] {
            assert_eq!(sum(&parts(text.as_bytes(), &mut []).unwrap()), 0, "{text}");
        }
        assert!(parts(&b"\xff-\xfe rw-p\nRss: \xff kB\n"[..], &mut []).unwrap().is_empty());
    }
}
