"""Cases in which an owner is easily lost. Each prints its steps, for a comparison with an untraced run.

    owner_cases.py CASE...      each in a forked child

Blocks of a unique size (`count` times 512 bytes) are allocated at known places; `expect` records the owner
that each must have, for `checkers/expected_owners.py`.
"""

import copy
import ctypes
import gc
import json
import mmap
import os
import platform
import sys
import threading
import traceback
import warnings

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

expected = []
kept = []
by_hooks = False


def block(count):
    """Allocates a block of `count` * 512 bytes that stays live."""
    kept.append(torch.empty(count * 512, dtype=torch.uint8, device="cuda"))
    return kept[-1]


def expect(count, **owner):
    expected.append({"bytes": count * 512, **owner})


class Takes(nn.Module):
    """Allocates a block in its forward."""

    def __init__(self, count, width=16):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.count = count

    def forward(self, x):
        block(self.count)
        return self.linear(x)


class Fails(nn.Module):
    def forward(self, x):
        raise ValueError("this one fails")


class Outer(nn.Module):
    def __init__(self, count, *inner):
        super().__init__()
        self.inner = nn.Sequential(*inner)
        self.count = count

    def forward(self, x):
        x = self.inner(x)
        block(self.count)
        return x


def x(*shape):
    return torch.ones(*(shape or (4, 16)), device="cuda", requires_grad=True)


def exception():
    """A forward that raises leaves no module on the stack."""
    model = Outer(101, Takes(102), nn.Sequential(Fails())).cuda()
    try:
        model(x())
    except ValueError as error:
        print("caught", error)
        if not by_hooks:
            print([frame.name for frame in traceback.extract_tb(error.__traceback__)])
    block(103)
    model.inner[1] = nn.Identity()
    model(x())
    block(104)
    if not by_hooks:
        # Prints 0 global hooks: module calls must still use torch's fast path.
        print("hooks", len(torch.nn.modules.module._global_forward_hooks))
    expect(102, module="Outer.inner.0", phase="forward", callers=["block", "forward", "forward", "exception"])
    expect(103, module="(script)")
    expect(101, module="Outer", phase="forward")
    expect(104, module="(script)")


def outside_root():
    """Calls a submodule without its model; the memory of its hooks belongs to it."""
    model = Outer(111, Takes(112), Takes(113)).cuda()
    model.inner[1].register_forward_pre_hook(lambda *_: kept.append(block(114)))
    model.inner[1].register_forward_hook(lambda *_: kept.append(block(115)))
    model.inner[1](x())
    for count in (113, 114, 115):
        expect(count, module="Outer.inner.1")
    model.inner(x())
    expect(112, module="Outer.inner.0")
    model(x())
    expect(111, module="Outer")


def shared():
    """A module used in two places has the first name; one shared by two models has its name in the first."""
    one = Takes(121)
    model = Outer(122, one, one, nn.Sequential(one)).cuda()
    model(x())
    other = Outer(123, model.inner[0], Takes(124)).cuda()
    other(x())
    expect(121, module="Outer.inner.0")
    expect(122, module="Outer")
    expect(123, module="Outer#2")
    expect(124, module="Outer#2.inner.1")


def roots():
    """Models of one class are numbered in the order of their calls; the name of a deleted model is reused."""
    first, second = Takes(131).cuda(), Takes(132).cuda()
    first(x())
    second(x())
    del second
    third = Takes(133).cuda()
    third(x())
    expect(131, module="Takes")
    expect(132, module="Takes#2")
    expect(133, module="Takes#2")


class Weighs(nn.Module):
    """Has a parameter and a buffer of unique sizes."""

    def __init__(self, count):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count * 128))
        self.register_buffer("scale", torch.zeros((count + 1) * 128))

    def forward(self, x):
        return x * self.weight.sum()


def uncalled():
    """Averaged copies that are never called have paths; a wrapper around another model's modules has none."""
    model, other = (nn.Sequential(Weighs(count), Takes(count + 2)).cuda() for count in (421, 425))
    mean, averaged = copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(other)
    holder = nn.ParameterList([model[0].weight])
    for _ in range(3):
        other(model(x()))
    # Of several blocks of this size the last one counts, which is in the copy.
    expect(421, module="Sequential#3.0", category="parameter")
    expect(422, module="Sequential#3.0", category="buffer")
    expect(425, module="AveragedModel.0", category="parameter")
    expect(426, module="AveragedModel.0", category="buffer")
    # The third call of `model` starts a search for uncalled models, and the hundredth call the next one. That
    # search assigns a path to a copy that was made in between.
    later = copy.deepcopy(nn.Sequential(Weighs(431)).cuda())
    for _ in range(97):
        model(x())
    expect(431, module="Sequential#4.0", category="parameter")
    nn.Sequential(Takes(429)).cuda()(x())
    expect(429, module="Sequential#5.0")
    kept.extend((mean, averaged, holder, later))


def profilers():
    """torch's profilers report the same as without memtrace, on every thread.

    This includes global profilers, and a thread's profiler that autograd's threads inherit.
    """
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).cuda()

    def train():
        model(x(4, 8)).sum().backward()

    def counts(events):
        names = [(str(event.thread), event.name) for event in events]
        return sorted((name, names.count(name)) for name in set(names) if "cuda" not in name[1].lower())

    train()
    for _ in range(2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            train()
        print("all", counts(profile.events()))
        train()
    kinds, switch = torch._C._profiler, getattr(torch._C._autograd, "_enable_record_function", None)
    options = kinds.ProfilerConfig(kinds.ProfilerState.CPU, *[False] * 5, kinds._ExperimentalConfig())
    for on in (True, False, True):
        torch.autograd._enable_profiler_legacy(options)
        if switch is not None:
            switch(on)
        train()
        if switch is not None:
            switch(True)
        train()
        threads = torch.autograd._disable_profiler_legacy()
        print(
            "one",
            sorted(sorted(event.name() for event in thread if event.kind() == "push") for thread in threads),
        )
        train()


def late():
    """Modules that appear after the first call: added to the tree, created in a forward, outside any tree."""
    model = Outer(141, Takes(142)).cuda()
    model(x())
    model.inner.append(nn.Sequential(Takes(143)).cuda())
    model(x())
    expect(143, module="Outer.inner.1.0")

    class Makes(nn.Module):
        def forward(self, y):
            return Takes(144).cuda()(y)

    Makes()(x())
    expect(144, module="Makes.Takes")


def recomputed(reentrant):
    """Activation checkpointing: backward runs the forward again."""
    model = Outer(151, Takes(152)).cuda()
    head = Takes(153).cuda()
    y = head(checkpoint(model, x(), use_reentrant=reentrant))
    kept.clear()
    model.count, model.inner[0].count = 154, 155
    y.sum().backward()
    expect(152, module="Outer.inner.0", phase="forward", category="activation")
    expect(155, module="Outer.inner.0", phase="backward", category="activation", callers=["block", "forward"])
    if reentrant:
        expect(154, module="Outer", phase="backward", category="activation")
    print(model.inner[0].linear.weight.grad.shape)


def checkpoint_reentrant():
    recomputed(True)


def checkpoint_free():
    recomputed(False)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        block(161)
        return y * y

    @staticmethod
    def backward(ctx, gradient):
        block(162)
        return 2 * gradient * ctx.saved_tensors[0]


class Squares(nn.Module):
    def forward(self, y):
        return Square.apply(y)


def custom_function():
    model = nn.Sequential(nn.Linear(16, 16), Squares()).cuda()
    model(x()).sum().backward()
    expect(161, module="Sequential.1", phase="forward")
    expect(
        162,
        module="Sequential.1",
        phase="backward",
        category="temporary",
        callers=["block", "backward", "forward", "custom_function"],
    )


def wide(features):
    """Returns a linear layer whose backward allocates blocks of a unique size."""
    return nn.Linear(features, features, bias=False, device="cuda")


def double_backward():
    model = nn.Sequential(wide(16), nn.Tanh(), wide(16))
    y = x(173, 16)
    (gradient,) = torch.autograd.grad(model(y).sum(), y, create_graph=True)
    torch.cuda.nvtx.mark("second")
    gradient.pow(2).sum().backward()
    # The blocks of tanh's second derivative: 173 * 16 floats of 4 bytes, rounded up to 22 * 512 bytes.
    expect(22, backward_of="Sequential.1", after="second", callers=["double_backward"])


def accumulation():
    model = nn.Sequential(wide(128)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        model(torch.ones(4, 128, device="cuda")).sum().backward()
    optimizer.step()
    expect(128, module="Sequential.0", category="gradient", phase="backward", some=True)
    # The cuBLAS workspace of each thread, 32 MiB on this card, must have the module and the phase of the op
    # that needed it first.
    expect(65536, module="Sequential.0", category="workspace", phase="forward", some=True)
    expect(65536, module="Sequential.0", category="workspace", phase="backward", some=True)
    print(model[0].weight.grad.sum().shape)


def optimizer_in_backward():
    model = nn.Sequential(wide(64), nn.ReLU(), wide(64))
    optimizers = {p: torch.optim.Adam([p], foreach=False) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        model(torch.ones(4, 64, device="cuda")).sum().backward()
    expect(32, category="optimizer_state", phase="optimizer", some=True)
    expect(32, category="gradient", phase="backward", some=True)
    print([p.grad is None for p in model.parameters()])


def manual_sgd():
    """Without an optimizer, gradients are tagged at the end of backward."""
    model = nn.Sequential(wide(128))
    for _ in range(2):
        model(torch.ones(4, 128, device="cuda")).sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    expect(128, module="Sequential.0", category="gradient", some=True)


def inference():
    model = Outer(181, Takes(182, 160)).cuda().eval()
    with torch.no_grad():
        model(torch.ones(4, 160, device="cuda"))
    with torch.inference_mode():
        model.count = 183
        model(torch.ones(4, 160, device="cuda"))
    expect(181, module="Outer", phase="forward", category="activation")
    expect(183, module="Outer", phase="forward", category="activation")
    expect(200, module="Outer.inner.0.linear", category="parameter")


def threads():
    """Forwards and backwards in threads: autograd's sequence numbers count per thread."""
    models = [nn.Sequential(wide(16), Squares16(count)) for count in (191, 192)]
    barrier = threading.Barrier(2)

    def work(model):
        y = x()
        barrier.wait()
        for _ in range(20):
            y = model(y)
        barrier.wait()
        y.sum().backward()

    workers = [threading.Thread(target=work, args=(model,)) for model in models]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for count in (191, 192):
        expect(count, phase="backward", sibling=count + 10, callers=["block", "backward", "forward", "work"])
        expect(count + 10, phase="forward")


class Takes16(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, count):
        ctx.count = count
        block(count + 10)
        return y * 1

    @staticmethod
    def backward(ctx, gradient):
        block(ctx.count)
        return gradient * 1, None


class Squares16(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.count = count

    def forward(self, y):
        return Takes16.apply(y, self.count)


def registered():
    """`memtrace.track_external` follows MemTracker's rules, with its messages for untrackable objects."""
    from torch.distributed._tools.mem_tracker import MemTracker

    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..", "python"))
    import memtrace

    model = nn.Sequential(nn.Linear(224, 224, bias=False)).cuda()  # never called
    torch.cuda.synchronize()
    given = torch.zeros(222 * 128, device="cuda", requires_grad=True)
    memtrace.track_external({"table": [block(221), None], "more": (given,)}, model)
    optimizer = torch.optim.AdamW(model.parameters())
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.step()
    memtrace.track_external(optimizer)
    expect(221, category="buffer", module="(script)")
    expect(222, category="parameter")
    expect(392, category="parameter", module="Sequential.0", some=True)
    expect(392, category="gradient", module="Sequential.0", some=True)
    expect(392, category="optimizer_state", module="Sequential.0", some=True)
    for what in ([block(223), "text"], 7, {"a": {3}}):
        for track in (memtrace.track_external, MemTracker().track_external):
            try:
                track(what)
            except TypeError as error:
                print(error)


def modes():
    """A mode of the program sees the same ops as without memtrace, and no warning appears."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="Lazy modules")
    seen = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(getattr(function, "__name__", str(function)))
            return function(*args, **(kwargs or {}))

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    model = nn.Sequential(nn.Linear(8, 8), nn.Embedding(9, 8, sparse=True)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Functions(), Ops():
        model[0](torch.ones(2, 8, device="cuda")).sum().backward()
        model[1](torch.tensor([1, 2], device="cuda")).sum().backward()
        optimizer.step()
    print(seen)
    lazy = nn.Sequential(nn.LazyLinear(8)).cuda()
    print(lazy(torch.ones(2, 4, device="cuda")).shape)
    swapped = {name: (p * 2) for name, p in model[0].named_parameters()}
    print(torch.func.functional_call(model[0], swapped, torch.ones(2, 8, device="cuda")).shape)
    warnings.filterwarnings("ignore", message=".*torch.jit.trace")
    traced = torch.jit.trace(nn.Linear(4, 4).cuda(), torch.ones(2, 4, device="cuda"), check_trace=False)
    print(traced(torch.ones(2, 4, device="cuda")).shape)
    print(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU())).code)


def odd_modules():
    """Modules and tensors that are hard to read."""

    class NoInit(nn.Module):
        def __init__(self):
            pass

    class Proxy:
        def __getattribute__(self, name):
            raise RuntimeError(f"asked for {name}")

    kept.append([Proxy(), NoInit()])

    class Keywords(nn.Module):
        def forward(self, *, pixels=None):
            return pixels["a"][0] + 1

    for _ in range(2):
        pixels = torch.ones(213 * 128).cuda().requires_grad_()
        Keywords()(pixels={"a": [pixels]}).sum().backward()
    expect(213, category="input", phase="dataloader", some=True)

    class Wrapped(torch.Tensor):
        """Like DTensor: its parts are a tensor and an object that is no tensor."""

        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(
                cls, inner.size(), dtype=inner.dtype, device=inner.device
            )

        def __init__(self, inner):
            self.inner, self.mesh = inner, object()

        def __tensor_flatten__(self):
            return ["mesh", "inner"], None

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            return Wrapped(function(*(x.inner for x in args), **(kwargs or {})))

    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.wrapped = nn.Parameter(Wrapped(torch.ones(437 * 128, device="cuda")))

        def forward(self, x):
            return x + 1

    Holds()(torch.ones(2, device="cuda"))
    expect(437, module="Holds", category="parameter", some=True)
    for layer in (nn.ReLU(), nn.Sequential()):
        layer(torch.ones(2, device="cuda"))
    try:
        NoInit()(1)
    except Exception as error:
        print(type(error).__name__, error)
    try:
        nn.Linear(4, 4).cuda()(torch.ones(2, 5, device="cuda"))
    except RuntimeError as error:
        print(error)


def own_calls():
    """Classes whose `__call__` does not reach torch's, as in GPyTorch, and one whose `__call__` does."""

    class Direct(Takes):
        def __call__(self, x):
            return self.forward(x)

    class Delegates(Takes):
        def __call__(self, *arguments):
            return super().__call__(*arguments)

    class DirectOuter(Outer):
        def __call__(self, x):
            return self.forward(x)

    Outer(218, Direct(219)).cuda()(x())
    DirectOuter(226, Delegates(227)).cuda()(x()).sum().backward()
    # Creates a class after memtrace has looked at all classes. memtrace must find it after the backward.
    late = type("Late", (Direct,), {"__call__": lambda self, x: self.forward(x)})
    for _ in range(2):
        late(228).cuda()(x()).sum().backward()
    expect(218, module="Outer", phase="forward")
    expect(219, module="Outer.inner.0", phase="forward")
    expect(226, module="DirectOuter", phase="forward")
    expect(227, module="DirectOuter.inner.0", phase="forward")
    expect(228, module="Late", some=True)


def compiled():
    """A compiled model keeps its graphs, recompiles as often, and computes the same as without memtrace."""
    import torch._dynamo
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch._dynamo.utils import counters

    counter = CompileCounterWithBackend("aot_eager")
    torch.manual_seed(1)
    model = Outer(1, nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU())
    model.forward = lambda y, self=model: self.inner(y)
    model = model.cuda()
    fast = torch.compile(model, backend=counter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        fast(x()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("graphs", counter.frame_count, "ops", counter.op_count)
    fast(x(6, 16))
    print("graphs", counter.frame_count, dict(counters["stats"]), dict(counters["graph_break"]))
    whole = torch.compile(
        nn.Sequential(nn.Linear(16, 16), nn.GELU()).cuda(), backend="aot_eager", fullgraph=True
    )
    print(whole(x()).shape)
    expect(2, module="Outer.inner.0", category="parameter", some=True)
    if by_hooks:
        return

    class InPlace(Outer):
        def forward(self, y):
            return self.inner(y)

    # dynamo must guard on the original call of the model, and must compile no function of memtrace.
    counters.clear()
    model = InPlace(1, nn.Linear(128, 339, bias=False), nn.ReLU()).cuda()
    model.compile(backend=counter)
    for rows in (4, 4, 5):
        model(x(rows, 128)).sum().backward()
    print("graphs", counter.frame_count, dict(counters["frames"]), dict(counters["stats"]))
    expect(339, module="InPlace.inner.0", category="parameter", some=True)


def somebody_elses_calls():
    """Three cases again while another tool redirects `_call_impl`: here, by a jump."""
    global by_hooks, jump
    by_hooks = True
    call = nn.Module._call_impl
    words = (ctypes.c_size_t * (type(call).__basicsize__ // 8)).from_address(id(call))
    usual = ctypes.cast(ctypes.pythonapi._PyFunction_Vectorcall, ctypes.c_void_p).value
    jump = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    target = usual.to_bytes(8, "little")
    if platform.machine() == "aarch64":
        jump.write(b"\x50\x00\x00\x58" + b"\x00\x02\x1f\xd6" + target)  # ldr x16, target; br x16
    else:
        jump.write(b"\x48\xb8" + target + b"\xff\xe0")  # mov rax, target; jmp rax
    start = ctypes.addressof(ctypes.c_char.from_buffer(jump))
    ctypes.CDLL("libgcc_s.so.1").__clear_cache(ctypes.c_void_p(start), ctypes.c_void_p(start + 16))
    words[list(words).index(usual)] = start
    exception()
    checkpoint_free()
    compiled()
    if "libmemtrace.so" in os.environ["LD_PRELOAD"]:
        assert torch.nn.modules.module._global_forward_hooks


def distributed():
    """One rank of DDP and of FSDP2: the wrappers' names are stripped, or kept if the setting says so."""
    keep = os.environ.get("MEMTRACE_WRAPPERS") == "1"
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + os.getpid() % 20000), RANK="0", WORLD_SIZE="1"
    )
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl")
    model = nn.parallel.DistributedDataParallel(Outer(301, Takes(302, 160)).cuda())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(x(4, 160)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    base = "DistributedDataParallel.module" if keep else "Outer"
    expect(301, module=base)
    expect(302, module=f"{base}.inner.0")
    expect(200, module=f"{base}.inner.0.linear", category="parameter", some=True)
    expect(200, module=f"{base}.inner.0.linear", category="optimizer_state", some=True)
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        from torch.distributed._composable.fsdp import fully_shard

    class Sharded(Outer):
        pass

    model = Sharded(303, Takes(304, 192)).cuda()
    fully_shard(model.inner[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(x(4, 192)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    base = "FSDPSharded" if keep else "Sharded"
    expect(303, module=base)
    expect(304, module=f"{base}.inner.0")
    expect(288, module=f"{base}.inner.0.linear", category="parameter", some=True)
    expect(290, module=f"{base}.inner.0.linear", category="gradient", phase="backward", some=True)
    expect(288, module=f"{base}.inner.0.linear", category="optimizer_state", some=True)
    # Memory that FSDP gathers must count as parameters of the module for which it is gathered.
    for phase in ("forward", "backward"):
        expect(288, module=f"{base}.inner.0", category="unsharded_param", phase=phase, some=True)

    class Critic(Outer):
        def forward(self, y):
            return super().forward(y) * 2

    # A second model whose modules have the same names as the first's.
    critic = Critic(305, Takes(306, 224)).cuda()
    fully_shard(critic.inner[0])
    fully_shard(critic)
    for _ in range(2):
        first, second = model(x(4, 192)).sum(), critic(x(4, 224)).sum()
        second.backward()
        first.backward()
        critic.zero_grad()
        model.zero_grad()
    base = "FSDPCritic" if keep else "Critic"
    for phase in ("forward", "backward"):
        expect(392, module=f"{base}.inner.0", category="unsharded_param", phase=phase, some=True)
    torch.distributed.destroy_process_group()
    print("done")


def loading():
    """A model that does not fit fails in .to(): the parameters that reached the device have owners."""
    torch.cuda.set_per_process_memory_fraction(24 * 2**20 / torch.cuda.get_device_properties(0).total_memory)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(12)))
    expect(8192, module="Sequential.0", category="parameter", some=True)
    expect(8192, module="Sequential.3", category="parameter", some=True)
    write("loading")
    model.to("cuda")


def plain():
    """One forward and backward of a model."""
    model = Outer(401, Takes(402)).cuda()
    model(x()).sum().backward()
    expect(402, module="Outer.inner.0", phase="forward", category="activation")
    print("plain")


def write(case):
    folder = os.environ.get("OWNER_OUT")
    if folder:
        with open(os.path.join(folder, f"{case}.{os.getpid()}.json"), "w") as file:
            json.dump(expected, file)


def run(case):
    globals()[case]()
    write(case)


def spawned():
    run("plain")


if __name__ == "__main__":
    if sys.argv[1] == "alone":
        run(sys.argv[2])
        sys.exit(0)
    if sys.argv[1] == "spawn":
        import multiprocessing

        child = multiprocessing.get_context("spawn").Process(target=spawned)
        child.start()
        child.join()
        sys.exit(child.exitcode)
    import torch._dynamo  # once, not in every child: the first step of an optimizer imports it

    gc.freeze()  # see forked.py
    for case in sys.argv[1:]:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            print("==", case)
            run(case)
            sys.exit(0)
        status = os.waitpid(child, 0)[1]
        if status:
            print(f"{case}: status {status}")
