//! How much of a rotated trace is kept on disk.

use std::fmt;

use crate::units::parse_bytes;

/// The finished parts of a trace that are kept (`MEMTRACE_KEEP`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// All parts.
    All,
    /// The newest parts, up to this number of bytes on disk.
    Bytes(u64),
    /// The parts that ended within this number of seconds.
    Secs(u64),
}

impl Keep {
    /// The number of parts into which the kept bytes or seconds are divided by default.
    pub const PARTS: u64 = 16;
    /// The minimum size of a part, in bytes.
    const SMALLEST: u64 = 64 << 10;

    /// Parses `2g`, `48h`, `7d` or `0`.
    pub(crate) fn parse(text: &str) -> Result<Keep, String> {
        let expected = || "expected a size such as 2g, hours such as 48h, days such as 7d, or 0".to_owned();
        let hours = |text: &str, hours: u64| {
            let count = text.trim_end().parse::<u64>().ok().filter(|count| *count > 0)?;
            count.checked_mul(hours * 3600).map(Keep::Secs)
        };
        let text = text.to_ascii_lowercase();
        match (text.strip_suffix('h'), text.strip_suffix('d')) {
            (Some(count), _) => hours(count, 1).ok_or_else(expected),
            (_, Some(count)) => hours(count, 24).ok_or_else(expected),
            _ => match parse_bytes(&text).map_err(|_| expected())? as u64 {
                0 => Ok(Keep::All),
                bytes if bytes < Keep::PARTS * Keep::SMALLEST => Err("expected 1m or more".to_owned()),
                bytes => Ok(Keep::Bytes(bytes)),
            },
        }
    }

    /// Returns the bytes and the seconds after which a part ends; 0 means no limit. `bytes` and `secs` are
    /// the values of `MEMTRACE_ROTATE` and `MEMTRACE_ROTATE_SECS`. If `MEMTRACE_KEEP` sets a bound, the
    /// result is at most a quarter of it, because only whole parts can be removed.
    pub(crate) fn rotation(self, bytes: u64, secs: u64) -> (u64, u64) {
        match self {
            Keep::All => (bytes, secs),
            Keep::Bytes(all) if bytes == 0 => (all / Keep::PARTS, secs),
            Keep::Bytes(all) => (bytes.min(all / 4), secs),
            Keep::Secs(all) if secs == 0 => (bytes, all / Keep::PARTS),
            Keep::Secs(all) => (bytes, secs.min(all / 4)),
        }
    }

    /// Returns the maximum size in bytes of the rows after the opening rows of a part. `rotation` is the size
    /// from [`Keep::rotation`], and `opening` is the size of the opening rows. Opening rows only repeat data
    /// of other parts. So if `MEMTRACE_KEEP` is in bytes, a part may have new rows of three times `opening`,
    /// even if `rotation` is smaller. This rule does not raise the result above the default size of a part.
    #[must_use]
    pub fn part_bytes(self, rotation: u64, opening: u64) -> u64 {
        match self {
            Keep::Bytes(all) => rotation.max(opening.saturating_mul(3).min(all / Keep::PARTS)),
            Keep::All | Keep::Secs(_) => rotation,
        }
    }
}

/// Formats the value as the variable spells it; empty for all.
impl fmt::Display for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Keep::All => Ok(()),
            Keep::Bytes(bytes) => match (bytes.is_multiple_of(1 << 30), bytes.is_multiple_of(1 << 20)) {
                (true, _) => write!(f, "{}g", bytes >> 30),
                (_, true) => write!(f, "{}m", bytes >> 20),
                _ => write!(f, "{bytes}"),
            },
            Keep::Secs(secs) => write!(f, "{}h", secs / 3600),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_are_read_and_written() {
        for (text, keep, written) in [
            ("0", Keep::All, ""),
            ("2g", Keep::Bytes(2 << 30), "2g"),
            ("1.5 GiB", Keep::Bytes(3 << 29), "1536m"),
            ("48h", Keep::Secs(48 * 3600), "48h"),
            ("7D", Keep::Secs(7 * 24 * 3600), "168h"),
        ] {
            assert_eq!(Keep::parse(text), Ok(keep), "{text}");
            assert_eq!(keep.to_string(), written);
        }
        for text in ["", "h", "0h", "-1h", "1.5h", "much", "99999999999999999999d", "1k", "1048575"] {
            assert!(Keep::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn what_stays_has_several_parts() {
        assert_eq!(Keep::All.rotation(5, 7), (5, 7));
        assert_eq!(Keep::Bytes(2 << 30).rotation(0, 0), (128 << 20, 0));
        assert_eq!(Keep::Bytes(2 << 30).rotation(1 << 20, 60), (1 << 20, 60));
        assert_eq!(Keep::Bytes(2 << 30).rotation(4 << 30, 0), (512 << 20, 0));
        assert_eq!(Keep::Secs(3600).rotation(0, 0), (0, 225));
        assert_eq!(Keep::Secs(3600).rotation(1 << 20, 86_400), (1 << 20, 900));
    }

    #[test]
    fn a_part_has_more_than_what_it_repeats() {
        let (keep, small, usual) = (Keep::Bytes(2 << 30), 1 << 20, 128 << 20);
        assert_eq!(keep.part_bytes(small, 1000), small);
        assert_eq!(keep.part_bytes(small, 5 << 20), 15 << 20);
        assert_eq!(keep.part_bytes(small, 1 << 30), usual);
        assert_eq!(keep.part_bytes(usual, 1 << 30), usual);
        assert_eq!(keep.part_bytes(4 * usual, u64::MAX), 4 * usual);
        assert_eq!(Keep::Secs(60).part_bytes(0, u64::MAX), 0);
        assert_eq!(Keep::All.part_bytes(small, u64::MAX), small);
    }
}
