"""Memory that is no parameter, buffer, gradient or state: caches, attributes of modules, workspaces, graphs.

held.py CASE     prints JSON: the bytes by category that the case expects at its mark `checkpoint:0`
"""

import json
import sys

import torch
from torch import nn


def size_of(tensors):
    """The bytes of the storages of tensors in GPU memory, as the allocator rounds them."""
    storages = {}
    for tensor in tensors:
        if tensor.is_cuda:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = -(-storage.nbytes() // 512) * 512
    return sum(storages.values())


def checkpoint(**categories):
    torch.cuda.nvtx.mark("checkpoint:0")
    print(json.dumps(categories))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=1000,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).cuda().eval()


PROMPT = torch.arange(1, 33).reshape(2, 16)


def generate(model, tokens=6, **options):
    options = {"return_dict_in_generate": True, "pad_token_id": 0, **options}
    return model.generate(PROMPT.cuda(), max_new_tokens=tokens, do_sample=False, **options)


def tensors_of(cache):
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def dynamic():
    cache = generate(llama()).past_key_values
    checkpoint(kv_cache=size_of(tensors_of(cache)))


def static():
    from transformers import StaticCache

    model = llama()
    cache = StaticCache(config=model.config, max_cache_len=64)
    generate(model, past_key_values=cache, disable_compile=True)
    checkpoint(kv_cache=size_of(tensors_of(cache)))


def offloaded():
    from transformers import DynamicCache

    model = llama()
    cache = DynamicCache(config=model.config, offloading=True)
    generate(model, past_key_values=cache)
    torch.cuda.synchronize()
    # Most of it is in the host's memory.
    checkpoint(kv_cache=size_of(tensors_of(cache)))


def failed_call():
    """A call that fails keeps no cache alive."""
    from transformers import DynamicCache

    model = llama()
    cache = DynamicCache(config=model.config)
    try:
        model(torch.zeros(1, 4, 5, 6, device="cuda"), past_key_values=cache)
    except Exception as error:
        print(type(error).__name__, file=sys.stderr)
    generate(model, past_key_values=cache)
    del cache
    torch.cuda.synchronize()
    checkpoint(kv_cache=0)


class State:
    """A plain object of the script."""


class Served(nn.Module):
    """Keeps tensors in attributes, as servers and quantized layers do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.kv_cache = [torch.zeros(2, 1000, device="cuda") for _ in range(3)]
        self.workspace_buffer = torch.zeros(5000, device="cuda")
        self.state = State()
        self.state.SCB = torch.zeros(3000, device="cuda")
        self.state.itself = self.state
        self.tables = {"cos": torch.zeros(4000, device="cuda"), "view": self.linear.weight}
        self.seen = None

    def forward(self, x):
        self.seen = self.linear(x)
        return self.seen


def attributes():
    with torch.no_grad():
        model = Served().cuda()
        model.linear.weight.quant_state = torch.zeros(7000, device="cuda")
        for _ in range(2):
            model(torch.ones(4, 64, device="cuda"))
    checkpoint(
        kv_cache=size_of(model.kv_cache),
        workspace=size_of([model.workspace_buffer]) + cublas_workspace(),
        parameter=size_of([*model.parameters(), model.state.SCB, model.linear.weight.quant_state]),
        buffer=size_of([model.tables["cos"]]),
        activation=size_of([model.seen]),
    )


def cublas_workspace():
    """The bytes of a new workspace that torch gives cuBLAS."""
    x = torch.ones(8, 8, device="cuda")
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    x @ x
    return torch.cuda.memory_allocated() - before


def graph():
    # Without bias: cuBLASLt's workspace would be in the pool too.
    layers = nn.Linear(256, 512, bias=False), nn.ReLU(), nn.Linear(512, 256, bias=False)
    model = nn.Sequential(*layers).cuda()
    x = torch.zeros(32, 256, device="cuda")
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            model(x)
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            y = model(x)
        captured.replay()
    checkpoint(cuda_graph=size_of([y]))


def optimizer():
    """One parameter of 64 MiB with foreach AdamW: two tensors of state, whatever the step allocates."""
    model = nn.Linear(4096, 4096, bias=False, device="cuda")
    stepper = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(3):
        model(torch.ones(1, 4096, device="cuda")).sum().backward()
        stepper.step()
        stepper.zero_grad()
    state = [value for values in stepper.state.values() for value in values.values()]
    checkpoint(optimizer_state=size_of(state), parameter=size_of(model.parameters()))


def own_optimizer():
    """An optimizer that torch does not know: what outlives its step is its state."""
    model = nn.Linear(1024, 1024, bias=False, device="cuda")
    momentum = None
    for _ in range(3):
        model(torch.ones(1, 1024, device="cuda")).sum().backward()
        torch.cuda.nvtx.range_push("optimizer")
        with torch.no_grad():
            scaled = model.weight.grad * 0.9
            momentum = scaled.clone() if momentum is None else momentum.add_(scaled)
            model.weight -= momentum
            del scaled
        torch.cuda.nvtx.range_pop()
        model.weight.grad = None
    checkpoint(optimizer_state=size_of([momentum]), parameter=size_of(model.parameters()))


def requests(leaks):
    """A server without training: eight requests, each of which may keep its cache."""
    model, kept = llama(), []
    for _ in range(8):
        answer = generate(model, tokens=3)
        if leaks:
            kept.append(answer.past_key_values)
    checkpoint()


def leak():
    requests(True)


def clean():
    requests(False)


globals()[sys.argv[1]]()
