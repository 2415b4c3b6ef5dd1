# What libmemtrace.so runs in the traced interpreter once torch is imported. It is compiled from memory
# and lives in a namespace of its own; nothing is imported that torch has not imported, nothing is printed,
# and no object of the program is changed. `native` has the functions of src/preload/python/injection.rs.
#
# Every hook asks first whether dynamo is tracing: one that does anything then breaks the graph. What goes
# wrong in here costs what it would have told, never the program: `Exception` ends where it arose, and what
# is more than that (KeyboardInterrupt) is the program's.

import atexit
import gc
import sys
import time
import weakref
from _thread import get_ident


def install(torch, native, keep_wrappers, wants_modules, unit):
    enter, leave, adopt_path, forget_path = native["enter"], native["leave"], native["adopt"], native["forget"]
    number, tag, innermost, backwards = native["number"], native["tag"], native["innermost"], native["backwards"]
    learn, learned, measured, hear = native["learn"], native["learned"], native["measured"], native["hear"]
    gradients = native["gradients"]
    # By their full names: torch.optim deletes the attribute of its own submodule.
    modules, optimizers = sys.modules["torch.nn.modules.module"], sys.modules["torch.optim.optimizer"]
    Tensor, Parameter, Module, Optimizer = torch.Tensor, torch.nn.Parameter, modules.Module, optimizers.Optimizer
    # Modes that the program put up must not see our reads.
    quiet, quiet_ops = torch._C.DisableTorchFunction, torch._C._DisableTorchDispatch
    compiling = is_compiling(torch)

    # The class of a wrapper, and the part of it that is the model. PEFT's two are one in the other.
    WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod",
                "FullyShardedDataParallel": "_fsdp_wrapped_module", "PeftModel": "base_model", "BaseTuner": "model"}
    # Names that nobody else gives, left out wherever they stand in a path.
    PARTS = frozenset(("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
    if keep_wrappers:
        WRAPPERS, PARTS = {}, frozenset()
    wraps = {}  # class -> the part that is the model; None for what wraps nothing

    paths = {}  # id(module) -> its path
    tops = {}  # id(module) -> id of the root that gave it the path
    refs = {}  # id(module) -> a weak reference: an id may be another's later
    roots = {}  # root name -> weak reference of the module that has it
    owners = {}  # id(parameter) -> (weak reference, number of the path, its name, id of the root, the name's number)
    scans = {}  # id(root) -> how often it was called
    states = {}  # id(optimizer) -> (weak reference, steps, entries)
    numbers = {"": 0}  # text -> its number
    names = {}  # (name of a parameter, kind of its state) -> number
    left = {"searches": 8, "rescues": 4}
    told = [-1]  # how many backward functions had run when gradients were told last
    callers = {}  # id(root) -> the thread that called it last: only that one may look at its gradients
    main = get_ident()  # this runs on the main thread

    # Autograd's thread may still wait for the interpreter, to let go of a callback that Python queued (FSDP,
    # MemTracker), when the program ends right after a backward: pthread_exit in a C++ destructor then aborts
    # the process. That happens without us, but our hooks shift when; so whoever waits gets a last turn.
    atexit.register(time.sleep, 0.002)

    def numbered(text):
        found = numbers.get(text)
        if found is None:
            found = numbers[text] = number(text)
        return found

    # ---- paths

    def forget(key):
        for table in (paths, tops, refs, scans, callers, weighed):
            table.pop(key, None)
        forget_path(key)

    def adopt(module, path, top):
        key = id(module)
        if key not in refs:
            refs[key] = weakref.ref(module, lambda _: forget(key))
        paths[key], tops[key] = path, top
        adopt_path(module, path)

    def class_name(module):
        kind = type(module)
        name = kind.__name__
        # fully_shard makes a subclass of the module's own class.
        if name.startswith("FSDP") and not keep_wrappers and any(c.__name__ == "FSDPModule" for c in kind.__mro__):
            name = name[4:]
        return name

    def part_of(module):
        kind = type(module)
        if kind not in wraps:
            names = [WRAPPERS[base.__name__] for base in kind.__mro__ if base.__name__ in WRAPPERS]
            wraps[kind] = names[0] if names else None
        return wraps[kind]

    def unwrapped(module):
        """The model in a wrapper, and the names of the parts that lead to it."""
        parts = []
        while part_of(module) is not None:
            inner = vars(module).get("_modules", {}).get(part_of(module))
            if inner is None:
                break
            parts.append(part_of(module))
            module = inner
        return module, parts

    def root_name(root):
        inner, _ = unwrapped(root)
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
        inside = {id(module) for module in root.modules()}
        wrapper = ".".join(unwrapped(root)[1])
        for name, module in root.named_modules():
            if wrapper and (name == wrapper or name.startswith(wrapper + ".") or wrapper.startswith(name + ".")):
                name = name[len(wrapper) + 1:]
            # What was a root by itself before, with all that it has, belongs to its root from now on; what
            # another root has keeps the path that it has there.
            known = tops.get(id(module))
            if known is None or known in inside:
                adopt(module, below(path, name), id(root))

    LONGEST = 0.5  # seconds of this thread: how busy the machine is must not decide who is found
    MOST = 20_000_000  # objects, whose list alone would take longer

    def living(kinds):
        """The objects of these kinds that the garbage collector knows, as many as can be looked at in LONGEST, and
        whether these are all. Objects are not asked anything: proxies would do something."""
        met = []
        if sys.getallocatedblocks() > MOST:
            return met, False
        is_one, until = {}, time.thread_time() + LONGEST
        for count, thing in enumerate(gc.get_objects()):
            if count % 4096 == 0 and time.thread_time() > until:
                return met, False
            kind = type(thing)
            found = is_one.get(kind)
            if found is None:
                found = is_one[kind] = issubclass(kind, kinds)
            if found:
                met.append(thing)
        return met, True

    def children(module):
        return [child for child in vars(module).get("_modules", {}).values() if child is not None]

    def root_of(module):
        """The outermost module that this one is part of: it may be called without it (`vae.encoder(x)`)."""
        if left["searches"] <= 0 or next(module.parameters(), None) is None:
            return module
        left["searches"] -= 1
        parents = {}
        for other in living(Module)[0]:
            for child in children(other):
                parents.setdefault(id(child), other)
        climbed = {id(module)}
        while id(module) in parents and id(parents[id(module)]) not in climbed:
            module = parents[id(module)]
            climbed.add(id(module))
        return module

    def is_time_to_look(calls):
        """Of a root's calls the third, the hundredth, the thousandth, and so on: to look at all objects takes as long
        as one or two."""
        return calls == 3 or calls >= 100 and str(calls).strip("0") == "1"

    def adopt_uncalled():
        """A model that is there and that nobody calls has paths too: the copy that keeps the mean of the weights (EMA)
        is only ever written to."""
        others, are_all = living(Module)
        if not are_all:
            return
        inside = {id(child) for other in others for child in children(other)}
        for root in others:
            try:
                if id(root) in inside or any(id(module) in paths for module in root.modules()):
                    continue
                if any(parameter.is_cuda and owner_of(parameter) is None for parameter in root.parameters()):
                    adopt_tree(root, root_name(root))
                    scan(root)
            except Exception:
                pass  # one that was never made whole

    def adopt_new(module):
        parent = innermost()
        owner = refs[parent]() if parent in refs else None
        if owner is None:
            root = root_of(module)
            adopt_tree(root, root_name(root))
            if id(module) not in paths:
                adopt_tree(module, root_name(module))
            return
        name = next((name for name, child in owner._modules.items() if child is module), None)
        if name is None and next(module.parameters(), None) is not None:
            name = next((name for name, child in owner.named_modules() if child is module), None)
        path = below(paths[parent], name if name is not None else class_name(module))
        for name, inner in module.named_modules():
            adopt(inner, below(path, name), tops[parent])

    # ---- tensors

    PARAMETER, BUFFER, GRADIENT, STATE, INPUT, OTHER = 0, 1, 2, 5, 6, 8
    sparse = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)

    def pieces(tensor):
        """The tensors that have a tensor's memory; wrapper subclasses (DTensor) and sparse ones have more than one."""
        kind = type(tensor)
        if kind is Tensor or kind is Parameter or not hasattr(tensor, "__tensor_flatten__"):
            if not tensor.is_cuda or kind.__name__ == "FakeTensor":
                return ()
            if tensor.layout is strided:
                return (tensor,)
            if tensor.layout not in sparse:
                return ()
            with quiet_ops():
                if tensor.layout is torch.sparse_coo:
                    parts = (tensor._indices(), tensor._values())
                elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
                    parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
                else:
                    parts = (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
            return [piece for part in parts for piece in pieces(part)]
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [piece for part in parts if part is not tensor for piece in pieces(part)]

    strided = torch.strided

    def tell(tensor, category, path, name, seen):
        """Of tensors that share a storage, the first has it."""
        try:
            kind = type(tensor)
            if (kind is Tensor or kind is Parameter) and tensor.layout is strided:
                # What nearly all are: this runs for each gradient of each step.
                parts = (tensor,) if tensor.is_cuda else ()
            else:
                parts = pieces(tensor)
            for piece in parts:
                # Where the storage begins; to ask it makes an object.
                pointer = piece.untyped_storage().data_ptr() if piece.storage_offset() else piece.data_ptr()
                if pointer and pointer not in seen:
                    seen.add(pointer)
                    tag(pointer, category, path, name)
        except Exception:
            pass  # no storage: meta, functional, not initialized

    def owner_of(parameter):
        """Its entry in `owners`: an id may have been another's."""
        owner = owners.get(id(parameter))
        return owner if owner is not None and owner[0]() is parameter else None

    def gradient_of(parameter):
        # Asking a tensor that is no leaf warns.
        return parameter.grad if parameter.is_leaf else None

    def scan(root):
        seen, met = set(), set()
        top = tops.get(id(root), id(root))
        inside = {id(module) for module in root.modules()}
        for module in root.modules():
            path = numbered(paths.get(id(module), ""))
            if not path:
                continue
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) in met:
                    continue
                met.add(id(parameter))
                owner = owner_of(parameter)
                # A parameter that another root has too stays that one's.
                if owner is None or owner[3] in inside or owner[3] in (top, 0):
                    owner = owners[id(parameter)] = (weakref.ref(parameter), path, name, top, numbered(name))
                tell(parameter, PARAMETER, owner[1], owner[4], seen)
                gradient = gradient_of(parameter)
                if gradient is not None:
                    tell(gradient, GRADIENT, owner[1], owner[4], seen)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    tell(buffer, BUFFER, path, numbered(name), seen)

    def tell_gradients():
        """Of every parameter that is known and of no model that another thread trains: a backward of it may run."""
        here = get_ident()
        told[0] = backwards()
        here_owned = [item for item in owners.items() if callers.get(item[1][3], main) == here]
        seen = set()
        for index in gradients(here_owned, Tensor, strided, GRADIENT):
            key, (ref, path, _, _, name) = here_owned[index]
            parameter = ref()
            if parameter is None:
                owners.pop(key, None)
                continue
            gradient = gradient_of(parameter)
            if gradient is not None:
                tell(gradient, GRADIENT, path, name, seen)

    def tell_inputs(value, seen, deeper=3):
        if isinstance(value, Tensor):
            tell(value, INPUT, 0, 0, seen)
        elif deeper and isinstance(value, (tuple, list)):
            for item in value:
                tell_inputs(item, seen, deeper - 1)
        elif deeper and isinstance(value, dict):
            for item in value.values():
                tell_inputs(item, seen, deeper - 1)

    # ---- the memory of modules, when io records are asked for

    PARAMETERS, BUFFERS, INPUTS, OUTPUTS = 0, 1, 2, 3
    leaves = getattr(sys.modules.get("torch.utils._pytree"), "tree_leaves", None)
    weighed = {}  # id(module) -> its memory when it was told last, by kind and device

    def weigh(tensors):
        """The bytes by device as they are and rounded, each storage as often as it comes: MemTracker's rule."""
        sums = {}
        for tensor in tensors:
            for piece in pieces(tensor):
                size = piece.untyped_storage().nbytes()
                bytes_, rounded = sums.get(piece.device.index, (0, 0))
                sums[piece.device.index] = (bytes_ + size, rounded + -(-size // unit) * unit)
        return sums

    def measure(kind, tensors):
        for device, (bytes_, rounded) in weigh(tensors).items():
            measured(kind, device, bytes_, rounded)

    def tensors_in(value):
        if isinstance(value, Tensor):
            return (value,)
        return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)] if leaves is not None else ()

    def measure_given(module, args):
        """Of a call that begins: what it is given; of the module itself when that has changed."""
        with quiet():
            own = (weigh(module.parameters()), weigh(module.buffers()))
            if weighed.get(id(module)) != own:
                weighed[id(module)] = own
                for kind, sums in enumerate(own):
                    for device, (bytes_, rounded) in sums.items():
                        measured(kind, device, bytes_, rounded)
            measure(INPUTS, tensors_in(args))

    def root_called(root, args, kwargs):
        key, here = id(root), get_ident()
        calls = scans[key] = scans.get(key, 0) + 1
        callers[tops.get(key, key)] = here
        with quiet():
            # On other threads nobody calls when a backward is over.
            if here != main and told[0] != backwards():
                tell_gradients()
            # Parameters rarely move once training runs.
            if calls <= 3 or calls % 50 == 0:
                top = refs[tops[key]]() if tops.get(key) in refs else None
                scan(top if top is not None else root)
            if here == main and is_time_to_look(calls):
                adopt_uncalled()
            seen = set()
            tell_inputs(args, seen)
            tell_inputs(kwargs, seen)

    def tell_gradients_of(optimizer):
        """Of the parameters that it is about to step: on whatever thread, they are complete."""
        seen = set()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owner = owner_of(parameter)
                gradient = gradient_of(parameter)
                if gradient is not None and owner is not None:
                    tell(gradient, GRADIENT, owner[1], owner[4], seen)

    def tell_states(optimizer):
        seen = set()
        for parameter, values in optimizer.state.items():
            if not isinstance(parameter, Tensor) or not isinstance(values, dict):
                continue
            owner = owner_of(parameter)
            path, name = (owner[1], owner[2]) if owner is not None else (0, "")
            for kind, value in values.items():
                if isinstance(value, Tensor):
                    text = (name, kind)
                    if text not in names:
                        names[text] = numbered("%s.%s" % (name, kind) if name else str(kind))
                    tell(value, STATE, path, names[text], seen)

    # ---- what torch calls

    def before_forward(module, /, *args, **kwargs):
        if compiling():
            return
        how = enter(module)
        if how:
            try:
                if how == 2:
                    adopt_new(module)
                    how = enter(module)
                if how == 1:
                    root_called(module, args, kwargs)
            except Exception:
                pass
        if unit:
            try:
                measure_given(module, args)
            except Exception:
                pass

    def measure_result(module, output):
        try:
            with quiet():
                measure(OUTPUTS, tensors_in(output))
        except Exception:
            pass

    def before_step(optimizer, args, kwargs):
        if compiling():
            return
        try:
            with quiet():
                known = states.get(id(optimizer))
                if known is None or known[0]() is not optimizer:
                    states[id(optimizer)] = (weakref.ref(optimizer), 0, 0)
                    for group in optimizer.param_groups:
                        for parameter in group["params"]:
                            # Not part of a module that was called: it has no path.
                            if owner_of(parameter) is None:
                                owners[id(parameter)] = (weakref.ref(parameter), 0, "", 0, 0)
                    tell_gradients_of(optimizer)
                elif told[0] != backwards():
                    tell_gradients_of(optimizer)
        except Exception:
            pass

    def after_step(optimizer, args, kwargs):
        if compiling():
            return
        try:
            ref, steps, entries = states.get(id(optimizer), (weakref.ref(optimizer), 0, 0))
            size = len(optimizer.state)
            states[id(optimizer)] = (ref, steps + 1, size)
            # State is made in the first steps and stays.
            if steps < 3 or entries != size or steps % 50 == 0:
                with quiet():
                    tell_states(optimizer)
        except Exception:
            pass

    def hook_globally():
        """Where calls of modules can't be heard of from C (src/preload/python/module_calls.rs). It costs more, and what a model is
        given by name is not told."""
        def before(module, args):
            before_forward(module, *args)

        def after(module, args, output):
            if compiling():
                return
            if unit:
                measure_result(module, output)
            leave(module)

        handles = [modules.register_module_forward_pre_hook(before)]
        try:
            handles.append(modules.register_module_forward_hook(after, always_call=True))
        except TypeError:
            handles.append(modules.register_module_forward_hook(after))
        ours = {handle.id for handle in handles}
        kinds = ("backward_pre_hooks", "backward_hooks", "forward_pre_hooks", "forward_hooks")
        tables = [getattr(modules, "_global_" + kind) for kind in kinds if hasattr(modules, "_global_" + kind)]

        def has_any_global_hook():
            """torch.compile asks this and warns of global hooks; it is not to warn of ours."""
            return any(key not in ours for table in tables for key in table)

        if hasattr(modules, "_has_any_global_hook"):
            modules._has_any_global_hook = has_any_global_hook

    # ---- what libmemtrace calls, on the main thread

    def after_backward():
        try:
            with quiet():
                tell_gradients()
        except Exception:
            pass

    def track(leaves):
        """What the program registers with `memtrace.track_external`, by MemTracker's rules."""
        try:
            with quiet():
                seen = set()
                for leaf in leaves:
                    if isinstance(leaf, Tensor):
                        tell(leaf, OTHER, 0, 0, seen)
                    elif isinstance(leaf, Module):
                        if id(leaf) not in paths:
                            root = root_of(leaf)
                            adopt_tree(root, root_name(root))
                        scan(leaf)
                    elif isinstance(leaf, Optimizer):
                        tell_states(leaf)
        except Exception:
            pass

    def out_of_memory():
        """Memory ran out: what models hold is told now, also of those that were never called."""
        left["rescues"] -= 1
        if left["rescues"] < 0:
            return
        try:
            with quiet():
                found, optimizers = [], []
                for thing in living((Module, Optimizer))[0]:
                    (found if issubclass(type(thing), Module) else optimizers).append(thing)
                held = {id(child) for module in found for child in children(module)}
                for root in found:
                    if id(root) not in held and next(root.parameters(), None) is not None:
                        if id(root) not in paths:
                            adopt_tree(root, root_name(root))
                        scan(root)
                for optimizer in optimizers:
                    tell_states(optimizer)
        except Exception:
            pass

    def make_storages():
        """Ops on tensors that are known: src/preload/python/op_io learns from them where torch keeps things."""
        try:
            with quiet(), quiet_ops(), torch.inference_mode(False), torch.no_grad():
                a, b = torch.zeros(7, device="cpu"), torch.zeros(11, device="cpu")
                for tensor in (a, b):
                    storage = tensor.untyped_storage()
                    learn(tensor._cdata, storage._cdata, storage.data_ptr(), storage.nbytes())
                b.resize_(7)
                a.add_(b)
                a.view(7)
                torch.add(a, b, out=torch.zeros(7, device="cpu"))
                torch.cat([a, b])
        except Exception:
            pass
        learned()

    if unit and not compiling():
        make_storages()
    if not wants_modules:
        return (None,)
    # All of them are found first, so that nothing is half installed.
    before, after = optimizers.register_optimizer_step_pre_hook, optimizers.register_optimizer_step_post_hook
    call, kind = vars(Module).get("_call_impl"), type(install)
    dynamo = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    result, watch = measure_result if unit else None, getattr(dynamo, "set_eval_frame", None)
    if type(call) is not kind or not hear(call, kind.__basicsize__, before_forward, result, watch):
        hook_globally()
    before(before_step)
    after(after_step)
    return after_backward, out_of_memory, track


def make_nodes(torch):
    """Makes nodes of autograd's graph: src/preload/attribution/autograd_seq.rs learns from them where their numbers are."""
    quiet, quiet_ops = torch._C.DisableTorchFunction, torch._C._DisableTorchDispatch
    try:
        if is_compiling(torch)():
            return
        with quiet(), quiet_ops(), torch.inference_mode(False), torch.enable_grad():
            node = torch.zeros(1, device="cpu", requires_grad=True)
            for _ in range(20):
                node = node.neg()
    except Exception:
        pass


def is_compiling(torch):
    """The function that says whether dynamo is tracing."""
    found = getattr(getattr(torch, "compiler", None), "is_compiling", None)
    if found is None:
        found = torch._dynamo.is_compiling if hasattr(torch, "_dynamo") else lambda: False
    return found


def ready():
    """torch, when it is imported whole."""
    torch = sys.modules.get("torch")
    spec = getattr(torch, "__spec__", None)
    if torch is None or getattr(spec, "_initializing", False):
        return None
    if "torch.optim.optimizer" not in sys.modules or "torch.nn.modules.module" not in sys.modules:
        return None
    return torch


def learn_frames(learn):
    """Tells src/preload/attribution/python_frames.rs of frames that are known: each is at another place of its code."""
    known = sys.implementation.name == "cpython" and (3, 9) <= sys.version_info[:2] <= (3, 14)

    def inner():
        if not known:
            return learn()
        frame = sys._getframe()
        code, callers = frame.f_code, []
        for _ in range(3):
            frame = frame.f_back
            callers += (id(frame.f_code), frame.f_lasti, frame.f_lineno)
        first = sys._getframe(1).f_code
        # The attribute whose object the code itself holds; the other one is made when it is asked for.
        lines = first.co_linetable if sys.version_info >= (3, 10) else first.co_lnotab
        learn(id(code), type(code).__basicsize__, id(first.co_filename), id(first.co_name), id(lines), *callers)

    def middle():
        somewhere = [known, known]
        somewhere.append(inner())

    def outer():
        middle()

    outer()


def start(native, keep_wrappers, wants_modules, unit, stacks):
    """What libmemtrace calls later; nothing while it is too early."""
    torch = ready()
    if torch is None:
        return ()
    if stacks:
        learn_frames(native["learn_frames"])
    make_nodes(torch)
    return install(torch, native, keep_wrappers, wants_modules, unit)
