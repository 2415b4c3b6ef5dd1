//! Checks a request for a recipe in the user's Python, which has the packages and finds the model.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};

const SCRIPT: &str = include_str!("model_check.py");

/// What the script `model_check.py` checks.
pub(crate) struct ModelCheck<'a> {
    /// The name of the model, or its folder.
    pub(crate) model: &'a str,
    /// The lengths of sequences, or the widths of images.
    pub(crate) lengths: &'a [u64],
    /// True if the code that comes with a configuration may run.
    pub(crate) trusts_code: bool,
    /// The constant that is searched for.
    pub(crate) searched: Option<&'a str>,
    /// The changed settings that are texts, with their values.
    pub(crate) texts: &'a Map<String, Value>,
    /// The package that builds the model. With `vllm`, transformers reads its configuration.
    pub(crate) library: &'a str,
    /// The packages that the script imports.
    pub(crate) packages: Vec<&'a str>,
}

/// What the script knows about the model of a request that can be met.
pub(crate) struct ModelFacts {
    /// The folder of the model in a pipeline of diffusers; otherwise empty.
    pub(crate) subfolder: String,
    /// The number of layers or blocks, if it is known.
    pub(crate) layers: Option<u64>,
}

impl ModelCheck<'_> {
    /// Runs the script in `python`, which writes the model's `config.json` into the new `folder`. `explain` turns the
    /// reason of a refusal into the text of the error.
    ///
    /// # Errors
    /// When the script cannot be run, or refuses the request.
    pub(super) fn run(
        &self,
        python: &Path,
        folder: &Path,
        explain: impl FnOnce(&str) -> String,
    ) -> Result<ModelFacts> {
        let request = json!({
            "model": self.model,
            "lengths": self.lengths,
            "trusts_code": self.trusts_code,
            "searched": self.searched,
            "texts": self.texts,
            "library": self.library,
            "packages": self.packages,
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
        Ok(ModelFacts { subfolder, layers: answer["layers"].as_u64() })
    }
}
