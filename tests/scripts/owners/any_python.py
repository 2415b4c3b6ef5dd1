"""Calls modules of every kind in an interpreter without torch: any_python.py LIBC10_CUDA calls|hooks.

A stand-in for torch has the attributes that src/preload/python/tracer reads, and the blocks come from the
stand-in for torch's allocator. For each block the script prints the module that allocated it, and the Python
lines of the call, outermost first. With `hooks`, module calls cannot be intercepted in C.
"""

import ctypes
import functools
import sys
import threading
import time
import types


class Library:
    """Stands for `torch._C`, and accepts any attribute."""

    class DisableTorchFunction:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

    _DisableTorchDispatch = DisableTorchFunction


class Tensor:
    is_cuda = False


class Parameter(Tensor):
    pass


class Module:
    before, after = [], []

    def __init__(self, **parts):
        self._modules, self._parameters, self._buffers = parts, {"weight": Parameter()}, {}

    def named_modules(self, prefix=""):
        yield prefix, self
        for name, part in self._modules.items():
            yield from part.named_modules(prefix + "." + name if prefix else name)

    def modules(self):
        return (module for _, module in self.named_modules())

    def parameters(self):
        return (parameter for module in self.modules() for parameter in module._parameters.values())

    def buffers(self):
        return iter(())

    # The same methods as in torch.
    def _wrapped_call_impl(self, *args, **kwargs):
        return self._call_impl(*args, **kwargs)

    def _call_impl(self, *args, **kwargs):
        for hook in Module.before:
            hook(self, args)
        try:
            return self.forward(*args, **kwargs)
        finally:
            for hook in Module.after:
                hook(self, args, None)

    __call__ = _wrapped_call_impl


if sys.argv[2] == "hooks":
    Module._call_impl = functools.partialmethod(Module._call_impl)


def register(hooks):
    def add(hook, **_):
        hooks.append(hook)
        return types.SimpleNamespace(id=len(hooks))

    return add


def stand_in(name, **members):
    module = types.ModuleType(name)
    module.__spec__ = types.SimpleNamespace(_initializing=False)
    vars(module).update(members)
    sys.modules[name] = module


layouts = {
    name: object()
    for name in ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")
}
interrupts = []


def is_scripting():
    if interrupts:
        raise interrupts.pop()
    return False


# Delegates as torch's does: near the stack limit it fails where a module's forward does not.
compiler = types.SimpleNamespace(is_compiling=lambda: is_scripting())
stand_in(
    "torch",
    Tensor=Tensor,
    nn=types.SimpleNamespace(Parameter=Parameter),
    _C=Library,
    compiler=compiler,
    **layouts,
)
stand_in(
    "torch.nn.modules.module",
    Module=Module,
    register_module_forward_pre_hook=register(Module.before),
    register_module_forward_hook=register(Module.after),
)
stand_in(
    "torch.optim.optimizer",
    Optimizer=type("Optimizer", (), {}),
    register_optimizer_step_pre_hook=register([]),
    register_optimizer_step_post_hook=register([]),
)

library = ctypes.CDLL(sys.argv[1])
library.torch_allocate.argtypes, library.torch_allocate.restype = [ctypes.c_size_t], ctypes.c_void_p


def block(module):
    lines, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == __file__:
            lines.append(f"{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    library.torch_allocate(512)
    print(module, *reversed(lines), "block", sep="|")


class Inner(Module):
    def forward(self, deeper):
        return block("Net.inner") if deeper == 0 else [self.again(deeper) for _ in (0,)]

    def again(self, deeper):
        numbers = (self.forward(deeper - 1) for _ in range(1))
        return list(numbers)


class Net(Module):
    def forward(self, deeper):
        block("Net")
        self._modules["inner"](deeper)


class Part(Module):
    def forward(self, takes):
        if takes:
            block("Every.part")


class Above(Module):
    """A module with its own `__call__`."""

    def __call__(self, takes):
        return super().__call__(takes)

    def forward(self, takes):
        if takes:
            block("Every.above")


class Raises(Module):
    def forward(self, error):
        raise error


class Endless(Module):
    def forward(self):
        self()


class Shallow(Module):
    def forward(self):
        return None


def reach():
    """The depth at which a module can still be called for the first time."""

    def deep(further):
        return deep(further - 1) if further else Shallow()()

    further = sys.getrecursionlimit() - 100
    while True:
        try:
            deep(further)
        except RecursionError:
            return further
        further += 1


class Every(Module):
    """Calls its parts in every way that Python has."""

    def forward(self, takes):
        part = self._modules["part"]
        part(takes)
        part(takes=takes)
        part(*(takes,))
        part.__call__(takes)
        Module.__call__(part, takes)
        functools.partial(part, takes)()
        functools.partial(Module.__call__, part)(takes)
        self._modules["above"](takes)
        for name, error in (
            ("raises", KeyError()),
            ("raises", KeyboardInterrupt()),
            ("endless", RecursionError()),
        ):
            try:
                self._modules[name](*([error] if name == "raises" else []))
            except type(error):
                if takes:
                    block("Every")


every = Every(part=Part(), above=Above(), raises=Raises(), endless=Endless())
for _ in range(100):
    every(False)  # by now the interpreter has made up its mind how each of these calls is done
reached = reach()
library.torch_allocate(512)  # from here on the hooks are there
for _ in range(100):
    pass
assert bool(Module.before) == (sys.argv[2] == "hooks")
every(True)
if not Module.before:
    # A KeyboardInterrupt that arrives in a hook reaches the program; any other exception of a hook does not.
    assert reach() == reached
    interrupts.append(KeyError())
    Shallow()()
    interrupts.append(KeyboardInterrupt())
    try:
        Shallow()()
    except KeyboardInterrupt:
        block("(none)")
    assert not interrupts
net = Net(inner=Inner())
for deeper in (0, 2):
    net(deeper)
block("(none)")
thread = threading.Thread(target=lambda: net(1))
thread.start()
thread.join()
eval(compile("net(0)\n", __file__, "exec"))


class Waits(Module):
    def forward(self):
        while True:
            time.sleep(0.0001)


class Late:
    """Is destroyed when Python ends, and releases the interpreter lock meanwhile."""

    def __init__(self, sleep=time.sleep):
        self.sleep = sleep

    def __del__(self):
        self.sleep(0.01)


late = Late()
# At exit Python unwinds the daemon thread inside the module.
threading.Thread(target=Waits(), daemon=True).start()
