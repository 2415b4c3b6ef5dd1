//! Suspends a thread's profilers and debuggers: the functions set by `sys.setprofile`, `sys.settrace` and
//! their C counterparts, and, since Python 3.12, the tools of `sys.monitoring`. The interpreter calls none of
//! these while the thread state's `tracing` is above 0.

use std::ffi::c_int;

use super::version::Version;
use super::{Functions, Gil, RawObject};
use crate::ffi::symbols::{find_global, function};

type ChangeTracing = unsafe extern "C" fn(RawObject);

/// How this interpreter suspends tracing.
#[derive(Clone, Copy)]
pub(super) enum Tracing {
    /// 3.11 and later: two functions of the C API.
    Functions { enter: ChangeTracing, leave: ChangeTracing },
    /// 3.9 and 3.10: fields of the thread state, whose layout no patch release of these versions changes.
    /// `is_flag_in_frame` is true for 3.10; see [`ThreadFields::flag`].
    Fields { is_flag_in_frame: bool },
}

/// The first fields of a thread state in 3.9 and 3.10 (Include/cpython/pystate.h).
#[repr(C)]
struct ThreadFields {
    before: [usize; 5],
    stack_check: c_int,
    tracing: c_int,
    /// 3.9: the flag `use_tracing` in the lower half. 3.10: the address of a struct that begins with this
    /// flag.
    flag: usize,
    profile_function: usize,
    trace_function: usize,
}

impl Tracing {
    pub(super) fn find() -> Option<Tracing> {
        // SAFETY: the type is the one in Include/cpython/pystate.h.
        let [enter, leave] = [c"PyThreadState_EnterTracing", c"PyThreadState_LeaveTracing"]
            .map(|name| unsafe { function::<ChangeTracing>(find_global(name)) });
        if let (Some(enter), Some(leave)) = (enter, leave) {
            return Some(Tracing::Functions { enter, leave });
        }
        match Version::get()? {
            Version { major: 3, minor: 9, .. } => Some(Tracing::Fields { is_flag_in_frame: false }),
            Version { major: 3, minor: 10, .. } => Some(Tracing::Fields { is_flag_in_frame: true }),
            _ => None,
        }
    }
}

/// Sets the flag that makes the interpreter of 3.9 and 3.10 skip all tracing.
///
/// # Safety
/// `fields` is the state of the calling thread, which holds the GIL, and `is_flag_in_frame` matches the
/// Python version.
unsafe fn set_flag(fields: *mut ThreadFields, is_flag_in_frame: bool, is_traced: bool) {
    // SAFETY: by the contract.
    unsafe {
        let flag = if is_flag_in_frame {
            (*fields).flag as *mut c_int
        } else {
            (&raw mut (*fields).flag).cast::<c_int>()
        };
        *flag = c_int::from(is_traced);
    }
}

impl Gil {
    /// Hides the calling thread's work from the program's profilers and debuggers until
    /// [`resume_tracing`](Gil::resume_tracing). Calls nest.
    pub(crate) fn suspend_tracing(self) {
        let Functions { tracing, current_thread, .. } = self.functions;
        // SAFETY: the GIL is held, so the thread has a state, with the fields of this version.
        unsafe {
            let thread = current_thread();
            match tracing {
                Some(Tracing::Functions { enter, .. }) => enter(thread),
                Some(Tracing::Fields { is_flag_in_frame }) => {
                    let fields = thread.cast::<ThreadFields>();
                    (*fields).tracing += 1;
                    set_flag(fields, *is_flag_in_frame, false);
                }
                None => {}
            }
        }
    }

    /// Ends [`suspend_tracing`](Gil::suspend_tracing), on the same thread.
    pub(crate) fn resume_tracing(self) {
        let Functions { tracing, current_thread, .. } = self.functions;
        // SAFETY: as above.
        unsafe {
            let thread = current_thread();
            match tracing {
                Some(Tracing::Functions { leave, .. }) => leave(thread),
                Some(Tracing::Fields { is_flag_in_frame }) => {
                    let fields = thread.cast::<ThreadFields>();
                    (*fields).tracing -= 1;
                    let has_tool = (*fields).profile_function != 0 || (*fields).trace_function != 0;
                    set_flag(fields, *is_flag_in_frame, (*fields).tracing == 0 && has_tool);
                }
                None => {}
            }
        }
    }
}
