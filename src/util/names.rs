//! Measures the similarity of names.

/// The maximum length of a compared name, in bytes. Longer names occur only in damaged or hostile traces, and
/// comparing them would take too long.
const LONGEST: usize = 256;

/// Returns the number of edits between two names. Returns 256 without comparing them if one is longer than
/// 256 bytes.
#[must_use]
pub fn distance(a: &str, b: &str) -> usize {
    if a.len() > LONGEST || b.len() > LONGEST {
        return LONGEST;
    }
    strsim::levenshtein(a, b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_distance_of_two_names_is_the_number_of_edits() {
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("", "ab"), 2);
        assert_eq!(distance(&"a".repeat(10_000), "a"), LONGEST);
    }
}
