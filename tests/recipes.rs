//! `memtrace fit --recipe`: scripts for a model that the user names, on the simulated GPU and unchanged on
//! the CPU.

use std::fs;
use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::torch::{Torch, memtrace, text};

mod scripts;
mod serve;

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
    let mut command = memtrace();
    command.arg("fit").args(arguments.split(' ')).current_dir(folder).env("PATH", torch.path());
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

/// `--write` takes the first row of the answer, which `--prices` sorts, and not the first card of `--phantom`.
#[test]
fn fit_recipe_with_prices_writes_the_script_of_the_cheapest_card_that_fits() {
    Torch::run("2.11.0", |torch| {
        // On the smallest card, which is the cheapest, no batch fits.
        let cards = "h100-80g,rtx4060,t4,mem=64m,context=50m";
        for (prices, device) in [
            ("h100-80g,2\nrtx4060,0.2\nt4,0.1\n", "NVIDIA GeForce RTX 4060"),
            ("h100-80g,0.2\nrtx4060,2\nt4,0.1\n", "NVIDIA H100 80GB HBM3"),
        ] {
            let folder = TempDir::new().unwrap();
            fs::write(folder.path().join("prices.csv"), prices).unwrap();
            let arguments = format!(
                "--recipe lora --model config.json --seq 32 --max 1 --phantom {cards} -o out --prices prices.csv \
                 --write train.py"
            );
            let output = fit(torch, folder.path(), &tiny(), &arguments);
            let (told, stderr) = (text(&output.stdout), text(&output.stderr));
            let rows: Vec<&str> = told.lines().filter_map(|line| line.split_whitespace().next()).collect();
            assert_eq!(rows[1], "t4,mem=64m,context=50m", "{told}");
            assert!(
                stderr.contains(&format!("wrote train.py: batch 1, 32 tokens, as on {device}")),
                "{stderr}"
            );
        }
    });
}

/// Runs Python code, and returns what it prints. Its `run(arguments)` runs the written script and returns the script's
/// variables.
fn checked(torch: &Torch, folder: &Path, checks: &str) -> String {
    let run = "
import runpy, sys
def run(arguments):
    sys.argv = ['train.py', *arguments.split()]
    return runpy.run_path('train.py', run_name='__main__')
";
    let mut script = std::process::Command::new(&torch.python);
    script.args(["-c", &format!("{run}{checks}")]).current_dir(folder);
    let output = script.env("HF_HUB_OFFLINE", "1").env("OMP_NUM_THREADS", "1").output().unwrap();
    let told = text(&output.stdout);
    assert!(output.status.success(), "{told}{}", text(&output.stderr));
    told
}

/// The loss of a packed row is the mean over its documents, each computed alone.
#[test]
fn fit_recipe_full_keeps_packed_documents_apart_and_saves_the_tokenizer() {
    Torch::run("2.11.0", |torch| {
        let folder = TempDir::new().unwrap();
        let arguments = "--recipe full --model . --seq 32 --phantom t4 --max 1 -o out --write train.py --set packing=4 \
                         --set dtype=float32 --set autocast=off --set learning_rate=1e-12";
        let output = fit(torch, folder.path(), &tiny(), arguments);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let checks = "
import tokenizers, torch, transformers
words = {'<end>': 0, **{f'w{number}': number for number in range(1, 512)}}
inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token='<end>'))
inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token='<end>').save_pretrained('real')
config = transformers.AutoConfig.from_pretrained('.')
transformers.AutoModelForCausalLM.from_config(config).save_pretrained('real')
with open('book.txt', 'w') as file:
    file.write(' '.join(f'w{number % 500 + 1}' for number in range(70)))
end = run('--model real --data book.txt --seq 32 --batch 1 --steps 2')
documents = end['part'].view(4, 8)
alone = sum(end['model'](input_ids=one[None], labels=one[None]).loss.item() for one in documents) / 4
print('equal:', abs(alone - end['loss'].item()) < 1e-4, alone, end['loss'].item())
print('tokens:', transformers.AutoTokenizer.from_pretrained('trained')('w3 w4').input_ids)
";
        let told = checked(torch, folder.path(), checks);
        assert!(told.contains("equal: True") && told.contains("tokens: [3, 4]"), "{told}");
    });
}

/// Buffers that no checkpoint has, such as the frequencies of rotary embeddings, must not stay unwritten.
/// Two jobs of one rank can run at the same time, as trials do, because they share no port.
#[test]
fn fit_recipe_pretrain_writes_the_buffers_of_the_model_and_runs_twice_at_once() {
    Torch::run("2.11.0", |torch| {
        let folder = TempDir::new().unwrap();
        let arguments = "--recipe pretrain --model . --seq 32 --phantom t4 --max 1 -o out --write train.py";
        let output = fit(torch, folder.path(), &tiny(), arguments);
        assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
        let checks = "
import subprocess, sys, transformers
job = [sys.executable, 'train.py', *'--random --model . --seq 32 --steps 100'.split()]
print('at once:', [job.wait() for job in [subprocess.Popen(job), subprocess.Popen(job)]])
model = run('--random --model . --seq 32 --steps 1')['model']
real = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained('.'))
buffers = dict(model.named_buffers())
print('buffers:', len(buffers), all(buffers[name].equal(buffer) for name, buffer in real.named_buffers()))
";
        let told = checked(torch, folder.path(), checks);
        assert!(told.contains("at once: [0, 0]") && told.contains("buffers: 1 True"), "{told}");
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
            (&tiny(), format!("{lora} --set rank=4 --set RANK=8"), "--set RANK=8: rank is set twice"),
            (&tiny(), lora.replace("--max 1", "--seq 64 --values 0,1"), "--values: `0` is not a batch"),
            (&tiny(), lora.replace("--max 1", "--seq 64 --values two"), "--values: `two` is not a batch"),
            (&tiny(), format!("{lora} --write none/train.py"), "there is no folder none"),
            (
                &tiny(),
                lora.replace("lora", "full") + " --set dtype=float16",
                "the recipe full trains the weights in this type",
            ),
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

/// Otherwise the script would train on the CPU, for minutes, before the answer is that it used no GPU.
#[test]
fn fit_recipe_without_a_gpu_asks_for_a_simulated_one() {
    if Path::new("/dev/nvidiactl").exists() {
        return;
    }
    Torch::run("2.11.0", |torch| {
        let folder = TempDir::new().unwrap();
        // The model is not looked for before, which would take seconds.
        for model in [".", "no/such-model"] {
            let arguments = format!("--recipe lora --model {model} --seq 32 -o out");
            let output = fit(torch, folder.path(), &tiny(), &arguments);
            let stderr = text(&output.stderr);
            let part = "this machine has no NVIDIA GPU; simulate one: --phantom h100-80g";
            assert_eq!((output.status.code(), stderr.contains(part)), (Some(2), true), "{stderr}");
            assert!(!folder.path().join("out").exists());
        }
    });
}

#[test]
fn fit_recipe_that_is_interrupted_leaves_no_temporary_file() {
    Torch::run("2.11.0", |torch| {
        for signal in ["INT", "KILL"] {
            ends_without_a_rest(torch, signal);
        }
    });
}

fn ends_without_a_rest(torch: &Torch, signal: &str) {
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("config.json"), tiny().to_string()).unwrap();
    let mut command = memtrace();
    command.args(["fit", "--recipe", "lora", "--model", ".", "--seq", "64", "--phantom", "t4", "-o", "out"]);
    command
        .current_dir(&folder)
        .env("PATH", torch.path())
        .env("HF_HUB_OFFLINE", "1")
        .env("TMPDIR", folder.path());
    let mut fit = command.stderr(std::process::Stdio::null()).spawn().unwrap();
    while !folder.path().join("out/1").exists() && fit.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(50));
    }
    let id = fit.id().to_string();
    assert!(
        std::process::Command::new("kill").args([&format!("-{signal}"), &id]).status().unwrap().success()
    );
    assert!(!fit.wait().unwrap().success());
    let left = || {
        let names = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name());
        let names = names.map(|name| name.into_string().unwrap());
        let is_rest = |name: &String| name.starts_with("memtrace-") && !name.starts_with("memtrace-libcuda");
        names.filter(is_rest).collect::<Vec<String>>()
    };
    if signal == "KILL" {
        // The run of the search still works. Once it has ended, the next launch removes what is left.
        assert!(!left().is_empty());
        let deadline = Instant::now() + Duration::from_secs(120);
        while !left().is_empty() && Instant::now() < deadline {
            let launch = memtrace().args(["run", "--", "true"]).env("TMPDIR", folder.path()).output();
            assert!(launch.unwrap().status.success());
            std::thread::sleep(Duration::from_millis(200));
        }
    }
    assert_eq!(left(), Vec::<String>::new(), "{signal}");
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
            let set = &answer["settings"];
            let number = |text: &str| Value::from(text.parse::<u64>().unwrap());
            assert_eq!((&set["accumulation"], &set["batch"]), (&number(smallest), &number(batch)));
            assert_eq!((&answer["value_name"], &set["seq"]), (&"accumulation".into(), &512.into()));
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
        // The host holds the weights of the layers that are offloaded.
        let host = |layers: u64| {
            let trials = answer["trials"].as_array().unwrap();
            let layers = layers.to_string();
            let trial = trials.iter().find(|trial| trial["value"] == *layers).unwrap();
            trial["peak_host_bytes"].as_i64().unwrap()
        };
        let fewest = fits.unwrap();
        let more = (6 - fewest) as i64 * (64 << 20);
        let difference = host(6) - host(fewest);
        assert!((more * 8 / 10..more * 12 / 10).contains(&difference), "{difference} {more}: {answer:#}");
    });
}
