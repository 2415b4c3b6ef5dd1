//! Chooses the next value that `memtrace fit` tries.

/// A search for the last candidate that fits. Candidates are indices from 0; each needs at least the memory
/// of the one before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Bisection {
    /// The last candidate known to fit.
    pub(super) fits: Option<usize>,
    /// The first candidate known not to fit.
    pub(super) too_big: Option<usize>,
    /// The last candidate.
    last: usize,
    /// The steps made since both bounds are known.
    narrowed: usize,
}

impl Bisection {
    /// A search among the candidates from 0 to `last`.
    pub(super) fn new(last: usize) -> Bisection {
        Bisection { last, ..Bisection::default() }
    }

    /// The candidate to try next; `None` when the search is over.
    ///
    /// It starts with the first candidate and doubles until one does not fit. Then it alternates between
    /// `guess`, if there is one, and the middle of the bounds: a good guess ends the search soon, and the
    /// middle bounds the number of steps.
    pub(super) fn next(&self, guess: Option<usize>) -> Option<usize> {
        match (self.fits, self.too_big) {
            (None, None) => Some(0),
            (None, Some(_)) => None,
            (Some(fits), None) => (fits < self.last).then(|| (2 * fits + 1).min(self.last)),
            (Some(fits), Some(too_big)) if too_big - fits < 2 => None,
            (Some(fits), Some(too_big)) => {
                let middle = fits + (too_big - fits) / 2;
                let guess = guess.filter(|_| self.narrowed.is_multiple_of(2)).unwrap_or(middle);
                Some(guess.clamp(fits + 1, too_big - 1))
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
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of steps until the search knows that `limit` candidates fit.
    fn steps(limit: usize, last: usize, guess: Option<usize>) -> usize {
        let mut search = Bisection::new(last);
        let mut steps = 0;
        while let Some(index) = search.next(guess) {
            assert!(index <= last);
            search.record(index, index < limit);
            steps += 1;
            assert!(steps < 100, "the search does not end: {search:?}");
        }
        assert_eq!(search.fits, limit.min(last + 1).checked_sub(1));
        assert_eq!(search.too_big, (limit <= last).then_some(limit));
        steps
    }

    #[test]
    fn fit_finds_the_last_candidate_that_fits_in_few_steps() {
        for limit in 0..200 {
            for guess in [None, Some(limit), Some(0), Some(1000)] {
                assert!(steps(limit, 1 << 20, guess) <= 24);
            }
            for last in [0, 1, 7, 50] {
                steps(limit, last, None);
            }
        }
        assert_eq!(steps(0, 1 << 20, None), 1);
        assert!(steps(1000, 1 << 20, None) <= 20);
        assert!(steps(1000, 1 << 20, Some(999)) <= 14, "a good guess ends the search soon");
    }
}
