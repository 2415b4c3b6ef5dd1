"""torchtitan in 2024, before its first release: runs in its commit messages.

Runs one rank of a group whose peers do not exist: the memory of a rank does not depend on them. The modules
are written from torchtitan's sources at these commits; the values of the weights do not matter.

    torchtitan_early.py MODEL RANKS [FLAG...]

MODEL: debug (Llama with 2 layers of 256, every second one checkpointed, 2048 tokens), 8B (Llama 3, selective
checkpointing of operators, 8192 tokens), gpt2 (Llama with 12 layers of 768, 8192 tokens, fused AdamW)
FLAG, any of:
    tp=N, batch=N  tensor parallelism; the batch, which is else 8 of debug and 1 of 8B
    fsdp1          FullyShardedDataParallel, and batch and sequence in one dimension, as in March 2024
    early          the embedding is replicated before it is sharded over the sequence, as until April 2024
    keep           the predictions are kept until the next ones exist, as until 7 June 2024
    fused          RMSNorm in Triton
    compile        each block compiled; with fsdp1, the whole model
    none           no checkpointing
    groups         the embedding, and the last norm and layer, are FSDP groups of their own
    stay           no resharding after the forward
    chunked        the last layer and the compiled loss in 16 parts
    function       both in a function that computes the gradients in its forward
    inside         the predictions become 32-bit floats in the loss, which is compiled if the blocks are
    gqa            keys and values are not repeated; the last RMSNorm is in Triton, AdamW is fused
    expandable     expandable segments
"""

import collections
import contextlib
import functools
import os
import sys

if "expandable" in sys.argv[3:]:
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from harness import figure
from torch import nn
from torch.distributed._composable.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed._tensor import DTensor, Replicate, Shard
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

STEPS = 3
flags = dict(flag.partition("=")[::2] for flag in sys.argv[3:])
name, ranks = sys.argv[1], int(sys.argv[2])
tp, folded = int(flags.get("tp", 1)), "fsdp1" in flags
wide, layers, heads, kv_heads, hidden, words, length, theta = {
    "debug": (256, 2, 16, 16, 768, 32000, 2048, 10000),
    "8B": (4096, 32, 32, 8, 14336, 128256, 8192, 500000),
    "gpt2": (768, 12, 12, 12, 2048, 128256, 8192, 500000),
}[name]
batch = int(flags.get("batch", 8 if name == "debug" else 1))
positions = 2 * (32768 if name == "debug" else length)
label = ", ".join([name, f"{ranks} GPUs", *sys.argv[3:]])


tuned = set()


def tune(kernel):
    """Triton tries the configurations of a kernel at its first call, with 256 MB to empty the L2 cache."""
    if kernel not in tuned:
        tuned.add(kernel)
        torch.empty(int(256e6 // 4), dtype=torch.int, device="cuda")


class TritonNorm(torch.autograd.Function):
    """Takes the memory that the Triton kernels of RMSNorm take, and computes nothing."""

    @staticmethod
    def forward(ctx, x, weight):
        shape, x = x.shape, x.view(-1, x.shape[-1])
        y, deviation = torch.empty_like(x), torch.empty(len(x), device=x.device)
        tune("forward")
        ctx.save_for_backward(x, weight, deviation)
        ctx.shape = shape
        return y.reshape(shape)

    @staticmethod
    def backward(ctx, dy):
        x, weight, _ = ctx.saved_tensors
        dx, _dw = torch.empty_like(x), torch.empty_like(weight)
        count = torch.cuda.get_device_properties(x.device).multi_processor_count
        parts = torch.empty((count, x.shape[-1]), device=x.device)
        tune("backward")
        return dx.view(ctx.shape), parts.sum(0).to(weight.dtype)


class Norm(nn.Module):
    def __init__(self, triton):
        super().__init__()
        self.weight, self.triton = nn.Parameter(torch.ones(wide)), triton

    def forward(self, x):
        if not self.triton:
            floats = x.float()
            normed = floats * torch.rsqrt(floats.pow(2).mean(-1, keepdim=True) + 1e-5)
            return normed.type_as(x) * self.weight
        if not isinstance(x, DTensor):
            return TritonNorm.apply(x, self.weight)
        weight = self.weight.to_local(grad_placements=[torch.distributed._tensor.Partial()])
        return DTensor.from_local(TritonNorm.apply(x.to_local(), weight), x.device_mesh, x.placements)


def angles(count):
    steps = 1.0 / (
        theta ** (torch.arange(0, wide // heads, 2)[: wide // heads // 2].float() / (wide // heads))
    )
    turns = torch.outer(torch.arange(count, device=steps.device), steps).float()
    return torch.polar(torch.ones_like(turns), turns)


def rotated(x, turns):
    x_ = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turns = turns[0 : x_.shape[1]].view(1, x_.shape[1], 1, x_.shape[-1])
    return torch.view_as_real(x_ * turns).flatten(3)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        part = wide // heads
        self.wq, self.wo = (nn.Linear(wide, wide, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(wide, kv_heads * part, bias=False) for _ in range(2))
        self.n_heads, self.n_kv_heads, self.repeats = heads // tp, kv_heads // tp, heads // kv_heads

    def forward(self, x, turns):
        rows = x.shape[0] // turns.shape[0] if folded else x.shape[0]
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        q, k, v = (
            one.view(rows, -1, count, wide // heads)
            for one, count in ((q, self.n_heads), (k, self.n_kv_heads), (v, self.n_kv_heads))
        )
        turned_q, turned_k = rotated(q, turns), rotated(k, turns)
        q, k = turned_q.type_as(q), turned_k.type_as(k)
        del turned_q, turned_k
        if self.repeats > 1 and "gqa" not in flags:
            k, v = (
                one[:, :, :, None, :]
                .expand(*one.shape[:3], self.repeats, one.shape[-1])
                .reshape(*one.shape[:2], -1, one.shape[-1])
                for one in (k, v)
            )
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        grouped = {"enable_gqa": True} if "gqa" in flags else {}
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, **grouped)
        output = output.transpose(1, 2).contiguous()
        return self.wo(output.view(-1, wide // tp) if folded else output.view(rows, -1, wide // tp))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(wide, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, wide, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = Norm("fused" in flags), Norm("fused" in flags)

    def forward(self, x, turns):
        h = x + self.attention(self.attention_norm(x), turns)
        return h + self.feed_forward(self.ffn_norm(h))


class InForward(torch.autograd.Function):
    """The last layer and the loss, whose gradients the forward computes part by part."""

    @staticmethod
    def forward(ctx, h, weight, target):
        shape, h, target = h.shape, h.view(-1, h.shape[-1]), target.view(-1)
        parts = max(len(h) // 8192, 1)
        weight_grad, total = torch.zeros_like(weight), torch.zeros((), device=h.device)

        def loss_of(part, weight, labels):
            return F.cross_entropy(torch.mm(part, weight.t()).float(), labels)

        @torch.compile
        def accumulate(part, labels):
            gradients = torch.func.grad_and_value(loss_of, argnums=(0, 1))(part, weight, labels)
            (part_grad, part_weight_grad), loss = gradients
            weight_grad.add_(part_weight_grad)
            total.add_(loss)
            return part_grad

        grads = [accumulate(*both) for both in zip(h.chunk(parts), target.chunk(parts))]
        ctx.save_for_backward((torch.cat(grads, dim=0) / parts).view(shape), weight_grad / parts)
        return total / parts

    @staticmethod
    def backward(ctx, _):
        return (*ctx.saved_tensors, None)


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(words, wide)
        if folded:
            self.turns = None
        else:
            self.register_buffer("turns", angles(positions))
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = Norm("fused" in flags or "gqa" in flags)
        self.output = nn.Linear(wide, words, bias=False)

    def init_weights(self):
        if not folded:
            with torch.device(self.turns.device):
                self.turns = angles(positions)
        for one in self.modules():
            if isinstance(one, nn.Linear):
                nn.init.trunc_normal_(one.weight, mean=0.0, std=0.02)
            elif isinstance(one, Norm):
                nn.init.ones_(one.weight)
        nn.init.normal_(self.tok_embeddings.weight)

    def forward(self, ids, labels=None):
        h = self.tok_embeddings(ids)
        if folded and self.turns is None:
            self.turns = angles(positions).to(h.device)
        turns = self.turns[0 : ids.shape[1]]
        if folded:
            h = h.view(-1, wide)
        for layer in self.layers:
            h = layer(h, turns)
        h = self.norm(h)
        if folded:
            h = h.view(ids.shape[0], -1, wide)
        if "function" in flags:
            return InForward.apply(h, self.output.weight, labels)
        if "chunked" in flags:
            return [self.output(part) for part in h.chunk(16, dim=1)]
        return self.output(h) if "inside" in flags else self.output(h).float()


def parallelize(model, mesh):
    over = 0 if folded else 1
    early = folded or "early" in flags
    plan = {
        "tok_embeddings": RowwiseParallel(
            input_layouts=Replicate(), **({} if early else {"output_layouts": Shard(1)})
        ),
        "output": ColwiseParallel(
            input_layouts=Shard(over), output_layouts=Shard(-1), use_local_output=False
        ),
        "norm": SequenceParallel(sequence_dim=over),
    }
    if early:
        plan["layers.0"] = PrepareModuleInput(
            input_layouts=(Replicate(), None),
            desired_input_layouts=(Shard(over), None),
            use_local_output=True,
        )
    parallelize_module(model, mesh, plan)
    for layer in model.layers:
        gather = {"desired_input_layouts": (Replicate(), None), "input_layouts": (Shard(over), None)}
        plan = {
            "attention": PrepareModuleInput(**gather),
            "feed_forward": PrepareModuleInput(
                input_layouts=(Shard(over),), desired_input_layouts=(Replicate(),)
            ),
            "attention_norm": SequenceParallel(sequence_dim=over),
            "ffn_norm": SequenceParallel(sequence_dim=over),
        }
        for one in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"):
            plan[one] = ColwiseParallel()
        for one in ("attention.wo", "feed_forward.w2"):
            plan[one] = RowwiseParallel(output_layouts=Shard(over))
        parallelize_module(layer, mesh, plan)


SAVED = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def context():
    products = collections.Counter()

    def is_saved(phase, op, *_, **__):
        if op == torch.ops.aten.mm.default:
            products[phase] += 1
        return op in SAVED and not (op == torch.ops.aten.mm.default and products[phase] % 2 == 0)

    if torch.__version__ < "2.5":
        return torch.utils.checkpoint._pt2_selective_checkpoint_context_fn_gen(is_saved)
    policies = torch.utils.checkpoint.CheckpointPolicy
    return torch.utils.checkpoint.create_selective_checkpoint_contexts(
        lambda ctx, op, *_, **__: (
            policies.MUST_SAVE if is_saved(ctx.is_recompute, op) else policies.PREFER_RECOMPUTE
        )
    )


def checkpointed(layer, number):
    if "none" in flags or name == "gpt2" or (name == "debug" and number % 2 == 0):
        return layer
    selective = {} if name == "debug" else {"context_fn": context}
    return checkpoint_wrapper(layer, preserve_rng_state=False, **selective)


dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
axes = {"dp": ranks // tp, "tp": tp} if tp > 1 else {"dp": ranks}
mesh = dist.init_device_mesh("cuda", tuple(axes.values()), mesh_dim_names=tuple(axes))
with torch.device("meta"):
    model = Llama()
if tp > 1:
    parallelize(model, mesh["tp"])
for number, layer in enumerate(model.layers):
    layer = checkpointed(layer, number)
    if "compile" in flags and not folded:
        if torch.__version__ < "2.5":
            torch._dynamo.config._experimental_support_context_fn_in_torch_utils_checkpoint = True
        layer = torch.compile(layer, fullgraph=True)
    model.layers[number] = layer
if folded:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    wrap = functools.partial(
        FullyShardedDataParallel,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        use_orig_params=True,
        device_mesh=mesh["dp"],
        device_id=torch.device("cuda", 0),
        param_init_fn=lambda module: module.to_empty(device="cuda", recurse=False),
    )
    for number, layer in enumerate(model.layers):
        model.layers[number] = wrap(layer)
    model = wrap(model)
else:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard = functools.partial(fully_shard, mesh=mesh["dp"], mp_policy=policy)
    for number, layer in enumerate(model.layers):
        shard(layer, reshard_after_forward=number < layers - 1 and "stay" not in flags)
    if "groups" in flags:
        shard(model.tok_embeddings)
        if "gqa" in flags:
            model.tok_embeddings.set_unshard_in_backward(False)
        shard([model.norm, model.output], reshard_after_forward=False)
    shard(model)
    model.to_empty(device="cuda")
with torch.no_grad():
    model.init_weights()
faster = {"fused": True} if name == "gpt2" or "gqa" in flags else {"foreach": True}
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, **faster)
fsdp1 = model
if "compile" in flags and folded:
    model = torch.compile(model)


def loss_of(predicted, labels):
    if "chunked" in flags:
        labels = [part.reshape(-1) for part in labels.chunk(16, dim=1)]
        predicted = [part.reshape(-1, part.size(-1)) for part in predicted]
        return sum(part_loss(*both) for both in zip(predicted, labels)) / (batch * length)
    predicted = predicted.flatten(0, 1)
    return F.cross_entropy(predicted.float() if "inside" in flags else predicted, labels.flatten(0, 1))


@torch.compile
def part_loss(predicted, labels):
    return F.cross_entropy(predicted.float(), labels, reduction="sum")


if "inside" in flags and "compile" in flags:
    loss_of = torch.compile(loss_of)
predicted = None
for step in range(STEPS):
    ids = torch.randint(words, (batch, length)).cuda()
    labels = torch.randint(words, (batch, length)).cuda()
    optimizer.zero_grad()
    with loss_parallel() if tp > 1 else contextlib.nullcontext():
        if "function" in flags:
            loss = model(ids, labels)
        elif "gqa" in flags:
            loss = loss_of(model(ids), labels)
        else:
            predicted = model(ids)
            loss = loss_of(predicted, labels)
            if "keep" not in flags and not folded:
                del predicted
        loss.backward()
    if folded and "compile" not in flags:
        fsdp1.clip_grad_norm_(1.0)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, **({} if folded else {"foreach": True}))
    optimizer.step()
    loss.item()
    if step == 0:
        figure(f"{label}, first step", reserved=torch.cuda.max_memory_reserved())
figure(label, reserved=torch.cuda.max_memory_reserved())
