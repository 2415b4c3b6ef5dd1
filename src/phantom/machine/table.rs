//! The table of a machine: its processes, the memory that each process uses on each card, and the state of
//! the cards.
//!
//! The table is a header followed by the process slots, all in 64-bit words. The header starts with the magic
//! number, the number of slots that readers must search, and the length of the card request, whose text is at
//! [`REQUEST_AT`]. The header has two words per card, [`CARD_LOST`] and [`CARD_ECC`], and then a
//! lock per card.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use memtrace_cards::{MAX_DEVICES, Spec};
use memtrace_util::process::start_of;

use crate::process::Process;

/// The first word of a table. Its last character is the version of the layout.
const MAGIC: u64 = u64::from_le_bytes(*b"MTPHANT1");
/// The maximum number of processes of one machine that use a card. Any further process runs, but other
/// processes do not see its memory.
pub const MAX_PROCESSES: usize = 256;
/// The maximum length of a card request, in bytes.
pub const MAX_REQUEST: usize = 1024;

const USED_SLOTS: usize = 1;
const REQUEST_LENGTH: usize = 2;
/// The offset of the cards' words in the header. Each card has two words: 1 if the card is lost, and the
/// number of its uncorrectable ECC errors.
const CARDS: usize = 8;
const CARD_WORDS: usize = 2;
const CARD_LOST: usize = 0;
const CARD_ECC: usize = 1;
/// The offset of the cards' locks in the header. A card has one word: the process that has locked the card, as
/// by [`owner_word`], or 0.
const LOCKS: usize = CARDS + CARD_WORDS * MAX_DEVICES as usize;
const REQUEST_AT: usize = 128;
const HEADER_WORDS: usize = 512;

/// The number of words of a slot. They hold the process (id and start time), the CUDA version of its runtime,
/// and the process's use of each card.
const SLOT_WORDS: usize = 128;
const PID: usize = 0;
const START: usize = 1;
const CUDA: usize = 2;
const USES: usize = 8;
/// The number of words for each card in a slot. The first has the bytes of the context with [`HAS_CONTEXT`],
/// or 0 without a context. The second has the allocated bytes. The third has the time in nanoseconds that the
/// card has worked for the process.
const USE_WORDS: usize = 3;
const CONTEXT: usize = 0;
const ALLOCATED: usize = 1;
const BUSY: usize = 2;
/// The upper half of the first word of a slot that a process is claiming. The lower half is the id of that
/// process, which may be killed before the slot is complete.
const CLAIMED: u64 = 1 << 63;
/// The bit that is set if the process has a context on the card, even a context that uses no memory.
const HAS_CONTEXT: u64 = 1 << 63;

/// The number of words of a table.
pub const WORDS: usize = HEADER_WORDS + MAX_PROCESSES * SLOT_WORDS;

const _: () = assert!(LOCKS + MAX_DEVICES as usize <= REQUEST_AT);
const _: () = assert!(REQUEST_AT + MAX_REQUEST / 8 <= HEADER_WORDS);
const _: () = assert!(USES + USE_WORDS * MAX_DEVICES as usize <= SLOT_WORDS);

/// A table in shared memory, or a copy of one.
#[derive(Clone, Copy)]
pub struct Table<'a> {
    words: &'a [AtomicU64],
}

/// The index of a process's slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot(usize);

/// A locked card. Dropping the value unlocks the card.
#[derive(Debug)]
pub struct CardLock<'a>(&'a AtomicU64);

impl Drop for CardLock<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}

/// The attempts to lock a card after which the process that has locked it is looked up.
const SPINS: u32 = 1000;

/// Returns the word of a lock that this process holds: its id, and the lower half of its start time.
fn owner_word(process: Process) -> u64 {
    process.start << 32 | u64::from(process.pid)
}

/// Returns true if the process that holds a lock with this word exists.
fn is_owner_alive(word: u64) -> bool {
    let pid = word as u32;
    start_of(pid).is_some_and(|start| owner_word(Process { pid, start }) == word)
}

/// The use of one card by one process. Sizes are in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CardUse {
    /// The size of the CUDA context; `None` if the process has no context on the card.
    pub context: Option<u64>,
    /// The memory that the process has allocated, without its context.
    pub allocated: u64,
    /// The time that the card has worked for the process, in nanoseconds of simulated time.
    pub busy_ns: u64,
}

impl CardUse {
    /// Returns the total bytes of the process on the card.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.context.unwrap_or(0).saturating_add(self.allocated)
    }
}

/// A process of the machine, with its use of each card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessUse {
    /// The process.
    pub process: Process,
    /// The CUDA version of the process's runtime; 0 until it is known.
    pub cuda_version: u32,
    /// The use of each card of the machine.
    pub cards: Vec<CardUse>,
}

/// Returns the words of a new table.
///
/// Returns `None` if the request is too long.
#[must_use]
pub fn new_words(request: &str) -> Option<Vec<u64>> {
    if request.len() > MAX_REQUEST {
        return None;
    }
    let mut words = vec![0; WORDS];
    words[0] = MAGIC;
    words[REQUEST_LENGTH] = request.len() as u64;
    for (word, bytes) in words[REQUEST_AT..].iter_mut().zip(request.as_bytes().chunks(8)) {
        let mut whole = [0; 8];
        whole[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_le_bytes(whole);
    }
    Some(words)
}

impl<'a> Table<'a> {
    /// Interprets words as a table. Returns `None` if the words are not a table.
    #[must_use]
    pub fn new(words: &'a [AtomicU64]) -> Option<Self> {
        let is_table = words.len() == WORDS && words[0].load(Ordering::Acquire) == MAGIC;
        is_table.then_some(Self { words })
    }

    fn get(&self, at: usize) -> u64 {
        // `SeqCst`, as all accesses that find the slots: of two processes that take memory at the same time,
        // one must find the other.
        self.words[at].load(Ordering::SeqCst)
    }

    /// Returns the request for the machine's cards, or `None` if it is not valid text.
    #[must_use]
    pub fn request(&self) -> Option<String> {
        let length = (self.get(REQUEST_LENGTH) as usize).min(MAX_REQUEST);
        let words = &self.words[REQUEST_AT..REQUEST_AT + MAX_REQUEST / 8];
        let bytes: Vec<u8> =
            words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).take(length).collect();
        String::from_utf8(bytes).ok()
    }

    /// Returns the cards of the machine, or `None` if the request is invalid.
    #[must_use]
    pub fn spec(&self) -> Option<Spec> {
        Spec::parse(&self.request()?).ok()
    }

    fn slots(&self) -> impl Iterator<Item = Slot> {
        (0..(self.get(USED_SLOTS) as usize).min(MAX_PROCESSES)).map(Slot)
    }

    fn word(&self, slot: Slot, at: usize) -> &'a AtomicU64 {
        &self.words[HEADER_WORDS + slot.0 * SLOT_WORDS + at]
    }

    fn process_of(&self, slot: Slot) -> Option<Process> {
        let pid = u32::try_from(self.word(slot, PID).load(Ordering::SeqCst)).ok().filter(|&pid| pid != 0)?;
        Some(Process { pid, start: self.word(slot, START).load(Ordering::Relaxed) })
    }

    /// Takes a slot for a process: a free slot, or the slot of a process that has ended. Returns `None` if
    /// all slots are in use.
    #[must_use]
    pub fn claim(&self, process: Process) -> Option<Slot> {
        self.clear_dead();
        for slot in (0..MAX_PROCESSES).map(Slot) {
            let pid = self.word(slot, PID);
            // The mark is not the id of a process, so that readers ignore the slot until its values are set.
            let mark = CLAIMED | u64::from(std::process::id());
            let taken = pid.compare_exchange(0, mark, Ordering::AcqRel, Ordering::Relaxed);
            if taken.is_err() {
                continue;
            }
            for at in CUDA..SLOT_WORDS {
                self.word(slot, at).store(0, Ordering::Relaxed);
            }
            self.word(slot, START).store(process.start, Ordering::Relaxed);
            pid.store(u64::from(process.pid), Ordering::SeqCst);
            self.words[USED_SLOTS].fetch_max(slot.0 as u64 + 1, Ordering::SeqCst);
            return Some(slot);
        }
        None
    }

    /// Frees the slots of processes that have ended, and those that such a process was claiming.
    pub fn clear_dead(&self) {
        // A slot that is being claimed may be after the slots in use.
        for slot in (0..MAX_PROCESSES).map(Slot) {
            let word = self.word(slot, PID);
            let mark = word.load(Ordering::Acquire);
            let claimer = mark ^ CLAIMED;
            if let Ok(pid) = u32::try_from(claimer)
                && start_of(pid).is_none()
            {
                let _ = word.compare_exchange(mark, 0, Ordering::AcqRel, Ordering::Relaxed);
            }
        }
        for slot in self.slots() {
            if let Some(process) = self.process_of(slot)
                && !process.is_alive()
            {
                let pid = self.word(slot, PID);
                // If the slot was freed and claimed again in the meantime, the exchange fails and the slot
                // stays taken.
                let _ = pid.compare_exchange(u64::from(process.pid), 0, Ordering::AcqRel, Ordering::Relaxed);
            }
        }
    }

    /// Waits until nobody has locked the card, and locks it. The lock of a process that was killed is ignored. Returns
    /// `None` without a lock if no process has the slot.
    #[must_use]
    pub fn lock_card(&self, slot: Slot, card: usize) -> Option<CardLock<'a>> {
        assert!(card < MAX_DEVICES as usize);
        let lock = &self.words[LOCKS + card];
        let own = owner_word(self.process_of(slot)?);
        let (mut free, mut attempts) = (0, 0);
        while let Err(owner) = lock.compare_exchange(free, own, Ordering::Acquire, Ordering::Relaxed) {
            free = 0;
            attempts += 1;
            if attempts < SPINS {
                std::thread::yield_now();
            } else if owner != 0 && !is_owner_alive(owner) {
                free = owner;
            } else {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        Some(CardLock(lock))
    }

    /// Stores the CUDA version of a process's runtime.
    pub fn set_cuda_version(&self, slot: Slot, version: u32) {
        self.word(slot, CUDA).store(u64::from(version), Ordering::Relaxed);
    }

    /// Stores the bytes of a process's context on a card.
    pub fn set_context(&self, slot: Slot, card: usize, bytes: u64) {
        self.use_word(slot, card, CONTEXT).store(bytes | HAS_CONTEXT, Ordering::SeqCst);
    }

    /// Stores the bytes that a process has allocated on a card.
    pub fn set_allocated(&self, slot: Slot, card: usize, bytes: u64) {
        self.use_word(slot, card, ALLOCATED).store(bytes, Ordering::SeqCst);
    }

    /// Returns the word that holds the time that a card has worked for a process.
    #[must_use]
    pub fn busy(&self, slot: Slot, card: usize) -> &'a AtomicU64 {
        self.use_word(slot, card, BUSY)
    }

    fn use_word(&self, slot: Slot, card: usize, at: usize) -> &'a AtomicU64 {
        assert!(card < MAX_DEVICES as usize);
        self.word(slot, USES + card * USE_WORDS + at)
    }

    fn use_of(&self, slot: Slot, card: usize) -> CardUse {
        let get = |at| self.use_word(slot, card, at).load(Ordering::SeqCst);
        let context = get(CONTEXT);
        CardUse {
            context: (context & HAS_CONTEXT != 0).then_some(context & !HAS_CONTEXT),
            allocated: get(ALLOCATED),
            busy_ns: get(BUSY),
        }
    }

    /// Returns the bytes that all processes except `own` use on a card. The memory of a process that has
    /// ended counts until [`clear_dead`](Self::clear_dead) frees its slot.
    #[must_use]
    pub fn bytes_of_others(&self, own: Option<Slot>, card: usize) -> u64 {
        let others = self.slots().filter(|&slot| Some(slot) != own && self.process_of(slot).is_some());
        others.map(|slot| self.use_of(slot, card).bytes()).fold(0, u64::saturating_add)
    }

    /// Returns the processes of the machine that have not ended, with their memory on its first `cards`
    /// cards.
    #[must_use]
    pub fn processes(&self, cards: usize) -> Vec<ProcessUse> {
        let alive = |slot| Some((slot, self.process_of(slot).filter(|process| process.is_alive())?));
        let processes = self.slots().filter_map(alive);
        processes
            .map(|(slot, process)| ProcessUse {
                process,
                cuda_version: self.word(slot, CUDA).load(Ordering::Relaxed) as u32,
                cards: (0..cards.min(MAX_DEVICES as usize)).map(|card| self.use_of(slot, card)).collect(),
            })
            .collect()
    }

    fn card_word(&self, card: usize, at: usize) -> &'a AtomicU64 {
        assert!(card < MAX_DEVICES as usize);
        &self.words[CARDS + card * CARD_WORDS + at]
    }

    /// Returns true if the card has fallen off the bus.
    #[must_use]
    pub fn is_lost(&self, card: usize) -> bool {
        self.card_word(card, CARD_LOST).load(Ordering::Relaxed) != 0
    }

    /// Marks a card as fallen off the bus.
    pub fn lose(&self, card: usize) {
        self.card_word(card, CARD_LOST).store(1, Ordering::Relaxed);
    }

    /// Returns the number of a card's uncorrectable ECC errors.
    #[must_use]
    pub fn ecc_errors(&self, card: usize) -> u64 {
        self.card_word(card, CARD_ECC).load(Ordering::Relaxed)
    }

    /// Counts an uncorrectable ECC error on a card.
    pub fn add_ecc_error(&self, card: usize) {
        self.card_word(card, CARD_ECC).fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(request: &str) -> Vec<AtomicU64> {
        new_words(request).unwrap().into_iter().map(AtomicU64::new).collect()
    }

    #[test]
    fn a_process_sees_the_memory_of_live_processes_and_not_of_dead_ones() {
        let words = words("8xh100-80g");
        let table = Table::new(&words).unwrap();
        assert_eq!(table.spec().map(|spec| spec.count), Some(8));
        let me = Process::current();
        let dead = Process { start: me.start + 1, ..me };
        // `claim` reuses the slot of a dead process, so the dead process claims its slot last.
        let own = table.claim(me).unwrap();
        let other = table.claim(dead).unwrap();
        table.set_context(other, 3, 500);
        table.set_allocated(other, 3, 1000);
        assert_eq!((table.bytes_of_others(Some(own), 3), table.bytes_of_others(Some(own), 2)), (1500, 0));
        assert_eq!(table.processes(8).len(), 1);
        table.clear_dead();
        assert_eq!(table.bytes_of_others(Some(own), 3), 0);
        // Setup: the slot is claimed again -> its old values are reset to 0.
        assert_eq!(table.claim(me), Some(other));
        assert_eq!(table.use_of(other, 3), CardUse::default());
    }

    #[test]
    fn a_slot_whose_process_was_killed_while_it_claimed_the_slot_is_freed() {
        let words = words("t4");
        let table = Table::new(&words).unwrap();
        let (mut ended, me) = (std::process::Command::new("true").spawn().unwrap(), std::process::id());
        ended.wait().unwrap();
        let mark = |slot, pid| table.word(Slot(slot), PID).store(CLAIMED | u64::from(pid), Ordering::Relaxed);
        mark(0, me);
        mark(1, ended.id());
        mark(MAX_PROCESSES - 1, ended.id());
        assert_eq!(table.claim(Process::current()), Some(Slot(1)), "the first is being claimed");
        assert_eq!(table.word(Slot(MAX_PROCESSES - 1), PID).load(Ordering::Relaxed), 0);
        assert_eq!(table.processes(1).len(), 1);
    }

    #[test]
    fn a_card_that_a_killed_process_locked_can_be_locked() {
        let words = words("t4");
        let table = Table::new(&words).unwrap();
        let slot = table.claim(Process::current()).unwrap();
        let lock = &table.words[LOCKS + 1];
        let owner = || lock.load(Ordering::Relaxed);
        let locked = table.lock_card(slot, 1);
        assert!(is_owner_alive(owner()));
        drop(locked);
        assert_eq!(owner(), 0);
        for dead in [u64::MAX, owner_word(Process { start: 1, ..Process::current() })] {
            lock.store(dead, Ordering::Relaxed);
            let locked = table.lock_card(slot, 1);
            assert!(is_owner_alive(owner()));
            drop(locked);
        }
        // Setup: the slot has no process, and another process has locked the card -> its lock stays.
        let others = owner_word(Process { start: 1, ..Process::current() });
        lock.store(others, Ordering::Relaxed);
        assert!(table.lock_card(Slot(slot.0 + 1), 1).is_none());
        assert_eq!(owner(), others);
        lock.store(0, Ordering::Relaxed);
        // Setup: each thread is in the place of a process -> only one at a time has the card.
        let in_use = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        let _locked = table.lock_card(slot, 1);
                        assert_eq!(in_use.fetch_add(1, Ordering::Relaxed), 0);
                        in_use.fetch_sub(1, Ordering::Relaxed);
                    }
                });
            }
        });
    }

    #[test]
    fn a_full_table_gives_no_slot_and_keeps_its_processes() {
        let words = words("t4");
        let table = Table::new(&words).unwrap();
        assert!((0..MAX_PROCESSES).all(|_| table.claim(Process::current()).is_some()));
        assert_eq!(table.claim(Process::current()), None);
        assert_eq!(table.processes(1).len(), MAX_PROCESSES);
    }

    #[test]
    fn a_table_of_hostile_numbers_is_read_without_harm() {
        let hostile: Vec<AtomicU64> = (0..WORDS).map(|_| AtomicU64::new(u64::MAX)).collect();
        assert!(Table::new(&hostile).is_none());
        hostile[0].store(MAGIC, Ordering::Relaxed);
        let table = Table::new(&hostile).unwrap();
        assert_eq!((table.request(), table.spec()), (None, None));
        assert!(table.processes(usize::MAX).is_empty());
        assert_eq!(table.bytes_of_others(None, 31), 0);
        assert_eq!(table.claim(Process::current()), None);
        // Setup: all slots belong to a live process and hold the maximum values -> the sum saturates.
        let me = Process::current();
        for slot in (0..MAX_PROCESSES).map(Slot) {
            table.word(slot, START).store(me.start, Ordering::Relaxed);
            table.word(slot, PID).store(u64::from(me.pid), Ordering::Relaxed);
        }
        assert_eq!(table.bytes_of_others(None, 0), u64::MAX);
        assert!(Table::new(&hostile[..100]).is_none());
        assert!(new_words(&"x".repeat(MAX_REQUEST + 1)).is_none());
    }
}
