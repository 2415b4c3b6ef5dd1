//! Determines to which call of a module a backward function belongs.
//!
//! If a module is called several times in a row, the backwards of these calls follow each other directly. To
//! separate them, each call of a module has a number, which is stored for the nodes that the call creates in
//! autograd's graph. When the backward moves from one call of a module to another call of the same module,
//! memtrace records a mark with the API `backward`.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use memtrace_record::intern::TextId;
use rustc_hash::FxHashMap;

use crate::runtime::thread::running_ops::BackwardCalls;

/// The number of latest calls whose paths are kept.
const KEPT: usize = 1 << 17;
/// For each call, at the index `number % KEPT`: the module path in the lower half, and the number of the
/// enclosing call in the upper half.
static CALLS: [AtomicU64; KEPT] = [const { AtomicU64::new(0) }; KEPT];
/// The number of the newest call.
static NEWEST: AtomicU32 = AtomicU32::new(0);
/// The number of outermost module calls (calls outside every other call) so far. It grows between two passes
/// of a training loop, but not during a backward. If it has changed, the backwards that a thread has recorded
/// belong to an earlier pass.
static OUTERMOST: AtomicU64 = AtomicU64::new(0);
/// The maximum number of nested calls that are followed from a call outwards.
const MAX_DEPTH: usize = 256;

/// Records a new call of the module at `path` and returns its number. `around` is the number of the enclosing
/// call; 0 if there is no such call.
#[inline]
pub(crate) fn begins(path: TextId, around: u32) -> u32 {
    let number = NEWEST.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
    CALLS[number as usize % KEPT].store(u64::from(around) << 32 | u64::from(path), Ordering::Relaxed);
    number
}

/// Counts an outermost call that begins in a forward, not in a recomputation on one of autograd's threads.
#[inline]
pub(crate) fn outermost_begins() {
    OUTERMOST.fetch_add(1, Ordering::Relaxed);
}

/// Returns the path of a call and the number of the enclosing call, or `None` if `call` is 0 or the call is
/// too old.
fn entry_of(call: u32) -> Option<(TextId, u32)> {
    let age = NEWEST.load(Ordering::Relaxed).wrapping_sub(call) as usize;
    let entry = CALLS[call as usize % KEPT].load(Ordering::Relaxed);
    (call != 0 && age < KEPT).then_some((entry as u32, (entry >> 32) as u32))
}

impl BackwardCalls {
    /// Records that a backward function of the module call `call` begins; `call` is 0 if the function belongs
    /// to no module. If the backward of another call of the same module starts here, returns the module's
    /// path.
    #[inline]
    pub(crate) fn function_begins(&mut self, call: u32) -> Option<TextId> {
        if call == 0 || call == self.last {
            return None;
        }
        self.last = call;
        self.enter(call)
    }

    fn enter(&mut self, call: u32) -> Option<TextId> {
        let outermost = OUTERMOST.load(Ordering::Relaxed);
        if self.outermost != outermost {
            self.outermost = outermost;
            self.open.clear();
        }
        let path = self.add(call)?;
        // The backwards of the earlier call and of the calls inside it are over, so they are forgotten.
        self.open.clear();
        self.add(call);
        Some(path)
    }

    /// Adds a call and its enclosing calls. If a module among them had another call whose backward ran
    /// before, returns the path of the outermost such module; otherwise returns `None`.
    fn add(&mut self, call: u32) -> Option<TextId> {
        let (mut next, mut chain) = (call, FxHashMap::default());
        let mut again = None;
        for _ in 0..MAX_DEPTH {
            let Some((path, around)) = entry_of(next) else { break };
            // If a module calls itself, keep its outermost call, which this loop reaches last.
            chain.insert(path, next);
            if self.open.get(&path).is_some_and(|before| *before != next) {
                again = Some(path);
            }
            next = around;
        }
        let changed =
            |path: &TextId| self.open.get(path).is_some_and(|before| chain.get(path) != Some(before));
        let again = again.filter(changed);
        self.open.extend(chain);
        again
    }
}
