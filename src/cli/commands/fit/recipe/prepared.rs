//! A recipe with the user's model and settings, ready to run: its script, and the command of its trials.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::ArgMatches;
use memtrace_trace::text::shell_word;
use serde_json::Value;

use super::catalog::Recipe;
use super::checks::{batch, check_new_file, check_ranks, check_settings, counts, lengths};
use super::model::Model;
use super::settings::{self, setting, shown, with, with_setting};
use crate::child_env::{Scratch, has_gpu, run_id};
use crate::commands::fit::request::candidates::listed;
use crate::commands::fit::request::largest_input::LargestInput;
use crate::commands::fit::request::placeholders::{Filling, LENGTH, VALUE};
use crate::search_path::find_program;

/// A recipe for a model, ready to run.
pub(crate) struct PreparedRecipe {
    recipe: &'static Recipe,
    /// The model's name in the script.
    model: String,
    /// The program and its arguments, with [`VALUE`] and [`LENGTH`] for the batch and the length.
    pub(crate) words: Vec<OsString>,
    pub(crate) lengths: Vec<u64>,
    script: String,
    /// The setting that is searched for; `None` if this is the batch.
    searched: Option<SearchedSetting>,
    /// The folder with the script and the model's `config.json`.
    _scratch: Scratch,
}

/// A setting that is searched for.
struct SearchedSetting {
    /// The constant in the script.
    name: String,
    /// The values to try if the user names none; `None` if the setting has no natural range.
    default_values: Option<Vec<String>>,
    /// The batch of all trials: the value of `--batch`, or else the batch in the script.
    batch: u64,
}

impl PreparedRecipe {
    /// Returns the request of the command line, or `None` without `--recipe`.
    ///
    /// # Errors
    /// When the request cannot be met. The message is one line.
    pub(crate) fn new(matches: &ArgMatches, worst: Option<&LargestInput>) -> Result<Option<PreparedRecipe>> {
        let Some(name) = matches.get_one::<String>("recipe") else { return Ok(None) };
        let recipe = Recipe::named(name).context("an unknown recipe")?;
        if let Some(file) = matches.get_one::<PathBuf>("write") {
            check_new_file(file)?;
        }
        let card = matches.get_one::<String>("phantom").map_or("", String::as_str);
        if card.is_empty() && !has_gpu() {
            bail!("this machine has no NVIDIA GPU; simulate one: --phantom h100-80g");
        }
        check_ranks(recipe, card, matches.contains_id("ranks"))?;
        let lengths = match worst {
            Some(worst) => vec![worst.length(recipe.is_of_images())?],
            None => {
                let list = matches.get_one::<String>("seq").map_or(recipe.length, String::as_str);
                lengths(list, recipe.length_option())?
            }
        };
        let listed = listed(matches)?;
        let changes: Vec<&String> = matches.get_many::<String>("set").into_iter().flatten().collect();
        let changed = settings::changed(recipe, &changes, &listed)?;
        let gpus = counts(card);
        check_settings(matches, recipe, &changed, &listed, &gpus)?;

        let model = Model::new(matches, recipe)?;
        let scratch = Scratch::new(&run_id())?;
        let folder = scratch.folder.join("model");
        let python = python().context("no python is on the PATH")?;
        let facts = model.check(&python, &scratch.folder, &folder, &lengths, &changed)?;
        let script = model.fill(&changed.script, &facts);
        let searched = changed.searched.map(|name| {
            let batch = batch(matches, &script);
            let default_values = settings::default_values(&name, batch, gpus.first().copied(), facts.layers);
            SearchedSetting { name, default_values, batch }
        });
        // Each value of a setting has a script of its own.
        let file = scratch.folder.join(if searched.is_some() { "recipe-{}.py" } else { "recipe.py" });
        let of_model = if recipe.library == "timm" { model.name.clone().into() } else { folder.into() };
        let mut words: Vec<OsString> = vec![python.into(), file.into()];
        words.extend(script_arguments(recipe, searched.as_ref()));
        words.extend(["--model".into(), of_model]);
        let request =
            PreparedRecipe { recipe, model: model.name, words, lengths, script, searched, _scratch: scratch };
        Ok(Some(request))
    }

    /// Returns true if the recipe starts a server.
    pub(crate) fn is_server(&self) -> bool {
        self.recipe.is_server()
    }

    /// Returns the setting that is searched for, as users write it; `None` if this is the batch.
    pub(crate) fn searched(&self) -> Option<String> {
        self.searched.as_ref().map(|searched| shown(&searched.name))
    }

    /// Returns the values to try if the user names none; `None` if there is no natural range.
    pub(crate) fn default_values(&self) -> Option<Vec<String>> {
        self.searched.as_ref()?.default_values.clone()
    }

    /// Returns the default of `--min` for a setting that is searched for and whose smallest value is 0.
    pub(crate) fn default_min(&self) -> Option<usize> {
        settings::default_min(&self.searched.as_ref()?.name)
    }

    /// Returns the script with a value of the setting that is searched for.
    fn script_with(&self, value: &str) -> Result<String> {
        match &self.searched {
            Some(searched) => with_setting(&self.script, &searched.name, value),
            None => Ok(self.script.clone()),
        }
    }

    /// Checks values of the setting that is searched for, or of the batch.
    ///
    /// # Errors
    /// When a value has the wrong kind.
    pub(crate) fn check(&self, mut values: impl Iterator<Item = String>) -> Result<()> {
        values.try_for_each(|value| match &self.searched {
            Some(_) => self.script_with(&value).map(drop),
            None if value.parse().is_ok_and(|batch: u64| batch > 0) => Ok(()),
            None => bail!("--values: `{value}` is not a batch; expected a whole number from 1"),
        })
    }

    /// Writes the script for the trials with a value, unless an earlier trial has it.
    ///
    /// # Errors
    /// When the script cannot be written.
    pub(crate) fn prepare(&self, value: &str) -> Result<()> {
        let name = self.words.get(1).map(|word| Filling::of_value(value).fill(word)).unwrap_or_default();
        if !Path::new(&name).exists() {
            fs::write(&name, self.script_with(value)?)?;
        }
        Ok(())
    }

    /// Returns vLLM's options for a length at which it has a cache of `tokens` tokens. `value` is the value of
    /// the setting that is searched for, if there is one. The number of requests is then at most that of its trials.
    pub(crate) fn flags(&self, length: u64, tokens: u64, value: &str) -> String {
        let script = self.script_with(value).unwrap_or_default();
        let setting = |name: &str| setting(&script, name).to_owned();
        let most_requests = self.searched.as_ref().map_or(u64::MAX, |searched| searched.batch);
        let mut flags = format!(
            "vllm serve {} --gpu-memory-utilization {} --max-model-len {length} --max-num-seqs {}",
            shell_word(&self.model),
            setting("UTILIZATION"),
            requests(tokens, length).min(most_requests)
        );
        for (name, option, default) in [
            (settings::GPUS, "--tensor-parallel-size", "1"),
            ("DTYPE", "--dtype", "auto"),
            ("QUANTIZATION", "--quantization", ""),
            ("CACHE_DTYPE", "--kv-cache-dtype", "auto"),
            ("CPU_OFFLOAD_GB", "--cpu-offload-gb", "0.0"),
        ] {
            if setting(name) != default {
                flags.push_str(&format!(" {option} {}", setting(name)));
            }
        }
        for (name, option) in [("EAGER", "--enforce-eager"), ("TRUST_REMOTE_CODE", "--trust-remote-code")] {
            if script.lines().any(|line| line == format!("{name} = True")) {
                flags.push_str(&format!(" {option}"));
            }
        }
        flags
    }

    /// Returns true if the number of GPUs of a server is searched for.
    pub(crate) fn searches_gpus(&self) -> bool {
        self.searched.as_ref().is_some_and(|searched| searched.name == settings::GPUS)
    }

    /// Returns all settings of the script, as users write them, with a value of what is searched for and a
    /// length.
    pub(crate) fn settings(&self, value: &str, length: u64) -> Value {
        let script = self.script_with(value).unwrap_or_default();
        // The script has no line for a setting that is off.
        let mut all = settings::json(&self.recipe.with_all_settings());
        all.extend(settings::json(&script));
        let batch = self.searched.as_ref().map_or_else(|| value.to_owned(), |one| one.batch.to_string());
        let name = self.recipe.length_option().trim_start_matches('-');
        all.insert("batch".to_owned(), batch.parse::<u64>().ok().into());
        all.insert(name.to_owned(), length.into());
        all.into()
    }

    /// Returns the unit of the lengths, in the plural.
    pub(crate) fn unit(&self) -> &'static str {
        if self.recipe.is_of_images() { "pixels" } else { "tokens" }
    }

    /// Writes the script with the value that was found, which is the batch unless a setting was searched for,
    /// and a length. Returns what it wrote, in words.
    ///
    /// # Errors
    /// When the file exists, or cannot be written.
    pub(crate) fn write(&self, file: &Path, value: &str, length: u64) -> Result<String> {
        let name = self.recipe.length_option().trim_start_matches('-').to_uppercase();
        let (batch, about) = match &self.searched {
            Some(SearchedSetting { name, batch, .. }) => {
                (batch.to_string(), format!("{} {value}, batch {batch}", shown(name)))
            }
            None => (value.to_owned(), format!("batch {value}")),
        };
        let script = with(&self.script_with(value)?, &name, &length.to_string());
        let script = with(&script, "BATCH", &batch);
        let mut new = fs::File::create_new(file).with_context(|| format!("--write {}", file.display()))?;
        std::io::Write::write_all(&mut new, script.as_bytes())?;
        Ok(format!("{about}, {length} {}", self.unit()))
    }
}

/// Returns the number of requests of `length` tokens that a server's cache of `tokens` tokens can hold, at
/// most vLLM's default.
pub(crate) fn requests(tokens: u64, length: u64) -> u64 {
    (tokens / length.max(1)).clamp(1, 256)
}

/// Returns the arguments of a recipe's script, with [`VALUE`] and [`LENGTH`] for the batch and the length.
fn script_arguments(recipe: &Recipe, searched: Option<&SearchedSetting>) -> Vec<OsString> {
    // `serve` is asked for one number at each length, and vLLM fills the card at any batch.
    let (batch, length) = match searched {
        Some(searched) => (Some(searched.batch.to_string()), LENGTH),
        None if recipe.is_server() => (None, VALUE),
        None => (Some(VALUE.to_owned()), LENGTH),
    };
    let mut words: Vec<OsString> = ["--random", recipe.length_option(), length].map(OsString::from).into();
    words.extend(batch.into_iter().flat_map(|batch| ["--batch".into(), batch.into()]));
    if !recipe.steps.is_empty() {
        words.extend(["--steps", recipe.steps].map(OsString::from));
    }
    words
}

/// Returns the first `python` on the PATH, or else the first `python3`.
fn python() -> Option<PathBuf> {
    ["python", "python3"].iter().find_map(|name| find_program(name.as_ref()))
}

#[cfg(test)]
mod tests {
    use super::super::model_check::ModelFacts;
    use super::*;

    #[test]
    fn a_server_gets_at_least_one_request_and_at_most_the_default_of_vllm() {
        assert_eq!(requests(168_800, 4096), 41);
        assert_eq!((requests(0, 4096), requests(100, 0), requests(u64::MAX, 1)), (1, 100, 256));
    }

    #[test]
    fn the_options_of_a_server_can_be_pasted_into_a_shell() {
        let request = |model: &str, trusts_code: bool, searched: Option<SearchedSetting>| {
            let recipe = Recipe::named("serve").unwrap();
            let (name, similar) = (model.to_owned(), String::new());
            let script = Model { recipe, name, config: None, similar, trusts_code }
                .fill(&recipe.script(|_| false), &ModelFacts { subfolder: String::new(), layers: None });
            let (words, lengths, model) = (Vec::new(), Vec::new(), model.to_owned());
            let _scratch = Scratch::new(&run_id()).unwrap();
            PreparedRecipe { recipe, model, words, lengths, script, searched, _scratch }
        };
        assert_eq!(
            request("/data/my model", false, None).flags(4096, 168_800, ""),
            "vllm serve '/data/my model' --gpu-memory-utilization 0.92 --max-model-len 4096 --max-num-seqs 41"
        );
        assert!(request("org/custom", true, None).flags(2, 2, "").ends_with(" --trust-remote-code"));
        // The trials of a search had at most 8 requests.
        let searched = SearchedSetting { name: settings::GPUS.to_owned(), default_values: None, batch: 8 };
        assert_eq!(
            request("org/model", false, Some(searched)).flags(4096, 168_800, "2"),
            "vllm serve org/model --gpu-memory-utilization 0.92 --max-model-len 4096 --max-num-seqs 8 \
             --tensor-parallel-size 2"
        );
    }
}
