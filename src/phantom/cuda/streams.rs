//! Stream calls: creation, queries, synchronization and host callbacks.

use std::ffi::c_int;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::core::call_table::{answers, by_contract};
use crate::core::device::{Device, context_handle};
use crate::core::ffi::{Handle, INVALID_VALUE, NOT_READY, OK, Out, Status, Word};
use crate::core::host_state::{current, fail, host_state};
use crate::core::lock::lock;
use crate::core::stream::Stream;
use crate::cuda::device_attributes::HIGHEST_PRIORITY;

/// A stream handle as the program passes it: null or 1 for the legacy default stream of the current device, 2
/// for the default stream of the thread, which is the same here, else the handle of a stream that [`create`]
/// made.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct StreamHandle(usize);

impl StreamHandle {
    /// The legacy default stream.
    pub(crate) const DEFAULT: Self = Self(0);

    /// A handle that the program passed inside a struct.
    ///
    /// # Safety
    /// `address` is a stream handle as the CUDA headers define it.
    pub(crate) unsafe fn from_address(address: usize) -> Self {
        Self(address)
    }

    /// The stream.
    pub(crate) fn stream(self) -> &'static Stream {
        if self.0 <= 2 {
            return &current().stream;
        }
        // SAFETY: a handle is an argument of an exported function or came from `from_address`, so any other
        // value is the handle of a created stream.
        unsafe { Handle::from_address(self.0) }.get().unwrap_or(&current().stream)
    }
}

/// The device of a stream.
pub(crate) fn device_of(stream: &Stream) -> &'static Device {
    host_state().devices.get(stream.device).unwrap_or_else(current)
}

/// Every stream that the program created.
static CREATED: Mutex<Vec<Handle<Stream>>> = Mutex::new(Vec::new());

fn create(out: Out<Handle<Stream>>, flags: u32, priority: c_int) -> Status {
    if out.is_null() {
        return fail(INVALID_VALUE);
    }
    let device = current();
    let priority = priority.clamp(HIGHEST_PRIORITY, 0);
    let handle = Handle::new(Stream::new(device.index, device.clock().clone(), priority, flags));
    lock(&CREATED).push(handle);
    out.give(handle)
}

/// Waits for a stream.
pub(crate) fn synchronize(stream: &'static Stream) {
    stream.work().complete();
    device_of(stream).synchronize_pool();
}

/// Waits for all streams of a device.
pub(crate) fn synchronize_device(device: &'static Device) {
    device.stream.work().complete();
    for stream in lock(&CREATED).iter().filter_map(|handle| handle.get()) {
        if stream.device == device.index {
            stream.work().complete();
        }
    }
    device.synchronize_pool();
}

static WAITS: AtomicUsize = AtomicUsize::new(0);

/// The number of calls in which the program waited for a stream or a device.
pub(crate) fn waits() -> usize {
    WAITS.load(Ordering::Relaxed)
}

fn synchronize_counted(stream: &'static Stream) -> Status {
    WAITS.fetch_add(1, Ordering::Relaxed);
    synchronize(stream);
    OK
}

/// Waits for the current device, and counts the wait.
pub(crate) fn synchronize_current_device() -> Status {
    WAITS.fetch_add(1, Ordering::Relaxed);
    synchronize_device(current());
    OK
}

fn query(stream: &'static Stream) -> Status {
    if stream.poll() { OK } else { NOT_READY }
}

/// Calls a queued host function at once, because the work before it is as good as done.
///
/// # Safety
/// The function may be called with the argument.
unsafe fn call_host_function(function: Option<unsafe extern "C" fn(usize)>, argument: usize) -> Status {
    let Some(function) = function else { return fail(INVALID_VALUE) };
    // SAFETY: the caller's promise.
    unsafe { function(argument) };
    OK
}

answers! {
    Real fn cudaDeviceSynchronize() { synchronize_current_device() }
    Real fn cudaStreamCreate(out: Out<Handle<Stream>>) { create(out, 0, 0) }
    Real fn cudaStreamCreateWithFlags(out: Out<Handle<Stream>>, flags: u32) { create(out, flags, 0) }
    Real fn cudaStreamCreateWithPriority(out: Out<Handle<Stream>>, flags: u32, priority: c_int) {
        create(out, flags, priority)
    }
    Real fn cudaStreamDestroy(handle: StreamHandle) {
        synchronize(handle.stream());
        OK
    }
    Real fn cudaStreamGetPriority(handle: StreamHandle, out: Out<c_int>) {
        out.give(handle.stream().priority)
    }
    Real fn cudaStreamGetFlags(handle: StreamHandle, out: Out<u32>) { out.give(handle.stream().flags) }
    Real fn cudaStreamGetId(handle: StreamHandle, out: Out<u64>) { out.give(handle.stream().id) }
    Real fn cudaStreamGetDevice(handle: StreamHandle, out: Out<c_int>) {
        out.give(handle.stream().device as c_int)
    }
    Real fn cudaStreamQuery(handle: StreamHandle) { query(handle.stream()) }
    Real fn cudaStreamSynchronize(handle: StreamHandle) { synchronize_counted(handle.stream()) }
    Real fn cudaLaunchHostFunc(_handle: Word, function: Option<unsafe extern "C" fn(usize)>, argument: Word) {
        by_contract!(call_host_function(function, argument))
    }
    Real fn cudaStreamAddCallback(
        handle: Word, function: Option<unsafe extern "C" fn(usize, Status, usize)>, argument: Word,
        _flags: Word,
    ) {
        let Some(function) = function else { return fail(INVALID_VALUE) };
        by_contract!(function(handle, OK, argument));
        OK
    }
    Success fn cudaStreamAttachMemAsync(_handle: Word, _address: Word, _size: usize, _flags: Word) { OK }
    Success fn cudaStreamSetAttribute(_handle: Word, _attribute: Word, _value: Word) { OK }
    Real fn cuStreamCreate(out: Out<Handle<Stream>>, flags: u32) { create(out, flags, 0) }
    Real fn cuStreamCreateWithPriority(out: Out<Handle<Stream>>, flags: u32, priority: c_int) {
        create(out, flags, priority)
    }
    Real fn cuStreamDestroy_v2(handle: StreamHandle) {
        synchronize(handle.stream());
        OK
    }
    Real fn cuStreamGetPriority(handle: StreamHandle, out: Out<c_int>) { out.give(handle.stream().priority) }
    Real fn cuStreamGetFlags(handle: StreamHandle, out: Out<u32>) { out.give(handle.stream().flags) }
    Real fn cuStreamGetId(handle: StreamHandle, out: Out<u64>) { out.give(handle.stream().id) }
    Real fn cuStreamGetCtx(handle: StreamHandle, out: Out<usize>) {
        out.give(context_handle(handle.stream().device))
    }
    Real fn cuStreamQuery(handle: StreamHandle) { query(handle.stream()) }
    Real fn cuStreamSynchronize(handle: StreamHandle) { synchronize_counted(handle.stream()) }
    Real fn cuLaunchHostFunc(_handle: Word, function: Option<unsafe extern "C" fn(usize)>, argument: Word) {
        by_contract!(call_host_function(function, argument))
    }
    Success fn cuStreamAttachMemAsync(_handle: Word, _address: Word, _size: usize, _flags: Word) { OK }
    Success fn cuStreamWaitValue32_v2(_handle: Word, _address: Word, _value: u32, _flags: Word) { OK }
}
