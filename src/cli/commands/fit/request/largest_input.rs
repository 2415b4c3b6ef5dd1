//! `--worst`: the largest input of a trace is the case to plan for.

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::{Arg, ArgMatches, value_parser};
use memtrace_analysis::options::Options;
use memtrace_analysis::reports;
use memtrace_trace::form::Form;
use serde_json::Value;

use super::placeholders;
use crate::{terminal, trace_input};

/// The start of the placeholder for a dimension of the input: `{dim0}`.
const PLACE: &str = "{dim";

/// Returns the option `--worst`.
pub(crate) fn argument() -> Arg {
    Arg::new("worst").long("worst").value_name("TRACE").value_parser(value_parser!(PathBuf)).help(
        "Plan for the largest input in this trace. In the command, {dim0}, {dim1} and so on are the sizes \
             of its dimensions. For a recipe, the last size is --seq",
    )
}

/// The largest input of a trace.
#[derive(Debug)]
pub(crate) struct LargestInput {
    /// The input as it is shown, such as `int64 [1x8192] of GPT`.
    shown: String,
    dtype: String,
    /// The largest size of each dimension. It may come from another input of the model.
    sizes: Vec<i64>,
    elements: i64,
}

impl LargestInput {
    /// Returns the largest input in the trace of the option, or `None` without the option.
    ///
    /// # Errors
    /// When the trace cannot be read, or it has no input.
    pub(crate) fn new(matches: &ArgMatches) -> Result<Option<LargestInput>> {
        let Some(trace) = matches.get_one::<PathBuf>("worst") else { return Ok(None) };
        let report = reports::find("summary").context("there is no summary")?;
        let input = trace_input::open_all(trace, true)?;
        let answer = reports::answer(report, &[input], &Options::default())?;
        let processes = answer.json["processes"].as_array();
        let inputs = processes
            .into_iter()
            .flatten()
            .filter_map(|process| LargestInput::from_json(&process["largest_input"]));
        let Some(worst) = inputs.max_by_key(|worst| worst.elements) else {
            bail!(
                "--worst {}: no input of a model is in this trace; inputs are recorded for models in Python \
                 (not with MEMTRACE_MODULES=0)",
                trace.display()
            );
        };
        terminal::say(&format!(
            "the largest input of {} is {}; planning for {}",
            trace.display(),
            worst.shown,
            worst.places().map(|(place, size)| format!("{place} = {size}")).collect::<Vec<_>>().join(", ")
        ));
        Ok(Some(worst))
    }

    /// Returns the input that `summary --json` shows as a process's `largest_input`.
    fn from_json(found: &Value) -> Option<LargestInput> {
        let text = |key: &str| found.get(key).and_then(Value::as_str);
        let (dtype, shape, model) = (text("dtype")?, text("shape")?, text("model")?);
        let sizes =
            found.get("largest_sizes")?.as_array()?.iter().map(Value::as_i64).collect::<Option<_>>()?;
        Some(LargestInput {
            shown: format!("{dtype} {shape} of {model}"),
            dtype: dtype.to_owned(),
            sizes,
            elements: Form { dtype, shape }.elements()?,
        })
    }

    /// Returns the placeholder and the size of each dimension.
    fn places(&self) -> impl Iterator<Item = (String, String)> {
        self.sizes.iter().enumerate().map(|(at, size)| (format!("{PLACE}{at}}}"), size.to_string()))
    }

    /// Returns the length of a sequence of tokens, or the width of an image with `is_image`: the last dimension.
    ///
    /// # Errors
    /// When the input does not have the form of tokens, or of images.
    pub(crate) fn length(&self, is_image: bool) -> Result<u64> {
        let is_tokens = self.dtype.contains("int") && self.sizes.len() == 2;
        let last = self.sizes.last().and_then(|last| u64::try_from(*last).ok()).filter(|last| *last > 0);
        match last {
            Some(last) if if is_image { self.sizes.len() == 4 } else { is_tokens } => Ok(last),
            _ => bail!(
                "--worst: the largest input, {}, is not a batch of {}; name the lengths with --seq",
                self.shown,
                if is_image { "images" } else { "tokens" }
            ),
        }
    }

    /// Returns the words of a command with the dimensions in their places.
    ///
    /// # Errors
    /// When no word has a place for a dimension, or the input does not have the dimension.
    pub(crate) fn fill(&self, words: &[OsString]) -> Result<Vec<OsString>> {
        let last = self.sizes.len().saturating_sub(1);
        if !words.iter().any(|word| place_in(&word.to_string_lossy()).is_some()) {
            bail!(
                "--worst: the command has no place for the input, {}; write {PLACE}0}} to {PLACE}{last}}} where \
                 its dimensions go, such as --seq {PLACE}{last}}}",
                self.shown
            );
        }
        let places: Vec<(String, String)> = self.places().collect();
        let numbers: Vec<(&str, &str)> =
            places.iter().map(|(place, size)| (place.as_str(), size.as_str())).collect();
        let filled: Vec<OsString> = words.iter().map(|word| placeholders::replace(word, &numbers)).collect();
        match filled.iter().find_map(|word| place_in(&word.to_string_lossy()).map(str::to_owned)) {
            Some(place) => {
                bail!("--worst: {place}: the input, {}, has the dimensions 0 to {last}", self.shown)
            }
            None => Ok(filled),
        }
    }
}

/// Returns the first placeholder for a dimension in a word. Other braces belong to the program.
fn place_in(word: &str) -> Option<&str> {
    word.match_indices(PLACE).find_map(|(start, _)| {
        let digits = word[start + PLACE.len()..].split_once('}')?.0;
        let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        is_number.then(|| &word[start..start + PLACE.len() + digits.len() + 1])
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn words(text: &str) -> Vec<OsString> {
        text.split(' ').map(OsString::from).collect()
    }

    fn worst(dtype: &str, shape: &str, sizes: &[i64]) -> Option<LargestInput> {
        LargestInput::from_json(
            &json!({"step": 7, "dtype": dtype, "shape": shape, "model": "GPT", "largest_sizes": sizes}),
        )
    }

    #[test]
    fn the_largest_sizes_fill_their_places() {
        let worst = worst("int64", "[128x32]", &[128, 3500]).unwrap();
        assert_eq!((worst.length(false).unwrap(), worst.elements), (3500, 4096));
        let filled =
            worst.fill(&words("t.py --batch {} --seq={dim1} {dim0}x{dim1} {dimension} {dim}")).unwrap();
        assert_eq!(filled, words("t.py --batch {} --seq=3500 128x3500 {dimension} {dim}"));
        let error = worst.fill(&words("t.py {dim2}")).unwrap_err().to_string();
        assert!(
            error.contains("{dim2}: the input, int64 [128x32] of GPT, has the dimensions 0 to 1"),
            "{error}"
        );
        let error = worst.fill(&words("t.py {} {dimension}")).unwrap_err().to_string();
        assert!(error.contains("write {dim0} to {dim1} where its dimensions go"), "{error}");
    }

    #[test]
    fn only_tokens_and_images_have_a_length() {
        let images = worst("float32", "[8x3x224x224]", &[8, 3, 224, 224]).unwrap();
        assert_eq!(images.length(true).unwrap(), 224);
        assert!(images.length(false).unwrap_err().to_string().contains("is not a batch of tokens"));
        assert!(worst("float32", "[4x2048x4096]", &[4, 2048, 4096]).unwrap().length(false).is_err());
        assert!(worst("int64", "[4x1024]", &[4, 1024]).unwrap().length(true).is_err());
        assert!(worst("int64", "[]", &[]).unwrap().length(false).is_err());
        assert!(LargestInput::from_json(&Value::Null).is_none() && worst("int64", "?", &[]).is_none());
    }
}
