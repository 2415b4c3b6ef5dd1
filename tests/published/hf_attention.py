"""Peak memory of a Hugging Face model by batch and sequence length, with eager attention and SDPA.

The benchmark behind the tables of transformers' model pages: half precision, ten warm-up steps, then a
step is {zero_grad, forward, `logits.sum().backward()`}. Inference decodes 100 tokens, or calls an encoder
once, with a mask that hides one token. As there, one process runs both kinds of attention and all shapes,
and the results of a step live until the next: the blocks that stay in the cache decide what is split.

    hf_attention.py train bert sdpa,eager mask 4x256 4x512 ...
"""

import gc
import json
import sys

import torch
import transformers as hf

mode, name, kinds, masked, *shapes = sys.argv[1:]

# The checkpoints' configurations, where they differ from the library's defaults.
ALBERT = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
OPT = {"hidden_size": 1024, "num_hidden_layers": 24, "ffn_dim": 4096, "num_attention_heads": 16}
OPT |= {"word_embed_proj_dim": 512, "do_layer_norm_before": False}
PYTHIA = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
MODELS = {
    "bert": (hf.BertConfig, {}, "CausalLM"),
    "distilbert": (hf.DistilBertConfig, {}, "MaskedLM"),
    "albert": (hf.AlbertConfig, ALBERT, "SequenceClassification"),
    "biogpt": (hf.BioGptConfig, {}, "CausalLM"),
    "opt-350m": (hf.OPTConfig, OPT, "CausalLM"),
    "pythia-410m": (hf.GPTNeoXConfig, PYTHIA | {"vocab_size": 50304}, "CausalLM"),
    "gpt2-large": (hf.GPT2Config, {"n_embd": 1280, "n_layer": 36, "n_head": 20}, "CausalLM"),
}
make_config, changes, head = MODELS[name]
config = make_config(**changes)
decodes = head == "CausalLM" and name != "biogpt"  # BioGPT's page uses a plain AutoModel for inference
auto = getattr(hf, f"AutoModelFor{head}") if mode == "train" or decodes else hf.AutoModel


def train(model, batch, length):
    inputs = {"input_ids": torch.randint(config.vocab_size - 1, (batch, length)).cuda()}
    if masked == "mask":
        inputs["attention_mask"] = torch.ones(batch, length, dtype=torch.int64).cuda()
    model.train()
    for step in range(13):
        if step == 10:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.empty_cache()
        model.zero_grad()
        outputs = model(**inputs)
        loss = outputs.logits.sum()
        loss.backward()


@torch.inference_mode()
def infer(model, batch, length):
    ids, mask = torch.randint(5, (batch, length)).cuda(), torch.ones(batch, length)
    mask[0, 0] = 0
    mask = mask.cuda()
    model.eval()
    new = {"max_new_tokens": 100, "min_new_tokens": 100, "eos_token_id": None, "pad_token_id": 0}
    for step in range(2):
        if step == 1:
            torch.cuda.reset_peak_memory_stats()
        _ = model.generate(ids, attention_mask=mask, do_sample=False, **new) if decodes else model(ids, mask)


for kind in kinds.split(","):
    model = None
    gc.collect()
    with torch.device("cuda"):
        model = auto.from_config(config, torch_dtype=torch.float16, attn_implementation=kind)
    model = model.half() if mode == "infer" else model  # buffers too; training keeps them as made
    for shape in shapes:
        try:
            (train if mode == "train" else infer)(model, *map(int, shape.split("x")))
        except torch.cuda.OutOfMemoryError:
            continue  # as on the page
        peak = torch.cuda.max_memory_allocated()
        print(json.dumps({"label": f"{kind} {shape}", "allocated": peak}), flush=True)
