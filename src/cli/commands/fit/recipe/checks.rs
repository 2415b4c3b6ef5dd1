//! Checks that the options of a recipe suit one another, the search and the cards, before anything runs.

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use clap::ArgMatches;
use serde_json::Value;

use super::catalog::Recipe;
use super::settings::{self, ChangedScript, setting, shown, with_setting};
use crate::commands::fit::request::placeholders::{self, VALUE, entries};

/// Checks that a job of several GPUs runs its ranks, and that other recipes have one GPU.
pub(super) fn check_ranks(recipe: &Recipe, card: &str, has_ranks: bool) -> Result<()> {
    let name = recipe.name;
    let has_count = card.starts_with('{') || counts(card).iter().any(|count| *count > 1);
    if let Some(rest) = card.strip_prefix(VALUE) {
        bail!(
            "--phantom {card}: with a recipe, {{}} is the batch; for a row for each number of GPUs, write \
             --phantom {}{} --gpus 8,16",
            placeholders::GPUS,
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
pub(super) fn counts(list: &str) -> Vec<u64> {
    let count = |card: &String| placeholders::count_and_preset(card).map_or(1, |(count, _)| count);
    placeholders::cards(list).iter().map(count).collect()
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
pub(super) fn check_settings(
    matches: &ArgMatches,
    recipe: &Recipe,
    changed: &ChangedScript,
    listed: &[String],
    gpus: &[u64],
) -> Result<()> {
    let (script, searched) = (&changed.script, changed.searched.as_deref());
    check_smallest(matches.get_flag("smallest"), &recipe.with_all_settings(), searched)?;
    if searched == Some("ACCUMULATION") && batch(matches, script) == 1 && listed.is_empty() {
        bail!("--set accumulation={{}} divides a batch: add --batch N");
    }
    check_gpus(script, searched, listed, gpus)?;
    let types = changed.texts.get("DTYPE").and_then(Value::as_array);
    if recipe.trains_weights() && types.is_some_and(|types| types.iter().any(|name| name == "float16")) {
        bail!(
            "--set dtype=float16: the recipe {} trains the weights in this type, for which float16 has too small a \
             range: use bfloat16 or float32",
            recipe.name
        );
    }
    check_packing(changed, listed)?;
    check_swapping(changed, listed)
}

/// Returns the batch of a search for a setting: the value of `--batch`, or else the batch in the script.
pub(super) fn batch(matches: &ArgMatches, script: &str) -> u64 {
    let of_script = script.lines().find_map(|line| line.strip_prefix("BATCH = ")?.parse().ok());
    matches.get_one::<u64>("batch").copied().or(of_script).unwrap_or(1)
}

/// Checks that `--smallest` is given for a setting that saves memory, and only then. `script` has all settings of the
/// recipe.
fn check_smallest(is_smallest: bool, script: &str, searched: Option<&str>) -> Result<()> {
    let saving = settings::saving(script);
    let examples = match saving.first() {
        Some(_) => format!("this recipe has {}", saving.join(", ")),
        None => "this recipe has none".to_owned(),
    };
    match searched.map(|name| (shown(name), settings::saves(name))) {
        None if is_smallest => {
            bail!("--smallest needs --set KEY={{}} with a setting that saves memory: {examples}")
        }
        Some((name, false)) if is_smallest => {
            bail!("--smallest: a larger {name} does not save memory; {examples}")
        }
        Some((name, true)) if !is_smallest => bail!(
            "--set {name}={{}}: a larger {name} saves memory: add --smallest, which finds the smallest that fits; \
             --values may then have any order"
        ),
        _ => Ok(()),
    }
}

/// Checks that a file can be created, before a search that may take minutes.
pub(super) fn check_new_file(file: &Path) -> Result<()> {
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

/// Returns the script with each value of the setting that is searched for, if that is one of `names`; otherwise the
/// script itself.
fn searched_scripts(changed: &ChangedScript, listed: &[String], names: [&str; 2]) -> Result<Vec<String>> {
    let script = &changed.script;
    // A search for a number without a list of values tries values above 1.
    let default_values = ["2".to_owned()];
    match changed.searched.as_deref().filter(|name| names.contains(name)) {
        Some(name) => {
            let values = if listed.is_empty() { &default_values[..] } else { listed };
            values.iter().map(|value| with_setting(script, name, value)).collect()
        }
        None => Ok(vec![script.clone()]),
    }
}

/// Checks that the documents of a packed row are kept apart, in the script with each value that is searched for.
fn check_packing(changed: &ChangedScript, listed: &[String]) -> Result<()> {
    let scripts = searched_scripts(changed, listed, ["PACKING", "ATTENTION"])?;
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

/// Checks that swapped blocks run with checkpoints, in the script with each value that is searched for.
fn check_swapping(changed: &ChangedScript, listed: &[String]) -> Result<()> {
    let scripts = searched_scripts(changed, listed, ["BLOCKS_TO_SWAP", "CHECKPOINTING"])?;
    let has_no_checkpoints = |script: &String| {
        setting(script, "BLOCKS_TO_SWAP").parse().is_ok_and(|blocks: u64| blocks > 0)
            && setting(script, "CHECKPOINTING") == "False"
    };
    if scripts.iter().any(has_no_checkpoints) {
        bail!(
            "--set blocks_to_swap needs --set checkpointing=on: a swapped block gets its weights back for the \
             backward pass when its checkpoint runs it again"
        );
    }
    Ok(())
}

/// Returns the lengths in the list of the script's `option`.
pub(super) fn lengths(list: &str, option: &str) -> Result<Vec<u64>> {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the script of a recipe with these changes, and the list of `--values`.
    fn changed(recipe: &str, changes: &[&str], listed: &[&str]) -> (ChangedScript, Vec<String>) {
        let [changes, listed] =
            [changes, listed].map(|list| list.iter().map(|one| (*one).to_owned()).collect::<Vec<_>>());
        let changes: Vec<&String> = changes.iter().collect();
        (settings::changed(Recipe::named(recipe).unwrap(), &changes, &listed).unwrap(), listed)
    }

    #[test]
    fn packing_and_flash_attention_are_refused_together_in_a_search_for_either() {
        let is_refused = |changes: &[&str], listed: &[&str]| {
            let (changed, listed) = changed("lora", changes, listed);
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
    fn swapped_blocks_without_checkpoints_are_refused_in_a_search_for_either() {
        let refused = |changes: &[&str], listed: &[&str]| {
            let (changed, listed) = changed("diffusion", changes, listed);
            check_swapping(&changed, &listed).err().map(|error| error.to_string())
        };
        for (changes, listed) in [
            (&["blocks_to_swap=20", "checkpointing=off"], &[][..]),
            (&["blocks_to_swap={}", "checkpointing=off"], &[]),
            (&["blocks_to_swap={}", "checkpointing=off"], &["0", "8"]),
            (&["blocks_to_swap=20", "checkpointing={}"], &["on", "off"]),
        ] {
            let error = refused(changes, listed).unwrap_or_else(|| panic!("{changes:?} {listed:?}"));
            assert!(error.starts_with("--set blocks_to_swap needs --set checkpointing=on"), "{error}");
        }
        for (changes, listed) in [
            (&["checkpointing=off"][..], &[][..]),
            (&["checkpointing={}"], &["on", "off"]),
            (&["blocks_to_swap={}"], &[]),
            (&["blocks_to_swap=0", "checkpointing=off"], &[]),
            (&["blocks_to_swap=20", "checkpointing=on"], &[]),
            (&["blocks_to_swap=20", "checkpointing={}"], &["on"]),
        ] {
            assert_eq!(refused(changes, listed), None, "{changes:?} {listed:?}");
        }
    }

    #[test]
    fn a_setting_that_saves_memory_needs_smallest() {
        let script = Recipe::named("serve").unwrap().with_all_settings();
        let check = |is_smallest| check_smallest(is_smallest, &script, Some(settings::GPUS));
        assert!(check(false).unwrap_err().to_string().contains("add --smallest"));
        assert!(check(true).is_ok());
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
        let default_values = |gpus| settings::default_values("GPUS", 1, gpus, None);
        assert_eq!(default_values(Some(6)).unwrap(), ["1", "2", "4", "6"]);
        assert_eq!((default_values(Some(1)), default_values(None)), (Some(vec!["1".to_owned()]), None));
    }
}
