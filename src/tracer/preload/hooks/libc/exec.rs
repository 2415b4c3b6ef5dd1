//! `exec`: the process becomes another program, and none of our code runs any more.
//!
//! The trace ends before the call. When the call returns it has failed, and the trace goes on. The child of a
//! `vfork` has its parent's memory: there only the process id is compared.

use std::ffi::{CStr, OsStr, c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use memtrace_record::Recorder;

use crate::ffi::symbols::RealFn;
use crate::runtime::guard::shielded;

/// `char *const argv[]`, or an environment.
type Strings = *const *const c_char;

// SAFETY: the signature is the one in unistd.h.
static EXECVE: RealFn<unsafe extern "C" fn(*const c_char, Strings, Strings) -> c_int> =
    unsafe { RealFn::new(c"execve", "libc.so") };
// SAFETY: the signature is the one in unistd.h.
static EXECVPE: RealFn<unsafe extern "C" fn(*const c_char, Strings, Strings) -> c_int> =
    unsafe { RealFn::new(c"execvpe", "libc.so") };
// SAFETY: the signature is the one in unistd.h.
static FEXECVE: RealFn<unsafe extern "C" fn(c_int, Strings, Strings) -> c_int> =
    unsafe { RealFn::new(c"fexecve", "libc.so") };
// SAFETY: the signature is the one in unistd.h.
static EXECVEAT: RealFn<unsafe extern "C" fn(c_int, *const c_char, Strings, Strings, c_int) -> c_int> =
    unsafe { RealFn::new(c"execveat", "libc.so") };

unsafe extern "C" {
    static environ: Strings;
}

/// Finds the real functions, because the child of a `vfork` must not look them up.
pub(crate) fn install() {
    let _ = (EXECVE.get(), EXECVPE.get(), FEXECVE.get(), EXECVEAT.get());
}

/// Ends the trace, if the program to run exists, and makes the call.
fn exec(exists: impl FnOnce() -> bool, call: Option<impl FnOnce() -> c_int>) -> c_int {
    // SAFETY: the thread's own variable.
    let errno = unsafe { &mut *libc::__errno_location() };
    let Some(call) = call else {
        *errno = libc::ENOSYS;
        return -1;
    };
    let suspended = shielded(|| {
        let recorder = Recorder::active().filter(|recorder| recorder.is_of_this_process())?;
        (exists() && recorder.suspend()).then_some(recorder)
    });
    let status = call();
    let error = *errno;
    if let Some(recorder) = suspended.flatten() {
        shielded(|| recorder.resume());
    }
    *errno = error;
    status
}

/// Returns true if the file is executable.
fn is_program(path: *const c_char) -> bool {
    // SAFETY: the kernel reads the path, and returns EFAULT for a bad address.
    unsafe { libc::access(path, libc::X_OK) == 0 }
}

/// Returns true if `execvp` would find a program of this name.
///
/// # Safety
/// `name` is null or a C string.
unsafe fn is_in_path(name: *const c_char) -> bool {
    if name.is_null() {
        return false;
    }
    // SAFETY: not null, so a C string by the contract.
    let file = unsafe { CStr::from_ptr(name) }.to_bytes();
    if file.contains(&b'/') {
        return is_program(name);
    }
    // The default of glibc.
    let folders = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    std::env::split_paths(&folders).any(|folder| {
        let path: &Path = &folder.join(OsStr::from_bytes(file));
        std::ffi::CString::new(path.as_os_str().as_bytes()).is_ok_and(|path| is_program(path.as_ptr()))
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn execve(path: *const c_char, argv: Strings, envp: Strings) -> c_int {
    // SAFETY: the caller's own arguments.
    exec(|| is_program(path), EXECVE.get().map(|real| move || unsafe { real(path, argv, envp) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn execv(path: *const c_char, argv: Strings) -> c_int {
    // SAFETY: the caller's own arguments, and the environment by POSIX.
    unsafe { execve(path, argv, environ) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn execvpe(file: *const c_char, argv: Strings, envp: Strings) -> c_int {
    // SAFETY: the caller's own arguments.
    exec(|| unsafe { is_in_path(file) }, EXECVPE.get().map(|real| move || unsafe { real(file, argv, envp) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn execvp(file: *const c_char, argv: Strings) -> c_int {
    // SAFETY: the caller's own arguments, and the environment by POSIX.
    unsafe { execvpe(file, argv, environ) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn fexecve(file: c_int, argv: Strings, envp: Strings) -> c_int {
    // SAFETY: the caller's own arguments.
    exec(|| true, FEXECVE.get().map(|real| move || unsafe { real(file, argv, envp) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn execveat(
    folder: c_int,
    path: *const c_char,
    argv: Strings,
    envp: Strings,
    flags: c_int,
) -> c_int {
    // SAFETY: the caller's own arguments.
    let real = EXECVEAT.get().map(|real| move || unsafe { real(folder, path, argv, envp, flags) });
    exec(|| true, real)
}

/// `execle`: the environment follows the null that ends the arguments.
unsafe extern "C" fn with_environment(path: *const c_char, argv: Strings) -> c_int {
    let mut end = argv;
    // SAFETY: the caller's arguments, which end in a null and one more pointer.
    unsafe {
        while !(*end).is_null() {
            end = end.add(1);
        }
        execve(path, argv, (*end.add(1)).cast())
    }
}

/// Defines the functions that take the strings of `argv` as separate arguments. By the ABI five of them are
/// in registers and the others on the stack, in order: with those five pushed before them they are the array.
macro_rules! one_by_one {
    ($($name:ident => $real:ident;)*) => {
        $(
            #[unsafe(no_mangle)]
            #[unsafe(naked)]
            unsafe extern "C" fn $name() {
                core::arch::naked_asm!(
                    // The return address moves below the array.
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
