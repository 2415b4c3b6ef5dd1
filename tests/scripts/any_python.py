"""Modules and lines of Python, in any interpreter: any_python.py LIBC10_CUDA.

There is no torch: a stand-in has what src/preload/hooks.py asks of it, and blocks come from the stand-in for torch's
allocator. Prints, of each block, the module that took it and the lines that were there, outermost first.
"""

import ctypes
import sys
import threading
import types
import weakref


class Library:
    """Stands for `torch._C` and whatever else is only asked for."""

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

    def __call__(self, *args):
        for hook in Module.before:
            hook(self, args)
        try:
            return self.forward(*args)
        finally:
            for hook in Module.after:
                hook(self, args, None)


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


layouts = {name: object() for name in ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")}
compiler = types.SimpleNamespace(is_compiling=lambda: False)
stand_in("torch", Tensor=Tensor, nn=types.SimpleNamespace(Parameter=Parameter), _C=Library, compiler=compiler, **layouts)
stand_in("torch.nn.modules.module", Module=Module, register_module_forward_pre_hook=register(Module.before),
         register_module_forward_hook=register(Module.after))
stand_in("torch.optim.optimizer", Optimizer=type("Optimizer", (), {}), register_optimizer_step_pre_hook=register([]),
         register_optimizer_step_post_hook=register([]))

library = ctypes.CDLL(sys.argv[1])
library.torch_allocate.argtypes, library.torch_allocate.restype = [ctypes.c_size_t], ctypes.c_void_p


def block(module):
    lines, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == __file__:
            lines.append("%d %s" % (frame.f_lineno, frame.f_code.co_name))
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


library.torch_allocate(512)  # from here on the hooks are there
for _ in range(100):
    pass
net = Net(inner=Inner())
for deeper in (0, 2):
    net(deeper)
block("(none)")
thread = threading.Thread(target=lambda: net(1))
thread.start()
thread.join()
eval(compile("net(0)\n", __file__, "exec"))
