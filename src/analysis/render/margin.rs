//! The safety margin, which is the memory that a run left free, and the memory uses that a simulated GPU does
//! not count.

use memtrace_trace::units::Unit;

use crate::render::numbers::{percent, share};

/// The uses of memory that the figures of a simulated GPU leave out.
const NOT_MODELLED: &str = "not counted on a simulated GPU: fragmentation that builds up in a longer run, \
                            the handles of cuBLAS, cuDNN and similar libraries on cards other than Hopper, \
                            the growth of the context, other processes";

/// Describes the margin of a run that used `used` of `capacity` bytes at its peak. Returns `None` if the
/// capacity is unknown.
#[must_use]
pub fn margin(used: i64, capacity: i64, is_simulated: bool) -> Option<String> {
    if capacity <= 0 {
        return None;
    }
    let spare = (capacity - used).max(0);
    let mut text = format!("{} to spare ({})", Unit::Auto.show(spare), percent(share(spare, capacity)));
    if is_simulated {
        text.push_str(&format!("; {NOT_MODELLED}"));
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_margin_of_a_fit_is_what_is_left_and_names_what_is_not_counted() {
        let real = margin(19 << 30, 20 << 30, false).unwrap();
        assert_eq!(real, "1.00 GiB to spare (5.0 %)");
        let simulated = margin(21 << 30, 20 << 30, true).unwrap();
        assert!(simulated.starts_with("0 B to spare (0.0 %); not counted"), "{simulated}");
        assert_eq!(margin(1, 0, true), None);
    }
}
