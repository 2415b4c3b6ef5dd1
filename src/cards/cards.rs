//! The table of presets: one line per card.
//!
//! The memory is the total that `cudaMemGetInfo` reports, which is less than the nominal size. PyTorch prints
//! it in its out-of-memory message ("GPU 0 has a total capacity of ..."). It differs by some MiB between
//! drivers and boards; where public reports differ, the table has the smaller of the usual values. The
//! context is the memory that a process with one CUDA context and PyTorch's kernels takes before its first
//! allocation. It is a round guess that we never measured, and it differs by driver and by the code that is
//! loaded. `mem=` and `context=` change either.

/// A preset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Card {
    /// The name by which a user asks for it: `h100-80g`.
    pub id: &'static str,
    /// The name that `torch.cuda.get_device_name` returns.
    pub name: &'static str,
    /// Total memory in MiB, as the CUDA runtime reports it.
    pub memory_mib: u64,
    /// Compute capability, major and minor.
    pub cc: (u32, u32),
    /// The number of multiprocessors.
    pub sms: u32,
    /// Memory in MiB that is used before the first allocation.
    pub context_mib: u64,
    /// The L2 cache in MiB.
    pub l2_mib: u32,
    /// The width of the memory bus in bits.
    pub bus_bits: u32,
    /// The clocks of the multiprocessors and of the memory, in MHz.
    pub clocks_mhz: (u32, u32),
}

/// The preset that is used without a request.
pub const DEFAULT_CARD: &str = "h100-80g";

macro_rules! cards {
    ($($id:literal $name:literal $memory:literal MiB, cc $major:literal $minor:literal, $sms:literal SMs,
       context $context:literal, L2 $l2:literal, bus $bus:literal, MHz $sm_mhz:literal $memory_mhz:literal;)*) => {
        /// Every preset, in the order of the list that users see.
        pub const CARDS: &[Card] = &[$(Card {
            id: $id, name: $name, memory_mib: $memory, cc: ($major, $minor), sms: $sms,
            context_mib: $context, l2_mib: $l2, bus_bits: $bus, clocks_mhz: ($sm_mhz, $memory_mhz),
        }),*];
    };
}

// Sources. Memory: totals in public out-of-memory reports, in GiB at the end of the line. Capability:
// NVIDIA's table of CUDA GPUs (developer.nvidia.com/cuda-gpus). Multiprocessors, L2, bus and clocks: the
// architecture white papers and the data sheets of each card.
cards! {
    "t4"        "Tesla T4"                          15095 MiB, cc  7 5,  40 SMs, context 120, L2   4, bus  256, MHz 1590  5001; // 14.74
    "v100-16g"  "Tesla V100-SXM2-16GB"              16151 MiB, cc  7 0,  80 SMs, context 310, L2   6, bus 4096, MHz 1530   877; // 15.77
    "v100-32g"  "Tesla V100-SXM2-32GB"              32501 MiB, cc  7 0,  80 SMs, context 310, L2   6, bus 4096, MHz 1530   877; // 31.74
    "rtx3090"   "NVIDIA GeForce RTX 3090"           24257 MiB, cc  8 6,  82 SMs, context 260, L2   6, bus  384, MHz 1695  9751; // 23.69
    "rtx4090"   "NVIDIA GeForce RTX 4090"           24210 MiB, cc  8 9, 128 SMs, context 390, L2  72, bus  384, MHz 2520 10501; // 23.64
    "rtx5090"   "NVIDIA GeForce RTX 5090"           32109 MiB, cc 12 0, 170 SMs, context 500, L2  96, bus  512, MHz 2407 14001; // 31.36
    "a10"       "NVIDIA A10"                        22592 MiB, cc  8 6,  72 SMs, context 260, L2   6, bus  384, MHz 1695  6251; // 22.06
    "a10g"      "NVIDIA A10G"                       22723 MiB, cc  8 6,  80 SMs, context 260, L2   6, bus  384, MHz 1710  6251; // 22.19
    "l4"        "NVIDIA L4"                         22478 MiB, cc  8 9,  58 SMs, context 210, L2  48, bus  192, MHz 2040  6251; // 21.95
    "l40s"      "NVIDIA L40S"                       45466 MiB, cc  8 9, 142 SMs, context 400, L2  96, bus  384, MHz 2520  9001; // 44.40
    "a100-40g"  "NVIDIA A100-SXM4-40GB"             40339 MiB, cc  8 0, 108 SMs, context 420, L2  40, bus 5120, MHz 1410  1215; // 39.39
    "a100-80g"  "NVIDIA A100-SXM4-80GB"             81050 MiB, cc  8 0, 108 SMs, context 420, L2  40, bus 5120, MHz 1410  1593; // 79.15
    "h100-80g"  "NVIDIA H100 80GB HBM3"             81008 MiB, cc  9 0, 132 SMs, context 520, L2  50, bus 5120, MHz 1980  2619; // 79.11
    "h200"      "NVIDIA H200"                      143071 MiB, cc  9 0, 132 SMs, context 530, L2  60, bus 6144, MHz 1980  3201; // 139.72
    "b200"      "NVIDIA B200"                      182635 MiB, cc 10 0, 148 SMs, context 640, L2 126, bus 8192, MHz 1965  3996; // 178.35
}

impl Card {
    /// The preset with this name, in any case.
    #[must_use]
    pub fn find(id: &str) -> Option<&'static Card> {
        CARDS.iter().find(|card| card.id.eq_ignore_ascii_case(id))
    }

    /// The number of channels that NCCL opens between such cards in one machine. Its logs in public reports
    /// show 24 with NVSwitch and 12 with the links of a V100. Without NVLink it is 2, NCCL's minimum. It
    /// differs by machine.
    #[must_use]
    pub fn nccl_channels(&self) -> u32 {
        match self.id.split('-').next() {
            Some("a100" | "h100" | "h200" | "b200") => 24,
            Some("v100") => 12,
            _ => 2,
        }
    }
}
