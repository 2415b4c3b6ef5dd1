//! The `key=value` words in the texts of `sample`, `host`, `end` and `mark` rows.

use crate::columns::MAX_BYTES;

/// Returns the `key=value` words of a text.
pub fn key_values(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.split(' ').filter_map(|word| word.split_once('='))
}

/// Returns the value of the first word with this key.
#[must_use]
pub fn value_of<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    key_values(text).find(|(known, _)| *known == key).map(|(_, value)| value)
}

/// Parses a number of bytes. Returns `None` for a number that no memory can have.
#[must_use]
pub fn bytes_of(value: &str) -> Option<i64> {
    value.parse::<i64>().ok().filter(|bytes| (0..MAX_BYTES.cast_signed()).contains(bytes))
}
