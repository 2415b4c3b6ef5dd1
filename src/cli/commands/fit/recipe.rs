//! `memtrace fit --recipe`: a script for a model that the user names, run as any other program.
//!
//! A recipe is an ordinary script that uses the user's own packages. Its settings are the constants at its
//! top. See [`recipes`](super::recipes) for the templates of the scripts.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use clap::{Arg, ArgAction, ArgMatches, value_parser};
use memtrace_trace::text::shell_word;
use serde_json::{Map, Value};

use super::check::{Facts, Question, check};
use super::models::{self, MODELS};
use super::places::{self, Filling, LENGTH, VALUE, entries};
use super::recipes::{RECIPES, Recipe};
use super::settings::{self, Changed, quoted, setting, shown, with, with_setting};
use super::worst::Worst;
use crate::child_env::{Scratch, run_id};

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
        option(
            "batch",
            "N",
            "The batch of a search for the value of another setting [default: 1; serve 256]",
        )
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

/// The model that the user names.
struct Model {
    recipe: &'static Recipe,
    /// The model's name in the script.
    name: String,
    /// The model's configuration, if memtrace has it.
    config: Option<Value>,
    /// The names of the most similar models that memtrace has.
    similar: String,
    trusts_code: bool,
}

impl Model {
    fn new(matches: &ArgMatches, recipe: &'static Recipe) -> Result<Model> {
        let given = matches.get_one::<String>("model").context("--recipe needs --model")?;
        let mut bundled: Map<String, Value> = serde_json::from_str(MODELS)?;
        bundled.retain(|_, config| recipe.suits(config));
        let found = if Path::new(given).exists() { None } else { models::find(&bundled, given) };
        Ok(Model {
            recipe,
            name: found.map_or_else(|| folder_of_config(given), |(name, _)| name.clone()),
            config: found.map(|(_, config)| config.clone()),
            similar: models::nearest(&bundled, given),
            trusts_code: matches.get_flag("trust-remote-code"),
        })
    }

    /// Checks in the user's Python that the recipe can have this model, these lengths and the changed settings.
    /// Writes the model's configuration into the new `folder`, and what memtrace has of it into `scratch`.
    fn check(
        &self,
        python: &Path,
        scratch: &Path,
        folder: &Path,
        lengths: &[u64],
        changed: &Changed,
    ) -> Result<Facts> {
        let given = match &self.config {
            Some(config) => models::write_config(&scratch.join("bundled"), config)?,
            None => self.name.clone(),
        };
        let mut packages = vec!["torch", self.recipe.library];
        packages.extend(self.recipe.packages);
        let searched = changed.searched.as_deref();
        if setting(&changed.script, "LIGER") == "True" || searched == Some("LIGER") {
            packages.push("liger_kernel");
        }
        let question = Question {
            model: &given,
            lengths,
            trusts_code: self.trusts_code,
            searched,
            texts: &changed.texts,
            library: self.recipe.library,
            packages,
        };
        check(python, folder, &question, |why| {
            let is_unknown = why.contains("no config.json was found");
            let similar = is_unknown.then(|| format!("; memtrace has {}", self.similar));
            format!("{}{}", why.replace(&given, &self.name), similar.unwrap_or_default())
        })
    }

    /// Returns the script with the constants of this model, and with the title at its top.
    fn fill(&self, script: &str, facts: &Facts) -> String {
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
        if let Some(file) = matches.get_one::<PathBuf>("write") {
            check_new_file(file)?;
        }
        let card = matches.get_one::<String>("phantom").map_or("", String::as_str);
        check_ranks(recipe, card, matches.contains_id("ranks"))?;
        let lengths = match worst {
            Some(worst) => vec![worst.length(recipe.is_of_images())?],
            None => {
                let list = matches.get_one::<String>("seq").map_or(recipe.length, String::as_str);
                lengths(list, recipe.length_option())?
            }
        };
        let listed = matches.get_one::<String>("values").map(|list| entries(list)).unwrap_or_default();
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
            let of_script = script.lines().find_map(|line| line.strip_prefix("BATCH = ")?.parse().ok());
            let batch = matches.get_one::<u64>("batch").copied().or(of_script).unwrap_or(1);
            let usual = settings::usual(&name, batch, gpus.first().copied(), facts.layers);
            Searched { name, usual, batch }
        });
        if searched.as_ref().is_some_and(|one| one.name == "ACCUMULATION" && one.batch == 1)
            && listed.is_empty()
        {
            bail!("--set accumulation={{}} divides a batch: add --batch N");
        }
        // Each value of a setting has a script of its own.
        let file = scratch.folder.join(if searched.is_some() { "recipe-{}.py" } else { "recipe.py" });
        let of_model = if recipe.library == "timm" { model.name.clone().into() } else { folder.into() };
        let mut words: Vec<OsString> = vec![python.into(), file.into()];
        words.extend(script_arguments(recipe, searched.as_ref()));
        words.extend(["--model".into(), of_model]);
        let request =
            Request { recipe, model: model.name, words, lengths, script, searched, _scratch: scratch };
        Ok(Some(request))
    }

    /// Returns true if the recipe starts a server, which is asked how much it holds.
    pub(super) fn is_asked(&self) -> bool {
        self.is_server() && self.searched.is_none()
    }

    /// Returns true if the recipe starts a server.
    pub(super) fn is_server(&self) -> bool {
        self.recipe.is_server()
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

    /// Checks values of the setting that is searched for, or of the batch.
    ///
    /// # Errors
    /// When a value has the wrong kind.
    pub(super) fn check(&self, mut values: impl Iterator<Item = String>) -> Result<()> {
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
            shell_word(&self.model),
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
        for (name, option) in [("EAGER", "--enforce-eager"), ("TRUST_REMOTE_CODE", "--trust-remote-code")] {
            if script.lines().any(|line| line == format!("{name} = True")) {
                flags.push_str(&format!(" {option}"));
            }
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
    if !recipe.has_ranks() && (has_ranks || has_count && !recipe.is_server()) {
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

/// Checks that the settings suit one another, the search and the cards.
fn check_settings(
    matches: &ArgMatches,
    recipe: &Recipe,
    changed: &Changed,
    listed: &[String],
    gpus: &[u64],
) -> Result<()> {
    let (script, searched) = (&changed.script, changed.searched.as_deref());
    settings::check_search(matches, &recipe.with_all_settings(), searched)?;
    check_gpus(script, searched, listed, gpus)?;
    let types = changed.texts.get("DTYPE").and_then(Value::as_array);
    if recipe.trains_weights() && types.is_some_and(|types| types.iter().any(|name| name == "float16")) {
        bail!(
            "--set dtype=float16: the recipe {} trains the weights in this type, for which float16 has too small a \
             range: use bfloat16 or float32",
            recipe.name
        );
    }
    check_packing(changed, listed)
}

/// Checks that a file can be created, before a search that may take minutes.
fn check_new_file(file: &Path) -> Result<()> {
    let shown = file.display();
    if file.symlink_metadata().is_ok() {
        bail!("--write {shown}: File exists; name a new one");
    }
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !folder.is_dir() {
        bail!("--write {shown}: there is no folder {}", folder.display());
    }
    rustix::fs::access(folder, rustix::fs::Access::WRITE_OK).with_context(|| format!("--write {shown}"))
}

/// Checks that the documents of a packed row are kept apart, in the script with each value that is searched for.
fn check_packing(changed: &Changed, listed: &[String]) -> Result<()> {
    let script = &changed.script;
    // A search for the packing without a list of values tries more than one document.
    let usual = ["2".to_owned()];
    let scripts: Vec<String> = match changed.searched.as_deref() {
        Some(name @ ("PACKING" | "ATTENTION")) => {
            let values = if listed.is_empty() { &usual[..] } else { listed };
            values.iter().map(|value| with_setting(script, name, value)).collect::<Result<_>>()?
        }
        _ => vec![script.clone()],
    };
    let mixes_documents = |script: &String| {
        setting(script, "PACKING").parse().is_ok_and(|documents: u64| documents > 1)
            && setting(script, "ATTENTION").contains("flash")
    };
    if scripts.iter().any(mixes_documents) {
        bail!(
            "--set packing needs --set attention=sdpa or eager: with FlashAttention, the documents of \
             several rows are not kept apart"
        );
    }
    Ok(())
}

/// Returns the arguments of a recipe's script, with [`VALUE`] and [`LENGTH`] for the batch and the length.
fn script_arguments(recipe: &Recipe, searched: Option<&Searched>) -> Vec<OsString> {
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

/// Returns the lengths in the list of the script's `option`.
fn lengths(list: &str, option: &str) -> Result<Vec<u64>> {
    let examples = if option == "--size" { "pixels, such as 512,1024" } else { "tokens, such as 2048,8192" };
    let number = |word: String| {
        let number = word.parse().ok().filter(|number| (2..=1 << 30).contains(number));
        number.ok_or_else(|| anyhow!("{option}: `{word}` is not a length; expected {examples}"))
    };
    let lengths: Vec<u64> = entries(list).into_iter().map(number).collect::<Result<_>>()?;
    if lengths.is_empty() {
        bail!("{option} names no length; expected {examples}");
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

    fn recipe(name: &str) -> &'static Recipe {
        RECIPES.iter().find(|recipe| recipe.name == name).unwrap()
    }

    #[test]
    fn packing_and_flash_attention_are_refused_together_in_a_search_for_either() {
        let is_refused = |changes: &[&str], listed: &[&str]| {
            let [changes, listed] =
                [changes, listed].map(|list| list.iter().map(|one| (*one).to_owned()).collect::<Vec<_>>());
            let changes: Vec<&String> = changes.iter().collect();
            let changed = settings::changed(recipe("lora"), &changes, &listed).unwrap();
            check_packing(&changed, &listed).is_err()
        };
        assert!(is_refused(&["packing=4", "attention=flash_attention_2"], &[]));
        assert!(is_refused(&["packing={}", "attention=flash_attention_2"], &[]));
        assert!(is_refused(&["packing={}", "attention=flash_attention_2"], &["1", "2"]));
        assert!(is_refused(&["packing=4", "attention={}"], &["sdpa", "flash_attention_2"]));
        assert!(!is_refused(&["packing={}"], &[]));
        assert!(!is_refused(&["packing={}", "attention=flash_attention_2"], &["1"]));
        assert!(!is_refused(&["packing=4", "attention={}"], &["sdpa", "eager"]));
        assert!(!is_refused(&["rank={}", "attention=flash_attention_2"], &[]));
    }

    #[test]
    fn the_options_of_a_server_can_be_pasted_into_a_shell() {
        let request = |model: &str, trusts_code: bool| {
            let recipe = recipe("serve");
            let (name, similar) = (model.to_owned(), String::new());
            let script = Model { recipe, name, config: None, similar, trusts_code }
                .fill(&recipe.script(|_| false), &Facts { subfolder: String::new(), layers: None });
            let (words, lengths, model) = (Vec::new(), Vec::new(), model.to_owned());
            let _scratch = Scratch::new(&run_id()).unwrap();
            Request { recipe, model, words, lengths, script, searched: None, _scratch }
        };
        assert_eq!(
            request("/data/my model", false).flags(4096, 168_800, ""),
            "vllm serve '/data/my model' --gpu-memory-utilization 0.92 --max-model-len 4096 --max-num-seqs 41"
        );
        assert!(request("org/custom", true).flags(2, 2, "").ends_with(" --trust-remote-code"));
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
