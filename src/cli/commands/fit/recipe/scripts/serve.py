"""TITLE

python serve.py            starts vLLM's engine on the weights of MODEL, and prints how much KV cache it has
python serve.py --random   the same with random weights: reads only config.json

Writes nothing.
"""

import argparse

import vllm

MODEL = "a name on the Hugging Face hub, or a folder"
BATCH = 256
SEQ = 2048
UTILIZATION = 0.92
GPUS = 1
DTYPE = "auto"
QUANTIZATION = ""
CACHE_DTYPE = "auto"
CPU_OFFLOAD_GB = 0.0
EAGER = False
TRUST_REMOTE_CODE = False

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--batch", type=int, default=BATCH, help="requests at once")
    parser.add_argument("--seq", type=int, default=SEQ, help="prompt and answer")
    parser.add_argument("--random", action="store_true")
    args = parser.parse_args()

    engine = vllm.LLM(
        args.model,
        load_format="dummy" if args.random else "auto",
        skip_tokenizer_init=args.random,
        max_model_len=args.seq,
        max_num_seqs=args.batch,
        gpu_memory_utilization=UTILIZATION,
        tensor_parallel_size=GPUS,
        dtype=DTYPE,
        quantization=QUANTIZATION or None,
        kv_cache_dtype=CACHE_DTYPE,
        cpu_offload_gb=CPU_OFFLOAD_GB,
        enforce_eager=EAGER,
        trust_remote_code=TRUST_REMOTE_CODE,
    )
    cache = engine.llm_engine.vllm_config.cache_config
    print(f"KV cache: {cache.num_gpu_blocks * cache.block_size} tokens")
