//! `exec` and `posix_spawn`.
//!
//! After an `exec`, the process runs another program and none of our code. So the trace ends before the call.
//! If the call returns, it has failed, and the trace continues. The child of a `vfork` shares its parent's
//! memory, so a hook in such a child only compares the process id and reads the program's file.

use std::ffi::{c_char, c_int, c_void};

use memtrace_record::Recorder;

use super::foreign_program::{FoundPath, Program, is_program, with_fitting_environment};
use crate::ffi::symbols::RealFn;
use crate::guard::shielded;

/// The type of `char *const argv[]` and of an environment.
pub(super) type Strings = *const *const c_char;

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

/// The type of `posix_spawn` and `posix_spawnp`. The file actions and the attributes are passed on as
/// addresses.
type Spawn =
    unsafe extern "C" fn(*mut c_int, *const c_char, *const c_void, *const c_void, Strings, Strings) -> c_int;

// SAFETY: the signature is the one in spawn.h.
static POSIX_SPAWN: RealFn<Spawn> = unsafe { RealFn::new(c"posix_spawn", "libc.so") };
// SAFETY: the signature is the one in spawn.h.
static POSIX_SPAWNP: RealFn<Spawn> = unsafe { RealFn::new(c"posix_spawnp", "libc.so") };

unsafe extern "C" {
    static environ: Strings;
}

/// Looks up the real functions now, because the child of a `vfork` must not look them up.
pub(crate) fn install() {
    let _ = (EXECVE.get(), EXECVPE.get(), FEXECVE.get(), EXECVEAT.get());
    let _ = (POSIX_SPAWN.get(), POSIX_SPAWNP.get());
}

/// Makes the call, or sets `errno` to `ENOSYS` and returns -1 if `call` is `None`. If the program to run
/// exists, ends the trace before the call, and resumes the trace if the call returns.
fn exec(exists: impl FnOnce() -> bool, call: Option<impl FnOnce() -> c_int>) -> c_int {
    // SAFETY: the function has no preconditions.
    let errno = unsafe { libc::__errno_location() };
    let Some(call) = call else {
        // SAFETY: the pointer is to this thread's own `errno`.
        unsafe { *errno = libc::ENOSYS };
        return -1;
    };
    let suspended = shielded(|| {
        let recorder = Recorder::active().filter(|recorder| recorder.is_of_this_process())?;
        (exists() && recorder.suspend()).then_some(recorder)
    });
    let status = call();
    // SAFETY: as above. There is no reference to `errno` here, because the call changes it.
    let error = unsafe { *errno };
    if let Some(recorder) = suspended.flatten() {
        shielded(|| recorder.resume());
    }
    // SAFETY: as above.
    unsafe { *errno = error };
    status
}

#[unsafe(no_mangle)]
unsafe extern "C" fn execve(path: *const c_char, argv: Strings, envp: Strings) -> c_int {
    // SAFETY: these are the caller's own arguments.
    let call =
        |envp| exec(|| is_program(path), EXECVE.get().map(|real| move || unsafe { real(path, argv, envp) }));
    // SAFETY: as above.
    unsafe { with_fitting_environment(Program::at(path), envp, call) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn execv(path: *const c_char, argv: Strings) -> c_int {
    // SAFETY: these are the caller's own arguments, and POSIX defines the environment.
    unsafe { execve(path, argv, environ) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn execvpe(file: *const c_char, argv: Strings, envp: Strings) -> c_int {
    let mut room = FoundPath::new();
    // SAFETY: these are the caller's own arguments.
    let path = unsafe { room.find(file) };
    // SAFETY: these are the caller's own arguments.
    let call =
        |envp| exec(|| !path.is_null(), EXECVPE.get().map(|real| move || unsafe { real(file, argv, envp) }));
    // SAFETY: the path is null or a C string; the environment is the caller's own.
    unsafe { with_fitting_environment(Program::at(path), envp, call) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn execvp(file: *const c_char, argv: Strings) -> c_int {
    // SAFETY: these are the caller's own arguments, and POSIX defines the environment.
    unsafe { execvpe(file, argv, environ) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn fexecve(file: c_int, argv: Strings, envp: Strings) -> c_int {
    // SAFETY: these are the caller's own arguments.
    let call = |envp| exec(|| true, FEXECVE.get().map(|real| move || unsafe { real(file, argv, envp) }));
    // SAFETY: as above.
    unsafe { with_fitting_environment(Program::Open(file), envp, call) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn execveat(
    folder: c_int,
    path: *const c_char,
    argv: Strings,
    envp: Strings,
    flags: c_int,
) -> c_int {
    // SAFETY: the path is not null, so it is a C string.
    let is_open = flags & libc::AT_EMPTY_PATH != 0 && !path.is_null() && unsafe { *path } == 0;
    let program = if is_open { Program::Open(folder) } else { Program::At(folder, path) };
    let call = |envp| {
        // SAFETY: these are the caller's own arguments.
        let real = EXECVEAT.get().map(|real| move || unsafe { real(folder, path, argv, envp, flags) });
        exec(|| true, real)
    };
    // SAFETY: as above.
    unsafe { with_fitting_environment(program, envp, call) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn posix_spawn(
    pid: *mut c_int,
    path: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    argv: Strings,
    envp: Strings,
) -> c_int {
    let Some(real) = POSIX_SPAWN.get() else { return libc::ENOSYS };
    // SAFETY: these are the caller's own arguments.
    unsafe {
        with_fitting_environment(Program::at(path), envp, |envp| {
            real(pid, path, actions, attributes, argv, envp)
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn posix_spawnp(
    pid: *mut c_int,
    file: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    argv: Strings,
    envp: Strings,
) -> c_int {
    let Some(real) = POSIX_SPAWNP.get() else { return libc::ENOSYS };
    let mut room = FoundPath::new();
    // SAFETY: these are the caller's own arguments.
    let path = unsafe { room.find(file) };
    // SAFETY: the path is null or a C string; the rest are the caller's own arguments.
    unsafe {
        with_fitting_environment(Program::at(path), envp, |envp| {
            real(pid, file, actions, attributes, argv, envp)
        })
    }
}

/// The body of `execle`, whose environment follows the null that ends the arguments.
unsafe extern "C" fn with_environment(path: *const c_char, argv: Strings) -> c_int {
    let mut end = argv;
    // SAFETY: the caller's arguments end with a null, and one more pointer follows the null.
    unsafe {
        while !(*end).is_null() {
            end = end.add(1);
        }
        execve(path, argv, (*end.add(1)).cast())
    }
}

/// Defines the functions that take the strings of `argv` as separate arguments. By the ABI, the first strings
/// (x86-64: five, aarch64: seven) are in registers and the rest are on the stack, in order. Storing these
/// registers below the stack's strings completes the array.
macro_rules! one_by_one {
    ($($name:ident => $real:ident;)*) => {
        $(
            #[unsafe(no_mangle)]
            #[unsafe(naked)]
            unsafe extern "C" fn $name() {
                #[cfg(target_arch = "x86_64")]
                core::arch::naked_asm!(
                    // Move the return address below the array, because the array must be contiguous with the
                    // strings on the stack.
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
                );
                #[cfg(target_arch = "aarch64")]
                core::arch::naked_asm!(
                    "stp x29, x30, [sp, #-80]!",
                    "stp x1, x2, [sp, #24]",
                    "stp x3, x4, [sp, #40]",
                    "stp x5, x6, [sp, #56]",
                    "str x7, [sp, #72]",
                    "add x1, sp, #24",
                    "bl {real}",
                    "ldp x29, x30, [sp], #80",
                    "ret",
                    real = sym $real
                );
            }
        )*
    };
}

one_by_one! {
    execl => execv;
    execlp => execvp;
    execle => with_environment;
}
