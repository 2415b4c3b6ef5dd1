//! A per-thread cache of interned ids. A hit avoids a lookup in the process-wide tables, which takes a lock.

use std::borrow::Borrow;
use std::hash::{Hash, Hasher};

use rustc_hash::FxHasher;

/// The number of slots after the first growth.
const MIN_ENTRIES: usize = 256;
/// The maximum number of slots. It limits the memory of a cache, but is large enough for the contexts of one
/// training step.
const MAX_ENTRIES: usize = 1 << 14;

/// A cache from keys to ids. Each key has one slot; a colliding key replaces the previous one. The cache
/// grows while lookups miss.
pub(crate) struct Cache<K, V> {
    /// The slots. Their number is 0 or a power of two.
    entries: Vec<(K, V)>,
    /// The number of misses since the last growth.
    misses: usize,
}

impl<K: Default, V: Copy + Default> Cache<K, V> {
    pub(crate) const fn new() -> Self {
        Cache { entries: Vec::new(), misses: 0 }
    }

    /// Returns the cached id of `key`. On a miss, calls `make` for the id and caches it. An empty slot holds
    /// the default key and the default id, so `make` must return the default id for the default key.
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
        self.misses += 1;
        if self.misses > self.entries.len() && self.entries.len() < MAX_ENTRIES {
            let twice = (2 * self.entries.len()).max(MIN_ENTRIES);
            let before = std::mem::take(&mut self.entries);
            self.entries.resize_with(twice, Default::default);
            for (key, value) in before {
                let place = self.place(key.borrow());
                self.entries[place] = (key, value);
            }
            self.misses = 0;
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
    fn the_cached_id_always_belongs_to_the_key() {
        let mut cache: Cache<Vec<u8>, usize> = Cache::new();
        for _ in 0..3 {
            for number in 0..2 * MAX_ENTRIES {
                let key = number.to_string().into_bytes();
                assert_eq!(cache.get(&key[..], || number + 1), number + 1);
                assert_eq!(cache.get(&key[..], || 0), number + 1, "it was just cached");
            }
        }
    }

    #[test]
    fn the_cache_grows_while_it_misses_up_to_its_largest_size() {
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
        assert!(made < 6_000, "{made} of 20,000 look-ups missed");
        (1..=10 * MAX_ENTRIES as u64).for_each(|key| assert_eq!(cache.get(&key, || key), key));
        assert_eq!(cache.entries.len(), MAX_ENTRIES);
    }
}
