//! The settings of a recipe: the constants at the top of its script, which `--set` changes.

use anyhow::{Result, anyhow, bail};
use serde_json::{Map, Value};

use super::catalog::Recipe;
use crate::commands::fit::request::placeholders::VALUE;

/// The largest whole number that a setting takes.
const MOST: u64 = 1 << 20;

/// A constant of a recipe's script that `--set` changes. The scripts say which recipe has it, and its default.
struct Setting {
    name: &'static str,
    takes: Kind,
    memory: Memory,
}

/// The values that a setting takes.
#[derive(Clone, Copy)]
enum Kind {
    Switch,
    /// The user's packages decide which texts are valid.
    Text,
    /// A whole number from the first value to the second.
    Whole(u64, u64),
    /// A number from the first value to the second, described by the text.
    Number(f64, f64, &'static str),
}

/// How the memory of the card changes as the value of a setting grows.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Memory {
    Grows,
    /// It shrinks, so `--smallest` searches for the value.
    Shrinks,
    Same,
    /// The values have no natural order or step, so the user lists them.
    Listed,
}

const fn one(name: &'static str, takes: Kind, memory: Memory) -> Setting {
    Setting { name, takes, memory }
}

const COUNT: Kind = Kind::Whole(1, MOST);
const FROM_ZERO: Kind = Kind::Whole(0, MOST);
const SHARE: Kind = Kind::Number(f64::MIN_POSITIVE, 1.0, "a number above 0 and at most 1");
const RATE: Kind = Kind::Number(f64::MIN_POSITIVE, f64::MAX, "a number above 0");
const GIB: Kind = Kind::Number(0.0, f64::MAX, "a number of GiB, such as 8");

/// The settings of all recipes.
const SETTINGS: [Setting; 28] = [
    one("RANK", COUNT, Memory::Grows),
    one("TARGETS", Kind::Text, Memory::Listed),
    one("OPTIMIZER", Kind::Text, Memory::Listed),
    one("UPCAST", Kind::Switch, Memory::Listed),
    one("LEARNING_RATE", RATE, Memory::Same),
    one("CHECKPOINTING", Kind::Switch, Memory::Listed),
    one("ATTENTION", Kind::Text, Memory::Listed),
    one("DTYPE", Kind::Text, Memory::Listed),
    one("AUTOCAST", Kind::Switch, Memory::Listed),
    one("ACCUMULATION", COUNT, Memory::Shrinks),
    one("PACKING", COUNT, Memory::Grows),
    one("LIGER", Kind::Switch, Memory::Listed),
    one("GENERATIONS", Kind::Whole(2, MOST), Memory::Grows),
    one("COMPLETION", COUNT, Memory::Grows),
    one("CPU_OFFLOAD", Kind::Switch, Memory::Listed),
    one("STAGE", Kind::Whole(0, 3), Memory::Shrinks),
    one("RESHARD", Kind::Switch, Memory::Listed),
    one("CLASSES", COUNT, Memory::Grows),
    one("CHANNELS_LAST", Kind::Switch, Memory::Listed),
    one("CACHE", Kind::Text, Memory::Listed),
    one("OFFLOADED_LAYERS", FROM_ZERO, Memory::Shrinks),
    one("BLOCKS_TO_SWAP", FROM_ZERO, Memory::Shrinks),
    one("UTILIZATION", SHARE, Memory::Listed),
    one(GPUS, COUNT, Memory::Shrinks),
    one("QUANTIZATION", Kind::Text, Memory::Listed),
    one("CACHE_DTYPE", Kind::Text, Memory::Listed),
    one("CPU_OFFLOAD_GB", GIB, Memory::Shrinks),
    one("EAGER", Kind::Switch, Memory::Listed),
];

/// The setting with the number of GPUs of a server.
pub(crate) const GPUS: &str = "GPUS";

/// Returns the entry of a setting, or `None` if `name` is another constant.
fn entry(name: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|setting| setting.name == name)
}

/// The script of a recipe with the changes of `--set`.
pub(crate) struct ChangedScript {
    pub(crate) script: String,
    /// The constant that has `{}` as its value; `None` without one.
    pub(crate) searched: Option<String>,
    /// The values of the changed settings that are texts. The packages decide whether they are valid.
    pub(crate) texts: Map<String, Value>,
}

/// Returns the script of a recipe with each change `NAME=VALUE`. `listed` has the values of `--values`, which
/// replace a `{}`.
///
/// # Errors
/// When a setting is unknown or changed twice, its value has the wrong kind, or two settings have `{}`.
pub(crate) fn changed(recipe: &Recipe, changes: &[&String], listed: &[String]) -> Result<ChangedScript> {
    let every = recipe.with_all_settings();
    let found: Vec<(&str, &str)> =
        changes.iter().map(|change| find(recipe, &every, change)).collect::<Result<_>>()?;
    let script = recipe.script(|setting| found.iter().any(|(name, _)| shown(name) == setting));
    let mut all = ChangedScript { script, searched: None, texts: Map::new() };
    for (index, (change, (name, value))) in changes.iter().zip(&found).enumerate() {
        let (name, value) = ((*name).to_owned(), *value);
        let is_text = matches!(entry(&name), Some(Setting { takes: Kind::Text, .. }));
        if value == VALUE {
            if let Some(first) = all.searched.replace(name.clone()) {
                bail!("--set {change}: {{}} is {} already; search for one setting at a time", shown(&first));
            }
            match entry(&name).map(|setting| setting.memory) {
                Some(Memory::Same) => bail!("--set {change}: {} does not change memory", shown(&name)),
                Some(Memory::Listed) if listed.is_empty() => {
                    bail!("--set {change}: name the values from least to most memory: --values")
                }
                _ => {}
            }
            if let Some(wrong) = listed.iter().find(|value| value.contains('/')) {
                bail!("--set {change}: `{wrong}` cannot be the name of a file; try it alone");
            }
        }
        if found[..index].iter().any(|(earlier, _)| *earlier == name) {
            bail!("--set {change}: {} is set twice", shown(&name));
        }
        if is_text {
            let values = if value == VALUE { listed.to_vec() } else { vec![value.to_owned()] };
            all.texts.insert(name.clone(), values.into());
        }
        if value != VALUE {
            all.script = with(&all.script, &name, &expression(&name, value)?);
        }
    }
    Ok(all)
}

/// Returns the name of a setting as users write it.
pub(crate) fn shown(name: &str) -> String {
    name.to_lowercase()
}

/// Returns true if a larger number of this setting needs less memory.
pub(super) fn saves(name: &str) -> bool {
    entry(name).is_some_and(|setting| setting.memory == Memory::Shrinks)
}

/// Returns the settings of a script that save memory, as users write them.
pub(super) fn saving(script: &str) -> Vec<String> {
    let names = settings(script).into_iter().map(|(name, _)| name);
    names.filter(|name| saves(name)).map(shown).collect()
}

/// Returns the constants of a script that `--set` can change, with their values as Python expressions.
fn settings(script: &str) -> Vec<(&str, &str)> {
    let constants = script.lines().filter_map(|line| line.split_once(" = "));
    constants.filter(|(name, _)| entry(name).is_some()).collect()
}

/// Returns the value of a setting without quotes, or an empty text if the script has no such setting.
pub(crate) fn setting<'a>(script: &'a str, name: &str) -> &'a str {
    let found = settings(script).into_iter().find(|(key, _)| *key == name);
    found.map_or("", |(_, value)| value.trim_matches('"'))
}

/// Returns the settings of a script as users write them, with their values.
pub(crate) fn json(script: &str) -> Map<String, Value> {
    let value = |name: &str, text: &str| match entry(name).map(|setting| setting.takes) {
        Some(Kind::Switch) => Value::from(text == "True"),
        // Numbers and quoted texts are JSON.
        _ => serde_json::from_str(text).unwrap_or_default(),
    };
    settings(script).into_iter().map(|(name, text)| (shown(name), value(name, text))).collect()
}

/// Returns the script with `value` as the value of the constant `name`.
pub(crate) fn with(script: &str, name: &str, value: &str) -> String {
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
pub(crate) fn with_setting(script: &str, name: &str, value: &str) -> Result<String> {
    Ok(with(script, name, &expression(name, value)?))
}

/// Quotes a text for Python, in which JSON's escapes are valid, too.
pub(crate) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// Returns the constant that a change `NAME=VALUE` names, and the new value. `script` has all settings of the recipe.
fn find<'a>(recipe: &Recipe, script: &'a str, change: &'a str) -> Result<(&'a str, &'a str)> {
    let settings = settings(script);
    let known = change.split_once('=').and_then(|(key, value)| {
        let key = key.replace('-', "_");
        let (name, _) = settings.iter().find(|(name, _)| name.eq_ignore_ascii_case(&key))?;
        Some((*name, value))
    });
    known.ok_or_else(|| {
        let all = settings.iter().map(|(name, value)| format!("{}={}", shown(name), value.trim_matches('"')));
        anyhow!("--set {change}: the recipe {} has {}", recipe.name, all.collect::<Vec<_>>().join(", "))
    })
}

/// Returns a value of the setting `name` as a Python expression.
fn expression(name: &str, value: &str) -> Result<String> {
    let expected = |what: &str| anyhow!("--set {}={value}: expected {what}", shown(name));
    match entry(name).map_or(Kind::Text, |setting| setting.takes) {
        Kind::Switch => match value.to_lowercase().as_str() {
            "true" | "on" | "yes" | "1" => Ok("True".to_owned()),
            "false" | "off" | "no" | "0" => Ok("False".to_owned()),
            _ => Err(expected("on or off")),
        },
        Kind::Text => Ok(quoted(value)),
        Kind::Number(least, most, what) => {
            let number = value.parse::<f64>().ok().filter(|number| (least..=most).contains(number));
            number.map(|number| format!("{number:?}")).ok_or_else(|| expected(what))
        }
        Kind::Whole(least, most) => {
            let number = value.parse::<u64>().ok().filter(|number| (least..=most).contains(number));
            let what = || format!("a whole number from {least} to {most}");
            number.map(|number| number.to_string()).ok_or_else(|| expected(&what()))
        }
    }
}

/// Returns the default of `--min` for a setting whose smallest value is 0.
pub(crate) fn default_min(name: &str) -> Option<usize> {
    let from_zero =
        |setting: &Setting| matches!(setting.takes, Kind::Whole(0, _) | Kind::Number(0.0, ..)).then_some(0);
    entry(name).and_then(from_zero)
}

/// Returns the values of a setting to try if the user names none; `None` if it has no natural range. `gpus`
/// is the number of GPUs, and `layers` the number of layers or blocks of the model.
pub(crate) fn default_values(
    name: &str,
    batch: u64,
    gpus: Option<u64>,
    layers: Option<u64>,
) -> Option<Vec<String>> {
    let numbers: Vec<u64> = match name {
        "ACCUMULATION" => (1..=batch).filter(|parts| batch.is_multiple_of(*parts)).collect(),
        "OFFLOADED_LAYERS" | "BLOCKS_TO_SWAP" => (0..=layers?).collect(),
        GPUS => {
            let gpus = gpus?;
            (0..20).map(|power| 1 << power).take_while(|count| *count < gpus).chain([gpus]).collect()
        }
        "STAGE" => (0..=3).collect(),
        _ => return None,
    };
    Some(numbers.iter().map(u64::to_string).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::fit::recipe::catalog::RECIPES;

    fn change(name: &str, changes: &[&str], listed: &[&str]) -> Result<ChangedScript> {
        let recipe = Recipe::named(name).unwrap();
        let [changes, listed] =
            [changes, listed].map(|list| list.iter().map(|one| (*one).to_owned()).collect::<Vec<_>>());
        changed(recipe, &changes.iter().collect::<Vec<_>>(), &listed)
    }

    #[test]
    fn a_setting_of_a_recipe_takes_its_kind_of_value_and_an_unknown_one_lists_all() {
        for (name, text, line) in [
            ("lora", "rank=64", "\nRANK = 64\n"),
            ("lora", "checkpointing=off", "\nCHECKPOINTING = False\n"),
            ("lora", "learning-rate=1e-5", "\nLEARNING_RATE = 1e-5\n"),
            ("lora", "targets=.*[qv]_proj", "\nTARGETS = \".*[qv]_proj\"\n"),
            ("infer", "offloaded_layers=0", "\nOFFLOADED_LAYERS = 0\n"),
            ("diffusion", "blocks-to-swap=20", "\nBLOCKS_TO_SWAP = 20\n"),
            ("diffusion", "blocks_to_swap=20", "\ndef swap_in("),
            ("serve", "cpu_offload_gb=8", "\nCPU_OFFLOAD_GB = 8.0\n"),
        ] {
            assert!(change(name, &[text], &[]).unwrap().script.contains(line), "{text}");
        }
        for (name, text, part) in [
            ("lora", "rnk=4", "the recipe lora has rank=16, targets=all-linear, optimizer=torch.optim.AdamW"),
            ("lora", "model=x", "the recipe lora has"),
            ("lora", "rank", "the recipe lora has"),
            ("lora", "rnk=4", "accumulation=1, packing=1, liger=False"),
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
            (&["rank={}", "RANK=8"], "--set RANK=8: rank is set twice"),
            (&["rank=4", "rank=8"], "--set rank=8: rank is set twice"),
            (&["dtype={}"], "name the values from least to most memory"),
            (&["checkpointing={}"], "name the values from least to most memory"),
            (&["rnk={}"], "the recipe lora has rank=16"),
            (&["learning_rate={}"], "--set learning_rate={}: learning_rate does not change memory"),
        ] {
            let error = change("lora", changes, &[]).err().unwrap().to_string();
            assert!(error.contains(part), "{error}");
        }
        let error = change("serve", &["utilization={}"], &[]).err().unwrap().to_string();
        assert!(error.contains("name the values from least to most memory"), "{error}");
        assert!(change("serve", &["utilization={}"], &["0.8", "0.9"]).is_ok());
    }

    /// The other options set the other constants.
    #[test]
    fn each_constant_of_a_recipe_has_an_entry_whose_kind_is_that_of_its_default() {
        let others = ["MODEL", "SUBFOLDER", "BATCH", "SEQ", "SIZE", "TRUST_REMOTE_CODE"];
        let mut seen = Vec::new();
        for recipe in &RECIPES {
            let script = recipe.with_all_settings();
            let is_name = |name: &str| name.chars().all(|c| c.is_ascii_uppercase() || c == '_');
            let constants = script.lines().filter_map(|line| line.split_once(" = "));
            for (name, default) in constants.filter(|(name, _)| is_name(name) && !others.contains(name)) {
                assert!(entry(name).is_some(), "{}: {name}", recipe.name);
                assert_eq!(expression(name, default.trim_matches('"')).unwrap(), default, "{}", recipe.name);
                seen.push(name.to_owned());
            }
        }
        assert!(SETTINGS.iter().all(|setting| seen.iter().any(|name| name == setting.name)), "{seen:?}");
    }

    #[test]
    fn the_page_on_fit_lists_the_settings_of_each_recipe() {
        let page = include_str!("../../../../../docs/fit.md");
        for recipe in &RECIPES {
            let name = format!("`{}`", recipe.name);
            let rows = page.lines().filter_map(|line| line.strip_prefix("| ")?.split_once(" | "));
            let rows = rows.filter(|(names, _)| names.split(", ").any(|each| each == name));
            let row: String = rows.map(|(_, settings)| settings).collect();
            let script = recipe.with_all_settings();
            let missing = settings(&script).into_iter().map(|(name, _)| format!("`{}`", shown(name)));
            let missing: Vec<String> = missing.filter(|setting| !row.contains(setting)).collect();
            assert!(missing.is_empty(), "docs/fit.md, {name}: {missing:?}");
        }
    }
}
