//! The program and the cards of the command line, and whether their placeholders match.

use std::ffi::OsString;

use anyhow::{Result, bail};
use clap::ArgMatches;

use super::largest_input::LargestInput;
use super::placeholders::{self, GPUS, NODES, PER_NODE, VALUE, cards};

/// Returns the placeholder for the number of GPUs at the start of a card, if there is one.
pub(crate) fn gpus_place_of(card: &str) -> Option<&'static str> {
    [VALUE, GPUS]
        .into_iter()
        .find(|place| card.strip_prefix(place).is_some_and(|rest| rest.starts_with(['x', 'X'])))
}

/// Returns the program of the command line and its arguments, with the dimensions of the input of `--worst`.
///
/// # Errors
/// When the arguments have no place for a dimension of `--worst`, or one that the input does not have.
pub(crate) fn program(matches: &ArgMatches, worst: Option<&LargestInput>) -> Result<Vec<OsString>> {
    let words: Vec<OsString> = matches.get_many("command").into_iter().flatten().cloned().collect();
    match worst {
        Some(worst) => worst.fill(&words),
        None => Ok(words),
    }
}

/// Returns the program and its arguments, the cards of `--phantom`, and the cards' placeholder for the number
/// of GPUs.
///
/// # Errors
/// When there is no program or `--phantom` names no card, or the placeholders of the program and of the cards
/// do not match.
pub(crate) fn words_and_cards(
    matches: &ArgMatches,
    words: Vec<OsString>,
) -> Result<(Vec<OsString>, Vec<String>, Option<&'static str>)> {
    if words.is_empty() {
        bail!("no program was given; for example: memtrace fit -- python train.py --batch {{}}");
    }
    let list = matches.get_one::<String>("phantom").map(|list| cards(list));
    if list.as_ref().is_some_and(Vec::is_empty) {
        bail!("--phantom names no card; `memtrace run --phantom list` lists the cards");
    }
    let cards = list.unwrap_or_default();
    let place = gpus_place(&cards)?;
    check_places(matches, &words, place)?;
    Ok((words, cards, place))
}

/// Returns the placeholder for the number of GPUs that all cards have, or `None` if no card has one.
fn gpus_place(cards: &[String]) -> Result<Option<&'static str>> {
    let wrong = |card: &String| {
        let place = gpus_place_of(card);
        let rest = &card[place.map_or(0, str::len)..];
        rest.contains(VALUE) || rest.contains(GPUS)
    };
    if let Some(card) = cards.iter().find(|card| wrong(card)) {
        bail!(
            "--phantom {card}: the number of GPUs, {VALUE} or {GPUS}, goes before the card: {VALUE}xh100-80g"
        );
    }
    let place = cards.first().and_then(|card| gpus_place_of(card));
    if let Some(other) = cards.iter().find(|card| gpus_place_of(card) != place) {
        bail!(
            "--phantom {other}: write the number of GPUs the same way for each card: \
             {VALUE}xa100-80g,{VALUE}xh100-80g"
        );
    }
    Ok(place)
}

/// Checks that the command's placeholders match the placeholders in `--phantom`.
fn check_places(matches: &ArgMatches, words: &[OsString], place: Option<&str>) -> Result<()> {
    let Some(place) = place else {
        if let Some(lone) = [GPUS, NODES, PER_NODE].into_iter().find(|lone| placeholders::has(words, lone)) {
            bail!(
                "the command has {lone}, so --phantom needs a number of GPUs to vary: --phantom \
                 {GPUS}xh100-80g"
            );
        }
        if matches.contains_id("gpus") {
            bail!("--gpus needs a placeholder for the GPUs in --phantom: --phantom {GPUS}xh100-80g");
        }
        return Ok(());
    };
    if matches.contains_id("ask") {
        bail!("--ask does not vary the number of GPUs; list the cards: --phantom 2xh100-80g,4xh100-80g");
    }
    let both = matches.contains_id("gpus") && matches.contains_id("values");
    let has_value = place != VALUE && placeholders::has(words, VALUE);
    if both && !has_value {
        bail!(
            "{place} is the number of GPUs: give only one of --gpus and --values; for a table by both, \
             write {GPUS} in --phantom and {VALUE} in the command"
        );
    }
    let has_placeholder =
        [place, GPUS, NODES, PER_NODE].into_iter().any(|place| placeholders::has(words, place));
    let of_torchrun = |word: &OsString| {
        let word = word.to_string_lossy();
        word.ends_with("torchrun") || word == "torch.distributed.run"
    };
    // With `gpu` or `auto`, torchrun counts the cards itself, so the command needs no placeholder.
    let counts = |word: &OsString| ["gpu", "auto"].iter().any(|how| word.to_string_lossy().ends_with(how));
    if !has_placeholder && words.iter().any(of_torchrun) && !words.iter().any(counts) {
        bail!(
            "the command needs a placeholder for the number of GPUs, too: torchrun --nproc-per-node {place}"
        );
    }
    Ok(())
}
