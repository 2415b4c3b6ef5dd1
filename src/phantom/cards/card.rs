//! The presets of cards, and their lookup by name.

use memtrace_util::names::distance;

use crate::table::CARDS;

/// The properties of a real card, or of a slice of one, that the phantom simulates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Card {
    /// The name in a request: `h100-80g`, or `h100-80g:1g.10gb` for a slice of a card.
    pub id: &'static str,
    /// The name that `torch.cuda.get_device_name` returns.
    pub name: &'static str,
    /// The total memory in MiB, as the CUDA runtime reports it.
    pub memory_mib: u64,
    /// The public source for the total memory.
    pub source: &'static str,
    /// The compute capability, major and minor.
    pub cc: (u32, u32),
    /// The number of multiprocessors (SMs).
    pub sms: u32,
    /// The memory in use before the first allocation.
    pub context: Context,
    /// The size of the L2 cache in KiB.
    pub l2_kib: u32,
    /// The width of the memory bus in bits.
    pub bus_bits: u32,
    /// The clocks of the multiprocessors and of the memory, in MHz.
    pub clocks_mhz: (u32, u32),
}

/// The memory in MiB that a process uses before its first tensor, if CUDA loads kernels on demand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Context {
    /// The lower end of the range expected on a real card.
    pub low_mib: u64,
    /// The value that the phantom uses.
    pub typical_mib: u64,
    /// The upper end of the range expected on a real card.
    pub high_mib: u64,
    /// True if the value was measured and published; false if it is an estimate.
    pub measured: bool,
}

/// The additional size of a context in MiB if all kernels are loaded at once (`CUDA_MODULE_LOADING=EAGER`):
/// the typical value and the maximum. The typical value is the difference of the two contexts in
/// <https://github.com/pytorch/pytorch/issues/86509> (287,047,680 and 666,632,192 bytes). The maximum is from
/// January 2022, when CUDA always loaded all kernels: a V100 used 1343 MiB with CUDA 11.2 (Hugging Face's
/// `perf_train_gpu_one`), 1033 more than the typical context in our table.
pub(crate) const EAGER_MIB: (u64, u64) = (362, 1033);

/// The preset for an empty request.
pub const DEFAULT_CARD: &str = "h100-80g";

impl Card {
    /// Returns the preset with this name, ignoring case.
    #[must_use]
    pub fn find(id: &str) -> Option<&'static Card> {
        CARDS.iter().find(|card| card.id.eq_ignore_ascii_case(id))
    }

    /// Returns the presets whose names are most similar to `word`: up to three, all with the least distance,
    /// in the order of the table.
    #[must_use]
    pub fn nearest(word: &str) -> Vec<&'static Card> {
        let word = bare(word);
        let edits_of = |card: &Card| {
            let whole = bare(card.id);
            let family = bare(card.id.split(['-', ':']).next().unwrap_or(card.id));
            // A slice gets a distance of 8 more, unless the word itself names a slice (`:`).
            let slice = usize::from(card.is_slice() && !word.contains(':')) * 8;
            let contained = word.len() > 2 && (whole.contains(&word) || word.contains(&whole));
            let edits = distance(&word, &whole).min(distance(&word, &family));
            slice + if contained { edits.min(1) } else { edits }
        };
        let mut cards: Vec<_> = CARDS.iter().collect();
        // A stable sort keeps presets with equal distances in the order of the table.
        cards.sort_by_key(|card| edits_of(card));
        let least = cards.first().map_or(0, |card| edits_of(card));
        cards.retain(|card| edits_of(card) == least);
        cards.truncate(3);
        cards
    }

    /// Returns true if the preset is a slice of a card (MIG). CUDA shows a process one slice and hides the
    /// rest.
    #[must_use]
    pub fn is_slice(&self) -> bool {
        self.id.contains(':')
    }

    /// Returns the properties of the shared memory if the card uses the memory of the host, or `None` if it
    /// has its own memory.
    #[must_use]
    pub fn unified(&self) -> Option<Unified> {
        match self.id {
            "gb10" => Some(Unified { system_mib: 5980, lists_processes: true }),
            "orin" => Some(Unified { system_mib: 2900, lists_processes: false }),
            "thor" => Some(Unified { system_mib: 2900, lists_processes: true }),
            _ => None,
        }
    }

    /// Returns the kind of links between several such cards in the machine in which they are usually sold.
    #[must_use]
    pub fn links(&self) -> Links {
        match self.id.split(['-', ':']).next() {
            _ if self.is_slice() || matches!(self.id, "h100-pcie" | "h100-nvl" | "h200-nvl") => Links::None,
            Some("a100" | "h100" | "h800" | "h20" | "h200" | "b200" | "b300" | "gb200" | "gb300") => {
                Links::Switch
            }
            Some("v100") => Links::Direct,
            _ => Links::None,
        }
    }

    /// Returns the number of channels that NCCL opens between such cards in one machine: 24 with NVSwitch and
    /// 12 with the links of a V100, according to NCCL logs in public reports. Without NVLink, NCCL uses its
    /// minimum, 2. Real machines differ.
    #[must_use]
    pub fn nccl_channels(&self) -> u32 {
        match self.links() {
            Links::Switch => 24,
            Links::Direct => 12,
            Links::None => 2,
        }
    }

    /// Returns whether the card's memory has error correction (ECC) by default: `None` if the card has no
    /// ECC, `Some(false)` if its owner must turn ECC on. The sources are at the table.
    #[must_use]
    pub fn ecc(&self) -> Option<bool> {
        match self.id {
            "rtx3090ti" | "rtx4090" => Some(false),
            "a2000" | "a2000-12g" | "a4000" | "a6000" | "rtx6000-ada" => Some(false),
            "t1000" | "t1000-8g" => None,
            _ if self.name.contains("GeForce") || self.unified().is_some() => None,
            _ => Some(true),
        }
    }

    /// Returns true if other devices in a machine can read the card's memory (GPUDirect RDMA). NVIDIA does
    /// not offer this on GeForce cards.
    #[must_use]
    pub fn has_rdma(&self) -> bool {
        !self.name.contains("GeForce")
    }
}

/// The properties of a machine whose programs, page cache and GPU share one memory. The memory of the card is
/// `MemTotal`.
///
/// - Free memory is the kernel's `MemFree`: page cache counts as used, as a GB10 showed with a file of 60 GiB
///   (<https://github.com/unslothai/unsloth/pull/10704>). Jetsons do the same
///   (<https://github.com/ollama/ollama/issues/12283>, <https://github.com/sgl-project/sglang/pull/10075>), and the
///   documentation of `cuMemGetInfo` says "free according to the OS".
/// - NVML does not support the memory of the device: <https://docs.nvidia.com/dgx/dgx-spark/known-issues.html>. It
///   lists the processes of a GB10 with their bytes (<https://github.com/vllm-project/vllm/pull/55828>), and of a
///   Thor (<https://github.com/rbonghi/jetson_stats/pull/852>). On an Orin it lists no processes, so that PyTorch fails
///   an assertion where it would report an OOM (<https://github.com/pytorch/pytorch/issues/185240>,
///   <https://github.com/pytorch/pytorch/pull/128661>).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unified {
    /// The memory that the system uses before any program starts, in MiB: `MemTotal` minus `MemAvailable` on
    /// an idle machine. The value of the GB10 is 121.69 minus 115.85 GiB, from the first link. The values of
    /// the Jetsons are estimates.
    pub system_mib: u64,
    /// True if NVML lists the processes on the device.
    pub lists_processes: bool,
}

/// The links between the cards of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Links {
    /// NVLink through a switch: each pair has the full bandwidth.
    Switch,
    /// NVLink between pairs.
    Direct,
    /// Only PCIe.
    None,
}

/// Normalizes a name: removes case, spaces, dashes, and NVIDIA's brand names.
fn bare(name: &str) -> String {
    let mut name = name.to_lowercase();
    for word in ["nvidia", "geforce", "tesla", "quadro"] {
        name = name.replace(word, "");
    }
    name.chars().filter(|c| !matches!(c, ' ' | '-' | '_')).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_card_names_the_nearest() {
        for (word, nearest) in [
            ("h100", "h100-80g"),
            ("H100-80GB", "h100-80g"),
            ("h900", "h100-80g"),
            ("rtx 4090", "rtx4090"),
            ("NVIDIA GeForce RTX 3090 Ti", "rtx3090ti"),
            ("4090", "rtx4090"),
            ("a100-40g:1g.5g", "a100-40g:1g.5gb"),
            ("tesla-t4", "t4"),
            ("rtxa6000", "a6000"),
            ("", "t4"),
        ] {
            let found: Vec<_> = Card::nearest(word).iter().map(|card| card.id).collect();
            assert!(found.contains(&nearest) && found.len() <= 3, "{word}: {found:?}");
        }
        assert!(!Card::nearest(&"x".repeat(100_000)).is_empty());
    }

    #[test]
    fn every_card_has_a_source_and_a_context_inside_its_range() {
        for card in CARDS {
            assert!(card.source.len() > 8, "{}", card.id);
            let Context { low_mib, typical_mib, high_mib, .. } = card.context;
            assert!(0 < low_mib && low_mib <= typical_mib && typical_mib <= high_mib, "{}", card.id);
            assert!(high_mib < card.memory_mib / 8, "{}", card.id);
        }
    }

    /// Out-of-memory errors that programs published: the card, the GiB in use by the process, the GiB that
    /// PyTorch allocated, and the MiB that PyTorch reserved but did not allocate. PyTorch prints the GiB
    /// values with two decimals.
    const OUT_OF_MEMORY: [(&str, f64, f64, f64); 22] = [
        ("t4", 14.67, 14.55, 23.38), // https://github.com/hpcaitech/Open-Sora/issues/697
        ("t4", 4.11, 3.72, 264.21),  // https://github.com/Zheng-Chong/CatVTON/issues/133
        ("t4", 11.32, 8.40, 2867.2), // https://github.com/AlphaGPU/leetgpu-challenges/issues/52
        ("t4", 14.37, 14.20, 59.17),
        ("t4", 14.71, 14.54, 10.14),
        ("v100-32g", 18.00, 17.61, 13.91),
        ("rtx3090", 19.40, 17.97, 1044.48),
        ("rtx3090", 22.10, 21.32, 310.45),
        ("rtx3090", 23.68, 23.04, 301.75),
        ("rtx3090", 11.79, 11.44, 43.59),
        ("rtx3090", 16.31, 16.01, 7.47),
        ("rtx4090", 14.56, 13.86, 213.20), // https://github.com/3DTopia/Phidias-Diffusion/issues/8
        ("rtx4090", 22.58, 22.05, 94.18),
        ("rtx4090", 22.82, 22.37, 18.93),
        ("rtx4090", 23.48, 23.11, 0.14),
        ("l4", 19.50, 19.12, 66.14),
        ("l4", 21.96, 21.69, 65.15),
        ("a6000", 43.35, 14.48, 29204.48),
        ("rtx5090", 31.34, 30.74, 19.41), // https://github.com/Wan-Video/Wan2.1/issues/465
        ("rtx5090", 31.28, 30.76, 33.46),
        ("rtx6000-ada", 44.40, 43.94, 41.95), // https://github.com/DINGYANB/MTVCrafter/issues/21
        ("a100-80g", 78.93, 76.28, 2191.36),
    ];

    #[test]
    fn memory_of_others_outside_the_allocator_is_within_the_range_of_the_context() {
        for (id, in_use, allocated, unallocated) in OUT_OF_MEMORY {
            let card = Card::find(id).unwrap();
            let outside = (in_use - allocated) * 1024.0 - unallocated;
            // The sum of the rounding errors. It is half a unit of the last decimal for each of the two GiB
            // values, and for the third value if it was printed in GiB.
            let rounding = 0.01 * 1024.0 + if unallocated > 1024.0 { 0.005 * 1024.0 } else { 0.0 };
            let Context { low_mib, high_mib, .. } = card.context;
            let near = low_mib as f64 - rounding..=high_mib as f64 + rounding;
            assert!(near.contains(&outside), "{id}: {outside:.0} MiB, not in {low_mib} to {high_mib}");
        }
    }

    #[test]
    fn ecc_is_on_in_data_centres_off_in_workstations_and_absent_in_most_other_cards() {
        for (id, ecc) in [
            ("gtx1080ti", None),
            ("rtx3090", None),
            ("rtx3090ti", Some(false)),
            ("rtx4090", Some(false)),
            ("rtx4090-laptop", None),
            ("rtx5090", None),
            ("t1000", None),
            ("gb10", None),
            ("a4000", Some(false)),
            ("rtx6000-ada", Some(false)),
            ("rtxpro6000", Some(true)),
            ("p100", Some(true)),
            ("l40s", Some(true)),
            ("h100-80g", Some(true)),
            ("a100-40g:1g.5gb", Some(true)),
        ] {
            assert_eq!(Card::find(id).unwrap().ecc(), ecc, "{id}");
        }
    }

    #[test]
    fn a_card_in_a_pcie_slot_has_no_nvswitch() {
        for card in CARDS.iter().filter(|card| card.name.contains("PCIe")) {
            assert!(card.links() != Links::Switch, "{}", card.id);
        }
    }

    #[test]
    fn a_slice_is_smaller_than_its_card() {
        for slice in CARDS.iter().filter(|card| card.is_slice()) {
            let (whole, profile) = slice.id.split_once(':').unwrap();
            let whole = Card::find(whole).unwrap_or_else(|| panic!("{}: no card {whole}", slice.id));
            assert_eq!(slice.name, format!("{} MIG {profile}", whole.name));
            assert!(slice.memory_mib < whole.memory_mib && slice.sms < whole.sms, "{}", slice.id);
            assert!(slice.l2_kib < whole.l2_kib && slice.bus_bits < whole.bus_bits, "{}", slice.id);
            assert_eq!((slice.cc, slice.clocks_mhz), (whole.cc, whole.clocks_mhz), "{}", slice.id);
        }
    }
}
