//! Measures the cost of one block report, compared with one clock read of the same run, and the speed of the
//! writer. `cargo bench --bench record -- writer` measures the writer alone.
//!
//! The hook itself is measured: the benchmark starts itself under the preloaded library and calls the
//! function that torch's allocator would call. Batches are small and far apart, so that the writer
//! thread, which shares the cores, works between them. Every figure is the median of the batches.

use std::ffi::{CStr, c_void};
use std::hint::black_box;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use memtrace_encode::{Encoder, RowSink};
use memtrace_record::clock::system_ns;
use memtrace_record::{Recorder, Session};
use memtrace_trace::config::Settings;
use memtrace_trace::context::Context;
use memtrace_trace::csv::RowWriter;
use memtrace_trace::event::{Block, Payload};
use memtrace_trace::rounding::Rounding;
use memtrace_trace::{Api, Header, Row};

/// The variable that the benchmark sets in its child processes: what to measure, and the number of threads.
const INSIDE: &str = "MEMTRACE_BENCH_INSIDE";
const BATCHES: usize = 301;
const PER_BATCH: usize = 2_000;
const PAUSE: Duration = Duration::from_millis(3);

type Report = unsafe extern "C-unwind" fn(*mut c_void, i64, usize, usize, u64);

fn main() {
    if std::env::var_os(INSIDE).is_some() {
        return inside();
    }
    if std::env::args().any(|argument| argument == "writer") {
        return writer();
    }
    // Builds stand-ins for torch's libraries: the hook forwards its arguments to them, as in a process with
    // torch.
    let torch = tempfile::tempdir().unwrap();
    let mut preload = library().display().to_string();
    for name in ["c10", "torch_cpu"] {
        let built = torch.path().join(format!("lib{name}.so"));
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/programs/fakes/{name}.c"));
        let mut gcc = Command::new("gcc");
        gcc.args(["-O2", "-fPIC", "-shared", "-o"]).arg(&built).arg(source);
        assert!(gcc.status().unwrap().success());
        preload = format!("{preload}:{}", built.display());
    }
    println!("an event alone, in clock reads (aim: 1.5 at most)");
    let folder = tempfile::tempdir().unwrap();
    let session = session_in(folder.path());
    for threads in [1, 2] {
        let (event, clock) = alone(session, threads);
        let ratio = event / clock;
        println!("  {threads} at once {:22} {ratio:.2}   ({event:.1} ns; a clock read is {clock:.1} ns)", "");
    }
    println!("a block report inside an op, with context and requested size, in clock reads (aim: 2 at most)");
    for (name, enabled, inside) in [
        ("one thread", "1", "report 1"),
        ("two threads", "1", "report 2"),
        ("MEMTRACE_ENABLED=0, one thread", "0", "report 1"),
        ("an op of no report, with its row", "1", "op 1"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.env(INSIDE, inside).env("LD_PRELOAD", &preload).env("MEMTRACE_ENABLED", enabled);
        let output = command.env("MEMTRACE_OUT", folder.path()).output().unwrap();
        print!("  {name:32} {}", String::from_utf8_lossy(&output.stdout));
        eprint!("{}", String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{name}: {}", output.status);
    }
    writer();
}

/// Prints the speed of the writer.
fn writer() {
    println!("the writer, in rows a second (aim: 2 million)");
    let file = tempfile::tempfile().unwrap();
    println!("  {:32} {:.2} million", "into a file", rows_per_second(file) / 1e6);
    println!("  {:32} {:.2} million", "into nothing", rows_per_second(io::sink()) / 1e6);
}

/// Returns a session whose trace is in `folder`.
fn session_in(folder: &Path) -> &'static Session {
    let settings = Settings { out: folder.to_owned(), ..Settings::default() };
    Box::leak(Box::new(Session {
        out: folder.to_owned(),
        host: "bench".to_owned(),
        rank: 0,
        rounding: Rounding::default(),
        caching: true,
        describe: |_| {},
        conclude: String::new,
        sample: |_| Vec::new(),
        start_anew: || {},
        say: |line| eprintln!("{line}"),
        fail: |line| eprintln!("{line}"),
        settings,
    }))
}

/// Returns the ns for one event (`Recorder::record` without a hook) and for one clock read.
fn alone(session: &'static Session, threads: usize) -> (f64, f64) {
    let recorder = Recorder::get(session).unwrap();
    let record = |thread: usize, live: bool| {
        let size = if live { 512 } else { -512 };
        recorder.record(|clock_ns| {
            Payload::Block(Block {
                address: 0x7f00_0000_0000 + thread as u64 * 512,
                bytes: size,
                allocated: 512,
                reserved: 2 << 20,
                requested: -1,
                pool: 0,
                deferred: false,
                form: 0,
            })
            .pack(Header::new(clock_ns, Api::CachingAllocator, 0))
        });
    };
    on_threads(threads, |barrier, thread| measure(record, barrier, thread))
}

/// Runs `work` on concurrent threads; returns the means of their figures.
fn on_threads(threads: usize, work: impl Fn(&Barrier, usize) -> (f64, f64) + Sync) -> (f64, f64) {
    let barrier = Barrier::new(threads);
    let medians: Vec<(f64, f64)> = std::thread::scope(|scope| {
        let (barrier, work) = (&barrier, &work);
        let workers: Vec<_> = (0..threads).map(|thread| scope.spawn(move || work(barrier, thread))).collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).collect()
    });
    let mean = |of: fn(&(f64, f64)) -> f64| medians.iter().map(of).sum::<f64>() / medians.len() as f64;
    (mean(|m| m.0), mean(|m| m.1))
}

/// Returns the path of the library that `cargo bench` built, among the dependencies of this program.
fn library() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let path = own.with_file_name("libmemtrace.so");
    assert!(path.exists(), "{} is not built", path.display());
    path
}

/// Runs in the preloaded process: prints the ratio of an event to a clock read, and both in ns.
fn inside() {
    let inside = std::env::var(INSIDE).unwrap();
    let (what, threads) = inside.split_once(' ').unwrap();
    let threads: usize = threads.parse().unwrap();
    let report = find(c"_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE");
    // SAFETY: the signature is c10::reportMemoryUsageToProfiler's.
    let report = unsafe { std::mem::transmute::<*mut c_void, Report>(report) };
    // SAFETY: the signatures are cudaGetDeviceCount's, which installs the op callbacks, and the signatures in torch_cpu.c.
    let (count, begin, end) = unsafe {
        (
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut i32) -> i32>(find(
                c"cudaGetDeviceCount",
            )),
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn()>(find(c"op_begin")),
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn()>(find(c"op_end")),
        )
    };
    // SAFETY: the signature is cudaGetDeviceCount's.
    unsafe { count(&mut 0) };
    let call = |thread: usize, live: bool| {
        let addr = (0x7f00_0000_0000 + thread * 512) as *mut c_void;
        // SAFETY: the signature is `Report`'s; the hook records the address but does not read it. The last
        // argument is CUDA 0.
        unsafe { report(addr, if live { 512 } else { -512 }, 512, 2 << 20, 1) };
    };
    // Calls the hook at the begin or at the end of an op. Each of the two calls counts as half an op.
    let half = |_: usize, begins: bool| {
        // SAFETY: the signatures match torch_cpu.c; an end follows its begin.
        if begins { unsafe { begin() } } else { unsafe { end() } }
    };
    let (event, clock) = on_threads(threads, |barrier, thread| match what {
        "op" => {
            call(thread, true);
            let (half, clock) = measure(half, barrier, thread);
            (half * 2.0, clock)
        }
        _ => {
            // SAFETY: the signature matches torch_cpu.c.
            unsafe { begin() };
            measure(call, barrier, thread)
        }
    });
    println!("{:.2}   ({event:.1} ns; a clock read is {clock:.1} ns)", event / clock);
    io::stdout().flush().unwrap();
}

/// Returns the address of a function of the preloaded libraries.
fn find(name: &CStr) -> *mut c_void {
    // SAFETY: `dlsym` only looks the name up among the loaded libraries.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    assert!(!found.is_null(), "{name:?} was not preloaded");
    found
}

/// Returns the ns for one event and for one clock read, on one of the threads that meet at the barrier.
fn measure(event: impl Fn(usize, bool), barrier: &Barrier, thread: usize) -> (f64, f64) {
    let mut events = Vec::new();
    let mut clocks = Vec::new();
    event(thread, true);
    event(thread, false);
    // By now the writer thread has calibrated the processor's counter.
    std::thread::sleep(Duration::from_secs(1));
    for _ in 0..BATCHES {
        std::thread::sleep(PAUSE);
        barrier.wait();
        clocks.push(timed(|| {
            black_box(system_ns());
        }));
        barrier.wait();
        let mut live = false;
        events.push(timed(|| {
            live = !live;
            event(thread, live);
        }));
    }
    (median(events), median(clocks))
}

fn timed(mut work: impl FnMut()) -> f64 {
    let start = Instant::now();
    for _ in 0..PER_BATCH {
        work();
    }
    start.elapsed().as_nanos() as f64 / PER_BATCH as f64
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

struct Sink<W: Write>(RowWriter<W>);

impl<W: Write> RowSink for Sink<W> {
    type Error = io::Error;
    fn row(&mut self, row: &Row<'_>) -> io::Result<()> {
        self.0.write(row)
    }
}

fn rows_per_second<W: Write>(sink: W) -> f64 {
    const ROWS: usize = 1_000_000;
    let mut sink = Sink(RowWriter::new(sink));
    let mut encoder = Encoder::new(0, 0, std::process::id(), Rounding::default(), true);
    for (id, text) in ["aten::mm", "GPT.h.11.mlp.fc1", "forward"].iter().enumerate() {
        encoder.definitions_mut().define_text(id as u32 + 1, text);
    }
    encoder.definitions_mut().define_context(1, Context { op: 1, module: 2, phase: 3, ..Context::default() });
    let block = Block {
        address: 0,
        bytes: 0,
        allocated: 0,
        reserved: 80 << 30,
        requested: -1,
        pool: 0,
        deferred: false,
        form: 0,
    };
    let start = Instant::now();
    for index in 0..ROWS {
        let size = if index % 2 == 0 { 1 << 20 } else { -(1 << 20) };
        let block = Block {
            address: 0x7f12_3456_0000 + ((index as u64 / 2) % 4096) * 512,
            bytes: size,
            allocated: if size > 0 { 1 << 20 } else { 0 },
            ..block
        };
        let clock_ns = 1_000_000_000 + index as u64 * 1000;
        let header = Header { context: 1, ..Header::new(clock_ns, Api::CachingAllocator, 0) };
        let event = Payload::Block(block).pack(header);
        encoder.encode(4242, &event, &mut sink).unwrap();
    }
    sink.0.flush().unwrap();
    ROWS as f64 / start.elapsed().as_secs_f64()
}
