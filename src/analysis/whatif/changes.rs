//! The changes that a prediction can make, and their parser.

use memtrace_trace::Category;
use memtrace_trace::text::shell_quoted;

use crate::error::{Error, Result};
use crate::selection::{matches, nearest_names};

/// The maximum number of ranks, the same as for a job on simulated GPUs.
const MOST_RANKS: i64 = 1 << 20;
/// The maximum number of parts of a loss.
const MOST_PARTS: i64 = 100_000;

/// An optimizer that replaces the run's own optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewOptimizer {
    /// The same optimizer with 8-bit state, as in bitsandbytes.
    EightBit,
    /// `torch.optim.Adafactor`.
    Adafactor,
    /// `torch.optim.SGD` without momentum.
    Sgd,
}

/// A change of the program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The modules of these patterns, separated by commas, run under `torch.utils.checkpoint`.
    Checkpoint(String),
    /// Another optimizer.
    Optimizer(NewOptimizer),
    /// Each parameter is stepped during the backward pass, and its gradient freed.
    StepInBackward,
    /// The state of the optimizer is in host memory, and its step runs there.
    OffloadOptimizer,
    /// Parameters, activations, gradients and optimizer state have 16 bits instead of 32.
    Bfloat16,
    /// The forward runs under `torch.autocast` to 16 bits: parameters, gradients and state stay float32.
    Autocast,
    /// The tokens are split into this many parts, and the head and the loss run on one part at a time.
    ChunkLoss(i64),
    /// The batch is multiplied by the first number and divided by the second.
    Batch(i64, i64),
    /// Parameters, gradients and optimizer state are sharded over several ranks, as FSDP2 does it.
    Shard {
        /// The number of ranks.
        ranks: i64,
        /// The patterns of the modules that form one unit each, separated by commas. [`super::with_units`]
        /// sets them.
        units: String,
    },
    /// The optimizer's state and step are sharded over this many ranks.
    ShardOptimizer(i64),
    /// Blocks that match all of these conditions are removed.
    Without(Vec<Condition>),
}

/// One condition of `--without`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    pub(super) key: ConditionKey,
    pub(super) pattern: String,
}

/// The property of an owner that a condition checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConditionKey {
    Category,
    Op,
    Module,
    Phase,
}

impl ConditionKey {
    const ALL: [(&'static str, ConditionKey); 4] = [
        ("category", ConditionKey::Category),
        ("op", ConditionKey::Op),
        ("module", ConditionKey::Module),
        ("phase", ConditionKey::Phase),
    ];
}

impl Condition {
    /// Returns true if the pattern matches a name.
    pub(super) fn takes(&self, name: &str) -> bool {
        let level_end = (self.key == ConditionKey::Module).then_some('.');
        matches(&self.pattern, name, level_end)
    }
}

/// Returns true if one of `patterns`, which are separated by commas, matches the path of a module.
pub(super) fn takes_module(patterns: &str, path: &str) -> bool {
    patterns.split(',').any(|pattern| matches(pattern.trim(), path, Some('.')))
}

impl Change {
    /// Returns the option that selects the change, with its value quoted for a shell.
    #[must_use]
    pub fn option(&self) -> String {
        match self {
            Change::Checkpoint(pattern) => format!("--checkpoint {}", shell_quoted(pattern)),
            Change::Optimizer(NewOptimizer::EightBit) => "--optimizer 8bit".to_owned(),
            Change::Optimizer(NewOptimizer::Adafactor) => "--optimizer adafactor".to_owned(),
            Change::Optimizer(NewOptimizer::Sgd) => "--optimizer sgd".to_owned(),
            Change::StepInBackward => "--optimizer in-backward".to_owned(),
            Change::OffloadOptimizer => "--offload optimizer".to_owned(),
            Change::Bfloat16 => "--dtype bf16".to_owned(),
            Change::Autocast => "--autocast bf16".to_owned(),
            Change::ChunkLoss(parts) => format!("--chunk-loss {parts}"),
            Change::Batch(times, 1) => format!("--batch x{times}"),
            Change::Batch(times, parts) => format!("--batch x{times}/{parts}"),
            Change::Shard { ranks, .. } => format!("--shard {ranks}"),
            Change::ShardOptimizer(ranks) => format!("--shard {ranks}:optimizer"),
            Change::Without(conditions) => {
                let all: Vec<String> = conditions
                    .iter()
                    .map(|condition| {
                        let name = ConditionKey::ALL.iter().find(|(_, key)| *key == condition.key);
                        format!("{}={}", name.map_or("", |(name, _)| name), condition.pattern)
                    })
                    .collect();
                format!("--without {}", shell_quoted(&all.join(",")))
            }
        }
    }

    /// Returns what to change in the program, as a short phrase for a reader who does not know the options;
    /// empty for the changes that no report proposes.
    #[must_use]
    pub fn phrase(&self) -> String {
        match self {
            Change::Checkpoint(pattern) => format!("checkpoint the modules {pattern}"),
            Change::Optimizer(NewOptimizer::EightBit) => "an optimizer with 8-bit state".to_owned(),
            Change::Optimizer(NewOptimizer::Adafactor) => "Adafactor as the optimizer".to_owned(),
            Change::Optimizer(NewOptimizer::Sgd) => "SGD without momentum as the optimizer".to_owned(),
            Change::StepInBackward => "step each parameter in the backward, and free its gradient".to_owned(),
            Change::OffloadOptimizer => "optimizer state and step on the CPU".to_owned(),
            Change::Bfloat16 => "the whole model in bf16".to_owned(),
            Change::Autocast => "the forward under torch.autocast to bf16".to_owned(),
            Change::ChunkLoss(parts) => format!("head and loss on 1/{parts} of the tokens at a time"),
            Change::Batch(1, 2) => "half the batch".to_owned(),
            Change::Batch(times, parts) => format!("{times}/{parts} of the batch"),
            Change::Shard { .. } | Change::ShardOptimizer(_) | Change::Without(_) => String::new(),
        }
    }

    /// Returns true for a change to 16 bits.
    #[must_use]
    pub fn is_type(&self) -> bool {
        matches!(self, Change::Autocast | Change::Bfloat16)
    }

    /// Returns true if the change needs the categories of blocks, which come from tags.
    #[must_use]
    pub fn needs_tags(&self) -> bool {
        match self {
            Change::Checkpoint(_) | Change::ChunkLoss(_) => false,
            Change::Without(all) => all.iter().any(|condition| condition.key == ConditionKey::Category),
            _ => true,
        }
    }

    /// Returns true if the change needs the calls of ops or modules, or the types of parameters. A PyTorch snapshot
    /// has none of them.
    #[must_use]
    pub fn needs_calls(&self) -> bool {
        matches!(
            self,
            Change::Checkpoint(_)
                | Change::ChunkLoss(_)
                | Change::StepInBackward
                | Change::Autocast
                | Change::Bfloat16
                | Change::Shard { .. }
        )
    }
}

fn checkpoint(text: &str) -> Result<Vec<Change>> {
    if text.split(',').any(|pattern| pattern.trim().is_empty()) {
        return Err(Error::usage(format!(
            "--checkpoint {text}: a pattern is empty; separate patterns with one comma, as in 'GPT.h.*,GPT.head'"
        )));
    }
    Ok(vec![Change::Checkpoint(text.to_owned())])
}

fn optimizers(text: &str) -> Result<Vec<Change>> {
    let one = |name: &str| match name {
        "8bit" => Ok(Change::Optimizer(NewOptimizer::EightBit)),
        "adafactor" => Ok(Change::Optimizer(NewOptimizer::Adafactor)),
        "sgd" => Ok(Change::Optimizer(NewOptimizer::Sgd)),
        "in-backward" => Ok(Change::StepInBackward),
        _ => Err(Error::usage(format!(
            "--optimizer {text}: expected 8bit, adafactor, sgd or in-backward; in-backward may follow another one, as in \
             8bit,in-backward"
        ))),
    };
    text.split(',').map(|name| one(name.trim())).collect()
}

fn batch(text: &str) -> Result<Vec<Change>> {
    let bad = || {
        Error::usage(format!(
            "--batch {text}: expected a factor that starts with x, such as x2 or x1/2, at most x1000 and not x1"
        ))
    };
    // Refuse a number without `x`: it looks like the new size of the batch, but the change is a factor,
    // because the trace does not have the old size.
    let factor = text.strip_prefix('x').ok_or_else(bad)?;
    let (times, parts) = factor.split_once('/').unwrap_or((factor, "1"));
    let number = |part: &str| part.trim().parse::<i64>().ok().filter(|number| (1..=1000).contains(number));
    match (number(times), number(parts)) {
        (Some(times), Some(parts)) if times != parts => Ok(vec![Change::Batch(times, parts)]),
        _ => Err(bad()),
    }
}

fn shard(text: &str) -> Result<Vec<Change>> {
    let (number, part) = text.split_once(':').map_or((text, None), |(number, part)| (number, Some(part)));
    let ranks = number.trim().parse::<i64>().ok().filter(|ranks| (2..=MOST_RANKS).contains(ranks));
    match (ranks, part.map(str::trim)) {
        (Some(ranks), None) => Ok(vec![Change::Shard { ranks, units: String::new() }]),
        (Some(ranks), Some("optimizer")) => Ok(vec![Change::ShardOptimizer(ranks)]),
        _ => Err(Error::usage(format!(
            "--shard {text}: expected a number of ranks from 2 to {MOST_RANKS}, such as 8; 8:optimizer divides the \
             optimizer's state alone"
        ))),
    }
}

fn without(text: &str) -> Result<Vec<Change>> {
    let keys = || ConditionKey::ALL.iter().map(|(name, _)| *name);
    let one = |part: &str| {
        let (key, pattern) = part.split_once('=').ok_or_else(|| {
            Error::usage(format!(
                "--without {text}: expected conditions such as category=temporary,op=aten::_foreach*"
            ))
        })?;
        let (key, pattern) = (key.trim(), pattern.trim());
        let found = ConditionKey::ALL.iter().find(|(name, _)| *name == key);
        let Some((_, key)) = found else {
            let near = nearest_names(keys(), key);
            return Err(Error::usage(format!("--without {text}: there is no {key}; there are {near}")));
        };
        let categories = || Category::ALL.iter().map(|category| category.as_str());
        if *key == ConditionKey::Category && !categories().any(|name| matches(pattern, name, None)) {
            let near = nearest_names(categories(), pattern);
            return Err(Error::usage(format!(
                "--without {text}: no category is called {pattern}; there are {near}"
            )));
        }
        Ok(Condition { key: *key, pattern: pattern.to_owned() })
    };
    Ok(vec![Change::Without(text.split(',').map(one).collect::<Result<_>>()?)])
}

fn offload(text: &str) -> Result<Vec<Change>> {
    match text {
        "optimizer" => Ok(vec![Change::OffloadOptimizer]),
        _ => Err(Error::usage(format!("--offload {text}: expected optimizer"))),
    }
}

/// Returns `change` if the value of an option is a 16-bit type.
fn half(option: &str, text: &str, change: Change) -> Result<Vec<Change>> {
    match text {
        "bf16" | "bfloat16" | "fp16" | "float16" => Ok(vec![change]),
        _ => Err(Error::usage(format!("--{option} {text}: expected bf16 or fp16"))),
    }
}

fn chunk_loss(text: &str) -> Result<Vec<Change>> {
    match text.parse::<i64>() {
        Ok(parts) if (2..=MOST_PARTS).contains(&parts) => Ok(vec![Change::ChunkLoss(parts)]),
        _ => Err(Error::usage(format!("--chunk-loss {text}: expected a number from 2 to {MOST_PARTS}"))),
    }
}

/// An option with the parser of its value.
type ChangeOption = (&'static str, fn(&str) -> Result<Vec<Change>>);

/// The options that ask for changes. Sharding must come last: a rank has a part of the blocks that remain after all
/// other changes.
const OPTIONS: [ChangeOption; 9] = [
    ("checkpoint", checkpoint),
    ("optimizer", optimizers),
    ("offload", offload),
    ("dtype", |text| half("dtype", text, Change::Bfloat16)),
    ("autocast", |text| half("autocast", text, Change::Autocast)),
    ("chunk-loss", chunk_loss),
    ("batch", batch),
    ("without", without),
    ("shard", shard),
];

/// Parses the changes that options ask for. `text` returns the value of an option, or an empty text if it was
/// not given.
///
/// # Errors
/// When a value is invalid, or two changes contradict each other.
///
/// ```
/// use memtrace_analysis::whatif::{Change, parse};
///
/// let changes = parse(|option| if option == "chunk-loss" { "8" } else { "" })?;
/// assert_eq!(changes, [Change::ChunkLoss(8)]);
/// assert_eq!(changes[0].option(), "--chunk-loss 8");
/// # Ok::<(), memtrace_analysis::Error>(())
/// ```
pub fn parse<'a>(text: impl Fn(&str) -> &'a str) -> Result<Vec<Change>> {
    let mut all = Vec::new();
    for (option, parser) in OPTIONS {
        let value = text(option);
        if !value.is_empty() {
            all.extend(parser(value)?);
        }
    }
    if all.is_empty() {
        return Err(Error::usage(
            "nothing is changed: name a change, such as --checkpoint 'GPT.h.*', --optimizer 8bit, --autocast bf16, \
             --dtype bf16, --chunk-loss 8, --batch x2, --shard 8, --offload optimizer or --without 'category=temporary'",
        ));
    }
    match conflict(&all.iter().collect::<Vec<_>>()) {
        Some(why) => Err(Error::usage(why)),
        None => Ok(all),
    }
}

/// Returns why a program cannot combine these changes, or `None` if it can.
pub(super) fn conflict(changes: &[&Change]) -> Option<&'static str> {
    let count = |is_it: fn(&Change) -> bool| changes.iter().filter(|change| is_it(change)).count();
    let optimizers = count(|change| matches!(change, Change::Optimizer(_)));
    let in_backward = count(|change| *change == Change::StepInBackward);
    let offloads = count(|change| *change == Change::OffloadOptimizer) > 0;
    let shards = count(|change| matches!(change, Change::Shard { .. })) > 0;
    if optimizers > 1 || in_backward > 1 {
        Some(
            "--optimizer takes one optimizer, with or without in-backward; to compare several, run the command once for each",
        )
    } else if count(Change::is_type) > 1 {
        Some(
            "--dtype makes the whole model 16-bit, but --autocast keeps its parameters in float32: ask for \
             one of them",
        )
    } else if offloads && optimizers > 0 {
        Some(
            "--offload optimizer leaves no state on the device for --optimizer to change: ask for one of them",
        )
    } else if offloads && in_backward > 0 {
        Some(
            "--offload optimizer steps on the host after the backward pass, but --optimizer in-backward \
             steps on the device during it: ask for one of them",
        )
    } else if shards && in_backward > 0 {
        Some(
            "--shard needs all gradients of a unit at once, but --optimizer in-backward frees each one at \
             once: ask for one of them",
        )
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_one(name: &'static str, value: &'static str) -> Result<Vec<Change>> {
        parse(|asked| if asked == name { value } else { "" })
    }

    #[test]
    fn whatif_changes_are_parsed_or_refused() {
        assert_eq!(
            parse_one("shard", "1000000").unwrap(),
            [Change::Shard { ranks: 1_000_000, units: String::new() }]
        );
        assert_eq!(parse_one("shard", "8:optimizer").unwrap()[0].option(), "--shard 8:optimizer");
        assert_eq!(parse_one("batch", "x2").unwrap(), [Change::Batch(2, 1)]);
        assert_eq!(parse_one("batch", "x1/4").unwrap(), [Change::Batch(1, 4)]);
        assert_eq!(
            parse_one("optimizer", "8bit,in-backward").unwrap(),
            [Change::Optimizer(NewOptimizer::EightBit), Change::StepInBackward]
        );
        for (name, value, part) in [
            ("checkpoint", "GPT.h.*,", "a pattern is empty"),
            ("checkpoint", " ", "a pattern is empty"),
            ("batch", "x0", "expected a factor"),
            ("batch", "x1", "expected a factor"),
            ("batch", "x3/3", "expected a factor"),
            ("batch", "-2", "expected a factor"),
            ("batch", "x99999999999999999999", "expected a factor"),
            ("optimizer", "lion", "expected 8bit"),
            ("optimizer", "8bit,sgd", "one optimizer"),
            ("optimizer", "in-backward,in-backward", "one optimizer"),
            ("dtype", "fp8", "expected bf16"),
            ("autocast", "int8", "expected bf16"),
            ("chunk-loss", "1", "number from 2"),
            ("chunk-loss", "many", "number from 2"),
            ("offload", "gradients", "expected optimizer"),
            ("shard", "0", "ranks from 2"),
            ("shard", "1", "ranks from 2"),
            ("shard", "-8", "ranks from 2"),
            ("shard", "1048577", "ranks from 2"),
            ("shard", "99999999999999999999", "ranks from 2"),
            ("shard", "many", "ranks from 2"),
            ("shard", "8:", "8:optimizer"),
            ("shard", "8:gradients", "8:optimizer"),
            ("without", "temporary", "category=temporary"),
            ("without", "kind=temporary", "there is no kind"),
            ("without", "category=temporaries", "temporary"),
            ("none", "x", "nothing is changed"),
        ] {
            let why = parse_one(name, value).unwrap_err().to_string();
            assert!(why.contains(part), "{name} {value}: {why}");
        }
    }

    #[test]
    fn whatif_changes_that_contradict_each_other_are_refused() {
        for optimizer in ["8bit", "in-backward"] {
            let why = parse(|name| match name {
                "offload" => "optimizer",
                "optimizer" => optimizer,
                _ => "",
            });
            assert!(why.unwrap_err().to_string().contains("ask for one of them"));
        }
    }

    #[test]
    fn whatif_autocast_and_another_type_are_refused_together() {
        let why = parse(|name| if matches!(name, "autocast" | "dtype") { "bf16" } else { "" });
        assert!(why.unwrap_err().to_string().contains("ask for one of them"));
        assert_eq!(parse_one("autocast", "bf16").unwrap()[0].option(), "--autocast bf16");
    }

    #[test]
    fn whatif_shard_and_a_step_in_the_backward_are_refused_together() {
        let both = |optimizer: &'static str| {
            parse(move |name| match name {
                "shard" => "8",
                "optimizer" => optimizer,
                _ => "",
            })
        };
        assert!(both("8bit,in-backward").unwrap_err().to_string().contains("ask for one of them"));
        assert_eq!(both("8bit").unwrap().len(), 2);
        let sharded = [Change::StepInBackward, Change::Shard { ranks: 8, units: String::new() }];
        assert_eq!(super::super::sets(&sharded, 2), [[0], [1]]);
    }

    #[test]
    fn whatif_changes_say_the_option_that_asks_for_them() {
        assert_eq!(
            parse_one("without", " category= temporary , op =aten::mm ").unwrap()[0].option(),
            "--without 'category=temporary,op=aten::mm'"
        );
        let change = parse_one("without", "category=temporary,op=aten::_foreach*").unwrap();
        assert_eq!(change[0].option(), "--without 'category=temporary,op=aten::_foreach*'");
        assert_eq!(parse_one("batch", "x1/2").unwrap()[0].option(), "--batch x1/2");
    }

    #[test]
    fn whatif_options_are_one_word_of_a_shell() {
        let change = parse_one("checkpoint", "Net.it's.*; $(reboot)").unwrap();
        assert_eq!(change[0].option(), "--checkpoint 'Net.it'\\''s.*; $(reboot)'");
        let change = parse_one("without", "module=Net.it's").unwrap();
        assert_eq!(change[0].option(), "--without 'module=Net.it'\\''s'");
    }
}
