//! The request of `memtrace fit`: its searches, and the trials that each may make.

use std::ffi::OsString;

use anyhow::{Result, bail};
use clap::ArgMatches;

use super::candidates::{Candidates, NODE, candidates, gpu_numbers, gpus_text, powers_of_two};
use super::command_line::{CommandLine, gpus_placeholder_of};
use super::mode::Goal;
use super::placeholders::{self, Filling, NODES};
use super::prices::Prices;
use crate::child_env::{FreeAtStart, PhantomArgs};
use crate::cluster::job::Job;
use crate::commands::fit::recipe::prepared::PreparedRecipe;
use crate::commands::fit::trial::launch::{PlannedTrial, check_names};

/// One search, on one card. The number of GPUs is fixed, unless it is the goal of the search.
pub(crate) struct Row {
    /// The card as the user gave it, perhaps with a placeholder for the number of GPUs; `None` for the
    /// machine's own GPU.
    card: Option<String>,
    /// The number of GPUs in a table with a row for each number; otherwise `None`.
    pub(crate) gpus: Option<u64>,
    /// The sequence length; `None` without a recipe.
    pub(crate) length: Option<u64>,
    pub(crate) values: Candidates,
    /// The memory of the card in bytes; 0 for the machine's own GPU.
    pub(crate) capacity: i64,
    /// The maximum number of GPUs in a trial of this row.
    most_gpus: u64,
    pub(crate) free_at_start: Option<FreeAtStart>,
}

/// The searches that the command line requests.
pub(crate) struct Plan {
    /// The program and its arguments.
    pub(crate) words: Vec<OsString>,
    pub(crate) goal: Goal,
    pub(crate) rows: Vec<Row>,
    /// A search ends when the last value that fits and the first that does not differ by at most this share
    /// of the value.
    pub(crate) within: f64,
    /// The maximum number of GPUs per node.
    per_node: u64,
    /// True if the user set the last candidate, with `--max`, `--values` or `--gpus`.
    pub(crate) last_is_given: bool,
    /// True if `--values` gives the columns of a table.
    pub(crate) is_grid: bool,
    /// The unit of the lengths of a recipe, in the plural.
    pub(crate) length_unit: &'static str,
    /// The name of the value that is searched for.
    pub(crate) value_name: String,
    /// True if the value that is searched for is a number of GPUs: of the card, or of a server (`--set gpus={}`).
    pub(crate) searches_gpus: bool,
    /// The prices of the cards, by which the rows of the answer are sorted.
    prices: Option<Prices>,
    /// A message for each card with numbers of GPUs that are not tried, because they are not possible.
    pub(crate) left_out: Vec<String>,
}

impl Plan {
    /// Returns the plan for the program of `line`, which is the script of `recipe` if there is one.
    ///
    /// # Errors
    /// When the request is invalid.
    pub(crate) fn new(
        matches: &ArgMatches,
        line: CommandLine,
        goal: Goal,
        recipe: Option<&PreparedRecipe>,
    ) -> Result<Plan> {
        let CommandLine { words, cards, gpus_placeholder } = line;
        let mut plan = Plan {
            words,
            goal,
            rows: Vec::new(),
            within: 0.0,
            per_node: matches.get_one::<u64>("gpus-per-node").copied().unwrap_or(NODE),
            last_is_given: ["max", "values"].iter().any(|name| matches.contains_id(name))
                || goal == Goal::FewestGpus && matches.contains_id("gpus"),
            is_grid: goal == Goal::Largest && gpus_placeholder.is_some() && matches.contains_id("values"),
            length_unit: recipe.map_or("tokens", PreparedRecipe::unit),
            value_name: match recipe {
                Some(recipe) => recipe.searched().unwrap_or_else(|| "batch".to_owned()),
                None => "value".to_owned(),
            },
            searches_gpus: goal == Goal::FewestGpus || recipe.is_some_and(PreparedRecipe::searches_gpus),
            prices: Prices::new(matches)?,
            left_out: Vec::new(),
        };
        match goal {
            Goal::FewestGpus => (plan.rows, plan.left_out) = plan.rows_of_gpus(matches, &cards)?,
            Goal::YesOrNo => {
                let values = Candidates::List(vec![String::new()]);
                plan.rows = plan.rows_of_values(matches, &cards, &[], &values)?;
            }
            Goal::Largest | Goal::Smallest => {
                let default_values = recipe.and_then(PreparedRecipe::default_values);
                let default_min = recipe.and_then(PreparedRecipe::default_min);
                let values = candidates(matches, default_values, default_min)?;
                if let Some(recipe) = recipe {
                    recipe.check(values.texts_to_check())?;
                }
                if !matches!(values, Candidates::List(_)) {
                    plan.within = matches.get_one("within").copied().unwrap_or_default();
                }
                let lengths = recipe.map_or(&[][..], |recipe| recipe.lengths.as_slice());
                plan.rows = plan.rows_of_values(matches, &cards, lengths, &values)?;
            }
        }
        let names = plan.rows.iter().flat_map(|row| {
            row.values
                .texts_to_check()
                .enumerate()
                .map(|(index, _)| plan.planned(row, &row.values, index).label)
        });
        check_names(names)?;
        Ok(plan)
    }

    /// Returns a value with its name or unit: `8 GPUs`, `batch 8`, or `value 8`.
    pub(crate) fn described(&self, value: &str) -> String {
        if self.searches_gpus { gpus_text(value).0 } else { format!("{} {value}", self.value_name) }
    }

    /// Returns the maximum number of GPUs in a trial.
    pub(crate) fn most_gpus(&self) -> u64 {
        self.rows.iter().map(|row| row.most_gpus).max().unwrap_or(1)
    }

    /// Returns a search for the smallest number of GPUs for each card, and the lines of [`Plan::left_out`].
    fn rows_of_gpus(&self, matches: &ArgMatches, cards: &[String]) -> Result<(Vec<Row>, Vec<String>)> {
        let given = ["gpus", "values"].into_iter().find(|name| matches.contains_id(name));
        let numbers = match given {
            Some(name) => gpu_numbers(matches, name)?,
            None => powers_of_two(matches)?,
        };
        let (mut rows, mut lines) = (Vec::new(), Vec::new());
        for card in cards {
            let mut row = Row {
                card: Some(card.clone()),
                gpus: None,
                length: None,
                values: Candidates::Gpus(Vec::new()),
                capacity: 0,
                most_gpus: 1,
                free_at_start: None,
            };
            let mut usable = Vec::new();
            // Each reason, with the numbers that it excludes.
            let mut left_out: Vec<(String, Vec<String>)> = Vec::new();
            for &number in &numbers {
                match self.check(matches, &mut row, &number.to_string(), Some(number)) {
                    Ok(()) => usable.push(number),
                    // If the user named the number, it must be possible. Impossible numbers that this command
                    // chose are left out.
                    Err(error) if given.is_some() => return Err(error),
                    Err(error) => {
                        let (why, number) = (error.to_string(), number.to_string());
                        // The same reason may name other numbers.
                        let kind = |why: &str| why.replace(|c: char| c.is_ascii_digit(), "");
                        match left_out.iter_mut().find(|(other, _)| kind(other) == kind(&why)) {
                            Some((_, numbers)) => numbers.push(number),
                            None => left_out.push((why, vec![number])),
                        }
                    }
                }
            }
            if let Some((why, _)) = left_out.first().filter(|_| usable.is_empty()) {
                bail!("{why}");
            }
            // The largest number was checked first; the smallest is named first.
            for (why, mut numbers) in left_out.into_iter().rev() {
                numbers.reverse();
                lines.push(format!("{card}: not tried: {}: {why}", gpus_text(&numbers.join(", ")).0));
            }
            row.values = Candidates::Gpus(usable);
            rows.push(row);
        }
        Ok((rows, lines))
    }

    /// Returns a search for a value for each card, number of GPUs and sequence length.
    fn rows_of_values(
        &self,
        matches: &ArgMatches,
        cards: &[String],
        lengths: &[u64],
        values: &Candidates,
    ) -> Result<Vec<Row>> {
        let or_none = |list: Vec<u64>| match list.as_slice() {
            [] => vec![None],
            list => list.iter().copied().map(Some).collect(),
        };
        let mut numbers = match matches.contains_id("gpus") {
            true => or_none(gpu_numbers(matches, "gpus")?),
            false => vec![None],
        };
        numbers.reverse();
        let lengths = or_none(lengths.to_vec());
        let cards: Vec<Option<&String>> =
            if cards.is_empty() { vec![None] } else { cards.iter().map(Some).collect() };
        let mut rows = Vec::new();
        for card in cards {
            for (gpus, length) in
                numbers.iter().flat_map(|gpus| lengths.iter().map(|length| (*gpus, *length)))
            {
                let mut row = Row {
                    card: card.cloned(),
                    gpus,
                    length,
                    values: values.clone(),
                    capacity: 0,
                    most_gpus: 1,
                    free_at_start: None,
                };
                self.check(matches, &mut row, &values.text(0), gpus)?;
                rows.push(row);
            }
        }
        Ok(rows)
    }

    /// Checks that a trial with this value is possible on its card. Stores the card's memory in `row`.
    fn check(&self, matches: &ArgMatches, row: &mut Row, value: &str, gpus: Option<u64>) -> Result<()> {
        let filling = self.filling(value, gpus, row.length);
        let Some(card) = row.card.as_ref().map(|card| filled_text(card, &filling)) else { return Ok(()) };
        if let Some(gpus) = gpus.filter(|gpus| *gpus > self.per_node && gpus % self.per_node != 0)
            && placeholders::has(&self.words, NODES)
        {
            bail!(
                "{gpus} GPUs do not fill whole nodes of {}; set another size with --gpus-per-node",
                self.per_node
            );
        }
        let command: Vec<OsString> = self.words.iter().map(|word| filling.fill(word)).collect();
        let card = card_of_node(matches, card, &command)?;
        let phantom = PhantomArgs::of_card(matches, &card)?;
        row.capacity = phantom.capacity().cast_signed();
        row.most_gpus = row.most_gpus.max(phantom.count());
        row.free_at_start = Some(phantom.free_at_start());
        Ok(())
    }

    /// Returns the command of a row as it was typed, with the length of the row.
    pub(crate) fn command_of(&self, row: &Row) -> Vec<String> {
        let filling = Filling { length: row.length, ..Filling::default() };
        self.words.iter().map(|word| filling.fill(word).to_string_lossy().into_owned()).collect()
    }

    fn filling(&self, value: &str, gpus: Option<u64>, length: Option<u64>) -> Filling {
        let value = (self.goal != Goal::YesOrNo).then(|| value.to_owned());
        Filling { value, gpus: gpus.map(|gpus| (gpus, self.per_node)), length }
    }

    /// Returns the trial of `row` with the candidate `index` of `values`, which are some or all of the row's
    /// values.
    pub(crate) fn planned(&self, row: &Row, values: &Candidates, index: usize) -> PlannedTrial {
        let text = values.text(index);
        let gpus = if values.are_gpus() { text.parse().ok() } else { row.gpus };
        let filling = self.filling(&text, gpus, row.length);
        let length = row.length.map(|length| length.to_string());
        let card = row.card.as_ref().map(|card| filled_text(card, &filling));
        let mut name: Vec<&str> = Vec::new();
        if self.rows.len() > 1 {
            name.extend(card.as_deref());
            name.extend(length.as_deref());
        }
        if matches!(self.goal, Goal::Largest | Goal::Smallest) || name.is_empty() {
            name.push(&text);
        }
        let label = name.join(" ");
        let command = self.words.iter().map(|word| filling.fill(word)).collect();
        PlannedTrial { command, label, value: text, card }
    }

    /// Returns true if the answer has prices.
    pub(crate) fn has_prices(&self) -> bool {
        self.prices.is_some()
    }

    /// Returns the price of the GPUs of a row: of `gpus` GPUs, if that is the result of its search. Returns `None` if
    /// the price of the card is unknown.
    pub(crate) fn price_of(&self, row: &Row, gpus: Option<u64>) -> Option<f64> {
        self.prices.as_ref()?.price(self.card_of(row), gpus.or(row.gpus))
    }

    /// Returns the card of a row as the user gave it, but without the placeholder for the number of GPUs;
    /// empty for the machine's own GPU.
    pub(crate) fn card_of<'a>(&self, row: &'a Row) -> &'a str {
        let card = row.card.as_deref().unwrap_or_default();
        gpus_placeholder_of(card)
            .and_then(|placeholder| card.strip_prefix(placeholder)?.strip_prefix(['x', 'X']))
            .unwrap_or(card)
    }
}

/// Returns the card of each node of a trial: `card`, or with `--ranks` the part of it that one node has.
///
/// # Errors
/// When the job of `--ranks` is not possible.
pub(crate) fn card_of_node(matches: &ArgMatches, card: String, command: &[OsString]) -> Result<String> {
    let Some(ranks) = matches.get_one::<String>("ranks") else { return Ok(card) };
    let words: Vec<&OsString> = command.iter().collect();
    Ok(Job::new(&card, ranks, &words, |name| std::env::var(name).ok())?.card)
}

fn filled_text(card: &str, filling: &Filling) -> String {
    filling.fill(card.as_ref()).to_string_lossy().into_owned()
}

/// Returns the plan of a command line without a recipe.
#[cfg(test)]
pub(crate) fn plan(words: &str) -> Result<Plan> {
    use super::mode::Mode;
    let matches = crate::commands::fit::command().try_get_matches_from(words.split(' ')).unwrap();
    let line = CommandLine::new(&matches)?;
    let Mode::Search(goal) = Mode::new(&matches, &line)? else { panic!("not a search: {words}") };
    Plan::new(&matches, line, goal, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_gpus_are_the_last_given_only_where_they_are_searched() {
        let table = "fit --phantom {gpus}xh100-80g --gpus 8 -- python t.py {gpus} {}";
        let plan_of_table = plan(table).unwrap();
        assert!(!plan_of_table.last_is_given);
        assert_eq!(plan_of_table.most_gpus(), 8);
        assert!(plan(&table.replace("--gpus 8", "--gpus 8 --max 64")).unwrap().last_is_given);
        assert!(plan("fit --phantom {}xh100-80g --gpus 8 -- python t.py {}").unwrap().last_is_given);
        assert!(!plan("fit --phantom {}xh100-80g -- python t.py {}").unwrap().last_is_given);
    }

    #[test]
    fn numbers_of_gpus_that_are_left_out_are_reported() {
        let job = "fit --phantom {}xh100-80g --ranks 1 -- python t.py {}";
        let [line] = &plan(job).unwrap().left_out[..] else { panic!("one line") };
        assert!(line.starts_with("{}xh100-80g: not tried: 1 GPU: --ranks"), "{line}");
        // On nodes of 8 GPUs, 12 ranks do not fill whole nodes, so 12 GPUs are left out. 24 GPUs are tried.
        let lines = plan(&job.replace("--ranks", "--min 12 --max 24 --ranks")).unwrap().left_out;
        assert!(
            lines.len() == 1 && lines[0].contains("not tried: 12 GPUs: 12 ranks do not fill whole nodes"),
            "{lines:?}"
        );
        assert!(plan(&job.replace("--ranks 1", "--ranks 0")).unwrap().left_out.is_empty());
        // Each reason has a line.
        let lines = plan(&job.replace("--ranks 1", "--ranks 9 --min 3 --max 24")).unwrap().left_out;
        let [few, part] = &lines[..] else { panic!("two lines: {lines:?}") };
        assert!(few.contains("not tried: 3, 6 GPUs: --ranks 9: there is no rank 9"), "{few}");
        assert!(part.contains("not tried: 12 GPUs: 12 ranks do not fill whole nodes"), "{part}");
        let error = plan(&job.replace("--ranks 1", "--min 0")).err().unwrap().to_string();
        assert!(error.starts_with("--min 0 is not a number of GPUs"), "{error}");
        let error = plan("fit --phantom {}xh100-80g --values 1,two -- python t.py {}").err().unwrap();
        assert!(error.to_string().starts_with("--values: `two` is not a number of GPUs"), "{error}");
    }
}
