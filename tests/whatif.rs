//! `memtrace advise` with a change: compares its predictions with runs of the same script in which the change
//! is made, and checks the errors of wrong requests.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use memtrace_analysis::testing::TraceBuilder;
use memtrace_analysis::whatif::{Change, OpsAgain, advice};
use memtrace_trace::meta::{Allocator, Device, Meta};
use memtrace_trace::{Category, EventName, Row};
use serde_json::Value;
use tempfile::TempDir;

use crate::common::command::fixtures;
use crate::common::torch::{self, Torch, is_deep, scripts, succeeded, text};

/// The largest accepted difference between a predicted and a real peak, in hundredths of a percent.
const BOUND: i64 = 200;

/// A run of `whatif/train.py`: its trace, and torch's own peaks of reserved and of allocated bytes.
struct Trained {
    trace: PathBuf,
    reserved: i64,
    allocated: i64,
}

/// Trains on a simulated GPU for each of `runs`, such as `gpt --checkpoint`, with the traces in `out`. The
/// runs are forked children of one process.
fn train(torch: &Torch, out: &Path, runs: &[&str]) -> Vec<Trained> {
    // With `--shard`: rank 0 of eight; the other ranks are stand-ins.
    let ranks: &[&dyn AsRef<OsStr>] =
        &[&"--quiet", &"--phantom", &"8xh100-80g", &"--ranks", &"0", &"-o", &out];
    let is_sharded = runs[0].contains("--shard");
    let mut command = if is_sharded { torch.run_command(ranks) } else { torch.traced_command(out) };
    let words = runs.join(" / ");
    command.arg(scripts().join("whatif/train.py")).args(words.split(' '));
    let said = succeeded(&words, &command.output().unwrap());
    let (traces, is_forked) = (torch::traces(out), runs.len() > 1);
    let parts: Vec<&str> = said.split("== ").skip(usize::from(is_forked)).collect();
    assert_eq!((parts.len(), traces.len()), (runs.len(), runs.len()), "{said}");
    let trained = |(run, lines): (&&str, &str)| {
        let head = lines.lines().next().unwrap();
        let ending = if is_forked {
            let process = head.strip_prefix(run).unwrap_or_else(|| panic!("{run}: {head}"));
            format!(".{}.csv", process.trim())
        } else {
            ".csv".to_owned()
        };
        let trace = traces.iter().find(|trace| trace.to_string_lossy().ends_with(&ending)).unwrap().clone();
        let mut peaks = lines.lines().rev().map(|line| line.parse().unwrap());
        let (allocated, reserved) = (peaks.next().unwrap(), peaks.next().unwrap());
        Trained { trace, reserved, allocated }
    };
    runs.iter().zip(parts).map(trained).collect()
}

fn whatif(arguments: &[&str], trace: &Path) -> Output {
    torch::memtrace().arg("advise").args(arguments).arg(trace).output().unwrap()
}

/// Returns the answer for one device.
fn answer(arguments: &[&str], trace: &Path) -> Value {
    let output = whatif(&[&["--json"], arguments].concat(), trace);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    answer["devices"][0].clone()
}

/// Compares the prediction for each list of options with a run of the model in which other options make the
/// change.
fn predicts(torch: &Torch, model: &str, changes: &[(&[&str], &[&str])]) {
    let folder = TempDir::new().unwrap();
    let made: Vec<String> = changes.iter().map(|(_, made)| format!("{model} {}", made.join(" "))).collect();
    // Ranks of a job start in their own way.
    let (sharded, own): (Vec<&str>, Vec<&str>) =
        made.iter().map(String::as_str).partition(|run| run.contains("--shard"));
    let mut runs = train(torch, &folder.path().join("own"), &[&[model], &own[..]].concat());
    let base = runs.remove(0);
    if !sharded.is_empty() {
        runs.extend(train(torch, &folder.path().join("sharded"), &sharded));
    }
    let before = base.allocated;
    let by_run: BTreeMap<&str, &Trained> = own.into_iter().chain(sharded).zip(&runs).collect();
    for ((asked, _), made) in changes.iter().zip(&made) {
        let real = by_run[made.as_str()].allocated;
        let found = answer(asked, &base.trace);
        assert_eq!(found["before"]["bytes"], before, "{model}: the run's own peak");
        let predicted = found["after"]["bytes"].as_i64().unwrap();
        let error = (predicted - real).abs() * 10_000 / real;
        assert!(error <= BOUND, "{model} {asked:?}: {predicted} predicted, {real} real");
        assert_eq!(found["saved_bytes"], before - predicted);
        assert!(real != before, "{made} changes the peak");
    }
}

#[test]
fn advise_predicts_checkpoints_the_loss_in_parts_and_several_changes_of_a_gpt() {
    Torch::run("2.11.0", |torch| {
        predicts(
            torch,
            "gpt",
            &[
                (&["--checkpoint", "GPT.h.*"], &["--checkpoint"]),
                (&["--chunk-loss", "8"], &["--chunk-loss", "8"]),
                (
                    &["--checkpoint", "GPT.h.*", "--chunk-loss=8", "--optimizer=sgd", "--batch=x2"],
                    &["--checkpoint", "--chunk-loss=8", "--optimizer=sgd", "--batch=2"],
                ),
            ],
        );
    });
}

#[test]
fn advise_predicts_a_checkpoint_of_each_layer_inside_one_around_all_layers() {
    Torch::run("2.11.0", |torch| {
        let folder = TempDir::new().unwrap();
        let runs = train(
            torch,
            &folder.path().join("out"),
            &["gpt --one-checkpoint", "gpt --one-checkpoint --checkpoint"],
        );
        let [one, each] = &runs[..] else { panic!("two runs") };
        let (before, real) = (one.allocated, each.allocated);
        assert!(4 * real < 3 * before, "{real} real, {before} before");
        let found = answer(&["--checkpoint", "GPT.h.*"], &one.trace);
        let predicted = found["after"]["bytes"].as_i64().unwrap();
        let error = (predicted - real).abs() * 10_000 / real;
        assert!(error <= BOUND, "{predicted} predicted, {real} real, {before} before");
        // In the run `each`, every layer has a checkpoint already, so the change must save nothing.
        assert_eq!(answer(&["--checkpoint", "GPT.h.*"], &each.trace)["saved_bytes"], 0);
    });
}

#[test]
#[ignore = "scripts/check --deep runs it"]
fn advise_batch_and_checkpoints_are_predicted_of_convolutions() {
    Torch::run("2.11.0", |torch| {
        predicts(
            torch,
            "unet",
            &[
                (&["--checkpoint", "UNet.*.blocks.*"], &["--checkpoint"]),
                (&["--batch", "x2"], &["--batch", "2"]),
            ],
        );
    });
}

#[test]
fn advise_predicts_other_optimizers_of_a_diffusion_transformer() {
    Torch::run("2.11.0", |torch| {
        predicts(
            torch,
            "dit",
            &[
                (&["--optimizer", "sgd"], &["--optimizer", "sgd"]),
                (&["--optimizer", "adafactor"], &["--optimizer", "adafactor"]),
                (
                    &["--checkpoint", "DiT.blocks.*", "--optimizer", "in-backward"],
                    &["--checkpoint", "--optimizer", "in-backward"],
                ),
            ],
        );
    });
}

/// Predicts autocast. The bound is wider than for other changes, because the trace has no inputs of ops.
#[test]
fn advise_predicts_autocast_of_a_language_model_and_of_convolutions() {
    Torch::run("2.11.0", |torch| {
        const MODELS: [&str; 2] = ["llama", "resnet"];
        let folder = TempDir::new().unwrap();
        let runs = train(
            torch,
            &folder.path().join("out"),
            &["llama", "llama --autocast", "resnet", "resnet --autocast"],
        );
        for (model, runs) in MODELS.iter().zip(runs.chunks(2)) {
            let [base, changed] = runs else { panic!("two runs of each model") };
            let (before, real) = (base.allocated, changed.allocated);
            let found = answer(&["--autocast", "bf16"], &base.trace);
            let predicted = found["after"]["bytes"].as_i64().unwrap();
            let error = (predicted - real).abs() * 10_000 / real;
            assert!(error <= 300, "{model}: {predicted} predicted, {real} real, {before} before");
            // The changed run uses autocast already, so autocast must save nothing there.
            let again = answer(&["--autocast", "bf16"], &changed.trace);
            assert_eq!(again["saved_bytes"], 0, "{model}");
            let typed = whatif(&["--autocast", "bf16"], &changed.trace);
            let said = text(&typed.stdout);
            assert!(said.contains("0 B less") && said.contains("nothing to gain"), "{model}: {said}");
        }
    });
}

/// The trace has the types of blocks, so changes of optimizers and types are predicted of a run that computes
/// in 16 bits, too.
#[test]
fn advise_predicts_optimizers_and_types_of_a_run_under_autocast_and_of_one_in_16_bits() {
    Torch::run("2.11.0", |torch| {
        let folder = TempDir::new().unwrap();
        let names = [
            "gpt --autocast",
            "gpt --dtype bf16",
            "gpt --autocast --optimizer adafactor",
            "gpt --dtype bf16 --optimizer adafactor",
            "gpt --autocast --float-loss",
            "gpt --dtype bf16 --float-loss",
        ];
        let runs = train(torch, &folder.path().join("out"), &names);
        let [autocast, bf16, autocast_adafactor, bf16_adafactor, autocast_float, bf16_float] = &runs[..]
        else {
            panic!("six runs")
        };
        let policies = ["gpt --shard mixed", "gpt --shard fsdp --dtype bf16"];
        let sharded = train(torch, &folder.path().join("sharded"), &policies);
        for (base, change, changed) in [
            // The loss is computed in float32 in both types.
            (autocast_float, ["--dtype", "bf16"], bf16_float),
            // The type of an unsharded parameter is that of the buffer that gathers it.
            (&sharded[0], ["--dtype", "bf16"], &sharded[1]),
            (autocast, ["--dtype", "bf16"], bf16),
            (autocast, ["--optimizer", "adafactor"], autocast_adafactor),
            (bf16, ["--optimizer", "adafactor"], bf16_adafactor),
            (bf16, ["--dtype", "bf16"], bf16),
        ] {
            let real = changed.allocated;
            let found = answer(&change, &base.trace);
            assert_eq!(found["before"]["bytes"], base.allocated, "{change:?}");
            let predicted = found["after"]["bytes"].as_i64().unwrap();
            let error = (predicted - real).abs() * 10_000 / real;
            assert!(error <= 100, "{change:?}: {predicted} predicted, {real} real");
        }
    });
}

#[test]
fn advise_predicts_the_shards_of_eight_ranks() {
    Torch::run("2.11.0", |torch| {
        let sharded: (&[&str], &[&str]) = (&["--shard", "8"], &["--shard", "fsdp"]);
        let both: (&[&str], &[&str]) =
            (&["--shard=8", "--checkpoint=GPT.h.*"], &["--shard", "fsdp", "--checkpoint"]);
        let optimizer: (&[&str], &[&str]) = (&["--shard", "8:optimizer"], &["--shard", "optimizer"]);
        predicts(torch, "gpt", &[sharded, both, optimizer]);
        if is_deep() {
            predicts(torch, "vit", &[sharded]);
        }
    });
}

#[test]
fn advise_reserved_asks_the_allocator_of_torch() {
    Torch::run("2.11.0", |torch| {
        let folder = TempDir::new().unwrap();
        let runs = train(
            torch,
            &folder.path().join("out"),
            &["gpt", "gpt --batch 2", "gpt --optimizer sgd", "gpt --checkpoint"],
        );
        let [base, changed @ ..] = &runs[..] else { panic!("four runs") };
        let (base, before) = (&base.trace, base.reserved);
        let python = torch.python.display().to_string();
        let changes = [
            (["--batch", "x2"], BOUND),
            (["--optimizer", "sgd"], 0),
            // The bound is wider here, because the prediction requests all blocks of the second forward at
            // once.
            (["--checkpoint", "GPT.h.*"], 1200),
        ];
        for ((asked, bound), changed) in changes.iter().zip(changed) {
            let real = changed.reserved;
            let words = [&asked[..], &["--reserved", "--python", &python]].concat();
            let found = &answer(&words, base)["reserved"];
            assert_eq!(
                (&found["before_bytes"], &found["out_of_memory_bytes"]),
                (&before.into(), &Value::Null)
            );
            let predicted = found["peak_bytes"].as_i64().unwrap();
            let error = (predicted - real).abs() * 10_000 / real;
            assert!(error <= *bound, "{asked:?}: {predicted} predicted, {real} real");
            assert_eq!(found["is_lower_bound"], asked[0] == "--checkpoint");
        }
        // Sharded memory must not add up over the steps: memory that is reduced after the last allocation of
        // a step is freed with that step.
        let shards = |more: &[&str]| {
            let words = [&["--shard", "8", "--optimizer", "sgd"], more].concat();
            answer(&words, base)
        };
        let found = shards(&["--reserved", "--python", &python]);
        let (allocated, reserved) = (&found["after"]["bytes"], &found["reserved"]["peak_bytes"]);
        let (allocated, reserved) = (allocated.as_i64().unwrap(), reserved.as_i64().unwrap());
        assert!((allocated..allocated * 5 / 4 + (64 << 20)).contains(&reserved), "{reserved} of {allocated}");
        // A hundred times the batch needs more than the card has.
        let words = ["--batch", "x100", "--reserved", "--python", &python];
        assert!(answer(&words, base)["reserved"]["out_of_memory_bytes"].as_i64().unwrap() > 0);
        let said = text(&whatif(&words, base).stdout);
        assert!(said.contains("then out of memory at a request of"), "{said}");
        let said = text(&whatif(&["--batch", "x2", "--reserved", "--step", "1"], base).stderr);
        assert!(said.contains("leave out --window and --step"), "{said}");
        let said = text(&whatif(&["--batch", "x2", "--reserved", "--python", "/no/python"], base).stderr);
        assert!(said.contains("cannot run /no/python; name a Python with PyTorch"), "{said}");
    });
}

#[test]
fn advise_shard_changes_nothing_without_parameters() {
    let mut trace = TraceBuilder::default();
    let row = Row { module: "Net", phase: "forward", ..Row::default() };
    trace.raw(Row { event: EventName::RangeBegin, api: "module", name: "Net", ..row });
    let block = trace.alloc(64 * MIB, Row { op: "aten::mm", ..row });
    trace.tag(block, 64 * MIB, row, Row { category: Category::Input, ..row });
    let (_folder, path) = written(&trace.finish());
    for asked in ["8", "1000000"] {
        let found = answer(&["--shard", asked], &path);
        assert_eq!((&found["saved_bytes"], &found["changes"][0]["found"]), (&0.into(), &0.into()));
        let said = text(&whatif(&["--shard", asked], &path).stdout);
        assert!(said.contains("nothing changes: the trace has no parameters"), "{said}");
    }
    for asked in ["0", "1", "many", "8:gradients", "1048577"] {
        let said = text(&whatif(&["--shard", asked], &path).stderr);
        assert!(said.contains(&format!("--shard {asked}: expected a number of ranks")), "{said}");
    }
    // A trace without tags: the parameters to divide are unknown.
    let said = text(&whatif(&["--shard", "8"], &fixture("oom-big")).stderr);
    assert!(said.contains("has no tags"), "{said}");
}

#[test]
fn advise_takes_a_window_of_a_step_that_is_too_long() {
    // One step of 2,100,000 rows: `advise` refuses it as a whole and asks for `--window`.
    let mut trace = TraceBuilder::default();
    let row = Row { op: "aten::mm", phase: "forward", step: 3, ..Row::default() };
    for _ in 0..1_050_000 {
        let block = trace.alloc(MIB, row);
        trace.free(block, MIB, row);
    }
    let (_folder, path) = written(&trace.finish());
    let said = text(&whatif(&["--without", "op=aten::mm"], &path).stderr);
    assert!(said.contains("step 3 of") && said.contains("--window"), "{said}");
    let output = whatif(&["--without", "op=aten::mm", "--window", "0.5ms:1ms"], &path);
    let said = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(said.contains("were not kept"), "{said}");
    let found = answer(&["--without", "op=aten::mm", "--window", "0.5ms:1ms"], &path);
    assert_eq!((&found["before"]["bytes"], &found["after"]["bytes"]), (&MIB.into(), &0.into()));
}

#[test]
fn advise_names_changes_that_make_a_script_fit_on_a_t4() {
    Torch::run("2.11.0", |torch| {
        let folder = TempDir::new().unwrap();
        let run = |out: &str, options: &[String]| {
            let out = folder.path().join(out);
            let mut command = torch.traced_command_on("t4", &out);
            (command.arg(scripts().join("whatif/train.py")).args(options).output().unwrap(), out)
        };
        let model = |batch: &str| vec!["gpt".to_owned(), format!("--batch={batch}")];
        let (failed, trace) = run("failed", &model("5"));
        assert!(!failed.status.success() && text(&failed.stderr).contains("OutOfMemoryError"));

        let advise = |arguments: &[&str]| {
            torch::memtrace().arg("advise").arg(&trace).args(arguments).output().unwrap()
        };
        let impossible = advise(&["--fit", "100m"]);
        assert_eq!(impossible.status.code(), Some(3), "{}", text(&impossible.stderr));
        assert!(text(&impossible.stdout).contains("of these changes reaches 100.00 MiB"));
        // The run ended out of memory, so its whole need is unknown: the report must name changes without
        // saying that they suffice.
        let unknown = advise(&["--fit", "13g"]);
        assert!(text(&unknown.stdout).contains("is unknown: it needs at least"), "{}", text(&unknown.stdout));
        let output = advise(&["--fit", "13g", "--json"]);
        assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        let device = &answer["devices"][0];
        assert_eq!(device["ended_in_oom"], true);
        let changes = device["fit"]["changes"].as_array().unwrap();
        assert!(!changes.is_empty() && device["fit"]["needs_bytes"].as_i64().unwrap() <= 13 << 30);

        let oom = torch::memtrace().arg("oom").arg(&trace).output().unwrap();
        let best = device["changes"][0]["change"].as_str().unwrap();
        assert!(
            text(&oom.stdout).contains(&format!("(code: memtrace advise {best} TRACE): saves at least ")),
            "{}",
            text(&oom.stdout)
        );

        // Makes the changes that the report named, by options of the script.
        let mut options = model("5");
        for change in changes.iter().map(|change| change.as_str().unwrap()) {
            match change.split_once(' ').unwrap() {
                ("--checkpoint", _) => options.push("--checkpoint".to_owned()),
                ("--batch", "x1/2") => options[1] = "--batch=2.5".to_owned(),
                ("--offload", _) => options.push("--offload".to_owned()),
                ("--autocast", _) => options.push("--autocast".to_owned()),
                (option, value) => options.push(format!("{option}={value}")),
            }
        }
        let (fits, _) = run("fits", &options);
        assert!(fits.status.success(), "{options:?}: {}", text(&fits.stderr));
    });
}

fn fixture(name: &str) -> PathBuf {
    fixtures().join(name)
}

#[test]
fn advise_refuses_what_it_cannot_answer_and_says_what_to_ask() {
    let gpt = fixture("gpt");
    for (arguments, error) in [
        (&["--checkpoint", ""][..], "name a change, such as --checkpoint 'GPT.h.*'"),
        (&["--checkpoint", "GPT.layers.*"], "the nearest are GPT"),
        (&["--optimizer", "8bit", "--offload", "optimizer"], "ask for one of them"),
        (&["--batch", "2x"], "expected a factor that starts with x"),
        (&["--batch", "x2", "--device", "7"], "--device 7: no match"),
        (&["--dtype", "int4"], "expected bf16"),
        (&["--without", "category=temporaries"], "temporary"),
    ] {
        let output = whatif(arguments, &gpt);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(text(&output.stderr).contains(error), "{arguments:?}: {}", text(&output.stderr));
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn advise_without_blocks_takes_them_out_of_the_peak() {
    let gpt = fixture("gpt");
    let found = answer(&["--without", "category=*,module=**"], &gpt);
    assert_eq!(found["after"]["bytes"], 0, "{found:#}");
    let found = answer(&["--without", "category=kv_cache"], &gpt);
    assert_eq!(found["saved_bytes"], 0);
    let said = text(&whatif(&["--without", "category=kv_cache"], &gpt).stdout);
    assert!(said.contains("nothing changes: no block matches"), "{said}");
    assert!(said.contains("sure: high, because the change only removes blocks"), "{said}");
}

/// Writes a trace into its own file.
fn written(bytes: &[u8]) -> (TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("host.r0.1.csv");
    fs::write(&path, bytes).unwrap();
    (folder, path)
}

const MIB: i64 = 1 << 20;

#[test]
fn advise_knows_the_blocks_that_a_part_of_a_rotated_trace_begins_with() {
    // A later part of a trace, read alone: the parameter and its state are in opening rows, before any
    // allocation.
    let mut trace = TraceBuilder::new(Meta { part: 2, opening_rows: 2, ..Meta::default() });
    for (alloc_id, category) in [(1, Category::Parameter), (2, Category::OptimizerState)] {
        let live = Row { event: EventName::Live, device: 0, alloc_id, category, ..Row::default() };
        let row = Row { requested_bytes: 16 * MIB, rounded_bytes: 16 * MIB, delta_bytes: 16 * MIB, ..live };
        trace.change(row, [16 * MIB, 16 * MIB, 0]);
    }
    trace.alloc(4 * MIB, Row { step: 7, op: "aten::mm", phase: "forward", ..Row::default() });
    let (_folder, path) = written(&trace.finish());
    let found = answer(&["--optimizer", "sgd"], &path);
    assert_eq!((&found["before"]["bytes"], &found["saved_bytes"]), (&(36 * MIB).into(), &(16 * MIB).into()));
    let found = answer(&["--without", "op=aten::mm"], &path);
    assert_eq!(found["after"]["bytes"], 32 * MIB);
}

#[test]
fn advise_rounds_as_the_allocator_of_the_trace_does() {
    for (allocator, bytes) in [
        (Allocator::default(), 10_240),
        (Allocator { conf: "roundup_power2_divisions:2".to_owned(), ..Allocator::default() }, 12_288),
        (Allocator { caching: false, ..Allocator::default() }, 10_000),
    ] {
        let mut trace = TraceBuilder::new(Meta { allocator, ..Meta::default() });
        let of = |category| Row { phase: "forward", category, ..Row::default() };
        let input = trace.alloc(5000, of(Category::Temporary));
        trace.tag(input, 5000, of(Category::Temporary), of(Category::Activation));
        let (_folder, path) = written(&trace.finish());
        assert_eq!(answer(&["--batch", "x2"], &path)["after"]["bytes"], bytes);
    }
}

/// Returns a trace with calls of these modules, which keep blocks for a backward, and with a later request
/// that is too big.
fn of_calls(modules: &[&str]) -> Vec<u8> {
    of_calls_before(modules, Category::Activation, Row::default())
}

/// Does the same as [`of_calls`]. The calls keep a block of `category` each, and `request` has the owner of
/// the request.
fn of_calls_before(modules: &[&str], category: Category, request: Row<'_>) -> Vec<u8> {
    let devices = vec![Device { ordinal: 0, name: "card".to_owned(), total_bytes: 1 << 30 }];
    let mut trace = TraceBuilder::new(Meta { devices, ..Meta::default() });
    for module in modules {
        let row = Row { module, phase: "forward", ..Row::default() };
        let range = Row { api: "module", name: module, ..row };
        trace.raw(Row { event: EventName::RangeBegin, ..range });
        for (op, category) in [("aten::mm", category), ("aten::relu", Category::Activation)] {
            trace.alloc(64 * MIB, Row { op, category, ..row });
            trace.raw(Row { event: EventName::Op, op, device: 0, latency_ns: 1500, api: "op", ..row });
        }
        trace.raw(Row { event: EventName::RangeEnd, ..range });
    }
    let oom =
        Row { event: EventName::Oom, device: 0, requested_bytes: 1 << 31, rounded_bytes: 1 << 31, ..request };
    trace.change(oom, [0; 3]);
    trace.finish()
}

#[test]
fn advise_frees_no_layer_whose_backward_has_begun_and_only_what_can_be_computed_again() {
    let saved = |category, request| {
        let (_folder, path) =
            written(&of_calls_before(&["Net.stem", "Net.h.0", "Net.h.1"], category, request));
        answer(&["--checkpoint", "Net.h.*"], &path)["saved_bytes"].clone()
    };
    let of_loss = Row { phase: "forward", ..Row::default() };
    assert_eq!(saved(Category::Activation, of_loss), 128 * MIB);
    // The backward of the last layer has freed no block yet. With a checkpoint, its second forward has run.
    let of_layer = Row { phase: "backward", module: "Net.h.1", ..Row::default() };
    assert_eq!(saved(Category::Activation, of_layer), 64 * MIB);
    for category in [Category::UnshardedParameter, Category::KvCache, Category::Workspace] {
        assert_eq!(saved(category, of_loss), 0, "{category:?}");
    }
}

#[test]
fn advise_closes_no_call_of_another_thread() {
    let mut trace = TraceBuilder::default();
    let call = |trace: &mut TraceBuilder, event, tid, name| {
        trace.raw(Row { event, tid, api: "module", name, module: name, phase: "forward", ..Row::default() });
    };
    // A second thread calls another module from the start until within the second layer.
    call(&mut trace, EventName::RangeBegin, 2, "Other");
    for module in ["Net.stem", "Net.h.0", "Net.h.1"] {
        call(&mut trace, EventName::RangeBegin, 1, module);
        if module == "Net.h.1" {
            call(&mut trace, EventName::RangeEnd, 2, "Other");
        }
        let row = Row { tid: 1, module, phase: "forward", ..Row::default() };
        for op in ["aten::mm", "aten::relu"] {
            trace.alloc(64 * MIB, Row { op, category: Category::Activation, ..row });
            trace.raw(Row { event: EventName::Op, op, device: 0, latency_ns: 1500, api: "op", ..row });
        }
        call(&mut trace, EventName::RangeEnd, 1, module);
    }
    let oom = Row { event: EventName::Oom, device: 0, tid: 1, phase: "forward", ..Row::default() };
    trace.change(Row { requested_bytes: 1 << 31, rounded_bytes: 1 << 31, ..oom }, [0; 3]);
    let (_folder, path) = written(&trace.finish());
    assert_eq!(answer(&["--checkpoint", "Net.h.*"], &path)["saved_bytes"], 128 * MIB);
}

#[test]
fn advise_answers_for_lists_of_modules_in_lists_and_any_name() {
    for (modules, pattern) in [
        // Paths as in lucidrains' transformers: ModuleList([ModuleList([attention, feed_forward]), ...]).
        (["Net.h.0.0", "Net.h.0.1", "Net.h.1.0", "Net.h.1.1"], "Net.h.*.*"),
        (["Net.a,b.0", "Net.a,b.1", "Net.a,b.2", "Net.a,b.3"], "Net.a*b.*"),
        (["Net.it's.0", "Net.it's.1", "Net.it's.2", "Net.it's.3"], "Net.it*s.*"),
    ] {
        let (_folder, path) = written(&of_calls(&modules));
        let run = |words: &[&str]| torch::memtrace().args(words).arg(&path).output().unwrap();
        let output = run(&["advise", "--json"]);
        let said = text(&output.stderr);
        assert!(output.status.success(), "{modules:?}: {said}");
        let found: Value = serde_json::from_slice(&output.stdout).unwrap();
        let change = &found["devices"][0]["changes"][0];
        assert_eq!(change["change"], format!("--checkpoint '{pattern}'"), "{found:#}");
        assert_eq!(answer(&["--checkpoint", pattern], &path)["after"], change["after"]);
        let said = text(&run(&["oom"]).stdout);
        assert!(said.contains(&format!("--checkpoint '{pattern}' TRACE): saves")), "{said}");
    }
}

/// Returns a trace of three steps. The first step has many more ops than the others. There are three groups
/// of modules: `Net.tiny` keeps little memory, and `Net.stem` is a sequence of single ops.
fn of_steps() -> Vec<u8> {
    let mut trace = TraceBuilder::default();
    for step in 0..3 {
        let mut live = Vec::new();
        for (module, class, bytes, op) in [
            ("Net.h.0", "Block", 64 * MIB, "aten::batch_norm"),
            ("Net.h.1", "Block", 64 * MIB, "aten::mm"),
            ("Net.tiny.0", "Tiny", 1024, "aten::mm"),
            ("Net.tiny.1", "Tiny", 1024, "aten::mm"),
            ("Net.stem.0", "Conv2d", 64 * MIB, "aten::conv2d"),
            ("Net.stem.1", "ReLU", 64 * MIB, "aten::relu"),
        ] {
            let row = Row { module, phase: "forward", step, ..Row::default() };
            let range = Row { api: "module", name: module, source: class, ..row };
            trace.raw(Row { event: EventName::RangeBegin, ..range });
            // Allocates the block that the call keeps for its backward, and its result.
            for _ in 0..2 {
                live.push((trace.alloc(bytes, Row { op, ..row }), bytes, module));
            }
            // Each call runs one op; in the first step it runs 50.
            for _ in 0..if step == 0 { 50 } else { 1 } {
                trace.raw(Row { event: EventName::Op, op, device: 0, latency_ns: 1500, api: "op", ..row });
            }
            trace.raw(Row { event: EventName::RangeEnd, ..range });
        }
        for (id, bytes, module) in live.into_iter().rev() {
            let row = Row { module, phase: "backward", step, op: "MmBackward0", ..Row::default() };
            trace.free(id, bytes, row);
            trace.raw(Row { event: EventName::Op, device: 0, latency_ns: 1500, api: "op", ..row });
        }
        // Ops of the optimizer, which must not count in the share of recomputed ops.
        let row = Row { phase: "optimizer", step, op: "aten::add_", ..Row::default() };
        for _ in 0..100 {
            trace.raw(Row { event: EventName::Op, device: 0, latency_ns: 1500, api: "op", ..row });
        }
    }
    trace.finish()
}

#[test]
fn advise_checkpoints_what_keeps_memory_and_gives_the_cost_in_a_steady_step() {
    let (_folder, path) = written(&of_steps());
    let output = torch::memtrace().args(["advise", "--json"]).arg(&path).output().unwrap();
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let changes = found["devices"][0]["changes"].as_array().unwrap();
    let is_it = |change: &&Value| change["change"] == "--checkpoint 'Net.h.*'";
    let change = changes.iter().find(is_it).unwrap_or_else(|| panic!("{found:#}"));
    let costs = change["costs"].as_str().unwrap();
    assert!(costs.contains("2 more op calls to the 18 of a step's forward and backward (11 %)"), "{costs}");
    assert!(costs.contains("batch norms"), "{costs}");
    assert_eq!(change["code"][2], "for block in model.h.children():");
}

#[test]
fn advise_names_memory_that_is_kept_before_any_change() {
    let advised = |bytes: i64| {
        let mut trace = TraceBuilder::default();
        let block = trace.alloc(100 * MIB, Row::default());
        let mark = |trace: &mut TraceBuilder, text: Value| {
            let row = Row { event: EventName::Mark, api: "retained", ..Row::default() };
            trace.change(Row { name: &text.to_string(), ..row }, [0; 3]);
        };
        let holder = serde_json::json!({
            "walk": 1, "holder": "list `losses` (train.py:41)", "verdict": "grows", "bytes": bytes, "tensors": 8, "graphs": 0,
            "nodes": 0, "first_step": 0, "last_step": 7, "steps": 8,
        });
        mark(&mut trace, holder);
        mark(
            &mut trace,
            serde_json::json!({ "walk": 1, "why": "exit", "step": 8, "is_whole": true, "ms": 7 }),
        );
        trace.free(block, 100 * MIB, Row::default());
        let (_folder, path) = written(&trace.finish());
        let answer = |more: &[&str]| {
            let output = torch::memtrace().arg("advise").args(more).arg(&path).output().unwrap();
            text(&output.stdout).to_owned()
        };
        (answer(&[]), serde_json::from_str::<Value>(&answer(&["--json"])).unwrap())
    };
    let (printed, json) = advised(80 * MIB);
    let (kept, peak) =
        (printed.find("Memory grows. 10.00 MiB a step: list `losses`"), printed.find("peak of allocated"));
    assert!(kept.is_some() && kept < peak, "{printed}");
    assert!(printed.contains("  try: keep numbers, not tensors: .item()"), "{printed}");
    assert_eq!(json["devices"][0]["kept"]["verdict"], "memory grows");
    // With only 1 MiB of kept memory, the report must not name a holder.
    let (printed, json) = advised(MIB);
    assert!(!printed.contains("losses") && json["devices"][0]["kept"].is_null(), "{printed}");
}

#[test]
fn advise_divides_a_loss_once_for_each_part_of_an_accumulated_batch() {
    // Two micro-batches in a step, each with 64 MiB of logits and their gradient.
    let mut trace = TraceBuilder::default();
    for _ in 0..2 {
        let row = Row { module: "Net", phase: "forward", ..Row::default() };
        let logits = trace.alloc(64 * MIB, Row { op: "aten::mm", ..row });
        trace.raw(Row {
            event: EventName::Op,
            op: "aten::mm",
            device: 0,
            latency_ns: 1500,
            api: "op",
            ..row
        });
        let softmax = trace.alloc(64 * MIB, Row { op: "aten::_log_softmax", ..row });
        let op = "aten::cross_entropy_loss";
        trace.raw(Row { event: EventName::Op, op, device: 0, latency_ns: 1500, api: "op", ..row });
        let row = Row { op: "LogSoftmaxBackward0", phase: "backward", ..row };
        let gradient = trace.alloc(64 * MIB, row);
        trace.free(softmax, 64 * MIB, row);
        trace.free(logits, 64 * MIB, row);
        trace.raw(Row { event: EventName::Op, device: 0, latency_ns: 3500, api: "op", ..row });
        trace.free(gradient, 64 * MIB, row);
    }
    let (_folder, path) = written(&trace.finish());
    let found = answer(&["--chunk-loss", "4"], &path);
    assert_eq!(
        (&found["before"]["bytes"], &found["after"]["bytes"]),
        (&(192 * MIB).into(), &(48 * MIB).into())
    );
}

/// Runs the printed code of `--checkpoint` on a model, and lists the modules that it checkpoints.
#[test]
fn advise_prints_code_that_checkpoints_the_modules_of_the_pattern() {
    const MODEL: &str = "
import torch.nn as nn
class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        layer = lambda: nn.ModuleDict({'mlp': nn.Linear(1, 1), 'a[0': nn.Linear(1, 1)})
        self.h, self.mlp = nn.ModuleList([layer(), layer()]), nn.Linear(1, 1)
";
    const SHOW: &str = "
print(' '.join(sorted('GPT' + '.' * bool(name) + name for name, m in model.named_modules() if 'forward' in m.__dict__)))
";
    Torch::on_main(|torch| {
        let cases = [
            ("GPT", "GPT"),
            ("GPT.h.*", "GPT.h.0 GPT.h.1"),
            ("GPT.h.*.*", "GPT.h.0.a[0 GPT.h.0.mlp GPT.h.1.a[0 GPT.h.1.mlp"),
            ("GPT.**.mlp", "GPT.h.0.mlp GPT.h.1.mlp"),
            ("**.mlp", "GPT.h.0.mlp GPT.h.1.mlp GPT.mlp"),
            ("GPT.*.mlp,GPT.mlp", "GPT.mlp"),
            ("GPT.h.?.a[0", "GPT.h.0.a[0 GPT.h.1.a[0"),
        ];
        let mut script = MODEL.to_owned();
        for (pattern, _) in cases {
            let code = advice(&Change::Checkpoint(pattern.to_owned()), &OpsAgain::default()).code;
            script.push_str(&format!("model = GPT()\n{}\n{SHOW}", code.join("\n")));
        }
        let output = torch.command().arg("-c").arg(script).output().unwrap();
        let said = succeeded("the printed code", &output);
        assert_eq!(said.lines().collect::<Vec<_>>(), cases.map(|(_, modules)| modules));
    });
}
