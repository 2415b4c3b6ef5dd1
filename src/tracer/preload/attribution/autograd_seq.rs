//! Finds the forward op that created a backward function, by autograd's sequence number.
//!
//! An op that creates a node of autograd's graph has a sequence number, counted per thread, and the node's
//! backward function has the same number: (forward thread, number) identifies both. The number is a field of
//! torch's `RecordFunction` without a symbol. While an op starts, the field equals the result of the exported
//! `at::sequence_number::peek`, so its position is found by watching ops. The id of the forward thread
//! follows the number at one of two distances (`RecordFunction` in ATen/record_function.h, 2.1 to 2.15).

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use memtrace_record::intern::{StackId, TextId};
use memtrace_trace::text::SCRIPT;

use crate::attribution::python_frames;
use crate::ffi::loaded_libraries;
use crate::ffi::symbols::{Home, Symbol};
use crate::runtime::fixed_text::FixedText;
use crate::runtime::thread::running_ops::Origin;
use crate::runtime::thread::{self, ThreadState};

/// A function without arguments that reads thread-local state.
type Query = unsafe extern "C" fn() -> u64;

const TORCH: Home = Home::Loaded("libtorch_cpu.so");
// SAFETY: the type is the one in ATen/SequenceNumber.h.
static PEEK: Symbol<Query> = unsafe { Symbol::new(c"_ZN2at15sequence_number4peekEv", TORCH) };
// SAFETY: the type is the one in ATen/record_function.h.
static CURRENT_THREAD_ID: Symbol<Query> =
    unsafe { Symbol::new(c"_ZN2at14RecordFunction15currentThreadIdEv", TORCH) };

/// True if module paths are known in this process. Without module paths, origins are stored only if Python
/// stacks are recorded.
static MODULES: AtomicBool = AtomicBool::new(false);
/// The index of the word of a `RecordFunction` that holds the sequence number; 0 during the search,
/// `NOT_FOUND` if the search has failed.
static PLACE: AtomicUsize = AtomicUsize::new(0);
const NOT_FOUND: usize = usize::MAX;
/// The number of words of a `RecordFunction` that are searched. The object is longer in every version.
const WORDS: usize = 32;
/// Distances in words from the sequence number. The forward thread's id is at `TO_THREAD`, after the inputs
/// and outputs. Later versions of torch also have named inputs, a `std::unordered_map` at `TO_NAMES`. In
/// these versions, the id is at `TO_THREAD_WITH_NAMES`.
const TO_THREAD: usize = 6;
const TO_THREAD_WITH_NAMES: usize = 13;
const TO_NAMES: usize = 3;
/// The distance in words from the start of the map to its built-in bucket, which an empty map points to.
const TO_BUCKET: usize = 6;
/// The distance that this torch uses, `TO_THREAD` or `TO_THREAD_WITH_NAMES`; 0 before the first backward
/// function.
static DISTANCE: AtomicUsize = AtomicUsize::new(0);
/// The number of ops at which a word must equal the next sequence number before the word is accepted.
/// `tracer/known_objects.py` runs more than twice this number of ops when the tracer starts, so that the word
/// is known before the first forward.
const ENOUGH: u32 = 8;
/// The number of watched ops after which the search fails.
const TOO_MANY: u32 = 20_000;

/// For each word of a `RecordFunction`, the number of ops at which the word equaled the next sequence number.
/// Counts only the ops of the thread [`WATCHER`], and only if the next number has changed since the previous
/// op.
static AGREED: [AtomicU32; WORDS] = [const { AtomicU32::new(0) }; WORDS];
static WATCHED: AtomicU32 = AtomicU32::new(0);
static WATCHER: AtomicU64 = AtomicU64::new(0);
static LAST: AtomicU64 = AtomicU64::new(0);

/// The module of each recent sequence number of every thread; 0 marks an empty entry. All threads share one
/// table because a program may start a thread for every forward (`DataParallel` does), and torch never reuses
/// a thread's id.
static MODULE_OF: [AtomicU64; PLACES] = [const { AtomicU64::new(0) }; PLACES];
/// The number of the module call (see [`crate::attribution::backward_calls`]) of each recent sequence number.
static CALL_OF: [AtomicU64; PLACES] = [const { AtomicU64::new(0) }; PLACES];
/// The Python stack of each recent sequence number. Filled only with `MEMTRACE_STACKS=python`.
static PYTHON_OF: [AtomicU64; PLACES] = [const { AtomicU64::new(0) }; PLACES];
/// The number of entries in each table: enough for the nodes of all live graphs. Older entries are
/// overwritten. A thread numbers its nodes consecutively, so two of its nodes share an entry only if their
/// numbers differ by a multiple of this length.
const PLACES: usize = 1 << 19;

/// Returns the table index of a thread's sequence number, and its key. An entry of a table has the key in its
/// upper half and the value in its lower half.
fn place_of(thread: u64, number: u64) -> (usize, u64) {
    // The multiplication spreads the threads over the table, so that the consecutive numbers of different
    // threads rarely share an entry.
    let first = thread.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20;
    let index = first.wrapping_add(number) as usize % PLACES;
    let key = (thread & 0xFFFF) << 16 | (number / PLACES as u64) & 0xFFFF;
    (index, key)
}

/// Looks up torch's functions. If one is missing, the search for the position of the number has failed.
pub(crate) fn install() {
    if PEEK.get().is_none() || CURRENT_THREAD_ID.get().is_none() {
        PLACE.store(NOT_FOUND, Ordering::Relaxed);
    }
}

/// Returns the index of the word that holds the sequence number, or `None` while this word is unknown.
pub(crate) fn place() -> Option<usize> {
    match PLACE.load(Ordering::Relaxed) {
        0 | NOT_FOUND => None,
        place => Some(place),
    }
}

/// Records that module paths are known from now on.
pub(crate) fn modules_are_known() {
    MODULES.store(true, Ordering::Release);
}

/// Returns the text id of the script, which is the module of an op outside every module. Returns 0 while
/// module paths are unknown.
pub(crate) fn script_module() -> TextId {
    static SCRIPT_MODULE: FixedText = FixedText::new(SCRIPT);
    if MODULES.load(Ordering::Relaxed) { SCRIPT_MODULE.id() } else { 0 }
}

fn query(function: &Symbol<Query>) -> u64 {
    // SAFETY: both functions take nothing and read thread-local state.
    function.cached().map_or(0, |function| unsafe { function() })
}

/// Returns torch's id of the thread of `state`. The id is cached in `state`, because it never changes.
fn thread_id(state: &ThreadState) -> u64 {
    if state.torch_id.get() == 0 {
        state.torch_id.set(query(&CURRENT_THREAD_ID));
    }
    state.torch_id.get()
}

/// Reads the word at `index` of a `RecordFunction`.
///
/// # Safety
/// `record` is a live `RecordFunction`. `index` is below [`WORDS`], or at most [`TO_THREAD_WITH_NAMES`] words
/// after the word that was found to be the number.
unsafe fn word(record: *const c_void, index: usize) -> u64 {
    // SAFETY: by the contract, the word is inside the record.
    unsafe { record.cast::<u64>().add(index).read() }
}

/// Returns the sequence number of the node that a starting op may create. Returns `None` for an op that
/// creates no node, while the position of the number is unknown, and if neither modules nor Python stacks are
/// recorded.
///
/// # Safety
/// `record` is a live `RecordFunction`.
#[inline]
pub(crate) unsafe fn number_of(state: &ThreadState, record: *const c_void) -> Option<u64> {
    match PLACE.load(Ordering::Relaxed) {
        NOT_FOUND => None,
        0 => {
            // SAFETY: by the contract.
            unsafe { watch(state, record) };
            None
        }
        _ if !MODULES.load(Ordering::Relaxed) && !python_frames::are_recorded() => None,
        // SAFETY: by the contract; the place is below `WORDS`.
        place => Some(unsafe { word(record, place) }).filter(|number| (*number as i64) >= 0),
    }
}

/// Stores the origin of the node with this number on the thread of `state`: the module (0 outside every
/// module), the number of the module call, and the Python stack. `python` computes the stack only if stacks
/// are recorded.
#[inline]
pub(crate) fn remember(state: &ThreadState, number: u64, module: TextId, python: impl FnOnce() -> StackId) {
    let module = if module == 0 { script_module() } else { module };
    let (place, key) = place_of(thread_id(state), number);
    MODULE_OF[place].store(key << 32 | u64::from(module), Ordering::Relaxed);
    CALL_OF[place].store(key << 32 | u64::from(state.ranges.call.get()), Ordering::Relaxed);
    if python_frames::are_recorded() {
        PYTHON_OF[place].store(key << 32 | u64::from(python()), Ordering::Relaxed);
    }
}

/// Returns the id of the thread that ran the forward of a backward function.
///
/// # Safety
/// `record` is the live `RecordFunction` of a backward function, and `place` is the index of the word with
/// its number.
unsafe fn forward_thread(record: *const c_void, place: usize) -> u64 {
    let mut distance = DISTANCE.load(Ordering::Relaxed);
    if distance == 0 {
        // A backward function has no inputs by name, so the map is empty and points to its own built-in
        // bucket.
        let names = place + TO_NAMES;
        // SAFETY: by the contract, because the word is close after the number.
        let points_to = unsafe { word(record, names) };
        let is_empty_map = points_to == record as u64 + 8 * (names + TO_BUCKET) as u64;
        distance = if is_empty_map { TO_THREAD_WITH_NAMES } else { TO_THREAD };
        DISTANCE.store(distance, Ordering::Relaxed);
    }
    // SAFETY: as above.
    unsafe { word(record, place + distance) }
}

/// Returns the origin of a backward function's node. Returns `None` if the node has no sequence number, if
/// the tables have no entry for it, or while the position of the number is unknown.
///
/// # Safety
/// `record` is the live `RecordFunction` of a backward function.
pub(crate) unsafe fn origin_of(record: *const c_void) -> Option<Origin> {
    let place = self::place()?;
    // SAFETY: by the contract.
    let (number, thread) = unsafe { (word(record, place), forward_thread(record, place)) };
    let (place, key) = place_of(thread, number);
    let of = |table: &[AtomicU64; PLACES]| {
        let entry = table[place].load(Ordering::Relaxed);
        (entry != 0 && entry >> 32 == key).then_some(entry as u32)
    };
    if (number as i64) < 0 {
        return None;
    }
    let python = if python_frames::are_recorded() { of(&PYTHON_OF) } else { None };
    of(&MODULE_OF).map(|module| Origin {
        module,
        call: of(&CALL_OF).unwrap_or(0),
        python: python.unwrap_or(0),
    })
}

/// Returns true if this backward function has a sequence number. A function that accumulates a gradient has
/// no number.
///
/// # Safety
/// `record` is a live `RecordFunction`.
pub(crate) unsafe fn has_number(record: *const c_void) -> bool {
    // SAFETY: by the contract.
    place().is_some_and(|place| (unsafe { word(record, place) } as i64) >= 0)
}

/// Torch's id of the thread that runs the interpreter's pending calls; 0 before the tracer starts.
static MAIN: AtomicU64 = AtomicU64::new(0);
/// The value of [`MAIN`] while that thread has not run a pending call. No thread has this id.
const UNKNOWN: u64 = u64::MAX;

/// Records that the calling thread runs the interpreter's pending calls.
pub(crate) fn this_is_main() {
    thread::with(|state| MAIN.store(thread_id(state), Ordering::Relaxed));
}

/// Records that the tracer starts on a different thread from the one that runs the interpreter's pending
/// calls.
pub(crate) fn main_is_unknown() {
    let _ = MAIN.compare_exchange(0, UNKNOWN, Ordering::Relaxed, Ordering::Relaxed);
}

/// Returns true if the tracer started on a thread that does not run the interpreter's pending calls, and the
/// thread that does has not run one yet.
pub(crate) fn is_main_unknown() -> bool {
    MAIN.load(Ordering::Relaxed) == UNKNOWN
}

/// Returns true if the main thread ran the forward op of this backward function. Also returns true while the
/// position of the number is unknown or the tracer has not started. Returns false while [`MAIN`] is
/// [`UNKNOWN`].
///
/// # Safety
/// `record` is the live `RecordFunction` of a backward function.
pub(crate) unsafe fn is_of_main(record: *const c_void) -> bool {
    let (place, main) = (PLACE.load(Ordering::Relaxed), MAIN.load(Ordering::Relaxed));
    // SAFETY: by the contract.
    place == 0 || place == NOT_FOUND || main == 0 || unsafe { forward_thread(record, place) } == main
}

/// Runs `work` and then restores the thread's next sequence number, so that the nodes of `work` take no
/// numbers. The engine orders the nodes of a double backward by their numbers, so numbers that our nodes use
/// up would change the program's order.
///
/// torch has no function that sets the number, a thread-local variable. The variable is found by trial: it is
/// the word of libtorch's thread-local storage whose change also changes the result of `peek`.
pub(crate) fn keeping_number<R>(work: impl FnOnce() -> R) -> R {
    let before = query(&PEEK);
    let result = work();
    let after = query(&PEEK);
    if after != before
        && let Some((start, words)) = loaded_libraries::thread_variables("libtorch_cpu.so")
    {
        for index in 0..words {
            // SAFETY: `start` and `words` describe the variables of this thread, which no other code changes
            // during the loop. A word that turns out not to be the number gets its old value back.
            unsafe {
                let word = start.add(index);
                if word.read_volatile() == after {
                    word.write_volatile(before);
                    if query(&PEEK) == before {
                        break;
                    }
                    word.write_volatile(after);
                }
            }
        }
    }
    result
}

/// Compares the words of a starting op with the next sequence number. A word is accepted once it has matched
/// at [`ENOUGH`] ops, if it has matched more than twice as often as any other word.
///
/// # Safety
/// `record` is a live `RecordFunction`.
#[cold]
unsafe fn watch(state: &ThreadState, record: *const c_void) {
    let this_thread = thread_id(state);
    let watcher = WATCHER.compare_exchange(0, this_thread, Ordering::Relaxed, Ordering::Relaxed);
    if watcher.is_err_and(|watcher| watcher != this_thread) {
        return;
    }
    if WATCHED.fetch_add(1, Ordering::Relaxed) > TOO_MANY {
        PLACE.store(NOT_FOUND, Ordering::Relaxed);
        return;
    }
    let next = query(&PEEK);
    // Skip small numbers, because many words have small values, and repeated numbers, because a constant word
    // would match again.
    if next < 2 || LAST.swap(next, Ordering::Relaxed) == next {
        return;
    }
    let mut best = (0, 0);
    let mut second = 0;
    for (index, agreed) in AGREED.iter().enumerate() {
        let mut count = agreed.load(Ordering::Relaxed);
        // SAFETY: by the contract, and the index is below `WORDS`.
        if unsafe { word(record, index) } == next {
            count += 1;
            agreed.store(count, Ordering::Relaxed);
        }
        if count > best.1 {
            second = best.1;
            best = (index, count);
        } else {
            second = second.max(count);
        }
    }
    if best.1 >= ENOUGH && second * 2 < best.1 {
        PLACE.store(best.0, Ordering::Relaxed);
    }
}
