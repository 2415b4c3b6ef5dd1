//! The device memory of NCCL's kernels on a card of capability 9.0: their code and their stack, read from the
//! NCCL library that the program loaded.
//!
//! The sizes come from the library's code for capability 9.0, as `cuobjdump -arch sm_90 -elf` and
//! `-res-usage` show them. Between versions of NCCL they differ: the kernel of a sum has a stack of 1264 bytes
//! in 2.21.5, 1672 in 2.26.2, and 1736 from 2.26.5 to 2.28.9.
//!
//! No source documents how much memory the driver takes for them. We derive it from `nvidia-smi` in the logs of
//! <https://github.com/KellerJordan/modded-nanogpt>, which show each process after a barrier, minus the buffers
//! ([`nccl_memory`](crate::libs::nccl_memory)) and 614 MiB of a process without NCCL: 222 MiB with 2.21.5, 362
//! with 2.26.2 and 378 with 2.27.5. The differences are about twice the difference of the code plus the
//! difference of the stacks of all threads. The two remainders below are set so that one rank has 172 MiB and
//! each of eight 378 with 2.27.5.

use std::ffi::{CStr, c_void};
use std::mem::zeroed;
use std::sync::OnceLock;

use crate::core::bytes::contains;
use crate::core::host_state::host_state;
use crate::core::vram::PAGE;
use crate::kernels::cubin::CodeSize;
use crate::kernels::fatbin;

/// The maximum number of threads on a multiprocessor of capability 9.0 (CUDA C++ Programming Guide, compute
/// capabilities).
const HOPPER_THREADS: u64 = 2048;
/// The bytes of stack for each thread that every context has (`CU_LIMIT_STACK_SIZE` in CUDA's manual).
const DEFAULT_STACK: u64 = 1024;
/// On the card, the code takes twice its size, less these bytes.
const CODE_LESS: u64 = 21 << 20;
/// The bytes that the first kernel takes in addition to its stack.
const FIRST_KERNEL_MORE: u64 = 22 << 20;

/// The kernels whose stacks count: a sum, which a barrier runs, and messages.
const SUM: &[u8] = b"ncclDevKernel_AllReduce_Sum_f32_RING_LL";
const MESSAGES: &[u8] = b"ncclDevKernel_SendRecv";

/// The sizes of NCCL's kernels for capability 9.0, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KernelCode {
    /// The size of the code and of its constants and variables.
    pub(crate) code: u64,
    /// The stack of one thread in a sum.
    pub(crate) stack: u64,
    /// The stack of one thread in the kernel of messages.
    pub(crate) message_stack: u64,
}

/// The sizes in the wheel of NCCL 2.27.5. They count if the library has no readable code.
pub(crate) const CODE_OF_2_27_5: KernelCode =
    KernelCode { code: 101_083_080, stack: 1736, message_stack: 1976 };

impl KernelCode {
    /// Returns the sizes of the program's NCCL. `function` is the address of a function of that library.
    pub(crate) fn of_program(function: Option<*const c_void>) -> Self {
        static CODE: OnceLock<KernelCode> = OnceLock::new();
        *CODE.get_or_init(|| function.and_then(read).unwrap_or(CODE_OF_2_27_5))
    }

    /// Returns the bytes that come with the first communicator.
    pub(crate) fn at_creation(self) -> u64 {
        whole_pages((2 * self.code).saturating_sub(CODE_LESS))
    }

    /// Returns the bytes that come with the first kernel: the driver enlarges the stack of all threads that the
    /// card can hold, and does not shrink it again (`CU_CTX_LMEM_RESIZE_TO_MAX` in CUDA's manual).
    pub(crate) fn at_first_kernel(self, multiprocessors: u32) -> u64 {
        let stack = self.stack.saturating_sub(DEFAULT_STACK);
        whole_pages(u64::from(multiprocessors) * HOPPER_THREADS * stack + FIRST_KERNEL_MORE)
    }

    /// Returns the bytes that the first message adds to the first kernel.
    pub(crate) fn at_first_message(self, multiprocessors: u32) -> u64 {
        let more = self.message_stack.saturating_sub(self.stack);
        (u64::from(multiprocessors) * HOPPER_THREADS * more).next_multiple_of(PAGE as u64)
    }
}

/// Rounds to the nearest number of whole pages.
fn whole_pages(bytes: u64) -> u64 {
    let page = PAGE as u64;
    (bytes + page / 2) / page * page
}

/// Reads the sizes from the library that contains a function. Returns `None` if it has no code for capability
/// 9.0, or none that can be read.
fn read(function: *const c_void) -> Option<KernelCode> {
    if host_state().spec.cc != (9, 0) {
        return None;
    }
    // SAFETY: zero is a value of each field.
    let mut place: libc::Dl_info = unsafe { zeroed() };
    // SAFETY: takes any address, and `place` is good for a write.
    if unsafe { libc::dladdr(function, &raw mut place) } == 0 || place.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr wrote a C string, which lives as long as the library is loaded.
    let path = unsafe { CStr::from_ptr(place.dli_fname) }.to_str().ok()?;
    let (offset, length) = fatbin::section_of_file(path)?;
    // SAFETY: the section is in the loaded library, at its address after the library's base.
    let cubins = unsafe { fatbin::cubins_in(place.dli_fbase as usize + offset, length, 90) };
    let all = cubins.iter().fold(CodeSize::default(), |sum, cubin| sum + CodeSize::of_cubin(cubin));
    let stack_of = |kernel: &[u8]| {
        let named = |name: &[u8]| contains(name, kernel);
        all.stacks.iter().filter(|(name, _)| named(name)).map(|(_, stack)| u64::from(*stack)).max()
    };
    Some(KernelCode { code: all.bytes, stack: stack_of(SUM)?, message_stack: stack_of(MESSAGES)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nccl_kernels_take_what_public_logs_show_in_three_versions() {
        let mib = |code: KernelCode| (code.at_creation() + code.at_first_kernel(132)) >> 20;
        let of = |code, stack| KernelCode { code, stack, message_stack: stack };
        assert_eq!(CODE_OF_2_27_5.at_creation() >> 20, 172);
        assert_eq!(mib(CODE_OF_2_27_5), 378);
        // Sizes from the wheels of 2.26.2 and 2.21.5. The logs show 362 and 222 MiB.
        assert_eq!(mib(of(100_990_684, 1672)), 362);
        assert_eq!(mib(of(86_572_650, 1264)), 228);
        // The stack of messages is 240 bytes larger than that of a sum.
        assert_eq!(CODE_OF_2_27_5.at_first_message(132) >> 20, 62);
        // A card with fewer multiprocessors holds fewer threads.
        assert!(CODE_OF_2_27_5.at_first_kernel(78) < CODE_OF_2_27_5.at_first_kernel(132));
    }

    #[test]
    fn nccl_kernels_of_a_library_without_such_code_are_not_read() {
        assert_eq!(read(std::ptr::null()), None);
        assert_eq!(read(libc::getpid as *const c_void), None);
    }
}
