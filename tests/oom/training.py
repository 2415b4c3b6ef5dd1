"""Trains as users do, and needs or keeps too much: training.py KIND [fix].

KIND is recipe, logps, solver, attempts, whole, foreach, upcast, qlora or hessian.
"""

import os
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

KIND, FIX = sys.argv[1], "fix" in sys.argv
STEPS = int(os.environ.get("STEPS", 4))


def llama(words, layers, **more):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8}
    config = LlamaConfig(vocab_size=words, num_hidden_layers=layers, use_cache=False, **(sizes | more))
    return LlamaForCausalLM(config).cuda()


def text(rows, tokens, words):
    return torch.randint(0, words, (rows, tokens), device="cuda")


def update(loss, optimizer):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def log_probabilities(model, tokens):
    logits = model(input_ids=tokens).logits[:, :-1]
    return torch.gather(logits.log_softmax(-1), 2, tokens[:, 1:, None]).squeeze(2)


def recipe():
    """torchtune#1917, #2134: losses are summed until the number of tokens of the step is known."""
    model = llama(4096, 6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    running_loss, num_tokens = 0, 0
    for index in range(8 * STEPS):
        tokens = text(4, 256, 4096)
        loss = model(input_ids=tokens, labels=tokens).loss * tokens.numel()
        if FIX:
            loss.backward()
            loss = loss.detach()
        running_loss += loss
        num_tokens += tokens.numel()
        if index % 8 == 7:
            if not FIX:
                (running_loss / num_tokens).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            running_loss, num_tokens = 0, 0


def logps():
    """trl#3342: the log probabilities of all parts of a batch are joined for one loss."""
    model = llama(4096, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    for _ in range(STEPS):
        tokens = text(32, 256, 4096)
        if FIX:
            for part in tokens.split(2):
                (-log_probabilities(model, part).sum() / 32).backward()
        else:
            all_logps = []
            for part in tokens.split(2):
                all_logps.append(log_probabilities(model, part))
            loss = -torch.cat(all_logps).sum() / 32
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


class Field(torch.autograd.Function):
    """Keeps a solver's states on `ctx`; autograd frees only what save_for_backward saved."""

    @staticmethod
    def forward(ctx, state, weight):
        ctx.weight, ctx.states = weight, []
        for _ in range(8):
            ctx.states.append(state)
            state = torch.tanh(state @ weight)
        return state

    @staticmethod
    def backward(ctx, gradient):
        of_weight = torch.zeros_like(ctx.weight)
        for state in reversed(ctx.states):
            gradient = gradient * (1 - torch.tanh(state @ ctx.weight) ** 2)
            of_weight += state.T @ gradient
            gradient = gradient @ ctx.weight.T
        return gradient, of_weight


def solver():
    """Lightning#9343: the loss of the last step, with a solver's states, lives through the next forward."""
    weights = [nn.Parameter(torch.randn(512, 512, device="cuda")) for _ in range(8)]
    optimizer = torch.optim.Adam(weights)
    outputs = {}
    for _ in range(STEPS):
        if FIX:
            outputs.clear()
        state = torch.randn(8192, 512, device="cuda")
        for weight in weights:
            state = Field.apply(state, weight)
        outputs = {"loss": state.square().mean()}
        del state
        update(outputs["loss"], optimizer)


def attempts():
    """torchtune#2830, pytorch#18853: keeps the error of a failed attempt until after the retry."""
    model = llama(4096, 8)
    optimizer = torch.optim.AdamW(model.parameters())

    def train(rows):
        tokens = text(rows, 256, 4096)
        output = model(input_ids=tokens, labels=tokens)
        loss = output.loss
        update(loss, optimizer)
        return loss.item()

    rows = 64
    for _ in range(STEPS):
        error = None
        while True:
            try:
                train(rows)
                break
            except torch.OutOfMemoryError as e:
                if rows <= 32:
                    raise
                error = None if FIX else e
                rows //= 2
        if error:
            print(f"{rows} rows, after {error}")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(512, 8, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))

    def forward(self, hidden):
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return hidden + self.mlp(hidden)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(Block() for _ in range(10)))

    def forward(self, hidden):
        if FIX:
            for layer in self.layers:
                hidden = checkpoint(layer, hidden, use_reentrant=False)
            return hidden
        return checkpoint(self.layers, hidden, use_reentrant=False)


def whole():
    """pytorch#147449: activation checkpointing does not lower the peak: it wraps all layers at once."""
    model = Stack().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        update(model(torch.randn(16, 512, 512, device="cuda")).square().mean(), optimizer)


def foreach():
    """pytorch#97712: Adam's step makes temporary results for all parameters at once."""
    import timm

    model = timm.create_model("vit_base_patch16_224", num_classes=10).cuda()
    optimizer = torch.optim.Adam(model.parameters(), fused=FIX or None)
    for _ in range(STEPS):
        update(model(torch.randn(1, 3, 224, 224, device="cuda")).square().mean(), optimizer)


def upcast():
    """transformers#30860: the loss of a bfloat16 model makes float32 logits; the batch is one text."""
    model = llama(128256, 4, tie_word_embeddings=True).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)

    def loss_of(hidden, words):
        return F.cross_entropy(model.lm_head(hidden).float(), words, reduction="sum")

    for _ in range(STEPS):
        tokens = text(1, 2048, 128256)
        if FIX:
            hidden = model.model(input_ids=tokens).last_hidden_state[0].split(256)
            parts = zip(hidden, tokens[0].split(256), strict=True)
            loss = sum(checkpoint(loss_of, *part, use_reentrant=False) for part in parts)
        else:
            loss = model(input_ids=tokens, labels=tokens).loss
        update(loss, optimizer)


def qlora():
    """peft: adapters on a 4-bit model with one long text; most of the memory is activations."""
    import bitsandbytes
    from peft import LoraConfig, get_peft_model

    model = llama(8192, 8, max_position_embeddings=8192).bfloat16()
    for layer in model.model.layers:
        for name, linear in list(layer.named_modules()):
            if isinstance(linear, nn.Linear):
                parent = layer.get_submodule(name.rpartition(".")[0])
                four = bitsandbytes.nn.Linear4bit(
                    linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16
                )
                four.weight = bitsandbytes.nn.Params4bit(linear.weight.data.cpu(), requires_grad=False)
                setattr(parent, name.rpartition(".")[2], four.cuda())
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    if FIX:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for _ in range(STEPS):
        tokens = text(1, 8192, 8192)
        update(model(input_ids=tokens, labels=tokens).loss, optimizer)


def hessian():
    """pytorch#7343: backward(create_graph=True); gradients keep their graphs until after the next forward."""
    model = nn.Sequential(*(Block() for _ in range(6))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            loss = model(torch.randn(4, 256, 512, device="cuda")).square().mean()
            optimizer.zero_grad()
            loss.backward(create_graph=True)
        optimizer.step()
        if FIX:
            optimizer.zero_grad()


kinds = (recipe, logps, solver, attempts, whole, foreach, upcast, qlora, hessian)
{f.__name__: f for f in kinds}[KIND]()
