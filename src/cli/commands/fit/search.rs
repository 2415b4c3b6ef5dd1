//! Chooses the next value that `memtrace fit` tries.

/// How far a step goes beyond the largest value that fits, while no value was too large: a program that reads its
/// data into host memory would run out of that with a larger one.
const GROWTH: usize = 16;

/// A search for the last candidate that fits. Candidates are indices from 0; each needs at least the memory of the one
/// before it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Search {
    /// The last candidate known to fit.
    pub(super) fits: Option<usize>,
    /// The first candidate known not to fit.
    pub(super) too_big: Option<usize>,
    /// The last candidate.
    last: usize,
    /// What the value of candidate 0 is in steps between two candidates.
    first: f64,
    /// The search ends when the bounds are this share of the value apart; 0 for neighbours.
    within: f64,
    /// The steps made since both bounds are known.
    narrowed: usize,
}

impl Search {
    /// A search among the candidates from 0 to `last`. `first` is the value of candidate 0, in steps between two
    /// candidates; the answer may be `within` this share of a value away from the last that fits.
    pub(super) fn new(last: usize, first: f64, within: f64) -> Search {
        Search { last, first, within, ..Search::default() }
    }

    /// The candidate to try next; `None` when the search is over.
    ///
    /// It starts with the first two candidates and then follows `guess`, the candidate at which memory would be full, but
    /// at most [`GROWTH`] times as far as it has come. Once a candidate does not fit, it alternates between the guess and
    /// the middle of the bounds: a good guess ends the search soon, and the middle bounds the number of steps.
    pub(super) fn next(&self, guess: Option<usize>) -> Option<usize> {
        match (self.fits, self.too_big) {
            (None, None) => Some(0),
            (None, Some(_)) => None,
            (Some(fits), None) if fits >= self.last => None,
            (Some(0), None) => Some(1),
            (Some(fits), None) => {
                let least = fits + self.gap(fits);
                // The gap is a share of the value, which may be far from the index with `--min`.
                let most = (GROWTH * (fits + 1) - 1).max(least);
                let next = guess.unwrap_or(most).clamp(least, most);
                Some(next.min(self.last))
            }
            (Some(fits), Some(too_big)) => {
                let gap = self.gap(fits);
                if too_big - fits <= gap {
                    return None;
                }
                let middle = fits + (too_big - fits) / 2;
                let next = match guess.filter(|_| self.narrowed.is_multiple_of(2)) {
                    // What is left to know is whether the limit is here.
                    Some(guess) if guess < fits + gap => fits + gap,
                    Some(guess) if guess < too_big => guess,
                    Some(guess) if guess < too_big + gap => too_big - gap,
                    _ => middle,
                };
                Some(next.clamp(fits + 1, too_big - 1))
            }
        }
    }

    /// Records whether the candidate `index` fits.
    pub(super) fn record(&mut self, index: usize, fits: bool) {
        self.narrowed += usize::from(self.fits.is_some() && self.too_big.is_some());
        if fits {
            self.fits = Some(self.fits.map_or(index, |before| before.max(index)));
        } else {
            self.too_big = Some(self.too_big.map_or(index, |before| before.min(index)));
        }
    }

    /// The distance of the bounds at which the search ends.
    fn gap(&self, fits: usize) -> usize {
        ((self.within * (self.first + fits as f64)) as usize).max(1)
    }
}

/// A candidate that fits, and the bytes at its peak.
pub(super) type Point = (usize, i64);

/// The candidate at which memory would be full, by the line through two candidates that fit; `room` is the memory in bytes
/// that the second one leaves. `None` when the line does not rise.
pub(super) fn full_at([(a, less), (b, more)]: [Point; 2], room: i64) -> Option<usize> {
    let slope = (more - less) as f64 / (b.saturating_sub(a)) as f64;
    // torch cannot allocate what the CUDA context takes, nor fill the rest without gaps.
    let room = room as f64 * 0.97;
    (slope > 0.0 && slope.is_finite() && room >= 0.0).then(|| b.saturating_add((room / slope) as usize))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The candidates that a search tries, each with the memory that it needs, of `capacity`.
    fn search(last: usize, within: f64, capacity: i64, need: impl Fn(usize) -> i64) -> (Search, usize) {
        let mut search = Search::new(last, 1.0, within);
        let mut points: Vec<Point> = Vec::new();
        let mut steps = 0;
        loop {
            points.sort_unstable();
            let guess = match points.as_slice() {
                [.., a, b] => full_at([*a, *b], capacity - b.1),
                _ => None,
            };
            let Some(index) = search.next(guess) else { return (search, steps) };
            assert!(
                index <= last && !points.iter().any(|point| point.0 == index),
                "{index} again: {search:?}"
            );
            let fits = need(index) <= capacity;
            search.record(index, fits);
            if fits {
                points.push((index, need(index)));
            }
            steps += 1;
            assert!(steps < 100, "the search does not end: {search:?}");
        }
    }

    #[test]
    fn fit_finds_the_last_candidate_that_fits() {
        for limit in 0..200 {
            for last in [0, 1, 7, 50, 1 << 20] {
                let needs: [fn(usize) -> i64; 3] = [
                    |index| index as i64,
                    |index| (index * index) as i64,
                    // What the program needs whatever its value is.
                    |index| (index.max(20)) as i64,
                ];
                for need in needs {
                    let capacity = need(limit) - 1;
                    let all =
                        (0..=last).take_while(|index| *index < 1000 && need(*index) <= capacity).count();
                    let (found, steps) = search(last, 0.0, capacity, need);
                    assert_eq!(found.fits, all.checked_sub(1), "{limit} {last}");
                    assert_eq!(found.too_big, (all <= last).then_some(all), "{limit} {last}");
                    assert!(steps <= 20, "{steps} steps to {limit} of {last}");
                }
            }
        }
    }

    #[test]
    fn fit_starts_from_any_smallest_value() {
        for first in [4096.0, 1e6, 1e12] {
            for within in [0.01, 0.1, 0.5] {
                let mut search = Search::new(1 << 20, first, within);
                for index in [0, 1] {
                    assert_eq!(search.next(None), Some(index));
                    search.record(index, true);
                }
                let next = search.next(Some(5)).unwrap();
                assert!(next > 1 && next <= 1 << 20, "{first} {within}: {next}");
            }
        }
    }

    #[test]
    fn fit_needs_few_runs_within_a_share_of_the_value() {
        // A base of 2.5 GB, and 160 kB for each value: the limit is 135,424 of a card with 24 GB.
        let need = |index: usize| 2_500_000_000 + 160_000 * index as i64;
        let (found, steps) = search(1 << 20, 0.01, 24_167_840_000, need);
        let (fits, too_big) = (found.fits.unwrap(), found.too_big.unwrap());
        assert!(fits <= 135_424 && 135_424 < too_big && too_big - fits <= 1355, "{found:?}");
        assert!(steps <= 8, "{steps} steps");
        // A batch: the first two runs show the slope.
        let (found, steps) = search(1 << 20, 0.01, 80_000, |index| 3000 + 1700 * index as i64);
        assert_eq!((found.fits, found.too_big), (Some(45), Some(46)));
        assert!(steps <= 7, "{steps} steps");
        // A length whose memory grows with its square.
        let (found, steps) = search(1 << 20, 0.01, 1 << 34, |index| (index * index) as i64);
        assert!(found.fits.unwrap() < 1 << 17 && found.too_big.unwrap() > 1 << 17, "{found:?}");
        assert!(steps <= 14, "{steps} steps");
    }
}
