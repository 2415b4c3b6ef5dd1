//! The driver's virtual memory: physical memory, and the addresses to which it is mapped.
//!
//! The driver frees physical memory when its last reference is dropped. Each holder of the handle and each
//! mapping is a reference. For torch's expandable segments, the rows show the mapped pieces (`segment_map`,
//! `segment_unmap`), because torch counts these as reserved. For other libraries, the rows show the physical
//! memory (`ext_alloc`, `ext_free`, with the handle as the address), because this is the memory that they
//! take from the device.
//!
//! A program may unmap segments of torch's allocator itself, and map other physical memory there later. vLLM
//! does this when it sleeps. Memory that is mapped to these addresses later becomes torch's segment again.

use memtrace_trace::Api;
use memtrace_trace::event::{AllocCall, Call};
use memtrace_trace::memory::MemoryKind;

use super::calls::CallEvent;
use crate::emitter::RowSink;
use crate::encoder::Encoder;
use crate::keys::PHYSICAL;
use crate::live::Live;

impl Encoder {
    /// Encodes a call that takes or maps physical memory ([`is_virtual_memory`]).
    ///
    /// [`is_virtual_memory`]: crate::physical::is_virtual_memory
    pub(crate) fn encode_virtual_alloc<S: RowSink>(
        &mut self,
        event: &CallEvent,
        alloc: &AllocCall,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let CallEvent { header, call, .. } = *event;
        let worked = !event.has_failed();
        match header.api {
            Some(api @ (Api::CuMemCreate | Api::CuMemImportFromShareableHandle)) => {
                let is_torchs = call.from_torch_allocator && api == Api::CuMemCreate;
                if worked {
                    self.physical.create(call.address, header.device, is_torchs);
                }
                if !(worked && is_torchs) {
                    return self.encode_alloc_call(event, alloc, sink);
                }
            }
            Some(Api::CuMemMap) => {
                let held = self.physical.held(alloc.handle);
                let device = held.map_or(header.device, |held| held.device);
                // Torch also maps memory that another process has created and shared. That memory is not a
                // segment of torch.
                let is_segment = call.from_torch_allocator && held.is_none_or(|held| held.is_torchs);
                if worked {
                    self.physical.map(call.address, alloc.handle);
                    if let Some(segment) = self.physical.asleep().wake(call.address, call.bytes) {
                        return self.wake(*event, alloc, &segment, sink);
                    }
                }
                if is_segment {
                    let mut event = *event;
                    event.header.device = device;
                    return self.encode_alloc_call(&event, alloc, sink);
                }
            }
            Some(Api::CuMemRetainAllocationHandle) if worked => self.physical.retain(call.address),
            _ => {}
        }
        self.count_call(event);
        Ok(())
    }

    /// Gives mapped memory back to the sleeping segment at the same address. If the memory had a row of its
    /// own, a row frees it first.
    fn wake<S: RowSink>(
        &mut self,
        mut event: CallEvent,
        alloc: &AllocCall,
        segment: &Live,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let key = alloc.handle | PHYSICAL;
        if self.memory.live.region(key).is_some() {
            let moved = CallEvent { call: Call { address: alloc.handle, ..event.call }, ..event };
            self.free_region(key, &moved, sink)?;
        }
        self.physical.give_to_torch(alloc.handle);
        event.header.device = segment.device;
        event.header.context = segment.context;
        event.call.pool = segment.pool;
        event.call.from_torch_allocator = true;
        self.encode_alloc_call(&event, alloc, sink)
    }

    /// Encodes a call that unmaps or releases physical memory.
    pub(crate) fn encode_virtual_free<S: RowSink>(
        &mut self,
        event: &CallEvent,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        self.count_call(event);
        let CallEvent { header, call, .. } = *event;
        let worked = !event.has_failed();
        let end = call.address.saturating_add(call.bytes.max(0) as u64);
        if call.from_torch_allocator && header.api == Some(Api::CuMemUnmap) {
            self.physical.asleep().forget(call.address, end);
        }
        match header.api {
            Some(Api::CuMemUnmap) if worked => {
                while let Some((address, handle)) = self.physical.unmap_first(call.address..end) {
                    let region = self.memory.live.region(address).copied();
                    if let Some(segment) = region.filter(|live| live.kind == MemoryKind::Mapped) {
                        let unmapped = CallEvent { call: Call { address, ..call }, ..*event };
                        self.free_region(address, &unmapped, sink)?;
                        if !call.from_torch_allocator {
                            self.physical.asleep().add(address, segment);
                        }
                    }
                    self.release_physical(handle, event, sink)?;
                }
                Ok(())
            }
            Some(Api::CuMemRelease) if worked => self.release_physical(call.address, event, sink),
            _ => Ok(()),
        }
    }

    /// Drops one reference to physical memory. Dropping the last reference frees the memory.
    fn release_physical<S: RowSink>(
        &mut self,
        handle: u64,
        event: &CallEvent,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let key = handle | PHYSICAL;
        if !self.physical.release(handle) || self.memory.live.region(key).is_none() {
            return Ok(());
        }
        let released = CallEvent { call: Call { address: handle, ..event.call }, ..*event };
        self.free_region(key, &released, sink)
    }
}
