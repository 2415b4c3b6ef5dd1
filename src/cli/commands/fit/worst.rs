//! `--worst`: the largest input of a trace is the case to plan for.

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::{Arg, ArgMatches, value_parser};
use memtrace_analysis::options::Options;
use memtrace_analysis::render::numbers::count;
use memtrace_analysis::reports;
use memtrace_trace::form::Form;
use serde_json::Value;

use super::places;
use crate::{terminal, trace_input};

/// The start of the placeholder for a dimension of the input: `{dim0}`.
const PLACE: &str = "{dim";

/// Returns the option `--worst`.
pub(super) fn argument() -> Arg {
    Arg::new("worst")
        .long("worst")
        .value_name("TRACE")
        .value_parser(value_parser!(PathBuf))
        .conflicts_with("seq")
        .help(
            "Plan for the largest input in this trace: {dim0}, {dim1}, ... in the command stand for its \
             dimensions; a recipe gets its last one as --seq",
        )
}

/// The largest input of a trace.
#[derive(Debug)]
pub(super) struct Worst {
    /// The input as it is shown, such as `int64 [1x8192] of GPT, step 2,321`.
    shown: String,
    /// The sizes of its dimensions.
    dimensions: Vec<i64>,
}

impl Worst {
    /// Returns the largest input in the trace of the option, or `None` without the option.
    ///
    /// # Errors
    /// When the trace cannot be read, or it has no input.
    pub(super) fn new(matches: &ArgMatches) -> Result<Option<Worst>> {
        let Some(trace) = matches.get_one::<PathBuf>("worst") else { return Ok(None) };
        let report = reports::find("summary").context("there is no summary")?;
        let input = trace_input::open(trace, matches, true)?;
        let answer = reports::answer(report, &[input], &Options::default())?;
        let processes = answer.json["processes"].as_array();
        let inputs =
            processes.into_iter().flatten().filter_map(|process| Worst::of(&process["largest_input"]));
        let Some(worst) = inputs.max_by_key(Worst::elements) else {
            bail!(
                "--worst {}: no input of a model is in this trace; inputs are recorded for models in Python \
                 (not with MEMTRACE_MODULES=0)",
                trace.display()
            );
        };
        terminal::say(&format!("planning for the largest input of {}: {}", trace.display(), worst.shown));
        Ok(Some(worst))
    }

    /// Returns the input that `summary --json` shows as a process's `largest_input`.
    fn of(found: &Value) -> Option<Worst> {
        let text = |key: &str| found.get(key).and_then(Value::as_str);
        let (dtype, shape, model) = (text("dtype")?, text("shape")?, text("model")?);
        let step = found.get("step").and_then(Value::as_u64);
        let when = step.map_or("before the first step".to_owned(), |step| format!("step {}", count(step)));
        Some(Worst {
            shown: format!("{dtype} {shape} of {model}, {when}"),
            dimensions: Form { dtype, shape }.dims()?,
        })
    }

    fn elements(&self) -> i64 {
        self.dimensions.iter().fold(1, |product: i64, size| product.saturating_mul(*size))
    }

    /// Returns the last dimension, which is the length of a sequence or the width of an image.
    ///
    /// # Errors
    /// When the input is a single number.
    pub(super) fn length(&self) -> Result<u64> {
        let last = self.dimensions.last().and_then(|last| u64::try_from(*last).ok());
        last.filter(|last| *last > 0)
            .with_context(|| format!("--worst: {} has no length; name lengths with --seq", self.shown))
    }

    /// Returns the words of a command with the dimensions in their places.
    ///
    /// # Errors
    /// When no word has a place for a dimension, or the input does not have the dimension.
    pub(super) fn fill(&self, words: &[OsString]) -> Result<Vec<OsString>> {
        let last = self.dimensions.len().saturating_sub(1);
        if !words.iter().any(|word| word.to_string_lossy().contains(PLACE)) {
            bail!(
                "--worst: the command has no place for the input, {}; write {PLACE}0}} to {PLACE}{last}}} where \
                 its dimensions go, such as --seq {PLACE}{last}}}",
                self.shown
            );
        }
        let numbers: Vec<(String, String)> = self
            .dimensions
            .iter()
            .enumerate()
            .map(|(at, size)| (format!("{PLACE}{at}}}"), size.to_string()))
            .collect();
        let numbers: Vec<(&str, &str)> =
            numbers.iter().map(|(place, size)| (place.as_str(), size.as_str())).collect();
        let filled: Vec<OsString> = words.iter().map(|word| places::replace(word, &numbers)).collect();
        match filled.iter().map(|word| word.to_string_lossy()).find(|word| word.contains(PLACE)) {
            Some(word) => bail!("--worst: {word}: the input, {}, has the dimensions 0 to {last}", self.shown),
            None => Ok(filled),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn words(text: &str) -> Vec<OsString> {
        text.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn the_largest_input_fills_its_places() {
        let worst = Worst::of(&json!({"step": 2321, "dtype": "int64", "shape": "[4x8192]", "model": "GPT"}));
        let worst = worst.unwrap();
        assert_eq!(worst.shown, "int64 [4x8192] of GPT, step 2,321");
        assert_eq!(worst.length().unwrap(), 8192);
        let filled = worst.fill(&words("t.py --batch {} --seq={dim1} {dim0}x{dim1}")).unwrap();
        assert_eq!(filled, words("t.py --batch {} --seq=8192 4x8192"));
        let error = worst.fill(&words("t.py {dim2}")).unwrap_err().to_string();
        assert!(error.contains("{dim2}: the input, int64 [4x8192]"), "{error}");
        let error = worst.fill(&words("t.py {}")).unwrap_err().to_string();
        assert!(error.contains("write {dim0} to {dim1} where its dimensions go"), "{error}");
    }

    #[test]
    fn an_input_without_sizes_cannot_be_planned_for() {
        assert!(Worst::of(&Value::Null).is_none());
        assert!(Worst::of(&json!({"step": 1, "dtype": "int64", "shape": "?", "model": "GPT"})).is_none());
        let one = Worst::of(&json!({"step": null, "dtype": "int64", "shape": "[]", "model": "GPT"})).unwrap();
        assert_eq!(one.shown, "int64 [] of GPT, before the first step");
        assert!(one.length().is_err());
    }
}
