"""Starts vLLM on a model that has published sizes, but dummy weights and a made-up tokenizer.

    serving_engine.py FOLDER [--model NAME] [--generate N] [OPTION=VALUE ...]

Writes the model's files into FOLDER and starts `vllm.LLM` with them. Each OPTION is an argument of `LLM`,
with its value in JSON. Prints `tokens=N blocks=N` of the KV cache as the last line.
"""

import argparse
import json
import os
import pathlib

# Sizes from the models' published config.json on Hugging Face.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
QWEN = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-06}
QWEN3 = {**QWEN, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128}


def sizes(hidden, intermediate, layers, heads, kv_heads, vocabulary, positions, theta):
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "rope_theta": theta,
    }


MODELS = {
    "llama-3-8b": {**LLAMA, **sizes(4096, 14336, 32, 32, 8, 128256, 8192, 5e5)},
    "llama-3.1-8b": {**LLAMA, **sizes(4096, 14336, 32, 32, 8, 128256, 131072, 5e5)},
    "llama-2-7b": {**LLAMA, **sizes(4096, 11008, 32, 32, 32, 32000, 4096, 1e4)},
    "codellama-7b": {**LLAMA, **sizes(4096, 11008, 32, 32, 32, 32016, 16384, 1e6)},
    "llama-3.1-70b": {**LLAMA, **sizes(8192, 28672, 80, 64, 8, 128256, 131072, 5e5)},
    "mistral-7b": {
        **LLAMA,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        **sizes(4096, 14336, 32, 32, 8, 32768, 32768, 1e6),
    },
    "qwen2.5-7b": {**QWEN, **sizes(3584, 18944, 28, 28, 4, 152064, 32768, 1e6)},
    "qwen2.5-72b": {**QWEN, **sizes(8192, 29568, 80, 64, 8, 152064, 32768, 1e6)},
    "qwen3-0.6b": {**QWEN3, "tie_word_embeddings": True, **sizes(1024, 3072, 28, 16, 8, 151936, 40960, 1e6)},
    "qwen3-8b": {**QWEN3, **sizes(4096, 12288, 36, 32, 8, 151936, 40960, 1e6)},
    "qwen2.5-0.5b": {**QWEN, "tie_word_embeddings": True, **sizes(896, 4864, 24, 14, 2, 151936, 32768, 1e6)},
}


def write_model(folder, name):
    """Writes the configuration of a model, and a tokenizer with one word for each token id."""
    folder.mkdir(parents=True, exist_ok=True)
    config = MODELS[name]
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    words = {f"w{index}": index for index in range(config["vocab_size"])}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w2"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w0", "eos_token": "w1"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--generate", type=int, default=0)
    parser.add_argument("options", nargs="*")
    arguments = parser.parse_intermixed_args()
    write_model(arguments.folder, arguments.model)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

    from vllm import LLM, SamplingParams

    options = dict(option.split("=", 1) for option in arguments.options)
    options = {key: json.loads(value) for key, value in options.items()}
    llm = LLM(model=str(arguments.folder), load_format="dummy", **options)
    if arguments.generate:
        sampling = SamplingParams(max_tokens=arguments.generate, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": list(range(5, 69))}], sampling, use_tqdm=False)
    cache = llm.llm_engine.vllm_config.cache_config
    print(f"tokens={cache.num_gpu_blocks * cache.block_size} blocks={cache.num_gpu_blocks}")


if __name__ == "__main__":
    main()
