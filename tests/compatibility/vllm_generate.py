"""vLLM: a small Llama with random weights, its engine in this process, CUDA graphs and some requests."""

import os
import tempfile

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from made_up import llama, tokenizer  # noqa: E402
from peaks import print_peak  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

with tempfile.TemporaryDirectory() as folder:
    llama().config.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    engine = LLM(folder, load_format="dummy", max_model_len=512, max_num_seqs=8, gpu_memory_utilization=0.5)
    asked = SamplingParams(max_tokens=8, min_tokens=8, temperature=0)
    for answer in engine.generate(["w1 w2 w3", "w4 w5"], asked, use_tqdm=False):
        print("tokens", len(answer.outputs[0].token_ids))
print_peak()
