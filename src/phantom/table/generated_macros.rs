//! The macros that [`generated`](crate::table::generated) consists of.

/// Functions without effect that return success.
macro_rules! success {
    ($($name:ident),* $(,)?) => {
        $crate::core::call_table::constant_answers! {
            SUCCESS, success_entries, Success, $crate::core::ffi::OK, $($name),*
        }
    };
}

/// Functions that return success and take device time.
macro_rules! work {
    ($($name:ident),* $(,)?) => {
        $crate::core::call_table::constant_answers! {
            WORK, work_entries, Success, $crate::kernels::kernel::launch_library_on_default_stream(),
            $($name),*
        }
    };
}

/// Functions that return the code for "not supported".
macro_rules! refuse {
    ($($name:ident),* $(,)?) => {
        $crate::core::call_table::constant_answers! {
            UNSUPPORTED, refused_entries, Unsupported, $crate::core::ffi::NOT_SUPPORTED, $($name),*
        }
    };
}

/// Functions that fill the named out-parameters and return success.
macro_rules! fills {
    ($($kind:ident $name:ident($($arg:ident: $type:ty),*) { $($place:ident = $value:expr;)* })*) => {
        #[expect(non_upper_case_globals, reason = "named as the functions that they describe")]
        mod fill_entries {
            use $crate::core::call_table::{AnswerKind, CallEntry};
            $(pub(super) static $name: CallEntry =
                CallEntry::new(stringify!($name), AnswerKind::$kind, super::$name as *const ());)*
        }

        /// These functions.
        pub(crate) static FILLS: &[&$crate::core::call_table::CallEntry] = &[$(&fill_entries::$name),*];

        $(
            // SAFETY: no other definition of this name is linked into the library.
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($arg: $type),*) -> $crate::core::ffi::Status {
                fill_entries::$name.count_call();
                $crate::core::call_table::refuse_by_rule!($name);
                $($place.put($value);)*
                $crate::core::ffi::OK
            }
        )*
    };
}

pub(crate) use {fills, refuse, success, work};
