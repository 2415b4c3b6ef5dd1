//! Which value `memtrace fit` tries next.

/// The search for the last candidate that fits. Candidates are indices from 0 up; what fits at one fits
/// at all before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Search {
    /// The last that fits.
    pub(crate) fits: Option<usize>,
    /// The first that does not.
    pub(crate) too_big: Option<usize>,
    /// The last candidate.
    last: usize,
    /// Steps between the two since both are known.
    narrowed: usize,
}

impl Search {
    /// A search among the candidates up to `last`.
    pub(crate) fn new(last: usize) -> Search {
        Search { last, ..Search::default() }
    }

    /// The candidate to try: the first, then twice as far each time until one does not fit, then between
    /// the two. There every other step goes to the `guess`, if there is one, for those between are many
    /// and a good guess ends it soon; the steps in the middle bound the number of the others.
    pub(crate) fn next(&self, guess: Option<usize>) -> Option<usize> {
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

    /// Takes in how a candidate did.
    pub(crate) fn tried(&mut self, index: usize, fits: bool) {
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

    /// How many steps it takes to find that `limit` candidates fit.
    fn steps(limit: usize, last: usize, guess: Option<usize>) -> usize {
        let mut search = Search::new(last);
        let mut steps = 0;
        while let Some(index) = search.next(guess) {
            assert!(index <= last);
            search.tried(index, index < limit);
            steps += 1;
            assert!(steps < 100, "it does not end: {search:?}");
        }
        assert_eq!(search.fits, limit.min(last + 1).checked_sub(1));
        assert_eq!(search.too_big, (limit <= last).then_some(limit));
        steps
    }

    #[test]
    fn the_last_that_fits_is_found_and_in_few_steps() {
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
        assert!(steps(1000, 1 << 20, Some(999)) <= 14, "a good guess ends it soon");
    }
}
