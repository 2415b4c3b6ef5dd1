//! The model that the user names, and the models whose configuration memtrace has.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use clap::ArgMatches;
use memtrace_util::names::distance;
use serde_json::{Map, Value};

use super::catalog::Recipe;
use super::model_check::{ModelCheck, ModelFacts};
use super::settings::{ChangedScript, quoted, setting, with};

/// The `config.json` of models, by their name on the Hugging Face hub, from whose pages they come.
const MODELS: &str = include_str!("models.json");

/// Returns the folder of a pipeline of diffusers that has this configuration, or an empty text for other
/// models.
fn folder_in_pipeline(config: &Value) -> &'static str {
    match config["_class_name"].as_str() {
        Some(class) if class.starts_with("UNet") => "unet",
        Some(_) => "transformer",
        None => "",
    }
}

/// Writes the configuration of a model that memtrace has into the new folder `own`. Returns the folder as text.
fn write_config(own: &Path, config: &Value) -> Result<String> {
    let part = own.join(folder_in_pipeline(config));
    fs::create_dir_all(&part)?;
    fs::write(part.join("config.json"), config.to_string())?;
    Ok(own.to_string_lossy().into_owned())
}

/// Returns the model with this name, or `None` if there is no such model. Case is ignored, and the owner may
/// be omitted.
fn find<'a>(models: &'a Map<String, Value>, name: &str) -> Option<(&'a String, &'a Value)> {
    let bare = |key: &str| key.rsplit('/').next().is_some_and(|last| last.eq_ignore_ascii_case(name));
    models.iter().find(|(key, _)| key.eq_ignore_ascii_case(name) || bare(key))
}

/// Returns the names of the three models with the most similar names, best match first.
fn nearest(models: &Map<String, Value>, name: &str) -> String {
    let bare = |name: &str| name.rsplit('/').next().unwrap_or(name).to_lowercase();
    let mut names: Vec<&String> = models.keys().collect();
    names.sort_by_key(|key| distance(&bare(key), &bare(name)));
    names.iter().take(3).map(|name| name.as_str()).collect::<Vec<_>>().join(", ")
}

/// The model that the user names.
pub(super) struct Model {
    pub(super) recipe: &'static Recipe,
    /// The model's name in the script.
    pub(super) name: String,
    /// The model's configuration, if memtrace has it.
    pub(super) config: Option<Value>,
    /// The names of the most similar models that memtrace has.
    pub(super) similar: String,
    pub(super) trusts_code: bool,
}

impl Model {
    pub(super) fn new(matches: &ArgMatches, recipe: &'static Recipe) -> Result<Model> {
        let given = matches.get_one::<String>("model").context("--recipe needs --model")?;
        let mut bundled: Map<String, Value> = serde_json::from_str(MODELS)?;
        bundled.retain(|_, config| recipe.suits(config));
        let found = if Path::new(given).exists() { None } else { find(&bundled, given) };
        Ok(Model {
            recipe,
            name: found.map_or_else(|| folder_of_config(given), |(name, _)| name.clone()),
            config: found.map(|(_, config)| config.clone()),
            similar: nearest(&bundled, given),
            trusts_code: matches.get_flag("trust-remote-code"),
        })
    }

    /// Checks in the user's Python that the recipe can have this model, these lengths and the changed settings.
    /// Writes the model's configuration into the new `folder`, and what memtrace has of it into `scratch`.
    pub(super) fn check(
        &self,
        python: &Path,
        scratch: &Path,
        folder: &Path,
        lengths: &[u64],
        changed: &ChangedScript,
    ) -> Result<ModelFacts> {
        let given = match &self.config {
            Some(config) => write_config(&scratch.join("bundled"), config)?,
            None => self.name.clone(),
        };
        let mut packages = vec!["torch", self.recipe.library];
        packages.extend(self.recipe.packages);
        let searched = changed.searched.as_deref();
        if setting(&changed.script, "LIGER") == "True" || searched == Some("LIGER") {
            packages.push("liger_kernel");
        }
        let question = ModelCheck {
            model: &given,
            lengths,
            trusts_code: self.trusts_code,
            searched,
            texts: &changed.texts,
            library: self.recipe.library,
            packages,
        };
        question.run(python, folder, |why| {
            let is_unknown = why.contains("no config.json was found");
            let similar = is_unknown.then(|| format!("; memtrace has {}", self.similar));
            format!("{}{}", why.replace(&given, &self.name), similar.unwrap_or_default())
        })
    }

    /// Returns the script with the constants of this model, and with the title at its top.
    pub(super) fn fill(&self, script: &str, facts: &ModelFacts) -> String {
        // Quote the name: otherwise, the name of a folder could end the Python string at the top of the script.
        let name = quoted(&self.name);
        let script = with(script, "MODEL", &name);
        let script = with(&script, "TRUST_REMOTE_CODE", if self.trusts_code { "True" } else { "False" });
        let script = with(&script, "SUBFOLDER", &quoted(&facts.subfolder));
        let Recipe { title, name: recipe, .. } = self.recipe;
        let note = if self.recipe.trains() { " It neither evaluates nor resumes." } else { "" };
        let title = format!("{title} of {name}, written by memtrace fit --recipe {recipe}.{note}");
        script.replacen("TITLE", &title, 1)
    }
}

/// Returns the folder of a model that is given as the path of its `config.json`, which no library loads as a model.
/// Any other name is returned as it is.
fn folder_of_config(given: &str) -> String {
    let path = Path::new(given);
    let is_config = path.file_name().is_some_and(|name| name == "config.json") && path.is_file();
    match path.parent() {
        Some(folder) if is_config && folder.as_os_str().is_empty() => ".".to_owned(),
        Some(folder) if is_config => folder.to_string_lossy().into_owned(),
        _ => given.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_found_without_its_owner() {
        let models: Map<String, Value> = serde_json::from_str(MODELS).unwrap();
        assert_eq!(find(&models, "qwen3-8b").unwrap().0, "Qwen/Qwen3-8B");
        assert!(find(&models, "Qwen/Qwen3-9B").is_none());
        assert!(nearest(&models, "Qwen/Qwen3-9B").contains("Qwen/Qwen3-8B"));
    }

    #[test]
    fn a_model_is_the_folder_of_its_configuration() {
        let folder = tempfile::tempdir().unwrap();
        let given = folder.path().join("config.json").to_string_lossy().into_owned();
        assert_eq!(folder_of_config(&given), given);
        fs::write(&given, "{}").unwrap();
        assert_eq!(folder_of_config(&given), folder.path().to_string_lossy());
        assert_eq!(folder_of_config("org/model"), "org/model");
    }
}
