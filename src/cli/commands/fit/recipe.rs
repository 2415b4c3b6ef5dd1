//! `memtrace fit --recipe`: a script for a model that the user names, run as any other program.
//!
//! A recipe is an ordinary script that uses the user's own packages. Its settings are the constants at its
//! top. Lines between `# [NAME...]` and `# []` belong only to the recipes of these names, or to scripts in which a
//! setting of this name is changed.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, anyhow, bail};
use clap::{Arg, ArgAction, ArgMatches, value_parser};
use serde_json::{Map, Value};

use super::models::{self, MODELS};
use super::places::{self, Filling, LENGTH, VALUE, entries};
use super::recipes::{RECIPES, Recipe};
use super::settings::{self, Changed, quoted, setting, shown, with, with_setting};
use super::worst::Worst;
use crate::child_env::{Scratch, run_id};

const CHECK: &str = include_str!("recipes/check.py");
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
        option(
            "set",
            "KEY=VALUE",
            "Change a setting of the recipe, such as rank=64 (repeatable); KEY={} searches for its value \
             instead of the batch",
        )
        .action(ArgAction::Append),
        option("batch", "N", "The batch of a search for the value of another setting [default: 1]")
            .value_parser(value_parser!(u64).range(1..=1 << 20)),
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
    /// The setting that is searched for; `None` if this is the batch.
    searched: Option<Searched>,
    /// The folder with the script and the model's `config.json`.
    _scratch: Scratch,
}

/// A setting that is searched for.
struct Searched {
    /// The constant in the script.
    name: String,
    /// The values to try if the user names none; `None` if the setting has no natural range.
    usual: Option<Vec<String>>,
    /// The batch of all trials: that of `--batch`, or else of the script.
    batch: u64,
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
        let found = if Path::new(model).exists() { None } else { models::find(&bundled, model) };
        let shown = found.map_or(model.as_str(), |(name, _)| name.as_str());
        let listed = matches.get_one::<String>("values").map(|list| entries(list)).unwrap_or_default();
        let changes: Vec<&String> = matches.get_many::<String>("set").into_iter().flatten().collect();
        let Changed { mut script, searched, texts } =
            settings::changed(recipe, lines_of(recipe, &changes), changes.into_iter(), &listed)?;
        settings::check_search(matches, &script, searched.as_deref())?;
        let gpus = counts(card);
        check_gpus(&script, searched.as_deref(), &listed, &gpus)?;
        check_packing(&script)?;
        script = with(&script, "MODEL", &quoted(shown));
        script = with(&script, "TRUST_REMOTE_CODE", if trusts { "True" } else { "False" });
        // Quote the name: otherwise, the name of a folder could end the Python string at the top of the
        // script.
        let title =
            format!("{} of {}, written by memtrace fit --recipe {name}.", recipe.title, quoted(shown));
        script = script.replacen("TITLE", &title, 1);

        let scratch = Scratch::new(&run_id())?;
        let folder = scratch.folder.join("model");
        let given = match found {
            Some((_, config)) => models::write_config(&scratch.folder.join("bundled"), config)?,
            None => model.clone(),
        };
        let python = python().context("no python is on the PATH")?;
        let mut check = Command::new(&python);
        let longest = lengths.iter().max().copied().unwrap_or(0).to_string();
        let needs_liger = setting(&script, "LIGER") == "True" || searched.as_deref() == Some("LIGER");
        check
            .args(["-c", CHECK, &given])
            .arg(&folder)
            .args([longest.as_str(), if trusts { "1" } else { "0" }, searched.as_deref().unwrap_or_default()])
            .args([&Value::from(texts).to_string(), recipe.library, "torch", recipe.library])
            .args(recipe.packages)
            .args(needs_liger.then_some("liger_kernel"));
        let printed = checked(&mut check, |why| {
            let is_unknown = why.contains("no config.json was found");
            let near = is_unknown.then(|| format!("; memtrace has {}", models::nearest(&bundled, model)));
            format!("{}{}", why.replace(&given, shown), near.unwrap_or_default())
        })?;
        let mut last = printed.lines().rev();
        let layers = last.next().and_then(|count| count.parse().ok());
        script = with(&script, "SUBFOLDER", &quoted(last.next().unwrap_or_default()));
        let own = script.lines().find_map(|line| line.strip_prefix("BATCH = ")?.parse().ok());
        let searched = searched.map(|name| {
            let batch = matches.get_one::<u64>("batch").copied().or(own).unwrap_or(1);
            Searched { usual: settings::usual(&name, batch, gpus.first().copied(), layers), name, batch }
        });
        if let Some(Searched { name, batch: 1, .. }) = &searched
            && name == "ACCUMULATION"
            && listed.is_empty()
        {
            bail!("--set accumulation={{}} divides a batch: add --batch N");
        }
        // Each value of a setting has a script of its own.
        let file = scratch.folder.join(if searched.is_some() { "recipe-{}.py" } else { "recipe.py" });
        let of_model = if recipe.library == "timm" { given.into() } else { folder.into_os_string() };
        let mut words: Vec<OsString> = vec![python.into(), file.into()];
        words.extend(script_arguments(recipe, searched.as_ref()));
        words.extend(["--model".into(), of_model]);
        let request =
            Request { recipe, model: shown.to_owned(), words, lengths, script, searched, _scratch: scratch };
        Ok(Some(request))
    }

    /// Returns true if the recipe starts a server, which is asked how much it holds.
    pub(super) fn is_asked(&self) -> bool {
        self.recipe.name == "serve" && self.searched.is_none()
    }

    /// Returns true if the recipe starts a server.
    pub(super) fn is_server(&self) -> bool {
        self.recipe.name == "serve"
    }

    /// Returns the setting that is searched for, as users write it; `None` if this is the batch.
    pub(super) fn searched(&self) -> Option<String> {
        self.searched.as_ref().map(|searched| shown(&searched.name))
    }

    /// Returns the values to try if the user names none; `None` if there is no natural range.
    pub(super) fn usual(&self) -> Option<Vec<String>> {
        self.searched.as_ref()?.usual.clone()
    }

    /// Returns the smallest value of the setting that is searched for, where this is 0.
    pub(super) fn least(&self) -> Option<usize> {
        settings::least(&self.searched.as_ref()?.name)
    }

    /// Returns the script with a value of the setting that is searched for.
    fn script_with(&self, value: &str) -> Result<String> {
        match &self.searched {
            Some(searched) => with_setting(&self.script, &searched.name, value),
            None => Ok(self.script.clone()),
        }
    }

    /// Checks values of the setting that is searched for.
    ///
    /// # Errors
    /// When a value has the wrong kind.
    pub(super) fn check(&self, mut values: impl Iterator<Item = String>) -> Result<()> {
        values.try_for_each(|value| self.script_with(&value).map(drop))
    }

    /// Writes the script for the trials with a value, unless an earlier trial has it.
    ///
    /// # Errors
    /// When the script cannot be written.
    pub(super) fn prepare(&self, value: &str) -> Result<()> {
        let name = self.words.get(1).map(|word| Filling::of_value(value).fill(word)).unwrap_or_default();
        if !Path::new(&name).exists() {
            fs::write(&name, self.script_with(value)?)?;
        }
        Ok(())
    }

    /// Returns vLLM's options for a length at which it has a cache of `tokens` tokens. `value` is the value of
    /// the setting that is searched for, if there is one.
    pub(super) fn flags(&self, length: u64, tokens: u64, value: &str) -> String {
        let script = self.script_with(value).unwrap_or_default();
        let setting = |name: &str| setting(&script, name).to_owned();
        let mut flags = format!(
            "vllm serve {} --gpu-memory-utilization {} --max-model-len {length} --max-num-seqs {}",
            self.model,
            setting("UTILIZATION"),
            requests(tokens, length)
        );
        for (name, option, usual) in [
            (settings::GPUS, "--tensor-parallel-size", "1"),
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

    /// Returns true if the number of GPUs of a server is searched for.
    pub(super) fn searches_gpus(&self) -> bool {
        self.searched.as_ref().is_some_and(|searched| searched.name == settings::GPUS)
    }

    /// Returns all settings of the script, as users write them, with a value of what is searched for and a
    /// length.
    pub(super) fn settings(&self, value: &str, length: u64) -> Value {
        let script = self.script_with(value).unwrap_or_default();
        let mut all = settings::json(&script);
        let batch = self.searched.as_ref().map_or_else(|| value.to_owned(), |one| one.batch.to_string());
        let name = self.recipe.length_option().trim_start_matches('-');
        all.insert("batch".to_owned(), batch.parse::<u64>().ok().into());
        all.insert(name.to_owned(), length.into());
        all.into()
    }

    /// Returns the unit of the lengths, in the plural.
    pub(super) fn unit(&self) -> &'static str {
        if self.recipe.is_of_images() { "pixels" } else { "tokens" }
    }

    /// Writes the script with the value that was found, which is the batch unless a setting was searched for,
    /// and a length. Returns what it wrote, in words.
    ///
    /// # Errors
    /// When the file exists, or cannot be written.
    pub(super) fn write(&self, file: &Path, value: &str, length: u64) -> Result<String> {
        let name = self.recipe.length_option().trim_start_matches('-').to_uppercase();
        let (batch, about) = match &self.searched {
            Some(Searched { name, batch, .. }) => {
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
pub(super) fn requests(tokens: u64, length: u64) -> u64 {
    (tokens / length.max(1)).clamp(1, 256)
}

/// Checks that a job of several GPUs runs its ranks, and that other recipes have one GPU.
fn check_ranks(recipe: &Recipe, card: &str, has_ranks: bool) -> Result<()> {
    let name = recipe.name;
    let has_count = card.starts_with('{') || counts(card).iter().any(|count| *count > 1);
    if let Some(rest) = card.strip_prefix(VALUE) {
        bail!(
            "--phantom {card}: with a recipe, {{}} is the batch; for a row for each number of GPUs, write \
             --phantom {}{} --gpus 8,16",
            places::GPUS,
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

/// Returns the numbers of GPUs of a list of cards such as `l4,2xh100-80g`; empty without a card. An invalid card
/// counts as one GPU here.
fn counts(list: &str) -> Vec<u64> {
    let count = |card: &String| places::count_and_preset(card).map_or(1, |(count, _)| count);
    places::cards(list).iter().map(count).collect()
}

/// Checks that each card has the GPUs of the setting `gpus`, or of the `listed` values that are searched. `counts`
/// has the numbers of GPUs of the cards; on a real machine it is empty, and nothing is checked.
fn check_gpus(script: &str, searched: Option<&str>, listed: &[String], counts: &[u64]) -> Result<()> {
    let is_searched = searched == Some(settings::GPUS);
    let given = [setting(script, settings::GPUS).to_owned()];
    let wanted = if is_searched { listed } else { &given[..] };
    let most = wanted.iter().filter_map(|value| value.parse::<u64>().ok()).max().unwrap_or(0);
    if let Some(fewest) = counts.iter().min().filter(|count| most > **count) {
        let are = if *fewest == 1 { "card is one GPU" } else { "card has fewer" };
        bail!("--set gpus={most}: the {are}: --phantom {most}xh100-80g");
    }
    if is_searched && counts.iter().any(|count| *count != counts[0]) {
        bail!("--set gpus={{}}: the cards have different numbers of GPUs; ask for them one by one");
    }
    Ok(())
}

/// Checks that the documents of a packed row are kept apart.
fn check_packing(script: &str) -> Result<()> {
    if setting(script, "PACKING").parse().is_ok_and(|documents: u64| documents > 1)
        && setting(script, "ATTENTION").contains("flash")
    {
        bail!(
            "--set packing needs --set attention=sdpa or eager: with FlashAttention, the documents of \
             several rows are not kept apart"
        );
    }
    Ok(())
}

/// Runs the check of a model and returns what it prints. `explain` makes the error of the reason that it gives.
fn checked(check: &mut Command, explain: impl FnOnce(&str) -> String) -> Result<String> {
    let python = check.get_program().to_owned();
    let output = check.stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("cannot run {}", Path::new(&python).display()))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        bail!("{}", explain(text.lines().last().unwrap_or("the check of the model failed")));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns the arguments of a recipe's script, with [`VALUE`] and [`LENGTH`] for the batch and the length.
fn script_arguments(recipe: &Recipe, searched: Option<&Searched>) -> Vec<OsString> {
    // `serve` is asked for one number at each length, and vLLM fills the card at any batch.
    let (batch, length) = match searched {
        Some(searched) => (Some(searched.batch.to_string()), LENGTH),
        None if recipe.name == "serve" => (None, VALUE),
        None => (Some(VALUE.to_owned()), LENGTH),
    };
    let mut words: Vec<OsString> = ["--random", recipe.length_option(), length].map(OsString::from).into();
    words.extend(batch.into_iter().flat_map(|batch| ["--batch".into(), batch.into()]));
    if !recipe.steps.is_empty() {
        words.extend(["--steps", recipe.steps].map(OsString::from));
    }
    words
}

/// Returns the script of a recipe without the lines of other recipes, and of settings that no `NAME=VALUE` of
/// `changes` changes.
pub(super) fn lines_of(recipe: &Recipe, changes: &[&String]) -> String {
    let is_changed = |name: &str| {
        let mut names = changes.iter().filter_map(|change| change.split_once('='));
        names.any(|(changed, _)| changed.replace('-', "_").eq_ignore_ascii_case(name))
    };
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
            is_kept =
                names.is_empty() || names.split(' ').any(|name| name == recipe.name || is_changed(name));
        } else if is_kept {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
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
    fn a_server_gets_at_least_one_request_and_at_most_the_default_of_vllm() {
        assert_eq!(requests(168_800, 4096), 41);
        assert_eq!((requests(0, 4096), requests(100, 0), requests(u64::MAX, 1)), (1, 100, 256));
    }

    #[test]
    fn a_script_of_a_recipe_has_its_own_lines_alone_and_is_short() {
        for recipe in &RECIPES {
            let script = lines_of(recipe, &[]);
            assert!(!script.contains("# ["), "{}", recipe.name);
            assert!(script.lines().count() < 80, "{}: {}", recipe.name, script.lines().count());
            for package in ["peft", "bitsandbytes", "trl", "deepspeed"] {
                let is_listed = recipe.packages.contains(&package);
                assert_eq!(script.contains(package), is_listed, "{} {package}", recipe.name);
            }
            assert!(script.contains(&format!("import {}\n", recipe.library)), "{}", recipe.name);
            // Without data, a script that saves would train the real weights on noise.
            let is_checked = script.contains(".data) == args.random:\n    parser.error(");
            assert_eq!(script.contains("\"trained"), is_checked, "{}", recipe.name);
        }
    }

    #[test]
    fn numbers_of_gpus_suit_the_card() {
        let server = |gpus: &str| format!("GPUS = {gpus}\n");
        let refused = |script: &str, searched, listed: &[&str], cards: &str| {
            let listed: Vec<String> = listed.iter().map(|value| (*value).to_owned()).collect();
            check_gpus(script, searched, &listed, &counts(cards)).err().map(|error| error.to_string())
        };
        assert_eq!(counts("8xl4,h100-80g,h100-80g,count=4"), [8, 1, 4]);
        assert_eq!(
            refused(&server("2"), None, &[], "l4").unwrap(),
            "--set gpus=2: the card is one GPU: --phantom 2xh100-80g"
        );
        assert!(refused(&server("16"), None, &[], "8xl4").unwrap().contains("the card has fewer"));
        // Without a simulated card the number of GPUs is not known.
        assert!(refused(&server("2"), None, &[], "").is_none() && counts("").is_empty());
        let searched = Some("GPUS");
        assert!(refused(&server("1"), searched, &["1", "8"], "8xl4").is_none());
        assert!(refused(&server("1"), searched, &["1", "16"], "8xl4").unwrap().contains("fewer"));
        assert!(refused(&server("1"), searched, &[], "8xl4,h100-80g").unwrap().contains("one by one"));
        assert_eq!(settings::usual("GPUS", 1, Some(6), None).unwrap(), ["1", "2", "4", "6"]);
        assert_eq!(
            (settings::usual("GPUS", 1, Some(1), None), settings::usual("GPUS", 1, None, None)),
            (Some(vec!["1".to_owned()]), None)
        );
    }
}
