//! Which forward made a backward function: autograd's sequence numbers.
//!
//! Every op that makes a node of autograd's graph has a number, counted per thread, and so has the
//! backward function of that node: (forward thread, number) names both. The number is a field of torch's
//! `RecordFunction` that has no symbol, but while an op starts it equals what the exported
//! `at::sequence_number::peek` gives, so its place is found by watching. The forward thread's id lies one of
//! two distances behind it (`RecordFunction` in ATen/record_function.h, 2.1 to 2.15).

use std::ffi::{CStr, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use memtrace_record::intern::{StackId, TextId};
use memtrace_trace::text::SCRIPT;

use crate::attribution::op_stack;
use crate::attribution::python_frames;
use crate::ffi::symbols::find_in_loaded;
use crate::runtime::thread;
use crate::runtime::thread::Own;

const TORCH: &str = "libtorch_cpu.so";
const PEEK: &CStr = c"_ZN2at15sequence_number4peekEv";
const THREAD_ID: &CStr = c"_ZN2at14RecordFunction15currentThreadIdEv";

type Peek = unsafe extern "C" fn() -> u64;

static PEEK_FN: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
static THREAD_ID_FN: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

/// Are module paths known in this process? Without them there is nothing to remember.
static MODULES: AtomicBool = AtomicBool::new(false);
/// The word of a `RecordFunction` that is the number; 0 while it is sought, `NOWHERE` when it was not
/// found.
static PLACE: AtomicUsize = AtomicUsize::new(0);
const NOWHERE: usize = usize::MAX;
/// Words of a `RecordFunction` that are looked at: it is longer than that in every version.
const WORDS: usize = 32;
/// From the number to the forward thread's id, in words: the inputs and the outputs are between them, and in
/// later versions the inputs by name, a `std::unordered_map` behind the inputs.
const TO_THREAD: usize = 6;
const TO_THREAD_WITH_NAMES: usize = 13;
const TO_NAMES: usize = 3;
/// From the beginning of the map to the place that it points at while it is empty.
const TO_BUCKET: usize = 6;
/// Which of them it is in this torch; 0 before the first backward function.
static DISTANCE: AtomicUsize = AtomicUsize::new(0);
/// How many ops a word must have agreed with. `hooks.py` runs twice as many when it is installed, so that
/// the place is known before the first forward.
const ENOUGH: u32 = 8;
/// After so many ops without a result, there is none.
const TOO_MANY: u32 = 20_000;

/// How often each word was the expected number, over ops of one thread whose numbers differ.
static AGREED: [AtomicU32; WORDS] = [const { AtomicU32::new(0) }; WORDS];
static WATCHED: AtomicU32 = AtomicU32::new(0);
static WATCHER: AtomicU64 = AtomicU64::new(0);
static LAST: AtomicU64 = AtomicU64::new(0);

/// The modules of the last numbers of all threads; 0 is empty. Not by thread: a program may start one for
/// every forward (`DataParallel` does), and torch never gives the id of one to another.
static MODULE_OF: [AtomicU64; PLACES] = [const { AtomicU64::new(0) }; PLACES];
/// The same for the stacks of Python, which are there only when they are asked for.
static PYTHON_OF: [AtomicU64; PLACES] = [const { AtomicU64::new(0) }; PLACES];
/// Nodes of all graphs that are alive at once; older ones are forgotten. A thread's numbers follow each
/// other, so those of one thread are this far apart before two of them meet.
const PLACES: usize = 1 << 19;

/// The place of a number of a thread, and what is in it for this number: the upper half of an entry, whose
/// lower half is the module.
fn place_of(thread: u64, number: u64) -> (usize, u64) {
    // Threads begin anywhere in the table, far from each other.
    let first = thread.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20;
    let index = first.wrapping_add(number) as usize % PLACES;
    let key = (thread & 0xFFFF) << 16 | (number / PLACES as u64) & 0xFFFF;
    (index, key)
}

/// Finds the functions; before the callbacks are installed.
pub(crate) fn install() {
    PEEK_FN.store(find_in_loaded(TORCH, PEEK), Ordering::Relaxed);
    THREAD_ID_FN.store(find_in_loaded(TORCH, THREAD_ID), Ordering::Relaxed);
    if PEEK_FN.load(Ordering::Relaxed).is_null() || THREAD_ID_FN.load(Ordering::Relaxed).is_null() {
        PLACE.store(NOWHERE, Ordering::Relaxed);
    }
}

/// The word of a `RecordFunction` that is the number, once it is known.
pub(crate) fn place() -> Option<usize> {
    match PLACE.load(Ordering::Relaxed) {
        0 | NOWHERE => None,
        place => Some(place),
    }
}

/// Module paths are known from now on.
pub(crate) fn modules_are_known() {
    MODULES.store(true, Ordering::Release);
}

/// The module of an op outside every module: the script, once modules are known.
pub(crate) fn outside() -> TextId {
    static ID: AtomicU32 = AtomicU32::new(0);
    if MODULES.load(Ordering::Relaxed) { op_stack::numbered(&ID, SCRIPT) } else { 0 }
}

fn call(function: &AtomicPtr<c_void>) -> u64 {
    let found = function.load(Ordering::Relaxed);
    if found.is_null() {
        return 0;
    }
    // SAFETY: both functions take nothing and return a 64-bit number (ATen/SequenceNumber.h and
    // record_function.h); they read thread-local state.
    unsafe { std::mem::transmute::<*mut c_void, Peek>(found)() }
}

/// Torch's number of the thread that `own` is of.
fn thread_id(own: &Own) -> u64 {
    if own.torch_id.get() == 0 {
        own.torch_id.set(call(&THREAD_ID_FN));
    }
    own.torch_id.get()
}

/// A word of a `RecordFunction`.
fn word(record: *const c_void, index: usize) -> u64 {
    // SAFETY: the record is alive, it begins with its words, and `index` is within its length (`WORDS`,
    // and `TO_THREAD_WITH_NAMES` behind a word that was found to be the number).
    unsafe { record.cast::<u64>().add(index).read() }
}

/// The number of the node that an op which begins may make; `None` for an op that makes none, and where the numbers
/// or the modules are not known.
#[inline]
pub(crate) fn number_of(own: &Own, record: *const c_void) -> Option<u64> {
    match PLACE.load(Ordering::Relaxed) {
        NOWHERE => None,
        0 => {
            watch(own, record);
            None
        }
        _ if !MODULES.load(Ordering::Relaxed) && !python_frames::are_known() => None,
        place => Some(word(record, place)).filter(|number| (*number as i64) >= 0),
    }
}

/// The node of this number of the thread belongs to the module (0 for none), and to the lines of `python` that call
/// the op.
#[inline]
pub(crate) fn remember(own: &Own, number: u64, module: TextId, python: impl FnOnce() -> StackId) {
    let module = if module == 0 { outside() } else { module };
    let (place, key) = place_of(thread_id(own), number);
    MODULE_OF[place].store(key << 32 | u64::from(module), Ordering::Relaxed);
    if python_frames::are_known() {
        PYTHON_OF[place].store(key << 32 | u64::from(python()), Ordering::Relaxed);
    }
}

/// The forward thread of a backward function, whose number is at `place`.
fn forward_thread(record: *const c_void, place: usize) -> u64 {
    let mut distance = DISTANCE.load(Ordering::Relaxed);
    if distance == 0 {
        // A backward function has no inputs by name: the map is empty, and points into itself.
        let names = place + TO_NAMES;
        let is_empty_map = word(record, names) == record as u64 + 8 * (names + TO_BUCKET) as u64;
        distance = if is_empty_map { TO_THREAD_WITH_NAMES } else { TO_THREAD };
        DISTANCE.store(distance, Ordering::Relaxed);
    }
    word(record, place + distance)
}

/// Who made a node of autograd's graph.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Origin {
    /// The module whose forward did; 0 for none.
    pub(crate) module: TextId,
    /// The lines of Python that called the op; 0 for none.
    pub(crate) python: StackId,
}

/// Who made the backward function of this record, when that is known.
pub(crate) fn origin_of(record: *const c_void) -> Option<Origin> {
    let place = self::place()?;
    let (number, thread) = (word(record, place), forward_thread(record, place));
    let (place, key) = place_of(thread, number);
    let of = |table: &[AtomicU64; PLACES]| {
        let entry = table[place].load(Ordering::Relaxed);
        (entry != 0 && entry >> 32 == key).then_some(entry as u32)
    };
    if (number as i64) < 0 {
        return None;
    }
    let python = if python_frames::are_known() { of(&PYTHON_OF) } else { None };
    of(&MODULE_OF).map(|module| Origin { module, python: python.unwrap_or(0) })
}

/// Has the backward function of this record a number? One that adds to a gradient has none.
pub(crate) fn is_numbered(record: *const c_void) -> bool {
    place().is_some_and(|place| (word(record, place) as i64) >= 0)
}

/// Torch's number of the thread that runs the interpreter's pending calls; 0 while it is unknown.
static MAIN: AtomicU64 = AtomicU64::new(0);

/// This thread runs pending calls.
pub(crate) fn this_is_main() {
    thread::with(|own| MAIN.store(thread_id(own), Ordering::Relaxed));
}

/// Did the main thread run the op whose backward function this is? Yes where the number's place is unknown.
pub(crate) fn is_of_main(record: *const c_void) -> bool {
    let (place, main) = (PLACE.load(Ordering::Relaxed), MAIN.load(Ordering::Relaxed));
    place == 0 || place == NOWHERE || main == 0 || forward_thread(record, place) == main
}

/// Looks for the number's place: the word that again and again is the number that comes next.
#[cold]
fn watch(own: &Own, record: *const c_void) {
    let here = thread_id(own);
    let watcher = WATCHER.compare_exchange(0, here, Ordering::Relaxed, Ordering::Relaxed);
    if watcher.is_err_and(|watcher| watcher != here) {
        return;
    }
    if WATCHED.fetch_add(1, Ordering::Relaxed) > TOO_MANY {
        PLACE.store(NOWHERE, Ordering::Relaxed);
        return;
    }
    let next = call(&PEEK_FN);
    // Small numbers stand in many words, and the same one twice proves nothing.
    if next < 2 || LAST.swap(next, Ordering::Relaxed) == next {
        return;
    }
    let mut best = (0, 0);
    let mut second = 0;
    for (index, agreed) in AGREED.iter().enumerate() {
        let mut count = agreed.load(Ordering::Relaxed);
        if word(record, index) == next {
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
