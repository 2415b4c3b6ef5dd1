//! Computes the values that PyTorch's ops compute from known values.
//!
//! Simulated kernels do nothing, but a program reads back flags, counts and sizes that ops derive from data
//! that it has copied to the device. An op whose inputs are all known and small is run a second time with
//! PyTorch's own CPU kernels. Its result becomes the known content of the output ([`evaluate`]). So no list
//! of kernels is needed here: whatever PyTorch can compute on a CPU is known.
//!
//! - [`record`] observes the start and the end of each op through `at::RecordFunction`.
//! - [`torch`] has the PyTorch functions that are called, [`replaced`] the functions that this library replaces.
//!   [`cxx`] handles C++ exceptions and strings in these calls.
//! - [`op`] has the properties of an op that its name shows. [`schema`] reads which arguments it writes.
//! - [`values`] reads arguments (`c10::IValue`) and creates the arguments of the second run.
//! - [`ordinary`] has the rule for flags about values that nothing computed.
//! - [`partial`] finds the known elements of results whose inputs are partly known.
//! - [`samples`] has the rule for indices, samples and counts that nothing computed.
//! - [`tensor`] describes the memory of a tensor and its known contents.
//!
//! [`host_tensors`] does the opposite for `--no-host-values`: it skips the writes of large CPU tensors.
//!
//! PyTorch 2.6 to 2.15 have these function types and object layouts.
//!
//! The second run is invisible to the program: it uses no callbacks, modes, gradients, warnings, random
//! numbers or device memory, and only one thread. If a PyTorch function is missing, only the effects that
//! kernel names reveal are known ([`kernel_effects`](crate::kernels::kernel_effects)).

mod cxx;
mod evaluate;
mod host_tensors;
mod op;
mod ordinary;
mod partial;
pub(crate) mod record;
pub(crate) mod replaced;
mod samples;
pub(crate) mod scalar_type;
mod schema;
mod tensor;
mod torch;
mod values;
