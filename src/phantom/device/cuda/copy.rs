//! Copies and fills. Bytes are copied to or from a device only in small ranges of known content ([`values`]).
//! The content of a large range counts as unknown, so a large copy to a device moves no bytes.

use std::sync::atomic::{AtomicBool, Ordering};

use memtrace_util::phantom_variables::READS_VARIABLE;

use crate::core::address_tables::{self, Targets};
use crate::core::addresses;
use crate::core::device::Device;
use crate::core::ffi::{INVALID_VALUE, LAUNCH_TIMEOUT, OK, Status};
use crate::core::host_pages;
use crate::core::host_state::{fail, host_state};
use crate::core::loop_guard;
use crate::core::values::{self, HostRead, SMALL};
use crate::core::vram::{self, BlockPurpose};
use crate::cuda::reach::{Holder, devices_of, hold};
use crate::cuda::vmm;

/// Returns the device of a mapped range, or `None` for host memory. Fails for null, unless the range is empty,
/// and for a device address that is not mapped.
fn device_of_range(address: usize, size: usize) -> Result<Option<&'static Device>, Status> {
    if address == 0 && size > 0 {
        return Err(INVALID_VALUE);
    }
    if !vram::is_device(address) {
        return Ok(None);
    }
    let end = address.checked_add(size).ok_or(INVALID_VALUE)?;
    let index = match vram::device_index_of(address) {
        Some(index) => {
            let device = host_state().devices.get(index).ok_or(INVALID_VALUE)?;
            let vram = device.vram();
            let (start, block) = vram.find(address).ok_or(INVALID_VALUE)?;
            if end > start + block.size {
                return Err(INVALID_VALUE);
            }
            index
        }
        None => vmm::device_of(address, size).ok_or(INVALID_VALUE)?,
    };
    host_state().devices.get(index).map(Some).ok_or(INVALID_VALUE)
}

/// Returns the device of a mapped address.
pub(crate) fn device_of(address: usize) -> Option<&'static Device> {
    device_of_range(address, 1).ok().flatten()
}

/// Moves bytes.
///
/// # Safety
/// Both ranges are host memory or mapped device memory.
unsafe fn move_bytes(to: usize, from: usize, size: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, size) }
}

/// Sets bytes to one value.
///
/// # Safety
/// The range is host memory or mapped device memory.
unsafe fn set_bytes(to: usize, value: u8, size: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::write_bytes(to as *mut u8, value, size) }
}

/// Copies `size` bytes between host memory and device memory, in any direction.
///
/// # Safety
/// A range that is not device memory is host memory, good for `size` bytes.
pub(crate) unsafe fn copy(to: usize, from: usize, size: usize) -> Status {
    if size == 0 {
        return OK;
    }
    let (target, source) = match (device_of_range(to, size), device_of_range(from, size)) {
        (Ok(target), Ok(source)) => (target, source),
        (Err(status), _) | (_, Err(status)) => return fail(status),
    };
    match (target, source) {
        // SAFETY: the caller's promise.
        (None, None) => unsafe { move_bytes(to, from, size) },
        // SAFETY: the caller promises `from`, and `to` is mapped.
        (Some(device), None) => unsafe { take_input(device, to, from, size) },
        // SAFETY: both ranges are mapped.
        (Some(target), Some(source)) => unsafe { copy_on_devices(target, to, source, from, size) },
        // SAFETY: the caller promises `to`, and `from` is mapped.
        (None, Some(device)) => return unsafe { read_to_host(to, device, from, size) },
    }
    OK
}

/// Copies host memory to a device.
///
/// # Safety
/// `to` is mapped, and `from` is good for `size` bytes.
unsafe fn take_input(device: &Device, to: usize, from: usize, size: usize) {
    // If large data is a table of addresses, its beginning holds addresses, too. So only the beginning is
    // examined. SAFETY: the caller's promise.
    let beginning = unsafe { std::slice::from_raw_parts(from as *const u8, size.min(SMALL)) };
    if size <= SMALL {
        loop_guard::count_input(beginning);
        // SAFETY: the caller's promise.
        unsafe { move_bytes(to, from, size) };
        device.values().mark_known(to, size);
    } else {
        loop_guard::count_large_input();
        device.values().overwrite(to, size);
    }
    note_addresses(device, to, beginning, size);
}

/// Copies device memory to a device, with all that is known about its content.
///
/// # Safety
/// Both ranges are mapped.
unsafe fn copy_on_devices(target: &Device, to: usize, source: &Device, from: usize, size: usize) {
    let mut targets = Targets::default();
    let (parts, answers, is_mask) = {
        let values = source.values();
        if address_tables::exist() {
            values.targets(from, from + size, &mut targets);
        }
        let (parts, answers) = match size {
            ..=SMALL => (values.known_parts(from, size), values.answered_parts(from, size)),
            _ => Default::default(),
        };
        (parts, answers, values.is_mask(from, size))
    };
    let mut values = target.values();
    values.overwrite(to, size);
    match is_mask {
        true if std::ptr::eq(target, source) && size <= SMALL => values.link_mask(from, to, size, false),
        true => values.set_mask(to, size),
        false => {}
    }
    for (start, end) in parts {
        let part_to = to + (start - from);
        // SAFETY: parts of the two ranges, which are mapped.
        unsafe { move_bytes(part_to, start, end - start) };
        values.mark_known(part_to, end - start);
    }
    for (start, end) in answers {
        let part_to = to + (start - from);
        if is_mask {
            // If the range held unknown flags, it keeps this property: when a later launch overwrites the
            // answer, the range holds unknown flags again.
            values.set_mask(part_to, end - start);
        }
        // SAFETY: a part of the range that was written above.
        let answer = unsafe { std::slice::from_raw_parts(part_to as *const u8, end - start) };
        values.mark_answered(part_to, answer.len(), number(answer));
    }
    if !targets.is_empty() {
        values.tables.add(to, to + size, &targets);
    }
}

/// Marks the range at `to` as a table of addresses if its `beginning` holds addresses of mapped device
/// memory. If the range is in a kernel's global variable, the addresses are also remembered (`hold`), because
/// later kernels can use them.
fn note_addresses(device: &Device, to: usize, beginning: &[u8], size: usize) {
    let aligned = beginning.get(to.next_multiple_of(8) - to..).unwrap_or_default();
    let mut targets = Targets::default();
    addresses::in_table(aligned, |address| {
        if device_of(address).is_some() {
            targets.add(address);
        }
    });
    if !targets.is_empty() {
        device.values().tables.add(to, to + size, &targets);
        if is_global_variable(device, to) {
            targets
                .addresses()
                .unwrap_or_default()
                .iter()
                .for_each(|&address| hold(Holder::Kernels, address));
        }
    }
}

/// Returns true if an address is in a global variable of a kernel.
fn is_global_variable(device: &Device, address: usize) -> bool {
    device.vram().find(address).is_some_and(|(_, block)| block.purpose == BlockPurpose::Global)
}

/// Copies device memory to the host, with assumed values where its content is unknown.
///
/// # Safety
/// `to` is good for `size` bytes, and `from` is mapped.
unsafe fn read_to_host(to: usize, device: &Device, from: usize, size: usize) -> Status {
    let read = device.values().read(from, size);
    match read {
        HostRead::Stop => return fail(stop_loop(size)),
        _ if size > SMALL && host_pages::contains(to) => {}
        // SAFETY: the caller's promise.
        HostRead::Bytes => unsafe { move_bytes(to, from, size) },
        HostRead::Invented | HostRead::Mask => {
            // SAFETY: the caller's promise.
            let host = unsafe { std::slice::from_raw_parts_mut(to as *mut u8, size) };
            match read {
                HostRead::Mask => host_state().dynamic.fill_mask(host),
                _ => host.fill(0),
            }
            for (start, end) in device.values().known_parts(from, size) {
                // SAFETY: a part of the two ranges.
                unsafe { move_bytes(to + (start - from), start, end - start) };
            }
            if read == HostRead::Mask && size <= SMALL || size <= size_of::<u64>() {
                // SAFETY: `from` is mapped.
                unsafe { remember(device, from, host) };
            }
        }
        HostRead::Number(value) => {
            let bytes = value.to_le_bytes();
            let size = size.min(bytes.len());
            // SAFETY: at most the bytes of both, and `from` is mapped.
            unsafe {
                move_bytes(to, bytes.as_ptr() as usize, size);
                remember(device, from, &bytes[..size]);
            }
        }
    }
    OK
}

/// Stores the answer to a read as the known content of the range that was read, and of the flags that are
/// linked to the range.
///
/// # Safety
/// `from` is mapped for these bytes.
unsafe fn remember(device: &Device, from: usize, answer: &[u8]) {
    let linked = device.values().linked(from, answer.len());
    let places = [(from, false)].into_iter().chain(linked);
    for (place, is_opposite) in places {
        let bytes: Vec<u8> = answer.iter().map(|&flag| if is_opposite { flag ^ 1 } else { flag }).collect();
        // SAFETY: `from` by the caller's promise; a link ends when its memory is freed.
        unsafe { move_bytes(place, bytes.as_ptr() as usize, bytes.len()) };
        device.values().mark_answered(place, bytes.len(), number(&bytes));
    }
}

/// Returns an answer of at most 8 bytes as a number, or `None` if the answer is longer.
fn number(answer: &[u8]) -> Option<u64> {
    let mut word = [0; size_of::<u64>()];
    word.get_mut(..answer.len())?.copy_from_slice(answer);
    Some(u64::from_le_bytes(word))
}

/// Answers a read of a small range of unknown flags by the assumption about dynamic sizes. Returns `None` if
/// the range is large or does not hold flags.
///
/// # Safety
/// `from` is device memory, or host memory good for `size` bytes.
pub(crate) unsafe fn answer_flags(from: usize, size: usize) -> Option<Vec<u8>> {
    let device = device_of_range(from, size).ok()??;
    if size > SMALL || !device.values().is_mask(from, size) {
        return None;
    }
    let mut flags = vec![0; size];
    host_state().dynamic.fill_mask(&mut flags);
    let parts = device.values().known_parts(from, size);
    for (start, end) in parts {
        // SAFETY: a part of the mapped range and of the vector.
        unsafe { move_bytes(flags.as_mut_ptr() as usize + (start - from), start, end - start) };
    }
    // SAFETY: the range is mapped.
    unsafe { remember(device, from, &flags) };
    Some(flags)
}

/// Returns the known bytes at the beginning of a range, or `None` if the first byte is unknown. Host memory
/// counts as known.
///
/// # Safety
/// `from` is device memory, or host memory good for `size` bytes.
pub(crate) unsafe fn read_prefix(from: usize, size: usize) -> Option<Vec<u8>> {
    let known = match device_of_range(from, size).ok()? {
        None => size,
        Some(device) => {
            let parts = device.values().known_parts(from, size);
            let mut end = from;
            for (start, stop) in parts {
                if start == end {
                    end = stop;
                }
            }
            end - from
        }
    };
    let mut bytes = vec![0; known];
    // SAFETY: a part of a mapped range, or of the range that the caller promises.
    unsafe { move_bytes(bytes.as_mut_ptr() as usize, from, known) };
    (known > 0).then_some(bytes)
}

/// The bytes of a range whose whole content is known.
pub(crate) struct Known {
    pub(crate) bytes: Vec<u8>,
    /// True if a part of the content is an answer, which no kernel computed.
    pub(crate) is_answer: bool,
}

/// Returns the content of a range if all of it is known.
///
/// # Safety
/// As for [`read_prefix`].
pub(crate) unsafe fn read_known(from: usize, size: usize) -> Option<Known> {
    // SAFETY: the caller's promise.
    let bytes = unsafe { read_prefix(from, size) }.filter(|bytes| bytes.len() == size)?;
    let is_answer =
        device_of(from).is_some_and(|device| !device.values().answered_parts(from, size).is_empty());
    Some(Known { bytes, is_answer })
}

/// Writes a result that a kernel would compute from known values. A result from an answer
/// counts as an answer, too.
///
/// # Safety
/// As for [`write_known`].
pub(crate) unsafe fn write_computed(to: usize, result: &Known) {
    let size = result.bytes.len();
    // SAFETY: the caller's promise.
    let status = unsafe { write_known(to, Some(&result.bytes), size) };
    if let (OK, true, Some(device)) = (status, result.is_answer, device_of(to)) {
        device.values().mark_answered(to, size, number(&result.bytes));
    }
}

/// Writes the known beginning of a range's new content. The rest of the range becomes unknown.
///
/// # Safety
/// `to` is device memory, or host memory good for `size` bytes.
pub(crate) unsafe fn write_known(to: usize, bytes: Option<&[u8]>, size: usize) -> Status {
    let device = match device_of_range(to, size) {
        Ok(device) => device,
        Err(status) => return fail(status),
    };
    if let Some(device) = device {
        device.values().overwrite(to, size);
    }
    if let Some(bytes) = bytes {
        let known = bytes.len().min(size);
        // SAFETY: at most `size` bytes of a mapped range, or of the range that the caller promises.
        unsafe { move_bytes(to, bytes.as_ptr() as usize, known) };
        if let Some(device) = device {
            device.values().mark_known(to, known);
            note_addresses(device, to, &bytes[..known], known);
        }
    }
    OK
}

/// Stops a loop on invented values: prints the reason once, and returns the error.
fn stop_loop(size: usize) -> Status {
    static PRINTED: AtomicBool = AtomicBool::new(false);
    if !PRINTED.swap(true, Ordering::Relaxed) {
        use std::io::Write;
        let _ = writeln!(
            std::io::stderr(),
            "memtrace: the phantom device stopped a loop: the program read {} values that no kernel \
             computed (the last of {size} bytes) and gave the device no new input. It may wait for a value \
             that never comes. The traceback of the CUDA error (launch timed out) shows the read. If the \
             program does make progress, set {} to a larger number of reads (0: no limit).",
            values::invented().0,
            READS_VARIABLE
        );
    }
    LAUNCH_TIMEOUT
}

/// Marks a range as unknown, if it is device memory.
pub(crate) fn forget(to: usize, size: usize) {
    for device in devices_of(to) {
        device.values().forget(to, size);
    }
}

/// Marks a range as unknown flags, if it is device memory.
pub(crate) fn set_mask(to: usize, size: usize) {
    for device in devices_of(to) {
        device.values().set_mask(to, size);
    }
}

/// Marks a range as unknown flags that are the opposite of other flags, if both ranges
/// are memory of one device.
pub(crate) fn set_opposite_mask(from: usize, to: usize, size: usize) {
    match (device_of(from), device_of(to)) {
        (Some(source), Some(target)) if std::ptr::eq(source, target) && size <= SMALL => {
            target.values().link_mask(from, to, size, true);
        }
        _ => set_mask(to, size),
    }
}

/// Marks a range as unknown because it is freed or handed out again.
pub(crate) fn free(address: usize, size: usize) {
    for device in devices_of(address) {
        device.values().overwrite(address, size);
    }
}

/// Fills `size` bytes with a repeated pattern. A device range of more than [`SMALL`] bytes is not filled; its
/// content becomes unknown.
///
/// # Safety
/// `to` is device memory, or host memory good for `size` bytes.
pub(crate) unsafe fn fill(to: usize, pattern: &[u8], size: usize) -> Status {
    if size == 0 {
        return OK;
    }
    match device_of_range(to, size) {
        Err(status) => return fail(status),
        // SAFETY: the caller's promise.
        Ok(None) => unsafe { fill_bytes(to, pattern, size) },
        Ok(Some(device)) if size <= SMALL => {
            // SAFETY: the range is mapped.
            unsafe { fill_bytes(to, pattern, size) };
            device.values().mark_known(to, size);
            if pattern.len() == size_of::<usize>() {
                note_addresses(device, to, pattern, size);
            }
        }
        Ok(Some(device)) => device.values().overwrite(to, size),
    }
    OK
}

/// Writes a repeated pattern.
///
/// # Safety
/// The range is host memory or mapped device memory.
unsafe fn fill_bytes(to: usize, pattern: &[u8], size: usize) {
    if let [byte] = pattern {
        // SAFETY: the caller's promise.
        unsafe { set_bytes(to, *byte, size) };
        return;
    }
    for at in (0..size).step_by(pattern.len()) {
        // SAFETY: a part of the range, and at most the length of the pattern.
        unsafe { move_bytes(to + at, pattern.as_ptr() as usize, pattern.len().min(size - at)) };
    }
}
