//! The table of presets: one entry per card, and one per slice of a card (MIG).
//!
//! *Memory* is the total that `cudaMemGetInfo` reports, which is less than the nominal size. PyTorch prints
//! it in its out-of-memory text ("GPU 0 has a total capacity of ...") and in
//! `torch.cuda.get_device_properties`; Ultralytics and Unsloth print it when they start. The total differs by
//! some MiB between drivers and boards, and newer drivers report less. If public reports differ, the table
//! has the smaller of the usual values. All reports are from Linux; Windows reports a larger total. Each card
//! names its source.
//!
//! *Context* is the memory that a process uses before its first tensor: the CUDA context, and the PyTorch
//! kernels that its first operations load. `612 in 518..614` is a published measurement, with the range for
//! different drivers and first kernels. `~400` is our estimate, with a range of 20% to either side.
//!
//! # Sources
//!
//! - *OOM* is an out-of-memory text from PyTorch. *properties* is the output of
//!   `torch.cuda.get_device_properties`. *Ultralytics* and *Unsloth* are the first lines that these programs
//!   print, in MiB or GiB with three digits. *nvidia-smi* is the list from `nvidia-smi mig -lgip`. A source
//!   has an address if its text is in an issue. A text without an address can be found by a search in files
//!   of public repositories, with the torch version if the source names one.
//! - Compute capability: NVIDIA's table of CUDA GPUs (<https://developer.nvidia.com/cuda-gpus>).
//!   Multiprocessors, L2, bus and clocks: the architecture white papers and the data sheet of each card.
//!   Multiprocessors of slices: the list from nvidia-smi, and NVIDIA's MIG User Guide
//!   (<https://docs.nvidia.com/datacenter/tesla/mig-user-guide/>). For slices, L2 and bus are scaled by the
//!   memory fractions in this guide.
//! - ECC ([`Card::ecc`]): the column `Volatile Uncorr. ECC` of nvidia-smi in files of public repositories, found
//!   by a search for the name of the card. A number means on, `Off` means supported but off, and `N/A` means
//!   not supported. On: P100, A10, A10G, A16, L4, L40S, GH200, GB200, RTX PRO 6000 Server Edition. Off: RTX
//!   3090 Ti, RTX 4090, RTX A2000, A4000 and A6000, RTX 6000 Ada. Not supported: RTX 4070, 4080 and 5080, RTX
//!   4090 Laptop, RTX 5090 (also <https://github.com/Syllo/nvtop/pull/486>), T1000, GB10, Orin, Thor. The
//!   defaults of the product lines:
//!   <https://support.chaos.com/hc/en-us/articles/24886637113617-ECC-State-for-Nvidia-GPUs-Error-Correcting-Code>.
//! - Contexts, in MiB:
//!   - H100: `nvidia-smi` in the logs of <https://github.com/KellerJordan/modded-nanogpt> shows a second
//!     process on GPU 0 with one segment of 2 MiB. The process uses 610 with the drivers 535 and 550, and 614
//!     with the drivers 560 and 570. vLLM found 78.66 of 79.19 GiB free at its start, before PyTorch's
//!     kernels were loaded.
//!   - H200: `scripts/calibrate` measured 518 before and 610 after the first kernels (torch 2.11.0, driver
//!     580). In the same logs, a process that has just started uses 520.
//!   - A100: 78.84 of 79.25 GiB are free when vLLM starts, and 38.87 of 39.39 GiB when SGLang loads its
//!     weights.
//!   - B200: 177.57 of 178.35 GiB are free when SGLang loads its weights, and the process group uses 0.09
//!     GiB.
//!   - RTX 6000 Ada: 426 with torch 2.10 and CUDA 13.0
//!     (<https://github.com/unslothai/unsloth-zoo/issues/1053>).
//!   - T4, V100, RTX 3090, 4090, 5090, A6000, L4: out-of-memory texts of PyTorch. Each value is the memory
//!     that "this process has ... in use", minus the allocated and the reserved but unallocated memory; the
//!     test of [`crate::card`] lists the texts. Such a process has already worked, so the value includes the
//!     kernels and handles of its libraries and is the upper end of the range. A process with a context and
//!     no tensor used 256 on an RTX 3090. The lower ends of V100 and A6000 are estimates.

use crate::card::{Card, Context};

macro_rules! context {
    ($typical:literal in $low:literal..$high:literal) => {
        Context { low_mib: $low, typical_mib: $typical, high_mib: $high, measured: true }
    };
    (~ $typical:literal) => {
        Context {
            low_mib: $typical * 4 / 5,
            typical_mib: $typical,
            high_mib: $typical * 6 / 5,
            measured: false,
        }
    };
}

macro_rules! cards {
    ($($id:literal $name:literal, $memory:literal MiB
       from $source:literal,
       cc $major:literal $minor:literal, $sms:literal SMs, context {$($context:tt)*},
       L2 $l2:literal, bus $bus:literal, MHz $sm_mhz:literal $memory_mhz:literal;)*) => {
        /// Every preset, in the order in which users see them.
        pub const CARDS: &[Card] = &[$(Card {
            id: $id, name: $name, memory_mib: $memory, source: $source, cc: ($major, $minor), sms: $sms,
            context: context!($($context)*), l2_kib: $l2, bus_bits: $bus,
            clocks_mhz: ($sm_mhz, $memory_mhz),
        }),*];
    };
}

cards! {
    // Volta, Pascal and Turing.
    "gtx1060" "NVIDIA GeForce GTX 1060 6GB", 6063 MiB
        from "Ultralytics, torch 2.6",
        cc 6 1, 10 SMs, context {~120}, L2 1536, bus 192, MHz 1708 4004;
    "gtx1070" "NVIDIA GeForce GTX 1070", 8110 MiB
        from "our estimate: nvidia-smi shows 8192 MiB, and CUDA about 1 % less on Pascal",
        cc 6 1, 15 SMs, context {~130}, L2 2048, bus 256, MHz 1683 4004;
    "gtx1080" "NVIDIA GeForce GTX 1080", 8110 MiB
        from "same as the GTX 1070: nvidia-smi shows 8192 MiB for both",
        cc 6 1, 20 SMs, context {~150}, L2 2048, bus 256, MHz 1733 5005;
    "gtx1080ti" "NVIDIA GeForce GTX 1080 Ti", 11172 MiB
        from "Ultralytics, torch 2.5",
        cc 6 1, 28 SMs, context {~170}, L2 2816, bus 352, MHz 1582 5505;
    "p100" "Tesla P100-PCIE-16GB", 16269 MiB
        from "Ultralytics, torch 2.11",
        cc 6 0, 56 SMs, context {~240}, L2 4096, bus 4096, MHz 1328 715;
    "v100-16g" "Tesla V100-SXM2-16GB", 16151 MiB
        from "OOM: 15.77 GiB",
        cc 7 0, 80 SMs, context {310 in 248..395}, L2 6144, bus 4096, MHz 1530 877;
    "v100-32g" "Tesla V100-SXM2-32GB", 32501 MiB
        from "OOM: 31.74 GiB",
        cc 7 0, 80 SMs, context {310 in 248..395}, L2 6144, bus 4096, MHz 1530 877;
    "t4" "Tesla T4", 15095 MiB
        from "OOM: 14.74 GiB",
        cc 7 5, 40 SMs, context {120 in 90..174}, L2 4096, bus 256, MHz 1590 5001;
    "gtx1650" "NVIDIA GeForce GTX 1650", 3904 MiB
        from "Ultralytics, torch 1.13",
        cc 7 5, 14 SMs, context {~100}, L2 1024, bus 128, MHz 1665 4001;
    "gtx1660" "NVIDIA GeForce GTX 1660", 5914 MiB
        from "same as the GTX 1660 Ti: nvidia-smi shows 6144 MiB for both",
        cc 7 5, 22 SMs, context {~100}, L2 1536, bus 192, MHz 1785 4001;
    "gtx1660ti" "NVIDIA GeForce GTX 1660 Ti", 5914 MiB
        from "Ultralytics, torch 1.8",
        cc 7 5, 24 SMs, context {~110}, L2 1536, bus 192, MHz 1770 6001;
    "t1000" "NVIDIA T1000", 3904 MiB
        from "same as the GTX 1650: nvidia-smi shows 4096 MiB for both",
        cc 7 5, 14 SMs, context {~100}, L2 1024, bus 128, MHz 1395 5001;
    "t1000-8g" "NVIDIA T1000 8GB", 7833 MiB
        from "same as the RTX 3060 Ti: nvidia-smi shows 8192 MiB for both",
        cc 7 5, 14 SMs, context {~100}, L2 1024, bus 128, MHz 1395 5001;
    "rtx2060" "NVIDIA GeForce RTX 2060", 5918 MiB
        from "Ultralytics, torch 2.2; OOM: 5.79 GiB, https://github.com/facebookresearch/meshrcnn/issues/92",
        cc 7 5, 30 SMs, context {~110}, L2 3072, bus 192, MHz 1680 7001;
    "rtx2070" "NVIDIA GeForce RTX 2070", 7833 MiB
        from "same as the RTX 3060 Ti: nvidia-smi shows 8192 MiB for both",
        cc 7 5, 36 SMs, context {~120}, L2 4096, bus 256, MHz 1620 7001;
    "rtx2080" "NVIDIA GeForce RTX 2080", 7833 MiB
        from "same as the RTX 3060 Ti: nvidia-smi shows 8192 MiB for both",
        cc 7 5, 46 SMs, context {~130}, L2 4096, bus 256, MHz 1710 7001;
    "rtx2080ti" "NVIDIA GeForce RTX 2080 Ti", 10825 MiB
        from "Ultralytics, torch 2.6; 11012 with torch 2.1",
        cc 7 5, 68 SMs, context {~150}, L2 5632, bus 352, MHz 1545 7001;
    // Ampere.
    "rtx3050" "NVIDIA GeForce RTX 3050", 7833 MiB
        from "same as the RTX 3060 Ti: nvidia-smi shows 8192 MiB for both",
        cc 8 6, 20 SMs, context {~140}, L2 2048, bus 128, MHz 1777 7001;
    "rtx3050-laptop" "NVIDIA GeForce RTX 3050 Laptop GPU", 3762 MiB
        from "Ultralytics; 3902 with torch 2.0",
        cc 8 6, 16 SMs, context {~130}, L2 2048, bus 128, MHz 1740 6001;
    "rtx3050ti-laptop" "NVIDIA GeForce RTX 3050 Ti Laptop GPU", 3762 MiB
        from "same as the RTX 3050 Laptop: nvidia-smi shows 4096 MiB for both",
        cc 8 6, 20 SMs, context {~140}, L2 2048, bus 128, MHz 1695 6001;
    "rtx3060" "NVIDIA GeForce RTX 3060", 11931 MiB
        from "properties, torch 2.4",
        cc 8 6, 28 SMs, context {~160}, L2 2304, bus 192, MHz 1777 7501;
    "rtx3060-laptop" "NVIDIA GeForce RTX 3060 Laptop GPU", 5800 MiB
        from "our estimate: nvidia-smi has 6144 MiB, and cards of 4 and 8 GiB show 334 and 359 MiB less",
        cc 8 6, 30 SMs, context {~160}, L2 3072, bus 192, MHz 1703 7001;
    "rtx3060ti" "NVIDIA GeForce RTX 3060 Ti", 7833 MiB
        from "Ultralytics, torch 2.11",
        cc 8 6, 38 SMs, context {~180}, L2 4096, bus 256, MHz 1665 7001;
    "rtx3070" "NVIDIA GeForce RTX 3070", 7842 MiB
        from "Ultralytics, torch 2.10; 7973 with torch 1.8",
        cc 8 6, 46 SMs, context {~190}, L2 4096, bus 256, MHz 1725 7001;
    "rtx3070-laptop" "NVIDIA GeForce RTX 3070 Laptop GPU", 7842 MiB
        from "same as the RTX 3070: nvidia-smi shows 8192 MiB for both",
        cc 8 6, 40 SMs, context {~180}, L2 4096, bus 256, MHz 1620 7001;
    "rtx3070ti" "NVIDIA GeForce RTX 3070 Ti", 7842 MiB
        from "same as the RTX 3070: nvidia-smi shows 8192 MiB for both",
        cc 8 6, 48 SMs, context {~200}, L2 4096, bus 256, MHz 1770 9501;
    "rtx3080" "NVIDIA GeForce RTX 3080", 10015 MiB
        from "OOM: 9.78 GiB, https://github.com/zai-org/CogVideo/issues/34",
        cc 8 6, 68 SMs, context {~240}, L2 5120, bus 320, MHz 1710 9501;
    "rtx3080-laptop" "NVIDIA GeForce RTX 3080 Laptop GPU", 15993 MiB
        from "Ultralytics, torch 2.8",
        cc 8 6, 48 SMs, context {~200}, L2 4096, bus 256, MHz 1710 7001;
    "rtx3080ti" "NVIDIA GeForce RTX 3080 Ti", 11910 MiB
        from "Ultralytics; OOM: 11.63 GiB, torch 2.11",
        cc 8 6, 80 SMs, context {~260}, L2 6144, bus 384, MHz 1665 9501;
    "rtx3090" "NVIDIA GeForce RTX 3090", 24257 MiB
        from "OOM: 23.69 GiB",
        cc 8 6, 82 SMs, context {260 in 246..498}, L2 6144, bus 384, MHz 1695 9751;
    "rtx3090ti" "NVIDIA GeForce RTX 3090 Ti", 24110 MiB
        from "Ultralytics, torch 2.9",
        cc 8 6, 84 SMs, context {~260}, L2 6144, bus 384, MHz 1860 10501;
    "a10" "NVIDIA A10", 22592 MiB
        from "OOM: 22.06 GiB",
        cc 8 6, 72 SMs, context {~260}, L2 6144, bus 384, MHz 1695 6251;
    "a10g" "NVIDIA A10G", 22723 MiB
        from "OOM: 22.19 GiB",
        cc 8 6, 80 SMs, context {~260}, L2 6144, bus 384, MHz 1710 6251;
    "a16" "NVIDIA A16", 15000 MiB
        from "our estimate: nvidia-smi shows 15356 MiB, and CUDA about 2 % less",
        cc 8 6, 10 SMs, context {~120}, L2 2048, bus 128, MHz 1755 6251;
    "orin" "Orin", 62464 MiB
        from "device query: 61 GB, 16 SMs, L2 4 MB, https://github.com/tmcdonell/cuda/issues/77",
        cc 8 7, 16 SMs, context {~150}, L2 4096, bus 256, MHz 1300 3199;
    "a30" "NVIDIA A30", 24064 MiB
        from "OOM: 23.50 GiB, https://github.com/LHRLAB/ChatKBQA/issues/2; 24164 with torch 2.8",
        cc 8 0, 56 SMs, context {~320}, L2 24576, bus 3072, MHz 1440 1215;
    "a2000" "NVIDIA RTX A2000", 5754 MiB
        from "a report of the memory with the driver 581.80",
        cc 8 6, 26 SMs, context {~150}, L2 3072, bus 192, MHz 1200 6001;
    "a2000-12g" "NVIDIA RTX A2000 12GB", 12017 MiB
        from "Ultralytics, torch 2.1",
        cc 8 6, 26 SMs, context {~150}, L2 3072, bus 192, MHz 1200 6001;
    "a4000" "NVIDIA RTX A4000", 16117 MiB
        from "Ultralytics, torch 1.12",
        cc 8 6, 48 SMs, context {~200}, L2 4096, bus 256, MHz 1560 7001;
    "a6000" "NVIDIA RTX A6000", 48676 MiB
        from "properties, in torchao's prototype/hqq",
        cc 8 6, 84 SMs, context {350 in 270..368}, L2 6144, bus 384, MHz 1800 8001;
    "a100-40g" "NVIDIA A100-SXM4-40GB", 40339 MiB
        from "OOM: 39.39 GiB; deviceQuery, https://github.com/bottlerocket-os/bottlerocket/pull/3873",
        cc 8 0, 108 SMs, context {420 in 410..532}, L2 40960, bus 5120, MHz 1410 1215;
    "a100-80g" "NVIDIA A100-SXM4-80GB", 81050 MiB
        from "OOM: 79.15 GiB",
        cc 8 0, 108 SMs, context {420 in 410..532}, L2 40960, bus 5120, MHz 1410 1593;
    "a800-80g" "NVIDIA A800 80GB PCIe", 81051 MiB
        from "Ultralytics, torch 2.8",
        cc 8 0, 108 SMs, context {~420}, L2 40960, bus 5120, MHz 1410 1512;
    // Ada.
    "rtx4050-laptop" "NVIDIA GeForce RTX 4050 Laptop GPU", 5780 MiB
        from "our estimate: nvidia-smi has 6141 MiB, and the RTX 4060 Laptop shows 382 MiB less",
        cc 8 9, 20 SMs, context {~130}, L2 12288, bus 96, MHz 2370 8001;
    "rtx4060" "NVIDIA GeForce RTX 4060", 7807 MiB
        from "Ultralytics, torch 2.5",
        cc 8 9, 24 SMs, context {~140}, L2 24576, bus 128, MHz 2460 8501;
    "rtx4060-laptop" "NVIDIA GeForce RTX 4060 Laptop GPU", 7806 MiB
        from "Ultralytics, torch 2.9 and 2.14; 7940 with torch 2.5",
        cc 8 9, 24 SMs, context {~140}, L2 32768, bus 128, MHz 2370 8001;
    "rtx4060ti" "NVIDIA GeForce RTX 4060 Ti 8GB", 7807 MiB
        from "same as the RTX 4060: nvidia-smi shows 8188 MiB for both",
        cc 8 9, 34 SMs, context {~160}, L2 32768, bus 128, MHz 2535 9001;
    "rtx4060ti-16g" "NVIDIA GeForce RTX 4060 Ti", 15946 MiB
        from "Unsloth, torch 2.7",
        cc 8 9, 34 SMs, context {~160}, L2 32768, bus 128, MHz 2535 9001;
    "rtx4070" "NVIDIA GeForce RTX 4070", 11994 MiB
        from "Ultralytics, torch 1.13",
        cc 8 9, 46 SMs, context {~190}, L2 36864, bus 192, MHz 2475 10501;
    "rtx4070-laptop" "NVIDIA GeForce RTX 4070 Laptop GPU", 7806 MiB
        from "Ultralytics, torch 2.7",
        cc 8 9, 36 SMs, context {~170}, L2 32768, bus 128, MHz 2175 8001;
    "rtx4070-super" "NVIDIA GeForce RTX 4070 SUPER", 11994 MiB
        from "same as the RTX 4070: nvidia-smi shows 12282 MiB for both",
        cc 8 9, 56 SMs, context {~210}, L2 49152, bus 192, MHz 2475 10501;
    "rtx4070ti" "NVIDIA GeForce RTX 4070 Ti", 11994 MiB
        from "same as the RTX 4070: nvidia-smi shows 12282 MiB for both",
        cc 8 9, 60 SMs, context {~220}, L2 49152, bus 192, MHz 2610 10501;
    "rtx4070ti-super" "NVIDIA GeForce RTX 4070 Ti SUPER", 15934 MiB
        from "properties",
        cc 8 9, 66 SMs, context {~240}, L2 49152, bus 256, MHz 2610 10501;
    "rtx4080-laptop" "NVIDIA GeForce RTX 4080 Laptop GPU", 11994 MiB
        from "same as the RTX 4070: nvidia-smi shows 12282 MiB for both",
        cc 8 9, 58 SMs, context {~220}, L2 49152, bus 192, MHz 2280 9001;
    "rtx4080" "NVIDIA GeForce RTX 4080", 16049 MiB
        from "properties",
        cc 8 9, 76 SMs, context {~270}, L2 65536, bus 256, MHz 2505 11201;
    "rtx4090" "NVIDIA GeForce RTX 4090", 24210 MiB
        from "OOM: 23.64 GiB",
        cc 8 9, 128 SMs, context {390 in 369..514}, L2 73728, bus 384, MHz 2520 10501;
    "rtx4090-laptop" "NVIDIA GeForce RTX 4090 Laptop GPU", 15934 MiB
        from "same as the RTX 4070 Ti SUPER: nvidia-smi shows 16376 MiB for both",
        cc 8 9, 76 SMs, context {~270}, L2 65536, bus 256, MHz 2040 9001;
    "l4" "NVIDIA L4", 22478 MiB
        from "OOM: 21.95 GiB",
        cc 8 9, 58 SMs, context {210 in 201..333}, L2 49152, bus 192, MHz 2040 6251;
    "l40" "NVIDIA L40", 45466 MiB
        from "same as the L40S: nvidia-smi shows 46068 MiB for both",
        cc 8 9, 142 SMs, context {~400}, L2 98304, bus 384, MHz 2490 9001;
    "l40s" "NVIDIA L40S", 45466 MiB
        from "OOM: 44.40 GiB",
        cc 8 9, 142 SMs, context {~400}, L2 98304, bus 384, MHz 2520 9001;
    "rtx6000-ada" "NVIDIA RTX 6000 Ada Generation", 48497 MiB
        from "Ultralytics, torch 2.7; with ECC 44.43 GiB, https://github.com/DINGYANB/MTVCrafter/issues/21",
        cc 8 9, 142 SMs, context {426 in 362..430}, L2 98304, bus 384, MHz 2505 10001;
    // Hopper.
    "h100-80g" "NVIDIA H100 80GB HBM3", 81008 MiB
        from "OOM: 79.11 GiB",
        cc 9 0, 132 SMs, context {612 in 518..614}, L2 51200, bus 5120, MHz 1980 2619;
    "h100-96g" "NVIDIA H100", 97285 MiB
        from "same as the H20: nvidia-smi shows 97871 MiB for both",
        cc 9 0, 132 SMs, context {612 in 518..614}, L2 51200, bus 6144, MHz 1980 2619;
    "h100-pcie" "NVIDIA H100 PCIe", 81008 MiB
        from "properties",
        cc 9 0, 114 SMs, context {~540}, L2 51200, bus 5120, MHz 1755 1593;
    "h100-nvl" "NVIDIA H100 NVL", 95248 MiB
        from "Unsloth, torch 2.6: 93.016 GiB",
        cc 9 0, 132 SMs, context {612 in 518..614}, L2 61440, bus 6144, MHz 1785 2619;
    "h800" "NVIDIA H800", 81008 MiB
        from "same as the H100: nvidia-smi shows 81559 MiB for both",
        cc 9 0, 132 SMs, context {612 in 518..614}, L2 51200, bus 5120, MHz 1980 2619;
    "h20" "NVIDIA H20", 97285 MiB
        from "properties",
        cc 9 0, 78 SMs, context {~430}, L2 61440, bus 6144, MHz 1980 2619;
    "h200" "NVIDIA H200", 143155 MiB
        from "scripts/calibrate, torch 2.11.0, driver 580.159.04: 150,109,880,320 bytes",
        cc 9 0, 132 SMs, context {610 in 518..614}, L2 61440, bus 6016, MHz 1980 3201;
    "h200-nvl" "NVIDIA H200 NVL", 143156 MiB
        from "Unsloth, torch 2.8: 139.801 GiB",
        cc 9 0, 132 SMs, context {610 in 518..614}, L2 61440, bus 6144, MHz 1785 3201;
    "gh200" "NVIDIA GH200 480GB", 96768 MiB
        from "OOM: 94.50 GiB; 94.88, https://github.com/Lightning-AI/litgpt/issues/1892",
        cc 9 0, 132 SMs, context {~612}, L2 61440, bus 6144, MHz 1980 2619;
    "gh200-144g" "NVIDIA GH200 144G HBM3e", 145920 MiB
        from "properties, torch 2.11: 153008209920 bytes; nvidia-smi: 146831 MiB, driver 580.173.02",
        cc 9 0, 132 SMs, context {~612}, L2 61440, bus 6144, MHz 1980 3201;
    // Blackwell.
    "rtx5050" "NVIDIA GeForce RTX 5050", 7740 MiB
        from "our estimate: about 410 MiB less than nvidia-smi's 8151; 463 less than 16311 on the RTX 5060 Ti 16GB",
        cc 12 0, 20 SMs, context {~130}, L2 24576, bus 128, MHz 2572 10001;
    "rtx5050-laptop" "NVIDIA GeForce RTX 5050 Laptop GPU", 7740 MiB
        from "our estimate: about 410 MiB less than nvidia-smi's 8151; 463 less than 16311 on the RTX 5060 Ti 16GB",
        cc 12 0, 20 SMs, context {~130}, L2 24576, bus 128, MHz 2500 12001;
    "rtx5060" "NVIDIA GeForce RTX 5060", 7740 MiB
        from "our estimate: about 410 MiB less than nvidia-smi's 8151; 463 less than 16311 on the RTX 5060 Ti 16GB",
        cc 12 0, 30 SMs, context {~160}, L2 32768, bus 128, MHz 2497 14001;
    "rtx5060-laptop" "NVIDIA GeForce RTX 5060 Laptop GPU", 7740 MiB
        from "our estimate: about 410 MiB less than nvidia-smi's 8151; 463 less than 16311 on the RTX 5060 Ti 16GB",
        cc 12 0, 26 SMs, context {~150}, L2 32768, bus 128, MHz 2497 12001;
    "rtx5060ti" "NVIDIA GeForce RTX 5060 Ti 8GB", 7740 MiB
        from "our estimate: about 410 MiB less than nvidia-smi's 8151; 463 less than 16311 on the RTX 5060 Ti 16GB",
        cc 12 0, 36 SMs, context {~170}, L2 32768, bus 128, MHz 2572 14001;
    "rtx5060ti-16g" "NVIDIA GeForce RTX 5060 Ti", 15848 MiB
        from "Ultralytics, torch 2.10 and 2.12",
        cc 12 0, 36 SMs, context {~170}, L2 32768, bus 128, MHz 2572 14001;
    "rtx5070" "NVIDIA GeForce RTX 5070", 11780 MiB
        from "our estimate: about 450 MiB less than nvidia-smi's 12227; 463 less than 16311 on the RTX 5060 Ti 16GB",
        cc 12 0, 48 SMs, context {~200}, L2 49152, bus 192, MHz 2512 14001;
    "rtx5070-laptop" "NVIDIA GeForce RTX 5070 Laptop GPU", 7740 MiB
        from "our estimate: about 410 MiB less than nvidia-smi's 8151; 463 less than 16311 on the RTX 5060 Ti 16GB",
        cc 12 0, 36 SMs, context {~170}, L2 32768, bus 128, MHz 2347 12001;
    "rtx5070ti" "NVIDIA GeForce RTX 5070 Ti", 15840 MiB
        from "same as the RTX 5080: nvidia-smi shows 16303 MiB for both",
        cc 12 0, 70 SMs, context {~260}, L2 49152, bus 256, MHz 2452 14001;
    "rtx5070ti-laptop" "NVIDIA GeForce RTX 5070 Ti Laptop GPU", 11780 MiB
        from "our estimate: about 450 MiB less than nvidia-smi's 12227; 463 less than 16311 on the RTX 5060 Ti 16GB",
        cc 12 0, 46 SMs, context {~200}, L2 49152, bus 192, MHz 2220 14001;
    "rtx5080" "NVIDIA GeForce RTX 5080", 15840 MiB
        from "Ultralytics",
        cc 12 0, 84 SMs, context {~290}, L2 65536, bus 256, MHz 2617 15001;
    "rtx5090" "NVIDIA GeForce RTX 5090", 32109 MiB
        from "OOM: 31.36 GiB",
        cc 12 0, 170 SMs, context {500 in 489..605}, L2 98304, bus 512, MHz 2407 14001;
    "rtxpro6000" "NVIDIA RTX PRO 6000 Blackwell Server Edition", 97250 MiB
        from "properties, torch 2.7",
        cc 12 0, 188 SMs, context {~540}, L2 131072, bus 512, MHz 2430 12481;
    "b200" "NVIDIA B200", 182635 MiB
        from "OOM: 178.35 GiB",
        cc 10 0, 148 SMs, context {700 in 600..800}, L2 129024, bus 8192, MHz 1965 3996;
    "gb200" "NVIDIA GB200", 188733 MiB
        from "OOM: 184.31 GiB",
        cc 10 0, 152 SMs, context {~700}, L2 129024, bus 8192, MHz 1965 3996;
    "gb300" "NVIDIA GB300", 283136 MiB
        from "OOM: 276.50 GiB; nvidia-smi: 284208 MiB, drivers 580.95 to 580.173",
        cc 10 3, 152 SMs, context {~700}, L2 129024, bus 8192, MHz 1920 3996;
    "thor" "NVIDIA Thor", 125748 MiB
        from "llama.cpp's start: VRAM 125748 MiB, compute capability 11.0; L2: https://github.com/apache/tvm/pull/20259",
        cc 11 0, 20 SMs, context {~200}, L2 32768, bus 256, MHz 1575 4266;
    "gb10" "NVIDIA GB10", 124610 MiB
        from "MemTotal 127600748 kB, https://github.com/XuehaiPan/nvitop/pull/208",
        cc 12 1, 48 SMs, context {~300}, L2 24576, bus 256, MHz 2418 8533;
    "b300" "NVIDIA B300 SXM6 AC", 274115 MiB
        from "OOM: 267.69 GiB",
        cc 10 3, 148 SMs, context {~700}, L2 129024, bus 8192, MHz 1920 3996;
    // Slices. The memory is the value from `nvidia-smi mig -lgip`, which CUDA also reports, in MiB: 4.75 GiB
    // is 4864 MiB.
    "a30:1g.6gb" "NVIDIA A30 MIG 1g.6gb", 5952 MiB
        from "nvidia-smi: 5.81",
        cc 8 0, 14 SMs, context {~230}, L2 6144, bus 768, MHz 1440 1215;
    "a30:2g.12gb" "NVIDIA A30 MIG 2g.12gb", 11968 MiB
        from "nvidia-smi: 11.69",
        cc 8 0, 28 SMs, context {~260}, L2 12288, bus 1536, MHz 1440 1215;
    "a100-40g:1g.5gb" "NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4864 MiB
        from "nvidia-smi: 4.75",
        cc 8 0, 14 SMs, context {~230}, L2 5120, bus 640, MHz 1410 1215;
    "a100-40g:1g.10gb" "NVIDIA A100-SXM4-40GB MIG 1g.10gb", 9856 MiB
        from "Ultralytics, torch 2.2",
        cc 8 0, 14 SMs, context {~230}, L2 10240, bus 1280, MHz 1410 1215;
    "a100-40g:2g.10gb" "NVIDIA A100-SXM4-40GB MIG 2g.10gb", 9856 MiB
        from "https://github.com/kubernetes-sigs/wg-device-management/pull/5",
        cc 8 0, 28 SMs, context {~260}, L2 10240, bus 1280, MHz 1410 1215;
    "a100-40g:3g.20gb" "NVIDIA A100-SXM4-40GB MIG 3g.20gb", 19968 MiB
        from "nvidia-smi: 19.50",
        cc 8 0, 42 SMs, context {~290}, L2 20480, bus 2560, MHz 1410 1215;
    "a100-40g:4g.20gb" "NVIDIA A100-SXM4-40GB MIG 4g.20gb", 19968 MiB
        from "nvidia-smi: 19.50",
        cc 8 0, 56 SMs, context {~320}, L2 20480, bus 2560, MHz 1410 1215;
    "a100-80g:1g.10gb" "NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9728 MiB
        from "nvidia-smi: 9.50",
        cc 8 0, 14 SMs, context {~230}, L2 5120, bus 640, MHz 1410 1593;
    "a100-80g:2g.20gb" "NVIDIA A100-SXM4-80GB MIG 2g.20gb", 19968 MiB
        from "nvidia-smi, https://github.com/XuehaiPan/nvitop/pull/8",
        cc 8 0, 28 SMs, context {~260}, L2 10240, bus 1280, MHz 1410 1593;
    "a100-80g:3g.40gb" "NVIDIA A100-SXM4-80GB MIG 3g.40gb", 40192 MiB
        from "properties: 39.25 GiB",
        cc 8 0, 42 SMs, context {~290}, L2 20480, bus 2560, MHz 1410 1593;
    "a100-80g:4g.40gb" "NVIDIA A100-SXM4-80GB MIG 4g.40gb", 40192 MiB
        from "nvidia-smi: 39.25",
        cc 8 0, 56 SMs, context {~320}, L2 20480, bus 2560, MHz 1410 1593;
    "h100-80g:1g.10gb" "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9984 MiB
        from "nvidia-smi: 9.75",
        cc 9 0, 16 SMs, context {~330}, L2 6400, bus 640, MHz 1980 2619;
    "h100-80g:1g.20gb" "NVIDIA H100 80GB HBM3 MIG 1g.20gb", 20096 MiB
        from "nvidia-smi: 19.62",
        cc 9 0, 26 SMs, context {~350}, L2 12800, bus 1280, MHz 1980 2619;
    "h100-80g:2g.20gb" "NVIDIA H100 80GB HBM3 MIG 2g.20gb", 20096 MiB
        from "properties: 19.625 GiB",
        cc 9 0, 32 SMs, context {~370}, L2 12800, bus 1280, MHz 1980 2619;
    "h100-80g:3g.40gb" "NVIDIA H100 80GB HBM3 MIG 3g.40gb", 40448 MiB
        from "nvidia-smi: 39.50",
        cc 9 0, 60 SMs, context {~440}, L2 25600, bus 2560, MHz 1980 2619;
    "h100-80g:4g.40gb" "NVIDIA H100 80GB HBM3 MIG 4g.40gb", 40448 MiB
        from "nvidia-smi: 39.50",
        cc 9 0, 64 SMs, context {~450}, L2 25600, bus 2560, MHz 1980 2619;
    "h100-nvl:1g.12gb" "NVIDIA H100 NVL MIG 1g.12gb", 11008 MiB
        from "https://github.com/NVIDIA/gpu-operator/pull/900",
        cc 9 0, 16 SMs, context {~330}, L2 7680, bus 768, MHz 1785 2619;
    "h100-nvl:1g.24gb" "NVIDIA H100 NVL MIG 1g.24gb", 22144 MiB
        from "https://github.com/NVIDIA/gpu-operator/pull/900",
        cc 9 0, 26 SMs, context {~350}, L2 15360, bus 1536, MHz 1785 2619;
    "h100-nvl:2g.24gb" "NVIDIA H100 NVL MIG 2g.24gb", 22144 MiB
        from "https://github.com/NVIDIA/gpu-operator/pull/900",
        cc 9 0, 32 SMs, context {~370}, L2 15360, bus 1536, MHz 1785 2619;
    "h100-nvl:3g.47gb" "NVIDIA H100 NVL MIG 3g.47gb", 47488 MiB
        from "https://github.com/NVIDIA/mig-parted/pull/101",
        cc 9 0, 60 SMs, context {~440}, L2 30720, bus 3072, MHz 1785 2619;
    "h200:1g.18gb" "NVIDIA H200 MIG 1g.18gb", 16384 MiB
        from "https://github.com/NVIDIA/mig-parted/issues/120",
        cc 9 0, 16 SMs, context {~330}, L2 7680, bus 768, MHz 1980 3201;
    "h200:1g.35gb" "NVIDIA H200 MIG 1g.35gb", 33024 MiB
        from "https://github.com/NVIDIA/mig-parted/issues/120",
        cc 9 0, 26 SMs, context {~350}, L2 15360, bus 1536, MHz 1980 3201;
    "h200:2g.35gb" "NVIDIA H200 MIG 2g.35gb", 33024 MiB
        from "https://github.com/NVIDIA/mig-parted/issues/120",
        cc 9 0, 32 SMs, context {~370}, L2 15360, bus 1536, MHz 1980 3201;
    "h200:3g.71gb" "NVIDIA H200 MIG 3g.71gb", 71168 MiB
        from "https://github.com/NVIDIA/mig-parted/issues/120",
        cc 9 0, 60 SMs, context {~440}, L2 30720, bus 3072, MHz 1980 3201;
    "h200:4g.71gb" "NVIDIA H200 MIG 4g.71gb", 71168 MiB
        from "https://github.com/NVIDIA/mig-parted/issues/120",
        cc 9 0, 64 SMs, context {~450}, L2 30720, bus 3072, MHz 1980 3201;
    "gb200:1g.24gb" "NVIDIA GB200 MIG 1g.24gb", 20480 MiB
        from "https://github.com/NVIDIA/gpu-operator/pull/1303",
        cc 10 0, 18 SMs, context {~370}, L2 16128, bus 1024, MHz 1965 3996;
    "gb200:1g.47gb" "NVIDIA GB200 MIG 1g.47gb", 46592 MiB
        from "https://github.com/NVIDIA/gpu-operator/pull/1303",
        cc 10 0, 32 SMs, context {~400}, L2 32256, bus 2048, MHz 1965 3996;
    "gb200:2g.47gb" "NVIDIA GB200 MIG 2g.47gb", 46592 MiB
        from "https://github.com/NVIDIA/gpu-operator/pull/1303",
        cc 10 0, 38 SMs, context {~410}, L2 32256, bus 2048, MHz 1965 3996;
}
