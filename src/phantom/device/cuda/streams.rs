//! Stream calls: creation, queries and synchronization.

use std::cell::RefCell;
use std::ffi::c_int;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::core::call_table::answers;
use crate::core::capture::{
    self, CaptureStatus, cudaErrorStreamCaptureInvalidated, cudaErrorStreamCaptureUnsupported,
};
use crate::core::device::{Device, context_handle};
use crate::core::ffi::{Handle, INVALID_VALUE, NOT_READY, OK, Out, Status, Word};
use crate::core::host_state::{current, fail, host_state};
use crate::core::lock::lock;
use crate::core::stream::Stream;
use crate::cuda::device_attributes::HIGHEST_PRIORITY;

/// A stream handle as the program passes it. Null or 1 is the legacy default stream of the current device,
/// and 2 is the default stream of the thread. Any other value is the handle of a stream that [`create`] made.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct StreamHandle(usize);

impl StreamHandle {
    /// The legacy default stream.
    pub(crate) const DEFAULT: Self = Self(0);

    /// Returns the handle that the program passed inside a struct.
    ///
    /// # Safety
    /// `address` is a stream handle as the CUDA headers define it.
    pub(crate) unsafe fn from_address(address: usize) -> Self {
        Self(address)
    }

    /// Returns the number that the program sees.
    pub(crate) fn address(self) -> usize {
        self.0
    }

    /// Returns true for the handle of the legacy default stream, which waits for all blocking streams.
    pub(crate) fn is_legacy(self) -> bool {
        self.0 <= 1
    }

    /// Returns the stream of this handle. Creates the thread's default stream at its first use.
    pub(crate) fn stream(self) -> &'static Stream {
        match self.0 {
            0 | 1 => &current().stream,
            2 => stream_of_thread(),
            // SAFETY: a handle is an argument of an exported function or came from `from_address`, so any
            // other value is the handle of a created stream.
            address => unsafe { Handle::from_address(address) }.get().unwrap_or(&current().stream),
        }
    }

    /// Returns the stream for a call that queues work in it, unless the rules of captures refuse the call.
    pub(crate) fn for_work(self) -> Result<&'static Stream, Status> {
        let stream = self.stream();
        let legacy = self.is_legacy().then(|| capture::refuse_legacy(stream.device)).flatten();
        match (legacy, stream.capture_status()) {
            (Some(status), _) => Err(fail(status)),
            (None, CaptureStatus::Invalidated(_)) => Err(fail(cudaErrorStreamCaptureInvalidated)),
            (None, _) => Ok(stream),
        }
    }

    /// Returns the stream for a call that asks for the progress of its work or waits for it, unless the
    /// stream is captured: "It is invalid to synchronize or query the execution status of a stream
    /// which is being captured".
    pub(crate) fn for_progress(self) -> Result<&'static Stream, Status> {
        let stream = self.for_work()?;
        match stream.capturing() {
            Some(capture) => Err(refuse(capture)),
            None => Ok(stream),
        }
    }
}

/// Refuses an operation on a captured stream, and invalidates the capture.
fn refuse(capture: u64) -> Status {
    capture::invalidate(capture);
    fail(cudaErrorStreamCaptureUnsupported)
}

thread_local! {
    /// The thread's default streams, at most one for each device.
    static OF_THREAD: RefCell<Vec<Handle<Stream>>> = const { RefCell::new(Vec::new()) };
}

/// Returns the thread's default stream of the current device (`cudaStreamPerThread`),
/// which is a blocking stream.
fn stream_of_thread() -> &'static Stream {
    let device = current();
    let find = |streams: &RefCell<Vec<Handle<Stream>>>| {
        let mut streams = streams.borrow_mut();
        let known =
            streams.iter().filter_map(|handle| handle.get()).find(|stream| stream.device == device.index);
        known.or_else(|| {
            let handle = Handle::new(Stream::new(device.index, device.clock().clone(), 0, 0));
            lock(&CREATED).push(handle);
            streams.push(handle);
            handle.get()
        })
    };
    OF_THREAD.try_with(find).ok().flatten().unwrap_or(&device.stream)
}

/// Returns the device of a stream, or the current device if the stream belongs to none.
pub(crate) fn device_of(stream: &Stream) -> &'static Device {
    host_state().devices.get(stream.device).unwrap_or_else(current)
}

/// Every stream that the program created, even if destroyed since, and the default streams of threads.
static CREATED: Mutex<Vec<Handle<Stream>>> = Mutex::new(Vec::new());

fn create(out: Out<Handle<Stream>>, flags: u32, priority: c_int) -> Status {
    if out.is_null() {
        return fail(INVALID_VALUE);
    }
    let device = current();
    device.share().enter();
    let priority = priority.clamp(HIGHEST_PRIORITY, 0);
    let handle = Handle::new(Stream::new(device.index, device.clock().clone(), priority, flags));
    lock(&CREATED).push(handle);
    out.give(handle)
}

/// Waits for all work in a stream, and trims the device's default memory pool.
pub(crate) fn synchronize(stream: &'static Stream) {
    stream.work().complete();
    device_of(stream).synchronize_pool();
}

/// Removes a stream from waits for its device, so its work is marked as done. The program waits for nothing:
/// "the function will return immediately" (`cuda_runtime_api.h`). So no memory pool is trimmed.
fn destroy(handle: StreamHandle) -> Status {
    handle.stream().work().complete();
    lock(&CREATED).retain(|created| created.address() != handle.address());
    OK
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

/// Returns the number of calls in which the program waited for a stream or a device.
pub(crate) fn waits() -> usize {
    WAITS.load(Ordering::Relaxed)
}

fn synchronize_counted(handle: StreamHandle) -> Status {
    WAITS.fetch_add(1, Ordering::Relaxed);
    match handle.for_progress() {
        Ok(stream) => {
            synchronize(stream);
            OK
        }
        Err(status) => status,
    }
}

/// Waits for the current device, and counts the wait.
pub(crate) fn synchronize_current_device() -> Status {
    WAITS.fetch_add(1, Ordering::Relaxed);
    current().share().enter();
    synchronize_device(current());
    OK
}

fn query(handle: StreamHandle) -> Status {
    match handle.for_progress() {
        Ok(stream) if stream.poll() => OK,
        Ok(_) => NOT_READY,
        Err(status) => status,
    }
}

answers! {
    Real fn cudaDeviceSynchronize() { synchronize_current_device() }
    Real fn cudaStreamCreate(out: Out<Handle<Stream>>) { create(out, 0, 0) }
    Real fn {cudaStreamCreateWithFlags, cuStreamCreate}(out: Out<Handle<Stream>>, flags: u32) {
        create(out, flags, 0)
    }
    Real fn {cudaStreamCreateWithPriority, cuStreamCreateWithPriority}(
        out: Out<Handle<Stream>>, flags: u32, priority: c_int,
    ) {
        create(out, flags, priority)
    }
    Real fn {cudaStreamDestroy, cuStreamDestroy_v2}(handle: StreamHandle) { destroy(handle) }
    Real fn {cudaStreamGetPriority, cuStreamGetPriority}(handle: StreamHandle, out: Out<c_int>) {
        out.give(handle.stream().priority)
    }
    Real fn {cudaStreamGetFlags, cuStreamGetFlags}(handle: StreamHandle, out: Out<u32>) {
        out.give(handle.stream().flags)
    }
    Real fn {cudaStreamGetId, cuStreamGetId}(handle: StreamHandle, out: Out<u64>) {
        out.give(handle.stream().id)
    }
    Real fn cudaStreamGetDevice(handle: StreamHandle, out: Out<c_int>) {
        out.give(handle.stream().device as c_int)
    }
    Real fn {cudaStreamQuery, cuStreamQuery}(handle: StreamHandle) { query(handle) }
    Real fn {cudaStreamSynchronize, cuStreamSynchronize}(handle: StreamHandle) { synchronize_counted(handle) }
    Success fn cudaStreamSetAttribute(_handle: Word, _attribute: Word, _value: Word) { OK }
    Real fn cuStreamGetCtx(handle: StreamHandle, out: Out<usize>) {
        out.give(context_handle(handle.stream().device))
    }
    Success fn cuStreamWaitValue32_v2(_handle: Word, _address: Word, _value: u32, _flags: Word) { OK }
}
