//! The simulated GPU (the phantom), and `memtrace run --phantom`.

mod calls;
mod cluster;
mod faults;
mod host_values;
mod past_oom;
mod runs;
mod smi;
mod untraced;
