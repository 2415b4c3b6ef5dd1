//! Formats and parses byte counts.

use std::fmt;
use std::str::FromStr;

/// One kibibyte.
pub const KIB: i64 = 1 << 10;
/// One mebibyte.
pub const MIB: i64 = 1 << 20;
/// One gibibyte.
pub const GIB: i64 = 1 << 30;

/// The unit of a formatted byte count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unit {
    /// The largest unit in which the value is at least 1.
    #[default]
    Auto,
    /// Bytes, as an integer.
    B,
    /// 1024 bytes, two decimals.
    KiB,
    /// 1024² bytes, two decimals.
    MiB,
    /// 1024³ bytes, two decimals.
    GiB,
}

impl Unit {
    /// Returns the divisor of this unit for `bytes`, and the name of the unit.
    fn scale(self, bytes: i64) -> (i64, &'static str) {
        match self {
            Unit::B => (1, "B"),
            Unit::KiB => (KIB, "KiB"),
            Unit::MiB => (MIB, "MiB"),
            Unit::GiB => (GIB, "GiB"),
            Unit::Auto => match bytes.unsigned_abs() {
                0..=1023 => (1, "B"),
                // A size that two decimals would round up to 1024 has the next unit.
                n if n < (MIB - KIB / 200) as u64 => (KIB, "KiB"),
                n if n < (GIB - MIB / 200) as u64 => (MIB, "MiB"),
                _ => (GIB, "GiB"),
            },
        }
    }

    /// Returns `bytes` formatted in this unit: an integer in bytes, otherwise two decimals, as MemTracker
    /// prints them.
    #[must_use]
    pub fn show(self, bytes: i64) -> Shown {
        Shown { unit: self, bytes }
    }
}

impl FromStr for Unit {
    type Err = String;

    /// Parses a unit. The text of the error is the same as in MemTracker, so it does not name `auto`.
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Unit::Auto),
            "B" => Ok(Unit::B),
            "KiB" => Ok(Unit::KiB),
            "MiB" => Ok(Unit::MiB),
            "GiB" => Ok(Unit::GiB),
            _ => Err(format!("Unsupported unit: {text}. Supported units are: B, KiB, MiB, GiB")),
        }
    }
}

/// A byte count with a unit; see [`Unit::show`].
#[derive(Clone, Copy, Debug)]
pub struct Shown {
    unit: Unit,
    bytes: i64,
}

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (divisor, name) = self.unit.scale(self.bytes);
        let text = if divisor == 1 {
            format!("{} {name}", self.bytes)
        } else {
            format!("{:.2} {name}", self.bytes as f64 / divisor as f64)
        };
        f.pad(&text)
    }
}

/// Parses `512`, `10k`, `2m`, `1.5g`, `80GiB`. All units are powers of 1024.
///
/// # Errors
/// Returns a message with the expected form.
///
/// ```
/// use memtrace_trace::units::{Unit, parse_bytes};
/// assert_eq!(parse_bytes("1.5g")?, 1_610_612_736);
/// assert_eq!(Unit::Auto.show(1_610_612_736).to_string(), "1.50 GiB");
/// # Ok::<(), String>(())
/// ```
pub fn parse_bytes(text: &str) -> Result<i64, String> {
    memtrace_util::size::parse(text).map(u64::cast_signed).ok_or_else(|| expected(text.trim()))
}

fn expected(text: &str) -> String {
    format!("expected a size such as 512, 64m or 1.5g, got {text:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_two_decimals_unless_in_bytes() {
        assert_eq!(Unit::Auto.show(512).to_string(), "512 B");
        assert_eq!(Unit::Auto.show(1536).to_string(), "1.50 KiB");
        assert_eq!(Unit::MiB.show(20 * MIB).to_string(), "20.00 MiB");
        assert_eq!(Unit::Auto.show(-3 * GIB).to_string(), "-3.00 GiB");
        for (below, shown, next) in
            [(MIB - 6, "1023.99 KiB", "1.00 MiB"), (GIB - 5243, "1023.99 MiB", "1.00 GiB")]
        {
            assert_eq!(Unit::Auto.show(below).to_string(), shown);
            assert_eq!(Unit::Auto.show(below + 1).to_string(), next);
        }
    }

    #[test]
    fn sizes_are_parsed_in_any_spelling() {
        assert_eq!(parse_bytes("64m"), Ok(64 * MIB));
        assert_eq!(parse_bytes("1.5 GiB"), Ok(GIB * 3 / 2));
        assert!(parse_bytes("12 parsecs").is_err());
        assert!(parse_bytes("").is_err());
    }
}
