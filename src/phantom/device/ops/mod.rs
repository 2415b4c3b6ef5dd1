//! The values that PyTorch's ops compute of known values.
//!
//! Kernels do nothing, but a program reads flags, counts and sizes that ops make of what it copied to the
//! device itself. An op whose inputs are all known and small is run a second time with PyTorch's own kernels
//! for the CPU, and its result becomes the known content of the output ([`evaluate`]). So there is no list of
//! kernels here: what PyTorch computes on a CPU is known.
//!
//! - [`record`] sees each op at its start and at its end, by `at::RecordFunction`.
//! - [`torch`] has the functions of PyTorch that are called, [`cxx`] what C++ asks of their caller.
//! - [`values`] reads arguments (`c10::IValue`) and makes the second run's arguments.
//! - [`ordinary`] is the rule for the other values, those that nothing computed.
//! - [`samples`] is the rule for indices, samples and counts that nothing computed.
//! - [`tensor`] is the memory of a tensor, and what of it is known.
//!
//! The second run is outside the program's sight: no callback, no mode, no gradient, no warning and no random
//! number, one thread, and no memory of the device. Where a function of PyTorch is missing, only what the
//! kernels' names reveal is known ([`kernel_effects`](crate::kernels::kernel_effects)).

mod cxx;
mod evaluate;
mod ordinary;
pub(crate) mod record;
mod samples;
mod tensor;
mod torch;
mod values;
