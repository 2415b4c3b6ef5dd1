//! The macro that defines the exported functions, and the table entries that describe them.
//!
//! The file of each family of calls has one `answers!` block. Each of its entries becomes an exported C
//! function and a [`CallEntry`] of the file's `TABLE`; [`registry`](crate::table::registry) lists the tables.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::core::loaded_library::calling_library;
use crate::core::lock::lock;

/// The kind of an answer: how close it is to the answer of a real device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AnswerKind {
    /// The answer equals the real library's, as far as memory and control flow depend on it.
    Real,
    /// The answer is a plausible value that nothing computed, such as a workspace size or a time.
    Guess,
    /// The call succeeds and has no effect, because the device would have done the work.
    Success,
    /// The call returns the code for "not supported".
    Unsupported,
}

impl AnswerKind {
    /// Returns the name that `memtrace doctor --phantom --json` prints.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Real => "real",
            Self::Guess => "guess",
            Self::Success => "success",
            Self::Unsupported => "unsupported",
        }
    }
}

/// One exported function.
pub(crate) struct CallEntry {
    pub(crate) name: &'static str,
    pub(crate) kind: AnswerKind,
    pub(crate) function: *const (),
    calls: AtomicU32,
    /// The libraries that called an unsupported function.
    callers: Mutex<Vec<String>>,
}

// SAFETY: the pointer is the address of a function, which never changes and is never written through.
unsafe impl Sync for CallEntry {}

impl CallEntry {
    /// Creates the entry of a function that has not been called yet.
    pub(crate) const fn new(name: &'static str, kind: AnswerKind, function: *const ()) -> Self {
        Self { name, kind, function, calls: AtomicU32::new(0), callers: Mutex::new(Vec::new()) }
    }

    /// Counts one call. Two concurrent calls may be counted as one, because a locked increment on every
    /// kernel launch would cost more than the exact number is worth.
    #[inline]
    pub(crate) fn count_call(&self) {
        let before = self.calls.load(Ordering::Relaxed);
        self.calls.store(before.wrapping_add(1), Ordering::Relaxed);
        if before == 0 {
            self.warn_if_unsupported();
        }
    }

    /// Names an unsupported call on stderr, because the program may ignore its status.
    #[cold]
    fn warn_if_unsupported(&self) {
        use std::io::Write;
        // Programs call these functions to find out whether they are supported, and continue without them. So
        // no line is printed.
        let is_a_probe = self.name == "cuGetExportTable" || self.name.starts_with("nvml");
        if self.kind == AnswerKind::Unsupported && !is_a_probe {
            let name = self.name;
            if let Some(caller) = calling_library() {
                self.add_caller(&caller);
            }
            let _ = writeln!(
                std::io::stderr(),
                "memtrace: the phantom device has no {name}: it fails with \"operation not supported\""
            );
        }
    }

    /// Adds the file name of a library to those that called this function.
    pub(crate) fn add_caller(&self, library: &str) {
        let mut callers = lock(&self.callers);
        if !callers.iter().any(|known| known == library) {
            callers.push(library.to_owned());
        }
    }

    /// Returns the file names of the libraries that called this function, if it is unsupported: the first
    /// caller, or for `cuGetExportTable` each library that fails without it.
    pub(crate) fn callers(&self) -> Vec<String> {
        lock(&self.callers).clone()
    }

    /// Returns the number of calls so far.
    pub(crate) fn calls(&self) -> u32 {
        self.calls.load(Ordering::Relaxed)
    }
}

/// Defines exported C functions and the `TABLE` that lists them. An entry is an [`AnswerKind`], a signature
/// and a body; without `->` the function returns a [`Status`](crate::core::ffi::Status). Functions with one signature
/// and one body share an entry: `fn {cudaFree, cuMemFree_v2}(address: Word) { .. }`. The safety contract of each
/// function is the one that NVIDIA's header gives the function of this name.
macro_rules! answers {
    ($(
        $(#[$doc:meta])*
        $kind:ident fn $($one:ident)? $({$($name:ident),+ $(,)?})? ($($arguments:tt)*) $(-> $return:ty)? $body:block
    )*) => {
        #[expect(non_upper_case_globals, reason = "named as the functions that they describe")]
        mod entries {
            use $crate::core::call_table::{AnswerKind, CallEntry, call_entries};
            $(call_entries!($kind $($one)? $($($name)+)?);)*
        }

        /// The exported functions of this file.
        pub(crate) static TABLE: &[&$crate::core::call_table::CallEntry] =
            &[$($(&entries::$one,)? $($(&entries::$name,)+)?)*];

        $($crate::core::call_table::exported_functions! {
            [$($one)? $($($name)+)?] ($($arguments)*) [$($return)?] $body {$(#[$doc])*}
        })*
    };
}

/// Defines the entries of functions.
macro_rules! call_entries {
    ($kind:ident $($name:ident)+) => {
        $(pub(super) static $name: CallEntry =
            CallEntry::new(stringify!($name), AnswerKind::$kind, super::$name as *const ());)+
    };
}

/// Defines exported functions with the same arguments, type and body.
macro_rules! exported_functions {
    ([$($name:ident)+] $arguments:tt $return:tt $body:block $docs:tt) => {
        const _: () = assert!(
            $crate::core::call_rules::agree_on_captures(&[$(stringify!($name)),+]),
            "a capture must forbid all names of a function or none"
        );
        $($crate::core::call_table::exported_function! { $name $arguments $return $body $docs })+
    };
}

/// Defines one exported function.
macro_rules! exported_function {
    (
        $name:ident ($($arg:ident: $type:ty),* $(,)?) [$($return:ty)?] $body:block {$(#[$doc:meta])*}
    ) => {
        $(#[$doc])*
        // SAFETY: no other definition of this name is linked into the library. The function intentionally
        // replaces the function of this name in NVIDIA's libraries.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            $($arg: $type),*
        ) -> $crate::core::call_table::returned!($($return)?) {
            entries::$name.count_call();
            $crate::core::call_table::refuse_by_rule!($name $($return)?);
            $body
        }
    };
}

/// Returns from an exported function if the rules for its name refuse the call. A function that
/// returns no status has no rules.
macro_rules! refuse_by_rule {
    ($name:ident) => {
        const RULE: $crate::core::call_rules::CallRules =
            $crate::core::call_rules::CallRules::from_name(stringify!($name));
        if let Some(status) = RULE.refusal() {
            return status;
        }
        // Lives until the call returns.
        let _kept = RULE.keeps_last_error();
    };
    ($name:ident $type:ty) => {};
}

/// Expands to the return type of an entry of `answers!`.
macro_rules! returned {
    () => {
        $crate::core::ffi::Status
    };
    ($type:ty) => {
        $type
    };
}

/// Runs an unsafe operation on memory that the program passed to an exported function. Only bodies
/// of `answers!` may use it.
macro_rules! by_contract {
    ($operation:expr) => {{
        // SAFETY: the enclosing function is exported and unsafe. Its caller promises the contract of the
        // header: each pointer is null or good for the size that the same call states, each handle came from
        // a call of its family.
        unsafe { $operation }
    }};
}

/// Defines exported functions that ignore their arguments. They declare no parameters: on x86-64 the caller
/// removes the arguments.
macro_rules! constant_answers {
    ($table:ident, $module:ident, $kind:ident, $answer:expr, $($name:ident),*) => {
        #[expect(non_upper_case_globals, reason = "named as the functions that they describe")]
        mod $module {
            use $crate::core::call_table::{AnswerKind, CallEntry};
            $(pub(super) static $name: CallEntry =
                CallEntry::new(stringify!($name), AnswerKind::$kind, super::$name as *const ());)*
        }

        /// The entries of these functions.
        pub(crate) static $table: &[&$crate::core::call_table::CallEntry] = &[$(&$module::$name),*];

        $(
            // SAFETY: no other definition of this name is linked into the library.
            #[unsafe(no_mangle)]
            extern "C" fn $name() -> $crate::core::ffi::Status {
                $module::$name.count_call();
                $crate::core::call_table::refuse_by_rule!($name);
                $answer
            }
        )*
    };
}

pub(crate) use {
    answers, by_contract, call_entries, constant_answers, exported_function, exported_functions,
    refuse_by_rule, returned,
};
