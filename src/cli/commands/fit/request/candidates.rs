//! The candidates of a search, by index. Each needs at least as much memory as the candidate before it.

use anyhow::{Context, Result, bail};
use clap::ArgMatches;

use super::placeholders::entries;

/// The largest number to try without `--max`.
const LARGEST: usize = 1 << 20;
/// The maximum number of values that `--smallest` tries without `--values`.
const MOST_LISTED: usize = 10_000;

/// The largest number of GPUs to try without `--max` if every rank runs: one node.
pub(crate) const NODE: u64 = 8;
/// The largest number of GPUs to try without `--max` if only some ranks run (`--ranks`).
const CLUSTER: u64 = 1024;
/// The absolute maximum number of GPUs.
const MOST_GPUS: u64 = 1 << 20;

/// The candidates of one search.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Candidates {
    /// `first`, `first + step`, ..., up to the index `last`.
    Numbers { first: usize, step: usize, last: usize },
    /// The candidates of `--values`.
    List(Vec<String>),
    /// Numbers of GPUs, the largest first, because each GPU needs less memory if there are more GPUs.
    Gpus(Vec<u64>),
}

impl Candidates {
    /// Returns the index of the last candidate.
    pub(crate) fn last(&self) -> usize {
        match self {
            Candidates::Numbers { last, .. } => *last,
            Candidates::List(list) => list.len().saturating_sub(1),
            Candidates::Gpus(list) => list.len().saturating_sub(1),
        }
    }

    pub(crate) fn text(&self, index: usize) -> String {
        match self {
            Candidates::Numbers { first, step, .. } => (first + step * index).to_string(),
            Candidates::List(list) => list.get(index).cloned().unwrap_or_default(),
            Candidates::Gpus(list) => list.get(index).map(u64::to_string).unwrap_or_default(),
        }
    }

    /// Returns the texts that may be invalid. The numbers of a sequence all have the same form, so the first is enough.
    pub(crate) fn texts_to_check(&self) -> impl Iterator<Item = String> {
        let last = if matches!(self, Candidates::Numbers { .. }) { 0 } else { self.last() };
        (0..=last).map(move |index| self.text(index))
    }

    /// Returns true if these are numbers of GPUs.
    pub(crate) fn are_gpus(&self) -> bool {
        matches!(self, Candidates::Gpus(_))
    }

    /// Removes a candidate of a list. Returns true if none is left.
    pub(crate) fn leave_out(&mut self, text: &str) -> bool {
        match self {
            Candidates::Numbers { .. } => return false,
            Candidates::List(list) => list.retain(|value| value != text),
            Candidates::Gpus(list) => list.retain(|gpus| gpus.to_string() != text),
        }
        matches!(self, Candidates::List(list) if list.is_empty())
            || matches!(self, Candidates::Gpus(list) if list.is_empty())
    }

    /// Returns the value of the first candidate, in units of the step between two candidates; 0 for values
    /// that have no step.
    pub(crate) fn first_in_steps(&self) -> f64 {
        match self {
            Candidates::Numbers { first, step, .. } => *first as f64 / *step as f64,
            Candidates::List(_) | Candidates::Gpus(_) => 0.0,
        }
    }

    /// Returns the candidate that is tried first: the one that needs the least memory or, for numbers of
    /// GPUs, one in the middle, because the largest job takes the longest to start.
    pub(crate) fn start(&self) -> usize {
        match self {
            Candidates::Numbers { .. } | Candidates::List(_) => 0,
            Candidates::Gpus(list) => list.len() / 2,
        }
    }

    /// Returns the quantity in which memory grows about linearly: the value, or the share of each GPU. For a
    /// list of words, this is the position in the list, counted from 1.
    pub(crate) fn position(&self, index: usize) -> f64 {
        match self {
            Candidates::Numbers { first, step, .. } => (first + step * index) as f64,
            _ => self.positions().get(index).copied().unwrap_or(f64::MAX),
        }
    }

    /// Returns the positions of all candidates of a list.
    fn positions(&self) -> Vec<f64> {
        match self {
            Candidates::Numbers { .. } => Vec::new(),
            Candidates::List(list) => {
                numbers(list).unwrap_or_else(|| (1..=list.len()).map(|place| place as f64).collect())
            }
            Candidates::Gpus(list) => list.iter().map(|gpus| 1.0 / *gpus as f64).collect(),
        }
    }

    /// Returns the last candidate whose position is at most `position`, or 0 if all are higher. For
    /// [`Candidates::Numbers`], the result may exceed the last candidate.
    pub(crate) fn index_at(&self, position: f64) -> usize {
        if let Candidates::Numbers { first, step, .. } = self {
            // If the float is too large, the conversion returns the largest integer.
            return (position.max(0.0) as usize).saturating_sub(*first) / step;
        }
        // The tolerance is needed because a share is the inverse of a number, so equal shares may differ in the last
        // digit.
        let most = position * (1.0 + 1e-9);
        self.positions().iter().rposition(|position| *position <= most).unwrap_or(0)
    }
}

/// Returns the entries as numbers, or `None` unless all entries are numbers in ascending order.
fn numbers(list: &[String]) -> Option<Vec<f64>> {
    let numbers: Option<Vec<f64>> = list.iter().map(|entry| entry.parse().ok()).collect();
    numbers.filter(|numbers| numbers.is_sorted() && numbers.iter().all(|number| number.is_finite()))
}

/// Returns the values of `--values`, the largest first.
fn descending(list: Vec<String>) -> Result<Candidates> {
    let number = |word: &String| word.parse::<f64>().ok().filter(|number| number.is_finite());
    let numbers: Option<Vec<f64>> = list.iter().map(number).collect();
    let Some(numbers) = numbers else { bail!("--smallest needs numbers in --values, such as 0,8,16,24") };
    let mut sorted: Vec<(f64, String)> = numbers.into_iter().zip(list).collect();
    sorted.sort_by(|one, other| other.0.total_cmp(&one.0));
    Ok(Candidates::List(sorted.into_iter().map(|(_, word)| word).collect()))
}

/// Returns the values of `--values`; empty without the option.
///
/// # Errors
/// When the option names no value.
pub(crate) fn listed(matches: &ArgMatches) -> Result<Vec<String>> {
    let Some(list) = matches.get_one::<String>("values").map(|list| entries(list)) else {
        return Ok(Vec::new());
    };
    if list.is_empty() {
        bail!("--values names no value; for example: --values 512,1024,2048");
    }
    Ok(list)
}

/// Returns the values of `{}` in the command. `default_values` are the values if the user names none, and
/// `default_min` is the first value if the user gives no `--min`.
pub(crate) fn candidates(
    matches: &ArgMatches,
    default_values: Option<Vec<String>>,
    default_min: Option<usize>,
) -> Result<Candidates> {
    let is_smallest = matches.get_flag("smallest");
    let has = |name: &&str| matches.contains_id(name);
    let is_default = !["values", "min", "max", "multiple-of"].iter().any(has);
    if let Some(values) = default_values.filter(|_| is_default) {
        return if is_smallest { descending(values) } else { Ok(Candidates::List(values)) };
    }
    let list = listed(matches)?;
    if !list.is_empty() {
        return if is_smallest { descending(list) } else { Ok(Candidates::List(list)) };
    }
    let number = |name| matches.get_one::<u64>(name).map(|number| *number as usize);
    let step = number("multiple-of").unwrap_or(1).max(1);
    let first = number("min").or(default_min).unwrap_or(step).next_multiple_of(step);
    let most = number("max").unwrap_or(LARGEST.max(first));
    if most < first {
        bail!("--max {most} is smaller than the first value, {first}");
    }
    if is_smallest {
        if number("max").is_none() {
            bail!(
                "--smallest begins with the largest value: give --max, such as the number of layers, or --values"
            );
        }
        if (most - first) / step >= MOST_LISTED {
            bail!("--smallest: {first} to {most} are more than {MOST_LISTED} values; use --multiple-of");
        }
        let index_to_text = |index: usize| (first + step * index).to_string();
        return Ok(Candidates::List((0..=(most - first) / step).rev().map(index_to_text).collect()));
    }
    if first == 0 {
        bail!("--min 0 is only for --smallest");
    }
    Ok(Candidates::Numbers { first, step, last: (most - first) / step })
}

/// Returns the numbers of GPUs in the list of the option `name`, in descending order.
pub(crate) fn gpu_numbers(matches: &ArgMatches, name: &str) -> Result<Vec<u64>> {
    let list = matches.get_one::<String>(name).map_or("", String::as_str);
    let number = |word: String| -> Result<u64> {
        let number = word.parse().ok().filter(|number| (1..=MOST_GPUS).contains(number));
        number.with_context(|| {
            format!(
                "--{name}: `{word}` is not a number of GPUs; expected numbers from 1 to {MOST_GPUS}, such \
                     as 8,16,32"
            )
        })
    };
    let mut numbers: Vec<u64> = entries(list).into_iter().map(number).collect::<Result<_>>()?;
    if numbers.is_empty() {
        bail!("no number of GPUs was given; for example: --{name} 8,16,32");
    }
    numbers.sort_unstable_by(|one, other| other.cmp(one));
    numbers.dedup();
    Ok(numbers)
}

/// Returns the numbers of GPUs to try if the user names none, the largest first: `--min`, rounded up to a
/// multiple of `--multiple-of`, times powers of two, up to `--max`. The default of `--max` is [`CLUSTER`]
/// with `--ranks`, else [`NODE`].
pub(crate) fn powers_of_two(matches: &ArgMatches) -> Result<Vec<u64>> {
    let number = |name| matches.get_one::<u64>(name).copied();
    let default_max = if matches.contains_id("ranks") { CLUSTER } else { NODE };
    let step = number("multiple-of").unwrap_or(1);
    let first = number("min").unwrap_or(step).next_multiple_of(step);
    let most = number("max").unwrap_or(default_max.max(first));
    if first == 0 {
        bail!("--min 0 is not a number of GPUs; the smallest is 1");
    }
    if most < first || first > MOST_GPUS {
        bail!("there is no number of GPUs from {first} to {}", most.min(MOST_GPUS));
    }
    let all = std::iter::successors(Some(first), |gpus| gpus.checked_mul(2));
    let mut numbers: Vec<u64> = all.take_while(|gpus| *gpus <= most.min(MOST_GPUS)).collect();
    numbers.reverse();
    Ok(numbers)
}

/// Returns the number of GPUs of a trial, and the verb that follows it.
pub(crate) fn gpus_text(number: &str) -> (String, &'static str) {
    match number {
        "1" => ("1 GPU".to_owned(), "is"),
        number => (format!("{number} GPUs"), "are"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_candidate_is_found_by_its_position() {
        let values = Candidates::Numbers { first: 8, step: 4, last: 100 };
        assert_eq!((values.text(3), values.index_at(values.position(3))), ("20".to_owned(), 3));
        assert_eq!((values.index_at(0.0), values.index_at(f64::MAX) > 100), (0, true));
        let values = Candidates::List(["512", "1024", "4096"].map(str::to_owned).to_vec());
        assert_eq!((values.index_at(1500.0), values.index_at(9000.0), values.index_at(1.0)), (1, 2, 0));
        let values = Candidates::List(["small", "large"].map(str::to_owned).to_vec());
        assert_eq!((values.position(1), values.index_at(1.5)), (2.0, 0));
        let values = Candidates::Gpus(vec![64, 32, 16, 8]);
        assert_eq!((values.text(0), values.start()), ("64".to_owned(), 2));
        // The position 1/12 means 12 GPUs, so the last candidate with at most this share is 16 GPUs.
        assert_eq!(values.index_at(1.0 / 12.0), 2);
        assert!((0..4).all(|index| values.index_at(values.position(index)) == index));
    }
}
