//! Checks a request for a recipe in the user's Python, which has the packages and finds the model.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};

const SCRIPT: &str = include_str!("recipes/check.py");

/// What the script `check.py` is asked.
pub(super) struct Question<'a> {
    /// The name of the model, or its folder.
    pub(super) model: &'a str,
    /// The lengths of sequences, or the widths of images.
    pub(super) lengths: &'a [u64],
    /// True if the code that comes with a configuration may run.
    pub(super) trusts_code: bool,
    /// The constant that is searched for.
    pub(super) searched: Option<&'a str>,
    /// The changed settings that are texts, with their values.
    pub(super) texts: &'a Map<String, Value>,
    /// The package that builds the model. With `vllm`, transformers reads its configuration.
    pub(super) library: &'a str,
    /// The packages that the script imports.
    pub(super) packages: Vec<&'a str>,
}

/// What the script knows about the model of a request that can be met.
pub(super) struct Facts {
    /// The folder of the model in a pipeline of diffusers; otherwise empty.
    pub(super) subfolder: String,
    /// The number of layers or blocks, if it is known.
    pub(super) layers: Option<u64>,
}

/// Runs the script in `python`, which writes the model's `config.json` into the new `folder`. `explain` turns the
/// reason of a refusal into the text of the error.
///
/// # Errors
/// When the script cannot be run, or refuses the request.
pub(super) fn check(
    python: &Path,
    folder: &Path,
    question: &Question<'_>,
    explain: impl FnOnce(&str) -> String,
) -> Result<Facts> {
    let request = json!({
        "model": question.model,
        "lengths": question.lengths,
        "trusts_code": question.trusts_code,
        "searched": question.searched,
        "texts": question.texts,
        "library": question.library,
        "packages": question.packages,
    });
    let mut command = Command::new(python);
    command.args(["-c", SCRIPT]).arg(folder).arg(request.to_string()).stdin(Stdio::null());
    let output = command.output().with_context(|| format!("cannot run {}", python.display()))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        bail!("{}", explain(text.lines().last().unwrap_or("the check of the model failed")));
    }
    // The libraries may print lines of their own before.
    let text = String::from_utf8_lossy(&output.stdout);
    let answer: Value = serde_json::from_str(text.lines().last().unwrap_or_default())
        .with_context(|| format!("{}: the check of the model printed no answer", python.display()))?;
    let subfolder = answer["subfolder"].as_str().unwrap_or_default().to_owned();
    Ok(Facts { subfolder, layers: answer["layers"].as_u64() })
}
