//! `memtrace fit --recipe`: scripts for a model that the user names, on the simulated GPU and unchanged on
//! the CPU.

use std::fs;
use std::path::Path;
use std::process::Output;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::torch::{Torch, cache, memtrace, missing, text};

/// Returns the `config.json` of a model that a CPU trains in seconds.
fn tiny() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 512, "max_position_embeddings": 512, "tie_word_embeddings": false
    })
}

/// Runs `fit --recipe` with the python of `torch` first on the PATH, in a folder with the configuration.
fn fit(torch: &Torch, folder: &Path, config: &Value, arguments: &str) -> Output {
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let path = format!("{}:{}", torch.python.parent().unwrap().display(), std::env::var("PATH").unwrap());
    let mut command = memtrace();
    command.arg("fit").args(arguments.split(' ')).current_dir(folder).env("PATH", path);
    // Torch's own cache is not a leftover of memtrace.
    command.env("TORCHINDUCTOR_CACHE_DIR", env!("CARGO_TARGET_TMPDIR"));
    // The models are tiny, and threads that wait for one another take the time of other tests.
    command.env("OMP_NUM_THREADS", "1");
    // A test may put packages of its own there.
    command.env("PYTHONPATH", folder.join("packages"));
    command.env("HF_HUB_OFFLINE", "1").env("TMPDIR", folder).output().unwrap()
}

const CARDS: &str = "--phantom t4,rtx4060 --max 1 -o out";

#[test]
fn fit_recipe_has_a_row_for_each_card_and_length_and_writes_a_script_that_trains() {
    Torch::run("2.11.0", |torch| {
        let folder = TempDir::new().unwrap();
        // The largest batch must be found: it is neither the first try nor the default.
        let cards = CARDS.replace("--max 1", "--max 2");
        let arguments = format!(
            "--recipe lora --model config.json --seq 32,64 --set learning_rate=0.01 {cards} --write train.py"
        );
        let output = fit(torch, folder.path(), &tiny(), &arguments);
        let (told, stderr) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{told}{stderr}");
        for row in [["t4", "32"], ["t4", "64"], ["rtx4060", "32"], ["rtx4060", "64"]] {
            let is_row = |line: &str| line.split_whitespace().take(3).eq(row.into_iter().chain(["2"]));
            assert_eq!(told.lines().filter(|line| is_row(line)).count(), 1, "{row:?}: {told}");
        }
        assert!(told.contains("largest part") && told.contains("free"), "{told}");
        assert!(stderr.contains("wrote train.py: batch 2, 32 tokens, as on Tesla T4"), "{stderr}");
        let left: Vec<String> = fs::read_dir(&folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        // The search must have removed its scripts and configurations. The loader's links to libcuda
        // (`memtrace-libcuda...`) stay, because later runs reuse them.
        let is_rest = |name: &String| name.starts_with("memtrace-") && !name.starts_with("memtrace-libcuda");
        assert!(!left.iter().any(is_rest), "{left:?}");

        // Runs the written script alone: untraced, and on the CPU.
        let mut script = std::process::Command::new(&torch.python);
        script.args(["train.py", "--random", "--model", ".", "--steps", "40"]).current_dir(&folder);
        let output = script.env("HF_HUB_OFFLINE", "1").env("OMP_NUM_THREADS", "1").output().unwrap();
        let losses: Vec<f64> =
            text(&output.stdout).lines().filter_map(|line| line.rsplit_once(' ')?.1.parse().ok()).collect();
        assert_eq!(losses.len(), 40, "{}", text(&output.stderr));
        assert!(losses[39] < losses[0], "{losses:?}");

        // An existing file is refused before the search, not after it.
        let output = fit(torch, folder.path(), &tiny(), &arguments.replace("-o out", "-o again"));
        assert!(text(&output.stderr).contains("--write train.py: File exists"), "{}", text(&output.stderr));
        assert_eq!((output.status.code(), folder.path().join("again").exists()), (Some(2), false));
    });
}

/// A folder's name that tries to run code: it would end the docstring at the top of the written script if the
/// script did not escape it.
#[test]
fn fit_recipe_of_a_folder_with_a_hostile_name_writes_a_script_that_runs_nothing_of_it() {
    Torch::run("2.11.0", |torch| {
        let folder = TempDir::new().unwrap();
        let model = "\"\"\";open('ran','w');\"\"\"";
        fs::create_dir(folder.path().join(model)).unwrap();
        fs::write(folder.path().join(model).join("config.json"), tiny().to_string()).unwrap();
        let arguments =
            format!("--recipe infer --model {model} --seq 32 --phantom t4 --max 1 -o out --write infer.py");
        let output = fit(torch, folder.path(), &tiny(), &arguments);
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert!(folder.path().join("infer.py").exists() && !folder.path().join("ran").exists());
    });
}

#[test]
fn fit_recipe_generates_with_a_cache() {
    Torch::run("2.11.0", |torch| {
        let folder = TempDir::new().unwrap();
        let output = fit(
            torch,
            folder.path(),
            &tiny(),
            "--recipe infer --model . --seq 32,512 --phantom t4 --values 1,64 -o out --json",
        );
        let told: Value = serde_json::from_slice(&output.stdout).unwrap();
        let rows = told["rows"].as_array().unwrap();
        let peak = |row: usize| {
            let trials = rows[row]["trials"].as_array().unwrap();
            let trial =
                trials.iter().find(|trial| trial["value"] == "64").unwrap_or_else(|| panic!("{told:#}"));
            trial["peak_allocated_bytes"].as_i64().unwrap()
        };
        assert_eq!((rows[0]["tokens"].as_i64(), rows[1]["tokens"].as_i64()), (Some(32), Some(512)));
        // The size of the KV cache: keys and values, 2 layers, 2 heads, and 16 numbers of two bytes per head.
        let cache = |batch: i64, tokens: i64| batch * tokens * 2 * 2 * 2 * 16 * 2;
        assert!(peak(1) - peak(0) >= cache(64, 512 - 32), "{told:#}");
    });
}

#[test]
fn fit_recipe_refuses_what_it_cannot_run_in_one_line_and_leaves_nothing() {
    Torch::run("2.11.0", |torch| {
        let own = {
            let mut config = tiny();
            config["model_type"] = "made_up".into();
            config
        };
        let with_code = {
            let mut config = own.clone();
            config["auto_map"] = json!({ "AutoConfig": "code.Config" });
            config
        };
        let without_sdpa = {
            let mut config = tiny();
            config["model_type"] = "gpt_oss".into();
            config
        };
        let lora = format!("--recipe lora --model config.json {CARDS}");
        for (config, arguments, part) in [
            (&own, lora.clone(), "has no model type 'made_up'"),
            (&with_code, lora.clone(), "run only with --trust-remote-code"),
            (&tiny(), format!("{lora} --seq 32,1024"), "the model's limit is 512 tokens"),
            (&tiny(), format!("{lora} --seq long"), "`long` is not a length"),
            (&tiny(), format!("{lora} --set rnk=4"), "the recipe lora has rank=16, targets=all-linear"),
            (
                &tiny(),
                lora.replace("rtx4060", "rtx4061") + " --seq 32",
                "no card is called `rtx4061`; similar names: rtx4060",
            ),
            (
                &tiny(),
                lora.replace("config.json", "Qwen/Qwen3-9B"),
                "memtrace has Qwen/Qwen3-4B, Qwen/Qwen3-8B",
            ),
            (&tiny(), lora.replace("lora", "qlora"), "needs bitsandbytes"),
            (&tiny(), lora.replace("lora", "lor"), "invalid value 'lor'"),
            (&tiny(), format!("{lora} --set rank=0"), "--set rank=0: expected a whole number from 1 to"),
            (&without_sdpa, lora.clone(), "the model type 'gpt_oss' has no sdpa attention"),
            (
                &tiny(),
                format!("{lora} --set packing=2 --set attention=flash_attention_2"),
                "packing needs --set attention=sdpa or eager",
            ),
            (
                &tiny(),
                lora.replace("--max 1", "--seq 32 --smallest --set accumulation={}"),
                "--set accumulation={} divides a batch: add --batch N",
            ),
            (
                &tiny(),
                format!("{lora} --set dtype=foo"),
                "--set dtype=foo: expected one of bfloat16, float16",
            ),
            (
                &tiny(),
                lora.replace("--max 1", "--set dtype={} --values float16,foo"),
                "--set dtype=foo: expected one",
            ),
            (&tiny(), format!("{lora} --set attention=foo"), "--set attention=foo: expected one of eager"),
            (&tiny(), format!("{lora} --set optimizer=nothing"), "an optimizer's class: torch.optim.SGD"),
            (
                &tiny(),
                format!("{lora} --set optimizer=torch.nn.Linear"),
                "an optimizer's class: torch.optim.SGD",
            ),
            (&tiny(), format!("{lora} --seq 64 --set targets=foo"), "no part of the model is called 'foo'"),
            (
                &tiny(),
                format!("{lora} --seq 64 --set targets=("),
                "--set targets=(: not a regular expression",
            ),
            (&tiny(), format!("{lora} --set liger=on"), "needs liger_kernel"),
            (&tiny(), format!("{lora} --batch 4"), "to try one batch: --values 4"),
            (
                &tiny(),
                format!("{lora} --smallest"),
                "setting that saves memory: this recipe has accumulation",
            ),
            (&tiny(), format!("{lora} --smallest --set rank={{}}"), "a larger rank does not save memory"),
            (&tiny(), format!("{lora} --set accumulation={{}}"), "saves memory: add --smallest"),
            (
                &tiny(),
                format!("{lora} --set accumulation={{}} --set rank={{}}"),
                "{} is accumulation already",
            ),
        ] {
            let folder = TempDir::new().unwrap();
            let output = fit(torch, folder.path(), config, &arguments);
            let stderr = text(&output.stderr);
            assert_eq!(
                (output.status.code(), stderr.contains(part)),
                (Some(2), true),
                "{arguments}: {stderr}"
            );
            let left = fs::read_dir(&folder).unwrap().count();
            assert_eq!((left, stderr.contains("Traceback")), (1, false), "{arguments}: {stderr}");
        }
    });
}

#[test]
fn fit_recipe_that_is_interrupted_leaves_no_temporary_file() {
    Torch::run("2.11.0", |torch| {
        let folder = TempDir::new().unwrap();
        fs::write(folder.path().join("config.json"), tiny().to_string()).unwrap();
        let path = format!("{}:{}", torch.python.parent().unwrap().display(), std::env::var("PATH").unwrap());
        let mut command = memtrace();
        command.args([
            "fit",
            "--recipe",
            "lora",
            "--model",
            ".",
            "--seq",
            "64",
            "--phantom",
            "t4",
            "-o",
            "out",
        ]);
        command
            .current_dir(&folder)
            .env("PATH", path)
            .env("HF_HUB_OFFLINE", "1")
            .env("TMPDIR", folder.path());
        let mut fit = command.stderr(std::process::Stdio::null()).spawn().unwrap();
        while !folder.path().join("out/1").exists() && fit.try_wait().unwrap().is_none() {
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        let id = fit.id().to_string();
        assert!(std::process::Command::new("kill").args(["-INT", &id]).status().unwrap().success());
        assert!(!fit.wait().unwrap().success());
        let names = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name());
        let left: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
        let is_rest = |name: &String| name.starts_with("memtrace-") && !name.starts_with("memtrace-libcuda");
        assert!(!left.iter().any(is_rest), "{left:?}");
    });
}

/// A configuration whose logits hold nearly all of the memory, so that the parts of a batch matter.
fn with_many_words() -> Value {
    let mut config = tiny();
    config["vocab_size"] = 32_000.into();
    config
}

/// Returns the values that a search tried, and whether they fit.
fn tried(answer: &Value) -> Vec<(&str, bool)> {
    let trials = answer["trials"].as_array().unwrap();
    trials.iter().map(|trial| (trial["value"].as_str().unwrap(), trial["outcome"] == "fits")).collect()
}

#[test]
fn fit_recipe_smallest_finds_the_fewest_parts_of_a_batch_and_writes_a_script_that_trains() {
    Torch::run("2.11.0", |torch| {
        // The memory of the card, the batch, and the smallest accumulation that fits.
        for (card, batch, smallest, status) in
            [("t4,mem=1500m", "8", Some("2"), 0), ("t4", "2", Some("1"), 0), ("t4,mem=300m", "2", None, 3)]
        {
            let folder = TempDir::new().unwrap();
            let arguments = format!(
                "--recipe lora --model . --seq 512 --smallest --set accumulation={{}} --batch {batch} --phantom \
                 {card} -o out --json --write train.py"
            );
            let output = fit(torch, folder.path(), &with_many_words(), &arguments);
            let answer: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
            let stderr = text(&output.stderr);
            assert_eq!(
                (output.status.code(), answer["fits"].as_str()),
                (Some(status), smallest),
                "{card}: {stderr}{answer:#}"
            );
            let script = fs::read_to_string(folder.path().join("train.py"));
            let Some(smallest) = smallest else {
                assert!(script.is_err() && stderr.contains("nothing was written"), "{stderr}");
                assert_eq!(tried(&answer), [("2", false)]);
                continue;
            };
            let written = format!("wrote train.py: accumulation {smallest}, batch {batch}, 512 tokens");
            assert!(stderr.contains(&written), "{stderr}");
            let script = script.unwrap();
            for line in [format!("ACCUMULATION = {smallest}"), format!("BATCH = {batch}")] {
                assert!(script.lines().any(|own| own == line), "{line}: {script}");
            }
            let mut script = std::process::Command::new(&torch.python);
            script.args(["train.py", "--random", "--model", ".", "--steps", "2", "--seq", "16"]);
            let output = script.current_dir(&folder).env("HF_HUB_OFFLINE", "1").output().unwrap();
            assert_eq!(text(&output.stdout).matches("loss").count(), 2, "{}", text(&output.stderr));
        }
    });
}

#[test]
fn fit_recipe_finds_the_largest_rank_and_the_fewest_layers_to_offload() {
    Torch::run("2.11.0", |torch| {
        let folder = TempDir::new().unwrap();
        let ranks = "--recipe lora --model . --seq 32 --set rank={} --values 4,64 --phantom t4 --json -o out";
        let output = fit(torch, folder.path(), &tiny(), ranks);
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        assert_eq!(answer["fits"], "64", "{}{answer:#}", text(&output.stderr));
        let peaks: Vec<i64> = ["4", "64"]
            .iter()
            .map(|rank| {
                let trials = answer["trials"].as_array().unwrap();
                let trial = trials.iter().find(|trial| trial["value"] == **rank).unwrap();
                trial["peak_allocated_bytes"].as_i64().unwrap()
            })
            .collect();
        assert!(peaks[0] < peaks[1], "{peaks:?}");

        // Each layer has 64 MiB of weights.
        let mut config = tiny();
        config["hidden_size"] = 1024.into();
        config["intermediate_size"] = 9_900.into();
        config["num_hidden_layers"] = 6.into();
        let folder = TempDir::new().unwrap();
        let layers = "--recipe infer --model . --seq 32 --smallest --set offloaded_layers={} --phantom \
                      t4,mem=430m --json -o out";
        let output = fit(torch, folder.path(), &config, layers);
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let fits = answer["fits"].as_str().and_then(|fits| fits.parse::<u64>().ok());
        assert!(fits.is_some_and(|fits| (1..=5).contains(&fits)), "{}{answer:#}", text(&output.stderr));
        assert_eq!(tried(&answer)[0], ("6", true));
    });
}

/// A stand-in for vLLM with the interface that the recipe uses. Its cache is what one GPU leaves free, and it
/// refuses as vLLM does.
const VLLM: &str = r#"
import types
import torch

class LLM:
    def __init__(self, model, **options):
        assert set(options) == {
            "load_format", "skip_tokenizer_init", "max_model_len", "max_num_seqs", "gpu_memory_utilization",
            "tensor_parallel_size", "dtype", "quantization", "kv_cache_dtype", "cpu_offload_gb",
            "enforce_eager", "trust_remote_code",
        }, options
        if torch.cuda.is_available():
            self.weights = torch.empty(64 << 20, device="cuda")
        blocks = 20 * options["tensor_parallel_size"]
        if blocks * 16 < options["max_model_len"]:
            raise ValueError("No available memory for the cache blocks.")
        cache = types.SimpleNamespace(num_gpu_blocks=blocks, block_size=16)
        self.llm_engine = types.SimpleNamespace(vllm_config=types.SimpleNamespace(cache_config=cache))
"#;

#[test]
fn fit_recipe_serve_prints_options_writes_a_script_and_finds_the_fewest_gpus() {
    Torch::run("2.11.0", |torch| {
        let folder = TempDir::new().unwrap();
        let package = folder.path().join("packages/vllm");
        fs::create_dir_all(&package).unwrap();
        fs::write(package.join("__init__.py"), VLLM).unwrap();
        let run = |arguments: &str| {
            let output = fit(torch, folder.path(), &tiny(), arguments);
            (output.status.code(), text(&output.stdout), text(&output.stderr))
        };
        let serve = "--recipe serve --model .";
        let (status, told, stderr) = run(&format!("{serve} --seq 128,256 --phantom t4 --write serve.py"));
        assert_eq!(status, Some(0), "{told}{stderr}");
        let flags = "vllm serve . --gpu-memory-utilization 0.92 --max-model-len 128 --max-num-seqs 2";
        assert!(told.contains(&format!("t4: {flags}")), "{told}");
        assert!(stderr.contains("wrote serve.py: 2 requests, 128 tokens, as on Tesla T4"), "{stderr}");
        let script = fs::read_to_string(folder.path().join("serve.py")).unwrap();
        assert!(script.contains("\nBATCH = 2\n") && script.contains("\nSEQ = 128\n"), "{script}");
        let mut alone = std::process::Command::new(&torch.python);
        alone.args(["serve.py", "--random", "--model", "."]).current_dir(&folder);
        let output = alone.env("PYTHONPATH", folder.path().join("packages")).output().unwrap();
        assert_eq!(text(&output.stdout), "KV cache: 320 tokens\n", "{}", text(&output.stderr));

        let gpus = format!("{serve} --smallest --set gpus={{}} --phantom 8xt4 -o out");
        let (status, told, stderr) = run(&format!("{gpus} --seq 512 --write two.py"));
        assert_eq!(status, Some(0), "{told}{stderr}");
        assert!(told.contains("2 fits, 1 does not"), "{told}");
        assert!(told.contains("--max-model-len 512 --max-num-seqs 1 --tensor-parallel-size 2"), "{told}");
        assert!(stderr.contains("wrote two.py: gpus 2, batch 256, 512 tokens"), "{stderr}");
        for (arguments, part) in [
            (format!("{serve} --phantom t4 --set gpus=2"), "--set gpus=2: the card is one GPU"),
            (format!("{serve} --phantom t4 --set utilization=1.5"), "above 0 and at most 1"),
            (format!("{serve} --phantom t4 --smallest"), "gpus, cpu_offload_gb"),
        ] {
            let (status, told, stderr) = run(&arguments);
            assert_eq!((status, told.as_str(), stderr.contains(part)), (Some(2), "", true), "{stderr}");
        }
    });
}

/// Returns the python with trl, diffusers and timm that `scripts/env programs` installs. If it is missing,
/// the caller must skip its test.
fn programs() -> Option<Torch> {
    let python = cache().join("programs-base/bin/python");
    if python.exists() {
        return Some(Torch { version: "2.11.0".to_owned(), python });
    }
    missing("the libraries are not installed: run scripts/env programs");
    None
}

fn tiny_unet() -> Value {
    json!({
        "_class_name": "UNet2DConditionModel", "addition_embed_type": "text_time",
        "addition_time_embed_dim": 32, "attention_head_dim": [2, 4], "block_out_channels": [32, 64],
        "cross_attention_dim": 64, "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
        "in_channels": 4, "layers_per_block": 1, "out_channels": 4, "norm_num_groups": 8,
        "projection_class_embeddings_input_dim": 256, "sample_size": 16,
        "transformer_layers_per_block": [1, 1], "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
        "use_linear_projection": true
    })
}

fn tiny_flux() -> Value {
    json!({
        "_class_name": "FluxTransformer2DModel", "attention_head_dim": 16, "guidance_embeds": true,
        "in_channels": 64, "joint_attention_dim": 32, "num_attention_heads": 2, "num_layers": 1,
        "num_single_layers": 1, "patch_size": 1, "pooled_projection_dim": 32, "axes_dims_rope": [4, 6, 6]
    })
}

/// Runs a recipe with one batch on a simulated card, and then the written script alone on the CPU, which must
/// train.
fn trains(config: &Value, recipe: &str, own: &str) {
    let Some(torch) = programs() else { return };
    let folder = TempDir::new().unwrap();
    let arguments = format!("--recipe {recipe} {own} --max 1 -o out --json --write train.py");
    let output = fit(&torch, folder.path(), config, &arguments);
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let stderr = text(&output.stderr);
    assert_eq!(
        (output.status.code(), &answer["fits"]),
        (Some(0), &json!("1")),
        "{recipe}: {stderr}{answer:#}"
    );
    let trial = &answer["trials"][0];
    assert!(trial["peak_allocated_bytes"].as_i64() > Some(0), "{answer:#}");
    assert!(trial["peak_host_bytes"].as_i64() > Some(10 << 20), "{answer:#}");

    let mut script = std::process::Command::new(&torch.python);
    let model = if recipe == "vision" { "resnet18" } else { "." };
    script.args(["train.py", "--random", "--model", model, "--steps", "2"]).current_dir(&folder);
    let output = script.env("HF_HUB_OFFLINE", "1").env("OMP_NUM_THREADS", "1").output().unwrap();
    let told = text(&output.stdout);
    assert!(output.status.success(), "{recipe}: {}", text(&output.stderr));
    assert!(told.matches("loss").count() >= 2, "{recipe}: {told}");
    let mut left: Vec<String> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| !name.starts_with("memtrace-libcuda"))
        .collect();
    left.sort();
    assert_eq!(left, ["config.json", "out", "train.py"], "{recipe}");
}

#[test]
fn fit_recipe_dpo_writes_a_script_that_trains() {
    trains(&tiny(), "dpo", "--model . --seq 64 --phantom rtx4060");
}

/// Cards before compute capability 8.0 cannot train in bfloat16.
#[test]
fn fit_recipe_dpo_on_an_older_card_asks_for_float16() {
    let Some(torch) = programs() else { return };
    let folder = TempDir::new().unwrap();
    let arguments = "--recipe dpo --model . --seq 64 --phantom t4 --max 1";
    let output = fit(&torch, folder.path(), &tiny(), arguments);
    let told = text(&output.stdout) + &text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(
        told.contains("this card cannot train in bfloat16") && told.contains("--set dtype=float16"),
        "{told}"
    );
    let output = fit(&torch, folder.path(), &tiny(), &format!("{arguments} --set dtype=float16"));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}

#[test]
#[ignore = "scripts/check --deep runs it"]
fn fit_recipe_grpo_writes_a_script_that_trains() {
    trains(&tiny(), "grpo", "--model . --seq 64 --phantom rtx4060 --set generations=2");
}

#[test]
fn fit_recipe_pretrain_runs_a_rank_and_writes_a_script_that_trains() {
    trains(&tiny(), "pretrain", "--model . --seq 64 --phantom 8xt4 --ranks 0");
}

#[test]
fn fit_recipe_diffusion_trains_sdxl() {
    trains(&tiny_unet(), "diffusion", "--model . --size 64 --phantom t4");
}

#[test]
#[ignore = "scripts/check --deep runs it"]
fn fit_recipe_diffusion_trains_flux() {
    trains(&tiny_flux(), "diffusion", "--model . --size 64 --phantom t4");
}

#[test]
#[ignore = "scripts/check --deep runs it"]
fn fit_recipe_vision_writes_a_script_that_trains() {
    trains(&tiny(), "vision", "--model resnet18 --size 64 --phantom t4");
}

#[test]
fn fit_recipe_refuses_models_and_cards_of_other_recipes_in_one_line() {
    let Some(torch) = programs() else { return };
    for (config, arguments, part) in [
        (&tiny(), "--recipe diffusion --model .", "trains UNet2DConditionModel and FluxTransformer2DModel"),
        (&tiny_unet(), "--recipe diffusion --model . --size 100", "multiples of 16 pixels"),
        (&tiny_unet(), "--recipe lora --model .", "has no model type None"),
        (&tiny(), "--recipe vision --model resnet81", "timm has no such model; similar names: resnet18"),
        (&tiny(), "--recipe serve --model .", "needs vllm: "),
        (&tiny(), "--recipe zero --model .", "needs deepspeed: "),
        (&tiny(), "--recipe pretrain --model . --phantom 8xt4", "add --ranks 0"),
        (
            &tiny(),
            "--recipe pretrain --model . --phantom 8xt4 --ranks 0 --set cpu_offload=maybe",
            "on or off",
        ),
        (&tiny(), "--recipe dpo --model . --set optimizer=nothing", "expected one of adamw_torch"),
        (&tiny(), "--recipe dpo --model . --set attention=foo", "expected one of eager"),
        (&tiny(), "--recipe grpo --model . --set generations=1", "a whole number from 2"),
        (&tiny(), "--recipe qlora --model . --set dtype=foo", "expected one of bfloat16"),
        (
            &tiny_unet(),
            "--recipe diffusion --model . --set targets=to_q,foo",
            "no part of the model is called 'foo'",
        ),
        (&tiny_unet(), "--recipe diffusion --model . --set dtype=foo", "expected one of bfloat16"),
        (&tiny(), "--recipe vision --model resnet18 --set dtype=foo", "expected one of bfloat16"),
        (&tiny(), "--recipe vision --model resnet18 --set optimizer=foo", "an optimizer's class"),
        (&tiny(), "--recipe infer --model . --set cache=foo", "expected one of dynamic"),
        (&tiny(), "--recipe infer --model . --set offloaded_layers=-1", "a whole number from 0"),
        (&tiny(), "--recipe dpo --model . --phantom 8xt4", "uses one GPU"),
        (&tiny(), "--recipe pretrain --model . --phantom {}xt4 --ranks 0", "--phantom {gpus}xt4 --gpus 8,16"),
    ] {
        let card = if arguments.contains("--phantom") { "" } else { " --phantom t4" };
        let folder = TempDir::new().unwrap();
        let output = fit(&torch, folder.path(), config, &format!("{arguments}{card}"));
        let stderr = text(&output.stderr);
        assert_eq!((output.status.code(), stderr.contains(part)), (Some(2), true), "{arguments}: {stderr}");
        assert_eq!((fs::read_dir(&folder).unwrap().count(), stderr.lines().count()), (1, 1), "{stderr}");
    }
}
