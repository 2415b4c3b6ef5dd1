//! The phases of the process: phases that the program opens, and phases that memtrace infers.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use memtrace_record::intern::{TextId, with_tables};
use memtrace_record::per_thread::thread_id;
use memtrace_trace::text;

use crate::ffi::torch;
use crate::runtime::fixed_text::FixedText;
use crate::runtime::fork::ForkSafe;
use crate::runtime::state_version;

/// The phase of a forward.
pub(crate) static FORWARD: FixedText = FixedText::new("forward");
/// The phase of a backward.
pub(crate) static BACKWARD: FixedText = FixedText::new("backward");
/// The phase of an optimizer's step.
pub(crate) static OPTIMIZER: FixedText = FixedText::new("optimizer");
/// The phase before the first forward: the model is built and its weights are loaded.
pub(crate) static INIT: FixedText = FixedText::new("init");
/// The phase of memory into which data is loaded. Python code allocates such memory outside every op, while
/// no phase or only [`INIT`] applies.
pub(crate) static LOAD: FixedText = FixedText::new(text::LOAD);

/// The open phases of the process in the order in which they were opened: the id of the phase, and the id of
/// its text.
static OPEN: ForkSafe<Vec<(u64, TextId)>> = ForkSafe::new(Vec::new());
/// The text id of the last phase in [`OPEN`]; 0 if no phase is open. A copy that can be read without the
/// lock.
static TOP: AtomicU32 = AtomicU32::new(0);

/// The words of `MEMTRACE_PHASES`.
static MORE_WORDS: OnceLock<Vec<String>> = OnceLock::new();

/// Sets the words of `MEMTRACE_PHASES`. Ranges with these names are phases, in addition to the names that
/// [`memtrace_trace::ranges`] lists. Called once, at load.
pub(crate) fn set_more_words(words: Vec<String>) {
    let _ = MORE_WORDS.set(words);
}

/// Returns the words of `MEMTRACE_PHASES`.
pub(crate) fn more_words() -> &'static [String] {
    MORE_WORDS.get().map_or(&[], Vec::as_slice)
}

/// Returns the innermost open phase of the process, whichever thread opened it; 0 if no phase is open.
pub(crate) fn top() -> TextId {
    TOP.load(Ordering::Acquire)
}

/// Opens a phase with the name `text`. `id` is unique among ranges and phases; [`close`] needs it.
pub(crate) fn open(id: u64, text: TextId) {
    change(|phases| phases.push((id, text)));
}

/// Closes the phase with this id. Has no effect if the phase is not open.
pub(crate) fn close(id: u64) {
    retain(|open| open != id);
}

/// Closes every phase for whose id `is_kept` returns false.
pub(crate) fn retain(is_kept: impl Fn(u64) -> bool) {
    change(|phases| phases.retain(|(id, _)| is_kept(*id)));
}

fn change(change: impl FnOnce(&mut Vec<(u64, TextId)>)) {
    OPEN.with(|phases| {
        change(phases);
        TOP.store(phases.last().map_or(0, |(_, text)| *text), Ordering::Release);
    });
    state_version::advance();
}

/// The kernel's id of the thread that computes the loss, or 0. The outermost module of this thread has
/// returned and its backward has not begun. The thread's work in between belongs to the forward.
static LOSS_THREAD: AtomicU32 = AtomicU32::new(0);

/// Returns true if this thread computes the loss.
pub(crate) fn is_in_loss() -> bool {
    LOSS_THREAD.load(Ordering::Relaxed) == thread_id()
}

/// Records that the outermost module of this thread has returned and that the computation of the loss begins.
/// Has no effect if autograd is disabled, because then no backward follows.
pub(crate) fn forward_returned() {
    if torch::is_grad_enabled() {
        LOSS_THREAD.store(thread_id(), Ordering::Relaxed);
    }
}

/// Ends the forward, because a backward, an optimizer's step or the next batch begins.
#[inline]
pub(crate) fn forward_is_over() {
    if LOSS_THREAD.load(Ordering::Relaxed) != 0 {
        LOSS_THREAD.store(0, Ordering::Relaxed);
        state_version::advance();
    }
}

/// Returns the phase that a user scope implies: torch's own scopes for an optimizer's `step` and `zero_grad`
/// and for a `DataLoader`. Returns `None` for any other scope.
pub(crate) fn of_scope(name: TextId) -> Option<TextId> {
    static ZERO_GRAD: FixedText = FixedText::new("zero_grad");
    static DATALOADER: FixedText = FixedText::new("dataloader");
    static SCOPES: [(&str, &FixedText); 3] = [
        ("Optimizer.step#", &OPTIMIZER),
        ("Optimizer.zero_grad#", &ZERO_GRAD),
        ("enumerate(DataLoader)#", &DATALOADER),
    ];
    let found = with_tables(|tables| {
        let text = tables.text_of(name);
        SCOPES.iter().find(|(prefix, _)| text.starts_with(prefix))
    });
    // The id is computed after the lock of the tables is released, because interning needs the same lock.
    found.map(|(_, phase)| phase.id())
}
