//! The rendezvous store of one rank: a server with the wire protocol of PyTorch's `TCPStore`.
//!
//! The rank is the only client of its store, so a key for which the rank waits can otherwise come only from a
//! stand-in. The store sets such a key itself. It sets the id of an NCCL communicator at once. Any other key
//! is set after [`GRACE`], to the value that this rank has set under its own number, or else to an empty
//! value.
//!
//! The protocol follows `TCPStoreBackend.hpp` and `TCPStoreLibUvBackend.cpp` in PyTorch 2.6 and 2.11. Four
//! lines of text extend the protocol:
//!
//! - `store NAME` asks for the port of a further store. A program may create several stores, which must not
//!   share keys.
//! - `waited PLACE<tab>KEY` reports the line of the script that waited for a key.
//! - `pipeline RANK,RANK,...` reports the ranks of this rank's pipeline, one of each stage.
//! - `key HEX` asks for the key that has the id of an NCCL communicator as its value.

use std::collections::{BTreeSet, HashMap};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::cluster::store_values::{AnswerScope, Answered, UNIQUE_ID, Values};

/// The time for which a stand-in waits before it sets a key, because another thread or process of the rank
/// may set the key.
const GRACE: Duration = Duration::from_millis(200);
/// The maximum time for which a look-up waits for the id of an NCCL communicator.
const ID_PATIENCE: Duration = Duration::from_secs(2);
/// The maximum number of keys in a request. As in PyTorch, limits prevent a stray client from using up the
/// memory of this process.
const MOST_KEYS: u64 = 128 * 1024;
/// The maximum length of a key in bytes.
const LONGEST_KEY: u64 = 8 * 1024;
/// The maximum length of a value in bytes.
const LONGEST_VALUE: u64 = 64 << 20;
/// The maximum size of an answer in bytes. It is enough for the gathered values of 4,096 ranks, with 64 KiB
/// each.
const LONGEST_ANSWER: usize = 256 << 20;
/// The maximum number of stores of a rank.
const MOST_STORES: usize = 4096;

/// The queries, by their number on the wire.
mod query {
    pub(super) const VALIDATE: u8 = 0;
    pub(super) const SET: u8 = 1;
    pub(super) const COMPARE_SET: u8 = 2;
    pub(super) const GET: u8 = 3;
    pub(super) const ADD: u8 = 4;
    pub(super) const CHECK: u8 = 5;
    pub(super) const WAIT: u8 = 6;
    pub(super) const GET_NUM_KEYS: u8 = 7;
    pub(super) const DELETE_KEY: u8 = 8;
    pub(super) const APPEND: u8 = 9;
    pub(super) const MULTI_GET: u8 = 10;
    pub(super) const MULTI_SET: u8 = 11;
    pub(super) const CANCEL_WAIT: u8 = 12;
    pub(super) const PING: u8 = 13;
    pub(super) const QUEUE_PUSH: u8 = 14;
    pub(super) const QUEUE_POP: u8 = 15;
    pub(super) const QUEUE_LEN: u8 = 16;
    pub(super) const LIST_KEYS: u8 = 17;
}

/// An answer to CHECK: all keys have a value.
const READY: u8 = 0;
/// An answer to CHECK: a key has no value.
const NOT_READY: u8 = 1;
/// The answer to WAIT: all keys have a value.
const STOP_WAITING: u8 = 0;
/// The answer to `CANCEL_WAIT`.
const WAIT_CANCELED: u8 = 1;

/// One store: its values, and a condition variable that signals changes.
#[derive(Debug)]
struct Store {
    values: Mutex<Values>,
    changed: Condvar,
    /// True if the rank has ended.
    closed: AtomicBool,
    /// True if the Python code for stand-ins in the rank has asked for this store.
    joined: AtomicBool,
}

impl Store {
    fn joined(&self) -> bool {
        self.joined.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, Values> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the values and wakes the threads that wait for a value.
    ///
    /// # Errors
    /// When the store is full.
    fn change<T>(&self, change: impl FnOnce(&mut Values) -> T) -> io::Result<T> {
        if self.lock().is_full() {
            return Err(full());
        }
        Ok(self.take(change))
    }

    /// Same as [`Store::change`], for a change that removes values, which a full store allows, too.
    fn take<T>(&self, change: impl FnOnce(&mut Values) -> T) -> T {
        let result = change(&mut self.lock());
        self.changed.notify_all();
        result
    }

    /// Waits until all keys have a value. After [`GRACE`], a stand-in sets the keys that are still missing.
    ///
    /// # Errors
    /// When the store is full.
    fn wait(&self, keys: &[Vec<u8>]) -> io::Result<()> {
        let mut is_full = !self.change(|values| values.answer(keys, AnswerScope::AtOnce))?;
        let mut values = self.lock();
        let until = Instant::now() + GRACE;
        while !is_full && !keys.iter().all(|key| values.has(key)) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                is_full = !values.answer(keys, AnswerScope::Late);
                break;
            }
            values = self.changed.wait_timeout(values, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(values);
        self.changed.notify_all();
        if is_full { Err(full()) } else { Ok(()) }
    }
}

/// The stores of one rank. They serve until [`RankStores::close`].
#[derive(Debug)]
pub(crate) struct RankStores {
    world: u32,
    rank: u32,
    /// The ranks of this rank's pipeline, one of each stage; empty until the rank reports a pipeline.
    pipeline: Mutex<BTreeSet<u32>>,
    /// The port and the store, by the name of the store.
    stores: Mutex<HashMap<String, (u16, Arc<Store>)>>,
}

impl RankStores {
    pub(crate) fn new(world: u32, rank: u32) -> Arc<Self> {
        Arc::new(Self { world, rank, pipeline: Mutex::default(), stores: Mutex::default() })
    }

    /// Returns the key under which a store has the id of an NCCL communicator, or `None` if no store has it. Waits for
    /// the id, up to [`ID_PATIENCE`]: PyTorch sets it without waiting for an answer, and then creates the communicator,
    /// so another thread may not have read the id yet.
    fn key_of_id(&self, id: &[u8]) -> Option<String> {
        let until = Instant::now() + ID_PATIENCE;
        loop {
            let stores = self.stores.lock().unwrap_or_else(PoisonError::into_inner);
            let found = stores.values().find_map(|(_, store)| store.lock().key_of_id(id));
            drop(stores);
            if found.is_some() || id.len() != UNIQUE_ID || Instant::now() >= until {
                return found;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Returns the port of the store with this name, and starts the store if it does not run yet. `name` may
    /// also be the port of a store that runs.
    ///
    /// # Errors
    /// When no port of this machine is free, or the rank has too many stores.
    pub(crate) fn port(self: &Arc<Self>, name: &str) -> io::Result<u16> {
        let mut stores = self.stores.lock().unwrap_or_else(PoisonError::into_inner);
        let named = |port: u16| name.parse() == Ok(port);
        let known = stores.iter().find(|(other, (port, _))| *other == name || named(*port));
        if let Some((_, (port, _))) = known {
            return Ok(*port);
        }
        if stores.len() >= MOST_STORES {
            return Err(io::Error::other("too many stores"));
        }
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let port = listener.local_addr()?.port();
        let store = Arc::new(Store {
            values: Mutex::new(Values::new(self.world, self.rank)),
            changed: Condvar::new(),
            closed: AtomicBool::new(false),
            joined: AtomicBool::new(false),
        });
        stores.insert(name.to_owned(), (port, Arc::clone(&store)));
        let all = Arc::clone(self);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if store.closed.load(Ordering::Acquire) {
                    break;
                }
                let Ok(stream) = stream else {
                    // No file descriptor is free. Wait until a client closes its connection.
                    std::thread::sleep(GRACE);
                    continue;
                };
                let (all, store) = (Arc::clone(&all), Arc::clone(&store));
                // The connection ends if the client disconnects or sends an invalid query.
                std::thread::spawn(move || serve(&all, &store, stream).ok());
            }
        });
        Ok(port)
    }

    /// Ends the stores after their rank has ended.
    pub(crate) fn close(&self) {
        let mut stores = self.stores.lock().unwrap_or_else(PoisonError::into_inner);
        for (_, (port, store)) in stores.drain() {
            store.closed.store(true, Ordering::Release);
            // Wakes the thread that waits for clients. An error means that no file descriptor is free.
            TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok();
        }
    }

    /// Returns the keys that stand-ins set because the rank waited for them, sorted by key.
    pub(crate) fn answered(&self) -> Vec<(String, Answered)> {
        let stores = self.stores.lock().unwrap_or_else(PoisonError::into_inner);
        let mut keys = Vec::new();
        for (_, store) in stores.values() {
            keys.extend(store.lock().answered().map(|(key, answered)| (key.to_owned(), answered.clone())));
        }
        keys.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        keys
    }

    /// Returns the ranks of the rank's pipeline, one of each stage; empty if it reported no pipeline.
    pub(crate) fn pipeline(&self) -> BTreeSet<u32> {
        let ranks = self.pipeline.lock().unwrap_or_else(PoisonError::into_inner);
        ranks.iter().copied().filter(|rank| *rank < self.world).collect()
    }

    /// Returns true if the Python code for stand-ins in the rank has asked for a store, as each
    /// initialization of `torch.distributed` among stand-ins does.
    pub(crate) fn were_joined(&self) -> bool {
        // A store exists even if the rank never asked for one, because this module creates the first store
        // itself. So ask whether one was joined.
        self.stores.lock().unwrap_or_else(PoisonError::into_inner).values().any(|(_, store)| store.joined())
    }

    /// Records the line of the script that waited for a key of any store. Returns the answer that a stand-in
    /// gave to the key.
    fn note_place(&self, key: &str, place: &str) -> Option<Answered> {
        let stores = self.stores.lock().unwrap_or_else(PoisonError::into_inner);
        stores.values().find_map(|(_, store)| store.lock().note_place(key, place))
    }
}

/// The requests of one client, which are read from its connection.
struct Requests(BufReader<TcpStream>);

impl Requests {
    fn bytes<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.0.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn number(&mut self) -> io::Result<u64> {
        Ok(u64::from_le_bytes(self.bytes()?))
    }

    fn text(&mut self, longest: u64) -> io::Result<Vec<u8>> {
        let length = self.number()?;
        if length > longest {
            return Err(too_long("a text"));
        }
        let mut bytes = vec![0; length as usize];
        self.0.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn key(&mut self) -> io::Result<Vec<u8>> {
        self.text(LONGEST_KEY)
    }

    fn value(&mut self) -> io::Result<Vec<u8>> {
        self.text(LONGEST_VALUE)
    }

    fn keys(&mut self) -> io::Result<Vec<Vec<u8>>> {
        (0..self.count()?).map(|_| self.key()).collect()
    }

    /// Reads the rest of a line, whose first letter is read already.
    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        (&mut self.0).take(2 * LONGEST_KEY).read_line(&mut line)?;
        Ok(line)
    }

    /// Reads the number of keys in a request.
    fn count(&mut self) -> io::Result<u64> {
        let count = self.number()?;
        if count > MOST_KEYS { Err(too_long("a list of keys")) } else { Ok(count) }
    }
}

fn too_long(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{what} is too long"))
}

fn full() -> io::Error {
    too_long("the content of the store")
}

/// Appends bytes, preceded by their length.
fn put_bytes(answer: &mut Vec<u8>, bytes: &[u8]) {
    answer.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    answer.extend_from_slice(bytes);
}

/// Serves one client until it closes the connection.
fn serve(all: &Arc<RankStores>, store: &Store, mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut requests = Requests(BufReader::new(stream.try_clone()?));
    loop {
        let [query] = requests.bytes::<1>()?;
        let mut answer = Vec::new();
        match query {
            query::VALIDATE => drop(requests.bytes::<4>()?),
            query::PING => answer.extend_from_slice(&requests.bytes::<4>()?),
            query::SET => {
                let (key, value) = (requests.key()?, requests.value()?);
                store.change(|values| values.set(key, value))?;
            }
            query::COMPARE_SET => {
                let (key, expected, wanted) = (requests.key()?, requests.value()?, requests.value()?);
                put_bytes(&mut answer, &store.change(|values| values.compare_set(key, expected, wanted))?);
            }
            query::GET => {
                let key = requests.key()?;
                put_bytes(&mut answer, &store.lock().get(&key));
            }
            query::ADD => {
                let (key, more) = (requests.key()?, i64::from_le_bytes(requests.bytes()?));
                answer.extend_from_slice(&store.change(|values| values.add(key, more))?.to_le_bytes());
            }
            query::CHECK => {
                let keys = requests.keys()?;
                let values = store.lock();
                answer.push(if keys.iter().all(|key| values.has(key)) { READY } else { NOT_READY });
            }
            query::WAIT => {
                store.wait(&requests.keys()?)?;
                answer.push(STOP_WAITING);
            }
            query::CANCEL_WAIT => answer.push(WAIT_CANCELED),
            query::GET_NUM_KEYS => answer.extend_from_slice(&(store.lock().len() as i64).to_le_bytes()),
            query::DELETE_KEY => {
                let key = requests.key()?;
                let removed = store.take(|values| values.remove(&key));
                answer.extend_from_slice(&i64::from(removed).to_le_bytes());
            }
            query::APPEND => {
                let (key, value) = (requests.key()?, requests.value()?);
                store.change(|values| values.append(key, &value))?;
            }
            query::MULTI_GET => {
                let keys = requests.keys()?;
                let values = store.lock();
                for key in &keys {
                    put_bytes(&mut answer, &values.get(key));
                    if answer.len() > LONGEST_ANSWER {
                        return Err(too_long("an answer"));
                    }
                }
            }
            query::MULTI_SET => {
                for _ in 0..requests.count()? {
                    let (key, value) = (requests.key()?, requests.value()?);
                    store.change(|values| values.set(key, value))?;
                }
            }
            query::QUEUE_PUSH => {
                let (key, value) = (requests.key()?, requests.value()?);
                store.change(|values| values.push(key, value))?;
            }
            query::QUEUE_POP => {
                let key = requests.key()?;
                let value = store.take(|values| values.pop(&key));
                answer.extend_from_slice(&i64::from(value.is_some()).to_le_bytes());
                if let Some(value) = value {
                    put_bytes(&mut answer, &value);
                }
            }
            query::QUEUE_LEN => {
                let key = requests.key()?;
                answer.extend_from_slice(&(store.lock().queue_len(&key) as i64).to_le_bytes());
            }
            query::LIST_KEYS => {
                let values = store.lock();
                answer.extend_from_slice(&(values.len() as i64).to_le_bytes());
                values.keys().for_each(|key| put_bytes(&mut answer, key));
            }
            first @ (b'a'..=b'z') => {
                let line = format!("{}{}", char::from(first), requests.line()?);
                answer.extend_from_slice(answer_to_line(all, store, &line)?.as_bytes());
            }
            _ => return Ok(()),
        }
        if !answer.is_empty() {
            stream.write_all(&answer)?;
        }
    }
}

/// Returns the answer, a line, to a query in words, which only memtrace's stand-ins send.
fn answer_to_line(all: &Arc<RankStores>, store: &Store, line: &str) -> io::Result<String> {
    let (word, rest) = line.trim().split_once(' ').unwrap_or((line.trim(), ""));
    match word {
        "pipeline" => {
            let ranks = rest.split(',').map(|rank| rank.parse().ok());
            if let Some(ranks) = ranks.collect::<Option<BTreeSet<u32>>>() {
                *all.pipeline.lock().unwrap_or_else(PoisonError::into_inner) = ranks;
            }
            Ok("\n".to_owned())
        }
        "key" => {
            let key = all.key_of_id(&bytes_of_hex(rest));
            Ok(format!("{}\n", key.filter(|key| !key.contains('\n')).unwrap_or_default()))
        }
        "waited" => {
            let (place, key) = rest.split_once('\t').unwrap_or_default();
            let answer = match all.note_place(key, place) {
                None => "set\n",
                Some(Answered { is_own: true, .. }) => "own\n",
                Some(_) => "empty\n",
            };
            Ok(answer.to_owned())
        }
        "store" => {
            store.joined.store(true, Ordering::Release);
            Ok(format!("{}\n", all.port(rest)?))
        }
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "an unknown query")),
    }
}

/// Returns the bytes of a hexadecimal text, up to the first invalid pair of digits.
fn bytes_of_hex(text: &str) -> Vec<u8> {
    let pairs = text.as_bytes().chunks_exact(2);
    pairs.map_while(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::store_values::MOST_BYTES;

    fn connect(port: u16) -> TcpStream {
        TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap()
    }

    fn request(query: u8, texts: &[&[u8]]) -> Vec<u8> {
        let mut bytes = vec![query];
        texts.iter().for_each(|text| put_bytes(&mut bytes, text));
        bytes
    }

    fn number(stream: &mut TcpStream) -> i64 {
        let mut bytes = [0; 8];
        stream.read_exact(&mut bytes).unwrap();
        i64::from_le_bytes(bytes)
    }

    #[test]
    fn a_store_answers_the_queries_of_pytorch_and_waits_for_nobody() {
        let stores = RankStores::new(4096, 0);
        let mut client = connect(stores.port("a").unwrap());
        client.write_all(&[query::VALIDATE, 0xce, 0xf7, 0x85, 0x3c, query::PING, 1, 2, 3, 4]).unwrap();
        let mut nonce = [0; 4];
        client.read_exact(&mut nonce).unwrap();
        assert_eq!(nonce, [1, 2, 3, 4]);
        client.write_all(&request(query::SET, &[b"k", b"value"])).unwrap();
        client.write_all(&request(query::GET, &[b"k"])).unwrap();
        assert_eq!(number(&mut client), 5);
        let mut value = [0; 5];
        client.read_exact(&mut value).unwrap();
        assert_eq!(&value, b"value");
        let mut wait = vec![query::WAIT];
        wait.extend_from_slice(&1u64.to_le_bytes());
        put_bytes(&mut wait, b"never set");
        client.write_all(&wait).unwrap();
        let mut stopped = [9];
        client.read_exact(&mut stopped).unwrap();
        assert_eq!(stopped, [STOP_WAITING]);
        client.write_all(&request(query::SET, &[b"pg//cuda//0", b"\x01\xab"])).unwrap();
        client.write_all(b"key 01ab\nkey 01a\nkey zz\n").unwrap();
        let mut lines = BufReader::new(client.try_clone().unwrap()).lines();
        assert_eq!(
            std::array::from_fn(|_| lines.next().unwrap().unwrap()),
            ["pg//cuda//0", "", ""].map(String::from)
        );
        client.write_all(b"waited main (train.py:3)\tnever set\nwaited x\tk\n").unwrap();
        assert_eq!(
            (lines.next().unwrap().unwrap(), lines.next().unwrap().unwrap()),
            ("empty".into(), "set".into())
        );
        let answered = Answered { is_own: false, place: Some("main (train.py:3)".to_owned()) };
        assert_eq!(stores.answered(), [("never set".to_owned(), answered)]);
    }

    #[test]
    fn a_store_finds_the_key_of_an_id_that_is_asked_for_before_it_is_set() {
        let stores = RankStores::new(8, 0);
        let mut client = connect(stores.port("a").unwrap());
        let mut early = connect(stores.port("a").unwrap());
        early.write_all(format!("key {}\n", "07".repeat(UNIQUE_ID)).as_bytes()).unwrap();
        std::thread::sleep(Duration::from_millis(100));
        client.write_all(&request(query::SET, &[b"mesh_dp//cuda//0", &[7; UNIQUE_ID]])).unwrap();
        let mut line = String::new();
        BufReader::new(early).read_line(&mut line).unwrap();
        assert_eq!(line, "mesh_dp//cuda//0\n");
    }

    #[test]
    fn a_store_that_is_full_takes_no_more_values_and_says_so_by_closing() {
        let stores = RankStores::new(8, 0);
        let port = stores.port("a").unwrap();
        let is_open = |client: &mut TcpStream| {
            client.write_all(&[query::PING, 1, 2, 3, 4]).is_ok() && client.read_exact(&mut [0; 4]).is_ok()
        };
        let mut client = connect(port);
        stores.stores.lock().unwrap()["a"].1.lock().pretend_to_hold(MOST_BYTES + 1);
        assert!(is_open(&mut client));
        client.write_all(&request(query::SET, &[b"k", b"v"])).unwrap();
        assert!(!is_open(&mut client));
    }

    #[test]
    fn stores_of_other_names_have_ports_and_keys_of_their_own() {
        let stores = RankStores::new(8, 0);
        let port = stores.port("a").unwrap();
        let mut client = connect(port);
        client.write_all(b"store host:29501\n").unwrap();
        let mut line = String::new();
        BufReader::new(client.try_clone().unwrap()).read_line(&mut line).unwrap();
        let other: u16 = line.trim().parse().unwrap();
        assert_ne!(other, port);
        assert!(stores.were_joined() && !RankStores::new(8, 0).were_joined());
        client.write_all(b"pipeline 0,4,9\n").unwrap();
        assert_eq!(client.read(&mut [0; 1]).unwrap(), 1);
        assert_eq!(stores.pipeline(), BTreeSet::from([0, 4]), "a job of 8 has no rank 9");
        assert_eq!(stores.port("host:29501").unwrap(), other);
        assert_eq!(stores.port(&other.to_string()).unwrap(), other);
        let mut second = connect(other);
        client.write_all(&request(query::SET, &[b"k", b"v"])).unwrap();
        second.write_all(&request(query::GET, &[b"k"])).unwrap();
        assert_eq!(number(&mut second), 0);
    }

    #[test]
    fn a_stray_client_loses_its_connection_and_nothing_else_happens() {
        let stores = RankStores::new(8, 0);
        let port = stores.port("a").unwrap();
        let mut stray = connect(port);
        stray.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let mut rest = Vec::new();
        // The store closes the connection, so the read ends; it may fail, if the connection is reset.
        stray.read_to_end(&mut rest).ok();
        assert!(rest.is_empty());
        let mut long = connect(port);
        long.write_all(&[query::GET]).unwrap();
        long.write_all(&u64::MAX.to_le_bytes()).unwrap();
        long.read_to_end(&mut rest).ok();
        assert!(rest.is_empty());
        let mut client = connect(port);
        client.write_all(&[query::GET_NUM_KEYS]).unwrap();
        assert_eq!(number(&mut client), 0);
    }

    #[test]
    fn closed_stores_take_no_more_clients_and_a_huge_answer_is_not_made() {
        let stores = RankStores::new(8, 0);
        let port = stores.port("a").unwrap();
        let mut client = connect(port);
        client.write_all(&request(query::SET, &[b"k", &vec![0; 1 << 20]])).unwrap();
        let mut many = vec![query::MULTI_GET];
        many.extend_from_slice(&MOST_KEYS.to_le_bytes());
        (0..MOST_KEYS).for_each(|_| put_bytes(&mut many, b"k"));
        client.write_all(&many).unwrap();
        let mut rest = Vec::new();
        client.read_to_end(&mut rest).ok();
        assert!(rest.is_empty());
        stores.close();
        assert!(stores.answered().is_empty());
        // The thread of the store may need a moment to detect that the store is closed.
        let is_closed = (0..500).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err()
        });
        assert!(is_closed);
    }
}
