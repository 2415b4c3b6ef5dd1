//! `libmemtrace.so`: the hooks that `LD_PRELOAD` puts between a program and CUDA, torch and NVTX.
//!
//! A hook passes its arguments on unchanged, returns what the real function returned, and records one event;
//! the rest is the work of [`memtrace_record`]. The modules, from the lowest up:
//!
//! - [`ffi`]: symbols, loaded libraries, and the functions of others that are called
//! - [`runtime`]: the session, the thread state, the guard around our code, the log
//! - [`attribution`]: the owner of an allocation
//! - [`python`]: the side that runs inside Python
//! - [`hooks`]: the functions that stand before the real ones
//! - [`capabilities`], [`process_info`] and [`lifecycle`]: the process as a whole
//!
//! State lives as long as the process. Settings are read once, at load, and the child of a fork starts a
//! trace of its own.

mod attribution;
mod capabilities;
mod ffi;
mod hooks;
mod lifecycle;
mod process_info;
mod python;
mod runtime;
