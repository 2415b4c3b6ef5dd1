//! Parses sizes as people write them.

/// Parses a size in bytes: `512`, `10k`, `2m`, `1.5g`, `80 GB`, `80GiB`. All units are powers of 1024.
///
/// Returns `None` for any other form, a negative number, or a size of 2⁶³ bytes or more.
///
/// ```
/// assert_eq!(memtrace_util::size::parse("80 GB"), Some(80 << 30));
/// assert_eq!(memtrace_util::size::parse("80 apples"), None);
/// ```
#[must_use]
pub fn parse(text: &str) -> Option<u64> {
    let text = text.trim();
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor: u64 = match text[number.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kb" | "kib" => 1 << 10,
        "m" | "mb" | "mib" => 1 << 20,
        "g" | "gb" | "gib" => 1 << 30,
        "t" | "tb" | "tib" => 1 << 40,
        _ => return None,
    };
    let number = number.trim();
    // No sign and no exponent, which a number may have in Rust.
    if !number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') {
        return None;
    }
    let bytes = match number.parse::<u64>() {
        Ok(whole) => whole.checked_mul(factor)?,
        Err(_) => {
            let bytes = number.parse::<f64>().ok()? * factor as f64;
            // `as` saturates, so a value that is too large stays too large and is rejected below.
            bytes as u64
        }
    };
    i64::try_from(bytes).ok().map(i64::cast_unsigned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_binary_units_in_any_spelling() {
        for (text, bytes) in [
            ("512", 512),
            ("0", 0),
            ("64m", 64 << 20),
            ("500 MB", 500 << 20),
            ("512MiB", 512 << 20),
            ("1.5 GiB", 3 << 29),
            ("2kb", 2048),
            ("24b", 24),
            (".5g", 1 << 29),
            ("5.", 5),
            ("9007199254740993", 9_007_199_254_740_993),
        ] {
            assert_eq!(parse(text), Some(bytes), "{text}");
        }
        for text in [
            "",
            "g",
            "ib",
            "12 parsecs",
            "-1g",
            "99999999999t",
            "nan",
            "inf g",
            "1e3g",
            "+5g",
            ".g",
            "1e30",
            "9223372036854775808",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
