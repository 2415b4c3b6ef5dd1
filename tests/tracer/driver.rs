//! Traces calls of the driver, for each way in which a program can look up its functions. The stand-in for
//! `libcuda.so.1` returns addresses of another range for each way.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use memtrace_trace::EventName;
use memtrace_trace::csv::RowReader;

use crate::common::installed::missing;
use crate::common::{TraceRow, Traced, TracedRun, compiled, library, untraced};

const DRIVER: &str = "libcuda.so.1";

/// Builds the stand-in once, because another test may be running it.
fn driver() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| compiled("fakes/libcuda.c", DRIVER, &[])).clone()
}

/// Formats a row as `driver.c` prints it: event, api, status, address, requested, delta.
fn row_line(row: &TraceRow) -> String {
    let TraceRow { event, api, status, addr, requested, delta, .. } = row;
    format!("{event} {api} {status} {addr} {requested} {delta}")
}

/// Returns each way in which a program can look up the driver's functions: the argument of `driver.c`, and
/// the program that is compiled for it.
fn ways() -> Vec<(&'static str, PathBuf)> {
    static WAYS: OnceLock<Vec<(&str, PathBuf)>> = OnceLock::new();
    WAYS.get_or_init(build_ways).clone()
}

fn build_ways() -> Vec<(&'static str, PathBuf)> {
    driver();
    let alone = compiled("calls/driver.c", "driver", &[]);
    let linked = compiled("calls/driver.c", "driver-linked", &["-DLINKED", DRIVER]);
    compiled("fakes/runtime.c", "libcudart-of-driver.so.12", &[]);
    let runtime =
        compiled("calls/driver.c", "driver-runtime", &["-Wl,--no-as-needed", "libcudart-of-driver.so.12"]);
    let mut ways = vec![("linked", linked)];
    ways.extend(["dlsym", "legacy", "per_thread", "recursive"].map(|how| (how, alone.clone())));
    ways.extend(["runtime", "by_version"].map(|how| (how, runtime.clone())));
    ways
}

#[test]
fn driver_calls_have_one_row_each_however_they_are_looked_up() {
    let library = driver();
    for (how, program) in ways() {
        let ran = Traced::new(&program, &[how, library.to_str().unwrap()]).run();
        assert_eq!(ran.status(), 0, "{how}: {}", ran.stderr());
        let trace = ran.trace();
        let rows: Vec<String> = trace.rows.iter().map(row_line).collect();
        let expected: Vec<String> = ran.stdout().lines().map(str::to_owned).collect();
        assert_eq!(rows, expected, "{how}");
        assert_eq!(trace.live(), 0, "{how}");
        let name = program.file_name().unwrap().to_str().unwrap();
        assert!(trace.rows.iter().all(|row| row.source == name), "{how}: {:?}", trace.rows);
        // The stand-in returns addresses of another range for each kind of lookup, so the address shows which
        // of its functions was called.
        let way = match how {
            "linked" | "dlsym" => 1,
            "per_thread" => 3,
            _ => 2,
        };
        let device = trace.rows.iter().find(|row| row.api == "cuMemAllocAsync").unwrap();
        assert_eq!(device.addr >> 44, way, "{how}");
    }
}

#[test]
fn driver_0_ignores_driver_calls() {
    let library = driver();
    for (how, program) in ways() {
        for variable in ["MEMTRACE_DRIVER", "MEMTRACE_DLSYM"] {
            let arguments = [how, library.to_str().unwrap()];
            let ran = Traced::new(&program, &arguments).env(variable, "0").run();
            assert_eq!(ran.status(), 0, "{how}: {}", ran.stderr());
            // With MEMTRACE_DRIVER=0 there must be no trace. With MEMTRACE_DLSYM=0 there may be one, because
            // linked functions are still traced.
            if variable == "MEMTRACE_DRIVER" {
                assert!(ran.files().is_empty(), "{how}");
            }
        }
    }
}

#[test]
fn driver_calls_of_a_runtime_linked_into_a_library_have_one_row_each() {
    let ran = Traced::new(&both(), &[]).run();
    assert_eq!(ran.status(), 0, "{}", ran.stderr());
    let trace = ran.trace();
    let rows: Vec<_> =
        trace.rows.iter().map(|row| (row.source.as_str(), row.api.as_str(), row.delta)).collect();
    let library = "libworks.so.12";
    let expected = [
        ("both", "cudaMalloc", 1000),
        (library, "cuMemAlloc", 3000),
        (library, "cuMemAllocAsync", 4000),
        (library, "cuMemAllocAsync", 5000),
        (library, "cuMemHostAlloc", 6000),
        (library, "cuMemFree", -3000),
        (library, "cuMemFreeAsync", -4000),
        (library, "cuMemFreeAsync", -5000),
        (library, "cuMemFreeHost", -6000),
        ("both", "cudaFree", -1000),
    ];
    assert_eq!(rows, expected);
    assert_eq!(trace.of(EventName::HostAlloc).len(), 1);
}

/// Builds a program that is linked against one runtime, and against a library that contains another runtime.
fn both() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let build = || {
        // Compiles the runtime that the program below is linked against.
        ways();
        compiled("fakes/runtime.c", "libworks.so.12", &["-DHIDDEN"]);
        compiled("lookups/both.c", "both", &["libcudart-of-driver.so.12", "libworks.so.12"])
    };
    BUILT.get_or_init(build).clone()
}

/// Runs a program under both libraries, in the order of `memtrace run --phantom`.
fn on_phantom(program: &Path) -> TracedRun {
    of_phantom(program, &[]).run()
}

fn of_phantom(program: &Path, args: &[&str]) -> Traced {
    let [ours, _] = orders(&library("libmemtrace_phantom.so"));
    Traced::new(program, args).env("LD_PRELOAD", ours).env("MEMTRACE_PHANTOM", "a10")
}

/// The traced program is this test binary, which starts itself.
#[test]
fn driver_calls_of_a_cudarc_program_have_one_row_each() {
    const INSIDE: &str = "DRIVER_TEST_INSIDE";
    if std::env::var_os(INSIDE).is_some() {
        return uses_cudarc();
    }
    let program = std::env::current_exe().unwrap();
    let ran = of_phantom(
        &program,
        &["tracer::driver::driver_calls_of_a_cudarc_program_have_one_row_each", "--exact"],
    )
    .env(INSIDE, "1")
    .run();
    assert_eq!(ran.status(), 0, "{}{}", ran.stdout(), ran.stderr());
    let trace = ran.trace();
    let name = program.file_name().unwrap().to_str().unwrap();
    let rows = trace.rows.iter().filter(|row| row.source == name);
    let rows: Vec<_> = rows.map(|row| (row.api.as_str(), row.delta)).collect();
    let taken = [("cuMemAllocAsync", 4 << 20), ("cuMemAllocAsync", 3 << 20)];
    let given = [("cuMemFreeAsync", -4 << 20), ("cuMemFreeAsync", -3 << 20)];
    assert_eq!(rows, [taken, given].concat());
}

fn uses_cudarc() {
    let context = cudarc::driver::CudaContext::new(0).unwrap();
    let (default, other) = (context.default_stream(), context.new_stream().unwrap());
    let first = default.alloc_zeros::<f32>(1 << 20).unwrap();
    let second = other.alloc_zeros::<u8>(3 << 20).unwrap();
    drop(first);
    drop(second);
    default.synchronize().unwrap();
}

/// NVIDIA's runtime does not start on the phantom driver (see docs/phantom-fidelity.md). A runtime that uses only
/// documented calls does.
#[test]
fn phantom_driver_serves_a_runtime_linked_into_a_library() {
    let ran = on_phantom(&both());
    assert_eq!((ran.status(), ran.stderr().as_str()), (0, ""));
    let trace = ran.trace();
    let source = |row: &&TraceRow| row.event != EventName::Sample && row.source == "libworks.so.12";
    let rows: Vec<_> = trace.rows.iter().filter(source).map(|row| (row.api.as_str(), row.delta)).collect();
    let taken = [
        ("cuMemAlloc", 3000),
        ("cuMemAllocAsync", 4000),
        ("cuMemAllocAsync", 5000),
        ("cuMemHostAlloc", 6000),
    ];
    assert_eq!(rows[..4], taken);
    assert_eq!((rows.len(), trace.live()), (8, 0));
    // The program itself allocates once, through the phantom's runtime, so one row names it as the source.
    let of_program: Vec<_> =
        trace.of(EventName::ExtAlloc).into_iter().filter(|row| row.source == "both").collect();
    assert_eq!((of_program.len(), of_program[0].delta), (1, 1000));
}

/// A graph's memory is allocated when the graph is launched. Expects rows of 0 bytes for the captured calls,
/// and the memory of the graph only in device samples.
#[test]
fn graph_memory_is_in_device_samples_only_and_counted_once() {
    let include = format!("-I{}/include", env!("CARGO_MANIFEST_DIR"));
    let phantom = library("libmemtrace_phantom.so");
    let ran = on_phantom(&compiled("calls/graphs.c", "graphs", &[&include, phantom.to_str().unwrap()]));
    assert_eq!((ran.status(), ran.stderr().as_str()), (0, ""));
    let trace = ran.trace();
    let (samples, calls): (Vec<&TraceRow>, Vec<&TraceRow>) =
        trace.rows.iter().partition(|row| row.event == EventName::Sample);
    let rows: Vec<String> = calls.iter().map(|row| row_line(row)).collect();
    assert_eq!(rows, ran.stdout().lines().collect::<Vec<_>>());
    let mut held: Vec<&str> = samples.iter().filter_map(|row| row.name.split("graphs=").nth(1)).collect();
    // A slow run has more samples, so drop the repeats.
    held.dedup();
    // The sample after the last free has `graphs=0`; later samples have no such count.
    assert_eq!(held[..2], ["8388608", "0"], "{samples:?}");
    assert_eq!(trace.live(), 0);
}

#[test]
fn meta_row_describes_the_card_of_a_run_with_hundreds_of_faults() {
    let include = format!("-I{}/include", env!("CARGO_MANIFEST_DIR"));
    let phantom = library("libmemtrace_phantom.so");
    let program = compiled("calls/graphs.c", "graphs-faults", &[&include, phantom.to_str().unwrap()]);
    // The program makes so few calls that no fault occurs.
    let faults: Vec<String> = (0..400).map(|number| format!("oom@alloc:{}", 1_000_000 + number)).collect();
    let ran = of_phantom(&program, &[]).env("MEMTRACE_PHANTOM_FAULT", faults.join(",")).run();
    assert_eq!((ran.status(), ran.stderr().as_str()), (0, ""));
    let trace = RowReader::open(&ran.files()[0]).unwrap();
    let described = &trace.meta().phantom;
    assert_eq!(described["card"], "a10");
    assert_eq!(described["faults"].as_array().map(Vec::len), Some(400));
}

/// Runs on machines that report a device's memory per process in different ways: a MIG instance, an MPS
/// server, a device known by its bus id, NVML without figures per process, no NVML.
#[test]
fn device_samples_attribute_memory_as_far_as_nvml_reports_it() {
    const GIB: i64 = 1 << 30;
    let include = format!("-I{}/include", env!("CARGO_MANIFEST_DIR"));
    compiled("fakes/cudart.c", "libcudart.so.12", &[]);
    let program = compiled("api/sampled.c", "sampled", &[&include, "libcudart.so.12"]);
    let preload = format!(
        "{}:{}",
        library("libmemtrace.so").display(),
        compiled("fakes/nvml.c", "libfake-nvml.so", &[]).display()
    );
    let (total, free) = (80 * GIB, 71 * GIB);
    for (machine, api, expected) in [
        ("plain", "nvml", format!("total={total} free={free} process={} others={}", 3 * GIB, 5 * GIB)),
        ("reserve", "nvml", format!("total={} free={free} process={} others={}", 79 * GIB, 3 * GIB, 5 * GIB)),
        ("bus", "nvml", format!("total={total} free={free} process={} others={}", 3 * GIB, 5 * GIB)),
        ("mig", "nvml", format!("total={} free={GIB} process={} others={}", 10 * GIB, 3 * GIB, 5 * GIB)),
        ("mps", "nvml", format!("total={total} free={free} process={} others={}", 2 * GIB, 6 * GIB)),
        ("unknown", "nvml", format!("total={total} free={free}")),
        ("none", "cuMemGetInfo", format!("total={total} free={}", 70 * GIB)),
    ] {
        let ran = Traced::new(&program, &[]).env("LD_PRELOAD", &preload).env("FAKE_NVML", machine).run();
        assert_eq!((ran.status(), ran.stderr().as_str()), (0, ""), "{machine}");
        let trace = ran.trace();
        let samples = trace.of(EventName::Sample);
        let values: Vec<_> = samples.iter().map(|row| (row.api.as_str(), row.name.as_str())).collect();
        assert!(
            !values.is_empty() && values.iter().all(|value| *value == (api, expected.as_str())),
            "{machine}: {values:?}"
        );
    }
}

#[test]
fn sample_ms_0_takes_no_device_samples() {
    let include = format!("-I{}/include", env!("CARGO_MANIFEST_DIR"));
    compiled("fakes/cudart.c", "libcudart.so.12", &[]);
    let program = compiled("api/sampled.c", "sampled", &[&include, "libcudart.so.12"]);
    let nvml = compiled("fakes/nvml.c", "libfake-nvml.so", &[]);
    let preload = format!("{}:{}", library("libmemtrace.so").display(), nvml.display());
    let samples = |sample_ms: &str| {
        let run = Traced::new(&program, &[]).env("LD_PRELOAD", &preload).env("FAKE_NVML", "plain");
        run.env("MEMTRACE_SAMPLE_MS", sample_ms).run().trace().of(EventName::Sample).len()
    };
    assert!(samples("10") > 0);
    assert_eq!(samples("0"), 0);
}

/// While the driver frees a block, the trace and the driver disagree about its bytes.
#[test]
fn sample_of_a_device_is_put_off_while_a_call_changes_its_memory() {
    let include = format!("-I{}/include", env!("CARGO_MANIFEST_DIR"));
    compiled("fakes/cudart.c", "libcudart.so.12", &[]);
    let program = compiled("api/slow_free.c", "slow_free", &[&include, "libcudart.so.12"]);
    let nvml = compiled("fakes/nvml.c", "libfake-nvml.so", &[]);
    let preload = format!("{}:{}", library("libmemtrace.so").display(), nvml.display());
    let run = Traced::new(&program, &[]).env("LD_PRELOAD", &preload).env("FAKE_NVML", "plain");
    let ran = run.env("MEMTRACE_SAMPLE_MS", "500").run();
    assert_eq!((ran.status(), ran.stderr().as_str()), (0, ""));
    let trace = ran.trace();
    let free = trace.rows.iter().find(|row| row.delta < 0).unwrap();
    let during = free.ts_ns..free.ts_ns + 790_000_000;
    let samples = trace.of(EventName::Sample);
    let times: Vec<i64> = samples.iter().filter(|row| row.device == 0).map(|row| row.ts_ns).collect();
    assert!(!times.iter().any(|time| during.contains(time)), "{during:?}: {times:?}");
    assert!(times.iter().any(|time| *time >= during.end), "{during:?}: {times:?}");
}

/// A child of `fork` must not wait at its exit for a sample that a thread of its parent was taking.
#[test]
fn fork_during_a_device_sample_leaves_a_child_that_ends() {
    compiled("fakes/cudart.c", "libcudart.so.12", &[]);
    let children = compiled("processes/children.c", "children-sampled", &["libcudart.so.12"]);
    let nvml = compiled("fakes/nvml.c", "libfake-nvml.so", &[]);
    let preload = format!("{}:{}", library("libmemtrace.so").display(), nvml.display());
    let run = Traced::new(&children, &["fork among threads"]).env("LD_PRELOAD", &preload);
    let ran = run.env("FAKE_NVML", "slow").env("MEMTRACE_SAMPLE_MS", "10").run();
    assert_eq!((ran.status(), ran.stderr().as_str()), (0, ""), "{}", ran.stdout());
    assert!(!ran.trace().of(EventName::Sample).is_empty(), "the fork may meet a sample");
}

/// Returns the two values of `LD_PRELOAD` with memtrace and the other library, one for each order.
fn orders(other: &Path) -> [String; 2] {
    let (ours, other) = (library("libmemtrace.so"), other.display());
    [format!("{}:{other}", ours.display()), format!("{other}:{}", ours.display())]
}

#[test]
fn preload_of_another_tool_before_or_after_sees_the_same_calls() {
    let interposer = compiled("other_tools/interposer.c", "libinterposer.so", &[]);
    let path = driver();
    for (how, program) in ways() {
        let arguments = [how, path.to_str().unwrap()];
        let mut alone = untraced(&program, &arguments);
        let alone = alone.env("LD_PRELOAD", &interposer).env("INTERPOSER_TELLS", "1").output().unwrap();
        assert!(alone.status.success(), "{how}");
        for order in orders(&interposer) {
            let ran = Traced::new(&program, &arguments)
                .env("LD_PRELOAD", &order)
                .env("INTERPOSER_TELLS", "1")
                .run();
            // Compare the number of lines, because the program's addresses differ between runs.
            assert_eq!(ran.stdout().lines().count(), String::from_utf8_lossy(&alone.stdout).lines().count());
            assert_eq!(ran.stderr(), String::from_utf8_lossy(&alone.stderr), "{how}, {order}");
            // A tool that is loaded before memtrace calls glibc's dlsym directly, so functions that the
            // program looks up by dlsym are not traced.
            let is_past_us =
                order.ends_with("libmemtrace.so") && ["dlsym", "legacy", "per_thread"].contains(&how);
            if is_past_us {
                assert!(ran.files().is_empty(), "{how}, {order}");
                continue;
            }
            let rows: Vec<String> = ran.trace().rows.iter().map(row_line).collect();
            assert_eq!(rows.join("\n"), ran.stdout().trim_end(), "{how}, {order}");
        }
    }
    for order in orders(&interposer) {
        let ran = Traced::new(&both(), &[]).env("LD_PRELOAD", &order).env("INTERPOSER_TELLS", "1").run();
        assert_eq!((ran.status(), ran.stderr().as_str()), (0, "interposer: 1\n"), "{order}");
        let seen = if order.ends_with("libmemtrace.so") { 2 } else { 10 };
        assert_eq!(ran.trace().rows.len(), seen, "{order}");
    }
}

/// Returns a file of a Debian package that a test needs; with `CI=true` a missing file fails the test.
fn installed(path: &str, package: &str) -> Option<PathBuf> {
    let path = PathBuf::from(path);
    if path.exists() {
        return Some(path);
    }
    missing(&format!("{package} is not installed: run scripts/test, or apt-get install {package}"));
    None
}

/// jemalloc looks up symbols during its initialization; calling back into it at that time would hang.
#[test]
fn preload_beside_jemalloc_runs_and_traces() {
    let library = format!("/usr/lib/{}-linux-gnu/libjemalloc.so.2", std::env::consts::ARCH);
    let Some(jemalloc) = installed(&library, "libjemalloc2") else { return };
    for order in orders(&jemalloc) {
        let ran = Traced::new(&both(), &[]).env("LD_PRELOAD", &order).run();
        assert_eq!((ran.status(), ran.stderr().as_str()), (0, ""), "{order}");
        assert_eq!(ran.trace().rows.len(), 10, "{order}");
    }
}

/// A debugger calls functions of the program, so their return address is in no library. The debugger of the test sets
/// registers of x86-64.
#[cfg(target_arch = "x86_64")]
#[test]
fn dlsym_may_be_called_by_a_debugger_at_any_moment() {
    both();
    let libraries = ["libcudart-of-driver.so.12", "libworks.so.12"];
    let program = compiled("other_tools/debugger.c", "debugger", &libraries);
    let ran = Traced::new(&program, &[driver().to_str().unwrap()]).run();
    assert_eq!(ran.status(), 0, "{}", ran.stderr());
    assert_eq!(ran.stdout(), "dlopen 1\ndlsym 1\ndlsym default 1\nexited 0\n");
    // Only the debugged child has a trace: the rows of the calls of `both.c`.
    assert_eq!(ran.trace().rows.len(), 10);
}
