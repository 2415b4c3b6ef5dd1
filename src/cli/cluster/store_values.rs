//! The content of a rendezvous store, and the values that the stand-ins put into it.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

/// The size in bytes of an `ncclUniqueId`.
pub(super) const UNIQUE_ID: usize = 128;
/// The maximum total size in bytes of the keys and values of one store.
pub(crate) const MOST_BYTES: usize = 1 << 30;

/// The keys that stand-ins may set for a rank that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AnswerScope {
    /// The keys that are set without a wait: the keys of NCCL's unique ids, and further keys of a `series`
    /// for which the rank has already waited once.
    AtOnce,
    /// All keys. Used after a wait in which no other code has set the keys.
    Late,
}

/// The keys and values of one store of PyTorch (`c10d::TCPStore`).
#[derive(Debug, Default)]
pub(crate) struct Values {
    values: HashMap<Vec<u8>, Vec<u8>>,
    queues: HashMap<Vec<u8>, VecDeque<Vec<u8>>>,
    /// The total size in bytes of all keys and values.
    bytes: usize,
    /// The number of ranks. Each stand-in adds the same amount to a counter as this rank.
    world: i64,
    /// The number of the rank that uses this store.
    rank: u32,
    /// The keys for which this rank waited and that no process set, except NCCL's ids.
    answered: BTreeMap<String, Answered>,
    /// The series of keys for which the rank has waited once, each given by the rank's own key. Further keys
    /// of a series are answered without a wait, so that a loop over all ranks waits only once.
    series: HashSet<String>,
}

/// A key that a stand-in set.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Answered {
    /// True if the key got the value of this rank's own key of the same form (on rank 0, `part/3` gets the
    /// value of `part/0`). Otherwise its value is empty.
    pub(crate) is_own: bool,
    /// The line of the script that waited for the key, if it is known.
    pub(crate) place: Option<String>,
}

impl Values {
    pub(crate) fn new(world: u32, rank: u32) -> Self {
        Self { world: i64::from(world), rank, ..Self::default() }
    }

    /// Returns true if the store accepts no more values.
    pub(crate) fn is_full(&self) -> bool {
        self.bytes > MOST_BYTES
    }

    #[cfg(test)]
    pub(crate) fn pretend_to_hold(&mut self, bytes: usize) {
        self.bytes = bytes;
    }

    pub(crate) fn set(&mut self, key: Vec<u8>, value: Vec<u8>) {
        // A stand-in has answered for this key with the value of the rank's own key, and now the rank sets
        // the key itself. So the number in such keys is not a rank, and no series can be trusted.
        if std::str::from_utf8(&key).is_ok_and(|key| self.answered.get(key).is_some_and(|old| old.is_own)) {
            self.series.clear();
        }
        self.bytes += key.len() + value.len();
        let key_length = key.len();
        if let Some(old) = self.values.insert(key, value) {
            self.bytes -= key_length + old.len();
        }
    }

    /// Returns the value of a key; empty for a missing key.
    pub(crate) fn get(&self, key: &[u8]) -> Vec<u8> {
        self.values.get(key).cloned().unwrap_or_default()
    }

    /// Replaces the value of a key if the value equals `expected`. Returns the value of the key afterwards.
    /// As in PyTorch, a missing key is set if `expected` is empty, and otherwise the result is `expected`.
    pub(crate) fn compare_set(&mut self, key: Vec<u8>, expected: Vec<u8>, wanted: Vec<u8>) -> Vec<u8> {
        match self.values.get(&key) {
            None if !expected.is_empty() => expected,
            Some(value) if *value != expected => value.clone(),
            _ => {
                self.set(key, wanted.clone());
                wanted
            }
        }
    }

    /// Adds `more` to a counter and returns the new value. A poll (`more` is 0) returns the value times the
    /// number of ranks, as if every stand-in had made the same additions as this rank.
    pub(crate) fn add(&mut self, key: Vec<u8>, more: i64) -> i64 {
        let old =
            self.values.get(&key).and_then(|value| std::str::from_utf8(value).ok()?.parse::<i64>().ok());
        let new = old.unwrap_or(0).saturating_add(more);
        self.set(key, new.to_string().into_bytes());
        if more == 0 { new.saturating_mul(self.world) } else { new }
    }

    pub(crate) fn append(&mut self, key: Vec<u8>, more: &[u8]) {
        let mut value = self.get(&key);
        value.extend_from_slice(more);
        self.set(key, value);
    }

    pub(crate) fn remove(&mut self, key: &[u8]) -> bool {
        let removed = self.values.remove(key);
        self.bytes -= removed.as_ref().map_or(0, |value| key.len() + value.len());
        removed.is_some()
    }

    /// Returns the key whose value is this id of an NCCL communicator, or `None` if no key has it.
    pub(crate) fn key_of_id(&self, id: &[u8]) -> Option<String> {
        let ids = self.values.iter().filter(|(key, value)| value.as_slice() == id && is_unique_id(key));
        ids.map(|(key, _)| String::from_utf8_lossy(key).into_owned()).next()
    }

    pub(crate) fn len(&self) -> usize {
        self.values.len()
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = &[u8]> {
        self.values.keys().map(Vec::as_slice)
    }

    pub(crate) fn push(&mut self, key: Vec<u8>, value: Vec<u8>) {
        // Count the key for each element: an empty queue stays in the map, so the size of its key is never
        // subtracted.
        self.bytes += key.len() + value.len();
        self.queues.entry(key).or_default().push_back(value);
    }

    pub(crate) fn pop(&mut self, key: &[u8]) -> Option<Vec<u8>> {
        let value = self.queues.get_mut(key)?.pop_front()?;
        self.bytes -= value.len();
        Some(value)
    }

    pub(crate) fn queue_len(&self, key: &[u8]) -> usize {
        self.queues.get(key).map_or(0, VecDeque::len)
    }

    /// Returns true if a key has a value, or a queue of that name has an element.
    pub(crate) fn has(&self, key: &[u8]) -> bool {
        self.values.contains_key(key) || self.queue_len(key) > 0
    }

    /// Sets each of `keys` that has no value and that `scope` permits, on behalf of stand-ins. Returns false if
    /// the store is full before all keys are set.
    #[must_use]
    pub(crate) fn answer(&mut self, keys: &[Vec<u8>], scope: AnswerScope) -> bool {
        for key in keys {
            if self.has(key) {
                continue;
            }
            if self.is_full() {
                return false;
            }
            if is_unique_id(key) {
                self.set(key.clone(), unique_id_of(key));
                continue;
            }
            let own = self.own_key(key);
            if scope == AnswerScope::AtOnce && own.as_ref().is_none_or(|own| !self.series.contains(own)) {
                continue;
            }
            let value = own.as_ref().and_then(|own| self.values.get(own.as_bytes())).cloned();
            self.set(key.clone(), value.unwrap_or_default());
            let answered = Answered { is_own: own.is_some(), place: None };
            self.answered.insert(String::from_utf8_lossy(key).into_owned(), answered);
            self.series.extend(own);
        }
        true
    }

    /// Returns `key` with the number of this rank in place of the number of another rank. Returns `None` if
    /// this rank has not set that key. A stand-in is assumed to set the same value as this rank.
    fn own_key(&self, key: &[u8]) -> Option<String> {
        let key = std::str::from_utf8(key).ok()?;
        let mut end = key.len();
        // Try the last number first: the numbers before it are usually parts of group names.
        while let Some(last) = key[..end].rfind(|c: char| c.is_ascii_digit()) {
            let start = key[..last].rfind(|c: char| !c.is_ascii_digit()).map_or(0, |before| before + 1);
            // `before` may be in the middle of a character that takes several bytes, so move to the next
            // boundary.
            let start = (start..=last).find(|at| key.is_char_boundary(*at))?;
            let number: Option<i64> = key[start..=last].parse().ok();
            if number.is_some_and(|number| number < self.world && number != i64::from(self.rank)) {
                let own = format!("{}{}{}", &key[..start], self.rank, &key[last + 1..]);
                if self.values.contains_key(own.as_bytes()) {
                    return Some(own);
                }
            }
            end = start;
        }
        None
    }

    /// Returns the keys that the stand-ins set, except NCCL's ids.
    pub(crate) fn answered(&self) -> impl Iterator<Item = (&str, &Answered)> {
        self.answered.iter().map(|(key, answered)| (key.as_str(), answered))
    }

    /// Records the line of the script that waited for `key`. Returns the stand-ins' answer to the key.
    ///
    /// The stored key may begin with the prefix of a store, which `key` lacks. Returns `None` if no stand-in
    /// set the key, or if a line was recorded before: a later line found the value already set and did not
    /// wait for it.
    pub(crate) fn note_place(&mut self, key: &str, place: &str) -> Option<Answered> {
        let is_it =
            |full: &str| full.strip_suffix(key).is_some_and(|rest| rest.is_empty() || rest.ends_with('/'));
        let (_, answered) =
            self.answered.iter_mut().find(|(full, old)| old.place.is_none() && is_it(full))?;
        answered.place = Some(place.to_owned());
        Some(answered.clone())
    }
}

/// Returns an id for a communicator that a stand-in creates. Different keys get different ids if their last
/// 120 bytes differ.
fn unique_id_of(key: &[u8]) -> Vec<u8> {
    let mut id = b"stand-in".to_vec();
    id.extend_from_slice(&key[key.len().saturating_sub(UNIQUE_ID - id.len())..]);
    id.resize(UNIQUE_ID, 0);
    id
}

/// Returns true for a key by which `ProcessGroupNCCL` shares the id of a communicator. Its prefix names a
/// group on a device. The prefix is followed by a number, or by two ranks that exchange messages (`storeKey`
/// and `getKeySendRecv` in PyTorch's ProcessGroupNCCL.cpp).
fn is_unique_id(key: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(key) else { return false };
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let Some((prefix, last)) = text.rsplit_once('/') else { return false };
    // A communicator of more than 128 ranks has several roots, and each root shares an id.
    let last = last.strip_prefix("UniqueNCCLID:").unwrap_or(last);
    let of_device = prefix.split('/').any(|part| part == "cuda");
    of_device && (number(last) || last.split_once(':').is_some_and(|(low, high)| number(low) && number(high)))
}

#[cfg(test)]
mod tests {
    use super::{AnswerScope, Answered, MOST_BYTES, UNIQUE_ID, Values, is_unique_id};

    #[test]
    fn the_keys_of_nccl_ids_are_recognized() {
        for key in
            ["default_pg/0//cuda//0", "worker/1//cuda//0:17", "a/cuda//3", "/pg/0//cuda//UniqueNCCLID:1"]
        {
            assert!(is_unique_id(key.as_bytes()), "{key}");
        }
        for key in ["0", "default_pg/0//cpu//0", "default_pg/0//cuda//rank_0", "cuda//1:", "cuda/x/0:a"] {
            assert!(!is_unique_id(key.as_bytes()), "{key}");
        }
    }

    #[test]
    fn stand_ins_set_the_keys_that_a_rank_waits_for_and_join_counters() {
        let mut values = Values::new(512, 0);
        assert!(values.answer(&[b"pg//cuda//0".to_vec(), b"last_worker".to_vec()], AnswerScope::AtOnce));
        assert_eq!((values.get(b"pg//cuda//0").len(), values.has(b"last_worker")), (UNIQUE_ID, false));
        assert!(values.answer(&[b"other//cuda//0".to_vec()], AnswerScope::AtOnce));
        let id = values.get(b"other//cuda//0");
        assert_eq!(values.key_of_id(&id).as_deref(), Some("other//cuda//0"));
        assert_eq!(values.key_of_id(b"x"), None);
        assert!(values.answer(&[b"last_worker".to_vec()], AnswerScope::Late));
        assert!(values.has(b"last_worker"));
        assert_eq!(values.answered().map(|(key, _)| key).collect::<Vec<_>>(), ["last_worker"]);
        assert_eq!(values.add(b"joined".to_vec(), 1), 1);
        assert_eq!(values.add(b"joined".to_vec(), 0), 512);
        assert_eq!(values.get(b"joined"), b"1");
    }

    #[test]
    fn a_key_of_another_rank_has_the_value_of_this_ranks_own() {
        let mut values = Values::new(512, 7);
        for own in ["pg1/address_7", "7", "é7x", "other/9/7"] {
            values.set(own.into(), own.into());
        }
        let keys = ["pg1/address_3", "511", "é12x", "other/9/0", "other/8/0", "pg1/address_512", "free"];
        let keys = keys.map(|key| key.as_bytes().to_vec());
        assert!(values.answer(&keys, AnswerScope::AtOnce));
        assert!(!keys.iter().any(|key| values.has(key)), "the rank may set them itself");
        assert!(values.answer(&keys, AnswerScope::Late));
        let got = keys.each_ref().map(|key| String::from_utf8(values.get(key)).unwrap());
        assert_eq!(got, ["pg1/address_7", "7", "é7x", "other/9/7", "", "", ""]);
        assert_eq!(values.answered().filter(|(_, answered)| answered.is_own).count(), 4);
        let place = "main (train.py:3)";
        let empty = Answered { is_own: false, place: Some(place.to_owned()) };
        assert_eq!(values.note_place("ddress_512", place), None);
        assert_eq!(values.note_place("8/0", place), Some(empty));
        assert_eq!(values.note_place("8/0", place), None, "a later call found it");
        assert_eq!(values.note_place("7", place), None);
    }

    #[test]
    fn a_series_of_ranks_takes_one_wait_unless_the_rank_sets_it_late() {
        let mut values = Values::new(512, 0);
        values.set(b"step/0".to_vec(), b"zero".to_vec());
        let is_known = |values: &mut Values, key: &str, known| {
            assert!(values.answer(&[key.into()], known));
            values.has(key.as_bytes())
        };
        assert!(!is_known(&mut values, "step/1", AnswerScope::AtOnce));
        assert!(is_known(&mut values, "step/1", AnswerScope::Late));
        assert!(is_known(&mut values, "step/2", AnswerScope::AtOnce));
        assert!(!is_known(&mut values, "other/1", AnswerScope::AtOnce));
        values.set(b"step/1".to_vec(), b"one".to_vec());
        assert!(!is_known(&mut values, "step/3", AnswerScope::AtOnce));
    }

    #[test]
    fn stand_ins_do_not_set_more_than_a_store_holds() {
        let mut values = Values::new(512, 0);
        values.set(b"part/0".to_vec(), b"value".to_vec());
        values.pretend_to_hold(MOST_BYTES - 15);
        let keys = (1..9).map(|rank| format!("part/{rank}").into_bytes()).collect::<Vec<_>>();
        assert!(!values.answer(&keys, AnswerScope::Late));
        assert_eq!(values.len(), 3, "its own, and two of 11 bytes");
        assert!(values.answer(&keys[..2], AnswerScope::Late), "these it has");
    }

    #[test]
    fn values_are_replaced_only_when_they_are_as_expected() {
        let mut values = Values::new(2, 0);
        let mut compare = |expected: &str, wanted: &str| {
            let value = values.compare_set(b"k".to_vec(), expected.into(), wanted.into());
            String::from_utf8(value).unwrap()
        };
        assert_eq!(compare("x", "y"), "x");
        assert_eq!(compare("", "a"), "a");
        assert_eq!(compare("b", "c"), "a");
        assert_eq!(compare("a", "c"), "c");
        assert_eq!(values.bytes, 2);
        values.append(b"k".to_vec(), b"more");
        values.push(b"queue".to_vec(), b"value".to_vec());
        assert_eq!((values.bytes, values.pop(b"queue").unwrap().len()), (6 + 10, 5));
        assert!(values.remove(b"k") && !values.remove(b"k"));
        assert_eq!(values.bytes, "queue".len(), "the empty queue");
    }
}
