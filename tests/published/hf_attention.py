"""Peak memory of a Hugging Face model by batch and sequence length, with eager attention and SDPA.

The benchmark behind the tables of transformers' model pages: half precision, ten warm-up steps, then a
step is {zero_grad, forward, `logits.sum().backward()`}. Inference decodes 100 tokens, or calls an encoder
once, with a mask that hides one token. As there, one process runs both kinds of attention and all shapes,
and the results of a step live until the next: the blocks that stay in the cache decide what is split.

    hf_attention.py train bert sdpa,eager mask 4x256 4x512 ...
"""

import gc
import sys

import torch
import transformers as hf
from harness import figure
from harness.hf_models import from_pretrained, make_config

mode, name, kinds, masked, *shapes = sys.argv[1:]
config, head = make_config(name)
plain = mode == "infer" and name in ("biogpt", "distilbert")  # their pages measure inference without a head
decodes = head == "CausalLM" and not plain
auto = hf.AutoModel if plain else getattr(hf, f"AutoModelFor{head}")


def train(model, inputs):
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
def infer(model, ids, mask):
    model.eval()
    new = {"max_new_tokens": 100, "min_new_tokens": 100, "eos_token_id": None, "pad_token_id": 0}
    for step in range(2):
        if step == 1:
            torch.cuda.reset_peak_memory_stats()
        _ = model.generate(ids, attention_mask=mask, do_sample=False, **new) if decodes else model(ids, mask)


for kind in kinds.split(","):
    model = None
    gc.collect()
    model = from_pretrained(name, auto, kind)
    model = model.half() if mode == "infer" else model  # also casts buffers, unlike training
    for shape in shapes:
        batch, length = map(int, shape.split("x"))
        try:
            # The previous inputs stay in place until the new ids exist, as in the benchmark, so they are not
            # deleted here.
            if mode == "train":
                inputs = {"input_ids": torch.randint(config.vocab_size - 1, (batch, length)).cuda()}
                if masked == "mask":
                    inputs["attention_mask"] = torch.ones(batch, length, dtype=torch.int64).cuda()
                train(model, inputs)
            else:
                ids, mask = torch.randint(5, (batch, length)).cuda(), torch.ones(batch, length)
                mask[0, 0] = 0
                mask = mask.cuda()
                infer(model, ids, mask)
        except torch.cuda.OutOfMemoryError:
            continue  # as the page's benchmark does
        figure(f"{kind} {shape}", allocated=torch.cuda.max_memory_allocated())
