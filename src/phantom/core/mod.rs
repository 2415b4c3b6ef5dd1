//! The simulated machine: devices, their memory and streams, and the state of each thread. It knows nothing
//! of the CUDA calls above it.

pub(crate) mod async_pool;
pub(crate) mod capture;
pub(crate) mod clock;
pub(crate) mod device;
pub(crate) mod dlopen;
pub(crate) mod ffi;
pub(crate) mod host_state;
pub(crate) mod lock;
pub(crate) mod range_allocator;
pub(crate) mod stream;
pub(crate) mod values;
pub(crate) mod vram;
