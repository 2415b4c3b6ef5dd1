//! Formats counts for people: thousands separators, and a noun in the singular or plural.

/// Formats a count with thousands separators: `1,234,567`.
#[must_use]
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a count with its noun, which is given in the singular: `1 block`, `2,803 blocks`, `0 retries`.
#[must_use]
pub fn counted(number: u64, noun: &str) -> String {
    if number == 1 { format!("1 {noun}") } else { format!("{} {}", count(number), plural(noun)) }
}

/// Returns the plural of a regular noun, or of a phrase that ends in one.
fn plural(noun: &str) -> String {
    let ends_in = |ends: &[&str]| ends.iter().any(|end| noun.ends_with(end));
    match noun.strip_suffix('y') {
        Some(stem) if !ends_in(&["ay", "ey", "oy"]) => format!("{stem}ies"),
        _ if ends_in(&["s", "x", "ch", "sh"]) => format!("{noun}es"),
        _ => format!("{noun}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counted_noun_is_singular_for_one_only() {
        assert_eq!(count(0), "0");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(counted(1, "block"), "1 block");
        assert_eq!(counted(0, "allocation retry"), "0 allocation retries");
        assert_eq!(counted(1234, "process"), "1,234 processes");
        assert_eq!(counted(2, "key"), "2 keys");
        assert_eq!(counted(3, "free"), "3 frees");
    }
}
