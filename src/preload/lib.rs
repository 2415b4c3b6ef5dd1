//! `libmemtrace.so`: what `LD_PRELOAD` puts between a program and CUDA, torch and NVTX.
//!
//! A hook passes its arguments on unchanged, returns what the real function returned, and stores one
//! event; everything else is the work of [`memtrace_record`]. The rules that all hooks keep are in
//! [`guard`]; the real functions behind them in [`real`]; who owns what is allocated in [`context`].
//!
//! State lives as long as the process: settings are read once, at load, and a fork starts afresh.

mod cache;
mod callers;
mod calls;
mod context;
mod degraded;
mod device;
mod frames;
mod gradients;
mod guard;
mod hooks;
mod init;
mod io;
mod nvml;
mod ops;
mod pools;
mod python;
mod real;
mod requested;
mod say;
mod sequence;
mod sharded;
mod thread;
mod torch;
