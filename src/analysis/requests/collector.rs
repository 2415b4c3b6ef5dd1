//! Converts rows into operations.

use std::collections::{BTreeMap, HashMap};

use memtrace_trace::EventName;
use memtrace_trace::meta::Meta;

use super::{Operation, OperationKind, Requests};
use crate::read::record::Record;

/// The size in bytes of the segments that blocks between 1 MiB and 10 MiB share (`kLargeBuffer` in PyTorch's
/// `CUDACachingAllocator`). `max_split_size_mb` must exceed this size, so only larger requests are candidates
/// for its value.
const LARGE_BUFFER: i64 = 20 << 20;

/// The requests of all devices so far.
pub(super) struct Collector<'a> {
    meta: &'a Meta,
    devices: BTreeMap<i32, DeviceRequests>,
    /// True if garbage collection was enabled in the traced run. In this case, a segment that is freed just
    /// before another segment is allocated was freed by the allocator, not by the program.
    collects_garbage: bool,
}

/// The requests of a device so far.
#[derive(Default)]
struct DeviceRequests {
    requests: Requests,
    /// The slot of each live block, by `alloc_id`.
    slots: HashMap<i64, i64>,
    /// The slot of each live allocation outside the allocator, by `alloc_id`.
    outside: HashMap<i64, i64>,
    free_slots: Vec<i64>,
    streams: HashMap<i64, i64>,
    large: BTreeMap<i64, i64>,
    pool: i64,
    step: Option<i64>,
    active: i64,
    reserved: i64,
    outside_bytes: i64,
    /// The private pools that lost a segment since the last request.
    released: Vec<i64>,
    /// True if the program freed segments since the last request. Segments that are freed after a failed
    /// allocation were freed by the allocator and do not count.
    emptied: bool,
    /// True if the allocation of a segment has failed since the last request. The allocator then frees
    /// segments itself and tries again.
    retries: bool,
}

impl Collector<'_> {
    pub(super) fn new(meta: &Meta) -> Collector<'_> {
        Collector {
            meta,
            devices: BTreeMap::new(),
            collects_garbage: meta.allocator.conf.contains("garbage_collection_threshold"),
        }
    }

    /// Processes the next row.
    pub(super) fn feed(&mut self, row: &Record) {
        if row.device < 0 {
            return;
        }
        let device = self.devices.entry(row.device).or_insert_with(|| DeviceRequests {
            requests: Requests { device: row.device, streams: 1, ..Requests::default() },
            streams: HashMap::from([(0, 0)]),
            ..DeviceRequests::default()
        });
        device.feed(row, self.collects_garbage, self.meta.total_bytes(row.device));
    }

    /// Returns the requests of the device `only` or, by default, of the device with the highest reserved
    /// bytes. Returns `None` if the device has no requests.
    pub(super) fn finish(self, only: Option<i32>) -> Option<Requests> {
        let all = self
            .devices
            .into_values()
            .filter(|device| only.is_none_or(|only| only == device.requests.device));
        let fullest = all.max_by_key(|device| (device.requests.peak_reserved, -device.requests.device))?;
        (fullest.requests.requests > 0).then(|| fullest.finish())
    }
}

impl DeviceRequests {
    fn push(&mut self, kind: OperationKind, numbers: [i64; 3]) {
        let [a, b, c] = numbers;
        let operation: Operation = [kind as i64, a, b, c];
        self.requests.operations.push(operation);
    }

    fn slot(&mut self) -> i64 {
        self.free_slots.pop().unwrap_or_else(|| {
            self.requests.slots += 1;
            self.requests.slots as i64 - 1
        })
    }

    fn stream(&mut self, row: &Record) -> i64 {
        let next = self.streams.len() as i64;
        let index = *self.streams.entry(row.stream).or_insert(next);
        self.requests.streams = self.streams.len();
        index
    }

    fn feed(&mut self, row: &Record, collects_garbage: bool, capacity: i64) {
        match row.event {
            EventName::Alloc | EventName::Live if row.delta_bytes > 0 => self.alloc(row),
            // While another stream uses a freed block, the block stays active. Its memory is free at its
            // `free_completed` row.
            EventName::Free if row.active_bytes < self.active => self.free(row.alloc_id),
            EventName::FreeCompleted => self.free(row.alloc_id),
            EventName::Oom => self.oom(row),
            EventName::SegmentAlloc | EventName::SegmentMap => {
                self.retries |= row.status != 0;
                if collects_garbage {
                    self.emptied = false;
                }
            }
            EventName::SegmentFree | EventName::SegmentUnmap => {
                self.emptied |= !self.retries;
                // The allocator frees a segment of a private pool only after the graph or `MemPool` is gone,
                // so the pool was released.
                if row.pool > 0 && !self.released.contains(&row.pool) {
                    self.released.push(row.pool);
                }
            }
            EventName::ExtAlloc if row.status == 0 && row.delta_bytes > 0 => {
                let slot = self.slot();
                self.outside.insert(row.alloc_id, slot);
                self.outside_bytes += row.delta_bytes;
                self.push(OperationKind::OutsideAlloc, [slot, row.delta_bytes, 0]);
            }
            EventName::ExtFree => {
                if let Some(slot) = self.outside.remove(&row.alloc_id) {
                    self.outside_bytes += row.delta_bytes;
                    self.push(OperationKind::OutsideFree, [slot, 0, 0]);
                    self.free_slots.push(slot);
                }
            }
            EventName::Sample => self.sample(row, capacity),
            _ => {}
        }
        if matches!(
            row.event,
            EventName::Alloc | EventName::Live | EventName::Free | EventName::FreeCompleted
        ) {
            self.active = row.active_bytes;
            self.totals(row);
        }
    }

    /// Adds the operations that precede a request: the release of private pools, the freeing of empty
    /// segments that the program requested, the start of a step, and a change of the pool.
    fn before_request(&mut self, row: &Record) {
        for pool in std::mem::take(&mut self.released) {
            self.push(OperationKind::Release, [pool, 0, 0]);
            if pool == self.pool {
                self.pool = 0;
            }
        }
        if std::mem::take(&mut self.emptied) {
            self.push(OperationKind::EmptyCache, [0; 3]);
        }
        self.retries = false;
        if self.step.is_none_or(|step| step < row.step) {
            self.step = Some(row.step);
            self.push(OperationKind::Step, [row.step, 0, 0]);
        }
        self.requests.requests += 1;
        let pool = row.pool;
        if pool != self.pool {
            self.pool = pool;
            self.push(OperationKind::Pool, [pool, 0, 0]);
        }
    }

    fn alloc(&mut self, row: &Record) {
        self.before_request(row);
        let bytes = requested(row);
        if bytes > LARGE_BUFFER {
            *self.large.entry(bytes).or_default() += bytes;
        }
        let (slot, stream) = (self.slot(), self.stream(row));
        self.slots.insert(row.alloc_id, slot);
        self.push(OperationKind::Alloc, [slot, bytes, stream]);
        if row.allocated_bytes > self.requests.peak_allocated {
            self.requests.peak_allocated = row.allocated_bytes;
            self.requests.peak_index = self.requests.operations.len();
        }
    }

    fn free(&mut self, alloc_id: i64) {
        // A block has no slot if it was allocated before the trace, or was already freed.
        if let Some(slot) = self.slots.remove(&alloc_id) {
            self.push(OperationKind::Free, [slot, 0, 0]);
            self.free_slots.push(slot);
        }
    }

    fn oom(&mut self, row: &Record) {
        self.before_request(row);
        self.requests.failed += 1;
        let stream = self.stream(row);
        self.push(OperationKind::Failed, [0, requested(row), stream]);
    }

    /// Adds the reserved bytes of the trace, if they changed.
    fn totals(&mut self, row: &Record) {
        if row.reserved_bytes != self.reserved {
            self.reserved = row.reserved_bytes;
            self.requests.peak_reserved = self.requests.peak_reserved.max(row.reserved_bytes);
            // The replay frees the segments only before the next request, so the reserved bytes are not yet
            // comparable.
            if !self.emptied {
                self.push(OperationKind::Reserved, [row.reserved_bytes, 0, 0]);
            }
        }
    }

    /// Processes a sample of the device. The context grows while kernels are loaded, so its largest size is
    /// kept.
    fn sample(&mut self, row: &Record, capacity: i64) {
        if row.device_free_bytes >= 0 && capacity > 0 {
            let rest = capacity - row.device_free_bytes - self.reserved - self.outside_bytes;
            self.requests.taken = self.requests.taken.max(Some(rest.max(0)));
        }
    }

    fn finish(mut self) -> Requests {
        self.requests.large = self.large.into_iter().collect();
        self.requests
    }
}

/// Returns the bytes that the program requested or, if they are unknown, the rounded bytes, which lead to the
/// same block.
fn requested(row: &Record) -> i64 {
    if row.requested_bytes >= 0 { row.requested_bytes } else { row.rounded_bytes }
}
