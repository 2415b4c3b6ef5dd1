"""Memory other than parameters, buffers, gradients and state: caches, module attributes, workspaces, graphs.

held.py CASE     prints JSON, a line for each mark `checkpoint:N`: the bytes by category that the case expects
held.py CASE...  runs each in a forked child, which first prints its case and its process id
"""

import itertools
import json
import os
import sys

import torch
from torch import nn


def size_of(tensors):
    """Returns the bytes of the storages of tensors in GPU memory, as the allocator rounds them."""
    storages = {}
    for tensor in tensors:
        if tensor.is_cuda:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = -(-storage.nbytes() // 512) * 512
    return sum(storages.values())


numbers = itertools.count()


def checkpoint(**categories):
    torch.cuda.nvtx.mark(f"checkpoint:{next(numbers)}")
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
    # Counts only the part of the cache that is on the GPU; most of it is in host memory.
    checkpoint(kv_cache=size_of(tensors_of(cache)))


def offloaded_static():
    how = {"cache_implementation": "offloaded_static", "disable_compile": True}
    cache = generate(llama(), **how).past_key_values
    torch.cuda.synchronize()
    checkpoint(kv_cache=size_of(tensors_of(cache)))


def quantized():
    """A cache whose layers keep what hqq returns: a tensor of codes, and a dict with more tensors."""
    from transformers.cache_utils import Cache, QuantizedLayer

    class Quantized(QuantizedLayer):
        def _quantize(self, tensor, axis):
            scale = tensor.abs().amax(dim=-1, keepdim=True)
            return (tensor / scale).to(torch.int8), {"scale": scale, "zero": torch.zeros_like(scale)}

        def _dequantize(self, quantized):
            codes, about = quantized
            return codes * about["scale"] + about["zero"]

    model = llama()
    cache = Cache(layers=[Quantized(residual_length=8) for _ in range(model.config.num_hidden_layers)])
    # Generates more tokens than the residual length, so that the cache is quantized a second time and the
    # first result is replaced.
    generate(model, tokens=12, past_key_values=cache)
    held = tensors_of(cache)
    for layer in cache.layers:
        for codes, about in (layer._quantized_keys, layer._quantized_values):
            held += [codes, about["scale"], about["zero"]]
    checkpoint(kv_cache=size_of(held))


def failed_call():
    """A call that fails must keep no cache alive."""
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


def two_threads():
    """Two threads call one model at once, each with its own cache; the tensors of both calls are found."""
    import threading

    from transformers import DynamicCache

    model = llama()
    model(PROMPT.cuda(), past_key_values=DynamicCache(config=model.config))
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    both = threading.Barrier(2)
    forward = model.model.forward

    def together(*args, **kwargs):
        both.wait(60)
        result = forward(*args, **kwargs)
        both.wait(60)
        return result

    model.model.forward = together

    def call(cache):
        with torch.no_grad():
            model(PROMPT.cuda(), past_key_values=cache)

    threads = [threading.Thread(target=call, args=(cache,)) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    checkpoint(kv_cache=size_of([tensor for cache in caches for tensor in tensors_of(cache)]))


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
    """Returns the bytes of a new workspace that torch gives cuBLAS."""
    x = torch.ones(8, 8, device="cuda")
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    x @ x
    return torch.cuda.memory_allocated() - before


def graph():
    # The layers have no bias, because the pool would otherwise contain cuBLASLt's workspace, too.
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


def own_pool():
    """A pool of the program, whose free memory belongs to no graph, and a pool that has a captured graph."""
    import ctypes

    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        gone = torch.empty(24 << 20, dtype=torch.uint8, device="cuda")
    del gone
    checkpoint(cuda_graph=0)
    cuda, graph, stream = ctypes.CDLL(None), ctypes.c_void_p(), torch.cuda.Stream()
    torch.cuda.synchronize()
    on = ctypes.c_void_p(stream.cuda_stream)
    assert cuda.cudaGraphCreate(ctypes.byref(graph), 0) == 0
    captured_into = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(captured_into):
        begun = cuda.cudaStreamBeginCaptureToGraph(on, graph, None, None, ctypes.c_size_t(0), 2)
        assert begun == 0, begun
        # The end of a capture on another stream fails, and the capture goes on.
        other = ctypes.c_void_p(torch.cuda.Stream().cuda_stream)
        assert cuda.cudaStreamEndCapture(other, ctypes.byref(ctypes.c_void_p())) == 401
        assert cuda.cudaGetLastError() == 401
        captured = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
        assert cuda.cudaStreamEndCapture(on, ctypes.byref(graph)) == 0
        after = torch.empty(5 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.nvtx.mark("checkpoint:1")
    print(json.dumps({"cuda_graph": size_of([captured])}))
    assert after is not None and kept is not None
    # Ends the process here, so that everything is live at the end of the trace.
    sys.stdout.flush()
    os._exit(0)


def optimizer():
    """One parameter of 64 MiB with foreach AdamW: its state is two tensors, whatever the step allocates."""
    model = nn.Linear(4096, 4096, bias=False, device="cuda")
    stepper = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(3):
        model(torch.ones(1, 4096, device="cuda")).sum().backward()
        stepper.step()
        stepper.zero_grad()
    state = [value for values in stepper.state.values() for value in values.values()]
    checkpoint(optimizer_state=size_of(state), parameter=size_of(model.parameters()))


def flat_buffers():
    """A bf16 model with its weights in one buffer, its gradients in another, and float32 copies that an
    optimizer steps, as DeepSpeed, apex and DDP's buckets do."""
    layers = nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False)
    model = nn.Sequential(nn.Sequential(*layers), nn.Linear(512, 64, bias=False)).cuda().bfloat16()
    weights = list(model[0].parameters())
    flat = torch.cat([weight.data.flatten() for weight in weights])
    bucket = torch.zeros_like(flat)
    for index, weight in enumerate(weights):
        part = slice(index * weight.numel(), (index + 1) * weight.numel())
        weight.data, weight.grad = flat[part].view_as(weight), bucket[part].view_as(weight)
    copies = [weight.detach().float() for weight in model.parameters()]
    stepper = torch.optim.SGD(copies, lr=0.1, momentum=0.9)
    for _ in range(3):
        model(torch.ones(4, 512, device="cuda", dtype=torch.bfloat16)).sum().backward()
        for copy, weight in zip(copies, model.parameters(), strict=True):
            copy.grad = weight.grad.float()
        stepper.step()
        stepper.zero_grad()
    state = [value for values in stepper.state.values() for value in values.values()]
    checkpoint(
        parameter=size_of([flat, model[1].weight]),
        gradient=size_of([bucket, model[1].weight.grad]),
        optimizer_state=size_of([*copies, *state]),
    )


def buckets():
    """Holds the buckets of DDP, which the program does not create. Also holds tensors that the program
    reduces itself, some made in a forward and some in a backward, and tensors that only the script uses."""
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    class Reduced(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            distributed.all_reduce(forwards[-1])
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            made.append(gradient.clone())
            distributed.all_reduce(made[-1])
            return made[-1].clone()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(512, 512, bias=False) for _ in range(4)])

        def forward(self, x):
            forwards.append(torch.ones(3000, device="cuda"))
            for layer in self.layers:
                x = layer(Reduced.apply(x))
            return x

    made, forwards = [], []
    distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    plain = [torch.zeros(1000, device="cuda"), torch.arange(5000, device="cuda") * 2]
    models = [Net().cuda() for _ in range(2)]
    for model, views in zip(models, (False, True), strict=True):
        wrapped = DistributedDataParallel(model, bucket_cap_mb=2, gradient_as_bucket_view=views)
        model.wrapped = [wrapped]
        for _ in range(3):
            wrapped(torch.ones(8, 512, device="cuda")).sum().backward()
    assert len(made) == 18 and len(forwards) == 6
    # Does not check gradients, because NCCL's watchdog keeps the first buckets for some time after they were
    # replaced.
    checkpoint(temporary=size_of(made), script=size_of(plain))
    distributed.destroy_process_group()


def own_optimizer():
    """An optimizer that torch does not know: tensors that outlive its step are its state."""
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


def weights(*counts):
    return [torch.zeros(count << 18, device="cuda", requires_grad=True) for count in counts]


def of_optimizer(optimizer):
    """Returns the bytes that an optimizer's groups and state hold."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [
        value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)
    ]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return {
        "parameter": size_of(parameters),
        "gradient": size_of(gradients),
        "optimizer_state": size_of(states),
    }


def parameter_at(address, data):
    """Returns a parameter with the given `id`. Python decides where the next object is, so parameters are
    made until one is there."""
    others = []
    while len(others) < 10_000:
        parameter = nn.Parameter(data)
        if id(parameter) == address:
            return parameter
        others.append(parameter)
    raise RuntimeError("no parameter lies where the old one was: something still holds the old one")


def no_module():
    """Parameters without a module. Each is replaced by one with the same `id`."""
    optimizer = torch.optim.Adam(weights(3))
    params = optimizer.param_groups[0]["params"]
    for count in (5, 7, None):
        for _ in range(2):
            params[0].square().sum().backward()
            optimizer.step()
            checkpoint(**of_optimizer(optimizer))
            optimizer.zero_grad()
        old = id(params[0])
        if count is not None:
            data = torch.zeros(count << 18, device="cuda")
            optimizer.state.clear()
            params.clear()
            params.append(parameter_at(old, data))


def no_module_no_memory():
    """Memory runs out before the optimizer's first step."""
    optimizer = torch.optim.Adam(weights(3))
    optimizer.param_groups[0]["params"][0].square().sum().backward()
    try:
        torch.empty(1 << 38, device="cuda")
    except torch.OutOfMemoryError:
        checkpoint(**of_optimizer(optimizer))


class Encodes(nn.Module):
    """A module that is used through another method than `forward`."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(512, 1024))
        self.register_buffer("scale", torch.zeros(3 << 18))

    def encode(self, data):
        return (data * self.weight).sum() * self.scale[0]


def other_method():
    model = Encodes().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    model.encode(2).backward()
    optimizer.step()
    checkpoint(buffer=size_of([model.scale]), **of_optimizer(optimizer))


def replaced_weight():
    """Replaces the weight of a module that was called before, and makes a new optimizer for it."""
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False)).cuda()
    for width in (512, 1024, 2048):
        model[1].weight = nn.Parameter(torch.zeros(width, 512, device="cuda"))
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(4, 512, device="cuda")).sum().backward()
            optimizer.step()
        checkpoint(**of_optimizer(optimizer))


class Momentum:
    """An optimizer with groups that is not one of torch's."""

    def __init__(self, parameters):
        self.param_groups, self.state = [{"params": parameters}], {}

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state.setdefault(parameter, {})
            state["mean"] = state["mean"] if state else torch.zeros_like(parameter)
            parameter.sub_(state["mean"].mul_(0.9).add_(parameter.grad))


def other_optimizer():
    optimizer = Momentum(weights(3, 5))
    for _ in range(3):
        sum(parameter.square().sum() for parameter in optimizer.param_groups[0]["params"]).backward()
        found = of_optimizer(optimizer)
        # The expected bytes exclude tensors of the step that follows: they become state only when the next
        # forward or backward begins.
        checkpoint(**found)
        optimizer.step()
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = None


def sparse_ids():
    """The values of a sparse gradient count as gradient. Its indices are the input."""
    table = nn.Embedding(1 << 16, 64, sparse=True).cuda()
    ids = torch.arange(1 << 18, device="cuda")
    table(ids).sum().backward()
    # memtrace tags the ids and the values in a call that the backward schedules on the main thread.
    checkpoint(input=size_of([ids]), gradient=size_of([table.weight.grad._values()]))


def requests(leaks):
    """A server without training: eight requests. With `leaks` the cache of each is kept."""
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


if len(sys.argv) == 2:
    globals()[sys.argv[1]]()
    sys.exit()
# Once, not in every child: the first step of an optimizer imports it, and `generate`.
import torch._dynamo  # noqa: E402, F401

if "dynamic" in sys.argv:
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM  # noqa: F401
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        print(name, os.getpid())
        globals()[name]()
        sys.stdout.flush()
        os._exit(0)  # not sys.exit, see owner_tracker.py
    assert os.waitpid(child, 0)[1] == 0, name
