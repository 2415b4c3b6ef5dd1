//! Advice for each owner of memory, and the common names of libraries.

use memtrace_trace::Category;

pub(super) const ROUNDING: &str = "sizes are rounded up: pad shapes, or unset roundup_power2_divisions";
pub(super) const PENDING: &str = "held by record_stream: use fewer side streams, or wait for them sooner";
pub(super) const HOLES: &str = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; memtrace frag names the blocks that keep segments alive";
pub(super) const CACHED: &str = "torch reuses it; torch.cuda.empty_cache() returns it to the device";
pub(super) const POOL: &str = "cudaMemPoolTrimTo, or a lower release threshold";
pub(super) const GRAPHS: &str = "torch.cuda.graph_pool_handle() to share one pool, fewer captured shapes";
pub(super) const CONTEXT: &str = "CUDA_MODULE_LOADING=LAZY, fewer extensions; each process has one per GPU";
pub(super) const OTHERS: &str =
    "end them (nvidia-smi lists them), or choose another GPU with CUDA_VISIBLE_DEVICES";
pub(super) const UNKNOWN_PROCESS: &str =
    "run outside the container or with --pid=host to separate the processes";
pub(super) const HOST: &str =
    "memtrace ledger --host names its parts; offloading frees nothing on this machine";
pub(super) const OTHER_PROGRAMS: &str = "end other programs, or the desktop";
pub(super) const PAGE_CACHE: &str =
    "free for allocations, but cudaMemGetInfo counts it as used, as do programs that size a cache by it";
const UNEXPLAINED: &str = "driver, ECC or a display; above 1 GiB, look for a leftover process";
/// For a card that is coherent with its host. In the driver's NUMA mode the kernel may place host memory on it:
/// <https://developer.nvidia.com/blog/understanding-memory-management-on-hardware-coherent-platforms>.
const UNEXPLAINED_COHERENT: &str = "driver, a leftover process, or host memory and page cache that the kernel \
     placed on the card: numactl --membind keeps them off, and the driver's CDMM mode";
/// Parts of the names of coherent cards.
const COHERENT: [&str; 3] = ["GH200", "GB200", "GB300"];

/// Returns what may hold the unexplained memory of a device with this name.
pub(super) fn unexplained(device: &str) -> &'static str {
    if COHERENT.iter().any(|card| device.contains(card)) { UNEXPLAINED_COHERENT } else { UNEXPLAINED }
}

/// The common names of the libraries that have a group of their own in `memtrace serving`.
pub(in crate::reports) const CUBLAS: &str = "cuBLAS";
pub(in crate::reports) const NCCL: &str = "NCCL";

/// For each prefix of a library's file: its common name, and the advice.
const LIBRARIES: &[(&str, &str, &str)] = &[
    ("libcublas", CUBLAS, "CUBLAS_WORKSPACE_CONFIG=:4096:2 makes its workspaces smaller"),
    ("libcudnn", "cuDNN", "torch.backends.cudnn.benchmark = False; fewer shapes"),
    ("libnccl", NCCL, "fewer communicators, or lower NCCL_BUFFSIZE and NCCL_MAX_NCHANNELS"),
    ("libcufft", "cuFFT", "torch.backends.cuda.cufft_plan_cache.max_size"),
    ("libcusolver", "cuSOLVER", "torch.backends.cuda.preferred_linalg_library"),
    ("libcusparse", "cuSPARSE", ""),
    ("libcurand", "cuRAND", ""),
    ("libnvshmem", "NVSHMEM", "NVSHMEM_SYMMETRIC_SIZE"),
    ("libnpp", "NPP", ""),
    ("libcupti", "CUPTI", "no profiler in production runs"),
    ("libtriton", "Triton", ""),
    ("cuda_utils", "Triton", ""),
    ("__triton", "Triton", ""),
    ("libtorch", "torch, outside its allocator", "from symmetric memory or NCCL registration"),
    ("libc10", "torch, outside its allocator", ""),
    ("libcudart", "the CUDA runtime", ""),
    ("cupy", "CuPy", "cupy.get_default_memory_pool().free_all_blocks()"),
];

const OTHER_LIBRARY: &str = "memtrace peak --of used shows when it was taken";

/// Returns the common name of the library in `file`, or `file` if the library is unknown.
pub(in crate::reports) fn library(file: &str) -> String {
    let known = LIBRARIES.iter().find(|(prefix, _, _)| file.starts_with(prefix));
    known.map_or_else(|| file.to_owned(), |(_, name, _)| (*name).to_owned())
}

/// Returns advice about the memory of a library.
pub(super) fn for_library(name: &str) -> &'static str {
    let known = LIBRARIES.iter().find(|(_, known, advice)| *known == name && !advice.is_empty());
    known.map_or(OTHER_LIBRARY, |(_, _, advice)| advice)
}

/// Returns advice about torch's blocks of a category.
pub(super) fn for_category(category: Category) -> &'static str {
    match category {
        Category::Parameter => "a smaller type (bf16), sharding (FSDP)",
        Category::Gradient => "zero_grad(set_to_none=True), gradients in the backward's own type",
        Category::UnshardedParameter | Category::AllGather => "smaller units of FSDP, a smaller param_dtype",
        Category::UnshardedGradient | Category::ReduceScatter => {
            "smaller units of FSDP, a smaller param_dtype and reduce_dtype"
        }
        Category::OptimizerState => "8-bit or sharded optimizer state",
        Category::Activation => "activation checkpointing, a smaller batch",
        Category::Temporary => "smaller chunks of the largest op: memtrace peak --by op",
        Category::KvCache => "a smaller or quantized cache: fewer or shorter sequences, fp8 keys and values",
        Category::CudaGraph => "fewer captured shapes, one pool for all graphs",
        Category::Workspace => "CUBLAS_WORKSPACE_CONFIG=:4096:2, or the engine's own setting",
        Category::Input => "a smaller batch, fewer prefetched batches",
        _ => "memtrace peak --by module names it",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unexplained_memory_of_a_coherent_card_may_be_the_hosts() {
        assert!(unexplained("NVIDIA GH200 144G HBM3e").contains("host memory"));
        assert!(!unexplained("NVIDIA B200").contains("host memory"));
    }

    #[test]
    fn the_ledger_calls_libraries_by_their_common_names() {
        assert_eq!(library("libcublasLt.so.12"), "cuBLAS");
        assert_eq!(library("libcudnn_graph.so.9"), "cuDNN");
        assert_eq!(library("libmine.so"), "libmine.so");
        assert_eq!(for_library("libmine.so"), OTHER_LIBRARY);
    }
}
