//! The device memory that NCCL takes for a communicator, computed as by NCCL's source code.
//!
//! Sources, in NCCL's tree (<https://github.com/NVIDIA/nccl>), read at v2.20.5, v2.21.5, v2.22.3, v2.27.5 and v2.28.9:
//!
//! - `computeBuffSizes` (`init.cc`) and the setup of connections (`transport/p2p.cc`): the receiver has the
//!   buffers of three protocols, the sender a control page, each in whole 2 MiB. Between A100 cards the sender
//!   has the buffer of the protocol *simple* (`p2pGetInfo`: read).
//! - `initChannel` (`channel.cc`) and `devCommSetup` (`init.cc`): three allocations for each channel and two for
//!   the communicator, one before v2.23. Since v2.19 each of them is a `cuMemCreate`, so it takes 2 MiB
//!   (`ncclCuMemAlloc` in `include/alloc.h`), where the card has GPUDirect RDMA.
//! - `ncclTopoComputeP2pChannels` (`graph/paths.cc`): channels for send and receive are a power of two.
//! - `ncclNvlsSetup` (`transport/nvls.cc`): the memory for multicast, from Hopper on. Until v2.20 each buffer has the
//!   size of the protocol *simple*'s, and until v2.21 each channel of collectives has a control page. The buffers are
//!   aligned to the unit of multicast (`nvlsGetProperties`).
//! - `initTransportsRank` (`init.cc`): until v2.21, or with `NCCL_RUNTIME_CONNECT=0`, ring, tree, multicast and
//!   the shared buffers of the network (`sharedBuffersInit` in `transport/net.cc`, even without a network) come
//!   with the communicator; since v2.22 each comes with the first operation that uses it.
//!
//! The computed sizes match these public figures: four A100 cards take 544 MiB in communicators of two ranks
//! and 688 MiB in larger ones (NVIDIA/nccl issue 964); a communicator of one rank with 64 channels has a
//! shared buffer of 536,870,912 bytes (issue 2363); an all-to-all between H100 cards takes 12 MiB for each
//! channel and peer (issue 1685).
//!
//! A communicator over several machines, read at v2.28.9:
//!
//! - `sendProxyConnect` and `recvProxyConnect` (`transport/net.cc`): a ring's connection to another machine
//!   has the protocols' buffers in whole 2 MiB (`CUDA_IPC_MIN`) on both sides; the sender has no buffer of the
//!   protocol *LL*. The buffers are in device memory with GPUDirect RDMA, otherwise in host memory.
//! - Each channel enters and leaves a machine once. So the number of connections that a card has to other
//!   machines is the number of channels divided by the ranks of its machine. (With PXN, the card next to the
//!   network card has them.)
//! - `sharedNetBuffersInit` (`transport/net.cc`): messages to all other machines share one buffer, and
//!   messages from them share another. Each has `NCCL_SHARED_STEPS` chunks for each channel of messages. The
//!   size of these chunks is `NCCL_P2P_NET_CHUNKSIZE` (`computeBuffSizes` in `init.cc`).
//! - Channels: the search of rings (`graph/search.cc`) finds as many as there are network cards, and
//!   `ncclTopoPostset` (`graph/connect.cc`) doubles them, twice from Hopper on while there are fewer than 16
//!   and the ring is faster than 45 GB/s. With one network card of 400 Gb/s for each Hopper card, the result
//!   is 16, which NVIDIA/nccl issue 1538 shows for two machines of eight cards. With fewer network cards
//!   there are fewer channels (issue 1412: 8), so this is an upper bound.
//!
//! Not counted are the buffers of multicast and tree that a large operation connects since v2.22, trees
//! between machines, and registered user buffers.

use memtrace_cards::Links;

const MIB: usize = 1 << 20;
/// The unit of `cuMemCreate`, and `CUDA_IPC_MIN`.
const PAGE: usize = 2 * MIB;
/// The size in bytes of a buffer's control structures, on the sender and on the receiver.
const CONTROL: usize = 4096;
/// An upper bound for the buffer sizes that environment variables set.
const MAX_BUFFER: usize = 1 << 32;
/// The value of `NCCL_STEPS`. [`SHARED_STEPS`] is `NCCL_SHARED_STEPS` of the network's shared buffers.
const STEPS: usize = 8;
const SHARED_STEPS: usize = 16;

/// The unit of the multicast buffers (`cuMulticastGetGranularity`, recommended). NVIDIA documents no value. With
/// 512 MiB the sum is within 8 MiB of what `nvidia-smi` shows for NCCL 2.21.5 on eight H100 cards (3451 to 3459
/// MiB in the logs of <https://github.com/KellerJordan/modded-nanogpt>); without it, it is 376 MiB less.
const MULTICAST_UNIT: usize = 512 * MIB;

/// The maximum number of channels of a ring over several machines (`ncclTopoPostset`).
const MAX_BETWEEN_MACHINES: usize = 16;

/// One rank's view of its communicator, from which the sizes are computed.
pub(crate) struct NcclMemory<'a> {
    /// NCCL's version, which is 22809 for 2.28.9.
    pub(crate) version: u32,
    /// The number of ranks of the communicator on this machine.
    pub(crate) ranks: usize,
    /// The position of the rank among the ranks on this machine.
    pub(crate) rank: usize,
    /// True if the communicator has ranks on other machines.
    pub(crate) has_others: bool,
    /// The number of channels of a collective among several ranks. If it is 0, the simulated NCCL takes no
    /// memory.
    pub(crate) channels: usize,
    pub(crate) links: Links,
    pub(crate) cc: (u32, u32),
    /// True if the card has GPUDirect RDMA.
    pub(crate) rdma: bool,
    /// A function that returns the value of an environment variable, or `None` if it is unset.
    pub(crate) variable: &'a dyn Fn(&str) -> Option<String>,
}

impl NcclMemory<'_> {
    /// Returns the sizes in bytes of the allocations that come with the communicator.
    pub(crate) fn at_creation(&self) -> Vec<usize> {
        let channels = self.channels();
        if channels == 0 {
            return Vec::new();
        }
        let all = channels.max(self.p2p_channels());
        // Without cuMem, these allocations are small and share one page.
        let of_communicator = if self.version < 22300 { 1 } else { 2 };
        let mut sizes = vec![PAGE; if self.has_cumem() { 3 * all + of_communicator } else { 1 }];
        if self.has_multicast() && self.has_cumem() {
            let control = if self.version < 22200 { channels } else { self.multicast_channels() + 1 };
            sizes.extend(vec![PAGE; control]);
        }
        if !self.connects_later() {
            sizes.extend(self.ring());
            sizes.extend(self.tree());
            sizes.extend(self.multicast_buffers());
            sizes.push(self.shared_buffer());
        }
        sizes
    }

    /// Returns the sizes in bytes of the allocations that come with the first operation among several ranks.
    /// Empty if they already came with the communicator.
    pub(crate) fn at_first_operation(&self) -> Vec<usize> {
        if self.connects_later() { self.ring() } else { Vec::new() }
    }

    /// Returns the sizes in bytes of the allocations for the first message to another rank if `sends` is
    /// true, or from it.
    pub(crate) fn for_peer(&self, sends: bool) -> Vec<usize> {
        let channels = match self.links {
            Links::Switch => self.p2p_channels(),
            _ => self.p2p_channels().min(2),
        };
        vec![if sends { self.sender() } else { self.receiver() }; channels]
    }

    /// Returns the sizes in bytes of the allocations for the first message to another machine, or from one.
    pub(crate) fn for_machines(&self) -> Vec<usize> {
        if self.rdma { vec![self.shared_buffer()] } else { Vec::new() }
    }

    /// Returns the number of channels of collectives.
    fn channels(&self) -> usize {
        let most = if self.version < 22500 { 32 } else { 64 };
        if self.channels == 0 {
            return 0;
        }
        let channels = match self.ranks {
            ranks if self.has_others => {
                let each = if self.cc >= (9, 0) { 4 } else { 2 };
                self.channels.min((each * ranks).min(MAX_BETWEEN_MACHINES))
            }
            // A communicator of one rank has all channels, because no link limits their number.
            1 => most,
            _ => self.channels,
        };
        let channels = channels.max(self.number("NCCL_MIN_NCHANNELS", 0));
        channels.min(self.number("NCCL_MAX_NCHANNELS", channels)).clamp(1, most)
    }

    fn p2p_channels(&self) -> usize {
        self.channels().next_power_of_two()
    }

    fn has_cumem(&self) -> bool {
        match self.number("NCCL_CUMEM_ENABLE", 2) {
            0 => false,
            1 => self.version >= 21800,
            _ => self.version >= 21900 && self.rdma,
        }
    }

    fn connects_later(&self) -> bool {
        self.version >= 22200 && self.has_cumem() && self.number("NCCL_RUNTIME_CONNECT", 1) != 0
    }

    fn has_multicast(&self) -> bool {
        let least = if self.version >= 22800 { 2 } else { 3 };
        self.links == Links::Switch
            && self.cc >= (9, 0)
            && self.ranks >= least
            && self.number("NCCL_NVLS_ENABLE", 2) != 0
    }

    fn multicast_channels(&self) -> usize {
        match self.cc.0 {
            ..=9 => 16,
            _ if self.version >= 22800 => 24,
            _ => 32,
        }
    }

    /// Returns the sizes in bytes of the buffers for multicast. Each channel has two buffers for each rank.
    fn multicast_buffers(&self) -> Vec<usize> {
        if !self.has_multicast() {
            return Vec::new();
        }
        let buffer = if self.version < 22100 {
            self.simple()
        } else {
            self.size("NCCL_NVLS_CHUNKSIZE", 128 << 10).saturating_mul(STEPS).min(MAX_BUFFER)
        };
        let (channels, each) = if self.version < 22200 {
            (self.channels(), buffer + PAGE)
        } else {
            (self.multicast_channels(), buffer)
        };
        vec![(channels * 2 * each * self.ranks).next_multiple_of(MULTICAST_UNIT)]
    }

    fn ring(&self) -> Vec<usize> {
        let channels = self.channels();
        if !self.has_others {
            let alone = self.ranks == 1;
            return (0..if alone { 0 } else { channels })
                .flat_map(|_| [self.receiver(), self.sender()])
                .collect();
        }
        // This rank's connections to and from other machines. All other connections belong to the ring inside
        // this machine.
        let between = channels.div_ceil(self.ranks);
        let inside = channels - between.min(channels);
        let mut sizes: Vec<usize> = (0..inside).flat_map(|_| [self.receiver(), self.sender()]).collect();
        if self.rdma {
            sizes.extend((0..between).flat_map(|_| [self.machine_receiver(), self.machine_sender()]));
        }
        sizes
    }

    fn machine_receiver(&self) -> usize {
        (self.ll() + self.ll128() + self.simple()).next_multiple_of(PAGE)
    }

    fn machine_sender(&self) -> usize {
        (self.ll128() + self.simple()).next_multiple_of(PAGE)
    }

    fn shared_buffer(&self) -> usize {
        self.p2p_channels() * SHARED_STEPS * self.p2p_chunk()
    }

    /// Returns the sizes of the buffers of those connections that only the tree has, not the ring. Inside a
    /// machine, the tree is a chain.
    fn tree(&self) -> Vec<usize> {
        let mut each = Vec::new();
        if self.ranks > 2 && self.rank + 1 < self.ranks {
            each.push(self.receiver());
        }
        if self.ranks > 2 && self.rank > 0 {
            each.push(self.sender());
        }
        each.repeat(self.channels())
    }

    /// Returns true if a receiver reads from the sender's buffer.
    fn reads(&self) -> bool {
        self.cc == (8, 0) && self.links != Links::None
    }

    fn receiver(&self) -> usize {
        let simple = if self.reads() { 0 } else { self.simple() };
        (CONTROL + self.ll() + self.ll128() + simple).next_multiple_of(PAGE)
    }

    fn sender(&self) -> usize {
        (CONTROL + if self.reads() { self.simple() } else { 0 }).next_multiple_of(PAGE)
    }

    fn simple(&self) -> usize {
        self.size("NCCL_BUFFSIZE", 4 << 20)
    }

    fn ll(&self) -> usize {
        self.size("NCCL_LL_BUFFSIZE", 512 << 10)
    }

    fn ll128(&self) -> usize {
        self.size("NCCL_LL128_BUFFSIZE", 4800 << 10)
    }

    fn p2p_chunk(&self) -> usize {
        let chunk = match self.links {
            _ if self.has_others => self.size("NCCL_P2P_NET_CHUNKSIZE", 128 << 10),
            Links::None => self.size("NCCL_P2P_PCI_CHUNKSIZE", 128 << 10),
            _ => self.size("NCCL_P2P_NVL_CHUNKSIZE", 512 << 10),
        };
        chunk.min(self.simple() / STEPS)
    }

    /// Returns the value of one of NCCL's variables. A value that is not a number counts
    /// as the default, as in NCCL.
    fn number(&self, name: &str, default: usize) -> usize {
        (self.variable)(name).and_then(|value| value.trim().parse().ok()).unwrap_or(default)
    }

    fn size(&self, name: &str, default: usize) -> usize {
        self.number(name, default).min(MAX_BUFFER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::libs::nccl_code::{CODE_OF_2_27_5, KernelCode};

    fn unset(_: &str) -> Option<String> {
        None
    }

    fn rank_of(version: u32, ranks: usize, rank: usize, cc: (u32, u32)) -> NcclMemory<'static> {
        NcclMemory {
            version,
            ranks,
            rank,
            has_others: false,
            channels: 24,
            links: Links::Switch,
            cc,
            rdma: true,
            variable: &unset,
        }
    }

    fn mib(sizes: &[usize]) -> usize {
        sizes.iter().sum::<usize>() / MIB
    }

    #[test]
    fn nccl_on_four_a100_cards_takes_what_issue_964_shows() {
        // Version 2.18.3, of August 2023, does not use cuMem -> one page of small allocations in addition to
        // the buffers.
        let of = |ranks| mib(&rank_of(21803, ranks, 0, (8, 0)).at_creation());
        assert_eq!((of(2), of(4)), (544 + 2, 688 + 2));
    }

    #[test]
    fn nccl_on_eight_h100_cards_takes_what_public_dumps_show() {
        let of = |ranks: usize| -> usize {
            let memory = rank_of(22705, ranks, 0, (9, 0));
            let first = if ranks > 1 { CODE_OF_2_27_5.at_first_kernel(132) } else { 0 };
            let code = ((CODE_OF_2_27_5.at_creation() + first) >> 20) as usize;
            mib(&memory.at_creation()) + mib(&memory.at_first_operation()) + code
        };
        // Expected: the logs show 1174 MiB for one rank and 1510 MiB for each of eight. 614 MiB of these are
        // the context without NCCL.
        assert_eq!((of(1), of(8)), (560, 896));
    }

    #[test]
    fn nccl_2_21_on_eight_h100_cards_takes_what_public_logs_show() {
        // Sizes of the code in the wheel of 2.21.5; 614 MiB are the context without NCCL.
        let code = KernelCode { code: 86_572_650, stack: 1264, message_stack: 1480 };
        let of = |rank: usize| {
            let kernels = ((code.at_creation() + code.at_first_kernel(132)) >> 20) as usize;
            614 + mib(&rank_of(22105, 8, rank, (9, 0)).at_creation()) + kernels
        };
        // Expected: `nvidia-smi` shows 3451 to 3459 MiB on the cards between the first and the last, and 3211
        // to 3219 on the last one.
        assert_eq!((of(3), of(7)), (3452, 3212));
    }

    #[test]
    fn nccl_before_and_after_an_all_to_all_takes_what_issue_1685_shows() {
        // Expected, outside PyTorch's allocator and including a context of 610 MiB: 1.06 GB before the
        // exchange, and within 5% of the 4.34 GB after it that the issue shows.
        let memory = rank_of(22602, 8, 0, (9, 0));
        let code = CODE_OF_2_27_5;
        let before = mib(&memory.at_creation()) as u64 + (code.at_creation() >> 20) + 610;
        let messages = 7 * (mib(&memory.for_peer(true)) + mib(&memory.for_peer(false))) as u64;
        let after = before + messages + ((code.at_first_kernel(132) + code.at_first_message(132)) >> 20);
        let gb = |mib: u64| (mib << 20) as f64 / 1e9;
        assert_eq!(format!("{:.2} {:.2}", gb(before), gb(after)), "1.06 4.16");
        assert!((4.34 / gb(after) - 1.0).abs() < 0.05);
    }

    #[test]
    fn nccl_of_one_rank_has_the_shared_buffer_of_issue_2363() {
        let eager = |name: &str| (name == "NCCL_RUNTIME_CONNECT").then(|| "0".to_owned());
        let memory = NcclMemory { variable: &eager, ..rank_of(22809, 1, 0, (10, 3)) };
        assert!(memory.at_creation().contains(&536_870_912), "{:?}", memory.at_creation());
        assert!(!rank_of(22809, 1, 0, (10, 3)).at_creation().contains(&536_870_912));
    }

    #[test]
    fn nccl_connects_32_channels_to_each_peer_of_an_all_to_all() {
        let memory = rank_of(22602, 8, 0, (9, 0));
        assert_eq!(memory.for_peer(false), vec![10_485_760; 32]);
        assert_eq!(memory.for_peer(true), vec![2_097_152; 32]);
    }

    #[test]
    fn nccl_between_machines_has_the_buffers_of_its_source() {
        let of = |ranks| NcclMemory { has_others: true, ..rank_of(22809, ranks, 0, (9, 0)) };
        // Eight cards with 16 channels: two channels enter and two leave the machine at this card. The
        // receiver has 10 MiB for each connection. The sender has 2 MiB for a connection to a card and 10 MiB
        // for one to a machine.
        assert_eq!(mib(&of(8).at_first_operation()), 16 * 10 + 14 * 2 + 2 * 10);
        // With one rank per machine, each of the four channels enters and leaves the machine at this card:
        // eight buffers of 10 MiB. A data-parallel group has one rank per machine if tensor parallelism is
        // inside the machines.
        assert_eq!(of(1).at_first_operation(), [10_485_760; 8]);
        // Setup: 16 channels of 16 steps of 128 KiB -> one buffer of 32 MiB for the messages to all machines.
        // In version 2.21, it is allocated with the communicator.
        assert_eq!(of(8).for_machines(), [33_554_432]);
        let before = NcclMemory { version: 22105, ..of(8) };
        assert!(before.at_creation().contains(&33_554_432), "{:?}", before.at_creation());
        // Expected: three allocations for each channel, two for the communicator and 17 for multicast, each
        // of 2 MiB.
        assert_eq!(mib(&of(8).at_creation()), (3 * 16 + 2 + 17) * 2);
        // Setup: no GPUDirect RDMA -> the buffers for messages to and from other machines are in host memory.
        let host =
            NcclMemory { rdma: false, version: 22105, cc: (8, 9), links: Links::None, channels: 2, ..of(8) };
        assert!(host.for_machines().is_empty());
        assert_eq!(host.ring().len(), 2, "{:?}", host.ring());
        let none = NcclMemory { channels: 0, ..of(8) };
        assert!(none.at_creation().is_empty() && none.at_first_operation().is_empty());
    }

    #[test]
    fn nccl_2_21_has_the_multicast_buffers_that_its_log_names() {
        // Expected: the log line "nvlsPerRankSize 150994944 nvlsTotalSize 1207959552" of NCCL with 24
        // channels and eight ranks, which NCCL aligns to the unit of multicast.
        let aligned = 1_207_959_552_usize.next_multiple_of(MULTICAST_UNIT);
        assert_eq!(rank_of(22105, 8, 3, (9, 0)).multicast_buffers(), vec![aligned]);
        // v2.20.5: (NCCL_BUFFSIZE + a page) for each of two buffers, 24 channels and eight ranks.
        let aligned = (24 * 2 * ((4 << 20) + PAGE) * 8).next_multiple_of(MULTICAST_UNIT);
        assert_eq!(rank_of(22005, 8, 3, (9, 0)).multicast_buffers(), vec![aligned]);
        let off = |name: &str| (name == "NCCL_NVLS_ENABLE").then(|| "0".to_owned());
        let without = NcclMemory { variable: &off, ..rank_of(22105, 8, 3, (9, 0)) };
        assert!(without.multicast_buffers().is_empty());
    }

    #[test]
    fn nccl_without_channels_takes_nothing_and_variables_change_the_rest() {
        let none = NcclMemory { channels: 0, ..rank_of(22809, 8, 0, (9, 0)) };
        assert!(none.at_creation().is_empty() && none.at_first_operation().is_empty());
        let small = |name: &str| match name {
            "NCCL_MAX_NCHANNELS" => Some("4".to_owned()),
            "NCCL_BUFFSIZE" => Some("1048576".to_owned()),
            "NCCL_LL128_BUFFSIZE" => Some("huge".to_owned()),
            _ => None,
        };
        let memory = NcclMemory { variable: &small, ..rank_of(22809, 8, 0, (9, 0)) };
        assert_eq!(memory.at_first_operation().len(), 8);
        assert_eq!(memory.at_first_operation()[0], 8 << 20);
        let huge = |_: &str| Some(usize::MAX.to_string());
        let memory = NcclMemory { variable: &huge, ..rank_of(22809, 8, 0, (9, 0)) };
        assert!(memory.at_creation().len() < 1000);
    }
}
