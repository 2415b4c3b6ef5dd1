//! The effect of the math libraries' calls on memory, derived from their arguments alone.
//!
//! A call of cuBLAS, cuDNN or cuSOLVER's dense part may write to three kinds of addresses: its arguments, the
//! elements of arrays among its arguments, and the addresses that its handle or its descriptors hold. The
//! signatures of most functions are not needed: every word that may be an argument counts, and a superfluous
//! word only makes more memory unknown. Calls of libraries whose descriptors hold addresses make all memory
//! unknown.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};

use crate::core::addresses;
use crate::core::call_table::answers;
use crate::core::const_text::starts_with;
use crate::core::ffi::{OK, Status, Word};
use crate::core::lock::lock;
use crate::cuda::reach::Launch;
use crate::cuda::streams::StreamHandle;
use crate::kernels::kernel::{launch_library, launch_library_on_default_stream};
use crate::libs::solver_codes::SolverCodes;

/// The maximum number of arguments of a call that are on the stack. The longest signature is
/// `cudnnBatchNormalizationBackwardEx`, with 31 arguments.
const STACK_WORDS: usize = 26;

/// The number of arguments that a call passes in registers.
const REGISTERS: usize = if cfg!(target_arch = "aarch64") { 8 } else { 6 };
/// The number of words between the registers and the stack's arguments: the return address, and on aarch64
/// the frame pointer.
const FRAME_WORDS: usize = if cfg!(target_arch = "aarch64") { 2 } else { 1 };

/// The words of a call in the order of arrival: the registers, the frame, and the stack.
#[repr(C)]
pub(crate) struct RawArguments {
    registers: [usize; REGISTERS],
    frame: [usize; FRAME_WORDS],
    /// The arguments that the call passed on the stack. If it has fewer, the words after its last argument
    /// belong to its callers.
    stack: [usize; STACK_WORDS],
}

impl RawArguments {
    /// Returns the argument at a position, counted from 0.
    pub(crate) fn word(&self, place: usize) -> usize {
        let on_stack = place.checked_sub(self.registers.len());
        on_stack.map_or_else(|| self.registers[place], |place| self.stack[place])
    }
}

/// The memory to which a call may write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallEffect {
    /// The memory at the addresses among the call's arguments.
    Arguments,
    /// All memory.
    Everything,
}

impl CallEffect {
    /// Returns the memory to which the call with this name may write.
    pub(crate) const fn from_name(name: &str) -> Self {
        let has_no_addresses_inside =
            starts_with(name, "cublas") || starts_with(name, "cudnn") || starts_with(name, "cusolverDn");
        if has_no_addresses_inside { Self::Arguments } else { Self::Everything }
    }
}

/// Returns the launch that represents a call with these words among its arguments. Any word may be an
/// address.
pub(crate) fn launch_of(words: &[usize]) -> Launch {
    let mut launch = Launch::default();
    for &word in words {
        if addresses::may_be_address(word) {
            launch.writes(word);
        }
    }
    launch
}

/// The streams that the program set for its handles and plans.
static STREAMS: LazyLock<Mutex<HashMap<usize, StreamHandle>>> = LazyLock::new(Mutex::default);

/// Sets the stream of a handle.
pub(crate) fn set_stream(handle: usize, stream: StreamHandle) {
    lock(&STREAMS).insert(handle, stream);
}

/// Returns the stream of a handle, or the default stream if the program set none.
pub(crate) fn stream_of(handle: usize) -> StreamHandle {
    known_stream(handle).unwrap_or(StreamHandle::DEFAULT)
}

fn known_stream(handle: usize) -> Option<StreamHandle> {
    lock(&STREAMS).get(&handle).copied()
}

/// Queues the work of a call, and writes the codes that a solver leaves in device memory.
pub(crate) fn launch(effect: CallEffect, codes: Option<SolverCodes>, arguments: &RawArguments) -> Status {
    let launch = (effect == CallEffect::Arguments).then(|| {
        let on_stack = codes.map_or(STACK_WORDS, |codes| codes.last_argument().saturating_sub(REGISTERS - 1));
        let mut launch = launch_of(&arguments.registers);
        launch.add(&launch_of(&arguments.stack[..on_stack.min(STACK_WORDS)]));
        launch
    });
    // A handle or a plan is the first argument. cuFFT's plan is an `int`, so the upper half of its register
    // is undefined and cut off.
    let handle = arguments.registers[0];
    let known = known_stream(handle).or_else(|| known_stream(handle & u32::MAX as usize));
    let status = match known {
        Some(stream) => launch_library(stream, launch),
        None => launch_library_on_default_stream(launch),
    };
    if let (Some(codes), OK) = (codes, status) {
        codes.succeed(arguments, known.unwrap_or(StreamHandle::DEFAULT).stream());
    }
    status
}

answers! {
    Real fn cufftSetStream(plan: u32, stream: StreamHandle) {
        set_stream(plan as usize, stream);
        OK
    }
    Real fn {cusolverDnSetStream, cusparseSetStream}(handle: Word, stream: StreamHandle) {
        set_stream(handle, stream);
        OK
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_with_descriptors_that_hold_addresses_reach_all_memory() {
        for (name, effect) in [
            ("cublasGemmEx", CallEffect::Arguments),
            ("cublasSgemmStridedBatched", CallEffect::Arguments),
            ("cudnnRNNForward", CallEffect::Arguments),
            // Setup: a batched function, whose arguments are arrays of addresses -> the launch finds the
            // addresses through its arguments.
            ("cublasSgemmBatched", CallEffect::Arguments),
            ("cusolverDnSpotrsBatched", CallEffect::Arguments),
            ("cusparseSpMM", CallEffect::Everything),
            ("cusolverDnSgesvdaStridedBatched", CallEffect::Arguments),
            ("cufftXtExec", CallEffect::Everything),
        ] {
            assert_eq!(CallEffect::from_name(name), effect, "{name}");
        }
    }
}
