//! The report page in a real browser, and the views of a terminal in a real terminal.
//!
//! `tests/scripts/checkers/report_page.py` drives headless Chromium; `scripts/env browser` installs the
//! programs for both. With `CI=true` a missing program fails the tests; otherwise they are skipped with a
//! message.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use memtrace_analysis::testing::TraceBuilder;
use memtrace_trace::meta::{Device, Meta};
use memtrace_trace::{Category, EventName, Row};
use serde_json::Value;
use tempfile::TempDir;

use crate::common::command::{fixtures, memtrace};
use crate::common::installed::{cache, missing};
use crate::common::running::{end, wait_until};
use crate::common::terminal::Terminal;

fn run(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{command:?}\n{stdout}\n{stderr}");
    stdout.into_owned()
}

fn fixture(name: &str) -> PathBuf {
    fixtures().join(name)
}

/// Returns the Python that has playwright, or `None` if it is not installed and not required.
fn browser() -> Option<PathBuf> {
    let python = cache().join("browser/bin/python");
    if python.exists() && Path::new("/usr/bin/chromium").exists() {
        return Some(python);
    }
    missing("no browser: run scripts/env browser");
    None
}

/// The report page of some traces in a folder, and the Python that checks it.
struct Page {
    folder: TempDir,
    python: PathBuf,
}

impl Page {
    fn open(traces: &[&Path], more: &[&str]) -> Option<Page> {
        let python = browser()?;
        let folder = TempDir::new().unwrap();
        let page = folder.path().join("report.html");
        run(memtrace().arg("report").args(traces).args(more).arg("-o").arg(&page));
        let size = page.metadata().unwrap().len();
        assert!(size < 5_000_000, "{size} bytes");
        Some(Page { folder, python })
    }

    /// Writes the JSON answer of another command next to the page. Returns its path.
    fn answer(&self, name: &str, arguments: &[&str], traces: &[&Path]) -> String {
        let json = run(memtrace().args(arguments).args(traces).args(["--json", "--top", "1000"]));
        let file = self.folder.path().join(name);
        std::fs::write(&file, json).unwrap();
        file.display().to_string()
    }

    fn check(&self, name: &str, arguments: &[&str]) -> String {
        check_all(&[(self, name, arguments)])
    }
}

/// Makes several checks in one browser. Returns what they printed.
fn check_all(checks: &[(&Page, &str, &[&str])]) -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts/checkers/report_page.py");
    let mut command = Command::new(&checks[0].0.python);
    command.arg(script);
    for (number, (page, name, arguments)) in checks.iter().enumerate() {
        command.args((number > 0).then_some("--"));
        command.arg(name).arg(page.folder.path().join("report.html")).args(*arguments);
    }
    let printed = run(&mut command);
    print!("{printed}");
    printed
}

#[test]
fn report_page_has_the_figures_of_peak() {
    let mut pages = Vec::new();
    for name in ["gpt", "conv", "oom-fragments"] {
        let trace = fixture(name);
        let Some(page) = Page::open(&[&trace], &[]) else { return };
        let answers = ["module", "category", "op", "phase", "step"]
            .map(|by| page.answer(&format!("{by}.json"), &["peak", "--by", by], &[&trace]));
        pages.push((page, answers));
    }
    let answers: Vec<Vec<&str>> =
        pages.iter().map(|(_, answers)| answers.iter().map(String::as_str).collect()).collect();
    let checks: Vec<_> =
        pages.iter().zip(&answers).map(|((page, _), answers)| (page, "peak", answers.as_slice())).collect();
    check_all(&checks);
}

/// Shows ten thousand ranks on the page and in the terminal, from digests that a script generates.
#[test]
fn ranks_by_the_thousand_are_a_map_on_a_page_and_in_forty_lines() {
    let Some(python) = browser() else { return };
    let ray = cache().join("ray");
    if !ray.join(".list").exists() {
        return missing("DuckDB is not installed: run scripts/env ray");
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = TempDir::new().unwrap();
    let mut answer = Command::new(ray.join("bin/python"));
    answer.arg(root.join("tests/scripts/package/many_ranks.py")).arg(folder.path()).args(["60", "120"]);
    run(answer.env("PYTHONPATH", root.join("python")).env_remove("LD_PRELOAD"));
    let checker = root.join("tests/scripts/checkers/ranks_page.py");
    print!("{}", run(Command::new(python).arg(checker).arg(folder.path().join("ranks.html"))));
}

#[test]
fn report_page_follows_wheel_drag_click_keys_and_search() {
    if let Some(page) = Page::open(&[&fixture("gpt")], &[]) {
        page.check("use", &[]);
    }
}

#[test]
fn report_page_goes_to_the_oom() {
    let mut pages = Vec::new();
    for name in ["oom-fragments", "oom-big", "oom-outside"] {
        let trace = fixture(name);
        let Some(page) = Page::open(&[&trace], &[]) else { return };
        let answer = page.answer("oom.json", &["oom"], &[&trace]);
        pages.push((page, answer));
    }
    let answers: Vec<[&str; 1]> = pages.iter().map(|(_, answer)| [answer.as_str()]).collect();
    let checks: Vec<_> =
        pages.iter().zip(&answers).map(|((page, _), answer)| (page, "oom", answer.as_slice())).collect();
    check_all(&checks);
}

#[test]
fn report_page_shows_the_curve_under_each_advice() {
    let page = |name: &str| {
        let trace = fixture(name);
        let page = Page::open(&[&trace], &[])?;
        let answer = page.answer("advise.json", &["advise"], &[&trace]);
        Some((page, answer))
    };
    let (Some((gpt, of_gpt)), Some((conv, of_conv))) = (page("gpt"), page("conv")) else { return };
    // If no known change lowers the peak, the page says so.
    let without = Page::open(&[&fixture("oom-big")], &[]).unwrap();
    check_all(&[
        (&gpt, "advice", &[&of_gpt]),
        (&conv, "advice", &[&of_conv]),
        (&without, "no_advice", &["no known change lowers this peak"]),
    ]);
}

/// Returns a trace without tags that has an OOM in the first forward. Then all live blocks are freed. With
/// `goes_on`, the program allocates once more before it ends.
fn oom_without_tags(goes_on: bool) -> TempDir {
    const MIB: i64 = 1 << 20;
    let gpu = Device { ordinal: 0, name: "Test GPU".to_owned(), total_bytes: 200 * MIB };
    let mut trace = TraceBuilder::new(Meta { world_size: 1, devices: vec![gpu], ..Meta::default() });
    trace.segment(160 * MIB);
    let forward =
        Row { op: "aten::relu", phase: "forward", category: Category::Activation, step: 0, ..Row::default() };
    let parameter = trace.alloc(100 * MIB, Row { op: "aten::empty", ..Row::default() });
    let activation = trace.alloc(50 * MIB, forward);
    let oom = Row { device: 0, event: EventName::Oom, status: 2, requested_bytes: 90 * MIB, ..forward };
    trace.change(oom, [0; 3]);
    trace.free(activation, 50 * MIB, forward);
    trace.free(parameter, 100 * MIB, Row { op: "aten::empty", ..Row::default() });
    if goes_on {
        trace.alloc(MIB, Row { op: "aten::empty", ..Row::default() });
    }
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("host.r0.1.csv"), trace.finish()).unwrap();
    folder
}

#[test]
fn page_oom_and_peak_at_give_a_block_one_category_at_the_oom_and_at_the_peak() {
    // Whether the program goes on after its frees decides the category: the block is a parameter if it does
    // not, and has no category if it does. The OOM and the peak must agree.
    for (goes_on, category) in [(false, "parameter *"), (true, "(no category)")] {
        let folder = oom_without_tags(goes_on);
        let oom = run(memtrace().arg("oom").arg(folder.path()));
        assert!(oom.lines().any(|line| line.contains("100.00 MiB") && line.contains(category)), "{oom}");
        let snapshot =
            run(memtrace().args(["peak", "--mem-tracker", "--json", "--at", "oom"]).arg(folder.path()));
        let snapshot: Value = serde_json::from_str(&snapshot).unwrap();
        let parameters = if goes_on { 0 } else { 100 << 20 };
        assert_eq!(snapshot["devices"][0]["Parameter"], parameters, "{snapshot}");
        let Some(page) = Page::open(&[folder.path()], &[]) else { return };
        page.check("oom_categories", &[category, "activation"]);
    }
}

/// A page whose blocks have no rows in one step still has their bytes, and names them. Its numbers are rounded as
/// in the command: a sixteenth is 6.2 %, and 1,250 ns are 1.2 µs.
#[test]
fn report_page_counts_the_blocks_of_a_step_without_detail() {
    const MIB: i64 = 1 << 20;
    let gpu = Device { ordinal: 0, name: "Test GPU".to_owned(), total_bytes: 8 << 30 };
    let mut trace = TraceBuilder::new(Meta { world_size: 1, devices: vec![gpu], ..Meta::default() });
    let segment = Row { device: 0, event: EventName::SegmentAlloc, addr: 3 << 40, ..Row::default() };
    trace.change(Row { api: "cudaMalloc", delta_bytes: 4 << 30, ..segment }, [0, 0, 4 << 30]);
    // No row has a tag, so the command infers that the first block, which lives to the end, is a parameter.
    trace.alloc(100 * MIB, Row { op: "aten::empty", ..Row::default() });
    let forward = Row { phase: "forward", category: Category::Activation, step: 0, ..Row::default() };
    let brief = |trace: &mut TraceBuilder, delta_bytes: i64| {
        let row = Row { device: 0, event: EventName::Brief, delta_bytes, ..forward };
        trace.change(row, [delta_bytes, delta_bytes, 0])
    };
    let highest = brief(&mut trace, 1500 * MIB);
    brief(&mut trace, -1500 * MIB);
    let detailed = Row { op: "aten::relu", step: 1, ..forward };
    let (born, large) = (trace.alloc(MIB, detailed), trace.alloc(3 << 30, detailed));
    trace.free(born, MIB, Row { ts_ns: (born - 1) * 1000 + 1250, ..detailed });
    trace.free(large, 3 << 30, detailed);
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("host.r0.1.csv"), trace.finish()).unwrap();
    let Some(page) = Page::open(&[folder.path()], &[]) else { return };
    let (at, short) = (((highest - 1) * 1000).to_string(), ((born - 1) * 1000).to_string());
    page.check("without_detail", &[&at, &short]);
}

#[test]
fn report_page_stacks_the_parts_that_grow() {
    let trace = fixture("leaks");
    let Some(page) = Page::open(&[&trace], &[]) else { return };
    let answer = page.answer("leaks.json", &["leaks"], &[&trace]);
    page.check("growth", &[&answer]);
}

#[test]
fn report_page_compares_two_runs() {
    let (before, after) = (fixture("gpt"), fixture("conv"));
    let Some(page) = Page::open(&[&before, &after], &[]) else { return };
    let answer = page.answer("diff.json", &["diff", "--by", "module"], &[&before, &after]);
    let other = Page::open(&[&before], &["--against", after.to_str().unwrap()]).unwrap();
    check_all(&[(&page, "compare", &[&answer]), (&other, "compare", &[&answer])]);
}

#[test]
fn report_page_shows_ranks_side_by_side() {
    if let Some(page) = Page::open(&[&fixture("sharded")], &[]) {
        page.check("ranks", &["4"]);
    }
}

/// Returns a folder with a trace: a sample of 600 MiB in use, and then `blocks` blocks of 100 MiB.
fn sampled_trace(blocks: usize) -> TempDir {
    let gpu = Device { ordinal: 0, name: "Test GPU".to_owned(), total_bytes: 4 << 30 };
    let mut trace = TraceBuilder::new(Meta { world_size: 1, devices: vec![gpu], ..Meta::default() });
    trace.segment(2 << 20);
    trace.alloc(1 << 20, Row::default());
    let free = (4_i64 << 30) - (600 << 20);
    let name = &format!("total={} free={free}", 4_i64 << 30);
    let sample = Row { event: EventName::Sample, device: 0, device_free_bytes: free, name, ..Row::default() };
    trace.change(sample, [0; 3]);
    for _ in 0..blocks {
        trace.segment(100 << 20);
        trace.alloc(100 << 20, Row::default());
    }
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("host.r0.1.csv"), trace.finish()).unwrap();
    folder
}

#[test]
fn report_page_draws_the_sampled_memory_above_the_allocated_memory() {
    let folder = sampled_trace(8);
    if let Some(page) = Page::open(&[folder.path()], &[]) {
        page.check("sampled", &[]);
    }
}

#[test]
fn report_page_hides_a_sampled_line_that_flattens_the_others() {
    let folder = sampled_trace(0);
    if let Some(page) = Page::open(&[folder.path()], &[]) {
        page.check("flat", &[]);
    }
}

/// The page lists the holders of retained memory like the report, even if a name is markup. Without a search
/// the list is hidden.
#[test]
fn report_page_names_the_holders_of_retained_memory() {
    let mut trace = TraceBuilder::new(Meta { world_size: 1, ..Meta::default() });
    trace.alloc(1 << 20, Row::default());
    let mark = |trace: &mut TraceBuilder, text: Value| {
        let row = Row { event: EventName::Mark, api: "retained", ..Row::default() };
        trace.change(Row { name: &text.to_string(), ..row }, [0; 3]);
    };
    let holder = serde_json::json!({
        "walk": 1, "holder": "list `<img src=x onerror=owned=1>` (train.py:41)", "verdict": "grows", "bytes": 360 << 20,
        "tensors": 0, "graphs": 120, "nodes": 960, "first_step": 0, "last_step": 119, "steps": 120,
    });
    mark(&mut trace, holder);
    let search = serde_json::json!({ "walk": 1, "why": "exit", "step": 120, "is_whole": false, "ms": 7 });
    mark(&mut trace, search);
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("host.r0.1.csv");
    std::fs::write(&path, trace.finish()).unwrap();
    let Some(page) = Page::open(&[&path], &[]) else { return };
    let report = run(memtrace().args(["leaks", "--holders"]).arg(&path));
    let line = "3.00 MiB a step: list `<img src=x onerror=owned=1>` (train.py:41) keeps 120 autograd graphs, 360.00 MiB";
    assert!(report.contains(line), "{report}");
    let without = Page::open(&[&fixture("gpt")], &[]).unwrap();
    check_all(&[
        (&page, "retained", &["step 120: the program ended", line, "is incomplete"]),
        (&without, "retained", &[]),
    ]);
}

#[test]
fn report_page_escapes_names_that_are_markup() {
    let names = ["</script><script>owned=1</script>", "<img src=x onerror=owned=1>", "<!--{script}-->"];
    let argv = names.map(str::to_owned).to_vec();
    let gpu = Device { ordinal: 0, name: names[1].to_owned(), total_bytes: 1 << 30 };
    let mut trace = TraceBuilder::new(Meta { world_size: 1, argv, devices: vec![gpu], ..Meta::default() });
    for (step, name) in names.iter().enumerate() {
        let row = Row { module: name, op: name, phase: name, step: step as i64, ..Row::default() };
        let block = trace.alloc(1 << 20, Row { category: Category::Activation, ..row });
        // The tag makes the block optimizer state, which some changes of `memtrace advise` lower, so that the
        // page shows advice.
        let tagged = Row { category: Category::OptimizerState, ..row };
        trace.tag(block, 1 << 20, Row { category: Category::Activation, ..row }, tagged);
    }
    // JavaScript's objects have a property of this name.
    trace.alloc(1 << 20, Row { phase: "constructor", step: 3, ..Row::default() });
    let row = Row { device: 0, event: EventName::Oom, module: names[0], op: names[1], ..Row::default() };
    trace.change(Row { requested_bytes: 1 << 24, status: 2, ..row }, [0; 3]);
    let folder = TempDir::new().unwrap();
    // The name of the folder is markup, too, because the page's title contains it.
    let path = folder.path().join("<b>x<!--{style}-->");
    std::fs::create_dir(&path).unwrap();
    std::fs::write(path.join("host.r0.1.csv"), trace.finish()).unwrap();
    if let Some(page) = Page::open(&[&path], &[]) {
        page.check("hostile", &[]);
    }
}

/// Returns twelve steps of one second each, with host samples that grow by 64 MiB a step; with `on_gpu` also
/// with blocks of a GPU.
fn sampled_host(on_gpu: bool, end: &str) -> TempDir {
    const MIB: i64 = 1 << 20;
    let devices = vec![Device { ordinal: 0, name: "Test GPU".to_owned(), total_bytes: 4 << 30 }];
    let mut trace = TraceBuilder::new(Meta { world_size: 1, devices, ..Meta::default() });
    for step in 0..12_i64 {
        let ts_ns = (step + 1) * 1_000_000_000;
        let row = Row { step, ts_ns, phase: "forward", module: "Net.fc", ..Row::default() };
        if on_gpu {
            trace.alloc(16 * MIB, Row { category: Category::Activation, ..row });
        }
        // A row of a CPU tensor, as MEMTRACE_HOST_TENSORS=1 records it.
        let event = EventName::HostAlloc;
        // The id of a block is the number of its row.
        let alloc_id = if on_gpu { 3 + 5 * step } else { 2 + 4 * step };
        let row = Row { event, device: -2, alloc_id, addr: (step + 1) << 32, ..row };
        let row = Row { delta_bytes: 32 * MIB, requested_bytes: 32 * MIB, api: "cpu_allocator", ..row };
        trace.change(row, [32 * MIB, 32 * MIB, 0]);
        let anon = (100 + 64 * step) * MIB;
        let rss = anon + 60 * MIB;
        let current = rss + 200 * MIB;
        // One sample lacks the limit, because the kernel hides a figure now and then.
        let limit = if step == 5 { String::new() } else { format!(" limit={}", 1000 * MIB) };
        for (api, name) in [
            ("proc_status", format!("rss={rss} anon={anon} file={} shmem={}", 40 * MIB, 20 * MIB)),
            ("cgroup", format!("current={current}{limit} file={} kills=0", 200 * MIB)),
            ("child", format!("pss={} rss={} processes=2 what=(total)", 50 * MIB, 70 * MIB)),
        ] {
            let (event, ts_ns) = (EventName::Sample, ts_ns + 1000);
            trace.raw(Row { event, api, device: -1, step: -1, ts_ns, name: &name, ..Row::default() });
        }
    }
    trace.raw(Row { event: EventName::End, ts_ns: 13_000_000_000, name: end, ..Row::default() });
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("vm.r0.1.csv"), trace.unfinished()).unwrap();
    folder
}

#[test]
fn report_page_has_the_memory_of_the_host_below_that_of_the_gpu() {
    let folder = sampled_host(true, "killed signal=9 kills=1 lost=0");
    let Some(page) = Page::open(&[folder.path()], &[]) else { return };
    let peak = "peak 864.00 MiB resident at 12.00 s, step 11, forward";
    // A run without a GPU: its page must show the CPU tensors, too.
    let folder = sampled_host(false, "exit lost=0");
    let no_gpu = Page::open(&[folder.path()], &[]).unwrap();
    // A run with a GPU: `--device cpu` makes a page of CPU tensors in place of the GPU's.
    let folder = sampled_host(true, "exit lost=0");
    let of_cpu = Page::open(&[folder.path()], &["--device", "cpu"]).unwrap();
    let no_host = Page::open(&[&fixture("gpt")], &[]).unwrap();
    let killed = "because the memory of the container ran out";
    check_all(&[
        (&page, "host", &["GPU 0", peak, "limit of 1000.00 MiB", killed]),
        (&no_gpu, "host", &["host", peak, "limit of 1000.00 MiB", ""]),
        (&no_gpu, "host_blocks", &["384.00 MiB"]),
        (&of_cpu, "host_blocks", &["384.00 MiB"]),
        (&no_host, "no_host", &[]),
    ]);
}

#[test]
fn report_page_says_that_a_run_used_no_gpu_memory() {
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("host.r0.1.csv"), TraceBuilder::default().finish()).unwrap();
    if let Some(page) = Page::open(&[folder.path()], &[]) {
        page.check("empty", &[]);
    }
}

/// Writes a training run of about `rows` rows: each step keeps what its layers make until backward.
fn training(path: &Path, rows: i64) {
    let devices = vec![Device { ordinal: 0, name: "Made up".to_owned(), total_bytes: 16 << 30 }];
    let mut trace = TraceBuilder::new(Meta { world_size: 1, devices, ..Meta::default() });
    trace.segment(4 << 30);
    let modules: Vec<String> =
        (0..96).map(|n| format!("GPT.h.{}.{}", n / 4, ["ln", "attn", "fc", "out"][n % 4])).collect();
    let (mut row_count, mut step, mut state) = (0, 0, 1_u64);
    while row_count < rows {
        let mut kept = Vec::new();
        for module in &modules {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let bytes = ((state >> 40) as i64 % 4096 + 1) * 512;
            let row = Row { module, op: "aten::mm", phase: "forward", step, ..Row::default() };
            let row = Row { category: Category::Activation, ..row };
            kept.push((row, bytes, trace.alloc(bytes, row)));
        }
        for (row, bytes, id) in kept.into_iter().rev() {
            let own = Row { phase: "backward", category: Category::Temporary, ..row };
            let gradient = trace.alloc(bytes, own);
            trace.free(id, bytes, row);
            trace.free(gradient, bytes, own);
        }
        row_count += modules.len() as i64 * 4;
        step += 1;
    }
    std::fs::write(path, trace.finish()).unwrap();
}

#[test]
fn report_page_of_many_events_is_small_exact_and_smooth() {
    // `scripts/reading-bench page` does the same with ten million rows.
    let folder = TempDir::new().unwrap();
    let trace = folder.path().join("host.r0.1.csv");
    training(&trace, 400_000);
    let Some(page) = Page::open(&[&trace], &[]) else { return };
    let answers: Vec<String> = ["module", "category"]
        .iter()
        .map(|by| page.answer(&format!("{by}.json"), &["peak", "--by", by], &[&trace]))
        .collect();
    let answers: Vec<&str> = answers.iter().map(String::as_str).collect();
    let printed = check_all(&[(&page, "peak", &answers), (&page, "smooth", &["50"]), (&page, "finer", &[])]);
    // Runs the command that the page prints for a page with shorter intervals.
    let finer = printed.lines().last().unwrap();
    let words: Vec<&str> = finer.split_whitespace().skip(1).collect();
    let finer = folder.path().join("finer.html");
    run(memtrace().args(words).arg("-o").arg(&finer));
    assert!(finer.metadata().unwrap().len() > 0);
}

#[test]
fn timeline_in_the_terminal_shows_the_peak_phases_and_steps() {
    let trace = fixture("gpt");
    let text = run(memtrace().args(["timeline", "--width", "90", "--height", "10"]).arg(&trace));
    assert!(!text.contains('\x1b'), "colour is for terminals");
    for part in
        ["▼ peak", "138.00 MiB ┤", "phase  ", "step  ", "F forward", "B backward", "█ allocated", "╎1"]
    {
        assert!(text.contains(part), "{part}\n{text}");
    }
    let curve: Vec<&str> = text.lines().filter(|line| line.contains(['│', '┤', '┼'])).collect();
    assert_eq!(curve.len(), 11, "{text}");
    assert!(curve.iter().all(|line| line.chars().count() <= 90), "{text}");
    let painted = run(memtrace().args(["timeline", "--color", "always", "--by", "category"]).arg(&trace));
    assert!(painted.contains("\x1b[38;5;"));
    let json: Value =
        serde_json::from_str(&run(memtrace().args(["timeline", "--json"]).arg(&trace))).unwrap();
    let peak: Value = serde_json::from_str(&run(memtrace().args(["peak", "--json"]).arg(&trace))).unwrap();
    let highest = |name: &str| json[name].as_array().unwrap().iter().filter_map(Value::as_i64).max();
    assert_eq!(highest("high_bytes"), peak["peak"]["bytes"].as_i64());
    // In the interval of the peak, the sum of the categories must equal the total.
    let at = (peak["peak"]["ts_ns"].as_i64().unwrap() - json["start_ns"].as_i64().unwrap())
        / json["width_ns"].as_i64().unwrap();
    let parts: i64 = json["by_category_bytes"]
        .as_object()
        .unwrap()
        .values()
        .map(|bytes| bytes[at as usize].as_i64().unwrap())
        .sum();
    assert_eq!(Some(parts), peak["peak"]["bytes"].as_i64());
}

/// Returns a trace that the test writes in two pieces, as a running program would.
fn pieces() -> Vec<u8> {
    let devices = vec![Device { ordinal: 0, name: "Test GPU".to_owned(), total_bytes: 80 << 20 }];
    let argv = vec!["python".to_owned(), "train.py".to_owned()];
    let mut trace = TraceBuilder::new(Meta { world_size: 1, devices, argv, ..Meta::default() });
    trace.segment(40 << 20);
    for step in 0..10 {
        let row = Row { step, module: "Net.fc", op: "aten::mm", phase: "forward", ..Row::default() };
        trace.alloc(2 << 20, Row { category: Category::Activation, ..row });
        let scratch = trace.alloc(1 << 20, Row { module: "Net.tmp", ..row });
        trace.free(scratch, 1 << 20, row);
    }
    trace.finish()
}

#[test]
fn live_follows_a_run_from_before_its_start_to_its_end() {
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("out");
    let command = format!("{} live {} --interval 0.1", env!("CARGO_BIN_EXE_memtrace"), out.display());
    let Some(terminal) = Terminal::open(110, 40, &command) else { return };
    terminal.wait("waiting for a trace");
    std::fs::create_dir(&out).unwrap();
    let bytes = pieces();
    let (first, rest) = bytes.split_at(bytes.len() / 2);
    // Writes the first half of the trace, which ends in the middle of a line.
    let file = out.join("host.r0.1.csv");
    std::fs::write(&file, first).unwrap();
    let screen = terminal.wait("Net.fc");
    for part in [
        "train.py",
        "Test GPU",
        "allocated",
        "reserved",
        "40.00 MiB of 80.00 MiB free",
        "by module",
        "q quit",
    ] {
        assert!(screen.contains(part), "{part}\n{screen}");
    }
    assert!(!screen.contains("step 9"), "{screen}");
    terminal.keys("c");
    terminal.wait("activation");
    terminal.keys("Space");
    terminal.wait("PAUSED");
    // While the view is paused, new rows change nothing.
    std::fs::OpenOptions::new()
        .append(true)
        .open(&file)
        .and_then(|mut file| std::io::Write::write_all(&mut file, rest))
        .unwrap();
    std::thread::sleep(Duration::from_millis(500));
    assert!(!terminal.wait("PAUSED").contains("ended"));
    terminal.keys("Space");
    let screen = terminal.wait("ended after");
    assert!(screen.contains("last step 9"), "{screen}");
    assert!(screen.contains("20.00 MiB"), "{screen}");
    terminal.keys("h");
    terminal.wait("pause or resume");
    terminal.keys("x");
    terminal.keys("s");
    terminal.wait("sort: growth");
    // `q` restores the terminal.
    terminal.keys("q");
    let screen = terminal.wait("LEFT WITH 0");
    assert!(!screen.contains("Net.fc"), "{screen}");
}

#[test]
fn live_restores_the_terminal_when_a_signal_ends_it() {
    let folder = TempDir::new().unwrap();
    let pid = folder.path().join("pid");
    let live = format!("{} live {}", env!("CARGO_BIN_EXE_memtrace"), folder.path().join("out").display());
    // The shell survives Ctrl-C, and shows the settings of the terminal before the status of `live`.
    let in_shell = |input: &str| {
        let start = format!("sh -c 'echo $$ > {}; exec {live} --interval 3600 {input}'", pid.display());
        format!("trap : INT; {start}; left=$?; stty -a; (exit $left)")
    };
    for (input, interrupts, status) in
        [("", false, 143), ("</dev/null", false, 143), ("</dev/null", true, 130)]
    {
        let Some(terminal) = Terminal::open(110, 40, &in_shell(input)) else { return };
        terminal.wait("waiting for a trace");
        match interrupts {
            true => terminal.keys("C-c"),
            false => end(std::fs::read_to_string(&pid).unwrap().trim().parse().unwrap()),
        }
        let screen = terminal.wait("LEFT WITH");
        assert!(screen.contains(&format!("LEFT WITH {status}")), "{screen}");
        assert!(screen.contains(" echo ") && !screen.contains("waiting for a trace"), "{screen}");
        assert!(run(&mut terminal.tmux(&["display", "-p", "#{alternate_on}"])).starts_with('0'), "{screen}");
    }
}

/// crossterm never stops reading from a terminal that is gone.
#[test]
fn live_ends_when_its_terminal_is_closed() {
    let folder = TempDir::new().unwrap();
    let (pid, out) = (folder.path().join("pid"), folder.path().join("out"));
    let live = format!("{} live {}", env!("CARGO_BIN_EXE_memtrace"), out.display());
    let start = format!("sh -c 'echo $$ > {}; exec {live}'", pid.display());
    let Some(terminal) = Terminal::open(110, 40, &start) else { return };
    terminal.wait("waiting for a trace");
    let process = Path::new("/proc").join(std::fs::read_to_string(&pid).unwrap().trim());
    assert!(process.exists());
    drop(terminal);
    wait_until("the end of live", || !process.join("exe").exists());
}

#[test]
fn live_once_prints_one_view_for_scripts() {
    let text = run(memtrace().args(["live", "--once", "--by", "category"]).arg(fixture("sharded")));
    assert!(!text.contains('\x1b'), "{text}");
    for part in ["◂ shown below", "allocated", "of 79.11 GiB free", "activation", "last step 2"] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    let nowhere = memtrace().args(["live", "--once", "/nowhere"]).output().unwrap();
    assert_eq!(nowhere.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&nowhere.stderr).contains("no trace yet"));
}

#[test]
fn live_names_the_card_that_it_shows_among_several() {
    let folder = TempDir::new().unwrap();
    let packed = std::fs::File::open(fixture("gpt").join("host.r0.1.csv.gz")).unwrap();
    let rows = std::io::read_to_string(flate2::read::GzDecoder::new(packed)).unwrap();
    // A card that the process sees and does not use comes first.
    let known = r#"""devices"":[{""ordinal"":0,"#;
    let more =
        r#"""devices"":[{""ordinal"":3,""name"":""Unused card"",""total_bytes"":1000},{""ordinal"":0,"#;
    assert!(rows.contains(known));
    std::fs::write(folder.path().join("host.r0.1.csv"), rows.replacen(known, more, 1)).unwrap();
    let text = run(memtrace().args(["live", "--once"]).arg(folder.path()));
    assert!(text.contains("NVIDIA H100") && !text.contains("Unused card"), "{text}");
}

#[test]
fn live_openmetrics_has_the_numbers_of_the_reports() {
    let trace = fixture("sharded");
    let text = run(memtrace().args(["live", "--once", "--openmetrics", "-"]).arg(&trace));
    assert!(text.ends_with("# EOF\n"), "{text}");
    let sample = |name: &str, labels: &[(&str, &str)]| -> i64 {
        let is_it = |line: &&str| {
            line.starts_with(&format!("{name}{{"))
                && labels.iter().all(|(label, value)| line.contains(&format!("{label}=\"{value}\"")))
        };
        let lines: Vec<&str> = text.lines().filter(is_it).collect();
        assert_eq!(lines.len(), 1, "{name} {labels:?}\n{text}");
        lines[0].rsplit(' ').next().unwrap().parse().unwrap()
    };
    // The text must have every metric that the dashboard uses.
    let dashboard = include_str!("../docs/grafana.json");
    let asked: std::collections::BTreeSet<&str> = dashboard
        .match_indices("memtrace_")
        .map(|(at, _)| {
            dashboard[at..].split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap()
        })
        .collect();
    assert!(asked.len() > 8, "{asked:?}");
    for name in asked {
        assert!(text.contains(&format!("\n{name}{{")), "{name}\n{text}");
    }
    assert!(!text.contains(" *\""), "an inferred category has the label of a recorded one: {text}");
    // With `live`, too, a rank that does not exist is an error.
    let wrong = memtrace().args(["live", "--rank", "9", "--openmetrics", "-"]).arg(&trace).output().unwrap();
    assert_eq!(wrong.status.code(), Some(2));
    let ranks = run(memtrace().args(["ranks", "--json"]).arg(&trace));
    let ranks: serde_json::Value = serde_json::from_str(&ranks).unwrap();
    let ranks = ranks["ranks"].as_array().unwrap();
    assert_eq!(ranks.len(), 4);
    for known in ranks {
        let rank = known["rank"].to_string();
        let of = |name: &str| known[name].as_i64().unwrap();
        for (total, name) in [("allocated", "peak_allocated_bytes"), ("reserved", "peak_reserved_bytes")] {
            let labels = [("rank", rank.as_str()), ("total", total)];
            assert_eq!(sample("memtrace_memory_peak_bytes", &labels), of(name), "{rank} {total}");
        }
        assert_eq!(sample("memtrace_rows_total", &[("rank", &rank)]), of("rows"));
        let categories = text.lines().filter(|line| {
            line.starts_with("memtrace_category_bytes{") && line.contains(&format!("rank=\"{rank}\""))
        });
        let sum: i64 = categories.map(|line| line.rsplit(' ').next().unwrap().parse::<i64>().unwrap()).sum();
        let labels = [("rank", rank.as_str()), ("total", "allocated")];
        assert_eq!(sum, sample("memtrace_memory_bytes", &labels), "the categories of rank {rank}");
    }
}

#[test]
fn timeline_is_as_wide_as_the_terminal_and_in_colour() {
    let command = format!("{} timeline {}", env!("CARGO_BIN_EXE_memtrace"), fixture("gpt").display());
    let Some(terminal) = Terminal::open(80, 40, &command) else { return };
    let screen = terminal.wait("LEFT WITH 0");
    let axis = screen.lines().find(|line| line.contains('┼')).unwrap();
    assert!((70..=80).contains(&axis.trim_end().chars().count()), "{axis}");
    assert!(screen.contains("▀ forward"), "{screen}");
    let painted = run(&mut terminal.tmux(&["capture-pane", "-p", "-e"]));
    assert!(painted.contains("\x1b[38;5;32m"), "{painted}");
}
