//! The identity of a simulated card, derived from its index in the machine: its UUID and its PCI address.

/// Returns the UUID of a card. Its last byte is the index.
#[must_use]
pub fn uuid(index: usize) -> [u8; 16] {
    let mut bytes = *b"PHANTOM-DEVICE-0";
    bytes[15] = index as u8;
    bytes
}

/// Returns the UUID in the form that NVML and `CUDA_VISIBLE_DEVICES` use.
#[must_use]
pub fn uuid_text(index: usize) -> String {
    let hex: String = uuid(index).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// Returns the PCI bus number of a card. Each card has its own bus.
#[must_use]
pub fn bus(index: usize) -> u32 {
    0x10 + index as u32
}

/// Returns the PCI address of a card in the form that the CUDA runtime uses.
#[must_use]
pub fn bus_id(index: usize) -> String {
    format!("0000:{:02X}:00.0", bus(index))
}

/// Returns the PCI address of a card in the form that NVML and nvidia-smi use, with a domain of eight digits.
#[must_use]
pub fn long_bus_id(index: usize) -> String {
    format!("0000{}", bus_id(index))
}

/// Returns the index of the card with this PCI address among `count` cards. The domain may have four or eight
/// digits, or be omitted.
#[must_use]
pub fn index_of_bus_id(text: &str, count: usize) -> Option<usize> {
    let short = |text: &str| text.rsplit(':').take(2).map(str::to_ascii_uppercase).collect::<Vec<_>>();
    (0..count).find(|&index| short(&bus_id(index)) == short(text))
}

/// Returns the index of the card with this complete UUID among `count` cards. `CUDA_VISIBLE_DEVICES` also
/// allows a unique prefix, which this function does not support: simulated UUIDs differ only in their last
/// two digits.
#[must_use]
pub fn index_of_uuid(text: &str, count: usize) -> Option<usize> {
    (0..count).find(|&index| uuid_text(index).eq_ignore_ascii_case(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_is_found_by_each_of_its_names() {
        assert_eq!(uuid_text(2), "GPU-5048414e-544f-4d2d-4445-564943452d02");
        assert_eq!((bus_id(2), long_bus_id(2)), ("0000:12:00.0".into(), "00000000:12:00.0".into()));
        for name in ["0000:12:00.0", "00000000:12:00.0", "12:00.0"] {
            assert_eq!(index_of_bus_id(name, 8), Some(2), "{name}");
        }
        assert_eq!((index_of_bus_id("0000:12:00.0", 2), index_of_bus_id("", 8)), (None, None));
        assert_eq!(index_of_uuid("gpu-5048414e-544f-4d2d-4445-564943452d02", 8), Some(2));
        assert_eq!(index_of_uuid("GPU-", 8), None);
    }
}
