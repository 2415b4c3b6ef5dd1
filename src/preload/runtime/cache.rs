//! What was numbered, by thread, so that the tables of the process and their lock are seldom asked.

use std::borrow::Borrow;
use std::hash::{Hash, Hasher};

use rustc_hash::FxHasher;

/// Entries of a cache that is used at all.
const FEWEST: usize = 256;
/// More are not kept: what a model does in one step of training fits, and memory stays bounded.
const MOST: usize = 1 << 14;

/// Remembers what was numbered: each key has one place, and is overwritten by the next of that place. It grows
/// while it misses.
pub(crate) struct Cache<K, V> {
    /// None, or a power of two.
    entries: Vec<(K, V)>,
    /// How often it missed since it grew.
    missed: usize,
}

impl<K: Default, V: Copy + Default> Cache<K, V> {
    pub(crate) const fn new() -> Self {
        Cache { entries: Vec::new(), missed: 0 }
    }

    /// What was numbered for `key`, or what `make` numbers now. What is numbered for the default of a key must be
    /// the default of a number.
    #[inline]
    pub(crate) fn get<Q>(&mut self, key: &Q, make: impl FnOnce() -> V) -> V
    where
        K: Borrow<Q>,
        Q: ?Sized + Hash + Eq + ToOwned<Owned = K>,
    {
        let place = self.place(key);
        match self.entries.get(place) {
            Some((known, value)) if known.borrow() == key => *value,
            _ => self.miss(key, make()),
        }
    }

    #[inline]
    fn place<Q: ?Sized + Hash>(&self, key: &Q) -> usize {
        let mut hasher = FxHasher::default();
        key.hash(&mut hasher);
        hasher.finish() as usize & self.entries.len().wrapping_sub(1)
    }

    #[cold]
    fn miss<Q>(&mut self, key: &Q, value: V) -> V
    where
        K: Borrow<Q>,
        Q: ?Sized + Hash + Eq + ToOwned<Owned = K>,
    {
        self.missed += 1;
        if self.missed > self.entries.len() && self.entries.len() < MOST {
            let twice = (2 * self.entries.len()).max(FEWEST);
            let before = std::mem::take(&mut self.entries);
            self.entries.resize_with(twice, Default::default);
            for (key, value) in before {
                let place = self.place(key.borrow());
                self.entries[place] = (key, value);
            }
            self.missed = 0;
        }
        let place = self.place(key);
        if let Some(entry) = self.entries.get_mut(place) {
            *entry = (key.to_owned(), value);
        }
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_it_gives_is_always_of_the_key() {
        let mut cache: Cache<Vec<u8>, usize> = Cache::new();
        for _ in 0..3 {
            for number in 0..2 * MOST {
                let key = number.to_string().into_bytes();
                assert_eq!(cache.get(&key[..], || number + 1), number + 1);
                assert_eq!(cache.get(&key[..], || 0), number + 1, "it was just numbered");
            }
        }
    }

    #[test]
    fn it_grows_while_it_misses_and_not_without_end() {
        let mut cache: Cache<u64, u64> = Cache::new();
        let mut made = 0;
        for _ in 0..20 {
            for key in 1..=1000 {
                cache.get(&key, || {
                    made += 1;
                    key
                });
            }
        }
        assert!(made < 6_000, "{made} of 20,000 were not remembered");
        (1..=10 * MOST as u64).for_each(|key| assert_eq!(cache.get(&key, || key), key));
        assert_eq!(cache.entries.len(), MOST);
    }
}
