//! `memtrace fit --recipe serve` with a stand-in for vLLM.

use std::fs;

use serde_json::Value;
use tempfile::TempDir;

use super::{fit, tiny};
use crate::common::torch::{Torch, text};

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
        gpus = options["tensor_parallel_size"]
        if 4 % gpus:
            raise ValueError(f"4 attention heads must be divisible by tensor parallel size ({gpus})")
        if torch.cuda.is_available():
            self.weights = torch.empty(64 << 20, device="cuda")
        blocks = 20 * gpus
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
        assert!(told.contains("gpus 2 fits, 1 does not"), "{told}");
        // The model has 4 heads, which 8 GPUs cannot divide: the search goes on with fewer.
        assert!(told.contains("does not run on 8 GPUs") && told.contains("parallel size (8)"), "{told}");
        assert!(told.contains("--max-model-len 512 --max-num-seqs 1 --tensor-parallel-size 2"), "{told}");
        assert!(stderr.contains("wrote two.py: gpus 2, batch 256, 512 tokens"), "{stderr}");
        fs::write(folder.path().join("prices"), "t4,1\nl4,0.4\n").unwrap();
        let cards = gpus.replace("8xt4 -o out", "8xt4,8xl4 --prices prices -o cards --json");
        let (status, told, stderr) = run(&format!("{cards} --seq 512"));
        assert_eq!(status, Some(0), "{told}{stderr}");
        let answer: Value = serde_json::from_str(&told).unwrap();
        let of = |row: usize, name: &str| answer["rows"][row][name].clone();
        assert_eq!([of(0, "card"), of(1, "card")], ["8xl4", "8xt4"], "{told}");
        assert_eq!([of(0, "price"), of(1, "price")], [0.8, 2.0], "of two GPUs: {told}");
        assert_eq!([of(0, "fits"), of(1, "too_big")], ["2", "1"], "{told}");
        let set = &answer["rows"][0]["settings"];
        assert_eq!((&set["gpus"], &set["seq"], &set["eager"]), (&2.into(), &512.into(), &false.into()));
        assert!(of(0, "flags").as_str().unwrap().contains("--tensor-parallel-size 2"), "{told}");

        for (arguments, part) in [
            (
                format!("{serve} --phantom t4 --set utilization={{}}"),
                "name the values from least to most memory",
            ),
            (format!("{serve} --phantom t4 --set gpus=2"), "--set gpus=2: the card is one GPU"),
            (format!("{serve} --phantom t4 --set utilization=1.5"), "above 0 and at most 1"),
            (format!("{serve} --phantom t4 --smallest"), "gpus, cpu_offload_gb"),
        ] {
            let (status, told, stderr) = run(&arguments);
            assert_eq!((status, told.as_str(), stderr.contains(part)), (Some(2), "", true), "{stderr}");
        }
    });
}
