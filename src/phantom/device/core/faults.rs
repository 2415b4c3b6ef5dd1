//! Injected faults: an out-of-memory error, an uncorrectable ECC error or a lost card at a chosen moment.
//!
//! If a fault was requested, the macros that define the exported functions ask [`refusal`] at every call.
//!
//! - *Out of memory*: `cudaErrorMemoryAllocation`, which "does not affect" later calls. A caching allocator
//!   frees its cache and retries, so the fault lasts for a whole request: until the thread queries the free
//!   memory, as PyTorch does for the text of its error, or queues work.
//! - *ECC*: `cudaErrorECCUncorrectable`. The context is unusable: every later call of the process on that
//!   card fails with the same code, `cudaGetLastError` does not clear it, and only a new process can go on.
//! - *Lost*: `cudaErrorUnknown` for every process, and NVML reports that the GPU is lost. NVIDIA
//!   documents no code of the runtime for a lost card; public reports of Xid 79 show this code with
//!   PyTorch ("CUDA error: unknown error").

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

use cudarc::runtime::sys::cudaError;
use memtrace_cards::{FAULT_VARIABLE, Fault, FaultError, FaultKind, MAX_DEVICES, Moment, parse_faults};
use memtrace_machine::identity;

use crate::core::ffi::{OUT_OF_MEMORY, Status};
use crate::core::lock::lock;
use crate::core::machine;

const ECC: Status = cudaError::cudaErrorECCUncorrectable as Status;
const UNKNOWN: Status = cudaError::cudaErrorUnknown as Status;

/// The maximum number of failures of one request. An allocator that retries more often would never give up.
const MAX_RETRIES: u32 = 8;

/// True if a fault was requested.
static ARMED: AtomicBool = AtomicBool::new(false);
/// The training step that the tracer reported last, or -1 before the first report.
static STEP: AtomicI64 = AtomicI64::new(-1);
/// The number of allocation calls so far.
static ALLOCATED: AtomicU64 = AtomicU64::new(0);
/// The code with which every call on a card fails in this process, or 0 if the card works.
static STICKY: [AtomicU32; MAX_DEVICES as usize] = [const { AtomicU32::new(0) }; MAX_DEVICES as usize];

/// A requested fault and its progress.
struct Armed {
    fault: Fault,
    /// The number of calls so far of the function that the fault names.
    calls: AtomicU64,
    has_begun: AtomicBool,
    /// The number of failures that the fault still causes. It is 0 if the request does not state a number
    /// (`times`).
    left: AtomicU32,
    /// The number of failures that the fault has caused.
    failures: AtomicU32,
    /// The name of the first function that the fault made fail.
    first: OnceLock<&'static str>,
}

static FAULTS: OnceLock<Vec<Armed>> = OnceLock::new();
/// The text of the fault that made the last allocation fail, for the tracer.
static LAST: Mutex<Option<&'static str>> = Mutex::new(None);

thread_local! {
    /// The fault that makes this thread's request for memory fail, as an index, and the number of retries
    /// that still fail. `None` if no request is failing.
    static REQUEST: Cell<Option<(usize, u32)>> = const { Cell::new(None) };
}

/// Parses the faults that the environment requests.
pub(crate) fn requested() -> Result<Vec<Fault>, FaultError> {
    parse_faults(&std::env::var(FAULT_VARIABLE).unwrap_or_default())
}

/// Arms the requested faults. Called before the program starts.
pub(crate) fn arm(faults: Vec<Fault>) {
    let is_any = !faults.is_empty();
    let armed = faults.into_iter().map(|fault| Armed {
        calls: AtomicU64::new(0),
        has_begun: AtomicBool::new(false),
        // The first failure is that of the call at which the fault begins.
        left: AtomicU32::new(fault.times.map_or(0, |times| times.saturating_sub(1))),
        failures: AtomicU32::new(0),
        first: OnceLock::new(),
        fault,
    });
    let _ = FAULTS.set(armed.collect());
    ARMED.store(is_any, Ordering::Relaxed);
}

/// Returns true if a fault was requested.
#[inline]
pub(crate) fn are_armed() -> bool {
    ARMED.load(Ordering::Relaxed)
}

/// Stores the number of the current training step, which the tracer reports.
pub(crate) fn set_step(step: i64) {
    STEP.store(step, Ordering::Relaxed);
}

/// Returns true if an out-of-memory fault was requested for this step or an earlier one and has not begun.
pub(crate) fn begins_at_step(step: i64) -> bool {
    let waits = |armed: &Armed| {
        let of_step =
            matches!(armed.fault.moment, Moment::Step(at) if i64::try_from(at).is_ok_and(|at| at <= step));
        of_step && armed.fault.kind == FaultKind::OutOfMemory && !armed.has_begun.load(Ordering::Relaxed)
    };
    are_armed() && FAULTS.get().is_some_and(|faults| faults.iter().any(waits))
}

/// The role that a call has for injected faults, by its name.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallRole {
    /// A call that no fault affects.
    None,
    /// `cudaGetLastError`: it returns the code of an unusable context and never fails.
    LastError,
    /// A call that takes memory from the card.
    Allocation,
    /// A call that ends a request for memory, because it queries the free memory or queues work.
    Other,
    /// Any other call that needs the context.
    Context,
}

/// Returns the status with which a call must fail, or `None` if no fault affects it. `card` is
/// the position of the current card in the machine, and `code` converts a code of the runtime to
/// one of the call's library.
#[cold]
pub(crate) fn refusal(
    name: &'static str,
    role: CallRole,
    card: usize,
    code: fn(Status) -> Status,
) -> Option<Status> {
    let faults = FAULTS.get()?;
    if let Some(status) = sticky(card) {
        return (role != CallRole::None).then(|| code(status));
    }
    let is_allocation = role == CallRole::Allocation;
    let number = if is_allocation { ALLOCATED.fetch_add(1, Ordering::Relaxed) + 1 } else { 0 };
    if role == CallRole::Other {
        let _ = REQUEST.try_with(|request| request.set(None));
    }
    if is_allocation && let Some(status) = continue_request(faults, name, card) {
        return Some(code(status));
    }
    for (index, armed) in faults.iter().enumerate() {
        let here = armed.is_on(card);
        let fits = match armed.fault.kind {
            FaultKind::OutOfMemory => is_allocation,
            FaultKind::Ecc | FaultKind::Lost => !matches!(role, CallRole::None | CallRole::LastError),
        };
        let is_now = match &armed.fault.moment {
            Moment::Step(step) => i64::try_from(*step).is_ok_and(|at| STEP.load(Ordering::Relaxed) >= at),
            Moment::Allocation(at) => is_allocation && number == *at,
            Moment::Call(call, at) => {
                is_named(call, name) && here && armed.calls.fetch_add(1, Ordering::Relaxed) + 1 == *at
            }
            Moment::Bytes(_) => false,
        };
        if here
            && fits
            && is_now
            && let Some(status) = begin(index, armed, name, card)
        {
            return Some(code(status));
        }
    }
    if is_allocation {
        // The allocation is not refused, so the last failure is over: a retry succeeded, or the program has
        // given up. The text of that failure must not be attributed to a later one.
        take_last();
    }
    None
}

/// Returns true if `name` is the wanted function, also with a leading `__`: programs for CUDA 13 launch
/// kernels with `__cudaLaunchKernel`.
fn is_named(wanted: &str, name: &str) -> bool {
    wanted == name || name.strip_prefix("__") == Some(wanted)
}

/// Returns true if an injected fault makes an allocation fail that would raise the process's memory on a card
/// to this many bytes.
pub(crate) fn fails_at(bytes: u64, card: usize) -> bool {
    let faults = FAULTS.get().map_or(&[][..], Vec::as_slice);
    for (index, armed) in faults.iter().enumerate() {
        if armed.is_on(card) && matches!(armed.fault.moment, Moment::Bytes(limit) if bytes > limit) {
            // If the fault is an ECC error or a lost card, it begins here, too. The allocation itself
            // succeeds, and later calls fail.
            if begin(index, armed, "an allocation", card) == Some(OUT_OF_MEMORY) {
                return true;
            }
        }
    }
    false
}

/// Returns the code with which every call on a card fails, or `None` if the card works.
pub(crate) fn sticky(card: usize) -> Option<Status> {
    let own = STICKY.get(card).map_or(0, |code| code.load(Ordering::Relaxed));
    if own != 0 {
        return Some(own as Status);
    }
    machine::table().is_some_and(|table| table.is_lost(card)).then_some(UNKNOWN)
}

/// Returns the status of an allocation that must fail because an earlier one did: this thread's request has
/// retries left that fail, or a fault with a stated number of failures has not caused all of them. Counts the
/// failure. Returns `None` if the allocation need not fail.
fn continue_request(faults: &[Armed], name: &'static str, card: usize) -> Option<Status> {
    let request = REQUEST.try_with(Cell::get).ok().flatten();
    if let Some((index, left)) = request.filter(|(index, _)| faults[*index].is_on(card)) {
        let _ = REQUEST.try_with(|request| request.set((left > 1).then_some((index, left - 1))));
        faults[index].count(name);
        return Some(OUT_OF_MEMORY);
    }
    for armed in faults.iter().filter(|it| it.is_on(card) && it.has_begun.load(Ordering::Relaxed)) {
        let less = |left: u32| left.checked_sub(1);
        if armed.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok() {
            armed.count(name);
            return Some(OUT_OF_MEMORY);
        }
    }
    None
}

impl Armed {
    /// Returns true if the fault affects this card.
    fn is_on(&self, card: usize) -> bool {
        self.fault.card.is_none_or(|wanted| wanted as usize == card)
    }

    fn count(&self, name: &'static str) {
        let _ = self.first.set(name);
        self.failures.fetch_add(1, Ordering::Relaxed);
    }
}

/// Begins a fault, prints it, and returns the status of the call. Returns `None` if the fault has begun
/// before.
fn begin(index: usize, armed: &'static Armed, name: &'static str, card: usize) -> Option<Status> {
    if armed.has_begun.swap(true, Ordering::Relaxed) {
        return None;
    }
    let fault = &armed.fault;
    armed.count(name);
    let pid = std::process::id();
    let bus = identity::bus_id(card);
    let pci = &bus[..bus.len() - 2];
    match fault.kind {
        FaultKind::OutOfMemory => {
            if fault.times.is_none() {
                let _ = REQUEST.try_with(|request| request.set(Some((index, MAX_RETRIES - 1))));
            }
            *lock(&LAST) = Some(&fault.text);
            eprintln!("memtrace: injected fault {}: {name} fails with \"out of memory\"", fault.text);
            Some(OUT_OF_MEMORY)
        }
        FaultKind::Ecc => {
            make_sticky(card, ECC);
            if let Some(table) = machine::table() {
                table.add_ecc_error(card);
            }
            eprintln!(
                "memtrace: injected fault {}: {name} and all later calls on card {card} fail with \"uncorrectable \
                 ECC error encountered\" (a real kernel log would say: NVRM: Xid (PCI:{pci}): 48, pid={pid}, An \
                 uncorrectable double bit error (DBE) has been detected)",
                fault.text
            );
            Some(ECC)
        }
        FaultKind::Lost => {
            make_sticky(card, UNKNOWN);
            if let Some(table) = machine::table() {
                table.lose(card);
            }
            eprintln!(
                "memtrace: injected fault {}: {name} and all later calls on card {card} fail with \"unknown error\" \
                 (a real kernel log would say: NVRM: Xid (PCI:{pci}): 79, pid={pid}, GPU has fallen off the bus.)",
                fault.text
            );
            Some(UNKNOWN)
        }
    }
}

fn make_sticky(card: usize, status: Status) {
    if let Some(code) = STICKY.get(card) {
        code.store(status as u32, Ordering::Relaxed);
    }
}

/// Takes and returns the text of the fault that made the last allocation fail, unless it was taken before.
pub(crate) fn take_last() -> Option<&'static str> {
    lock(&LAST).take()
}

/// Returns the text, the number of failures so far and the first failed function of each requested fault.
pub(crate) fn courses() -> impl Iterator<Item = (&'static str, u32, &'static str)> {
    FAULTS.get().into_iter().flatten().map(|armed| {
        let first = armed.first.get().copied().unwrap_or("");
        (armed.fault.text.as_str(), armed.failures.load(Ordering::Relaxed), first)
    })
}
