"""Popular models, one function each: transformers, torchvision, Lightning. All run on the simulated GPU.

    zoo.py [NAME...]

A function fails by an exception; its return value is printed. Models come from configurations: nothing is
downloaded.
"""

import os
import sys
import tempfile
import time
import traceback
import warnings

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", HF_HUB_DISABLE_TELEMETRY="1")
warnings.filterwarnings("ignore")

import torch
import torch.nn as nn
import torch.nn.functional as F

D = "cuda"
ZOO = []


def kind(function):
    ZOO.append(function)
    return function


def llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 1000,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **options}))


class Texts(torch.utils.data.Dataset):
    """Token sequences, as a tokenizer would give them."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        tokens = (torch.arange(64) * (index + 1)) % 1000
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones(64, dtype=torch.long)}


@kind
def transformers_trainer():
    from transformers import Trainer, TrainingArguments

    model = llama()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=4,
            max_steps=4,
            gradient_accumulation_steps=2,
            bf16=True,
            logging_steps=2,
            gradient_checkpointing=True,
            dataloader_num_workers=2,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=4,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=Texts(), eval_dataset=Texts())
        done = trainer.train()
        assert done.global_step == 4 and os.path.isdir(f"{folder}/checkpoint-4")
    moments = sum(
        value.numel() * value.element_size()
        for state in trainer.optimizer.state.values()
        for value in state.values()
        if value.is_cuda and value.dim()
    )
    parameters = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    assert moments == 2 * parameters, (moments, parameters)
    return f"loss {done.training_loss}"


def generated(model, rows=2, prompt=10, new=20, **options):
    """Generates. The device computes no values, so only shapes and the end of the loop are checked."""
    tokens = torch.randint(0, 1000, (rows, prompt), device=D)
    started = time.process_time()
    out = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=new,
        pad_token_id=0,
        eos_token_id=2,
        **options,
    )
    # CPU time, because wall time also depends on other programs of the machine.
    assert time.process_time() - started < 60
    return tuple(out.shape)


@kind
def generate_greedily():
    model = llama().cuda().eval()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert generated(model, do_sample=False) == (2, 30)
    # The cache of keys and values grows by one token per step, up to the full length.
    taken = torch.cuda.max_memory_allocated() - before
    cache = 2 * 2 * 3 * 4 * 16 * 29 * 4
    assert taken > cache, (taken, cache)
    assert generated(model, rows=1) == (1, 30)
    return taken


@kind
def generate_by_sampling():
    model = llama().to(D, torch.bfloat16).eval()
    for options in (
        {"temperature": 0.7},
        {"top_k": 50, "top_p": 0.9},
        {"num_return_sequences": 3},
        {"repetition_penalty": 1.2},
    ):
        # In torch 2.11 cuDNN's attention makes a plan for each length, so only a few tokens are generated.
        shape = generated(model, do_sample=True, new=6, **options)
        assert shape == (2 * options.get("num_return_sequences", 1), 16), (options, shape)


@kind
def generate_by_beam_search():
    """Runs to its length limit. The length of the best sequence would be a computed value, so the result is
    empty."""
    model = llama().cuda().eval()
    cache = 2 * 2 * 3 * 4 * 16 * 29 * 4
    for options, rows in (({"do_sample": False}, 2), ({"num_return_sequences": 2, "do_sample": True}, 4)):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        shape = generated(model, num_beams=4, **options)
        assert shape[0] == rows and shape[1] <= 30, shape
        taken = torch.cuda.max_memory_allocated() - before
        assert taken > 4 * cache, (options, taken, cache)


@kind
def generate_with_a_static_cache():
    model = llama().cuda().eval()
    return generated(model, do_sample=False, cache_implementation="static", disable_compile=True)


@kind
def transformers_of_many_kinds():
    import transformers as t

    tokens = torch.randint(0, 500, (2, 32), device=D)
    small = {
        "vocab_size": 500,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    }
    models = {
        "BERT": (t.BertForMaskedLM(t.BertConfig(**small)), {"input_ids": tokens, "labels": tokens}),
        "GPT-2": (
            t.GPT2LMHeadModel(t.GPT2Config(vocab_size=500, n_embd=64, n_layer=2, n_head=4)),
            {"input_ids": tokens, "labels": tokens},
        ),
        "T5": (
            t.T5ForConditionalGeneration(
                t.T5Config(
                    vocab_size=500,
                    d_model=64,
                    d_ff=128,
                    num_layers=2,
                    num_heads=4,
                    d_kv=16,
                    decoder_start_token_id=0,
                )
            ),
            {"input_ids": tokens, "labels": tokens},
        ),
        "ViT": (
            t.ViTForImageClassification(
                t.ViTConfig(**{k: v for k, v in small.items() if k != "vocab_size"}, image_size=64)
            ),
            {
                "pixel_values": torch.randn(2, 3, 64, 64, device=D),
                "labels": torch.zeros(2, dtype=torch.long, device=D),
            },
        ),
        "Whisper": (
            t.WhisperForConditionalGeneration(
                t.WhisperConfig(
                    vocab_size=500,
                    d_model=64,
                    encoder_layers=2,
                    decoder_layers=2,
                    encoder_attention_heads=4,
                    decoder_attention_heads=4,
                    encoder_ffn_dim=128,
                    decoder_ffn_dim=128,
                    max_source_positions=50,
                    pad_token_id=0,
                    bos_token_id=1,
                    eos_token_id=2,
                    decoder_start_token_id=1,
                )
            ),
            {"input_features": torch.randn(2, 80, 100, device=D), "labels": tokens},
        ),
        "Mixtral": (
            t.MixtralForCausalLM(t.MixtralConfig(**small, num_key_value_heads=2, num_local_experts=4)),
            {"input_ids": tokens, "labels": tokens},
        ),
    }
    for name, (model, inputs) in models.items():
        model.cuda().train()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(**inputs).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print("   ", name, sum(parameter.numel() for parameter in model.parameters()))


@kind
def torchvision_classifiers():
    import torchvision

    taken = {}
    for name in ("resnet18", "mobilenet_v3_small", "efficientnet_b0", "swin_t"):
        model = getattr(torchvision.models, name)(num_classes=10).cuda()
        torch.cuda.reset_peak_memory_stats()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loss = F.cross_entropy(
            model(torch.randn(2, 3, 224, 224, device=D)), torch.zeros(2, dtype=torch.long, device=D)
        )
        loss.backward()
        optimizer.step()
        taken[name] = torch.cuda.max_memory_allocated() >> 20
        del model, optimizer, loss
    return taken


@kind
def torchvision_detection_and_segmentation():
    import torchvision
    from torchvision.models import detection, segmentation

    boxes = torch.tensor([[0.0, 0.0, 50.0, 50.0], [1.0, 1.0, 51.0, 51.0]], device=D)
    assert len(torchvision.ops.nms(boxes, torch.tensor([0.9, 0.8], device=D), 0.5)) <= 2
    assert torchvision.ops.roi_align(torch.randn(1, 4, 32, 32, device=D), [boxes], 7).shape == (2, 4, 7, 7)
    model = segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=5).cuda()
    assert model(torch.randn(2, 3, 128, 128, device=D))["out"].shape == (2, 5, 128, 128)
    model = detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=5
    ).cuda()
    images = [torch.rand(3, 240, 320, device=D) for _ in range(2)]
    targets = [
        {
            "boxes": torch.tensor([[10.0, 10.0, 100.0, 100.0]], device=D),
            "labels": torch.ones(1, dtype=torch.long, device=D),
        }
        for _ in images
    ]
    sum(model(images, targets).values()).backward()
    model.eval()
    with torch.no_grad():
        assert len(model(images)) == 2


@kind
def lightning():
    import logging

    import lightning as L

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

        def training_step(self, batch, _):
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, _):
            self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    data = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.zeros(64, dtype=torch.long))
    loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=1, pin_memory=True)
    net = Net()
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="gpu",
            devices=1,
            max_epochs=2,
            precision="bf16-mixed",
            logger=False,
            default_root_dir=folder,
            enable_progress_bar=False,
            enable_model_summary=False,
            gradient_clip_val=1.0,
        )
        trainer.fit(net, loader, loader)
    assert trainer.global_step == 16 and trainer.strategy.root_device.type == "cuda"
    return trainer.callback_metrics


chosen = [function for function in ZOO if not sys.argv[1:] or function.__name__ in sys.argv[1:]]
failed = []
for function in chosen:
    started = time.monotonic()
    try:
        result = function()
        print(
            "ok  ",
            function.__name__,
            "" if result is None else result,
            f"{time.monotonic() - started:.1f} s",
            flush=True,
        )
    except BaseException:
        failed.append(function.__name__)
        traceback.print_exc()
        print("FAIL", function.__name__, flush=True)
    torch.cuda.synchronize()
assert torch.cuda.memory_stats()["num_ooms"] == 0
sys.exit(f"failed: {failed}" if failed else 0)
