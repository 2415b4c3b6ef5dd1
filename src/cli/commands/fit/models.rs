//! The models whose configuration memtrace has, for `memtrace fit --recipe`.

use std::fs;
use std::path::Path;

use anyhow::Result;
use memtrace_util::names::distance;
use serde_json::{Map, Value};

/// The `config.json` of models, by their name on the Hugging Face hub, from whose pages they come.
pub(super) const MODELS: &str = include_str!("recipes/models.json");

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
pub(super) fn write_config(own: &Path, config: &Value) -> Result<String> {
    let part = own.join(folder_in_pipeline(config));
    fs::create_dir_all(&part)?;
    fs::write(part.join("config.json"), config.to_string())?;
    Ok(own.to_string_lossy().into_owned())
}

/// Returns the model with this name, or `None` if there is no such model. Case is ignored, and the owner may
/// be omitted.
pub(super) fn find<'a>(models: &'a Map<String, Value>, name: &str) -> Option<(&'a String, &'a Value)> {
    let bare = |key: &str| key.rsplit('/').next().is_some_and(|last| last.eq_ignore_ascii_case(name));
    models.iter().find(|(key, _)| key.eq_ignore_ascii_case(name) || bare(key))
}

/// Returns the names of the three models with the most similar names, best match first.
pub(super) fn nearest(models: &Map<String, Value>, name: &str) -> String {
    let bare = |name: &str| name.rsplit('/').next().unwrap_or(name).to_lowercase();
    let mut names: Vec<&String> = models.keys().collect();
    names.sort_by_key(|key| distance(&bare(key), &bare(name)));
    names.iter().take(3).map(|name| name.as_str()).collect::<Vec<_>>().join(", ")
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
}
