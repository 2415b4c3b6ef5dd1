//! Formats shares, counts, times and bars for people.

pub use memtrace_trace::counts::{count, counted};

/// Returns a bar for a share from 0 to 1, at most `width` cells long, in eighths of a cell.
#[must_use]
pub fn bar(share: f64, width: usize) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let eighths = (share.clamp(0.0, 1.0) * (width * 8) as f64).round() as usize;
    format!("{}{}", "█".repeat(eighths / 8), EIGHTHS[eighths % 8])
}

/// Returns a share from 0 to 1 as `12.3 %`.
#[must_use]
pub fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// Returns the change from `old` to `new` with its sign: `+12.3 %` or `0.0 %`. Returns `new` if only `old` is
/// 0, and `gone` if only `new` is 0.
#[must_use]
pub fn change(old: i64, new: i64) -> String {
    match (old, new) {
        (0, 0) => percent(0.0),
        (0, _) => "new".to_owned(),
        (_, 0) => "gone".to_owned(),
        _ => {
            let text = format!("{:+.1} %", share(new - old, old) * 100.0);
            // A change that rounds to zero has no sign.
            if matches!(text.as_str(), "+0.0 %" | "-0.0 %") { percent(0.0) } else { text }
        }
    }
}

/// Returns `part` divided by `whole`, or 0 if `whole` is 0.
#[must_use]
pub fn share(part: i64, whole: i64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// Returns a training step, or `-` before the first.
#[must_use]
pub fn step_or_dash(step: i64) -> String {
    if step < 0 { "-".to_owned() } else { step.to_string() }
}

/// Returns a duration, given in ns, in readable units: `412.0 ms`, `3.21 s`, `1 h 02 min`.
#[must_use]
pub fn duration(ns: i64) -> String {
    let s = ns as f64 / 1e9;
    match ns.abs() {
        0..1_000 => format!("{ns} ns"),
        1_000..1_000_000 => format!("{:.1} µs", ns as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} ms", ns as f64 / 1e6),
        1_000_000_000..120_000_000_000 => format!("{s:.2} s"),
        120_000_000_000..3_600_000_000_000 => {
            format!("{} min {:02} s", ns / 60_000_000_000, ns / 1_000_000_000 % 60)
        }
        _ => format!("{} h {:02} min", ns / 3_600_000_000_000, ns / 60_000_000_000 % 60),
    }
}

/// Returns a duration, given in ns, in seconds with all its digits: `0.412`, `3779`.
#[must_use]
pub fn seconds(ns: i64) -> String {
    let (sign, ns) = (if ns < 0 { "-" } else { "" }, ns.unsigned_abs());
    let text = format!("{sign}{}.{:09}", ns / 1_000_000_000, ns % 1_000_000_000);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Formats an ordinal number, such as `1st`, `12th` or `22nd`.
#[must_use]
pub fn nth(number: i64) -> String {
    let ending = match (number % 10, number % 100) {
        (_, 11..=13) => "th",
        (1, _) => "st",
        (2, _) => "nd",
        (3, _) => "rd",
        _ => "th",
    };
    format!("{number}{ending}")
}

/// Capitalizes the first letter of a text.
#[must_use]
pub fn upper_first(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_durations_and_bars_are_readable() {
        assert_eq!(duration(3_210_000_000), "3.21 s");
        assert_eq!(duration(3_725_000_000_000), "1 h 02 min");
        for (ns, text) in [
            (3_779_000_000_000, "3779"),
            (412_345_678, "0.412345678"),
            (10_000_000_000, "10"),
            (7, "0.000000007"),
            (-1_500_000_000, "-1.5"),
            (0, "0"),
        ] {
            assert_eq!(seconds(ns), text);
        }
        assert_eq!(percent(0.1234), "12.3 %");
        assert_eq!((change(100, 150).as_str(), change(100, 50).as_str()), ("+50.0 %", "-50.0 %"));
        assert_eq!((change(10_000, 10_001).as_str(), change(10_000, 9_999).as_str()), ("0.0 %", "0.0 %"));
        assert_eq!(
            (change(0, 5).as_str(), change(5, 0).as_str(), change(0, 0).as_str()),
            ("new", "gone", "0.0 %")
        );
        assert_eq!(
            [1, 2, 3, 4, 11, 12, 22, 103, 111].map(nth).join(" "),
            "1st 2nd 3rd 4th 11th 12th 22nd 103rd 111th"
        );
        assert_eq!(bar(0.5, 4), "██");
        assert_eq!(bar(0.03, 4), "▏");
    }
}
