//! The calls of modules that backward functions belong to.
//!
//! A block that is called several times in a row has several backwards, and nothing else lies between them. So
//! each call of a module has a number, which the nodes of autograd's graph keep. When a backward goes from one
//! call of a module to another call of it, a mark with the api `backward` says so.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use memtrace_record::intern::TextId;
use rustc_hash::{FxBuildHasher, FxHashMap};

/// The latest calls whose paths are known.
const KEPT: usize = 1 << 17;
/// By the number of a call: its path in the lower half, the number of the call around it in the upper one.
static CALLS: [AtomicU64; KEPT] = [const { AtomicU64::new(0) }; KEPT];
/// The number of the newest call.
static NEWEST: AtomicU32 = AtomicU32::new(0);
/// Counts the calls outside every other one. They change between two passes of a training loop, and not during a
/// backward.
static OUTERMOST: AtomicU64 = AtomicU64::new(0);
/// The depth to which calls inside calls are followed.
const MAX_DEPTH: usize = 256;

/// Records a new call of the module at `path` and returns its number. `around` is the number of the enclosing
/// call; 0 if there is no such call.
#[inline]
pub(crate) fn begins(path: TextId, around: u32) -> u32 {
    let number = NEWEST.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
    CALLS[number as usize % KEPT].store(u64::from(around) << 32 | u64::from(path), Ordering::Relaxed);
    number
}

/// A call outside every other one begins, in a forward.
#[inline]
pub(crate) fn outermost_begins() {
    OUTERMOST.fetch_add(1, Ordering::Relaxed);
}

/// The path of a call, and the call around it; `None` for one that is too old.
fn of(call: u32) -> Option<(TextId, u32)> {
    let age = NEWEST.load(Ordering::Relaxed).wrapping_sub(call) as usize;
    let entry = CALLS[call as usize % KEPT].load(Ordering::Relaxed);
    (call != 0 && age < KEPT).then_some((entry as u32, (entry >> 32) as u32))
}

/// The calls whose backward runs on a thread.
pub(crate) struct BackwardCalls {
    /// The call of the last backward function.
    last: u32,
    /// [`OUTERMOST`] at that function.
    outermost: u64,
    /// The last call of each module, by its path.
    open: FxHashMap<TextId, u32>,
}

impl BackwardCalls {
    /// No calls.
    pub(crate) const fn new() -> BackwardCalls {
        BackwardCalls { last: 0, outermost: 0, open: FxHashMap::with_hasher(FxBuildHasher) }
    }

    /// A backward function of the call `call` begins; `call` is 0 for a function of no module. Returns the module
    /// of which another call's backward begins with it.
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
        // The calls inside the other call, and beside it, are over.
        self.open.clear();
        self.add(call);
        Some(path)
    }

    /// Adds a call and those around it. Returns the outermost module whose other call was here.
    fn add(&mut self, call: u32) -> Option<TextId> {
        let (mut next, mut chain) = (call, FxHashMap::default());
        let mut again = None;
        for _ in 0..MAX_DEPTH {
            let Some((path, around)) = of(next) else { break };
            // Of a module that calls itself the outermost call counts.
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
