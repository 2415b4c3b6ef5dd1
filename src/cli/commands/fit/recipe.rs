//! `memtrace fit --recipe`: a script for a model that the user names, run as any other program.
//!
//! A recipe is an ordinary script that uses the user's own packages. Its settings are the constants at its
//! top. Lines between `# [NAME...]` and `# []` belong only to the recipes of these names.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, anyhow, bail};
use clap::{Arg, ArgAction, ArgMatches, value_parser};
use memtrace_util::names::distance;
use serde_json::{Map, Value};

use super::places::{LENGTH, VALUE, entries};
use super::recipes::{RECIPES, Recipe};
use super::worst::Worst;
use crate::child_env::{Scratch, run_id};

const CHECK: &str = include_str!("recipes/check.py");
/// The `config.json` of models, by their name on the Hugging Face hub, from whose pages they come.
const MODELS: &str = include_str!("recipes/models.json");
/// The constants that other options set.
const RESERVED: [&str; 6] = ["MODEL", "SUBFOLDER", "BATCH", "SEQ", "SIZE", "TRUST_REMOTE_CODE"];
/// The heading of the options in the help.
const HEADING: &str = "Recipes (a script for a model that you name; no weights are read)";

/// Returns the options of `fit` for recipes.
pub(super) fn arguments() -> impl Iterator<Item = Arg> {
    let option = |name: &'static str, value: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name(value).requires("recipe").help(help)
    };
    let names = RECIPES.map(|recipe| recipe.name);
    [
        option("recipe", "NAME", "Run this script instead of your own program, and find the largest batch")
            .value_parser(clap::builder::PossibleValuesParser::new(names))
            .requires("model")
            .conflicts_with_all(["command", "ask"]),
        option(
            "model",
            "MODEL",
            "A config.json, its folder, or a name such as Qwen/Qwen3-8B; for vision, timm's name",
        ),
        option(
            "seq",
            "LIST",
            "Sequence lengths in tokens, or widths of images in pixels, one row each, such as 2048,8192 \
             [default: 2048; diffusion 1024; vision 224]",
        )
        .visible_alias("size"),
        option("set", "KEY=VALUE", "Change a setting of the recipe, such as rank=64 (repeatable)")
            .action(ArgAction::Append),
        option("write", "FILE", "Write the script that was run, with the batch that fits, for a real GPU")
            .value_parser(value_parser!(PathBuf)),
        Arg::new("trust-remote-code")
            .long("trust-remote-code")
            .requires("recipe")
            .action(ArgAction::SetTrue)
            .help("Run the code that comes with the model's configuration"),
    ]
    .into_iter()
    .map(|arg| arg.help_heading(HEADING))
}

/// A recipe for a model, ready to run.
pub(super) struct Request {
    recipe: &'static Recipe,
    /// The model's name in the script.
    model: String,
    /// The program and its arguments, with [`VALUE`] and [`LENGTH`] for the batch and the length.
    pub(super) words: Vec<OsString>,
    pub(super) lengths: Vec<u64>,
    script: String,
    /// The folder with the script and the model's `config.json`.
    _scratch: Scratch,
}

impl Request {
    /// Returns the request of the command line, or `None` without `--recipe`.
    ///
    /// # Errors
    /// When the request cannot be met. The message is one line.
    pub(super) fn new(matches: &ArgMatches, worst: Option<&Worst>) -> Result<Option<Request>> {
        let Some(name) = matches.get_one::<String>("recipe") else { return Ok(None) };
        let recipe = RECIPES.iter().find(|recipe| recipe.name == name).context("an unknown recipe")?;
        let model = matches.get_one::<String>("model").context("--recipe needs --model")?;
        if let Some(file) = matches.get_one::<PathBuf>("write").filter(|file| file.symlink_metadata().is_ok())
        {
            bail!("--write {}: File exists; name a new one", file.display());
        }
        let trusts = matches.get_flag("trust-remote-code");
        let card = matches.get_one::<String>("phantom").map_or("", String::as_str);
        check_ranks(recipe, card, matches.contains_id("ranks"))?;
        let lengths = match worst {
            Some(worst) => vec![worst.length(recipe.is_of_images())?],
            None => lengths(matches.get_one::<String>("seq").map_or(recipe.length, String::as_str))?,
        };
        let mut bundled: Map<String, Value> = serde_json::from_str(MODELS)?;
        bundled.retain(|_, config| recipe.suits(config));
        let found = if Path::new(model).exists() { None } else { find(&bundled, model) };
        let shown = found.map_or(model.as_str(), |(name, _)| name.as_str());
        let mut script = lines_of(recipe);
        for change in matches.get_many::<String>("set").into_iter().flatten() {
            script = set(recipe, &script, change)?;
        }
        script = with(&script, "MODEL", &quoted(shown));
        script = with(&script, "TRUST_REMOTE_CODE", if trusts { "True" } else { "False" });
        // Quote the name: otherwise, the name of a folder could end the Python string at the top of the
        // script.
        let title =
            format!("{} of {}, written by memtrace fit --recipe {name}.", recipe.title, quoted(shown));
        script = script.replacen("TITLE", &title, 1);

        let scratch = Scratch::new(&run_id())?;
        let (file, folder) = (scratch.folder.join("recipe.py"), scratch.folder.join("model"));
        let given = match found {
            Some((_, config)) => {
                let own = scratch.folder.join("bundled");
                let part = own.join(folder_in_pipeline(config));
                fs::create_dir_all(&part)?;
                fs::write(part.join("config.json"), config.to_string())?;
                own.to_string_lossy().into_owned()
            }
            None => model.clone(),
        };
        let python = python().context("no python is on the PATH")?;
        let longest = lengths.iter().max().copied().unwrap_or(0).to_string();
        let output = Command::new(&python)
            .args(["-c", CHECK, &given])
            .arg(&folder)
            .args([longest.as_str(), if trusts { "1" } else { "0" }])
            .args([recipe.library, "torch", recipe.library])
            .args(recipe.packages)
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("cannot run {}", python.display()))?;
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            let why = text.lines().last().unwrap_or("the check of the model failed").to_owned();
            let known = why.contains("no config.json was found");
            let near =
                if known { format!("; memtrace has {}", nearest(&bundled, model)) } else { String::new() };
            bail!("{why}{near}");
        }
        // For a pipeline of diffusers, the check prints the folder with the model's configuration.
        let part = String::from_utf8_lossy(&output.stdout).lines().last().unwrap_or_default().to_owned();
        script = with(&script, "SUBFOLDER", &quoted(&part));
        fs::write(&file, &script)?;
        let mut words: Vec<OsString> = vec![python.into(), file.into()];
        // `serve` is asked for one number at each length, and vLLM fills the card at any batch.
        let (batch, length) = if recipe.name == "serve" { (None, VALUE) } else { (Some(VALUE), LENGTH) };
        words.extend(["--random", recipe.length_option(), length].map(OsString::from));
        words.extend(batch.into_iter().flat_map(|batch| ["--batch".into(), batch.into()]));
        if !recipe.steps.is_empty() {
            words.extend(["--steps", recipe.steps].map(OsString::from));
        }
        let model = if recipe.library == "timm" { given.into() } else { folder.into_os_string() };
        words.extend(["--model".into(), model]);
        Ok(Some(Request { recipe, model: shown.to_owned(), words, lengths, script, _scratch: scratch }))
    }

    /// Returns true if the recipe starts a server, which is asked how much it holds.
    pub(super) fn is_server(&self) -> bool {
        self.recipe.name == "serve"
    }

    /// Returns vLLM's options for a length at which it has a cache of `tokens` tokens.
    pub(super) fn flags(&self, length: u64, tokens: u64) -> String {
        let setting = |name: &str| {
            let value = settings(&self.script).into_iter().find(|(key, _)| *key == name);
            value.map_or("", |(_, value)| value.trim_matches('"')).to_owned()
        };
        let mut flags = format!(
            "vllm serve {} --gpu-memory-utilization {} --max-model-len {length} --max-num-seqs {}",
            self.model,
            setting("UTILIZATION"),
            requests(tokens, length)
        );
        for (name, option, usual) in [
            ("GPUS", "--tensor-parallel-size", "1"),
            ("DTYPE", "--dtype", "auto"),
            ("QUANTIZATION", "--quantization", ""),
            ("CACHE_DTYPE", "--kv-cache-dtype", "auto"),
            ("CPU_OFFLOAD_GB", "--cpu-offload-gb", "0.0"),
        ] {
            if setting(name) != usual {
                flags.push_str(&format!(" {option} {}", setting(name)));
            }
        }
        if setting("EAGER") == "True" {
            flags.push_str(" --enforce-eager");
        }
        flags
    }

    /// Returns the unit of the lengths, in the plural.
    pub(super) fn unit(&self) -> &'static str {
        if self.recipe.is_of_images() { "pixels" } else { "tokens" }
    }

    /// Writes the script with a batch and a length.
    ///
    /// # Errors
    /// When the file exists, or cannot be written.
    pub(super) fn write(&self, file: &Path, batch: &str, length: u64) -> Result<()> {
        let name = self.recipe.length_option().trim_start_matches('-').to_uppercase();
        let script = with(&with(&self.script, "BATCH", batch), &name, &length.to_string());
        let mut new = fs::File::create_new(file).with_context(|| format!("--write {}", file.display()))?;
        std::io::Write::write_all(&mut new, script.as_bytes())?;
        Ok(())
    }
}

/// Returns the number of requests of `length` tokens that a server's cache of `tokens` tokens can hold, at
/// most vLLM's default.
pub(super) fn requests(tokens: u64, length: u64) -> u64 {
    (tokens / length.max(1)).clamp(1, 256)
}

/// Returns the folder of a pipeline of diffusers that has this configuration, or an empty text for other
/// models.
fn folder_in_pipeline(config: &Value) -> &'static str {
    match config["_class_name"].as_str() {
        Some(class) if class.starts_with("UNet") => "unet",
        Some(_) => "transformer",
        None => "",
    }
}

/// Checks that a job of several GPUs runs its ranks, and that other recipes have one GPU.
fn check_ranks(recipe: &Recipe, card: &str, has_ranks: bool) -> Result<()> {
    let name = recipe.name;
    let has_count = card.starts_with('{')
        || card
            .split_once(['x', 'X'])
            .is_some_and(|(count, _)| count.parse().is_ok_and(|count: u64| count > 1));
    if let Some(rest) = card.strip_prefix(VALUE) {
        bail!(
            "--phantom {card}: with a recipe, {{}} is the batch; for a row for each number of GPUs, write \
             --phantom {}{} --gpus 8,16",
            super::places::GPUS,
            rest
        );
    }
    if recipe.has_ranks() && has_count && !has_ranks {
        bail!("--recipe {name} has a process for each GPU: add --ranks 0");
    }
    if !recipe.has_ranks() && (has_ranks || has_count && name != "serve") {
        bail!("--recipe {name} uses one GPU; for several GPUs, use the recipes pretrain and zero");
    }
    Ok(())
}

/// Returns the script of a recipe without the lines of other recipes.
fn lines_of(recipe: &Recipe) -> String {
    let mut is_kept = true;
    let mut text = String::new();
    for line in recipe.script.lines() {
        // In the template, an empty line precedes the marker, because Python's formatter requires one after
        // imports. The script has no marker, so remove this line, too.
        let marker = line.trim_start();
        if marker == "# []" && is_kept && text.ends_with("\n\n") {
            text.pop();
        }
        if let Some(names) = marker.strip_prefix("# [").and_then(|rest| rest.strip_suffix(']')) {
            is_kept = names.is_empty() || names.split(' ').any(|name| name == recipe.name);
        } else if is_kept {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
}

/// Returns the constants of a script that `--set` can change, with their values as Python expressions.
fn settings(script: &str) -> Vec<(&str, &str)> {
    let constants = script.lines().filter_map(|line| line.split_once(" = "));
    let is_name = |name: &str| name.chars().all(|c| c.is_ascii_uppercase() || c == '_');
    constants.filter(|(name, _)| is_name(name) && !RESERVED.contains(name)).collect()
}

/// Returns the script with `value` as the value of the constant `name`.
fn with(script: &str, name: &str, value: &str) -> String {
    let start = format!("{name} = ");
    let lines = script.lines().map(|line| match line.strip_prefix(&start) {
        Some(_) => format!("{start}{value}\n"),
        None => format!("{line}\n"),
    });
    lines.collect()
}

/// Returns the script with the change `NAME=VALUE` of `--set` applied.
fn set(recipe: &Recipe, script: &str, change: &str) -> Result<String> {
    let settings = settings(script);
    let listed = || {
        let all = settings
            .iter()
            .map(|(name, value)| format!("{}={}", name.to_lowercase(), value.trim_matches('"')));
        all.collect::<Vec<_>>().join(", ")
    };
    let known = change.split_once('=').and_then(|(key, value)| {
        let (name, old) =
            settings.iter().find(|(name, _)| name.eq_ignore_ascii_case(&key.replace('-', "_")))?;
        Some((*name, *old, value))
    });
    let Some((name, old, value)) = known else {
        bail!("--set {change}: the recipe {} has {}", recipe.name, listed());
    };
    let expected = |what: &str| anyhow!("--set {change}: expected {what}");
    let value = match old {
        "True" | "False" => match value.to_lowercase().as_str() {
            "true" | "on" | "yes" | "1" => "True".to_owned(),
            "false" | "off" | "no" | "0" => "False".to_owned(),
            _ => return Err(expected("on or off")),
        },
        _ if old.starts_with('"') => quoted(value),
        _ if old.contains('.') => {
            value
                .parse::<f64>()
                .ok()
                .filter(|number| number.is_finite())
                .ok_or_else(|| expected("a number"))?;
            value.to_owned()
        }
        _ => value.parse::<u64>().map_err(|_| expected("a whole number"))?.to_string(),
    };
    Ok(with(script, name, &value))
}

/// Quotes a text for Python, in which JSON's escapes are valid, too.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

fn lengths(list: &str) -> Result<Vec<u64>> {
    let number = |word: String| {
        let number = word.parse().ok().filter(|number| (2..=1 << 30).contains(number));
        number.ok_or_else(|| anyhow!("--seq: `{word}` is not a length; expected tokens, such as 2048,8192"))
    };
    let lengths: Vec<u64> = entries(list).into_iter().map(number).collect::<Result<_>>()?;
    if lengths.is_empty() {
        bail!("--seq names no length; for example: --seq 2048,8192");
    }
    Ok(lengths)
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

/// Returns the first `python` on the PATH, or else the first `python3`.
fn python() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    let files =
        ["python", "python3"].iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
    files.into_iter().find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_of_a_recipe_takes_its_kind_of_value_and_an_unknown_one_lists_all() {
        let recipe = |name: &str| RECIPES.iter().find(|recipe| recipe.name == name).unwrap();
        let lora = lines_of(recipe("lora"));
        let change = |change: &str| set(recipe("lora"), &lora, change);
        assert!(change("rank=64").unwrap().contains("\nRANK = 64\n"));
        assert!(change("checkpointing=off").unwrap().contains("\nCHECKPOINTING = False\n"));
        assert!(change("learning-rate=1e-5").unwrap().contains("\nLEARNING_RATE = 1e-5\n"));
        assert!(change("targets=.*[qv]_proj").unwrap().contains("\nTARGETS = \".*[qv]_proj\"\n"));
        for (text, part) in [
            ("rnk=4", "the recipe lora has rank=16, targets=all-linear, optimizer=torch.optim.AdamW"),
            ("model=x", "the recipe lora has"),
            ("rank", "the recipe lora has"),
            ("rank=many", "expected a whole number"),
            ("checkpointing=perhaps", "expected on or off"),
        ] {
            let error = change(text).expect_err(text).to_string();
            assert!(error.contains(part), "{error}");
        }
        assert!(set(recipe("infer"), &lines_of(recipe("infer")), "rank=4").is_err());
    }

    #[test]
    fn a_server_gets_at_least_one_request_and_at_most_the_default_of_vllm() {
        assert_eq!(requests(168_800, 4096), 41);
        assert_eq!((requests(0, 4096), requests(100, 0), requests(u64::MAX, 1)), (1, 100, 256));
    }

    #[test]
    fn a_script_of_a_recipe_has_its_own_lines_alone_and_is_short() {
        for recipe in &RECIPES {
            let script = lines_of(recipe);
            assert!(!script.contains("# ["), "{}", recipe.name);
            assert!(script.lines().count() < 80, "{}: {}", recipe.name, script.lines().count());
            for package in ["peft", "bitsandbytes", "trl", "deepspeed"] {
                let is_listed = recipe.packages.contains(&package);
                assert_eq!(script.contains(package), is_listed, "{} {package}", recipe.name);
            }
            assert!(script.contains(&format!("import {}\n", recipe.library)), "{}", recipe.name);
        }
    }

    #[test]
    fn a_model_is_found_without_its_owner() {
        let models: Map<String, Value> = serde_json::from_str(MODELS).unwrap();
        assert_eq!(find(&models, "qwen3-8b").unwrap().0, "Qwen/Qwen3-8B");
        assert!(find(&models, "Qwen/Qwen3-9B").is_none());
        assert!(nearest(&models, "Qwen/Qwen3-9B").contains("Qwen/Qwen3-8B"));
    }
}
