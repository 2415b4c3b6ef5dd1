"""A stand-in for torch with the attributes that src/tracer/preload/python/tracer reads."""

import sys
import types


class Library:
    """Stands in for `torch._C`, and accepts any attribute."""

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
    for name in ("float32", "strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")
}


def install(is_compiling=lambda: False):
    """Installs the stand-in, so that `import torch` finds it."""
    stand_in(
        "torch",
        Tensor=Tensor,
        nn=types.SimpleNamespace(Parameter=Parameter),
        _C=Library,
        compiler=types.SimpleNamespace(is_compiling=is_compiling),
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
