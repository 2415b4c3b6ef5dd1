//! Measures the speed of reading and replaying a trace, in rows and bytes per second.
//!
//! `cargo bench --bench analysis` makes a trace of a million rows in the target folder and reads it;
//! `-- generate FILE ROWS` only writes one, for `benches/compare.py`; `-- read FILE` reads one.

use std::fs::File;
use std::io::{self, BufWriter};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Instant;

use memtrace_analysis::options::Options;
use memtrace_analysis::read::input::Input;
use memtrace_analysis::read::record::{Columns, Wanted};
use memtrace_analysis::read::stream::TraceFile;
use memtrace_analysis::read::symbols::SymbolTable;
use memtrace_analysis::reports;
use memtrace_analysis::state::replay;
use memtrace_trace::csv::RowWriter;
use memtrace_trace::end_row::{Anomalies, EndText, Ending};
use memtrace_trace::meta::{Device, Meta};
use memtrace_trace::{Category, EventName, Row};

const LAYERS: i64 = 48;
const PARTS: [&str; 4] = ["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"];
const OPS: [&str; 6] =
    ["aten::addmm", "aten::empty", "aten::gelu", "aten::native_layer_norm", "aten::mul", "aten::add"];
const DEVICE_BASE: i64 = 0x7f00_0000_0000;

/// Writes a training run: each step has a forward that keeps blocks, a backward that frees them, and op rows.
struct Generator<'a> {
    writer: RowWriter<BufWriter<File>>,
    row: Row<'a>,
    rows: i64,
    state: u64,
}

impl Generator<'_> {
    /// A pseudo-random sequence that is the same in every run.
    fn random(&mut self) -> i64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        (self.state >> 33).cast_signed()
    }

    fn write(&mut self, row: Row<'_>) -> io::Result<i64> {
        self.row.seq += 1;
        self.row.ts_ns += 900 + self.row.seq % 700;
        let Row { seq, ts_ns, allocated_bytes, active_bytes, reserved_bytes, .. } = self.row;
        self.writer.write(&Row {
            seq,
            ts_ns,
            pid: 4242,
            tid: 4242,
            device: 0,
            allocated_bytes,
            active_bytes,
            reserved_bytes,
            ..row
        })?;
        Ok(seq)
    }

    fn block(&mut self, row: Row<'_>, bytes: i64) -> io::Result<i64> {
        self.row.allocated_bytes += bytes;
        self.row.active_bytes += bytes;
        let event = if bytes > 0 { EventName::Alloc } else { EventName::Free };
        let alloc_id = if bytes > 0 { self.row.seq + 1 } else { row.alloc_id };
        let size = bytes.abs();
        self.write(Row {
            event,
            alloc_id,
            addr: DEVICE_BASE + alloc_id % 65_536 * 2_097_152,
            api: "caching_allocator",
            source: "libc10_cuda.so",
            requested_bytes: size - 12,
            rounded_bytes: size,
            delta_bytes: bytes,
            ..row
        })
    }

    fn step(&mut self, step: i64, modules: &[String]) -> io::Result<()> {
        let mut kept = Vec::new();
        for module in modules {
            for op in OPS {
                let row = Row {
                    module,
                    op,
                    phase: "forward",
                    category: Category::Activation,
                    step,
                    stack_id: 17,
                    ..Row::default()
                };
                let bytes = (self.random() % 8192 + 1) * 512;
                let id = self.block(row, bytes)?;
                kept.push((Row { alloc_id: id, ..row }, bytes));
                let scratch = self.block(row, 4096)?;
                self.block(Row { alloc_id: scratch, ..row }, -4096)?;
                self.write(Row {
                    event: EventName::Op,
                    api: "record_function",
                    source: "libtorch_cpu.so",
                    latency_ns: 5300,
                    ..row
                })?;
            }
        }
        while let Some((row, bytes)) = kept.pop() {
            let own = Row { phase: "backward", category: Category::Temporary, alloc_id: 0, ..row };
            let gradient = self.block(own, bytes)?;
            self.block(row, -bytes)?;
            self.block(Row { alloc_id: gradient, ..own }, -bytes)?;
            if self.row.seq >= self.rows {
                break;
            }
        }
        for (row, bytes) in kept {
            self.block(row, -bytes)?;
        }
        Ok(())
    }
}

fn generate(path: &Path, rows: i64) -> io::Result<()> {
    let meta = Meta {
        schema: memtrace_trace::SCHEMA_VERSION.to_owned(),
        world_size: 1,
        argv: vec!["python".to_owned(), "train.py".to_owned()],
        devices: vec![Device { ordinal: 0, name: "Made up".to_owned(), total_bytes: 80 << 30 }],
        ..Meta::default()
    };
    let json = serde_json::to_string(&meta)?;
    let writer = RowWriter::new(BufWriter::with_capacity(1 << 20, File::create(path)?));
    let mut generator = Generator { writer, row: Row::default(), rows, state: 0x9E37_79B9_7F4A_7C15 };
    generator.write(Row { event: EventName::Meta, api: "memtrace", name: &json, ..Row::default() })?;
    generator.row.reserved_bytes = 64 << 30;
    generator.write(Row {
        event: EventName::SegmentAlloc,
        api: "cudaMalloc",
        source: "libc10_cuda.so",
        addr: DEVICE_BASE,
        delta_bytes: 64 << 30,
        latency_ns: 180_000,
        ..Row::default()
    })?;
    let modules: Vec<String> =
        (0..LAYERS).flat_map(|layer| PARTS.map(|part| format!("GPT.transformer.h.{layer}.{part}"))).collect();
    let mut step = 0;
    while generator.row.seq < rows {
        generator.step(step, &modules)?;
        step += 1;
    }
    let end = EndText {
        ending: Ending::Exit,
        more: "",
        lost: 0,
        anomalies: Anomalies::default(),
        formulas: Some(0),
    };
    generator.write(Row {
        event: EventName::End,
        api: "memtrace",
        name: &end.to_string(),
        ..Row::default()
    })?;
    generator.writer.flush()
}

/// Seconds of wall time, and of CPU time on all cores.
#[derive(Clone, Copy)]
struct Seconds {
    wall: f64,
    cpu: f64,
}

/// Runs `what` three times. Returns the least time by the clock and the least CPU time.
fn time(mut what: impl FnMut()) -> Seconds {
    let cpu = || {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        now.tv_sec as f64 + now.tv_nsec as f64 / 1e9
    };
    let mut once = || {
        let (start, cpu_start) = (Instant::now(), cpu());
        what();
        Seconds { wall: start.elapsed().as_secs_f64(), cpu: cpu() - cpu_start }
    };
    let rounds = [once(), once(), once()];
    let least = |get: fn(&Seconds) -> f64| rounds.iter().map(get).fold(f64::INFINITY, f64::min);
    Seconds { wall: least(|round| round.wall), cpu: least(|round| round.cpu) }
}

fn read(path: &Path) {
    let trace = TraceFile::open(path).expect("a trace");
    let mut rows = 0;
    let print_speed = |name: &str, Seconds { wall, cpu }: Seconds, rows: u64| {
        let (rows, gb) = (rows as f64, trace.size as f64 / 1e9);
        println!(
            "{name:<22} {wall:7.3} s  {:6.1} M rows/s  {:5.2} GB/s  {:4.0} ns of a core a row",
            rows / 1e6 / wall,
            gb / wall,
            cpu * 1e9 / rows
        );
    };
    for (name, columns) in [
        ("scan, no column", Wanted::all_events(Columns::of(&[]))),
        ("scan, replay's columns", replay::COLUMNS),
        ("scan, all columns", Wanted::all_events(Columns::ALL)),
    ] {
        let seconds = time(|| {
            rows = 0;
            let texts = SymbolTable::default();
            let visit = |_: &_| {
                rows += 1;
                ControlFlow::Continue(())
            };
            trace.read(columns, false, &texts, visit).expect("sound rows");
        });
        print_speed(name, seconds, rows);
    }
    for name in ["summary", "peak", "check"] {
        let report = reports::find(name).expect("a report");
        let mut options = Options::default();
        for flag in report.flags().iter().filter(|flag| !flag.default.is_empty()) {
            options.values.insert(flag.name, flag.default.to_owned());
        }
        let seconds = time(|| {
            let input = Input::open(path).expect("a trace");
            report.run(&[input], &options).expect("an answer");
        });
        print_speed(name, seconds, rows);
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["generate", file, rows] => {
            generate(Path::new(file), rows.parse().expect("a number of rows")).expect("a file");
        }
        ["read", file] => read(Path::new(file)),
        [] => {
            let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("analysis.csv");
            generate(&file, 1_000_000).expect("a file");
            read(&file);
            std::fs::remove_file(&file).ok();
        }
        _ => {
            eprintln!("usage: [generate FILE ROWS | read FILE]");
            std::process::exit(2);
        }
    }
}
