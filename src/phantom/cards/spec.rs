//! A request for a card: `h100-80g`, `8xh100-80g`, `mem=48g,cc=8.9`, `h100-80g,mem=40g`.

use std::fmt;

use memtrace_util::size;

use crate::card::{Card, DEFAULT_CARD, EAGER_MIB};
use crate::table::CARDS;

const MIB: u64 = 1 << 20;
/// The maximum number of devices, because the phantom library has an address range for each device.
pub const MAX_DEVICES: u32 = 32;
/// The size of the address range of all devices together, in bytes.
pub const ADDRESSES: u64 = 32 << 40;
/// The maximum memory of a device in bytes. With expandable segments, PyTorch reserves addresses for 9/8 of
/// the memory in each pool, so the limit is far below the size of the address range.
const MAX_MEMORY: u64 = 8 << 40;

/// The simulated devices: a preset with the user's changes. All devices are identical.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    /// The preset for properties that the request does not set.
    pub base: &'static Card,
    /// The name that `torch.cuda.get_device_name` returns.
    pub name: String,
    /// The total memory in bytes.
    pub memory: u64,
    /// The compute capability, major and minor.
    pub cc: (u32, u32),
    /// The number of multiprocessors (SMs).
    pub sms: u32,
    /// The memory in bytes that is in use before the first allocation.
    pub context: u64,
    /// The range in bytes in which the context of a real card is expected. Both ends equal
    /// [`context`](Self::context) if the request sets it, or if a small `mem` limits it and kernels are loaded
    /// on demand.
    pub context_range: (u64, u64),
    /// Whether the request sets the context, which then includes the memory of libraries' handles.
    pub has_own_context: bool,
    /// The memory in bytes that other processes use on each device. On a machine with one shared memory, this
    /// is the memory of the system and of other programs.
    pub others: u64,
    /// The number of devices.
    pub count: u32,
    /// The number of channels of each NCCL communicator.
    pub channels: u32,
}

/// The reason why a request is invalid. The text names the invalid part and the valid values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SpecError {
    /// A word is neither a preset nor `key=value`.
    UnknownCard(String),
    /// A preset that is not the first word.
    LateCard(String),
    /// An unknown key.
    UnknownKey(String),
    /// An invalid value for a key.
    BadValue {
        /// The key of the value.
        key: &'static str,
        /// The value as the user typed it.
        value: String,
        /// The valid values.
        expected: &'static str,
    },
    /// A request for several slices of a card. CUDA shows a process only one slice.
    SeveralSlices,
    /// The context and the other processes leave no free memory.
    NothingFree,
    /// The address ranges of all devices together exceed [`ADDRESSES`].
    NoAddresses {
        /// The maximum number of devices with this memory.
        most: u32,
    },
}

impl fmt::Display for SpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownCard(word) => {
                let near: Vec<_> = Card::nearest(word).iter().map(|card| card.id).collect();
                write!(
                    f,
                    "no card is called `{}`; similar names: {}. `memtrace run --phantom list` lists all \
                     cards, and mem=48g,cc=8.9 describes any other",
                    word.chars().take(60).collect::<String>(),
                    near.join(", ")
                )
            }
            Self::LateCard(word) => write!(f, "the card `{word}` must come first: `{word},mem=40g`"),
            Self::UnknownKey(key) => {
                write!(
                    f,
                    "`{key}=` is unknown; the keys are mem, cc, sms, name, context, others, count, channels"
                )
            }
            Self::BadValue { key, value, expected } => {
                write!(f, "`{key}={value}` is invalid: expected {expected}")
            }
            Self::SeveralSlices => {
                write!(
                    f,
                    "CUDA shows a process only one slice: leave out the number before the card and count="
                )
            }
            Self::NoAddresses { most } => {
                let cards = if *most == 1 { "card" } else { "cards" };
                write!(f, "at most {most} {cards} can have so much memory: lower mem= or the number of cards")
            }
            Self::NothingFree => {
                write!(
                    f,
                    "the context and others= use the whole memory: raise mem= or lower context= and others="
                )
            }
        }
    }
}

impl std::error::Error for SpecError {}

impl Default for Spec {
    fn default() -> Self {
        Self::from_card(Card::find(DEFAULT_CARD).unwrap_or(&CARDS[0]))
    }
}

impl Spec {
    /// Splits the number before a card from the rest of the request: `512xh100-80g,mem=40g` is 512 and
    /// `h100-80g,mem=40g`. Returns `None` without a number.
    #[must_use]
    pub fn split_count(text: &str) -> (Option<u32>, &str) {
        let parts = text.trim().split_once(['x', 'X']);
        let number = parts.and_then(|(count, rest)| {
            let digits = !count.is_empty() && count.bytes().all(|byte| byte.is_ascii_digit());
            digits.then(|| count.parse().ok().map(|count| (count, rest))).flatten()
        });
        number.map_or((None, text), |(count, rest)| (Some(count), rest))
    }

    /// Returns a request for one device of a preset.
    #[must_use]
    pub fn from_card(card: &'static Card) -> Self {
        Self {
            base: card,
            name: card.name.to_owned(),
            memory: card.memory_mib * MIB,
            cc: card.cc,
            sms: card.sms,
            context: card.context.typical_mib * MIB,
            context_range: (card.context.low_mib * MIB, card.context.high_mib * MIB),
            has_own_context: false,
            others: card.unified().map_or(0, |pool| pool.system_mib * MIB),
            count: 1,
            channels: card.nccl_channels(),
        }
    }

    /// Parses a request. An empty request means [`DEFAULT_CARD`].
    ///
    /// # Errors
    /// Returns an error if a word is neither a preset nor a known `key=value`, if a value is invalid, or if
    /// no memory would be free.
    pub fn parse(text: &str) -> Result<Self, SpecError> {
        let mut words = text.split(',').map(str::trim).filter(|word| !word.is_empty()).peekable();
        let mut spec = match words.peek() {
            Some(first) if !first.contains('=') => {
                let spec = Self::preset(first)?;
                words.next();
                spec
            }
            // The user sets the properties, so the device must not have the name of a real card.
            Some(_) => Self { name: "Phantom GPU".to_owned(), ..Self::default() },
            None => Self::default(),
        };
        let mut pairs = Vec::new();
        for word in words {
            let Some((key, value)) = word.split_once('=') else {
                return Err(match Self::preset(word) {
                    Ok(_) => SpecError::LateCard(word.to_owned()),
                    Err(error) => error,
                });
            };
            pairs.push((key.trim(), value.trim()));
        }
        // `mem` limits the values of the preset and must not limit values of the request, so it comes first.
        pairs.sort_by_key(|(key, _)| *key != "mem");
        for (key, value) in pairs {
            spec.set(key, value)?;
        }
        if spec.base.is_slice() && spec.count > 1 {
            return Err(SpecError::SeveralSlices);
        }
        if spec.context.saturating_add(spec.others) >= spec.memory {
            return Err(SpecError::NothingFree);
        }
        let most = (ADDRESSES >> spec.address_bits()) as u32;
        if spec.count > most {
            return Err(SpecError::NoAddresses { most });
        }
        Ok(spec)
    }

    /// Adds the memory of all kernels to the context, as CUDA does if it loads every kernel at the start. A
    /// context that the request sets stays as it is.
    #[must_use]
    pub fn with_eager_loading(mut self) -> Self {
        if !self.has_own_context {
            let most = self.memory.saturating_sub(self.others) / 2;
            let with_all = |context: u64, kernels: u64| (context + kernels * MIB).min(most).max(context);
            self.context = with_all(self.context, EAGER_MIB.0);
            self.context_range.0 = with_all(self.context_range.0, EAGER_MIB.0);
            self.context_range.1 = with_all(self.context_range.1, EAGER_MIB.1);
        }
        self
    }

    /// Returns the free bytes at the start: in the simulation, and the lower and the upper end of the range
    /// expected on a real card.
    #[must_use]
    pub fn free_at_start(&self) -> [u64; 3] {
        let free = |context: u64| self.memory.saturating_sub(self.others).saturating_sub(context);
        [free(self.context), free(self.context_range.1), free(self.context_range.0)]
    }

    /// Returns the number of address bits of each device: enough for twice its memory, because allocations
    /// begin in regions of 32 MiB, and at least 40 (one TiB).
    #[must_use]
    pub fn address_bits(&self) -> u32 {
        (2 * self.memory).max(1 << 40).next_power_of_two().trailing_zeros()
    }

    /// Parses `h100-80g` or `8xh100-80g`.
    fn preset(word: &str) -> Result<Self, SpecError> {
        let (count, id) = Self::split_count(word);
        let card = Card::find(id).ok_or_else(|| SpecError::UnknownCard(id.to_owned()))?;
        let mut spec = Self::from_card(card);
        if let Some(count) = count {
            spec.set("count", &count.to_string())?;
        }
        Ok(spec)
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), SpecError> {
        let bad = |key, expected| SpecError::BadValue { key, value: value.to_owned(), expected };
        match key {
            "mem" => {
                self.memory = size::parse(value)
                    .filter(|&n| (64 * MIB..=MAX_MEMORY).contains(&n))
                    .ok_or_else(|| bad("mem", "a size such as 48g, 40960m, from 64m to 8t"))?;
                // The context of the preset might not fit into a small memory, so it is limited to an eighth
                // of the memory.
                let most = self.memory / 8;
                self.context = self.context.min(most);
                self.context_range = (self.context_range.0.min(most), self.context_range.1.min(most));
                if self.base.unified().is_some() {
                    self.others = self.others.min(most);
                }
            }
            "context" => {
                self.context =
                    size::parse(value).ok_or_else(|| bad("context", "a size such as 500m or 0"))?;
                self.context_range = (self.context, self.context);
                self.has_own_context = true;
            }
            "others" => {
                self.others = size::parse(value).ok_or_else(|| bad("others", "a size such as 500m or 0"))?;
            }
            "cc" => {
                let pair = value.split_once('.').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
                self.cc = pair
                    .filter(|&(major, minor)| (3..=15).contains(&major) && minor <= 9)
                    .ok_or_else(|| bad("cc", "a compute capability such as 8.9"))?;
            }
            "sms" => {
                let sms = value.parse().ok().filter(|n| (1..=1024).contains(n));
                self.sms = sms.ok_or_else(|| bad("sms", "a number of multiprocessors, from 1 to 1024"))?;
            }
            "count" => {
                let count = value.parse().ok().filter(|n| (1..=MAX_DEVICES).contains(n));
                self.count = count
                    .ok_or_else(|| bad("count", "a number of devices, from 1 to 32; more with --ranks"))?;
            }
            "channels" => {
                let channels = value.parse().ok().filter(|n| (0..=64).contains(n));
                self.channels =
                    channels.ok_or_else(|| bad("channels", "a number of channels, from 0 to 64"))?;
            }
            "name" => {
                if value.is_empty() || value.len() > 200 || value.chars().any(char::is_control) {
                    return Err(bad("name", "a text of 1 to 200 bytes without a comma"));
                }
                self.name = value.to_owned();
            }
            other => return Err(SpecError::UnknownKey(other.to_owned())),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_with_the_name_of_a_preset_is_that_preset() {
        for card in CARDS {
            assert_eq!(Spec::parse(card.id), Ok(Spec::from_card(card)));
        }
    }

    #[test]
    fn presets_have_distinct_names() {
        for (i, card) in CARDS.iter().enumerate() {
            assert!(CARDS[..i].iter().all(|other| other.id != card.id && other.name != card.name));
        }
    }

    #[test]
    fn a_count_before_a_preset_requests_several_devices() {
        let spec = Spec::parse("8xh100-80g").unwrap();
        assert_eq!((spec.count, spec.base.id), (8, "h100-80g"));
    }

    #[test]
    fn the_number_before_a_card_is_split_off() {
        for (text, expected) in [
            ("512xh100-80g,mem=40g", (Some(512), "h100-80g,mem=40g")),
            ("rtx4090", (None, "rtx4090")),
            ("8xrtx4090", (Some(8), "rtx4090")),
            ("99999999999xt4", (None, "99999999999xt4")),
            ("mem=4g", (None, "mem=4g")),
        ] {
            assert_eq!(Spec::split_count(text), expected);
        }
    }

    #[test]
    fn keys_change_a_preset_or_describe_a_card() {
        let spec = Spec::parse("h100-80g,mem=40g,context=0").unwrap();
        assert_eq!((spec.memory, spec.context, spec.cc), (40 << 30, 0, (9, 0)));
        let spec = Spec::parse("mem=48GiB, cc=8.9, sms=142, name=My card, count=2").unwrap();
        assert_eq!((spec.memory, spec.cc, spec.sms, spec.count), (48 << 30, (8, 9), 142, 2));
        assert_eq!(spec.name, "My card");
        assert_eq!((spec.channels, Spec::parse("rtx4090,channels=4").unwrap().channels), (24, 4));
    }

    #[test]
    fn the_order_of_the_keys_does_not_matter() {
        for (one, other) in [
            ("h100-80g,context=6g,mem=40g", "h100-80g,mem=40g,context=6g"),
            ("gb10,others=7g,mem=40g", "gb10,mem=40g,others=7g"),
            ("context=6g,mem=40g", "mem=40g,context=6g"),
        ] {
            assert_eq!(Spec::parse(one), Spec::parse(other), "{one}");
        }
        let spec = Spec::parse("h100-80g,context=6g,mem=40g").unwrap();
        assert_eq!((spec.memory, spec.context), (40 << 30, 6 << 30));
    }

    #[test]
    fn the_memory_that_is_free_at_the_start_is_a_range_until_the_request_sets_the_context() {
        let mib = |text: &str| Spec::parse(text).unwrap().free_at_start().map(|bytes| bytes >> 20);
        assert_eq!(mib("h100-80g"), [81008 - 612, 81008 - 614, 81008 - 518]);
        assert_eq!(mib("h100-80g,context=600m,others=1g"), [81008 - 1624; 3]);
        assert_eq!(mib("h100-80g,mem=1g"), [1024 - 128; 3]);
        let eager = Spec::parse("h100-80g").unwrap().with_eager_loading();
        assert_eq!(eager.free_at_start()[0] >> 20, 81008 - 612 - 362);
        assert!(eager.free_at_start()[1] < eager.free_at_start()[0]);
        let small = Spec::parse("h100-80g,mem=1g").unwrap().with_eager_loading();
        assert_eq!(small.free_at_start().map(|bytes| bytes >> 20), [1024 - 128 - 362, 512, 1024 - 128 - 362]);
        let full = Spec::parse("h100-80g,mem=1g,others=800m").unwrap();
        assert_eq!(full.clone().with_eager_loading().free_at_start(), full.free_at_start());
        for text in ["h100-80g,context=600m", "mem=1g,context=100m"] {
            let set = Spec::parse(text).unwrap();
            assert_eq!(set.clone().with_eager_loading(), set);
        }
    }

    #[test]
    fn the_system_takes_a_part_of_a_memory_that_it_shares() {
        let others = |text: &str| Spec::parse(text).unwrap().others >> 20;
        assert_eq!((others("gb10"), others("gb10,mem=8g"), others("gb10,others=1g")), (5980, 1024, 1024));
        assert_eq!((others("orin"), others("h100-80g")), (2900, 0));
    }

    #[test]
    fn a_card_has_one_tib_of_addresses_or_twice_its_memory() {
        let bits = |text: &str| Spec::parse(text).unwrap().address_bits();
        assert_eq!((bits("32xh100-80g"), bits("mem=500g,count=32"), bits("b300")), (40, 40, 40));
        assert_eq!((bits("mem=513g"), bits("mem=1t,count=16"), bits("mem=8t,count=2")), (41, 41, 44));
    }

    #[test]
    fn an_empty_request_is_the_default_card() {
        assert_eq!(Spec::parse("").unwrap(), Spec::default());
    }

    #[test]
    fn an_invalid_request_is_refused_with_the_valid_values() {
        for (text, part) in [
            ("h100", "similar names: h100-80g"),
            ("h100", "mem=48g,cc=8.9"),
            ("7xh100-80g:1g.10gb", "one slice"),
            ("a30:1g.6gb,count=2", "one slice"),
            ("0xh100-80g", "count=0"),
            ("999xh100-80g", "from 1 to 32"),
            ("-1xt4", "no card is called"),
            ("mem=lots", "mem=lots"),
            ("mem=8.1t", "from 64m to 8t"),
            ("mem=8t,count=3", "at most 2 cards"),
            ("mem=1t,count=17", "at most 16 cards"),
            ("mem=48g,cc=89", "8.9"),
            ("mem=48g,speed=9", "speed="),
            ("mem=48g,t4", "come first"),
            ("t4,context=20g", "the whole memory"),
            ("t4,name=", "1 to 200"),
            ("t4,channels=65", "from 0 to 64"),
        ] {
            let error = Spec::parse(text).expect_err(text).to_string();
            assert!(error.contains(part), "{text}: {error}");
            assert!(!error.contains('\n'));
        }
    }
}
