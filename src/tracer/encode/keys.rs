//! Keys of regions: addresses, and marks that keep handles and CPU tensors apart from them.

use memtrace_trace::Api;

/// Set in the key of a CPU tensor; no address has this bit.
pub(crate) const CPU_TENSOR: u64 = 1 << 63;
/// Set in the key of physical memory, whose handle is not an address; no address has this bit.
pub(crate) const PHYSICAL: u64 = 1 << 62;

/// The bit that separates the keys of a call from addresses.
pub(crate) fn key_bit(api: Option<Api>) -> u64 {
    match api {
        Some(Api::CpuAllocator) => CPU_TENSOR,
        Some(Api::CuMemCreate | Api::CuMemImportFromShareableHandle) => PHYSICAL,
        _ => 0,
    }
}

/// The address, or handle, of a key.
pub(crate) fn address(key: u64) -> u64 {
    key & !(CPU_TENSOR | PHYSICAL)
}
