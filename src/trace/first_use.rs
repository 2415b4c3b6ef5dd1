//! The mark that records when a process first uses a GPU. Formats and parses its name.

use std::fmt;

const START: &str = "first use of GPU ";

/// The first use of a device by a process that uses several. Its stack has the Python line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FirstUse {
    /// The CUDA ordinal.
    pub device: i32,
}

impl FirstUse {
    /// Parses the name of a mark.
    #[must_use]
    pub fn parse(name: &str) -> Option<FirstUse> {
        let device = name.strip_prefix(START)?.parse().ok()?;
        Some(FirstUse { device })
    }
}

impl fmt::Display for FirstUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{START}{}", self.device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_first_use_is_parsed_again() {
        let used = FirstUse { device: 3 };
        assert_eq!(FirstUse::parse(&used.to_string()), Some(used));
        assert_eq!(FirstUse::parse("first use of GPU"), None);
        assert_eq!(FirstUse::parse("first use of GPU x"), None);
    }
}
