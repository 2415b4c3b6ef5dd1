//! The CUDA driver's calls that take and give back memory: those of libraries that bring a runtime of
//! their own (cuBLAS, cuDNN, NCCL), of programs that know no runtime (Triton, CuPy), and of expandable
//! segments.
//!
//! A program comes by a function of the driver in several ways: it is linked to it, it looks the name up
//! with `dlsym`, or it asks `cuGetProcAddress` for it, once for each kind of default stream. Each way may
//! give another address, and each address gets a stand-in of its own, which calls what is behind it. What the
//! runtime calls on behalf of a call of its own is told by that one; see [`crate::runtime::guard`].

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use memtrace_trace::{Api, Event};

use super::alloc_call::{
    self, AllocationNode, Call, IpcHandle, Kind, Out, Taken, mipmapped_elements, written,
};
use super::stand_in::{NO_RUNTIME, StandIn};
use crate::ffi::cuda::current_driver_device;
use crate::ffi::symbols::{RealFn, c_name};
use crate::runtime::session;

/// How many addresses of one function get a stand-in: of `dlsym`, and of `cuGetProcAddress` for either
/// kind of default stream, and one more.
const WAYS: usize = 4;

/// A function of the driver, for each way in which a program came by it. `F` is its type.
pub(super) struct DriverFn<F> {
    /// For programs that are linked to it: way 0.
    linked: RealFn<F>,
    /// What was looked up: ways 1 and on.
    found: [AtomicPtr<c_void>; WAYS],
}

impl<F: Copy> DriverFn<F> {
    /// # Safety
    /// `F` must be the type of the function `name` as cuda.h declares it.
    pub(super) const unsafe fn new(name: &'static std::ffi::CStr) -> Self {
        // SAFETY: by the contract.
        let linked = unsafe { RealFn::new(name, "libcuda.so") };
        DriverFn { linked, found: [const { AtomicPtr::new(null_mut()) }; WAYS] }
    }

    /// The real function of a way.
    #[inline]
    pub(super) fn get(&self, way: usize) -> Option<F> {
        if way == 0 {
            return self.linked.get();
        }
        let found = self.found.get(way - 1)?.load(Ordering::Relaxed);
        // SAFETY: what the driver gave for the name, so of type `F` by the contract of `new`.
        (!found.is_null()).then(|| unsafe { std::mem::transmute_copy::<*mut c_void, F>(&found) })
    }

    /// The stand-in for what a program looked up; null when it is one of ours, or one address too many.
    pub(super) fn stand_in(&self, found: *mut c_void, ours: [*mut c_void; WAYS + 1]) -> *mut c_void {
        if ours.contains(&found) {
            return null_mut();
        }
        for (place, stand_in) in self.found.iter().zip(&ours[1..]) {
            let known = match place.compare_exchange(null_mut(), found, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => found,
                Err(known) => known,
            };
            if known == found {
                return *stand_in;
            }
        }
        null_mut()
    }
}

/// Defines, for each function, what is behind it, the exported name, the stand-ins, and its line of
/// [`exported`] and [`by_base_name`]. The name after `as` is the one that `cuGetProcAddress` knows from the
/// version on that follows it. The rest is as in `caller_hooks`.
macro_rules! driver_hooks {
    ($($name:ident as $base:literal from $since:literal ($($arg:ident: $type:ty),*) caller $register:literal => $body:ident, $real:ident;)*) => {
        $(
            static $real: DriverFn<unsafe extern "C" fn($($type),*) -> c_int> =
                // SAFETY: the signature is the one in cuda.h.
                unsafe { DriverFn::new(c_name(concat!(stringify!($name), "\0"))) };

            #[unsafe(no_mangle)]
            #[unsafe(naked)]
            unsafe extern "C" fn $name($($arg: $type),*) -> c_int {
                // At the entry of a function the return address is on top of the stack.
                core::arch::naked_asm!(
                    concat!("mov ", $register, ", qword ptr [rsp]"),
                    "jmp {body}",
                    body = sym $body::<0>
                )
            }
        )*

        /// As the exported functions, for what was looked up.
        #[expect(non_snake_case, reason = "named as the functions that they stand before")]
        mod stand_ins {
            use super::*;
            $(
                #[unsafe(naked)]
                pub(super) unsafe extern "C" fn $name<const WAY: usize>($($arg: $type),*) -> c_int {
                    core::arch::naked_asm!(
                        concat!("mov ", $register, ", qword ptr [rsp]"),
                        "jmp {body}",
                        body = sym $body::<WAY>
                    )
                }
            )*
        }

        /// Our function for an exported name of the driver.
        pub(super) fn exported(name: &[u8]) -> Option<StandIn> {
            match name {
                $(_ if name == stringify!($name).as_bytes() => Some(|found| $real.stand_in(found, [
                    $name as *mut c_void,
                    stand_ins::$name::<1> as *mut c_void,
                    stand_ins::$name::<2> as *mut c_void,
                    stand_ins::$name::<3> as *mut c_void,
                    stand_ins::$name::<4> as *mut c_void,
                ])),)*
                _ => None,
            }
        }

        /// Our function for what `cuGetProcAddress` gives for `name` of CUDA `version`.
        pub(super) fn by_base_name(name: &[u8], version: c_int) -> Option<StandIn> {
            match name {
                $(_ if name == $base && version >= $since => exported(stringify!($name).as_bytes()),)*
                _ => None,
            }
        }
    };
}

/// `CUdeviceptr` and handles of physical memory are numbers, the others pointers; all are one word.
type Word = *mut c_void;

driver_hooks! {
    cuMemAlloc_v2 as b"cuMemAlloc" from 3020 (ptr: Out, size: usize) caller "rdx" => mem_alloc, ALLOC;
    cuMemAllocManaged as b"cuMemAllocManaged" from 6000 (ptr: Out, size: usize, flags: c_uint) caller "rcx" => alloc_managed, ALLOC_MANAGED;
    cuMemAllocPitch_v2 as b"cuMemAllocPitch" from 3020 (ptr: Out, pitch: *mut usize, width: usize, height: usize, element: c_uint) caller "r9" => alloc_pitch, ALLOC_PITCH;
    cuMemAllocAsync as b"cuMemAllocAsync" from 11020 (ptr: Out, size: usize, stream: Word) caller "rcx" => alloc_async, ALLOC_ASYNC;
    cuMemAllocAsync_ptsz as b"" from 0 (ptr: Out, size: usize, stream: Word) caller "rcx" => alloc_async_ptsz, ALLOC_ASYNC_PTSZ;
    cuMemAllocFromPoolAsync as b"cuMemAllocFromPoolAsync" from 11020 (ptr: Out, size: usize, pool: Word, stream: Word) caller "r8" => alloc_from_pool, ALLOC_FROM_POOL;
    cuMemAllocFromPoolAsync_ptsz as b"" from 0 (ptr: Out, size: usize, pool: Word, stream: Word) caller "r8" => alloc_from_pool_ptsz, ALLOC_FROM_POOL_PTSZ;
    cuMemFree_v2 as b"cuMemFree" from 3020 (ptr: Word) caller "rsi" => mem_free, FREE;
    cuMemFreeAsync as b"cuMemFreeAsync" from 11020 (ptr: Word, stream: Word) caller "rdx" => free_async, FREE_ASYNC;
    cuMemFreeAsync_ptsz as b"" from 0 (ptr: Word, stream: Word) caller "rdx" => free_async_ptsz, FREE_ASYNC_PTSZ;
    cuArrayCreate_v2 as b"cuArrayCreate" from 3020 (array: Out, shape: *const ArrayShape) caller "rdx" => array_create, ARRAY_CREATE;
    cuArray3DCreate_v2 as b"cuArray3DCreate" from 3020 (array: Out, shape: *const Array3DShape) caller "rdx" => array_3d_create, ARRAY_3D_CREATE;
    cuArrayDestroy as b"cuArrayDestroy" from 2000 (array: Word) caller "rsi" => array_destroy, ARRAY_DESTROY;
    cuMipmappedArrayCreate as b"cuMipmappedArrayCreate" from 5000 (array: Out, shape: *const Array3DShape, levels: c_uint) caller "rcx" => mipmapped_array_create, MIPMAPPED_ARRAY_CREATE;
    cuMipmappedArrayDestroy as b"cuMipmappedArrayDestroy" from 5000 (array: Word) caller "rsi" => mipmapped_array_destroy, MIPMAPPED_ARRAY_DESTROY;
    cuMemHostAlloc as b"cuMemHostAlloc" from 2020 (ptr: Out, size: usize, flags: c_uint) caller "rcx" => host_alloc, HOST_ALLOC;
    cuMemAllocHost_v2 as b"cuMemAllocHost" from 3020 (ptr: Out, size: usize) caller "rdx" => alloc_host, ALLOC_HOST;
    cuMemFreeHost as b"cuMemFreeHost" from 2000 (ptr: Word) caller "rsi" => free_host, FREE_HOST;
    cuMemHostRegister_v2 as b"cuMemHostRegister" from 6050 (ptr: Word, size: usize, flags: c_uint) caller "rcx" => host_register, HOST_REGISTER;
    cuMemHostUnregister as b"cuMemHostUnregister" from 4000 (ptr: Word) caller "rsi" => host_unregister, HOST_UNREGISTER;
    cuMemCreate as b"cuMemCreate" from 10020 (handle: Out, size: usize, properties: *const Properties, flags: c_ulonglong) caller "r8" => create, CREATE;
    cuMemRelease as b"cuMemRelease" from 10020 (handle: Word) caller "rsi" => release, RELEASE;
    cuMemRetainAllocationHandle as b"cuMemRetainAllocationHandle" from 11000 (handle: Out, ptr: Word) caller "rdx" => retain, RETAIN;
    cuMemImportFromShareableHandle as b"cuMemImportFromShareableHandle" from 10020 (handle: Out, shared: Word, kind: c_uint) caller "rcx" => import, IMPORT;
    cuMemMap as b"cuMemMap" from 10020 (ptr: Word, size: usize, offset: usize, handle: Word, flags: c_ulonglong) caller "r9" => map, MAP;
    cuMemUnmap as b"cuMemUnmap" from 10020 (ptr: Word, size: usize) caller "rdx" => unmap, UNMAP;
    cuIpcOpenMemHandle_v2 as b"cuIpcOpenMemHandle" from 4010 (ptr: Out, handle: IpcHandle, flags: c_uint) caller "rdx" => ipc_open, IPC_OPEN;
    cuIpcCloseMemHandle as b"cuIpcCloseMemHandle" from 4010 (ptr: Word) caller "rsi" => ipc_close, IPC_CLOSE;
    cuMemPoolImportPointer as b"cuMemPoolImportPointer" from 11020 (ptr: Out, pool: Word, exported: *const c_void) caller "rcx" => import_pointer, IMPORT_POINTER;
    cuGraphAddMemAllocNode as b"cuGraphAddMemAllocNode" from 11040 (out: Out, graph: Word, after: *const c_void, count: usize, node: *mut AllocationNode) caller "r9" => alloc_node, ALLOC_NODE;
    cuGraphAddMemFreeNode as b"cuGraphAddMemFreeNode" from 11040 (out: Out, graph: Word, after: *const c_void, count: usize, ptr: Word) caller "r9" => free_node, FREE_NODE;
}

/// `CUDA_ARRAY_DESCRIPTOR_v2`.
#[repr(C)]
struct ArrayShape {
    width: usize,
    height: usize,
    format: c_uint,
    channels: c_uint,
}

/// `CUDA_ARRAY3D_DESCRIPTOR_v2`.
#[repr(C)]
struct Array3DShape {
    width: usize,
    height: usize,
    depth: usize,
    format: c_uint,
    channels: c_uint,
    flags: c_uint,
}

/// The beginning of `CUmemAllocationProp`.
#[repr(C)]
struct Properties {
    kind: c_int,
    handles: c_int,
    /// `CUmemLocation`: 1 is a device, more is the host.
    location: c_int,
    id: c_int,
}

fn is_on() -> bool {
    session::session().is_some_and(|session| session.settings.driver)
}

fn call(kind: Kind, api: Api, caller: *const c_void) -> Call {
    Call { kind, api, caller, device: current_driver_device }
}

fn takes(call: Call, asked: usize, run: impl FnOnce() -> c_int, taken: impl FnOnce() -> Taken) -> c_int {
    if is_on() { alloc_call::takes(call, asked, run, taken) } else { run() }
}

/// Calls of the form `f(ptr *, size, rest...)`, and the stream that they are on.
macro_rules! simple_alloc {
    ($($body:ident = $real:ident, $kind:ident, $api:ident ($($arg:ident: $type:ty),*) $(on $stream:ident)?;)*) => { $(
        unsafe extern "C" fn $body<const WAY: usize>(ptr: Out, size: usize, $($arg: $type,)* caller: *const c_void) -> c_int {
            let Some(real) = $real.get(WAY) else { return NO_RUNTIME };
            takes(
                call(Kind::$kind, Api::$api, caller),
                size,
                // SAFETY: the caller's own arguments, passed on unchanged.
                || unsafe { real(ptr, size, $($arg),*) },
                // SAFETY: called after a success only.
                || Taken::on([$($stream,)? null_mut()][0], unsafe { written(ptr) }, size),
            )
        }
    )* };
}

simple_alloc! {
    mem_alloc = ALLOC, DeviceAlloc, CuMemAlloc();
    alloc_managed = ALLOC_MANAGED, DeviceAlloc, CuMemAllocManaged(flags: c_uint);
    alloc_async = ALLOC_ASYNC, DeviceAlloc, CuMemAllocAsync(stream: Word) on stream;
    alloc_async_ptsz = ALLOC_ASYNC_PTSZ, DeviceAlloc, CuMemAllocAsync(stream: Word) on stream;
    alloc_from_pool = ALLOC_FROM_POOL, DeviceAlloc, CuMemAllocFromPoolAsync(pool: Word, stream: Word) on stream;
    alloc_from_pool_ptsz = ALLOC_FROM_POOL_PTSZ, DeviceAlloc, CuMemAllocFromPoolAsync(pool: Word, stream: Word) on stream;
    host_alloc = HOST_ALLOC, HostAlloc, CuMemHostAlloc(flags: c_uint);
    alloc_host = ALLOC_HOST, HostAlloc, CuMemAllocHost();
}

/// Calls of the form `f(ptr, rest...)`, with the bytes that it gives back, 0 for all that is there.
macro_rules! simple_free {
    ($($body:ident = $real:ident, $kind:ident, $api:ident ($($arg:ident: $type:ty),*) $bytes:expr;)*) => { $(
        unsafe extern "C" fn $body<const WAY: usize>(ptr: Word, $($arg: $type,)* caller: *const c_void) -> c_int {
            let Some(real) = $real.get(WAY) else { return NO_RUNTIME };
            // SAFETY: the caller's own arguments, passed on unchanged.
            let run = || unsafe { real(ptr, $($arg),*) };
            if !is_on() {
                return run();
            }
            alloc_call::gives(call(Kind::$kind, Api::$api, caller), ptr as u64, $bytes, run)
        }
    )* };
}

simple_free! {
    mem_free = FREE, DeviceFree, CuMemFree() 0;
    free_async = FREE_ASYNC, DeviceFree, CuMemFreeAsync(stream: Word) 0;
    free_async_ptsz = FREE_ASYNC_PTSZ, DeviceFree, CuMemFreeAsync(stream: Word) 0;
    array_destroy = ARRAY_DESTROY, DeviceFree, CuArrayDestroy() 0;
    mipmapped_array_destroy = MIPMAPPED_ARRAY_DESTROY, DeviceFree, CuMipmappedArrayDestroy() 0;
    free_host = FREE_HOST, HostFree, CuMemFreeHost() 0;
    host_unregister = HOST_UNREGISTER, HostFree, CuMemHostUnregister() 0;
    release = RELEASE, DeviceFree, CuMemRelease() 0;
    unmap = UNMAP, DeviceFree, CuMemUnmap(size: usize) size;
    ipc_close = IPC_CLOSE, DeviceFree, CuIpcCloseMemHandle() 0;
}

unsafe extern "C" fn alloc_pitch<const WAY: usize>(
    ptr: Out,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: c_uint,
    caller: *const c_void,
) -> c_int {
    let Some(real) = ALLOC_PITCH.get(WAY) else { return NO_RUNTIME };
    takes(
        call(Kind::DeviceAlloc, Api::CuMemAllocPitch, caller),
        width.saturating_mul(height),
        // SAFETY: the caller's own arguments, passed on unchanged.
        || unsafe { real(ptr, pitch, width, height, element) },
        || {
            // SAFETY: called after a success only.
            let (address, pitch) = unsafe { (written(ptr), written(pitch)) };
            Taken::new(address, pitch.unwrap_or(width).saturating_mul(height))
        },
    )
}

unsafe extern "C" fn host_register<const WAY: usize>(
    ptr: Word,
    size: usize,
    flags: c_uint,
    caller: *const c_void,
) -> c_int {
    let Some(real) = HOST_REGISTER.get(WAY) else { return NO_RUNTIME };
    takes(
        call(Kind::HostAlloc, Api::CuMemHostRegister, caller),
        size,
        // SAFETY: the caller's own arguments, passed on unchanged.
        || unsafe { real(ptr, size, flags) },
        || Taken::new(Some(ptr), size),
    )
}

/// Bytes of so many elements; what an array takes with its padding is the driver's own.
fn array_bytes(elements: usize, format: c_uint, channels: c_uint) -> usize {
    // CU_AD_FORMAT_*: those of 8, 16 and 32 bits.
    let element = match format {
        0x01 | 0x08 => 1,
        0x02 | 0x09 | 0x10 => 2,
        0x03 | 0x0a | 0x20 => 4,
        _ => 0,
    };
    elements.saturating_mul(element).saturating_mul(channels as usize)
}

fn array_3d_bytes(shape: &Array3DShape, levels: c_uint) -> usize {
    let elements = mipmapped_elements([shape.width, shape.height, shape.depth], levels);
    array_bytes(elements, shape.format, shape.channels)
}

unsafe extern "C" fn array_create<const WAY: usize>(
    array: Out,
    shape: *const ArrayShape,
    caller: *const c_void,
) -> c_int {
    let Some(real) = ARRAY_CREATE.get(WAY) else { return NO_RUNTIME };
    // SAFETY: the caller's pointer, valid or null by CUDA's contract.
    let bytes = unsafe { shape.as_ref() }.map_or(0, |shape| {
        array_bytes(shape.width.saturating_mul(shape.height.max(1)), shape.format, shape.channels)
    });
    takes(
        call(Kind::DeviceAlloc, Api::CuArrayCreate, caller),
        bytes,
        // SAFETY: the caller's own arguments, passed on unchanged.
        || unsafe { real(array, shape) },
        // SAFETY: called after a success only.
        || Taken::new(unsafe { written(array) }, bytes),
    )
}

unsafe extern "C" fn array_3d_create<const WAY: usize>(
    array: Out,
    shape: *const Array3DShape,
    caller: *const c_void,
) -> c_int {
    let Some(real) = ARRAY_3D_CREATE.get(WAY) else { return NO_RUNTIME };
    // SAFETY: the caller's pointer, valid or null by CUDA's contract.
    let bytes = unsafe { shape.as_ref() }.map_or(0, |shape| array_3d_bytes(shape, 1));
    takes(
        call(Kind::DeviceAlloc, Api::CuArray3DCreate, caller),
        bytes,
        // SAFETY: the caller's own arguments, passed on unchanged.
        || unsafe { real(array, shape) },
        // SAFETY: called after a success only.
        || Taken::new(unsafe { written(array) }, bytes),
    )
}

unsafe extern "C" fn mipmapped_array_create<const WAY: usize>(
    array: Out,
    shape: *const Array3DShape,
    levels: c_uint,
    caller: *const c_void,
) -> c_int {
    let Some(real) = MIPMAPPED_ARRAY_CREATE.get(WAY) else { return NO_RUNTIME };
    // SAFETY: the caller's pointer, valid or null by CUDA's contract.
    let bytes = unsafe { shape.as_ref() }.map_or(0, |shape| array_3d_bytes(shape, levels));
    takes(
        call(Kind::DeviceAlloc, Api::CuMipmappedArrayCreate, caller),
        bytes,
        // SAFETY: the caller's own arguments, passed on unchanged.
        || unsafe { real(array, shape, levels) },
        // SAFETY: called after a success only.
        || Taken::new(unsafe { written(array) }, bytes),
    )
}

/// Physical memory: it is there from here on, at no address.
unsafe extern "C" fn create<const WAY: usize>(
    handle: Out,
    size: usize,
    properties: *const Properties,
    flags: c_ulonglong,
    caller: *const c_void,
) -> c_int {
    let Some(real) = CREATE.get(WAY) else { return NO_RUNTIME };
    // SAFETY: the caller's pointer, valid or null by CUDA's contract.
    let device = unsafe { properties.as_ref() }.map(|properties| match properties.location {
        1 => i8::try_from(properties.id).unwrap_or(0),
        _ => Event::HOST,
    });
    takes(
        call(Kind::DeviceAlloc, Api::CuMemCreate, caller),
        size,
        // SAFETY: the caller's own arguments, passed on unchanged.
        || unsafe { real(handle, size, properties, flags) },
        // SAFETY: called after a success only.
        || Taken { device, ..Taken::new(unsafe { written(handle) }, size) },
    )
}

/// One more who holds the physical memory.
unsafe extern "C" fn retain<const WAY: usize>(handle: Out, ptr: Word, caller: *const c_void) -> c_int {
    let Some(real) = RETAIN.get(WAY) else { return NO_RUNTIME };
    takes(
        call(Kind::DeviceAlloc, Api::CuMemRetainAllocationHandle, caller),
        0,
        // SAFETY: the caller's own arguments, passed on unchanged.
        || unsafe { real(handle, ptr) },
        // SAFETY: called after a success only.
        || Taken::new(unsafe { written(handle) }, 0),
    )
}

/// Physical memory of another process costs this one nothing: the process that made it has its bytes.
unsafe extern "C" fn import<const WAY: usize>(
    handle: Out,
    shared: Word,
    kind: c_uint,
    caller: *const c_void,
) -> c_int {
    let Some(real) = IMPORT.get(WAY) else { return NO_RUNTIME };
    takes(
        call(Kind::DeviceAlloc, Api::CuMemImportFromShareableHandle, caller),
        0,
        // SAFETY: the caller's own arguments, passed on unchanged.
        || unsafe { real(handle, shared, kind) },
        // SAFETY: called after a success only.
        || Taken::new(unsafe { written(handle) }, 0),
    )
}

/// Physical memory gets an address.
unsafe extern "C" fn map<const WAY: usize>(
    ptr: Word,
    size: usize,
    offset: usize,
    handle: Word,
    flags: c_ulonglong,
    caller: *const c_void,
) -> c_int {
    let Some(real) = MAP.get(WAY) else { return NO_RUNTIME };
    takes(
        call(Kind::DeviceAlloc, Api::CuMemMap, caller),
        size,
        // SAFETY: the caller's own arguments, passed on unchanged.
        || unsafe { real(ptr, size, offset, handle, flags) },
        || Taken { handle: handle as u64, ..Taken::new(Some(ptr), size) },
    )
}

/// As [`import`], by `cudaIpcMemHandle_t`.
unsafe extern "C" fn ipc_open<const WAY: usize>(
    ptr: Out,
    handle: IpcHandle,
    flags: c_uint,
    caller: *const c_void,
) -> c_int {
    let Some(real) = IPC_OPEN.get(WAY) else { return NO_RUNTIME };
    takes(
        call(Kind::DeviceAlloc, Api::CuIpcOpenMemHandle, caller),
        0,
        // SAFETY: the caller's own arguments, passed on unchanged.
        || unsafe { real(ptr, handle, flags) },
        // SAFETY: called after a success only.
        || Taken::new(unsafe { written(ptr) }, 0),
    )
}

/// As [`import`], of a pool.
unsafe extern "C" fn import_pointer<const WAY: usize>(
    ptr: Out,
    pool: Word,
    exported: *const c_void,
    caller: *const c_void,
) -> c_int {
    let Some(real) = IMPORT_POINTER.get(WAY) else { return NO_RUNTIME };
    takes(
        call(Kind::DeviceAlloc, Api::CuMemPoolImportPointer, caller),
        0,
        // SAFETY: the caller's own arguments, passed on unchanged.
        || unsafe { real(ptr, pool, exported) },
        // SAFETY: called after a success only.
        || Taken::new(unsafe { written(ptr) }, 0),
    )
}

/// A node of a graph: see [`Taken::on`].
unsafe extern "C" fn alloc_node<const WAY: usize>(
    out: Out,
    graph: Word,
    after: *const c_void,
    count: usize,
    node: *mut AllocationNode,
    caller: *const c_void,
) -> c_int {
    let Some(real) = ALLOC_NODE.get(WAY) else { return NO_RUNTIME };
    takes(
        call(Kind::DeviceAlloc, Api::CuGraphAddMemAllocNode, caller),
        // SAFETY: the caller's own pointer.
        unsafe { AllocationNode::asked(node) },
        // SAFETY: the caller's own arguments, passed on unchanged.
        || unsafe { real(out, graph, after, count, node) },
        // SAFETY: called after a success only.
        || unsafe { AllocationNode::taken(node) },
    )
}

unsafe extern "C" fn free_node<const WAY: usize>(
    out: Out,
    graph: Word,
    after: *const c_void,
    count: usize,
    ptr: Word,
    caller: *const c_void,
) -> c_int {
    let Some(real) = FREE_NODE.get(WAY) else { return NO_RUNTIME };
    // SAFETY: the caller's own arguments, passed on unchanged.
    let run = || unsafe { real(out, graph, after, count, ptr) };
    if !is_on() {
        return run();
    }
    alloc_call::gives(call(Kind::DeviceFree, Api::CuGraphAddMemFreeNode, caller), ptr as u64, 0, run)
}
