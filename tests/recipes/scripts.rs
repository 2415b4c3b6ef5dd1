//! The scripts that `memtrace fit --recipe --write` writes for trl, diffusers, timm and several GPUs.

use std::fs;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::{fit, tiny, with_many_words};
use crate::common::torch::{Torch, cache, missing, text};

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
/// train. Returns the python and the folder with `train.py`, or `None` if the libraries are missing.
fn trains(config: &Value, recipe: &str, own: &str) -> Option<(Torch, TempDir)> {
    let torch = programs()?;
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
    Some((torch, folder))
}

/// Runs the script that [`trains`] left, on too little data and on enough, and loads the model that it saved.
const SAVES: &str = r#"
import array, runpy, sys
import torch, transformers

def run(tokens):
    with open("tokens.bin", "wb") as file:
        array.array("i", (index % 512 for index in range(tokens))).tofile(file)
    sys.argv = "train.py --model . --batch 2 --seq 64 --steps 2 --data tokens.bin".split()
    return runpy.run_path("train.py", run_name="__main__")["model"]

try:
    run(100)
except SystemExit as refusal:
    print(refusal)
torch.distributed.destroy_process_group()
trained = {name: tensor.full_tensor() for name, tensor in run(200).state_dict().items()}
saved, facts = transformers.AutoModelForCausalLM.from_pretrained("trained", output_loading_info=True)
print({name: list(found) for name, found in facts.items() if found})
print("equal:", trained.keys() == saved.state_dict().keys()
      and all(torch.equal(trained[name], tensor) for name, tensor in saved.state_dict().items()))
"#;

#[test]
fn fit_recipe_dpo_writes_a_script_that_trains() {
    trains(&tiny(), "dpo", "--model . --seq 64 --phantom rtx4060");
}

#[test]
fn fit_recipe_lora_packs_documents_and_trains() {
    trains(&tiny(), "lora", "--model . --seq 64 --phantom t4 --set packing=2");
}

/// Liger's loss never holds the logits of the whole batch.
#[test]
fn fit_recipe_liger_needs_less_memory() {
    let Some(torch) = programs() else { return };
    let folder = TempDir::new().unwrap();
    let peak = |liger: &str| {
        let arguments = format!(
            "--recipe lora --model . --seq 512 --phantom rtx4060 --values 2 --set liger={liger} --json -o {liger}"
        );
        let output = fit(&torch, folder.path(), &with_many_words(), &arguments);
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        assert_eq!(answer["fits"], "2", "{}{answer:#}", text(&output.stderr));
        answer["trials"][0]["peak_allocated_bytes"].as_i64().unwrap()
    };
    let [with, without] = ["on", "off"].map(peak);
    assert!(with < without / 2, "{with} {without}");
}

/// Runs scripts one after another in one process, so that torch is imported once.
const EACH: &str = "
import runpy, sys, torch
files, sys.argv = sys.argv[1:3], ['train.py', *sys.argv[3:]]
for file in files:
    torch.manual_seed(0)
    print('script', file, flush=True)
    runpy.run_path(file, run_name='__main__')
";

/// Returns the losses of three steps of a script's training in float32, with SGD, for the whole batch of 5 and
/// for two parts of it.
fn losses(torch: &Torch, recipe: &str, model: &str) -> [Vec<String>; 2] {
    let folder = TempDir::new().unwrap();
    let size = if recipe == "vision" { "--size 224" } else { "--seq 32" };
    let own = match recipe {
        "pretrain" => "--phantom 8xt4 --ranks 0",
        _ => "--phantom t4 --set dtype=float32 --set autocast=off",
    };
    let arguments = format!(
        "--recipe {recipe} --model {model} {size} {own} --set accumulation=2 --set optimizer=torch.optim.SGD \
         --set learning_rate=0.5 --values 5 --write parts.py"
    );
    let output = fit(torch, folder.path(), &tiny(), &arguments);
    assert!(output.status.success(), "{arguments}: {}", text(&output.stderr));
    // FSDP computes in bfloat16, where a sum depends on its order by more than the printed digits.
    let (half, float) = ("param_dtype=torch.bfloat16", "param_dtype=torch.float32");
    let parts = fs::read_to_string(folder.path().join("parts.py")).unwrap();
    assert_eq!(parts.contains(half), recipe == "pretrain");
    let parts = parts.replace(half, float);
    fs::write(folder.path().join("parts.py"), &parts).unwrap();
    let whole = parts.replace("\nACCUMULATION = 2\n", "\nACCUMULATION = 1\n");
    assert_ne!(whole, parts, "{recipe}");
    fs::write(folder.path().join("whole.py"), whole).unwrap();
    let mut script = std::process::Command::new(&torch.python);
    script.args(["-c", EACH, "whole.py", "parts.py", "--random", "--model", model, "--steps", "3"]);
    script.current_dir(&folder).env("HF_HUB_OFFLINE", "1").env("OMP_NUM_THREADS", "1");
    let output = script.output().unwrap();
    let told = text(&output.stdout);
    let (whole, parts) = told.split_once("script parts.py").unwrap_or_default();
    let of = |told: &str| -> Vec<String> {
        told.lines().filter_map(|line| Some(line.split_once(": loss ")?.1.to_owned())).collect()
    };
    let losses = [of(whole), of(parts)];
    assert!(losses.iter().all(|losses| losses.len() == 3), "{recipe}: {told}{}", text(&output.stderr));
    losses
}

/// The batch of 5 has a part of 3 and one of 2.
#[test]
fn fit_recipe_accumulation_has_the_gradient_and_the_loss_of_the_whole_batch() {
    let Some(torch) = programs() else { return };
    for (recipe, model) in [("full", "."), ("pretrain", "."), ("vision", "vit_tiny_patch16_224")] {
        let [whole, parts] = losses(&torch, recipe, model);
        assert_eq!(whole, parts, "{recipe}");
        assert_ne!(whole[0], whole[2], "{recipe} trains");
    }
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
    let own = "--model . --seq 64 --phantom 8xt4 --ranks 0";
    let Some((torch, folder)) = trains(&tiny(), "pretrain", own) else { return };
    let mut script = std::process::Command::new(&torch.python);
    script.args(["-c", SAVES]).current_dir(&folder).env("HF_HUB_OFFLINE", "1").env("OMP_NUM_THREADS", "1");
    let output = script.output().unwrap();
    let told = text(&output.stdout);
    let lines: Vec<&str> = told.lines().filter(|line| !line.starts_with("step ")).collect();
    let expected = ["--data has 100 tokens, fewer than 2 rows of 64", "{}", "equal: True"];
    assert_eq!(lines, expected, "{}", text(&output.stderr));
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

/// Each swapped block has its weights in host memory. One of them at a time is on the card.
#[test]
fn fit_recipe_diffusion_swaps_the_fewest_blocks_that_fit() {
    let Some(torch) = programs() else { return };
    let mut config = tiny_flux();
    for (name, value) in [("attention_head_dim", 64), ("num_attention_heads", 16), ("num_single_layers", 7)] {
        config[name] = value.into();
    }
    config["axes_dims_rope"] = json!([16, 24, 24]);
    let folder = TempDir::new().unwrap();
    let search = "--recipe diffusion --model . --size 64 --smallest --set blocks_to_swap={} --phantom \
                  t4,mem=430m --json -o out --write train.py";
    let output = fit(&torch, folder.path(), &config, search);
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let fits = answer["fits"].as_str().and_then(|fits| fits.parse::<i64>().ok());
    assert!(fits.is_some_and(|fits| (2..=7).contains(&fits)), "{}{answer:#}", text(&output.stderr));
    let figures = |swapped: i64| {
        let trials = answer["trials"].as_array().unwrap();
        let trial = trials.iter().find(|trial| trial["value"] == *swapped.to_string()).unwrap();
        [&trial["peak_allocated_bytes"], &trial["peak_host_bytes"]].map(|bytes| bytes.as_i64().unwrap())
    };
    // The model has one double block, which is swapped first, and seven single blocks.
    let [most, fewest] = [figures(8), figures(fits.unwrap())];
    let more = (8 - fits.unwrap()) * single_block_bytes(1024);
    let [on_card, on_host] = [fewest[0] - most[0], most[1] - fewest[1]];
    assert!((more * 9 / 10..more * 11 / 10).contains(&on_card), "{on_card} {more}: {answer:#}");
    assert!((more * 8 / 10..more * 12 / 10).contains(&on_host), "{on_host} {more}: {answer:#}");
    let script = fs::read_to_string(folder.path().join("train.py")).unwrap();
    assert!(script.contains(&format!("BLOCKS_TO_SWAP = {}\n", fits.unwrap())), "{script}");
}

/// Returns the bytes of the weights of a single block of FLUX in 16 bits: queries, keys and values, the two linear
/// layers around the activation, and that of the modulation.
fn single_block_bytes(width: i64) -> i64 {
    2 * (3 + 4 + 5 + 3) * width * width
}

#[test]
#[ignore = "scripts/check --deep runs it"]
fn fit_recipe_diffusion_with_swapped_blocks_writes_a_script_that_trains() {
    trains(&tiny_flux(), "diffusion", "--model . --size 64 --phantom t4 --set blocks_to_swap=1");
}

#[test]
#[ignore = "scripts/check --deep runs it"]
fn fit_recipe_vision_writes_a_script_that_trains() {
    let own = "--model resnet18 --size 64 --phantom t4";
    let Some((torch, folder)) = trains(&tiny(), "vision", own) else { return };
    let images = "
import pathlib, PIL.Image, runpy, sys
for place in range(6):
    folder = pathlib.Path('images', 'ab'[place % 2])
    folder.mkdir(parents=True, exist_ok=True)
    PIL.Image.new('RGB', (80, 80), (40 * place, 90, 10)).save(folder / f'{place}.png')
script = pathlib.Path('train.py').read_text().replace('pretrained=not args.random', 'pretrained=False')
for classes in ('CLASSES = 1000', 'CLASSES = 2'):
    pathlib.Path('own.py').write_text(script.replace('CLASSES = 1000', classes))
    sys.argv = 'own.py --data images --model resnet18 --batch 2 --steps 4'.split()
    try:
        runpy.run_path('own.py', run_name='__main__')
    except SystemExit as refusal:
        print(refusal)
print(pathlib.Path('trained.pt').exists())
";
    let mut script = std::process::Command::new(&torch.python);
    script.args(["-c", images]).current_dir(&folder).env("OMP_NUM_THREADS", "1");
    let output = script.output().unwrap();
    let told = text(&output.stdout);
    let lines: Vec<&str> = told.lines().collect();
    let refusal = "--data has a folder for each of 2 classes: set CLASSES = 2";
    assert_eq!((lines.len(), lines[0], lines[5]), (6, refusal, "True"), "{told}{}", text(&output.stderr));
}

#[test]
fn fit_recipe_refuses_models_and_cards_of_other_recipes_in_one_line() {
    let Some(torch) = programs() else { return };
    for (config, arguments, part) in [
        (&tiny(), "--recipe diffusion --model .", "trains UNet2DConditionModel and FluxTransformer2DModel"),
        (&tiny_unet(), "--recipe diffusion --model . --size 100", "multiples of 16 pixels"),
        (&tiny_unet(), "--recipe diffusion --model . --size 100,128", "--size 100: the width and height"),
        (
            &tiny_unet(),
            "--recipe diffusion --model . --size wide",
            "--size: `wide` is not a length; expected pixels",
        ),
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
        (&tiny(), "--recipe vision --model resnet18 --set dtype=float16", "use bfloat16 or float32"),
        (&tiny(), "--recipe vision --model resnet18 --set optimizer=foo", "an optimizer's class"),
        (&tiny(), "--recipe infer --model . --set cache=foo", "expected one of dynamic"),
        (&tiny(), "--recipe infer --model . --set offloaded_layers=-1", "a whole number from 0"),
        (&tiny_unet(), "--recipe diffusion --model . --set blocks_to_swap=few", "a whole number from 0"),
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
