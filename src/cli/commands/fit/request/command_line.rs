//! The program and the cards of the command line, and whether their placeholders match.

use std::ffi::OsString;

use anyhow::{Result, bail};
use clap::ArgMatches;

use super::placeholders::{self, GPUS, NODES, PER_NODE, VALUE, cards};

/// Returns the placeholder for the number of GPUs at the start of a card, if there is one.
pub(crate) fn gpus_placeholder_of(card: &str) -> Option<&'static str> {
    [VALUE, GPUS]
        .into_iter()
        .find(|placeholder| card.strip_prefix(placeholder).is_some_and(|rest| rest.starts_with(['x', 'X'])))
}

/// The program and the cards of a command line.
pub(crate) struct CommandLine {
    /// The program and its arguments; empty for a recipe, until its script is made.
    pub(crate) words: Vec<OsString>,
    /// The cards of `--phantom`; empty for the machine's own GPU.
    pub(crate) cards: Vec<String>,
    /// The cards' placeholder for the number of GPUs, if they have one.
    pub(crate) gpus_placeholder: Option<&'static str>,
}

impl CommandLine {
    /// Returns the program and the cards of the command line.
    ///
    /// # Errors
    /// When there is no program or `--phantom` names no card, or the placeholders of the program and of the cards
    /// do not match.
    pub(crate) fn new(matches: &ArgMatches) -> Result<CommandLine> {
        let words: Vec<OsString> = matches.get_many("command").into_iter().flatten().cloned().collect();
        if words.is_empty() && !matches.contains_id("recipe") {
            bail!("no program was given; for example: memtrace fit -- python train.py --batch {{}}");
        }
        let list = matches.get_one::<String>("phantom").map(|list| cards(list));
        if list.as_ref().is_some_and(Vec::is_empty) {
            bail!("--phantom names no card; `memtrace run --phantom list` lists the cards");
        }
        let cards = list.unwrap_or_default();
        let gpus_placeholder = common_gpus_placeholder(&cards)?;
        check_placeholders(&words, gpus_placeholder)?;
        Ok(CommandLine { words, cards, gpus_placeholder })
    }
}

/// Returns the placeholder for the number of GPUs that all cards have, or `None` if no card has one.
fn common_gpus_placeholder(cards: &[String]) -> Result<Option<&'static str>> {
    let wrong = |card: &String| {
        let placeholder = gpus_placeholder_of(card);
        let rest = &card[placeholder.map_or(0, str::len)..];
        rest.contains(VALUE) || rest.contains(GPUS)
    };
    if let Some(card) = cards.iter().find(|card| wrong(card)) {
        bail!(
            "--phantom {card}: the number of GPUs, {VALUE} or {GPUS}, goes before the card: {VALUE}xh100-80g"
        );
    }
    let placeholder = cards.first().and_then(|card| gpus_placeholder_of(card));
    if let Some(other) = cards.iter().find(|card| gpus_placeholder_of(card) != placeholder) {
        bail!(
            "--phantom {other}: write the number of GPUs the same way for each card: \
             {VALUE}xa100-80g,{VALUE}xh100-80g"
        );
    }
    Ok(placeholder)
}

/// Checks that the command's placeholders match the placeholder in `--phantom`.
fn check_placeholders(words: &[OsString], placeholder: Option<&str>) -> Result<()> {
    let own = [GPUS, NODES, PER_NODE].into_iter().find(|own| placeholders::has(words, own));
    let Some(placeholder) = placeholder else {
        let Some(lone) = own else { return Ok(()) };
        bail!(
            "the command has {lone}, so --phantom needs a number of GPUs to vary: --phantom {GPUS}xh100-80g"
        );
    };
    let of_torchrun = |word: &OsString| {
        let word = word.to_string_lossy();
        word.ends_with("torchrun") || word == "torch.distributed.run"
    };
    // With `gpu` or `auto`, torchrun counts the cards itself, so the command needs no placeholder.
    let counts = |word: &OsString| ["gpu", "auto"].iter().any(|how| word.to_string_lossy().ends_with(how));
    let has_placeholder = own.is_some() || placeholders::has(words, placeholder);
    if !has_placeholder && words.iter().any(of_torchrun) && !words.iter().any(counts) {
        bail!(
            "the command needs a placeholder for the number of GPUs, too: torchrun --nproc-per-node {placeholder}"
        );
    }
    Ok(())
}
