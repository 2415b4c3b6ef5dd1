//! The library's files and messages never harm the program: no signal, no endless wait, no overwritten file
//! of another user.

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use tempfile::TempDir;

use crate::common::copied::copy_program;
use crate::common::{self, Traced, compiled, library};

/// Returns a command for a program under the library, which warns at once, because `MEMTRACE_OPS` is invalid.
fn warned(program: &Path) -> Command {
    let mut command = common::untraced(program, &[]);
    command.env("LD_PRELOAD", library("libmemtrace.so")).env("MEMTRACE_OPS", "nothing such");
    command
}

fn empty() -> std::path::PathBuf {
    compiled("processes/empty.c", "empty", &[])
}

fn mkfifo(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// Runs a command that must end by itself, soon.
fn ends(mut command: Command) -> Output {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > Duration::from_secs(20) {
            child.kill().unwrap();
            panic!("{command:?} does not end");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().unwrap()
}

#[test]
fn warning_to_a_closed_pipe_raises_no_signal_in_the_program() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let status = warned(&empty()).stderr(writer).status().unwrap();
    assert_eq!(status.code(), Some(0), "{status}");
}

#[test]
fn warning_to_a_pipe_that_nobody_reads_delays_no_program_for_long() {
    let (reader, mut writer) = std::io::pipe().unwrap();
    let blocking = fcntl_getfl(&writer).unwrap();
    fcntl_setfl(&writer, blocking | OFlags::NONBLOCK).unwrap();
    while writer.write(&[0; 4096]).is_ok() {}
    fcntl_setfl(&writer, blocking).unwrap();
    let mut child = warned(&empty()).stderr(writer).spawn().unwrap();
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > Duration::from_secs(20) {
            child.kill().unwrap();
            panic!("the program waits for a reader of its stderr");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(child.wait().unwrap().success());
    drop(reader);
}

#[test]
fn log_file_and_hello_beyond_the_limit_of_file_sizes_raise_no_signal_in_the_program() {
    let folder = TempDir::new().unwrap();
    let (log, hello) = (folder.path().join("log"), folder.path().join("hello"));
    fs::write(&hello, "").unwrap();
    let mut command = Command::new("bash");
    command.args(["-c", "ulimit -f 0; exec env LD_PRELOAD=\"$0\" \"$@\""]);
    command.arg(library("libmemtrace.so")).arg(empty());
    command.env("MEMTRACE_OPS", "nothing such").env("MEMTRACE_LOG_FILE", &log).env("MEMTRACE_HELLO", &hello);
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(told.contains("MEMTRACE_LOG_FILE=") && told.contains("messages go to stderr"), "{told}");
    assert!(told.contains("MEMTRACE_OPS=\"nothing such\""), "{told}");
}

#[test]
fn log_file_or_hello_that_is_a_fifo_delays_no_program() {
    let folder = TempDir::new().unwrap();
    let fifo = folder.path().join("fifo");
    mkfifo(&fifo);
    for variable in ["MEMTRACE_LOG_FILE", "MEMTRACE_HELLO"] {
        let mut command = warned(&empty());
        command.env(variable, &fifo);
        let output = ends(command);
        assert_eq!(output.status.code(), Some(0), "{variable}: {output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("MEMTRACE_OPS"), "{variable}: {output:?}");
    }
}

#[test]
fn log_file_is_never_a_link_nor_a_file_with_a_second_name() {
    let folder = TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::write(path("precious"), "mine").unwrap();
    symlink(path("precious"), path("link")).unwrap();
    fs::hard_link(path("precious"), path("second")).unwrap();
    for name in ["link", "second"] {
        let output = warned(&empty()).env("MEMTRACE_LOG_FILE", path(name)).output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(told.contains("MEMTRACE_LOG_FILE=") && told.contains("MEMTRACE_OPS"), "{name}: {told}");
    }
    assert_eq!(fs::read_to_string(path("precious")).unwrap(), "mine");
    let silent = warned(&empty()).env("MEMTRACE_LOG_FILE", "/dev/null").output().unwrap();
    assert_eq!(silent.stderr, b"", "{silent:?}");
}

#[test]
fn setuid_program_writes_no_file_that_its_user_names() {
    let folder = TempDir::new().unwrap();
    if folder.path().metadata().unwrap().uid() != 0 {
        return eprintln!("skipped: only root can make a setuid program of another user");
    }
    let tracer = library("libmemtrace.so");
    // The loader ignores LD_PRELOAD for a setuid program, so the program is linked with the library, which
    // loads it as /etc/ld.so.preload would. zig gives the library a soname, which the loader seeks in this folder.
    let search = format!("-Wl,-rpath,{}", tracer.parent().unwrap().display());
    let link = ["-Wl,--no-as-needed", tracer.to_str().unwrap(), search.as_str()];
    let program = folder.path().join("privileged");
    copy_program(&compiled("processes/empty.c", "privileged", &link), &program);
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let files = ["log", "hello"].map(|name| folder.path().join(name));
    let run = |mode: u32| {
        fs::set_permissions(&program, fs::Permissions::from_mode(mode)).unwrap();
        for file in &files {
            fs::write(file, "").unwrap();
            fs::set_permissions(file, fs::Permissions::from_mode(0o600)).unwrap();
        }
        let mut command = if mode == 0o755 {
            Command::new(&program)
        } else {
            let mut other = Command::new("setpriv");
            other.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&program);
            other
        };
        command.env("MEMTRACE_OPS", "nothing such");
        command.env("MEMTRACE_LOG_FILE", &files[0]).env("MEMTRACE_HELLO", &files[1]);
        assert!(command.status().unwrap().success());
        [0, 1].map(|index: usize| fs::metadata(&files[index]).unwrap().len() > 0)
    };
    assert_eq!(run(0o755), [true, true], "root's own program, with root's own variables");
    assert_eq!(run(0o4755), [false, false], "a program that gives its user the rights of root");
}

#[test]
fn out_folder_may_have_a_name_of_any_bytes() {
    let folder = TempDir::new().unwrap();
    let out = folder.path().join(OsStr::from_bytes(b"caf\xe9"));
    compiled("fakes/cudart.c", "libcudart.so.12", &[]);
    compiled("fakes/c10.c", "libc10.so", &[]);
    compiled("fakes/c10_cuda.c", "libc10_cuda.so", &["libc10.so", "libcudart.so.12"]);
    let include = format!("-I{}", Path::new(env!("CARGO_MANIFEST_DIR")).join("include").display());
    let libraries = [&include[..], "libc10_cuda.so", "libc10.so", "libcudart.so.12"];
    let program = compiled("processes/parts.c", "parts", &libraries);
    let ran = Traced::new(&program, &["exit", "10"]).env("MEMTRACE_OUT", &out).run();
    assert_eq!(ran.stderr(), "");
    assert_eq!(fs::read_dir(&out).unwrap().count(), 1);
}

#[test]
fn library_that_contains_nccl_gets_its_own_answers() {
    let source = "lookups/contains_nccl.c";
    // Compiles with `-fsemantic-interposition`, so that calls between functions of the same library go
    // through the loader.
    let library = |name: &str, answer: &str| {
        compiled(source, name, &[&format!("-DANSWER={answer}"), "-fsemantic-interposition"])
    };
    // Builds a library with its own NCCL functions, libnccl.so.8, which another library links, and
    // libnccl.so.9, which is loaded by its path.
    let libraries =
        [library("libcontains-nccl.so", "40"), library("libnccl.so.8", "50"), library("libnccl.so.9", "60")];
    let user = compiled(source, "libuses-nccl.so", &["-DUSER", "libnccl.so.8"]);
    let program = compiled(source, "contains-nccl", &[]);
    let [contains, _, other] = libraries.each_ref().map(|path| path.to_str().unwrap());
    let user = user.to_str().unwrap();
    let (global_user, global_other) = (format!("+{user}"), format!("+{other}"));
    let closed = [contains, user, other].map(|path| format!("!{path}"));
    let cases: &[&[&str]] = &[
        &[contains],
        &[user],
        &[contains, user],
        &[user, contains],
        &[other, user],
        &[user, other],
        &[contains, user, other],
        &[other, user, contains],
        // A library that becomes global before others are loaded serves their calls; one that becomes global
        // later does not serve libraries that are loaded already.
        &[&global_user, contains, other],
        &[contains, &global_user, other],
        &[contains, other, &global_other, user],
        // Closes a library before it opens the next one, which is then loaded at the same address.
        &[&closed[0], &closed[1], &closed[2], &closed[0], other],
    ];
    for arguments in cases {
        let untraced = common::untraced(&program, arguments).output().unwrap();
        let ran = Traced::new(&program, arguments).run();
        let expected = String::from_utf8(untraced.stdout).unwrap();
        assert_eq!((ran.status(), ran.stdout()), (0, expected), "{arguments:?} {}", ran.stderr());
    }
    let ran = Traced::new(&program, &[contains, user, other]).run();
    assert_eq!(ran.numbers()[..3], [40_414_243, 50_515_253, 60_616_263]);
}

#[test]
fn hook_of_a_function_that_no_library_has_is_not_found() {
    let program = compiled("lookups/contains_nccl.c", "contains-nccl", &[]);
    let untraced = common::untraced(&program, &[]).output().unwrap();
    let ran = Traced::new(&program, &[]).run();
    assert_eq!(
        (ran.status(), ran.stdout()),
        (0, String::from_utf8(untraced.stdout).unwrap()),
        "{}",
        ran.stderr()
    );
    assert!(!ran.stdout().contains("found") && ran.stdout().contains("undefined"), "{}", ran.stdout());
}

/// Runs `program` with and without the library. Both outputs must be `lines`.
fn answers(program: &Path, arguments: &[&str], lines: &[&str]) {
    let untraced = common::untraced(program, arguments).output().unwrap();
    let ran = Traced::new(program, arguments).run();
    let expected = String::from_utf8(untraced.stdout).unwrap();
    assert_eq!(expected.lines().collect::<Vec<_>>(), lines, "the test itself: {arguments:?}");
    assert_eq!((ran.status(), ran.stdout()), (0, expected), "{arguments:?} {}", ran.stderr());
}

const COPIES: &str = "lookups/copies.c";

/// Compiles a library of [`COPIES`] whose calls go through the loader.
fn copy(name: &str, more: &[&str]) -> String {
    let arguments = [&["-fsemantic-interposition", "-Wl,--no-as-needed"], more].concat();
    compiled(COPIES, name, &arguments).to_str().unwrap().to_owned()
}

#[test]
fn library_that_contains_the_cuda_runtime_gets_its_own_answers() {
    let program = compiled(COPIES, "copies", &[]);
    let contains = copy("libcontains-runtime.so", &["-DANSWER=70", "-DCALLS=1", "-DRUNTIME"]);
    answers(&program, &[&contains, "fn=runtime", "fn=runtime"], &["fn=runtime 0", "fn=runtime 0"]);
}

#[test]
fn function_that_only_another_library_has_is_found() {
    let program = compiled(COPIES, "copies", &[]);
    // The library ends with a tail call, so the return address that memtrace sees is in the program.
    let tail = copy("libtail-nccl.so", &["-DANSWER=40", "-DTAIL", "-O2"]);
    answers(&program, &[&tail, "fn=tail", "fn=tail"], &["fn=tail 40", "fn=tail 40"]);
    // The caller is not linked against the library that has the function; only the root library is linked
    // against both.
    copy("libunder-nccl.so", &["-DCALLS=1"]);
    copy("libbeside-nccl.so", &["-DANSWER=40", "-Wl,--hash-style=sysv"]);
    let root = copy("libroot-nccl.so", &["-DNOTHING", "libunder-nccl.so", "libbeside-nccl.so"]);
    answers(&program, &[&root, "fn=nccl", "fn=nccl"], &["fn=nccl 41", "fn=nccl 41"]);
}

#[test]
fn library_that_called_nccl_is_unloaded_as_without_the_hook() {
    let program = compiled(COPIES, "copies", &[]);
    let leaves = copy("libleaves-nccl.so", &["-DANSWER=40", "-DCALLS=1", "-DLEAVES"]);
    let other = copy("libother-nccl.so", &["-DANSWER=60", "-DCALLS=1"]);
    let once = ["fn=nccl", "fn=count", "close"];
    let arguments = [&[&leaves[..]], &once[..], &[&other, "fn=nccl", "close", &leaves], &once].concat();
    let told = ["fn=nccl 41", "fn=count 1", "unloaded", "closed 0"];
    // Each library is loaded at the address where the previous one was unloaded. memtrace must not answer
    // from the previous one.
    answers(&program, &arguments, &[&told[..], &["fn=nccl 61", "closed 0"], &told].concat());
    copy("libleaves-needed.so", &["-DANSWER=40", "-DLEAVES"]);
    let user = copy("libuses-needed.so", &["-DCALLS=1", "libleaves-needed.so"]);
    answers(&program, &[&[&user[..]], &once[..], &[&user], &once].concat(), &[told, told].concat());
}

#[test]
fn library_gets_the_copy_that_its_other_calls_are_bound_to() {
    copy("libnccl.so.7", &["-DANSWER=50"]);
    let contains = copy("libcontains-copy.so", &["-DANSWER=40", "-DCALLS=1"]);
    let user = copy("libuses-copy.so", &["-DCALLS=1", "libnccl.so.7"]);
    let program = compiled(COPIES, "copies", &[]);
    // The loader searches the libraries of the program in the order of its dependencies, and the libraries of
    // a root library in the same way.
    let link = ["-DSTART", "-Wl,--no-as-needed", "libuses-copy.so", "libcontains-copy.so"];
    answers(&compiled(COPIES, "copies-start", &link), &[], &["start 4040"]);
    let root = copy("libroot-copy.so", &["-DNOTHING", "libuses-copy.so", "libcontains-copy.so"]);
    answers(&program, &[&root, "fn=nccl_after"], &["fn=nccl_after 4040"]);
    // A copy becomes global after the first call: calls must still reach the copy that served them before.
    let (global, call) = (format!("+{contains}"), "fn=nccl_after");
    let early = [&contains, &user, call, &global, &user, call];
    answers(&program, &early, &["fn=nccl_after 5050", "fn=nccl_after 5050"]);
    answers(&program, &[&contains, &user, &global, &user, call, call], &["fn=nccl_after 4040"; 2]);
    // Two versions of a library have the same names. The version that the caller was linked with must decide.
    let versioned = |name: &str, answer: &str| copy(name, &[answer, "-Wl,--default-symver"]);
    versioned("libcublas.so.12", "-DANSWER=12");
    let other = format!("+{}", versioned("libcublas.so.13", "-DANSWER=13"));
    let user = copy("libuses-cublas.so", &["-DCALLS=1", "libcublas.so.12", "libnccl.so.7"]);
    let (first, second) = ("fn=cublas_after", "fn=cublas");
    answers(&program, &[&other, &user, first, second], &["fn=cublas_after 1212", "fn=cublas 13"]);
}

#[test]
fn new_thread_that_a_constructor_waits_for_does_not_wait_for_the_loader() {
    let program = compiled("lookups/waits.c", "waits", &["-rdynamic"]);
    let waits = compiled("lookups/waits.c", "libwaits.so", &["-DWAITS"]);
    let contains = copy("libcontains-all.so", &["-DANSWER=70", "-DCALLS=1", "-DRUNTIME"]);
    let arguments = [Path::new(&contains), &waits, Path::new("runtime"), Path::new("nccl_after")];
    let arguments = arguments.map(|argument| argument.to_str().unwrap());
    let folder = TempDir::new().unwrap();
    let mut command = common::untraced(&program, &arguments);
    command.env("LD_PRELOAD", library("libmemtrace.so")).env("MEMTRACE_OUT", folder.path().join("out"));
    let output = ends(command);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0\n7070\n".repeat(3), "{output:?}");
    // The allocation of the thread must be in a trace.
    assert_eq!(fs::read_dir(folder.path().join("out")).unwrap().count(), 1);
}
