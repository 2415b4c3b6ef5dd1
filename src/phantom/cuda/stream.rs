//! Streams: what is queued, how far the device got, and who is capturing.
//!
//! The device runs behind the program, as a busy card does: an event is reached when the program
//! waits for it, or when the device has worked [`LAG`] further. Time is the device's own
//! ([`Device::now`](crate::core::host_state::Device::now)), so runs are alike.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::core::ffi::{INVALID_VALUE, NOT_READY, OK, Out, Status, Word, leak};
use crate::core::host_state::{Device, current, fail, lock, machine};
use crate::cuda::graph;
use crate::table::call_table::answers;

/// How far the device runs behind the program: some hundred kernels.
pub(crate) const LAG: u64 = 500_000;

/// A stream.
pub(crate) struct Stream {
    pub(crate) device: usize,
    priority: c_int,
    flags: u32,
    id: u64,
    /// Work queued before this device time is known to be done.
    done: AtomicU64,
    /// Device time of the last work queued here.
    queued: AtomicU64,
    /// The capture that this stream takes part in; 0 for none.
    capture: AtomicU64,
    /// Other streams' work that this one waits for: their address and the device time.
    waits: Mutex<HashMap<usize, u64>>,
    polls: AtomicU64,
}

impl Stream {
    pub(crate) fn new(device: usize, priority: c_int, flags: u32) -> Self {
        static IDS: AtomicU64 = AtomicU64::new(1);
        Self {
            device,
            priority,
            flags,
            id: IDS.fetch_add(1, Ordering::Relaxed),
            done: AtomicU64::new(0),
            queued: AtomicU64::new(0),
            capture: AtomicU64::new(0),
            waits: Mutex::default(),
            polls: AtomicU64::new(0),
        }
    }

    pub(crate) fn device(&self) -> &'static Device {
        machine().devices.get(self.device).unwrap_or_else(current)
    }

    /// The capture that this stream takes part in, when it is still going on.
    pub(crate) fn capturing(&self) -> Option<u64> {
        match self.capture.load(Ordering::Relaxed) {
            0 => None,
            id if graph::is_open(id) => Some(id),
            _ => {
                self.capture.store(0, Ordering::Relaxed);
                None
            }
        }
    }

    pub(crate) fn join(&self, capture: u64) {
        self.capture.store(capture, Ordering::Relaxed);
    }

    /// Queues work that takes so long.
    pub(crate) fn launch(&self, nanoseconds: u64) {
        let _ = WORKS.try_with(|works| works.set(true));
        if let Some(capture) = self.capturing() {
            graph::add_node(capture, nanoseconds);
            return;
        }
        let device = self.device();
        device.work(nanoseconds);
        self.queued.store(device.now(), Ordering::Relaxed);
    }

    /// Whether work queued up to `time` is done by now.
    pub(crate) fn reached(&self, time: u64) -> bool {
        time <= self.done.load(Ordering::Relaxed) || time + LAG <= self.device().now()
    }

    /// The program has waited until the work up to `time` was done.
    pub(crate) fn wait_until(&self, time: u64) {
        let before = self.done.fetch_max(time, Ordering::Relaxed);
        if before >= time {
            return;
        }
        // What this stream waited for is done too. Taken out first: two streams may wait for each other.
        let waits = std::mem::take(&mut *lock(&self.waits));
        for (other, time) in waits {
            stream(other).wait_until(time);
        }
    }

    /// Lets later work here wait for another stream's up to `time`.
    pub(crate) fn wait_for(&self, other: &'static Stream, time: u64) {
        if other.reached(time) || std::ptr::eq(self, other) {
            return;
        }
        let mut waits = lock(&self.waits);
        let entry = waits.entry(std::ptr::from_ref(other) as usize).or_insert(0);
        *entry = (*entry).max(time);
    }
}

thread_local! {
    static WORKS: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread ever gave the device work. One that never did only watches, as NCCL's
/// watchdog does ten times a second: by the time it looks, a card is long through.
pub(crate) fn only_watches() -> bool {
    !WORKS.try_with(Cell::get).unwrap_or(false)
}

/// The stream of a handle: null and 1 are the device's legacy default stream, 2 the thread's own,
/// which is taken for the same.
pub(crate) fn stream(handle: usize) -> &'static Stream {
    if handle <= 2 {
        return &current().stream;
    }
    // SAFETY: by the C contract the handle came from one of the calls below that create a stream;
    // those are leaked, so it is good for ever.
    unsafe { &*(handle as *const Stream) }
}

/// Waits for a stream.
pub(crate) fn synchronize(stream: &Stream) {
    let device = stream.device();
    stream.wait_until(device.now());
    crate::cuda::pool::synchronized(device);
}

/// Waits for everything on a device.
pub(crate) fn synchronize_device(device: &'static Device) {
    let now = device.now();
    device.stream.wait_until(now);
    for handle in lock(&STREAMS).iter() {
        let stream = stream(*handle);
        if stream.device == device.index {
            stream.wait_until(now);
        }
    }
    crate::cuda::pool::synchronized(device);
}

/// Every stream ever created.
static STREAMS: Mutex<Vec<usize>> = Mutex::new(Vec::new());

fn create(out: Out<usize>, flags: u32, priority: c_int) -> Status {
    if out.address() == 0 {
        return fail(INVALID_VALUE);
    }
    let handle = leak(Stream::new(current().index, priority.clamp(HIGHEST, 0), flags));
    lock(&STREAMS).push(handle);
    out.give(handle)
}

/// The highest priority that cards since Volta offer; the lowest is 0.
const HIGHEST: c_int = -5;

/// Polled so often with nothing else happening, everything queued is done: a loop that waits by
/// asking must end.
pub(crate) const POLLS: u64 = 64;

fn query(stream: &'static Stream) -> Status {
    let queued = stream.queued.load(Ordering::Relaxed);
    if stream.reached(queued) {
        stream.polls.store(0, Ordering::Relaxed);
        return OK;
    }
    if stream.polls.fetch_add(1, Ordering::Relaxed) >= POLLS {
        stream.wait_until(queued);
    }
    NOT_READY
}

/// Calls back what the program queued. At once: its work is as good as done.
fn call_back(function: Option<extern "C" fn(usize)>, argument: usize) -> Status {
    let Some(function) = function else { return fail(INVALID_VALUE) };
    function(argument);
    OK
}

fn capture_info(
    stream: Word,
    status: Out<c_int>,
    id: Out<u64>,
    graph: Out<usize>,
    nodes: Out<usize>,
    count: Out<usize>,
) -> Status {
    let capture = self::stream(stream).capturing();
    status.put(c_int::from(capture.is_some()));
    if let Some(capture) = capture {
        id.put(capture);
        graph.put(graph::of_capture(capture));
    }
    nodes.put(0);
    count.put(0);
    OK
}

fn begin_capture(handle: Word) -> Status {
    let stream = stream(handle);
    if stream.capturing().is_some() {
        return fail(INVALID_VALUE);
    }
    stream.join(graph::open());
    OK
}

fn end_capture(handle: Word, out: Out<usize>) -> Status {
    match stream(handle).capturing() {
        Some(capture) => out.give(graph::close(capture)),
        None => fail(INVALID_VALUE),
    }
}

/// The thread's attitude to calls that a capture forbids: nothing is forbidden here, so it is only
/// kept for whoever asks.
fn exchange_mode(mode: Out<c_int>) -> Status {
    thread_local!(static MODE: Cell<c_int> = const { Cell::new(0) });
    let Some(wanted) = mode.get() else { return fail(INVALID_VALUE) };
    mode.give(MODE.try_with(|cell| cell.replace(wanted)).unwrap_or(0))
}

static BUSY: AtomicUsize = AtomicUsize::new(0);

/// How many calls waited for the device.
pub(crate) fn waits() -> usize {
    BUSY.load(Ordering::Relaxed)
}

fn synchronized(stream: &Stream) -> Status {
    BUSY.fetch_add(1, Ordering::Relaxed);
    synchronize(stream);
    OK
}

fn device_synchronized() -> Status {
    BUSY.fetch_add(1, Ordering::Relaxed);
    synchronize_device(current());
    OK
}

answers! {
    Real fn cudaDeviceSynchronize() { device_synchronized() }
    Real fn cudaStreamCreate(out: Out<usize>) { create(out, 0, 0) }
    Real fn cudaStreamCreateWithFlags(out: Out<usize>, flags: u32) { create(out, flags, 0) }
    Real fn cudaStreamCreateWithPriority(out: Out<usize>, flags: u32, priority: c_int) { create(out, flags, priority) }
    Real fn cudaStreamDestroy(handle: Word) { synchronize(stream(handle)); OK }
    Real fn cudaStreamGetPriority(handle: Word, out: Out<c_int>) { out.give(stream(handle).priority) }
    Real fn cudaStreamGetFlags(handle: Word, out: Out<u32>) { out.give(stream(handle).flags) }
    Real fn cudaStreamGetId(handle: Word, out: Out<u64>) { out.give(stream(handle).id) }
    Real fn cudaStreamGetDevice(handle: Word, out: Out<c_int>) { out.give(stream(handle).device as c_int) }
    Real fn cudaStreamQuery(handle: Word) { query(stream(handle)) }
    Real fn cudaStreamSynchronize(handle: Word) { synchronized(stream(handle)) }
    Real fn cudaStreamIsCapturing(handle: Word, out: Out<c_int>) {
        out.give(c_int::from(stream(handle).capturing().is_some()))
    }
    /// As CUDA 13 has it.
    Real fn cudaStreamGetCaptureInfo(
        handle: Word, status: Out<c_int>, id: Out<u64>, graph: Out<usize>, nodes: Out<usize>, edges: Out<usize>, count: Out<usize>,
    ) {
        edges.put(0);
        capture_info(handle, status, id, graph, nodes, count)
    }
    /// As CUDA 12 has it.
    Real fn cudaStreamGetCaptureInfo_v2(
        handle: Word, status: Out<c_int>, id: Out<u64>, graph: Out<usize>, nodes: Out<usize>, count: Out<usize>,
    ) {
        capture_info(handle, status, id, graph, nodes, count)
    }
    Success fn cudaStreamUpdateCaptureDependencies(_handle: Word, _nodes: Word, _count: usize, _flags: Word) { OK }
    Real fn cudaStreamBeginCapture(handle: Word, _mode: c_int) { begin_capture(handle) }
    Real fn cudaStreamEndCapture(handle: Word, out: Out<usize>) { end_capture(handle, out) }
    Real fn cudaThreadExchangeStreamCaptureMode(mode: Out<c_int>) { exchange_mode(mode) }
    Real fn cudaLaunchHostFunc(_handle: Word, function: Option<extern "C" fn(usize)>, argument: Word) {
        call_back(function, argument)
    }
    Real fn cudaStreamAddCallback(
        handle: Word, function: Option<extern "C" fn(usize, Status, usize)>, argument: Word, _flags: Word,
    ) {
        let Some(function) = function else { return fail(INVALID_VALUE) };
        function(handle, OK, argument);
        OK
    }
    Success fn cudaStreamAttachMemAsync(_handle: Word, _address: Word, _size: usize, _flags: Word) { OK }
    Success fn cudaStreamSetAttribute(_handle: Word, _attribute: Word, _value: Word) { OK }
    Real fn cuStreamCreate(out: Out<usize>, flags: u32) { create(out, flags, 0) }
    Real fn cuStreamCreateWithPriority(out: Out<usize>, flags: u32, priority: c_int) { create(out, flags, priority) }
    Real fn cuStreamDestroy_v2(handle: Word) { synchronize(stream(handle)); OK }
    Real fn cuStreamGetPriority(handle: Word, out: Out<c_int>) { out.give(stream(handle).priority) }
    Real fn cuStreamGetFlags(handle: Word, out: Out<u32>) { out.give(stream(handle).flags) }
    Real fn cuStreamGetId(handle: Word, out: Out<u64>) { out.give(stream(handle).id) }
    Real fn cuStreamGetCtx(handle: Word, out: Out<usize>) { out.give(crate::cuda::driver::context(stream(handle).device)) }
    Real fn cuStreamQuery(handle: Word) { query(stream(handle)) }
    Real fn cuStreamSynchronize(handle: Word) { synchronized(stream(handle)) }
    Real fn cuStreamIsCapturing(handle: Word, out: Out<c_int>) {
        out.give(c_int::from(stream(handle).capturing().is_some()))
    }
    Real fn cuStreamGetCaptureInfo_v2(
        handle: Word, status: Out<c_int>, id: Out<u64>, graph: Out<usize>, nodes: Out<usize>, count: Out<usize>,
    ) {
        capture_info(handle, status, id, graph, nodes, count)
    }
    Real fn cuStreamGetCaptureInfo_v3(
        handle: Word, status: Out<c_int>, id: Out<u64>, graph: Out<usize>, nodes: Out<usize>, edges: Out<usize>, count: Out<usize>,
    ) {
        edges.put(0);
        capture_info(handle, status, id, graph, nodes, count)
    }
    Real fn cuStreamBeginCapture_v2(handle: Word, _mode: c_int) { begin_capture(handle) }
    Real fn cuStreamEndCapture(handle: Word, out: Out<usize>) { end_capture(handle, out) }
    Real fn cuThreadExchangeStreamCaptureMode(mode: Out<c_int>) { exchange_mode(mode) }
    Real fn cuLaunchHostFunc(_handle: Word, function: Option<extern "C" fn(usize)>, argument: Word) {
        call_back(function, argument)
    }
    Success fn cuStreamAttachMemAsync(_handle: Word, _address: Word, _size: usize, _flags: Word) { OK }
    Success fn cuStreamWaitValue32_v2(_handle: Word, _address: Word, _value: u32, _flags: Word) { OK }
}
