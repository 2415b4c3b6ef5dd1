//! The settings of a recipe: the constants at the top of its script, which `--set` changes.

use anyhow::{Result, anyhow, bail};
use serde_json::{Map, Value};

use super::places::VALUE;
use super::recipes::Recipe;

/// The constants that other options set.
const RESERVED: [&str; 6] = ["MODEL", "SUBFOLDER", "BATCH", "SEQ", "SIZE", "TRUST_REMOTE_CODE"];
/// The settings that need less memory with a larger number. `--smallest` searches for these.
const SAVING: [&str; 5] = ["ACCUMULATION", "OFFLOADED_LAYERS", "GPUS", "CPU_OFFLOAD_GB", "STAGE"];
/// The largest whole number that a setting takes.
const MOST: u64 = 1 << 20;

/// The script of a recipe with the changes of `--set`.
pub(super) struct Changed {
    pub(super) script: String,
    /// The constant that has `{}` as its value; `None` without one.
    pub(super) searched: Option<String>,
    /// The values of the changed settings that are texts. The packages decide whether they are valid.
    pub(super) texts: Map<String, Value>,
}

/// Returns the script of a recipe with each change `NAME=VALUE`. `listed` has the values of `--values`, which
/// replace a `{}`.
///
/// # Errors
/// When a setting is unknown or its value has the wrong kind, or two settings have `{}`.
pub(super) fn changed<'a>(
    recipe: &Recipe,
    script: String,
    changes: impl Iterator<Item = &'a String>,
    listed: &[String],
) -> Result<Changed> {
    let mut all = Changed { script, searched: None, texts: Map::new() };
    for change in changes {
        let (name, old, value) = find(recipe, &all.script, change)?;
        let is_text = old.starts_with('"');
        if value == VALUE {
            if let Some(first) = all.searched.replace(name.clone()) {
                bail!("--set {change}: {{}} is {} already; search for one setting at a time", shown(&first));
            }
            if listed.is_empty() && (is_text || matches!(old.as_str(), "True" | "False")) {
                bail!("--set {change}: name the values from least to most memory: --values");
            }
            if let Some(wrong) = listed.iter().find(|value| value.contains('/')) {
                bail!("--set {change}: `{wrong}` cannot be the name of a file; try it alone");
            }
        }
        if is_text {
            let values = if value == VALUE { listed.to_vec() } else { vec![value.to_owned()] };
            all.texts.insert(name.clone(), values.into());
        }
        if value != VALUE {
            all.script = with(&all.script, &name, &expression(&name, &old, value)?);
        }
    }
    Ok(all)
}

/// Returns the name of a setting as users write it.
pub(super) fn shown(name: &str) -> String {
    name.to_lowercase()
}

/// Returns true if a larger number of this setting needs less memory.
pub(super) fn saves(name: &str) -> bool {
    SAVING.contains(&name)
}

/// Returns the settings of a script that save memory, as users write them.
pub(super) fn saving(script: &str) -> Vec<String> {
    let names = settings(script).into_iter().map(|(name, _)| name);
    names.filter(|name| saves(name)).map(shown).collect()
}

/// Returns the constants of a script that `--set` can change, with their values as Python expressions.
pub(super) fn settings(script: &str) -> Vec<(&str, &str)> {
    let constants = script.lines().filter_map(|line| line.split_once(" = "));
    let is_name = |name: &str| name.chars().all(|c| c.is_ascii_uppercase() || c == '_');
    constants.filter(|(name, _)| is_name(name) && !RESERVED.contains(name)).collect()
}

/// Returns the value of a setting without quotes, or an empty text if the script has no such setting.
pub(super) fn setting<'a>(script: &'a str, name: &str) -> &'a str {
    let found = settings(script).into_iter().find(|(key, _)| *key == name);
    found.map_or("", |(_, value)| value.trim_matches('"'))
}

/// Returns the script with `value` as the value of the constant `name`.
pub(super) fn with(script: &str, name: &str, value: &str) -> String {
    let start = format!("{name} = ");
    let lines = script.lines().map(|line| match line.strip_prefix(&start) {
        Some(_) => format!("{start}{value}\n"),
        None => format!("{line}\n"),
    });
    lines.collect()
}

/// Returns the script with a value for the setting `name`.
///
/// # Errors
/// When the value has the wrong kind.
pub(super) fn with_setting(script: &str, name: &str, value: &str) -> Result<String> {
    let old = settings(script).into_iter().find(|(key, _)| *key == name).map_or("", |(_, old)| old);
    Ok(with(script, name, &expression(name, old, value)?))
}

/// Quotes a text for Python, in which JSON's escapes are valid, too.
pub(super) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// Returns the constant that a change `NAME=VALUE` names, its value so far, and the new value.
fn find<'a>(recipe: &Recipe, script: &str, change: &'a str) -> Result<(String, String, &'a str)> {
    let settings = settings(script);
    let known = change.split_once('=').and_then(|(key, value)| {
        let key = key.replace('-', "_");
        let (name, old) = settings.iter().find(|(name, _)| name.eq_ignore_ascii_case(&key))?;
        Some(((*name).to_owned(), (*old).to_owned(), value))
    });
    known.ok_or_else(|| {
        let all = settings.iter().map(|(name, value)| format!("{}={}", shown(name), value.trim_matches('"')));
        anyhow!("--set {change}: the recipe {} has {}", recipe.name, all.collect::<Vec<_>>().join(", "))
    })
}

/// Returns a value of the setting `name` as a Python expression of the same kind as the value `old`.
fn expression(name: &str, old: &str, value: &str) -> Result<String> {
    let expected = |what: &str| anyhow!("--set {}={value}: expected {what}", shown(name));
    if matches!(old, "True" | "False") {
        return match value.to_lowercase().as_str() {
            "true" | "on" | "yes" | "1" => Ok("True".to_owned()),
            "false" | "off" | "no" | "0" => Ok("False".to_owned()),
            _ => Err(expected("on or off")),
        };
    }
    if old.starts_with('"') {
        return Ok(quoted(value));
    }
    if old.contains('.') {
        let (what, least, most) = match name {
            "UTILIZATION" => ("a number above 0 and at most 1", f64::MIN_POSITIVE, 1.0),
            "CPU_OFFLOAD_GB" => ("a number of GiB, such as 8", 0.0, f64::MAX),
            _ => ("a number above 0", f64::MIN_POSITIVE, f64::MAX),
        };
        let number = value.parse::<f64>().ok().filter(|number| (least..=most).contains(number));
        return number.map(|number| format!("{number:?}")).ok_or_else(|| expected(what));
    }
    let (least, most) = match name {
        "STAGE" => (0, 3),
        "OFFLOADED_LAYERS" => (0, MOST),
        "GENERATIONS" => (2, MOST),
        _ => (1, MOST),
    };
    let number = value.parse::<u64>().ok().filter(|number| (least..=most).contains(number));
    let what = || format!("a whole number from {least} to {most}");
    number.map(|number| number.to_string()).ok_or_else(|| expected(&what()))
}

#[cfg(test)]
mod tests {
    use super::super::recipe::lines_of;
    use super::super::recipes::RECIPES;
    use super::*;

    fn change(name: &str, changes: &[&str], listed: &[&str]) -> Result<Changed> {
        let recipe = RECIPES.iter().find(|recipe| recipe.name == name).unwrap();
        let [changes, listed] = [changes, listed].map(|list| list.iter().map(|one| (*one).to_owned()));
        let changes: Vec<String> = changes.collect();
        changed(recipe, lines_of(recipe), changes.iter(), &listed.collect::<Vec<_>>())
    }

    #[test]
    fn a_setting_of_a_recipe_takes_its_kind_of_value_and_an_unknown_one_lists_all() {
        for (name, text, line) in [
            ("lora", "rank=64", "\nRANK = 64\n"),
            ("lora", "checkpointing=off", "\nCHECKPOINTING = False\n"),
            ("lora", "learning-rate=1e-5", "\nLEARNING_RATE = 1e-5\n"),
            ("lora", "targets=.*[qv]_proj", "\nTARGETS = \".*[qv]_proj\"\n"),
            ("infer", "offloaded_layers=0", "\nOFFLOADED_LAYERS = 0\n"),
            ("serve", "cpu_offload_gb=8", "\nCPU_OFFLOAD_GB = 8.0\n"),
        ] {
            assert!(change(name, &[text], &[]).unwrap().script.contains(line), "{text}");
        }
        for (name, text, part) in [
            ("lora", "rnk=4", "the recipe lora has rank=16, targets=all-linear, optimizer=torch.optim.AdamW"),
            ("lora", "model=x", "the recipe lora has"),
            ("lora", "rank", "the recipe lora has"),
            ("infer", "rank=4", "the recipe infer has"),
            ("lora", "rank=many", "expected a whole number from 1"),
            ("lora", "rank=0", "expected a whole number from 1"),
            ("lora", "rank=99999999999999999999", "expected a whole number from 1 to 1048576"),
            ("lora", "checkpointing=perhaps", "expected on or off"),
            ("lora", "learning_rate=nan", "expected a number above 0"),
            ("lora", "learning_rate=-1", "expected a number above 0"),
            ("grpo", "generations=1", "expected a whole number from 2"),
            ("zero", "stage=4", "expected a whole number from 0 to 3"),
            ("serve", "utilization=1.1", "above 0 and at most 1"),
        ] {
            let error = change(name, &[text], &[]).err().expect(text).to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn one_setting_can_be_searched() {
        let both = change("lora", &["accumulation={}", "dtype=float16"], &[]).unwrap();
        assert_eq!(both.searched.as_deref(), Some("ACCUMULATION"));
        assert_eq!(Value::from(both.texts), serde_json::json!({ "DTYPE": ["float16"] }));
        let texts = change("lora", &["dtype={}"], &["float16", "float32"]).unwrap().texts;
        assert_eq!(texts["DTYPE"], serde_json::json!(["float16", "float32"]));
        for (changes, part) in [
            (&["rank={}", "accumulation={}"][..], "{} is rank already"),
            (&["dtype={}"], "name the values from least to most memory"),
            (&["checkpointing={}"], "name the values from least to most memory"),
            (&["rnk={}"], "the recipe lora has rank=16"),
        ] {
            let error = change("lora", changes, &[]).err().unwrap().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
