//! Chooses the next candidates that `memtrace fit` tries.

/// As long as no value was too large, the next value is at most this factor times the largest value that
/// fits. With a larger step, a program that reads its data into host memory could run out of host memory.
const GROWTH: usize = 16;
/// The factor instead of [`GROWTH`] if at least [`GROWTH`] candidates are known to fit and the guess is based
/// on at least two trials that fit. Before that, a guess is not reliable, because memory is reserved in large
/// pieces.
const GROWTH_BY_RUNS: usize = 64;

/// An estimate of the last candidate that fits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Guess {
    /// The estimated last candidate that fits.
    pub(crate) index: usize,
    /// True if the estimate is based on fewer than two trials.
    pub(crate) is_rough: bool,
}

/// A search for the last candidate that fits. Candidates are indices from 0; each needs at least as much
/// memory as the candidate before it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct LimitSearch {
    /// The last candidate known to fit.
    pub(crate) fits: Option<usize>,
    /// The first candidate known not to fit.
    pub(crate) too_big: Option<usize>,
    /// The last candidate.
    last: usize,
    /// The candidate that is tried first.
    start: usize,
    /// The value of candidate 0, in units of the step between two candidates.
    first: f64,
    /// The search ends when the distance between the bounds is at most this share of the value. With 0, it
    /// ends when the bounds are adjacent candidates.
    within: f64,
    /// The number of batches chosen since both bounds became known.
    narrowed: usize,
}

impl LimitSearch {
    /// Creates a search among the candidates from 0 to `last`, which begins with `start`. `first` is the
    /// value of candidate 0, in steps between two candidates. The search ends when the answer is within the
    /// share `within` of a value.
    pub(crate) fn new(last: usize, start: usize, first: f64, within: f64) -> LimitSearch {
        LimitSearch { last, start, first, within, ..LimitSearch::default() }
    }

    /// Returns the candidates to try next, at most `room`. They may run side by side. An empty list means
    /// that the search is over.
    ///
    /// Until a candidate does not fit, the search goes to the guess, but at most to [`GROWTH`] or
    /// [`GROWTH_BY_RUNS`] times the largest value that fits. Two candidates are placed around the guess: it
    /// is confirmed if one of them fits and the other does not.
    ///
    /// Once a candidate does not fit, the search alternates between the guess and equal parts of the range
    /// between the bounds. A good guess ends the search soon, and the equal parts limit the number of steps.
    pub(crate) fn next(&mut self, guess: Option<Guess>, room: usize) -> Vec<usize> {
        let room = room.max(1);
        // `low` is the last candidate known to fit, or -1. `high` is the first one known not to fit, or one
        // past the last candidate.
        let low = self.fits.map_or(-1, |fits| fits as i64);
        let high = self.too_big.map_or(self.last as i64 + 1, |too_big| too_big as i64);
        let gap = self.gap(self.fits.unwrap_or(0)) as i64;
        if high - low <= 1 || (self.fits.is_some() && self.too_big.is_some() && high - low <= gap) {
            return Vec::new();
        }
        let chosen = match (self.fits, self.too_big) {
            (None, None) => guess.map_or_else(|| vec![self.start as i64], |guess| around(guess, gap, room)),
            (Some(0), None) if guess.is_none() => vec![1],
            (Some(fits), None) => above(fits, guess, gap, room),
            _ => {
                self.narrowed += 1;
                let guess = guess.filter(|_| !self.narrowed.is_multiple_of(2));
                between(low, high, guess, gap, room)
            }
        };
        let mut next: Vec<usize> = Vec::new();
        for index in chosen.iter().map(|index| *index.clamp(&(low + 1), &(high - 1)) as usize) {
            if next.len() < room && !next.contains(&index) {
                next.push(index);
            }
        }
        next
    }

    /// Records whether the candidate `index` fits. All smaller candidates then fit, or all larger ones do
    /// not.
    pub(crate) fn record(&mut self, index: usize, fits: bool) {
        if fits {
            self.fits = Some(self.fits.map_or(index, |before| before.max(index)));
        } else {
            self.too_big = Some(self.too_big.map_or(index, |before| before.min(index)));
        }
    }

    /// Returns the distance between the bounds at which the search ends, if `fits` is the last candidate that
    /// fits.
    fn gap(&self, fits: usize) -> usize {
        ((self.within * (self.first + fits as f64)) as usize).max(1)
    }
}

/// Returns candidates above `fits`, the last one known to fit, before any candidate is known not to fit: around the
/// guess, but not too far above `fits`.
fn above(fits: usize, guess: Option<Guess>, gap: i64, room: usize) -> Vec<i64> {
    let low = fits as i64;
    let is_known = fits + 1 >= GROWTH && guess.is_some_and(|guess| !guess.is_rough);
    let growth = if is_known { GROWTH_BY_RUNS } else { GROWTH };
    // The step must be at least `gap`. With `--min`, values can be much larger than their indices, and `gap` is a
    // share of the value.
    let most = ((growth * (fits + 1) - 1) as i64).max(low + gap);
    match guess {
        Some(guess) if (guess.index as i64) < most => around(guess, gap, room)
            .into_iter()
            .map(|index| index.clamp((low + 1).max(most.min(low + gap / 2)), most))
            .collect(),
        _ => vec![most],
    }
}

/// Returns candidates between the bounds: near the guess, or without a plausible guess in equal parts.
fn between(low: i64, high: i64, guess: Option<Guess>, gap: i64, room: usize) -> Vec<i64> {
    match guess {
        Some(guess) if room == 1 => vec![one(guess.index as i64, low, high, gap)],
        Some(guess) if (guess.index as i64) < high => around(guess, gap, room),
        // The guess is slightly too large, so the limit is probably just below `high`.
        Some(guess) if (guess.index as i64) < high + 2 * gap => vec![high - gap, high - 4 * gap],
        // A guess far above `high` is wrong, so it does not help to choose a candidate between the bounds.
        _ => parts(low, high, room),
    }
}

/// Returns candidates around a guess: one that should fit, one `gap` after it that should not, and then
/// candidates at larger distances on both sides.
fn around(guess: Guess, gap: i64, room: usize) -> Vec<i64> {
    let middle = guess.index as i64;
    if room == 1 {
        return vec![middle];
    }
    // A rough guess does not know the slope of memory, so place the candidates further apart.
    let gap = if guess.is_rough { gap.max(middle / 8) } else { gap };
    let below = middle - gap / 2;
    let mut all = vec![below, below + gap];
    for step in 1..room as i64 {
        all.extend([below - 2 * step * gap, below + gap + 2 * step * gap]);
    }
    all
}

/// Returns one candidate between the bounds. This is the guess if it is well inside them, a candidate close
/// to a bound if the guess is near that bound, or the middle if the guess is far above the bounds.
fn one(guess: i64, low: i64, high: i64, gap: i64) -> i64 {
    if guess < low + gap {
        // The guess is close to the lower bound, or below it. The next candidate shows whether the limit is
        // here.
        low + gap
    } else if guess < high {
        guess
    } else if guess < high + gap {
        high - gap
    } else {
        low + (high - low) / 2
    }
}

/// Returns `room` candidates that divide the range between the bounds into equal parts.
fn parts(low: i64, high: i64, room: usize) -> Vec<i64> {
    let room = room as i64;
    (1..=room).map(|part| low + ((high - low) as i128 * part as i128 / (room as i128 + 1)) as i64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::fit::search::estimate::{full_by, full_by_line};
    use crate::commands::fit::trial::peak::PeakUse;

    /// Runs a search on a card of `capacity` bytes, where candidate `index` needs `need(index)` bytes and at
    /// most `room` candidates run at once. Returns the search and the number of candidates tried.
    fn search(
        last: usize,
        within: f64,
        capacity: i64,
        room: usize,
        need: impl Fn(usize) -> i64,
    ) -> (LimitSearch, usize) {
        let mut search = LimitSearch::new(last, 0, 1.0, within);
        let mut points: Vec<(f64, i64)> = Vec::new();
        let mut tried: Vec<usize> = Vec::new();
        loop {
            points.sort_by(|one, other| one.0.total_cmp(&other.0));
            let guess = match points.as_slice() {
                [.., _, b] => full_by_line(&points, capacity - b.1)
                    .map(|at| Guess { index: (at.max(1.0) as usize) - 1, is_rough: false }),
                _ => None,
            };
            let batch = search.next(guess, if tried.is_empty() { 1 } else { room });
            if batch.is_empty() {
                return (search, tried.len());
            }
            for index in batch {
                assert!(index <= last && !tried.contains(&index), "{index} again: {search:?}");
                tried.push(index);
                let fits = need(index) <= capacity;
                search.record(index, fits);
                if fits {
                    points.push(((index + 1) as f64, need(index)));
                }
            }
            assert!(tried.len() < 100, "the search does not end: {search:?}");
        }
    }

    #[test]
    fn fit_finds_the_last_candidate_that_fits() {
        for limit in 0..200 {
            for (last, room) in [(0, 1), (1, 2), (7, 3), (50, 2), (1 << 20, 1), (1 << 20, 2), (1 << 20, 4)] {
                let needs: [fn(usize) -> i64; 3] = [
                    |index| index as i64,
                    |index| (index * index) as i64,
                    // The first candidates need the same memory.
                    |index| (index.max(20)) as i64,
                ];
                for need in needs {
                    let capacity = need(limit) - 1;
                    let all =
                        (0..=last).take_while(|index| *index < 1000 && need(*index) <= capacity).count();
                    let (found, steps) = search(last, 0.0, capacity, room, need);
                    assert_eq!(found.fits, all.checked_sub(1), "{limit} {last}");
                    assert_eq!(found.too_big, (all <= last).then_some(all), "{limit} {last}");
                    assert!(steps <= 20 + 4 * room, "{steps} steps to {limit} of {last}, {room}");
                }
            }
        }
    }

    #[test]
    fn fit_starts_from_any_smallest_value() {
        for first in [4096.0, 1e6, 1e12] {
            for within in [0.01, 0.1, 0.5] {
                let mut search = LimitSearch::new(1 << 20, 0, first, within);
                for index in [0, 1] {
                    assert_eq!(search.next(None, 1), [index]);
                    search.record(index, true);
                }
                for room in [1, 2, 5] {
                    let next = search.next(Some(Guess { index: 5, is_rough: false }), room);
                    assert!(!next.is_empty() && next.len() <= room, "{next:?}");
                    assert!(
                        next.iter().all(|next| *next > 1 && *next <= 1 << 20),
                        "{first} {within}: {next:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn fit_begins_anywhere_and_goes_to_both_sides() {
        for answer in -1..11_i64 {
            let mut search = LimitSearch::new(10, 5, 0.0, 0.0);
            let mut tried = 0;
            loop {
                let batch = search.next(None, 2);
                if batch.is_empty() {
                    break;
                }
                tried += batch.len();
                batch.iter().for_each(|index| search.record(*index, *index as i64 <= answer));
            }
            assert_eq!(search.fits, usize::try_from(answer).ok().map(|answer| answer.min(10)), "{answer}");
            assert!(tried <= 7, "{answer}: {tried}");
        }
    }

    #[test]
    fn fit_needs_few_runs_within_a_share_of_the_value() {
        for room in [1, 2] {
            // 2.5 GB plus 160 kB per value. The limit is the value 135,424.
            let need = |index: usize| 2_500_000_000 + 160_000 * index as i64;
            let (found, steps) = search(1 << 20, 0.02, 24_167_840_000, room, need);
            let (fits, too_big) = (found.fits.unwrap(), found.too_big.unwrap());
            assert!(fits <= 135_424 && 135_424 < too_big && too_big - fits <= 2709, "{found:?}");
            assert!(steps <= 8, "{steps} steps, {room} side by side");
            // 3000 bytes plus 1700 bytes per value, as for a batch size: the first two trials show the slope.
            let (found, steps) = search(1 << 20, 0.01, 80_000, room, |index| 3000 + 1700 * index as i64);
            assert_eq!((found.fits, found.too_big), (Some(45), Some(46)));
            assert!(steps <= 8, "{steps} steps, {room} side by side");
            // Memory comes in pages of 2, so two neighboring candidates may have the same peak.
            let pages = |index: usize| (819 + index as i64 + 2) / 2 * 2;
            let (found, steps) = search(1 << 20, 0.01, 1024, room, pages);
            assert_eq!((found.fits, found.too_big.unwrap() - 204 <= 2), (Some(204), true), "{found:?}");
            assert!(steps <= 9, "{steps} steps, {room} side by side");
            // Memory grows with the square, as for a sequence length.
            let (found, steps) = search(1 << 20, 0.01, 1 << 34, room, |index| (index * index) as i64);
            assert!(found.fits.unwrap() < 1 << 17 && found.too_big.unwrap() > 1 << 17, "{found:?}");
            assert!(steps <= 16, "{steps} steps, {room} side by side");
        }
    }

    /// Simulates trials of `fit` on a card of 24 GB, where torch reserves more than it allocates, in segments
    /// of 20 MiB. A trial fits if its segments fit. The search must end within 8 trials.
    #[test]
    fn fit_needs_few_runs_where_torch_reserves_more_than_it_allocates() {
        const MIB: i64 = 1 << 20;
        let capacity = 22_563 * MIB;
        // In the cases with a bend, memory grows faster than linearly, so a line through small values
        // predicts too little memory for large values.
        for (share, context, bend) in [
            (1.0, 210, 0.0),
            (1.3, 210, 0.0),
            (1.7, 210, 0.0),
            (2.0, 700, 0.0),
            (1.1, 210, 0.005),
            (1.1, 210, 0.012),
        ] {
            for (each, fixed) in
                [(16_384, 12_600_000), (160_000, 2_500_000_000), (1_700_000_000, 3_000_000_000)]
            {
                for room in [1, 2] {
                    let trial = |index: usize| {
                        let growing = each * (index as i64 + 1);
                        let bent = growing as f64 * (1.0 + bend * (growing as f64 / capacity as f64));
                        let pages = ((fixed as f64 + bent) * share) as i64 / (20 * MIB);
                        let reserved = (pages + 1) * 20 * MIB;
                        let by_category =
                            vec![("parameter".to_owned(), fixed), ("activation".to_owned(), growing)];
                        let (allocated, used) = (fixed + growing, reserved + context * MIB);
                        PeakUse { allocated, reserved, used, capacity, by_category, ..PeakUse::default() }
                    };
                    let mut search = LimitSearch::new(1 << 20, 0, 1.0, 0.01);
                    let mut fitted: Vec<(f64, PeakUse)> = Vec::new();
                    let mut trials = 0;
                    loop {
                        fitted.sort_by(|one, other| one.0.total_cmp(&other.0));
                        let points: Vec<_> = fitted.iter().map(|(at, peak)| (*at, peak)).collect();
                        let guess = full_by(&points, false).map(|at| Guess {
                            index: ((at as usize).max(1) - 1).min(1 << 20),
                            is_rough: points.len() < 2,
                        });
                        let batch = search.next(guess, if trials == 0 { 1 } else { room });
                        if batch.is_empty() {
                            break;
                        }
                        for index in batch {
                            trials += 1;
                            let peak = trial(index);
                            let fits = peak.used <= capacity;
                            search.record(index, fits);
                            if fits {
                                fitted.push(((index + 1) as f64, peak));
                            }
                        }
                    }
                    assert!(trials <= 8, "{trials} trials: {share} {each} {room}, {search:?}");
                }
            }
        }
    }
}
