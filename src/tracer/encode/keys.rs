//! Keys of regions: addresses with marker bits that keep handles and CPU tensors apart.

use memtrace_trace::Api;

/// Set in the key of a CPU tensor. No address has this bit.
pub(crate) const CPU_TENSOR: u64 = 1 << 63;
/// Set in the key of physical memory, whose handle is not an address. No address has this bit.
pub(crate) const PHYSICAL: u64 = 1 << 62;

/// Returns the bit that distinguishes the keys of a call of `api` from plain addresses.
pub(crate) fn key_bit(api: Option<Api>) -> u64 {
    match api {
        Some(Api::CpuAllocator) => CPU_TENSOR,
        Some(Api::CuMemCreate | Api::CuMemImportFromShareableHandle) => PHYSICAL,
        _ => 0,
    }
}

/// Removes the marker bits from a key. Returns the address, or the handle of physical memory.
pub(crate) fn address(key: u64) -> u64 {
    key & !(CPU_TENSOR | PHYSICAL)
}
