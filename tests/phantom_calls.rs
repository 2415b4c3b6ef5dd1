//! Single calls on the simulated GPU (the phantom), from programs in C and through `ctypes`: their status
//! and their effect. No torch is needed.

#[expect(dead_code, reason = "each test crate uses its own part")]
mod common;
use common::{compiled, library, untraced};

/// The output of a program of `tests/programs/phantom`, linked with the simulated GPU and without the tracer.
fn told(source: &str, card: &str, arguments: &[&str]) -> String {
    let phantom = library("libmemtrace_phantom.so");
    // The loader knows the library by its soname, which preloading makes known.
    let program = compiled(
        &format!("phantom/{source}.c"),
        &format!("phantom-{source}"),
        &["-Wl,--allow-shlib-undefined", phantom.to_str().unwrap()],
    );
    let output = untraced(&program, arguments)
        .env("LD_PRELOAD", &phantom)
        .env("MEMTRACE_PHANTOM", card)
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{source}: {}\n{stderr}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn phantom_driver_calls_fail_until_the_driver_is_initialized() {
    let before = "before: count 3 get 3 current 3 alloc 3 free 3 unsupported 3 version 0 entry 0\n\
                  3 is CUDA_ERROR_NOT_INITIALIZED\n";
    let after = "after: count 0 get 0 current 0 alloc 0 free 0 unsupported 801 version 0 entry 0\n";
    assert_eq!(told("initialization", "t4", &[]), format!("{before}flags 1 init 0\n{after}"));
    assert_eq!(told("initialization", "t4", &["runtime"]), format!("{before}runtime 0\n{after}"));
}

#[test]
fn phantom_events_of_two_devices_wait_exactly_and_have_no_elapsed_time() {
    let expected = "record elsewhere 400 last error 400\n\
                    wait 0 query 600 600 synchronize 0 query 0 0 600\n\
                    elapsed across 400 last error 400 time -1 on one 0\n";
    assert_eq!(told("two_devices", "2xt4", &[]), expected);
}
