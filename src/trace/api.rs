//! The functions that allocate, free and mark memory.

use serde::{Deserialize, Serialize};

use crate::text_enum::text_enum;

text_enum! {
    /// The source of a row: the column `api`. Events and journals contain its numbers.
    #[expect(missing_docs, reason = "a variant without documentation is the function of that name")]
    Api {
        /// memtrace itself.
        Memtrace = "memtrace",
        /// torch's caching allocator.
        CachingAllocator = "caching_allocator",
        CudaMalloc = "cudaMalloc",
        CudaFree = "cudaFree",
        CudaMallocAsync = "cudaMallocAsync",
        CudaFreeAsync = "cudaFreeAsync",
        CudaMallocFromPoolAsync = "cudaMallocFromPoolAsync",
        CudaMallocManaged = "cudaMallocManaged",
        CudaMallocPitch = "cudaMallocPitch",
        CudaMalloc3D = "cudaMalloc3D",
        CudaMallocArray = "cudaMallocArray",
        CudaFreeArray = "cudaFreeArray",
        CudaHostAlloc = "cudaHostAlloc",
        CudaMallocHost = "cudaMallocHost",
        CudaFreeHost = "cudaFreeHost",
        CudaHostRegister = "cudaHostRegister",
        CudaHostUnregister = "cudaHostUnregister",
        CudaMalloc3DArray = "cudaMalloc3DArray",
        /// Segments whose call was not traced; inferred from the total of the allocator.
        Reconciled = "reconciled",
        /// An NVTX range or mark.
        Nvtx = "nvtx",
        /// torch's `RecordFunction`: an op.
        RecordFunction = "record_function",
        /// The forward of a `torch.nn.Module`.
        Module = "module",
        /// Attributes of a block that Python code reported.
        Python = "python",
        /// torch's allocator of CPU tensors.
        CpuAllocator = "cpu_allocator",
        /// An op that has a schema and was not called by another such op; recorded with `MEMTRACE_OPS=io`.
        Operator = "operator",
        /// A backward function; recorded with `MEMTRACE_OPS=io`.
        BackwardFunction = "backward_function",
        /// An `io` row: the op reads the storage.
        Read = "read",
        /// An `io` row: the op writes the storage, and by its schema does not read it (`out=`).
        Write = "write",
        /// An `io` row: the op changes the storage in place.
        ReadWrite = "read_write",
        /// An `io` row: a backward function received the storage. It has no schema, so its use of the storage is
        /// unknown.
        Given = "given",
        /// An `io` row: the parameters of a module and of its submodules.
        ModuleParameters = "module_parameters",
        /// An `io` row: the buffers of a module and of its submodules.
        ModuleBuffers = "module_buffers",
        /// An `io` row: the inputs of a module call.
        ModuleInputs = "module_inputs",
        /// An `io` row: the outputs of a module call.
        ModuleOutputs = "module_outputs",
        CudaMallocMipmappedArray = "cudaMallocMipmappedArray",
        CudaFreeMipmappedArray = "cudaFreeMipmappedArray",
        CudaIpcOpenMemHandle = "cudaIpcOpenMemHandle",
        CudaIpcCloseMemHandle = "cudaIpcCloseMemHandle",
        CudaMemPoolImportPointer = "cudaMemPoolImportPointer",
        CuMemAlloc = "cuMemAlloc",
        CuMemAllocManaged = "cuMemAllocManaged",
        CuMemAllocPitch = "cuMemAllocPitch",
        CuMemAllocAsync = "cuMemAllocAsync",
        CuMemAllocFromPoolAsync = "cuMemAllocFromPoolAsync",
        CuMemFree = "cuMemFree",
        CuMemFreeAsync = "cuMemFreeAsync",
        CuArrayCreate = "cuArrayCreate",
        CuArray3DCreate = "cuArray3DCreate",
        CuArrayDestroy = "cuArrayDestroy",
        CuMipmappedArrayCreate = "cuMipmappedArrayCreate",
        CuMipmappedArrayDestroy = "cuMipmappedArrayDestroy",
        CuMemHostAlloc = "cuMemHostAlloc",
        CuMemAllocHost = "cuMemAllocHost",
        CuMemFreeHost = "cuMemFreeHost",
        CuMemHostRegister = "cuMemHostRegister",
        CuMemHostUnregister = "cuMemHostUnregister",
        CuMemCreate = "cuMemCreate",
        CuMemRelease = "cuMemRelease",
        CuMemRetainAllocationHandle = "cuMemRetainAllocationHandle",
        CuMemImportFromShareableHandle = "cuMemImportFromShareableHandle",
        CuMemMap = "cuMemMap",
        CuMemUnmap = "cuMemUnmap",
        CuIpcOpenMemHandle = "cuIpcOpenMemHandle",
        CuIpcCloseMemHandle = "cuIpcCloseMemHandle",
        CuMemPoolImportPointer = "cuMemPoolImportPointer",
        /// A sample from NVML.
        Nvml = "nvml",
        CuMemGetInfo = "cuMemGetInfo",
        CudaGraphAddMemAllocNode = "cudaGraphAddMemAllocNode",
        CudaGraphAddMemFreeNode = "cudaGraphAddMemFreeNode",
        CuGraphAddMemAllocNode = "cuGraphAddMemAllocNode",
        CuGraphAddMemFreeNode = "cuGraphAddMemFreeNode",
        /// An OOM that `--phantom-fault` injected.
        InjectedFault = "injected_fault",
        /// A mark that gives the detail of the rows after it.
        Detail = "detail",
        /// A result of the search for the objects that hold memory.
        Retained = "retained",
        /// An `oom` row: `--past-oom` granted the request.
        PastOom = "past_oom",
        /// A sample of the process's resident memory: `/proc/PID/status`.
        ProcStatus = "proc_status",
        /// A sample of the memory of the process's control group, its container.
        Cgroup = "cgroup",
        /// A sample of the machine's memory: `/proc/meminfo`.
        Meminfo = "meminfo",
        /// A sample of a part of the process's memory: `/proc/PID/smaps`.
        Smaps = "smaps",
        /// A sample of a child process.
        Child = "child",
        /// A sample of another process that shares the memory limit with this process.
        OtherProcess = "other_process",
        /// The program ended with an error because the system refused it memory.
        Refused = "refused",
        /// The mark at the end of the script.
        Script = "script",
        /// A mark where a backward continues with another call of a module.
        Backward = "backward",
        /// A mark of the first use of a device, in a process that uses several.
        FirstUse = "first_use",
        /// A mark that names another process on a GPU.
        GpuProcess = "gpu_process",
        /// A mark with a fact about a called model.
        ModelFact = "model_fact",
        /// A mark about the inference server in the process.
        Server = "server",
        /// A mark that names the group of a communicator of NCCL.
        Communicator = "communicator",
    }
}

impl Api {
    /// The calls that allocate managed memory, whose pages move between the device and the host.
    pub const MANAGED: [Api; 2] = [Api::CudaMallocManaged, Api::CuMemAllocManaged];

    /// Returns true if the call allocates managed memory.
    #[must_use]
    pub fn is_managed(self) -> bool {
        Api::MANAGED.contains(&self)
    }

    /// Returns true if the call opens memory of another process.
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_an_api_is_its_place_in_the_declaration() {
        for (number, api) in Api::ALL.iter().enumerate() {
            assert_eq!(usize::from(api.id()), number);
            assert_eq!(Api::parse(api.as_str()), Some(*api));
        }
        // Journals of earlier versions contain these numbers, so they must not change.
        assert_eq!((Api::Memtrace.id(), Api::Nvtx.id(), Api::CuGraphAddMemFreeNode.id()), (0, 19, 70));
        assert_eq!(Api::from_id(Api::ALL.len() as u64), None);
    }
}
