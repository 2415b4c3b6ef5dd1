//! Short-lived native threads that call Python.
//!
//! A thread of ours runs a call that Python's main thread cannot run while it waits (`thread.join()`). No
//! Python module takes part, so the program's list of threads and its audit hooks see nothing. All signals
//! are blocked in our threads, so that each signal reaches a thread of the program.
//!
//! Up to 3.13, a Python that shuts down unwinds any thread that asks for the GIL. So the functions here keep
//! no value that must be dropped across such a call.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use memtrace_record::per_thread::thread_id;

use crate::ffi::cpython::{Arguments, Functions, PendingCall};

/// The type of a thread's start routine: the type that `pthread_create` takes, except that the routine may
/// unwind.
type Routine = unsafe extern "C-unwind" fn(*mut c_void) -> *mut c_void;

/// The number of our threads that have not ended.
static ACTIVE: AtomicU32 = AtomicU32::new(0);
/// True once Python has begun to shut down. No more threads are started then.
static IS_ENDING: AtomicBool = AtomicBool::new(false);

/// `end_own_threads()`: waits until our threads have ended, but at most [`LONGEST_WAIT`], and prevents new
/// ones. Called when Python shuts down, because Python would otherwise unwind a thread that is in the tracer.
pub(crate) fn end_own_threads(arguments: Arguments<'_>) {
    IS_ENDING.store(true, Ordering::SeqCst);
    let start = Instant::now();
    if ACTIVE.load(Ordering::SeqCst) > 0 {
        arguments.gil.released(|| {
            while ACTIVE.load(Ordering::SeqCst) > 0 && start.elapsed() < LONGEST_WAIT {
                std::thread::sleep(Duration::from_micros(200));
            }
        });
    }
}

/// The maximum time to wait for our threads to end.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// Resets the state in the child of a fork, where these threads do not exist.
pub(crate) fn reset_in_child() {
    ACTIVE.store(0, Ordering::Relaxed);
    IS_ENDING.store(false, Ordering::Relaxed);
}

/// Returns true on the main thread of the process, which is Python's main thread in nearly every program.
pub(crate) fn is_main_thread() -> bool {
    thread_id() == std::process::id()
}

/// Starts a thread with all signals blocked. Returns `None` if the process cannot start another thread.
fn create(routine: Routine, argument: *mut c_void) -> Option<libc::pthread_t> {
    let mut thread = MaybeUninit::<libc::pthread_t>::uninit();
    let (mut all, mut before) =
        (MaybeUninit::<libc::sigset_t>::uninit(), MaybeUninit::<libc::sigset_t>::uninit());
    // SAFETY: the pointers are valid for each value. The type of the routine differs from the expected type
    // only in that the routine may unwind, which the C library permits in every thread.
    unsafe {
        let routine = std::mem::transmute::<Routine, extern "C" fn(*mut c_void) -> *mut c_void>(routine);
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        let status = libc::pthread_create(thread.as_mut_ptr(), std::ptr::null(), routine, argument);
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), null_mut());
        (status == 0).then(|| thread.assume_init())
    }
}

/// Calls `function` with the GIL on a thread of its own, as soon as the GIL is free. Returns false if no
/// thread can be started or no interpreter runs.
pub(crate) fn call_on_own_thread(function: PendingCall) -> bool {
    if !Functions::get().is_some_and(|functions| functions.can_take_gil()) {
        return false;
    }
    ACTIVE.fetch_add(1, Ordering::SeqCst);
    let thread = (!IS_ENDING.load(Ordering::SeqCst)).then(|| create(call_pending, function as *mut c_void));
    let Some(thread) = thread.flatten() else {
        ACTIVE.fetch_sub(1, Ordering::SeqCst);
        return false;
    };
    // SAFETY: the thread was just started, and no code joins it.
    unsafe { libc::pthread_detach(thread) };
    true
}

/// # Safety
/// `function` is a [`PendingCall`].
unsafe extern "C-unwind" fn call_pending(function: *mut c_void) -> *mut c_void {
    let Some(functions) = Functions::get() else { return null_mut() };
    // SAFETY: by the contract. The function is called with the GIL held.
    unsafe {
        let function = std::mem::transmute::<*mut c_void, PendingCall>(function);
        functions.with_gil(|gil| {
            if function(null_mut()) != 0 {
                gil.clear_error();
            }
        });
    }
    ACTIVE.fetch_sub(1, Ordering::SeqCst);
    null_mut()
}
