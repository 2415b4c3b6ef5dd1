//! The placeholders in the command line and in `--phantom` that `memtrace fit` replaces.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use memtrace_cards::Spec;

/// The placeholder for the value that is searched for.
pub(crate) const VALUE: &str = "{}";
/// The placeholder for the number of GPUs if [`VALUE`] is the placeholder for another value.
pub(crate) const GPUS: &str = "{gpus}";
/// The placeholder for the number of nodes that have these GPUs.
pub(crate) const NODES: &str = "{nodes}";
/// The placeholder for the number of GPUs per node.
pub(crate) const PER_NODE: &str = "{per-node}";
/// The placeholder for the sequence length in the command of a recipe.
pub(crate) const LENGTH: &str = "{seq}";

/// The texts that replace the placeholders in one trial.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Filling {
    /// The text for [`VALUE`]; if `None`, the placeholder stays unchanged.
    pub(crate) value: Option<String>,
    /// The number of GPUs and the maximum per node, for [`GPUS`], [`NODES`] and [`PER_NODE`]; if `None`,
    /// these placeholders stay unchanged.
    pub(crate) gpus: Option<(u64, u64)>,
    /// The number for [`LENGTH`]; if `None`, the placeholder stays unchanged.
    pub(crate) length: Option<u64>,
}

impl Filling {
    /// Returns the texts of a trial that has only a value.
    pub(crate) fn of_value(value: &str) -> Filling {
        Filling { value: Some(value.to_owned()), ..Filling::default() }
    }

    /// Returns `word` with the placeholders replaced.
    pub(crate) fn fill(&self, word: &OsStr) -> OsString {
        let mut numbers: Vec<(&str, String)> = Vec::new();
        if let Some(value) = &self.value {
            numbers.push((VALUE, value.clone()));
        }
        if let Some((gpus, of_node)) = self.gpus {
            let per_node = gpus.min(of_node.max(1)).max(1);
            numbers.push((GPUS, gpus.to_string()));
            numbers.push((NODES, (gpus / per_node).to_string()));
            numbers.push((PER_NODE, per_node.to_string()));
        }
        if let Some(length) = self.length {
            numbers.push((LENGTH, length.to_string()));
        }
        let numbers: Vec<(&str, &str)> =
            numbers.iter().map(|(placeholder, number)| (*placeholder, number.as_str())).collect();
        replace(word, &numbers)
    }
}

/// Returns `word` with each placeholder replaced by its number.
pub(crate) fn replace(word: &OsStr, numbers: &[(&str, &str)]) -> OsString {
    let mut rest = word.as_bytes();
    let mut text = Vec::with_capacity(rest.len());
    while let Some((first, left)) = rest.split_first() {
        match numbers.iter().find(|(placeholder, _)| rest.starts_with(placeholder.as_bytes())) {
            Some((placeholder, number)) => {
                text.extend_from_slice(number.as_bytes());
                rest = &rest[placeholder.len()..];
            }
            None => {
                text.push(*first);
                rest = left;
            }
        }
    }
    OsString::from_vec(text)
}

/// Returns true if one of `words` contains `placeholder`.
pub(crate) fn has(words: &[impl AsRef<OsStr>], placeholder: &str) -> bool {
    let placeholder = placeholder.as_bytes();
    words
        .iter()
        .any(|word| word.as_ref().as_bytes().windows(placeholder.len()).any(|part| part == placeholder))
}

/// Returns the cards in a list such as `a100-40g,h100-80g,mem=40g`, in which a property belongs to the card
/// before it. Empty entries and repeated cards are omitted.
pub(crate) fn cards(list: &str) -> Vec<String> {
    let mut cards: Vec<String> = Vec::new();
    for word in list.split(',').map(str::trim).filter(|word| !word.is_empty()) {
        match cards.last_mut() {
            Some(card) if word.contains('=') => {
                card.push(',');
                card.push_str(word);
            }
            _ => cards.push(word.to_owned()),
        }
    }
    distinct(cards)
}

/// Returns the number of GPUs of a card and the name of its preset: `8xh100-80g,mem=40g` is 8 and `h100-80g`. The
/// name is empty if the user sets all properties. Returns `None` if the card is invalid.
pub(crate) fn count_and_preset(card: &str) -> Option<(u64, &'static str)> {
    // With `--ranks`, the number before a card may exceed the number of GPUs of one machine.
    let (count, spec) = match Spec::parse(card) {
        Ok(spec) => (spec.count, spec),
        Err(_) => match Spec::split_count(card) {
            (Some(count), rest) => (count, Spec::parse(rest).ok()?),
            (None, _) => return None,
        },
    };
    let has_preset = !card.split(',').next().unwrap_or_default().contains('=');
    Some((count.into(), if has_preset { spec.base.id } else { "" }))
}

/// Returns the entries of a list such as `512, 1024`, without repetitions.
pub(crate) fn entries(list: &str) -> Vec<String> {
    distinct(list.split(',').map(str::trim).filter(|word| !word.is_empty()).map(str::to_owned).collect())
}

fn distinct(all: Vec<String>) -> Vec<String> {
    let mut kept: Vec<String> = Vec::with_capacity(all.len());
    for entry in all {
        if !kept.contains(&entry) {
            kept.push(entry);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fit_puts_the_numbers_in_their_places() {
        let value = Filling { value: Some("12".to_owned()), gpus: None, ..Filling::default() };
        assert_eq!(value.fill(OsStr::new("--batch={}")), "--batch=12");
        assert_eq!(value.fill(OsStr::new("{}x{}")), "12x12");
        assert_eq!(value.fill(OsStr::new("{ {gpus}")), "{ {gpus}");
        let gpus = |gpus| Filling { gpus: Some((gpus, 8)), ..Filling::default() };
        assert_eq!(gpus(512).fill(OsStr::new("{gpus}={nodes}*{per-node}{}")), "512=64*8{}");
        assert_eq!(gpus(4).fill(OsStr::new("{gpus}={nodes}*{per-node}")), "4=1*4");
    }

    #[test]
    fn a_list_of_cards_keeps_their_properties() {
        assert_eq!(cards("l4, 2xa100-40g,mem=30g,,cc=8.0,l4"), ["l4", "2xa100-40g,mem=30g,cc=8.0"]);
        assert_eq!(cards("mem=4g,cc=8.0"), ["mem=4g,cc=8.0"]);
        assert_eq!(entries("1, 2,,2,3"), ["1", "2", "3"]);
    }

    #[test]
    fn a_card_has_a_number_of_gpus_and_a_preset() {
        for (card, expected) in [
            ("rtx4090", Some((1, "rtx4090"))),
            ("8XRTX4090,mem=20g", Some((8, "rtx4090"))),
            ("h100-80g,count=8", Some((8, "h100-80g"))),
            ("512xh100-80g", Some((512, "h100-80g"))),
            ("mem=4g,count=2", Some((2, ""))),
            ("{gpus}xh100-80g", None),
            ("h100-80g,count=0", None),
            ("99999999999xl4", None),
        ] {
            assert_eq!(count_and_preset(card), expected, "{card}");
        }
    }
}
