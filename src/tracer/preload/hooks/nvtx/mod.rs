//! NVTX: the program's own ranges and marks.
//!
//! Header-only NVTX 3 has no symbol to hook. Instead, at the first call in each shared object, NVTX loads the
//! library that `NVTX_INJECTION64_PATH` names and calls `InitializeInjectionNvtx2` in it. This function puts
//! ours into the tables of that object. The legacy library has symbols, which our hooks override.
//!
//! A tool that the variable named before us (Nsight) still gets every call. The tool is initialized first,
//! its functions are called after ours, and the program gets their results.

mod callbacks;
mod injection;
mod legacy;
mod names;
mod shared;

pub(crate) use injection::announce;
