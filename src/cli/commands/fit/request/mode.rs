//! What a command line of `memtrace fit` asks for, and which of its options then have an effect.
//!
//! The rules of a recipe that depend on its settings are in [`checks`](crate::commands::fit::recipe::checks).

use anyhow::{Result, bail};
use clap::ArgMatches;
use clap::parser::ValueSource;

use super::command_line::CommandLine;
use super::placeholders::{self, GPUS, NODES, PER_NODE, VALUE};
use crate::commands::fit::recipe::catalog::Recipe;

/// What the command does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Runs the program once for each card and value, and prints a figure of its output: `--ask`, or the KV cache
    /// of the recipe `serve`.
    Figure,
    /// Searches.
    Search(Goal),
}

/// The goal of the searches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Goal {
    /// The largest value of `{}` in the command that fits.
    Largest,
    /// The smallest value that fits, because memory shrinks as the value grows. The values are in descending order.
    Smallest,
    /// The smallest number of GPUs on which the program fits.
    FewestGpus,
    /// Whether the program fits at all, because the command has no placeholder for a value.
    YesOrNo,
}

/// A case, the options that have no effect in it, the reason, and what to do.
type Rule = (bool, &'static [&'static str], &'static str, &'static str);

impl Mode {
    /// Returns what the command line asks for.
    ///
    /// # Errors
    /// When an option has no effect, or lacks what it needs.
    pub(crate) fn new(matches: &ArgMatches, line: &CommandLine) -> Result<Mode> {
        let mode = Mode::wanted(matches, line)?;
        for (is_so, options, why, instead) in mode.rules(matches, line) {
            if let Some(name) = options.iter().find(|name| is_so && is_given(matches, name)) {
                bail!("{why}, so that --{name} has no effect: {instead}");
            }
        }
        mode.check_needs(matches, line)?;
        mode.check_gpus(matches, line)?;
        Ok(mode)
    }

    /// Returns what the placeholders and the recipe ask for, before the options are checked.
    fn wanted(matches: &ArgMatches, line: &CommandLine) -> Result<Mode> {
        let recipe = matches.get_one::<String>("recipe").and_then(|name| Recipe::named(name));
        let is_server = recipe.is_some_and(Recipe::is_server);
        let has_value =
            recipe.is_some() || line.gpus_placeholder != Some(VALUE) && placeholders::has(&line.words, VALUE);
        Ok(match line.gpus_placeholder {
            _ if matches.contains_id("ask") || is_server && !searches_setting(matches) => Mode::Figure,
            _ if has_value && matches.get_flag("smallest") => Mode::Search(Goal::Smallest),
            _ if has_value => Mode::Search(Goal::Largest),
            Some(_) => Mode::Search(Goal::FewestGpus),
            None if line.cards.len() > 1 => Mode::Search(Goal::YesOrNo),
            None => bail!(
                "the command has no placeholder for the value; write {{}} in its place: memtrace fit -- \
                 python train.py --batch {{}}; or name several cards: --phantom a100-40g,h100-80g"
            ),
        })
    }

    /// Returns the options that have no effect.
    fn rules(self, matches: &ArgMatches, line: &CommandLine) -> [Rule; 10] {
        let (is_recipe, is_figure) = (matches.contains_id("recipe"), self == Mode::Figure);
        let is_fewest = self == Mode::Search(Goal::FewestGpus);
        let has_nodes =
            [NODES, PER_NODE].iter().any(|placeholder| placeholders::has(&line.words, placeholder));
        let (one, it) = ("leave one of them out", "leave it out");
        [
            (is_recipe, &["ask"], "--recipe runs its own script and prints its own figures", one),
            (matches.contains_id("worst"), &["seq"], "--worst gives the length", one),
            (
                is_figure && is_recipe,
                &["values", "min", "max", "multiple-of", "within", "gpus", "batch", "prices", "host-mem"],
                "--recipe serve runs once for each card and length, because vLLM fills the card at any batch",
                "leave it out, or search for a setting: --set KEY={}",
            ),
            (
                is_figure && !is_recipe,
                &["min", "max", "multiple-of", "within", "smallest", "gpus", "prices", "host-mem"],
                "--ask runs the program once for each card and each of --values",
                one,
            ),
            (
                self == Mode::Search(Goal::YesOrNo),
                &["values", "min", "max", "multiple-of", "within", "smallest"],
                "the command has no {} for a value",
                "write {} in its place, such as --batch {}",
            ),
            (
                matches.contains_id("values"),
                &["min", "max", "multiple-of", "within"],
                "--values names all values to try",
                one,
            ),
            (
                is_fewest && matches.contains_id("gpus"),
                &["min", "max", "multiple-of", "within"],
                "--gpus names all numbers of GPUs to try",
                one,
            ),
            (
                is_fewest,
                &["within", "smallest"],
                "a search for the number of GPUs finds the fewest of those that it tries",
                it,
            ),
            (self == Mode::Search(Goal::Smallest), &["within"], "--smallest finds the exact limit", it),
            (!has_nodes, &["gpus-per-node"], "the command has neither {nodes} nor {per-node}", it),
        ]
    }

    /// Checks that options have what they need.
    fn check_needs(self, matches: &ArgMatches, line: &CommandLine) -> Result<()> {
        let is_recipe = matches.contains_id("recipe");
        if is_recipe && !line.words.is_empty() {
            bail!("--recipe runs its own script: leave out the command");
        }
        let has_values = matches.contains_id("values");
        if self == Mode::Figure && !is_recipe && placeholders::has(&line.words, VALUE) != has_values {
            bail!("with --ask, give both {{}} in the command and --values, or neither");
        }
        if let Some(batch) = matches.get_one::<u64>("batch").filter(|_| !searches_setting(matches)) {
            bail!(
                "--batch {batch} is for a search for another setting, --set KEY={{}}; to try one batch: \
                 --values {batch}"
            );
        }
        Ok(())
    }

    /// Checks that `--gpus` is given for a table by numbers of GPUs, and only where the number varies.
    fn check_gpus(self, matches: &ArgMatches, line: &CommandLine) -> Result<()> {
        const CARDS: &str =
            "does not vary the number of GPUs; list the cards: --phantom 2xh100-80g,4xh100-80g";
        let has_gpus = matches.contains_id("gpus");
        match (self, line.gpus_placeholder) {
            (_, None) if has_gpus => {
                bail!("--gpus needs a placeholder for the GPUs in --phantom: --phantom {GPUS}xh100-80g")
            }
            (Mode::Figure, Some(_)) if matches.contains_id("ask") => bail!("--ask {CARDS}"),
            (Mode::Figure, Some(_)) => bail!("--recipe serve {CARDS}"),
            (Mode::Search(Goal::Smallest), Some(_)) => bail!("--smallest {CARDS}"),
            (Mode::Search(Goal::Largest), Some(GPUS)) if !has_gpus => {
                bail!("list the numbers of GPUs for the table: --gpus 8,16,32")
            }
            (Mode::Search(Goal::FewestGpus), Some(placeholder))
                if has_gpus && matches.contains_id("values") =>
            {
                bail!(
                    "{placeholder} is the number of GPUs: give only one of --gpus and --values; for a table by both, \
                 write {GPUS} in --phantom and {VALUE} in the command"
                )
            }
            _ => Ok(()),
        }
    }
}

/// Returns true if the user gave an option. An option with a default always has a value.
fn is_given(matches: &ArgMatches, name: &str) -> bool {
    matches.value_source(name) == Some(ValueSource::CommandLine)
}

/// Returns true if a setting of a recipe is searched for: `--set KEY={}`.
fn searches_setting(matches: &ArgMatches) -> bool {
    let mut changes = matches.get_many::<String>("set").into_iter().flatten();
    changes.any(|change| change.split_once('=').is_some_and(|(_, value)| value == VALUE))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(words: &str) -> Result<Mode> {
        let matches = crate::commands::fit::command().try_get_matches_from(words.split(' ')).unwrap();
        Mode::new(&matches, &CommandLine::new(&matches)?)
    }

    #[test]
    fn the_placeholders_and_the_recipe_decide_what_is_wanted() {
        for (words, expected) in [
            ("fit -- python t.py {}", Mode::Search(Goal::Largest)),
            ("fit --phantom {gpus}xl4 --gpus 1,2 -- python t.py {gpus} {}", Mode::Search(Goal::Largest)),
            ("fit --smallest --max 8 -- python t.py {}", Mode::Search(Goal::Smallest)),
            ("fit --phantom {}xl4 -- python t.py {}", Mode::Search(Goal::FewestGpus)),
            ("fit --phantom {gpus}xl4 --values 1,2 -- python t.py {gpus}", Mode::Search(Goal::FewestGpus)),
            ("fit --phantom l4,t4 -- python t.py", Mode::Search(Goal::YesOrNo)),
            ("fit --ask x -- python t.py", Mode::Figure),
            ("fit --recipe serve --model m --phantom l4", Mode::Figure),
            ("fit --recipe serve --model m --smallest --set gpus={} --batch 8", Mode::Search(Goal::Smallest)),
            ("fit --recipe lora --model m --phantom l4", Mode::Search(Goal::Largest)),
        ] {
            assert_eq!(mode(words).unwrap(), expected, "{words}");
        }
    }

    #[test]
    fn options_without_effect_are_refused() {
        let cards = "fit --phantom l4,t4 OPTION -- python t.py";
        let gpus = "fit --phantom {}xl4 OPTION -- python t.py {}";
        let value = "fit --phantom l4 OPTION -- python t.py {}";
        let serve = "fit --recipe serve --model m --phantom l4 OPTION";
        let ask = "fit --phantom l4 --ask x OPTION -- python t.py";
        for (words, options, why) in [
            (
                cards,
                "--values 1,2;--min 2;--max 2;--multiple-of 2;--within 2;--smallest",
                "no {} for a value",
            ),
            (gpus, "--within 2;--smallest", "finds the fewest"),
            (gpus, "--min 2 --gpus 2,4;--within 2 --gpus 2,4", "--gpus names all numbers"),
            (value, "--min 2 --values 4;--within 2 --values 4", "--values names all values"),
            (value, "--within 2 --smallest --max 8", "--smallest finds the exact limit"),
            (value, "--gpus-per-node 4", "neither {nodes} nor {per-node}"),
            (value, "--seq 8 --recipe x --worst t", "--worst gives the length"),
            (
                serve,
                "--values 1;--min 2;--within 2;--batch 8;--prices p;--gpus 2;--host-mem 1k",
                "fills the card at any batch",
            ),
            (serve, "--ask x", "--recipe runs its own script"),
            (ask, "--min 2;--within 2;--smallest;--prices p;--gpus 2;--host-mem 1k", "once for each card"),
        ] {
            for option in options.split(';') {
                let words = words.replace("OPTION", option).replace("--recipe x", "--recipe lora --model m");
                let error = mode(&words).unwrap_err().to_string();
                let name = option.split(' ').next().unwrap_or_default();
                let is_named = error.contains(&format!("so that {name} has no effect: "));
                assert!(is_named && error.contains(why), "{words}: {error}");
            }
        }
    }

    #[test]
    fn options_that_lack_what_they_need_are_refused() {
        for (words, why) in [
            (
                "fit --recipe lora --model m -- python t.py {}",
                "--recipe runs its own script: leave out the command",
            ),
            ("fit --recipe lora --model m --batch 4", "to try one batch: --values 4"),
            (
                "fit --recipe serve --model m --phantom {gpus}xl4",
                "--recipe serve does not vary the number of GPUs",
            ),
            (
                "fit --smallest --phantom {gpus}xl4 --gpus 1 -- python t.py {gpus} {}",
                "--smallest does not vary",
            ),
        ] {
            let error = mode(words).unwrap_err().to_string();
            assert!(error.contains(why), "{words}: {error}");
        }
    }
}
