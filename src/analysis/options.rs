//! The options of reports and exports, and the parsers of their values.

use std::collections::BTreeMap;

use memtrace_trace::units::Unit;

use crate::error::{Error, Result};
use crate::render::formats::Form;
use crate::render::printer::Printer;

/// An option of a report or an export, in addition to the shared ones.
#[derive(Clone, Copy, Debug)]
pub struct Flag {
    /// The long name, without dashes.
    pub name: &'static str,
    /// The name of the option's value in the help, or `None` for a switch.
    pub value: Option<&'static str>,
    /// The default value, or an empty text.
    pub default: &'static str,
    /// The valid values. Empty if any value is valid.
    pub choices: &'static [&'static str],
    /// The help text, in one line.
    pub help: &'static str,
}

impl Flag {
    /// Returns a switch, which is an option without a value.
    #[must_use]
    pub const fn switch(name: &'static str, help: &'static str) -> Flag {
        Flag { name, value: None, default: "", choices: &[], help }
    }
}

/// The shared options, and the options of one report or export, by name.
///
/// `memtrace peak --by category --top 1`:
///
/// ```
/// use memtrace_analysis::options::Options;
/// use memtrace_analysis::read::input::Input;
/// use memtrace_analysis::reports;
///
/// # let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/gpt");
/// let values = [("by", "category".to_owned())].into();
/// let options = Options { top: Some(1), values, ..Options::default() };
/// let peak = reports::find("peak").expect("a report of this name");
/// let answer = reports::answer(peak, &[Input::open(&folder)?], &options)?;
/// assert_eq!(answer.to_json("peak")["groups"][0]["key"], "activation");
/// # Ok::<(), memtrace_analysis::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The only device to report on, or `None` for all devices.
    pub device: Option<i32>,
    /// The maximum number of lines of a list, or `None` for the report's default.
    pub top: Option<usize>,
    /// The unit for bytes.
    pub units: Unit,
    /// The part of the trace that is reported on.
    pub window: Window,
    /// If true, lines that are not rows are skipped and counted, and a file with a read error is read up to it. If
    /// false, the first such line or read error is an error.
    pub lenient: bool,
    /// If true, the text has colors and bold text.
    pub paint: bool,
    /// The width of the terminal in columns, or `None` without a terminal.
    pub width: Option<usize>,
    /// The form of the text.
    pub form: Form,
    /// The options of the report or export, by name.
    pub values: BTreeMap<&'static str, String>,
}

impl Options {
    /// Returns an empty printer in the form that these options request.
    #[must_use]
    pub fn printer(&self) -> Printer {
        Printer::new(self.paint, self.width).in_form(self.form)
    }

    /// Returns the value of the option `name`, or an empty text if it was not given and has no default.
    #[must_use]
    pub fn text(&self, name: &str) -> &str {
        self.values.get(name).map_or("", String::as_str)
    }

    /// Returns true if the switch `name` was given.
    #[must_use]
    pub fn is_set(&self, name: &str) -> bool {
        self.values.contains_key(name)
    }

    /// Returns the value of `name` as a number of at least 1, or `None` if it was not given.
    ///
    /// # Errors
    /// When the value is not a number of at least 1.
    pub fn count(&self, name: &str) -> Result<Option<usize>> {
        match self.number(name)? {
            Some(0) => Err(Error::usage(format!("--{name} 0: expected a number from 1"))),
            number => Ok(number),
        }
    }

    /// Returns the value of `name` as a number, or `None` if it was not given.
    ///
    /// # Errors
    /// When the value is not a number.
    pub fn number(&self, name: &str) -> Result<Option<usize>> {
        match self.text(name) {
            "" => Ok(None),
            text => match text.parse() {
                Ok(number) => Ok(Some(number)),
                Err(_) => Err(Error::usage(format!("--{name} {text}: expected a number"))),
            },
        }
    }
}

/// The part of a trace in which peaks are searched, which is a range of time and a range of steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// The start, in ns since the start of the trace.
    pub from_ns: i64,
    /// The end (inclusive), in ns since the start of the trace.
    pub to_ns: i64,
    /// The first step.
    pub from_step: i64,
    /// The last step (inclusive).
    pub to_step: i64,
}

impl Default for Window {
    fn default() -> Self {
        Window { from_ns: i64::MIN, to_ns: i64::MAX, from_step: i64::MIN, to_step: i64::MAX }
    }
}

impl Window {
    /// Returns true if the window extends to the end of the trace.
    pub(crate) fn is_open(&self) -> bool {
        self.to_ns == i64::MAX && self.to_step == i64::MAX
    }

    /// Returns true if a row at `ts_ns` in `step` is in the window.
    pub(crate) fn has(&self, ts_ns: i64, step: i64) -> bool {
        (self.from_ns..=self.to_ns).contains(&ts_ns) && (self.from_step..=self.to_step).contains(&step)
    }
}

/// Parses `T0:T1`, where each time is a time since the start of the trace, such as `1.5s`, `200ms` or `3`
/// (seconds), or is empty. Returns ns.
///
/// # Errors
/// When the text has another form; the error names the valid one.
pub fn parse_window(text: &str) -> Result<(i64, i64)> {
    let bad = || Error::usage(format!("--window {text}: expected T0:T1, such as 1.5s:2s, 200ms: or :3"));
    let (from, to) = text.split_once(':').ok_or_else(bad)?;
    let time = |part: &str, open: i64| -> Result<i64> {
        let part = part.trim();
        if part.is_empty() {
            return Ok(open);
        }
        let digits = part.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let scale = match &part[digits.len()..] {
            "" | "s" => 1e9,
            "ms" => 1e6,
            "us" => 1e3,
            "ns" => 1.0,
            "min" | "m" => 60e9,
            _ => return Err(bad()),
        };
        match digits.trim().parse::<f64>() {
            Ok(n) if n.is_finite() => Ok((n * scale).round() as i64),
            _ => Err(bad()),
        }
    };
    let window = (time(from, i64::MIN)?, time(to, i64::MAX)?);
    if window.0 > window.1 {
        return Err(Error::usage(format!("--window {text}: it ends before it starts")));
    }
    Ok(window)
}

/// Parses a range of steps with both ends inclusive: `A:B`, `A:`, `:B` or `A`.
///
/// ```
/// use memtrace_analysis::options::{parse_steps, parse_window};
///
/// assert_eq!(parse_steps("3:5")?, (3, 5));
/// assert_eq!(parse_steps("3:")?, (3, i64::MAX));
/// assert_eq!(parse_window("200ms:1.5s")?, (200_000_000, 1_500_000_000));
/// # Ok::<(), memtrace_analysis::Error>(())
/// ```
///
/// # Errors
/// When the text has another form; the error names the valid one.
pub fn parse_steps(text: &str) -> Result<(i64, i64)> {
    let bad = || Error::usage(format!("--step {text}: expected A:B, such as 3:5, 3: or 3"));
    let step = |part: &str, open: i64| -> Result<i64> {
        if part.is_empty() { Ok(open) } else { part.trim().parse().map_err(|_| bad()) }
    };
    let steps = match text.split_once(':') {
        Some((from, to)) => (step(from, i64::MIN)?, step(to, i64::MAX)?),
        None => {
            let only = text.trim().parse().map_err(|_| bad())?;
            (only, only)
        }
    };
    if steps.0 > steps.1 {
        return Err(Error::usage(format!("--step {text}: it ends before it starts")));
    }
    Ok(steps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_and_steps_are_parsed_or_refused() {
        assert_eq!(parse_window("1.5s:2").unwrap(), (1_500_000_000, 2_000_000_000));
        assert_eq!(parse_window("200ms:").unwrap(), (200_000_000, i64::MAX));
        // The product is 1043061143.9999999.
        assert_eq!(parse_window("1.043061144s:").unwrap(), (1_043_061_144, i64::MAX));
        assert!(parse_window("3").is_err());
        assert!(parse_window("2:1").unwrap_err().to_string().contains("ends before"));
        assert_eq!(parse_steps("3").unwrap(), (3, 3));
        assert_eq!(parse_steps(":5").unwrap(), (i64::MIN, 5));
        assert!(parse_steps("last").is_err());
    }
}
