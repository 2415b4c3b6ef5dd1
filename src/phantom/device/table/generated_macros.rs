//! The macros used by [`generated`](crate::table::generated).

/// Defines functions that return success and have no effect.
macro_rules! success {
    ($($name:ident),* $(,)?) => {
        $crate::core::call_table::constant_answers! {
            SUCCESS, success_entries, Success, $crate::core::ffi::OK, $($name),*
        }
    };
}

/// Defines functions that return success, take device time, and affect the memory that their arguments reach
/// ([`library_calls`](crate::libs::library_calls)). Their signatures differ and are not needed: each function
/// pushes the six argument registers and passes the stack pointer to its body, which reads the arguments as
/// [`RawArguments`](crate::libs::library_calls::RawArguments).
macro_rules! work {
    ($($name:ident),* $(,)?) => {
        #[expect(non_upper_case_globals, reason = "named as the functions that they describe")]
        mod work_entries {
            use $crate::core::call_table::{AnswerKind, CallEntry};
            $(pub(super) static $name: CallEntry =
                CallEntry::new(stringify!($name), AnswerKind::Success, super::$name as *const ());)*
        }

        /// The bodies of these functions, in Rust.
        mod work_bodies {
            $(#[expect(non_snake_case, reason = "named as the function that calls it")]
            pub(super) unsafe extern "C" fn $name(
                arguments: &$crate::libs::library_calls::RawArguments,
            ) -> $crate::core::ffi::Status {
                super::work_entries::$name.count_call();
                $crate::core::call_table::refuse_by_rule!($name);
                const EFFECT: $crate::libs::library_calls::CallEffect =
                    $crate::libs::library_calls::CallEffect::from_name(stringify!($name));
                const CODES: Option<$crate::libs::solver_codes::SolverCodes> =
                    $crate::libs::solver_codes::SolverCodes::from_name(stringify!($name));
                $crate::libs::library_calls::launch(EFFECT, CODES, arguments)
            })*
        }

        /// The entries of these functions.
        pub(crate) static WORK: &[&$crate::core::call_table::CallEntry] = &[$(&work_entries::$name),*];

        $(
            // SAFETY: no other definition of this name is linked into the library.
            #[unsafe(no_mangle)]
            #[unsafe(naked)]
            unsafe extern "C" fn $name() -> $crate::core::ffi::Status {
                // The six registers are stored below the return address; the other arguments are above it.
                #[cfg(target_arch = "x86_64")]
                core::arch::naked_asm!(
                    "push r9",
                    "push r8",
                    "push rcx",
                    "push rdx",
                    "push rsi",
                    "push rdi",
                    "mov rdi, rsp",
                    "sub rsp, 8",
                    "call {body}",
                    "add rsp, 56",
                    "ret",
                    body = sym work_bodies::$name
                );
                // The eight registers are stored below the frame's two words.
                #[cfg(target_arch = "aarch64")]
                core::arch::naked_asm!(
                    "stp x29, x30, [sp, #-16]!",
                    "stp x6, x7, [sp, #-16]!",
                    "stp x4, x5, [sp, #-16]!",
                    "stp x2, x3, [sp, #-16]!",
                    "stp x0, x1, [sp, #-16]!",
                    "mov x0, sp",
                    "bl {body}",
                    "add sp, sp, #64",
                    "ldp x29, x30, [sp], #16",
                    "ret",
                    body = sym work_bodies::$name
                );
            }
        )*
    };
}

/// Defines functions that return the code for "not supported".
macro_rules! refuse {
    ($($name:ident),* $(,)?) => {
        $crate::core::call_table::constant_answers! {
            UNSUPPORTED, refused_entries, Unsupported, $crate::core::ffi::NOT_SUPPORTED, $($name),*
        }
    };
}

/// Defines functions that fill the named out-parameters and return success.
macro_rules! fills {
    ($($kind:ident $name:ident($($arg:ident: $type:ty),*) { $($place:ident = $value:expr;)* })*) => {
        #[expect(non_upper_case_globals, reason = "named as the functions that they describe")]
        mod fill_entries {
            use $crate::core::call_table::{AnswerKind, CallEntry};
            $(pub(super) static $name: CallEntry =
                CallEntry::new(stringify!($name), AnswerKind::$kind, super::$name as *const ());)*
        }

        /// The entries of these functions.
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
