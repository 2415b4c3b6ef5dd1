//! The lists of possible values in an error, nearest to the given value.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use memtrace_trace::counts::count;
use memtrace_util::names::distance;

/// The maximum number of values that an error lists.
const LISTED: usize = 8;
/// The maximum number of separate ranges of numbers that are kept. Further numbers are ignored.
const MOST_RANGES: usize = 4096;

/// Returns the names that are most similar to `wanted`, best match first, and the number of other names. Names that begin
/// with `wanted` are before all others.
#[must_use]
pub fn nearest_names<'a>(names: impl IntoIterator<Item = &'a str>, wanted: &str) -> String {
    let mut names: Vec<&str> = names.into_iter().collect::<BTreeSet<&str>>().into_iter().collect();
    // The sort is stable, so equally similar names stay in alphabetical order.
    names.sort_by_cached_key(|name| (!name.starts_with(wanted), distance(name, wanted)));
    let mut list = names[..names.len().min(LISTED)].join(", ");
    if names.len() > LISTED {
        let _ = write!(list, " and {} more", count((names.len() - LISTED) as u64));
    }
    list
}

/// Returns the ranges of `numbers` that are nearest to `wanted`, in ascending order, and the number of other
/// ranges.
#[must_use]
pub fn nearest_numbers(numbers: impl IntoIterator<Item = i64>, wanted: i64) -> String {
    let mut ranges = Ranges::default();
    numbers.into_iter().for_each(|number| ranges.add(number));
    ranges.list(wanted)
}

/// A set of numbers, stored as ranges.
#[derive(Clone, Debug, Default)]
pub(super) struct Ranges(Vec<(i64, i64)>);

impl Ranges {
    pub(super) fn add(&mut self, number: i64) {
        // If the set is full, a number may extend a range, but adds no new one.
        let is_full = self.0.len() >= MOST_RANGES;
        let at = self.0.partition_point(|(_, last)| *last < number.saturating_sub(1));
        match self.0.get_mut(at) {
            Some((first, last)) if (first.saturating_sub(1)..=last.saturating_add(1)).contains(&number) => {
                (*first, *last) = ((*first).min(number), (*last).max(number));
                let joins = self.0.get(at + 1).is_some_and(|next| next.0 <= self.0[at].1.saturating_add(1));
                if joins {
                    let (_, last) = self.0.remove(at + 1);
                    self.0[at].1 = self.0[at].1.max(last);
                }
            }
            _ if is_full => {}
            _ => self.0.insert(at, (number, number)),
        }
    }

    /// Adds the ranges of another set.
    pub(super) fn join(&mut self, other: Ranges) {
        self.0.extend(other.0);
        self.0.sort_unstable();
        self.0.dedup_by(|next, range| {
            let joins = next.0 <= range.1.saturating_add(1);
            if joins {
                range.1 = range.1.max(next.1);
            }
            joins
        });
    }

    pub(super) fn has_any(&self, (first, last): (i64, i64)) -> bool {
        self.0.iter().any(|range| range.0 <= last && first <= range.1)
    }

    pub(super) fn list(&self, wanted: i64) -> String {
        let away =
            |range: &(i64, i64)| wanted.saturating_sub(wanted.clamp(range.0, range.1)).saturating_abs();
        let mut ranges = self.0.clone();
        ranges.sort_by_key(away);
        ranges.truncate(LISTED);
        ranges.sort_unstable();
        let show = |(first, last): &(i64, i64)| match (first, last) {
            (first, last) if first == last => first.to_string(),
            (-1, 0) => "-1, 0".to_owned(),
            (-1, last) => format!("-1, 0-{last}"),
            (first, last) => format!("{first}-{last}"),
        };
        let mut list = ranges.iter().map(show).collect::<Vec<String>>().join(", ");
        if self.0.len() > LISTED {
            let _ = write!(list, " and {} more", count((self.0.len() - LISTED) as u64));
        }
        list
    }
}

#[cfg(test)]
mod tests {

    use super::*;

    #[test]
    fn selectors_list_the_nearest_numbers_as_ranges() {
        assert_eq!(nearest_numbers([0, 1, 2, 5, 7, 6], 9), "0-2, 5-7");
        assert_eq!(nearest_numbers([-1, 0, 1], 9), "-1, 0-1");
        assert_eq!(
            nearest_numbers((0..20).map(|n| n * 10), 95),
            "60, 70, 80, 90, 100, 110, 120, 130 and 12 more"
        );
        assert_eq!(nearest_numbers([], 0), "");
        let mut ranges = Ranges::default();
        [0, 2, 1, 1, -3].into_iter().for_each(|number| ranges.add(number));
        assert_eq!(ranges.0, [(-3, -3), (0, 2)]);
        (0..2 * MOST_RANGES as i64).for_each(|number| ranges.add(number * 2));
        assert!(ranges.0.len() <= MOST_RANGES);
    }

    #[test]
    fn selectors_list_the_nearest_names_first() {
        let names = ["GPT.h.1", "GPT.head", "GPT.h.0", "GPT.wte"];
        assert_eq!(nearest_names(names, "GPT.h.00"), "GPT.h.0, GPT.h.1, GPT.head, GPT.wte");
        assert_eq!(
            nearest_names(["oom", "optimizer_state", "summary"], "opt"),
            "optimizer_state, oom, summary"
        );
        let many: Vec<String> = (0..20).map(|number| format!("layer{number}")).collect();
        let list = nearest_names(many.iter().map(String::as_str), "layer7");
        assert!(list.starts_with("layer7, ") && list.ends_with(" and 12 more"), "{list}");
    }
}
