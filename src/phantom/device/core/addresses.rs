//! Device addresses inside bytes: in the parameters of a kernel, and in data that a program copies.

use crate::core::vram;

/// Calls `found` with each device address at a multiple of four bytes, and with the offset of the address.
/// Ordinary structs align an address to eight bytes. A packed struct may align it to four, but hardly ever to
/// less.
pub(crate) fn in_parameter(bytes: &[u8], found: impl FnMut(usize, usize)) {
    scan(bytes, 4, found);
}

/// Calls `found` with each device address at a multiple of eight bytes. `bytes` must start at a multiple of
/// eight in the table.
pub(crate) fn in_table(bytes: &[u8], mut found: impl FnMut(usize)) {
    scan(bytes, 8, |address, _| found(address));
}

fn scan(bytes: &[u8], step: usize, mut found: impl FnMut(usize, usize)) {
    for (index, window) in bytes.windows(size_of::<usize>()).step_by(step).enumerate() {
        let Ok(word) = window.try_into() else { continue };
        let value = usize::from_le_bytes(word);
        if may_be_address(value) {
            found(value, index * step);
        }
    }
}

/// Returns true if a value is an address of a device or of pinned memory, whose content
/// may hold other addresses.
pub(crate) fn may_be_address(value: usize) -> bool {
    vram::FIRST_TO_PINNED.contains(&value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_found_in_packed_parameters_and_in_tables() {
        let address = 0x1000_0020_0000usize;
        let mut bytes = vec![0u8; 36];
        bytes[4..12].copy_from_slice(&address.to_le_bytes());
        bytes[24..32].copy_from_slice(&(address + 8).to_le_bytes());
        let (mut all, mut aligned) = (Vec::new(), Vec::new());
        in_parameter(&bytes, |found, offset| all.push((found, offset)));
        in_table(&bytes, |found| aligned.push(found));
        assert_eq!((all, aligned), (vec![(address, 4), (address + 8, 24)], vec![address + 8]));
        in_parameter(&[0xff; 7], |_, _| panic!("seven bytes hold no address"));
    }
}
