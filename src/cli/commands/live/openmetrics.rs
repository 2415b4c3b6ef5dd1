//! `memtrace live --openmetrics FILE`: the state of a running trace as OpenMetrics text, which Prometheus and the
//! textfile collector of node_exporter read.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use memtrace_analysis::exports::Out;
use memtrace_analysis::state::group::{Key, without_mark};
use memtrace_analysis::state::live_run::{LiveProcess, LiveRun};
use memtrace_analysis::state::replay::{Device, Metric, is_gpu};
use memtrace_trace::EventName;
use memtrace_trace::files::process_name;
use memtrace_trace::text::printable;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

/// The labels of a sample.
type Labels = Vec<(&'static str, String)>;

/// Replaces `file` atomically, so that a reader of the file never sees a partial text. With `rank`, only the
/// processes of that rank are included.
///
/// # Errors
/// When `file` cannot be written.
pub(super) fn write(run: &LiveRun, file: &Path, rank: Option<i32>) -> Result<()> {
    let text = text(run, rank)?;
    let read = run.files();
    let mut out = Out::beside(file, read.iter().map(PathBuf::as_path))?;
    out.write_all(text.as_bytes())?;
    out.finish()?;
    Ok(())
}

/// The families of metrics, in the order of the text.
#[derive(Default)]
struct Families {
    processes: Gauge,
    about: Family<Labels, Gauge>,
    running: Family<Labels, Gauge>,
    last_row: Family<Labels, Gauge<f64, std::sync::atomic::AtomicU64>>,
    step: Family<Labels, Gauge>,
    memory: Family<Labels, Gauge>,
    peak: Family<Labels, Gauge>,
    category: Family<Labels, Gauge>,
    size: Family<Labels, Gauge>,
    ooms: Family<Labels, Counter>,
    retries: Family<Labels, Counter>,
    rows: Family<Labels, Counter>,
    lost: Family<Labels, Counter>,
}

/// Returns the complete OpenMetrics text.
fn text(run: &LiveRun, rank: Option<i32>) -> Result<String> {
    let families = Families::default();
    for process in &run.processes {
        if rank.is_none_or(|rank| rank == process.meta.rank) {
            families.add(process);
        }
    }
    let mut text = String::new();
    encode(&mut text, &families.registry()).context("cannot encode the metrics")?;
    Ok(text)
}

impl Families {
    fn registry(self) -> Registry {
        let mut registry = Registry::with_prefix("memtrace");
        let all = &mut registry;
        all.register("processes", "Traced processes of the newest run", self.processes);
        all.register("process_info", "The run, program and simulated GPU of a process", self.about);
        all.register("process_running", "1 until the trace of the process has ended", self.running);
        let help = "Time of the newest row of the trace, since 1970";
        all.register_with_unit("last_row_timestamp", help, Unit::Seconds, self.last_row);
        all.register("step", "The last training step with work; -1 before the first", self.step);
        let help =
            "Device memory now: allocated, active, reserved, or used by everything on the device (sampled)";
        all.register_with_unit("memory", help, Unit::Bytes, self.memory);
        all.register_with_unit(
            "memory_peak",
            "The highest value of each total so far",
            Unit::Bytes,
            self.peak,
        );
        all.register_with_unit("category", "Allocated memory by category", Unit::Bytes, self.category);
        all.register_with_unit("device_size", "The memory of the device", Unit::Bytes, self.size);
        all.register("ooms", "Requests that ran out of memory", self.ooms);
        let help = "Failed calls that the allocator answered by freeing cached memory and trying again";
        all.register("retries", help, self.retries);
        all.register("rows", "Rows of the trace", self.rows);
        all.register("lost_events", "Events that the tracer dropped", self.lost);
        registry
    }

    fn add(&self, process: &LiveProcess) {
        let (meta, replay) = (&process.meta, &process.replay);
        let labels: Labels = vec![
            ("host", printable(&meta.host).into_owned()),
            ("rank", meta.rank.to_string()),
            ("process", printable(&process_name(&process.path)).into_owned()),
        ];
        let with = |more: &[(&'static str, String)]| -> Labels { [&labels, more].concat() };
        self.processes.inc();
        let about = with(&[
            ("run", printable(&meta.run_id).into_owned()),
            ("program", printable(&meta.argv.join(" ")).into_owned()),
            ("simulated", printable(meta.phantom["card"].as_str().unwrap_or_default()).into_owned()),
        ]);
        self.about.get_or_create(&about).set(1);
        self.running.get_or_create(&labels).set(i64::from(!process.ended));
        let last_row = meta.start_unix_ns.saturating_add(replay.ts_ns);
        self.last_row.get_or_create(&labels).set(last_row as f64 / 1e9);
        self.step.get_or_create(&labels).set(replay.last_step());
        let ooms = replay.counts.of(EventName::Oom);
        self.ooms.get_or_create(&labels).inc_by(ooms);
        self.retries.get_or_create(&labels).inc_by(replay.counts.retries.count());
        self.rows.get_or_create(&labels).inc_by(replay.counts.rows);
        self.lost.get_or_create(&labels).inc_by(replay.counts.lost);
        for device in replay.devices().iter().filter(|device| is_gpu(device.ordinal)) {
            let labels = with(&[("device", device.ordinal.to_string())]);
            self.add_device(process, device, &labels);
        }
    }

    fn add_device(&self, process: &LiveProcess, device: &Device, labels: &Labels) {
        let with = |name: &'static str, value: &str| -> Labels {
            [labels.as_slice(), &[(name, value.to_owned())]].concat()
        };
        for (metric, name) in [
            (Metric::Allocated, "allocated"),
            (Metric::Active, "active"),
            (Metric::Reserved, "reserved"),
            (Metric::Used, "used"),
        ] {
            if metric != Metric::Used || device.is_sampled() {
                let labels = with("total", name);
                self.memory.get_or_create(&labels).set(device.totals.get(metric));
                self.peak.get_or_create(&labels).set(device.peak(metric).bytes);
            }
        }
        let blocks = process.replay.live_on(device.ordinal, false);
        for (category, group) in Key::CATEGORY.groups(&blocks, &process.symbols) {
            // Remove the mark `*` of inferred categories: otherwise, inferred and recorded values would be
            // different series.
            let labels = with("category", without_mark(&category).0);
            self.category.get_or_create(&labels).inc_by(group.bytes);
        }
        let size = process.meta.total_bytes(device.ordinal);
        if size > 0 {
            self.size.get_or_create(labels).set(size);
        }
    }
}
