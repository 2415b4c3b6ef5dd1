"""Models of Hugging Face's hub by name, loaded from a checkpoint of the same tensors, with made-up values."""

from __future__ import annotations

import tempfile

import torch
import transformers as hf

# The fields in which the checkpoints' configurations differ from the library's defaults.
ALBERT = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
OPT = {"hidden_size": 1024, "num_hidden_layers": 24, "ffn_dim": 4096, "num_attention_heads": 16}
OPT |= {"word_embed_proj_dim": 512, "do_layer_norm_before": False}
PYTHIA = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
PYTHIA |= {"vocab_size": 50304}
# For each model: the configuration, the head that the benchmarks put on it, and the class that has the
# tensors of the safetensors file on the hub. Without a class, the hub has no such file.
MODELS = {
    "bert": (hf.BertConfig, {}, "CausalLM", hf.BertForPreTraining),
    "distilbert": (hf.DistilBertConfig, {}, "MaskedLM", hf.DistilBertForMaskedLM),
    "albert": (hf.AlbertConfig, ALBERT, "SequenceClassification", hf.AlbertForPreTraining),
    "biogpt": (hf.BioGptConfig, {}, "CausalLM", None),
    "opt-350m": (hf.OPTConfig, OPT, "CausalLM", None),
    "pythia-410m": (hf.GPTNeoXConfig, PYTHIA, "CausalLM", hf.GPTNeoXForCausalLM),
    "gpt2-large": (
        hf.GPT2Config,
        {"n_embd": 1280, "n_layer": 36, "n_head": 20},
        "CausalLM",
        hf.GPT2LMHeadModel,
    ),
}


def make_config(name: str):
    make, changes, head, _ = MODELS[name]
    return make(**changes), head


def buffers_of_then(name: str, config) -> dict[str, torch.Tensor]:
    """Returns the masks that the files of these two models still contain; older releases saved masks, too."""
    if name == "gpt2-large":
        mask = torch.ones(1, 1, 1024, 1024)
        return {f"transformer.h.{layer}.attn.bias": mask.clone() for layer in range(config.n_layer)}
    if name == "pythia-410m":
        mask, places = torch.ones(1, 1, 2048, 2048, dtype=torch.bool), range(config.num_hidden_layers)
        return {f"gpt_neox.layers.{layer}.attention.bias": mask.clone() for layer in places}
    return {}


def from_pretrained(name: str, auto, kind: str):
    """Returns a model in half precision, loaded as the benchmarks load it: under `torch.device("cuda")`.

    Under this device, safetensors creates its tensors on the GPU, because it calls `torch.asarray`. The whole
    checkpoint is then on the GPU before the model is made, and its blocks stay in the allocator's cache. The
    other checkpoints on the hub are pickled and are loaded to the CPU. They leave nothing on the GPU, so
    these models are made without a checkpoint.
    """
    config, _ = make_config(name)
    saved = MODELS[name][3]
    if saved is None:
        with torch.device("cuda"):
            return auto.from_config(config, torch_dtype=torch.float16, attn_implementation=kind)
    with tempfile.TemporaryDirectory() as folder:
        original = saved._from_config(config)
        if name == "pythia-410m":
            original = original.half()
        state = original.state_dict() | buffers_of_then(name, config)
        original.save_pretrained(folder, state_dict=state, safe_serialization=True, max_shard_size="10GB")
        del original, state
        with torch.device("cuda"):
            return auto.from_pretrained(folder, torch_dtype=torch.float16, attn_implementation=kind)
