//! Grants of requests past the card's capacity (`--past-oom`). A request that does not fit is granted anyway,
//! and the peak of device use shows how much memory the program needs.
//!
//! PyTorch's caching allocator reacts to a refusal by freeing its cache and retrying. So its request is
//! refused once, as on a real card, and the retry is granted. The freed cache then does not count as needed.
//! The request of a caller that does not retry is granted at once.

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

/// The behavior of a caller whose request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Caller {
    /// The caller frees what it can and repeats the request.
    AsksAgain,
    /// Same as `AsksAgain`, but the request consists of one call per page. It ends with the call that makes
    /// the pages accessible ([`request_ends`]).
    AsksAgainByPage,
    /// The caller does not retry, and the program fails.
    GivesUp,
}

impl Caller {
    /// Returns the behavior of the caller of `cudaMalloc`, which is PyTorch's caching allocator. If caching
    /// is disabled, PyTorch does not retry.
    pub(crate) fn of_malloc() -> Self {
        static IS_CACHING: OnceLock<bool> = OnceLock::new();
        let is_caching = *IS_CACHING.get_or_init(|| {
            let off = std::env::var_os("PYTORCH_NO_CUDA_MEMORY_CACHING");
            off.is_none_or(|value| value.is_empty() || value == "0")
        });
        if is_caching { Self::AsksAgain } else { Self::GivesUp }
    }
}

/// The progress of a thread's request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Request {
    New,
    Refused,
    /// One page of the request was granted past the capacity, so its remaining pages are granted at once.
    Granted,
}

static IS_ON: AtomicBool = AtomicBool::new(false);
/// The highest use of any card so far, in bytes: the allocations of this process and the use by the machine's
/// other processes.
static PEAK: AtomicU64 = AtomicU64::new(0);
/// The state of the process's first grant: [`NOT_YET`], [`UNREPORTED`] or [`REPORTED`].
static FIRST_GRANT: AtomicU8 = AtomicU8::new(NOT_YET);
const NOT_YET: u8 = 0;
const UNREPORTED: u8 = 1;
const REPORTED: u8 = 2;

thread_local! {
    static REQUEST: Cell<Request> = const { Cell::new(Request::New) };
}

/// Enables the grants, before the program starts.
pub(crate) fn turn_on() {
    IS_ON.store(true, Ordering::Relaxed);
}

/// Returns true if requests past the capacity are granted.
#[inline]
pub(crate) fn is_on() -> bool {
    IS_ON.load(Ordering::Relaxed)
}

/// Returns true if a request that does not fit is granted. Records the decision, because it affects the
/// thread's next call.
pub(crate) fn grants(caller: Caller) -> bool {
    if !is_on() {
        return false;
    }
    // A thread that is ending has lost its state. Its request counts as refused before, so it is granted.
    let before = REQUEST.try_with(Cell::get).unwrap_or(Request::Refused);
    let (is_granted, after) = match (caller, before) {
        (Caller::GivesUp, before) => (true, before),
        (Caller::AsksAgain | Caller::AsksAgainByPage, Request::New) => (false, Request::Refused),
        (Caller::AsksAgain, _) => (true, Request::New),
        (Caller::AsksAgainByPage, _) => (true, Request::Granted),
    };
    let _ = REQUEST.try_with(|request| request.set(after));
    if is_granted {
        let _ = FIRST_GRANT.compare_exchange(NOT_YET, UNREPORTED, Ordering::Relaxed, Ordering::Relaxed);
    }
    is_granted
}

/// Ends the thread's request, because work was queued or pages were made accessible. The thread's next call
/// that does not fit begins a new request.
#[inline]
pub(crate) fn request_ends() {
    if is_on() {
        let _ = REQUEST.try_with(|request| request.set(Request::New));
    }
}

/// Raises the peak to the bytes in use on a card, if they are more. Other processes' bytes are included.
pub(crate) fn note_use(bytes: u64) {
    PEAK.fetch_max(bytes, Ordering::Relaxed);
}

/// Returns the highest use of any card so far, in bytes: the allocations of this process and the use by the
/// machine's other processes. Returns `None` without `--past-oom`.
pub(crate) fn peak() -> Option<u64> {
    is_on().then(|| PEAK.load(Ordering::Relaxed))
}

/// Returns true once, at the first call after the process's first grant.
pub(crate) fn take_grant() -> bool {
    FIRST_GRANT.compare_exchange(UNREPORTED, REPORTED, Ordering::Relaxed, Ordering::Relaxed).is_ok()
}
