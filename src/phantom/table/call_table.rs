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
    crate::cuda::device_properties::TABLE,
    crate::cuda::memory::TABLE,
    crate::cuda::ipc::TABLE,
    crate::cuda::copy::TABLE,
    crate::cuda::pool::TABLE,
    crate::cuda::stream::TABLE,
    crate::cuda::event::TABLE,
    crate::kernels::kernel::TABLE,
    crate::cuda::graph::TABLE,
    crate::cuda::driver::TABLE,
    crate::cuda::module::TABLE,
    crate::cuda::vmm::TABLE,
    crate::libs::cublas::TABLE,
    crate::libs::cudnn::TABLE,
    crate::libs::cudnn_conv::TABLE,
    crate::libs::rnn::TABLE,
    crate::libs::nccl::TABLE,
    crate::libs::nvml::TABLE,
    crate::table::generated::SUCCESS,
    crate::table::generated::WORK,
    crate::table::generated::FILLS,
    crate::table::generated::UNSUPPORTED,
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
/// [`Status`](crate::core::ffi::Status).
macro_rules! answers {
    ($($(#[$doc:meta])* $kind:ident fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $return:ty)? $body:block)*) => {
        #[expect(non_upper_case_globals, reason = "named as the functions that they count")]
        mod calls {
            use $crate::table::call_table::{Call, Kind};
            $(pub(super) static $name: Call = Call::new(stringify!($name), Kind::$kind, super::$name as *const ());)*
        }

        /// What this file answers.
        pub(crate) const TABLE: &[&$crate::table::call_table::Call] = &[$(&calls::$name),*];

        $(
            $(#[$doc])*
            // SAFETY: no other definition of this name is linked into the library; that it stands
            // in for the one of the CUDA libraries is what the library is for.
            #[unsafe(no_mangle)]
            pub(crate) extern "C" fn $name($($arg: $type),*) -> $crate::table::call_table::returned!($($return)?) {
                calls::$name.hit();
                $body
            }
        )*
    };
}

/// The return type of an answer.
macro_rules! returned {
    () => {
        $crate::core::ffi::Status
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
                use $crate::table::call_table::{Call, Kind};
                $(pub(super) static $name: Call = Call::new(stringify!($name), Kind::$kind, super::$name as *const ());)*
            }

            /// These names.
            pub(crate) const $table: &[&$crate::table::call_table::Call] = &[$(&$module::$name),*];

            $(
                // SAFETY: no other definition of this name is linked into the library.
                #[unsafe(no_mangle)]
                extern "C" fn $name() -> $crate::core::ffi::Status {
                    $module::$name.hit();
                    $answer
                }
            )*
        };
    }

    /// Does nothing, well.
    macro_rules! success {
        ($($name:ident),* $(,)?) => {
            $crate::table::call_table::defaults::ignoring! { SUCCESS, success_calls, Success, $crate::core::ffi::OK, $($name),* }
        };
    }

    /// Does nothing, and takes the device some time.
    macro_rules! work {
        ($($name:ident),* $(,)?) => {
            $crate::table::call_table::defaults::ignoring! {
                WORK, work_calls, Success, $crate::kernels::kernel::launch_library(0), $($name),*
            }
        };
    }

    /// Refuses.
    macro_rules! refuse {
        ($($name:ident),* $(,)?) => {
            $crate::table::call_table::defaults::ignoring! {
                UNSUPPORTED, refused_calls, Unsupported, $crate::core::ffi::NOT_SUPPORTED, $($name),*
            }
        };
    }

    /// Does nothing but fill the out-parameters named.
    macro_rules! fills {
        ($($kind:ident $name:ident($($arg:ident: $type:ty),*) { $($place:ident = $value:expr;)* })*) => {
            #[expect(non_upper_case_globals, reason = "named as the functions that they count")]
            mod fill_calls {
                use $crate::table::call_table::{Call, Kind};
                $(pub(super) static $name: Call = Call::new(stringify!($name), Kind::$kind, super::$name as *const ());)*
            }

            /// These names.
            pub(crate) const FILLS: &[&$crate::table::call_table::Call] = &[$(&fill_calls::$name),*];

            $(
                // SAFETY: no other definition of this name is linked into the library.
                #[unsafe(no_mangle)]
                extern "C" fn $name($($arg: $type),*) -> $crate::core::ffi::Status {
                    fill_calls::$name.hit();
                    $($place.put($value);)*
                    $crate::core::ffi::OK
                }
            )*
        };
    }

    pub(crate) use {fills, ignoring, refuse, success, work};
}
