//! The calls that memory comes from.

/// Where a row comes from: the column `api`.
///
/// The discriminants are the bytes of [`crate::Event::api`], so they are only ever added to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[expect(missing_docs, reason = "each is the call of that name")]
pub enum Api {
    Memtrace = 0,
    CachingAllocator = 1,
    CudaMalloc = 2,
    CudaFree = 3,
    CudaMallocAsync = 4,
    CudaFreeAsync = 5,
    CudaMallocFromPoolAsync = 6,
    CudaMallocManaged = 7,
    CudaMallocPitch = 8,
    CudaMalloc3D = 9,
    CudaMallocArray = 10,
    CudaFreeArray = 11,
    CudaHostAlloc = 12,
    CudaMallocHost = 13,
    CudaFreeHost = 14,
    CudaHostRegister = 15,
    CudaHostUnregister = 16,
    CudaMalloc3DArray = 17,
    /// Segments whose call was not seen; inferred from the allocator's own total.
    Reconciled = 18,
    Nvtx = 19,
    RecordFunction = 20,
    /// The forward of a `torch.nn.Module`.
    Module = 21,
    /// What Python knows of a block.
    Python = 22,
    /// torch's allocator of CPU tensors.
    CpuAllocator = 23,
    /// An op with a schema that no other op with one called; only `MEMTRACE_OPS=io` tells it apart.
    Operator = 24,
    /// A backward function; only `MEMTRACE_OPS=io` tells it apart.
    BackwardFunction = 25,
    /// Of an `io` row: the op reads the storage.
    Read = 26,
    /// Of an `io` row: the op writes the storage, and by its schema does not read it (`out=`).
    Write = 27,
    /// Of an `io` row: the op changes the storage in place.
    ReadWrite = 28,
    /// Of an `io` row: a backward function got the storage; it has no schema that tells what it does to it.
    Given = 29,
    /// Of an `io` row: the parameters of a module and of those in it.
    ModuleParameters = 30,
    /// Of an `io` row: the buffers of a module and of those in it.
    ModuleBuffers = 31,
    /// Of an `io` row: what the call of a module was given.
    ModuleInputs = 32,
    /// Of an `io` row: what the call of a module returned.
    ModuleOutputs = 33,
    CudaMallocMipmappedArray = 34,
    CudaFreeMipmappedArray = 35,
    CudaIpcOpenMemHandle = 36,
    CudaIpcCloseMemHandle = 37,
    CudaMemPoolImportPointer = 38,
    CuMemAlloc = 39,
    CuMemAllocManaged = 40,
    CuMemAllocPitch = 41,
    CuMemAllocAsync = 42,
    CuMemAllocFromPoolAsync = 43,
    CuMemFree = 44,
    CuMemFreeAsync = 45,
    CuArrayCreate = 46,
    CuArray3DCreate = 47,
    CuArrayDestroy = 48,
    CuMipmappedArrayCreate = 49,
    CuMipmappedArrayDestroy = 50,
    CuMemHostAlloc = 51,
    CuMemAllocHost = 52,
    CuMemFreeHost = 53,
    CuMemHostRegister = 54,
    CuMemHostUnregister = 55,
    CuMemCreate = 56,
    CuMemRelease = 57,
    CuMemRetainAllocationHandle = 58,
    CuMemImportFromShareableHandle = 59,
    CuMemMap = 60,
    CuMemUnmap = 61,
    CuIpcOpenMemHandle = 62,
    CuIpcCloseMemHandle = 63,
    CuMemPoolImportPointer = 64,
    Nvml = 65,
    CuMemGetInfo = 66,
    CudaGraphAddMemAllocNode = 67,
    CudaGraphAddMemFreeNode = 68,
    CuGraphAddMemAllocNode = 69,
    CuGraphAddMemFreeNode = 70,
}

/// Every call, with the text of its column.
const NAMES: &[(Api, &str)] = &[
    (Api::Memtrace, "memtrace"),
    (Api::CachingAllocator, "caching_allocator"),
    (Api::CudaMalloc, "cudaMalloc"),
    (Api::CudaFree, "cudaFree"),
    (Api::CudaMallocAsync, "cudaMallocAsync"),
    (Api::CudaFreeAsync, "cudaFreeAsync"),
    (Api::CudaMallocFromPoolAsync, "cudaMallocFromPoolAsync"),
    (Api::CudaMallocManaged, "cudaMallocManaged"),
    (Api::CudaMallocPitch, "cudaMallocPitch"),
    (Api::CudaMalloc3D, "cudaMalloc3D"),
    (Api::CudaMallocArray, "cudaMallocArray"),
    (Api::CudaFreeArray, "cudaFreeArray"),
    (Api::CudaHostAlloc, "cudaHostAlloc"),
    (Api::CudaMallocHost, "cudaMallocHost"),
    (Api::CudaFreeHost, "cudaFreeHost"),
    (Api::CudaHostRegister, "cudaHostRegister"),
    (Api::CudaHostUnregister, "cudaHostUnregister"),
    (Api::CudaMalloc3DArray, "cudaMalloc3DArray"),
    (Api::Reconciled, "reconciled"),
    (Api::Nvtx, "nvtx"),
    (Api::RecordFunction, "record_function"),
    (Api::Module, "module"),
    (Api::Python, "python"),
    (Api::CpuAllocator, "cpu_allocator"),
    (Api::Operator, "operator"),
    (Api::BackwardFunction, "backward_function"),
    (Api::Read, "read"),
    (Api::Write, "write"),
    (Api::ReadWrite, "read_write"),
    (Api::Given, "given"),
    (Api::ModuleParameters, "module_parameters"),
    (Api::ModuleBuffers, "module_buffers"),
    (Api::ModuleInputs, "module_inputs"),
    (Api::ModuleOutputs, "module_outputs"),
    (Api::CudaMallocMipmappedArray, "cudaMallocMipmappedArray"),
    (Api::CudaFreeMipmappedArray, "cudaFreeMipmappedArray"),
    (Api::CudaIpcOpenMemHandle, "cudaIpcOpenMemHandle"),
    (Api::CudaIpcCloseMemHandle, "cudaIpcCloseMemHandle"),
    (Api::CudaMemPoolImportPointer, "cudaMemPoolImportPointer"),
    (Api::CuMemAlloc, "cuMemAlloc"),
    (Api::CuMemAllocManaged, "cuMemAllocManaged"),
    (Api::CuMemAllocPitch, "cuMemAllocPitch"),
    (Api::CuMemAllocAsync, "cuMemAllocAsync"),
    (Api::CuMemAllocFromPoolAsync, "cuMemAllocFromPoolAsync"),
    (Api::CuMemFree, "cuMemFree"),
    (Api::CuMemFreeAsync, "cuMemFreeAsync"),
    (Api::CuArrayCreate, "cuArrayCreate"),
    (Api::CuArray3DCreate, "cuArray3DCreate"),
    (Api::CuArrayDestroy, "cuArrayDestroy"),
    (Api::CuMipmappedArrayCreate, "cuMipmappedArrayCreate"),
    (Api::CuMipmappedArrayDestroy, "cuMipmappedArrayDestroy"),
    (Api::CuMemHostAlloc, "cuMemHostAlloc"),
    (Api::CuMemAllocHost, "cuMemAllocHost"),
    (Api::CuMemFreeHost, "cuMemFreeHost"),
    (Api::CuMemHostRegister, "cuMemHostRegister"),
    (Api::CuMemHostUnregister, "cuMemHostUnregister"),
    (Api::CuMemCreate, "cuMemCreate"),
    (Api::CuMemRelease, "cuMemRelease"),
    (Api::CuMemRetainAllocationHandle, "cuMemRetainAllocationHandle"),
    (Api::CuMemImportFromShareableHandle, "cuMemImportFromShareableHandle"),
    (Api::CuMemMap, "cuMemMap"),
    (Api::CuMemUnmap, "cuMemUnmap"),
    (Api::CuIpcOpenMemHandle, "cuIpcOpenMemHandle"),
    (Api::CuIpcCloseMemHandle, "cuIpcCloseMemHandle"),
    (Api::CuMemPoolImportPointer, "cuMemPoolImportPointer"),
    (Api::Nvml, "nvml"),
    (Api::CuMemGetInfo, "cuMemGetInfo"),
    (Api::CudaGraphAddMemAllocNode, "cudaGraphAddMemAllocNode"),
    (Api::CudaGraphAddMemFreeNode, "cudaGraphAddMemFreeNode"),
    (Api::CuGraphAddMemAllocNode, "cuGraphAddMemAllocNode"),
    (Api::CuGraphAddMemFreeNode, "cuGraphAddMemFreeNode"),
];

impl Api {
    /// The text of the column `api`.
    #[must_use]
    pub fn name(self) -> &'static str {
        NAMES[self as usize].1
    }

    /// Does it open memory that another process has?
    #[must_use]
    pub fn is_import(self) -> bool {
        matches!(
            self,
            Api::CudaIpcOpenMemHandle
                | Api::CuIpcOpenMemHandle
                | Api::CudaMemPoolImportPointer
                | Api::CuMemPoolImportPointer
                | Api::CuMemImportFromShareableHandle
        )
    }

    /// The call of a text of the column `api`.
    #[must_use]
    pub fn parse(name: &str) -> Option<Api> {
        NAMES.iter().find(|(_, text)| *text == name).map(|(api, _)| *api)
    }

    /// The call of an event's byte; `None` for a byte that no version wrote.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Api> {
        NAMES.get(usize::from(code)).map(|(api, _)| *api)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_agree() {
        for (index, (api, name)) in NAMES.iter().enumerate() {
            assert_eq!(*api as usize, index);
            assert_eq!(Api::from_code(index as u8).map(Api::name), Some(*name));
        }
        assert_eq!(Api::from_code(NAMES.len() as u8), None);
    }
}
