//! An interposed `dlopen`. It loads this library under the names of the driver's libraries, and gives the
//! functions of this library precedence over the functions of the CUDA runtime and of NCCL.
//!
//! `libcuda.so.1` is the soname of this library, so the loader finds it by itself. This library also serves
//! as NVML, but the loader does not know it by that name. PyTorch asks NVML for the text of an out-of-memory
//! error, and PyTorch 2.1 fails without NVML. Libraries that are linked against NVML need more
//! ([`nvml_file`]). Every other call continues by a jump, so that glibc sees the return address of the
//! program and uses the `RUNPATH` of the right library.
//!
//! A program (through `ctypes`), vLLM or cuDNN may itself load `libcudart.so.13`, `libnccl.so.2`,
//! `libnvrtc.so.13`, or a copy of one of these from a wheel. It then looks up functions through the handle.
//! There it would find NVIDIA's own functions first, which need undocumented tables of the driver. So it gets
//! the handle of the global scope instead, to which the library is added. In that scope the tracer's hooks
//! come first, then the answers here, then the library with its remaining functions. A call with
//! `RTLD_NOLOAD` gets the library itself, as the tracer needs it.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::io::Write;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::core::nvml_file;

/// The names of this library other than its soname.
const NAMES: [&[u8]; 3] = [b"libnvidia-ml.so.1", b"libnvidia-ml.so", b"libcuda.so"];

/// Libraries that a program may load by name or by path, and whose functions this library defines.
const ANSWERED: [&[u8]; 3] = [b"libcudart", b"libnccl", b"libnvrtc"];

#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void {
    memtrace_util::return_or_jump!(redirect)
}

/// The value that is returned in two registers.
#[repr(C)]
struct Redirect {
    /// The handle that the program gets: this library, or the global scope for a library whose functions this
    /// library defines. Null if glibc's `dlopen` must handle the call.
    ours: *mut c_void,
    /// The address of glibc's `dlopen`.
    real: *mut c_void,
}

pub(crate) type Dlopen = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;

unsafe extern "C" fn redirect(name: *const c_char, flags: c_int) -> Redirect {
    static REAL: OnceLock<usize> = OnceLock::new();
    // SAFETY: a constant C string.
    let found = *REAL.get_or_init(|| unsafe { libc::dlsym(libc::RTLD_NEXT, c"dlopen".as_ptr()) } as usize);
    if found == 0 {
        return Redirect { ours: null_mut(), real: fail as *mut c_void };
    }
    let real = found as *mut c_void;
    // SAFETY: glibc's dlopen has this type.
    let dlopen: Dlopen = unsafe { std::mem::transmute(real) };
    nvml_file::load(dlopen);
    let bytes = match name.is_null() {
        true => b"".as_slice(),
        // SAFETY: by the contract of dlopen a name that is not null is a C string.
        false => unsafe { CStr::from_ptr(name) }.to_bytes(),
    };
    warn_of_device_files(bytes);
    let ours = if NAMES.contains(&bytes) {
        // SAFETY: the soname of this library, which is already loaded: no constructor runs.
        unsafe { dlopen(c"libcuda.so.1".as_ptr(), flags) }
    } else if flags & libc::RTLD_NOLOAD == 0 && is_answered(bytes) {
        // SAFETY: the arguments of the program; only the scope is wider. When the library is not found from
        // here, the call continues with the search path of the caller.
        match unsafe { dlopen(name, flags & !libc::RTLD_LOCAL | libc::RTLD_GLOBAL) } {
            library if library.is_null() => null_mut(),
            // SAFETY: null means the global scope.
            _ => unsafe { dlopen(std::ptr::null(), libc::RTLD_LAZY) },
        }
    } else {
        null_mut()
    };
    Redirect { ours, real }
}

/// Returns true if a name or a path names a library whose functions this library defines. A wheel that
/// contains its own copy adds a hash to the name: `libcudart.faf08d9a.so.13`, or with a hyphen.
fn is_answered(name: &[u8]) -> bool {
    let file = name.rsplit(|&byte| byte == b'/').next().unwrap_or(name);
    let Some(rest) = ANSWERED.iter().find_map(|library| file.strip_prefix(*library)) else { return false };
    let without_hash = match rest {
        [b'.' | b'-', hash @ ..] => {
            let digits = hash.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
            if digits >= LEAST_HASH { &hash[digits..] } else { rest }
        }
        _ => rest,
    };
    matches!(without_hash.strip_prefix(b".so"), Some([] | [b'.', ..]))
}

/// Returns true if a path names a library of JAX's CUDA plugin. Its folder has a name such as
/// `jax_cuda13_plugin`, from which JAX first loads `_versions.so`. This happens before JAX looks for NVIDIA's
/// device files.
fn is_jax_plugin(name: &[u8]) -> bool {
    let Some(folder) = name.rsplit(|&byte| byte == b'/').nth(1) else { return false };
    folder.starts_with(b"jax_cuda") && folder.ends_with(b"_plugin")
}

/// Prints once why JAX finds no GPU, because JAX's own message advises to install a driver.
fn warn_of_device_files(name: &[u8]) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    let warns = is_jax_plugin(name) && !Path::new("/dev/nvidiactl").exists();
    if warns && !WARNED.swap(true, Ordering::Relaxed) {
        let _ = writeln!(
            std::io::stderr(),
            "memtrace: JAX does not run on the phantom device: it looks for NVIDIA's device files, which a \
             machine without a GPU lacks, and falls back to the CPU. Trace JAX on a real GPU"
        );
    }
}

/// The minimum number of digits of a hash in a file name: auditwheel writes eight.
const LEAST_HASH: usize = 8;

unsafe extern "C" fn fail(_: *const c_char, _: c_int) -> *mut c_void {
    null_mut()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jaxs_plugin_is_recognized_by_its_folder() {
        assert!(is_jax_plugin(b"/venv/lib/jax_cuda13_plugin/_versions.so"));
        for name in
            ["", "/", "_versions.so", "/jax_cuda13_plugin", "/jax_plugins/a.so", "/jax_cuda13_plugin/x/a.so"]
        {
            assert!(!is_jax_plugin(name.as_bytes()), "{name}");
        }
    }

    #[test]
    fn libraries_are_recognized_by_their_file_names() {
        for name in [
            "libcudart.so",
            "libcudart.so.13",
            "/a b/libnccl.so.2",
            "/x/torchvision.libs/libcudart.faf08d9a.so.13",
            "libcudart-9335f6a2.so.12.4.127",
            "libnvrtc.so.13",
        ] {
            assert!(is_answered(name.as_bytes()), "{name}");
        }
        for name in [
            "",
            "/",
            "libcudart",
            "libcudart.soo",
            "libcudart_static.so",
            "libcudart.abc.so.13",
            "libcudart.faf08d9a",
            "libcudart.faf08d9az.so",
            "libcudart.so.13/other.so",
            "libnvrtc-builtins.so.13.0",
            "mylibcudart.so",
        ] {
            assert!(!is_answered(name.as_bytes()), "{name}");
        }
    }
}
