//! The table of answered calls: which names the phantom answers, how truly, and how often it was asked.
//!
//! Every family's file holds one `answers!` block. Each entry is an exported C function and a line
//! of that family's `TABLE`; what the driver hands out by name (`cuGetProcAddress`), what a report
//! says was guessed, and what the coverage test checks all come from these tables.

use std::sync::atomic::{AtomicU32, Ordering};

/// How near an answer is to what a card would say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// As the real library would, as far as memory and control flow can tell.
    Real,
    /// A plausible value that nobody computed: a workspace size, a time.
    Guess,
    /// Success and nothing else: the work would have been done by the device.
    Success,
    /// Refused with the code for "not supported".
    Unsupported,
}

impl Kind {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Real => "real",
            Self::Guess => "guess",
            Self::Success => "success",
            Self::Unsupported => "unsupported",
        }
    }
}

/// One line of the table.
pub(crate) struct Call {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    pub(crate) function: *const (),
    hits: AtomicU32,
}

// SAFETY: the pointer is the address of a function, which never changes and is not written through.
unsafe impl Sync for Call {}

impl Call {
    pub(crate) const fn new(name: &'static str, kind: Kind, function: *const ()) -> Self {
        Self { name, kind, function, hits: AtomicU32::new(0) }
    }

    /// Counts one call. Two threads at once may count one: a locked increment on every kernel
    /// launch would cost more than the exact number is worth.
    #[inline]
    pub(crate) fn hit(&self) {
        let before = self.hits.load(Ordering::Relaxed);
        self.hits.store(before.wrapping_add(1), Ordering::Relaxed);
        if before == 0 {
            self.first();
        }
    }

    /// Names a call that is refused, once: the program may pass its status on without a word.
    #[cold]
    fn first(&self) {
        use std::io::Write;
        // What programs ask to find out whether it is there, and then do without.
        let is_a_question = self.name == "cuGetExportTable" || self.name.starts_with("nvml");
        if self.kind == Kind::Unsupported && !is_a_question {
            let name = self.name;
            let _ = writeln!(
                std::io::stderr(),
                "memtrace: the phantom device has no {name}: it fails with \"operation not supported\""
            );
        }
    }

    pub(crate) fn hits(&self) -> u32 {
        self.hits.load(Ordering::Relaxed)
    }
}

/// Every table of the library.
pub(crate) const TABLES: &[&[&Call]] = &[
    crate::device::TABLE,
    crate::memory::TABLE,
    crate::ipc::TABLE,
    crate::copy::TABLE,
    crate::pool::TABLE,
    crate::stream::TABLE,
    crate::event::TABLE,
    crate::kernel::TABLE,
    crate::graph::TABLE,
    crate::driver::TABLE,
    crate::module::TABLE,
    crate::vmm::TABLE,
    crate::cublas::TABLE,
    crate::cudnn::TABLE,
    crate::cudnn_conv::TABLE,
    crate::rnn::TABLE,
    crate::nccl::TABLE,
    crate::nvml::TABLE,
    crate::defaults::SUCCESS,
    crate::defaults::WORK,
    crate::defaults::FILLS,
    crate::defaults::UNSUPPORTED,
];

/// All calls, in the order of the tables.
pub(crate) fn calls() -> impl Iterator<Item = &'static Call> {
    TABLES.iter().flat_map(|table| table.iter().copied())
}

/// The answer of that name.
pub(crate) fn find(name: &str) -> Option<&'static Call> {
    use std::collections::HashMap;
    use std::sync::OnceLock;
    static INDEX: OnceLock<HashMap<&'static str, &'static Call>> = OnceLock::new();
    INDEX.get_or_init(|| calls().map(|call| (call.name, call)).collect()).get(name).copied()
}

/// Defines exported C functions and the table that lists them. Without `->` a function returns a
/// [`Status`](crate::ffi::Status).
macro_rules! answers {
    ($($(#[$doc:meta])* $kind:ident fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $return:ty)? $body:block)*) => {
        #[expect(non_upper_case_globals, reason = "named as the functions that they count")]
        mod calls {
            use $crate::answer::{Call, Kind};
            $(pub(super) static $name: Call = Call::new(stringify!($name), Kind::$kind, super::$name as *const ());)*
        }

        /// What this file answers.
        pub(crate) const TABLE: &[&$crate::answer::Call] = &[$(&calls::$name),*];

        $(
            $(#[$doc])*
            // SAFETY: no other definition of this name is linked into the library; that it stands
            // in for the one of the CUDA libraries is what the library is for.
            #[unsafe(no_mangle)]
            pub(crate) extern "C" fn $name($($arg: $type),*) -> $crate::answer::returned!($($return)?) {
                calls::$name.hit();
                $body
            }
        )*
    };
}

/// The return type of an answer.
macro_rules! returned {
    () => {
        $crate::ffi::Status
    };
    ($type:ty) => {
        $type
    };
}

pub(crate) use {answers, returned};

/// The macros of the generated list.
pub(crate) mod defaults {
    /// Functions that ignore their arguments, whatever they are: on x86-64 the caller clears them away.
    macro_rules! ignoring {
        ($table:ident, $module:ident, $kind:ident, $answer:expr, $($name:ident),*) => {
            #[expect(non_upper_case_globals, reason = "named as the functions that they count")]
            mod $module {
                use $crate::answer::{Call, Kind};
                $(pub(super) static $name: Call = Call::new(stringify!($name), Kind::$kind, super::$name as *const ());)*
            }

            /// These names.
            pub(crate) const $table: &[&$crate::answer::Call] = &[$(&$module::$name),*];

            $(
                // SAFETY: no other definition of this name is linked into the library.
                #[unsafe(no_mangle)]
                extern "C" fn $name() -> $crate::ffi::Status {
                    $module::$name.hit();
                    $answer
                }
            )*
        };
    }

    /// Does nothing, well.
    macro_rules! success {
        ($($name:ident),* $(,)?) => {
            $crate::answer::defaults::ignoring! { SUCCESS, success_calls, Success, $crate::ffi::OK, $($name),* }
        };
    }

    /// Does nothing, and takes the device some time.
    macro_rules! work {
        ($($name:ident),* $(,)?) => {
            $crate::answer::defaults::ignoring! {
                WORK, work_calls, Success, $crate::kernel::launch_library(0), $($name),*
            }
        };
    }

    /// Refuses.
    macro_rules! refuse {
        ($($name:ident),* $(,)?) => {
            $crate::answer::defaults::ignoring! {
                UNSUPPORTED, refused_calls, Unsupported, $crate::ffi::NOT_SUPPORTED, $($name),*
            }
        };
    }

    /// Does nothing but fill the out-parameters named.
    macro_rules! fills {
        ($($kind:ident $name:ident($($arg:ident: $type:ty),*) { $($place:ident = $value:expr;)* })*) => {
            #[expect(non_upper_case_globals, reason = "named as the functions that they count")]
            mod fill_calls {
                use $crate::answer::{Call, Kind};
                $(pub(super) static $name: Call = Call::new(stringify!($name), Kind::$kind, super::$name as *const ());)*
            }

            /// These names.
            pub(crate) const FILLS: &[&$crate::answer::Call] = &[$(&fill_calls::$name),*];

            $(
                // SAFETY: no other definition of this name is linked into the library.
                #[unsafe(no_mangle)]
                extern "C" fn $name($($arg: $type),*) -> $crate::ffi::Status {
                    fill_calls::$name.hit();
                    $($place.put($value);)*
                    $crate::ffi::OK
                }
            )*
        };
    }

    pub(crate) use {fills, ignoring, refuse, success, work};
}
