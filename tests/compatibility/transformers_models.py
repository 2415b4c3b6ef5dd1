"""Three steps of training a small Transformers model: transformers_models.py ARCHITECTURE."""

import sys

import torch
import transformers as hf
from peaks import print_peak

TEXT = {"vocab_size": 1024, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}
DECODER = {**TEXT, "intermediate_size": 512, "num_key_value_heads": 4, "max_position_embeddings": 256}
IMAGE = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 512}


def text(model, **config):
    kind = model.config_class(**{**DECODER, **config})
    ids = torch.randint(0, 1024, (8, 128), device="cuda")
    return model(kind), {"input_ids": ids, "labels": ids}


def bert():
    model = hf.BertForSequenceClassification(hf.BertConfig(**TEXT, intermediate_size=512, num_labels=3))
    ids = torch.randint(0, 1024, (8, 128), device="cuda")
    # A batch of rows whose second half is padding, which the attention masks.
    mask = (torch.arange(128).expand(8, -1) < 64).long().cuda()
    return model, {"input_ids": ids, "attention_mask": mask, "labels": torch.zeros(8, dtype=int).cuda()}


def clip():
    text = {**TEXT, "intermediate_size": 512, "projection_dim": 128}
    kind = hf.CLIPConfig(
        text_config=text, vision_config={**IMAGE, "image_size": 224, "patch_size": 32}, projection_dim=128
    )
    ids = torch.randint(0, 1024, (8, 32), device="cuda")
    return hf.CLIPModel(kind), {
        "input_ids": ids,
        "pixel_values": torch.randn(8, 3, 224, 224).cuda(),
        "return_loss": True,
    }


def gpt2():
    kind = hf.GPT2Config(n_layer=4, n_embd=256, n_head=8, vocab_size=1024, n_positions=128)
    ids = torch.randint(0, 1024, (8, 128), device="cuda")
    return hf.GPT2LMHeadModel(kind), {"input_ids": ids, "labels": ids}


def t5():
    kind = hf.T5Config(
        vocab_size=1024, d_model=256, d_ff=512, num_layers=4, num_heads=8, decoder_start_token_id=0
    )
    ids = torch.randint(0, 1024, (8, 64), device="cuda")
    return hf.T5ForConditionalGeneration(kind), {"input_ids": ids, "labels": ids}


def vit():
    model = hf.ViTForImageClassification(hf.ViTConfig(**IMAGE, num_labels=10))
    return model, {
        "pixel_values": torch.randn(4, 3, 224, 224).cuda(),
        "labels": torch.zeros(4, dtype=int).cuda(),
    }


def whisper():
    kind = hf.WhisperConfig(
        vocab_size=1024,
        d_model=256,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
    )
    labels = torch.randint(4, 1024, (2, 64), device="cuda")
    return hf.WhisperForConditionalGeneration(kind), {
        "input_features": torch.randn(2, 80, 3000).cuda(),
        "labels": labels,
    }


MODELS = {
    "bert": bert,
    "clip": clip,
    "gemma3": lambda: text(hf.Gemma3ForCausalLM, head_dim=32, sliding_window=64),
    "gpt2": gpt2,
    "llama": lambda: text(hf.LlamaForCausalLM),
    "mamba": lambda: text(hf.MambaForCausalLM, state_size=16),
    "mixtral": lambda: text(hf.MixtralForCausalLM, num_local_experts=4),
    "qwen3": lambda: text(hf.Qwen3ForCausalLM, head_dim=32),
    "t5": t5,
    "vit": vit,
    "whisper": whisper,
}

torch.manual_seed(0)
model, batch = MODELS[sys.argv[1]]()
model = model.cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, "loss", loss.item())
print_peak()
