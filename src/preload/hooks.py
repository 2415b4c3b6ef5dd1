# What libmemtrace.so runs in the traced interpreter once torch is imported. It is compiled from memory
# and lives in a namespace of its own; nothing is imported that torch has not imported, nothing is printed,
# and no object of the program is changed. `native` has the functions of src/preload/python.rs.
#
# Every hook asks first whether dynamo is tracing: a hook that does anything then breaks the graph.

import sys
import weakref


def install(torch, native, keep_wrappers):
    enter, leave, number, tag = native["enter"], native["leave"], native["number"], native["tag"]
    innermost = native["innermost"]
    Tensor = torch.Tensor
    compiling = getattr(getattr(torch, "compiler", None), "is_compiling", None)
    if compiling is None:
        compiling = torch._dynamo.is_compiling if hasattr(torch, "_dynamo") else lambda: False

    WRAPPERS = frozenset(("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "OptimizedModule"))
    PARTS = frozenset(("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
    if keep_wrappers:
        WRAPPERS = PARTS = frozenset()

    numbers = {}  # id(module) -> number of its path
    paths = {}  # id(module) -> its path
    refs = {}  # id(module) -> a weak reference: an id may be another's later
    roots = {}  # root name -> weak reference of the module that has it
    owners = {}  # id(parameter) -> (weak reference, path, name)
    scans = {}  # id(root) -> how often it was called
    states = {}  # id(optimizer) -> (steps, entries)

    def forget(key):
        for table in (numbers, paths, refs, scans):
            table.pop(key, None)

    def adopt(module, path):
        key = id(module)
        paths[key] = path
        numbers[key] = number(path)
        if key not in refs:
            refs[key] = weakref.ref(module, lambda _: forget(key))

    def class_name(module):
        kind = type(module)
        name = kind.__name__
        # fully_shard makes a subclass of the module's own class.
        if name.startswith("FSDP") and not keep_wrappers and any(c.__name__ == "FSDPModule" for c in kind.__mro__):
            name = name[4:]
        return name

    def root_name(root):
        inner = root
        while type(inner).__name__ in WRAPPERS:
            wrapped = inner._modules.get("module") or inner._modules.get("_orig_mod")
            if wrapped is None:
                wrapped = inner._modules.get("_fsdp_wrapped_module")
            if wrapped is None:
                break
            inner = wrapped
        known = paths.get(id(inner))
        if known is not None and "." not in known:
            return known
        base = name = class_name(inner)
        count = 1
        while True:
            taken = roots.get(name)
            other = taken() if taken is not None else None
            if other is None or other is inner:
                roots[name] = weakref.ref(inner)
                return name
            count += 1
            name = "%s#%d" % (base, count)

    def below(path, name):
        parts = [part for part in name.split(".") if part not in PARTS] if name else []
        return ".".join([path] + parts)

    def adopt_tree(root, path):
        for name, module in root.named_modules():
            known = paths.get(id(module))
            # A module that was called by itself before belongs to its root from now on.
            if known is None or "." not in known:
                adopt(module, below(path, name))

    def adopt_new(module):
        parent = innermost()
        if parent not in paths:
            adopt_tree(module, root_name(module))
            return numbers[id(module)]
        path = paths[parent]
        owner = refs[parent]()
        name = next((name for name, child in owner._modules.items() if child is module), None) if owner is not None else None
        adopt_tree(module, below(path, name if name is not None else class_name(module)))
        return numbers.get(id(module), 0)

    def storages(tensor):
        # Wrapper subclasses (DTensor, quantized) have their memory in tensors inside them.
        if hasattr(tensor, "__tensor_flatten__") and type(tensor) is not Tensor:
            names = tensor.__tensor_flatten__()[0]
            for name in names:
                inner = getattr(tensor, name)
                if inner is not tensor:
                    yield from storages(inner)
        elif tensor.is_cuda and type(tensor).__name__ != "FakeTensor":
            yield tensor.untyped_storage().data_ptr()

    def tell(tensor, category, path, name):
        try:
            for pointer in storages(tensor):
                if pointer:
                    tag(pointer, category, path, name)
        except (RuntimeError, NotImplementedError, AttributeError):
            pass  # no storage: sparse, meta, functional

    PARAMETER, BUFFER, GRADIENT, STATE, INPUT = 0, 1, 2, 5, 6

    def scan(root):
        for module in root.modules():
            path = paths.get(id(module))
            if path is None:
                continue
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    owners[id(parameter)] = (weakref.ref(parameter), path, name)
                    tell(parameter, PARAMETER, path, name)
                    if parameter.grad is not None:
                        tell(parameter.grad, GRADIENT, path, name)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    tell(buffer, BUFFER, path, name)

    def tell_inputs(value, left=3):
        if isinstance(value, Tensor):
            tell(value, INPUT, "", "")
        elif left and isinstance(value, (tuple, list)):
            for item in value:
                tell_inputs(item, left - 1)
        elif left and isinstance(value, dict):
            for item in value.values():
                tell_inputs(item, left - 1)

    def root_called(root, args):
        key = id(root)
        calls = scans[key] = scans.get(key, 0) + 1
        # Parameters rarely move once training runs.
        if calls <= 3 or calls % 50 == 0:
            scan(root)
        tell_inputs(args)

    def before_forward(module, args):
        if compiling():
            return
        key = id(module)
        path = numbers.get(key)
        if path is None:
            path = adopt_new(module)
        if enter(path, key) == 0:
            root_called(module, args)

    def after_forward(module, args, output):
        if compiling():
            return
        leave(id(module))

    def before_step(optimizer, args, kwargs):
        if compiling():
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None:
                    path, name = owner_of(parameter)
                    tell(gradient, GRADIENT, path, name)

    def after_step(optimizer, args, kwargs):
        if compiling():
            return
        key = id(optimizer)
        steps, entries = states.get(key, (0, 0))
        state = optimizer.state
        states[key] = (steps + 1, len(state))
        # State is made in the first steps and stays.
        if steps >= 3 and entries == len(state) and steps % 50:
            return
        for parameter, values in state.items():
            if isinstance(parameter, Tensor) and isinstance(values, dict):
                path, name = owner_of(parameter)
                for kind, value in values.items():
                    if isinstance(value, Tensor):
                        tell(value, STATE, path, "%s.%s" % (name, kind) if name else str(kind))

    def owner_of(parameter):
        owner = owners.get(id(parameter))
        if owner is not None and owner[0]() is parameter:
            return owner[1], owner[2]
        return "", ""

    # By their full names: torch.optim deletes the attribute of its own submodule. All of them first, so
    # that nothing is half installed.
    modules, optimizers = sys.modules["torch.nn.modules.module"], sys.modules["torch.optim.optimizer"]
    before, after = optimizers.register_optimizer_step_pre_hook, optimizers.register_optimizer_step_post_hook
    modules.register_module_forward_pre_hook(before_forward)
    try:
        modules.register_module_forward_hook(after_forward, always_call=True)
    except TypeError:
        modules.register_module_forward_hook(after_forward)
    before(before_step)
    after(after_step)


def ready():
    """torch, when it is imported whole."""
    torch = sys.modules.get("torch")
    spec = getattr(torch, "__spec__", None)
    if torch is None or getattr(spec, "_initializing", False):
        return None
    if "torch.optim.optimizer" not in sys.modules or "torch.nn.modules.module" not in sys.modules:
        return None
    return torch


def start(native, keep_wrappers):
    torch = ready()
    if torch is None:
        return False
    install(torch, native, keep_wrappers)
    return True
