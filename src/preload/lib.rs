//! `libmemtrace.so`: what `LD_PRELOAD` puts between a program and CUDA, torch and NVTX.
//!
//! A hook passes its arguments on unchanged, returns what the real function returned, and stores one
//! event; everything else is the work of [`memtrace_record`]. The rules that all hooks keep are in
//! [`runtime::guard`]; the real functions behind them in [`ffi::symbols`]; who owns what is allocated in [`attribution`].
//!
//! State lives as long as the process: settings are read once, at load, and a fork starts afresh.

mod attribution;
mod capabilities;
mod ffi;
mod hooks;
mod lifecycle;
mod python;
mod runtime;
