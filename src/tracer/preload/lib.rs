//! `libmemtrace.so`: the hooks that `LD_PRELOAD` places between a program and CUDA, torch and NVTX.
//!
//! A hook passes its arguments on unchanged, returns the real function's result, and records the call as an
//! event. [`memtrace_record`] writes the events to the trace. The modules, from the lowest layer up:
//!
//! - [`guard`]: the guard around memtrace's code
//! - [`ffi`]: symbols, loaded libraries, and the foreign functions that memtrace calls
//! - [`runtime`]: the session, the thread state, the log
//! - [`attribution`]: the owner of an allocation
//! - [`python`]: the part that runs inside Python
//! - [`hooks`]: the functions that replace the real ones
//! - [`capabilities`], [`process_info`] and [`lifecycle`]: the process as a whole
//!
//! State lives as long as the process. Settings are read once, at load. The child of a fork starts its own
//! trace.

mod attribution;
mod capabilities;
mod ffi;
mod guard;
mod hooks;
mod lifecycle;
mod process_info;
mod python;
mod runtime;
