//! `exec`: the process becomes another program, and no code of ours runs any more.
//!
//! The trace gets its end before, and goes on when the call returns: then it failed. The child of a `vfork`
//! has its parent's memory, where all that happens is a look at the process id.

use std::ffi::{CStr, OsStr, c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use memtrace_record::Recorder;

use crate::ffi::symbols::RealFn;
use crate::runtime::guard::shielded;

/// `char *const argv[]`, and the same of an environment.
type Texts = *const *const c_char;

// SAFETY: the signature is the one in unistd.h.
static EXECVE: RealFn<unsafe extern "C" fn(*const c_char, Texts, Texts) -> c_int> =
    unsafe { RealFn::new(c"execve", "libc.so") };
// SAFETY: the signature is the one in unistd.h.
static EXECVPE: RealFn<unsafe extern "C" fn(*const c_char, Texts, Texts) -> c_int> =
    unsafe { RealFn::new(c"execvpe", "libc.so") };
// SAFETY: the signature is the one in unistd.h.
static FEXECVE: RealFn<unsafe extern "C" fn(c_int, Texts, Texts) -> c_int> =
    unsafe { RealFn::new(c"fexecve", "libc.so") };
// SAFETY: the signature is the one in unistd.h.
static EXECVEAT: RealFn<unsafe extern "C" fn(c_int, *const c_char, Texts, Texts, c_int) -> c_int> =
    unsafe { RealFn::new(c"execveat", "libc.so") };

unsafe extern "C" {
    static environ: Texts;
}

/// Finds the real functions: the child of a `vfork` must not look for them.
pub(crate) fn install() {
    let _ = (EXECVE.get(), EXECVPE.get(), FEXECVE.get(), EXECVEAT.get());
}

/// Ends the trace, where there is something to run, and makes the call.
fn instead(is_there: impl FnOnce() -> bool, call: Option<impl FnOnce() -> c_int>) -> c_int {
    // SAFETY: the thread's own.
    let errno = unsafe { &mut *libc::__errno_location() };
    let Some(call) = call else {
        *errno = libc::ENOSYS;
        return -1;
    };
    let suspended = shielded(|| {
        let recorder = Recorder::active().filter(|recorder| recorder.is_of_this_process())?;
        (is_there() && recorder.suspend()).then_some(recorder)
    });
    let status = call();
    let why = *errno;
    if let Some(recorder) = suspended.flatten() {
        shielded(|| recorder.resume());
    }
    *errno = why;
    status
}

/// Can this file be executed?
fn is_program(path: *const c_char) -> bool {
    // SAFETY: the caller's own path; the call says EFAULT of one that is none.
    unsafe { libc::access(path, libc::X_OK) == 0 }
}

/// Is there a program of this name, where `execvp` looks for it?
fn is_in_path(name: *const c_char) -> bool {
    if name.is_null() {
        return false;
    }
    // SAFETY: the caller's own name, a C string.
    let file = unsafe { CStr::from_ptr(name) }.to_bytes();
    if file.contains(&b'/') {
        return is_program(name);
    }
    // What glibc takes when the variable is not set.
    let folders = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    std::env::split_paths(&folders).any(|folder| {
        let path: &Path = &folder.join(OsStr::from_bytes(file));
        std::ffi::CString::new(path.as_os_str().as_bytes()).is_ok_and(|path| is_program(path.as_ptr()))
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn execve(path: *const c_char, argv: Texts, envp: Texts) -> c_int {
    // SAFETY: the caller's own arguments.
    instead(|| is_program(path), EXECVE.get().map(|real| move || unsafe { real(path, argv, envp) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn execv(path: *const c_char, argv: Texts) -> c_int {
    // SAFETY: the caller's own arguments, and what POSIX says the environment is.
    unsafe { execve(path, argv, environ) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn execvpe(file: *const c_char, argv: Texts, envp: Texts) -> c_int {
    // SAFETY: the caller's own arguments.
    instead(|| is_in_path(file), EXECVPE.get().map(|real| move || unsafe { real(file, argv, envp) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn execvp(file: *const c_char, argv: Texts) -> c_int {
    // SAFETY: the caller's own arguments, and what POSIX says the environment is.
    unsafe { execvpe(file, argv, environ) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn fexecve(file: c_int, argv: Texts, envp: Texts) -> c_int {
    // SAFETY: the caller's own arguments.
    instead(|| true, FEXECVE.get().map(|real| move || unsafe { real(file, argv, envp) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn execveat(
    folder: c_int,
    path: *const c_char,
    argv: Texts,
    envp: Texts,
    flags: c_int,
) -> c_int {
    // SAFETY: the caller's own arguments.
    let real = EXECVEAT.get().map(|real| move || unsafe { real(folder, path, argv, envp, flags) });
    instead(|| true, real)
}

/// `execle`, whose environment stands behind the null that ends its arguments.
unsafe extern "C" fn with_environment(path: *const c_char, argv: Texts) -> c_int {
    let mut end = argv;
    // SAFETY: the arguments of the caller, which end in a null and one more pointer.
    unsafe {
        while !(*end).is_null() {
            end = end.add(1);
        }
        execve(path, argv, (*end.add(1)).cast())
    }
}

/// Functions that take the words of `argv` one by one: the ABI has the first five in registers and the others on
/// the stack, in order, so with those five put before them they are the array.
macro_rules! one_by_one {
    ($($name:ident => $real:ident;)*) => {
        $(
            #[unsafe(no_mangle)]
            #[unsafe(naked)]
            unsafe extern "C" fn $name() {
                core::arch::naked_asm!(
                    // The return address makes room, and stands below the array.
                    "pop rax",
                    "push r9",
                    "push r8",
                    "push rcx",
                    "push rdx",
                    "push rsi",
                    "mov rsi, rsp",
                    "push rax",
                    "call {real}",
                    "pop rcx",
                    "add rsp, 40",
                    "push rcx",
                    "ret",
                    real = sym $real
                )
            }
        )*
    };
}

one_by_one! {
    execl => execv;
    execlp => execvp;
    execle => with_environment;
}
