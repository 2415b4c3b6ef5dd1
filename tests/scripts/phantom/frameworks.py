"""Trains a small model for three steps under DeepSpeed, the Trainer, Accelerate, Lightning or Megatron-core.

Started by a launcher: every rank runs this script. The first argument is the kind.
docs/phantom-clusters.md says what was installed.
"""

import gc
import os
import sys
import tempfile

import torch
from torch import nn

gc.disable()
RANK, WORLD, LOCAL = (int(os.environ[k]) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
W, L, B = 256, 64, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(W)
        self.up = nn.Linear(W, 4 * W)
        self.down = nn.Linear(4 * W, W)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(W, 1000)

    def forward(self, x):
        for b in self.blocks:
            x = b(x)
        return self.head(x)


class Llama:
    @staticmethod
    def make():
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=1000,
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=4,
                max_position_embeddings=128,
            )
        )


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8 * WORLD

    def __getitem__(self, i):
        ids = torch.arange(64) % 1000
        return {"input_ids": ids, "labels": ids}


def deepspeed(stage):
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": B,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 1000,
    }
    model = Model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(3):
        x = torch.randn(B, L, W, device=engine.device, dtype=torch.bfloat16)
        engine.backward(engine(x).float().square().mean())
        engine.step()


def trainer(**more):
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=2,
        max_steps=3,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        bf16=True,
        **more,
    )
    Trainer(model=Llama.make(), args=args, train_dataset=Data()).train()


def trainer_fsdp():
    trainer(fsdp="full_shard auto_wrap", fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]})


def trainer_fsdp2():
    trainer(fsdp=True, fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]})


def trainer_ddp():
    trainer()


def trainer_deepspeed():
    trainer(
        deepspeed={
            "train_micro_batch_size_per_gpu": "auto",
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": 3},
        }
    )


def accelerate():
    from accelerate import Accelerator

    acc = Accelerator(mixed_precision="bf16")
    model = Model()
    opt = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.DataLoader(torch.randn(8 * WORLD, L, W), batch_size=2)
    model, opt, data = acc.prepare(model, opt, data)
    for x in data:
        loss = model(x).float().square().mean()
        acc.backward(loss)
        opt.step()
        opt.zero_grad()
        acc.gather(loss.detach()).mean().item()


def lightning(strategy):
    import lightning as l

    class M(l.LightningModule):
        def __init__(self):
            super().__init__()
            self.m = Model()

        def training_step(self, b, i):
            loss = self.m(b).float().square().mean()
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy

    # Lightning broadcasts an object. Among real ranks on a simulated GPU it would not arrive through NCCL.
    backend = "cpu:gloo,cuda:nccl"
    if strategy == "fsdp":
        strategy = FSDPStrategy(auto_wrap_policy={Block}, process_group_backend=backend)
    else:
        strategy = DDPStrategy(process_group_backend=backend)
    per = int(os.environ["LOCAL_WORLD_SIZE"])
    t = l.Trainer(
        accelerator="gpu",
        devices=per,
        num_nodes=WORLD // per,
        strategy=strategy,
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    t.fit(M(), torch.utils.data.DataLoader(torch.randn(8 * WORLD, L, W), batch_size=2))


def megatron(tp=2, pp=1):
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    torch.cuda.set_device(LOCAL)
    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(tp, pp)
    model_parallel_cuda_manual_seed(123)
    c = TransformerConfig(
        num_layers=4,
        hidden_size=128,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        params_dtype=torch.bfloat16,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    m = (
        GPTModel(
            config=c,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=1024,
            max_sequence_length=64,
            pre_process=first,
            post_process=last,
        )
        .cuda()
        .bfloat16()
    )
    m = DistributedDataParallel(
        config=c,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=True
        ),
        module=m,
    )
    o = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, use_distributed_optimizer=True), [m]
    )
    ids = torch.arange(128).view(2, 64).cuda()
    mask = torch.ones(2, 1, 64, 64, dtype=torch.bool, device="cuda").tril().logical_not()

    def step(it, model):
        out = model(ids, torch.arange(64, device="cuda").expand(2, 64), mask, labels=ids)
        return out, lambda t: (t.float().mean(), {})

    for _ in range(3):
        m.zero_grad_buffer()
        o.zero_grad()
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter([0] * 8),
            model=m,
            num_microbatches=4,
            seq_length=64,
            micro_batch_size=2,
            forward_only=False,
        )
        o.step()


kinds = {f"deepspeed{n}": (lambda n=n: deepspeed(n)) for n in (1, 2, 3)} | {
    "trainer_fsdp": trainer_fsdp,
    "trainer_fsdp2": trainer_fsdp2,
    "trainer_ddp": trainer_ddp,
    "trainer_deepspeed": trainer_deepspeed,
    "accelerate": accelerate,
    "lightning_ddp": lambda: lightning("ddp"),
    "lightning_fsdp": lambda: lightning("fsdp"),
    "megatron": megatron,
    "megatron_pp": lambda: megatron(1, 2),
}
torch.manual_seed(0)
kinds[sys.argv[1]]()
torch.cuda.synchronize()
s = torch.cuda.memory_stats()
print(
    f"rank {RANK} of {WORLD}",
    sys.argv[1],
    *(s[k] for k in ("allocated_bytes.all.peak", "reserved_bytes.all.peak", "allocation.all.allocated")),
    flush=True,
)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
