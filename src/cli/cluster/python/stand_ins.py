"""Lets `torch.distributed` work in a rank whose peers are stand-ins.

- Stores: each `TCPStore` and `FileStore` is a client of the store that `memtrace run` serves for this rank.
- NCCL: the simulated GPU answers for the stand-ins. This module passes it the sizes of groups, and how many
  of their ranks are on this machine.
- gloo: a group has PyTorch's own fake backend. The collectives of host tensors get their results as if all
  ranks had the same data as this rank.
- Objects: a gather returns copies of this rank's object. An object from a stand-in is the object that this
  rank passed.
- Waits for values that no stand-in provides: see `waits.py`.
"""

import contextlib
import copy
import ctypes
import importlib.util
import inspect
import os
import socket
import sys
import threading


def sibling(name):
    """Returns the module in a file of this folder, which is not in `sys.path`."""
    file = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"memtrace_{name}.py")
    spec = importlib.util.spec_from_file_location(f"memtrace_{name}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def phantom_function(name, *arguments, result=None):
    """Returns a function of the preloaded simulated GPU, or a no-op if no function has this name."""
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):
        return lambda *_: None
    function.argtypes, function.restype = arguments, result
    return function


announce = phantom_function("memtrace_phantom_announce_group", ctypes.c_size_t, ctypes.c_size_t)
place = phantom_function("memtrace_phantom_place_group", ctypes.c_char_p, ctypes.c_size_t)
count_answer = phantom_function("memtrace_phantom_stand_in_answer")
launches = phantom_function("memtrace_phantom_launches", result=ctypes.c_uint64)
waiting = sibling("waits")
HOST = "127.0.0.1"
# The groups that are being created, innermost last: the number of ranks, and the number of ranks on this
# machine (0: unknown).
sizes = []


@contextlib.contextmanager
def announced(size, near=0):
    """Announces to the simulated GPU the number of ranks of the group that is being created, and the number
    of them that are on this machine (`near`; 0: unknown). Calls may be nested."""
    sizes.append((size, near))
    announce(size, near)
    try:
        yield
    finally:
        sizes.pop()
        announce(*(sizes[-1] if sizes else (0, 0)))


def ask(line):
    """Sends a line of memtrace's own protocol (see ../store.rs) to this rank's store. Returns the answer."""
    with socket.create_connection((HOST, int(os.environ["MEMTRACE_PHANTOM_STORE"]))) as connection:
        # File names may contain bytes that are not valid text.
        connection.sendall(f"{line}\n".encode(errors="backslashreplace"))
        return connection.makefile().readline().strip()


def tell(line):
    """Sends a line to this rank's store. Returns the answer, or an empty text if no store answers."""
    try:
        return ask(line)
    except (OSError, KeyError, ValueError):
        return ""


def store_port(name):
    """Returns the port of this rank's store with this name, which may also be the port of such a store."""
    return int(ask(f"store {name}"))


def tell_place(place, key):
    """Reports the line that waited for a key. Returns the source of the key's value, as
    `Waits.answered` does."""
    line = "\t".join(text.replace("\n", " ").replace("\t", " ") for text in (place, key))
    return tell(f"waited {line}") or "set"


def warn_of_other_ranks():
    """Warns, once per rank, if RANK or WORLD_SIZE of this process do not belong to a rank that runs."""
    ranks, world = os.environ["MEMTRACE_PHANTOM_RANKS"].rsplit("/")
    rank, size = os.environ.get("RANK") or "", os.environ.get("WORLD_SIZE") or ""
    spans = [span.split("-") for span in ranks.split(",")]
    runs = not rank.isdecimal() or any(int(span[0]) <= int(rank) <= int(span[-1]) for span in spans)
    if runs and size in ("", world):
        return
    try:
        # The folder belongs to this rank alone. If the file exists, a process of the rank has already warned.
        os.close(os.open(os.path.join(waiting.OWN_FOLDER, "warned"), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return
    except OSError:
        pass
    print(
        f"memtrace: RANK is {rank or 'not set'} and WORLD_SIZE is {size or 'not set'} here, and rank {ranks} "
        f"of {world} runs: a launcher inside the program started ranks of its own, which share the store of "
        "one rank. Pass the launcher's own command to memtrace run --ranks",
        file=sys.stderr,
    )


def install(c10d):
    """Replaces the parts of `torch.distributed` that would wait for other ranks."""
    import torch
    from torch._C import _distributed_c10d as native

    error = getattr(c10d, "DistStoreError", RuntimeError)
    folder = os.path.dirname(os.path.abspath(torch.__file__))
    warn_of_other_ranks()
    waits = waiting.Waits(folder, tell_place, launches, error)
    install_stores(native)
    install_waits(native, waits)
    install_groups(c10d, native)
    install_gloo(torch, c10d, native, waits)
    install_objects(torch, c10d)


def install_stores(native):
    """Makes each store a client of this rank's own store."""
    connect = native.TCPStore.__init__
    unnamed = iter(range(1 << 62))

    def init(self, host_name, port, world_size=None, is_master=False, *rest, **options):
        # A server at port 0 is a new store, whose port is queried afterwards.
        name = f"new {os.getpid()} {next(unnamed)}" if not port else str(int(port))
        known = {key: options[key] for key in ("timeout", "use_libuv") if key in options}
        if rest:
            known["timeout"] = rest[0]
        # Pass 1 as the number of workers: with more, the client would pause before it connects, to spare the
        # server.
        connect(self, HOST, store_port(name), 1, False, **known)

    native.TCPStore.__init__ = init

    class FileStore(native.TCPStore):
        def __init__(self, file_name, world_size=-1):
            connect(self, HOST, store_port("file " + os.path.abspath(file_name).replace("\n", " ")), 1, False)
            self.path = file_name

    for name in ("torch._C._distributed_c10d", "torch.distributed", "torch.distributed.rendezvous"):
        sys.modules[name].FileStore = FileStore


def install_waits(native, waits):
    """Reports the lines that wait for a key that no rank sets, and ends polls for such a key."""
    import time

    store = native.Store
    get, multi_get, wait, check = (
        getattr(store, name, None) for name in ("get", "multi_get", "wait", "check")
    )

    def source(call, keys, is_empty=lambda result: False):
        """Returns the result of a call that waits, and the keys that a stand-in set to an
        empty value meanwhile."""
        started = time.monotonic()
        result = call()
        # If the call returned a value at once, it did not wait, so there is nothing to report. Otherwise,
        # `answered` reports the line of the script and returns `empty` if a stand-in set an empty value.
        if time.monotonic() - started < waiting.ANSWERED_LATE and not is_empty(result):
            return result, []
        return result, [key for key in keys if waits.answered(key) == "empty"]

    def refuse(name, keys):
        why = "for a key that no rank sets"
        what = f"`store.{name}({', '.join(map(repr, keys))})`"
        raise waits.error(waiting.explained(what, waits.place(), why))

    def checked_get(self, key):
        result, empty = source(lambda: get(self, key), [key], lambda value: not value)
        if empty and not result:
            refuse("get", empty)
        return result

    def checked_multi_get(self, keys):
        result, empty = source(lambda: multi_get(self, keys), keys, lambda values: not all(values))
        if empty:
            refuse("multi_get", empty)
        return result

    def noted_wait(self, keys, *timeout):
        return source(lambda: wait(self, keys, *timeout), keys)[0]

    def counted_check(self, keys):
        is_set = check(self, keys)
        if not is_set:
            polled = f"`store.check([{', '.join(map(repr, keys))}])`"
            waits.repeated(polled, waiting.POLLS, "for a key that no rank sets")
        return is_set

    store.get, store.wait, store.check = checked_get, noted_wait, counted_check
    if multi_get is not None:
        store.multi_get = checked_multi_get
    waits.watch()


# The names of a pipeline's group in device meshes and Megatron-core. It has one rank of each stage.
PIPELINES = ("mesh_pp", "mesh_pipe", "mesh_pipeline", "PIPELINE_MODEL_PARALLEL_GROUP")


def note_pipeline(c10d, arguments, options):
    """Reports the ranks of this rank's pipeline if these arguments create the group of a pipeline."""
    values = (*arguments, *options.values())
    if not any(isinstance(value, str) and value in PIPELINES for value in values):
        return
    ranks = next((list(value) for value in values if isinstance(value, (list, tuple))), [])
    if len(ranks) > 1 and c10d.get_rank() in ranks:
        tell("pipeline " + ",".join(map(str, ranks)))


def near_of(ranks):
    """Returns the number of these ranks that are on this machine; 0 if unknown."""
    own, size = os.environ.get("RANK", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    if not (own.isdecimal() and size.isdecimal() and int(size)):
        return 0
    return sum(rank // int(size) == int(own) // int(size) for rank in ranks)


def install_groups(c10d, native):
    """Passes two facts about groups to the simulated GPU: how their ranks are spread over machines, and the
    sizes of the groups that NCCL splits off."""
    make = c10d._new_process_group_helper
    signature = inspect.signature(make)

    def new_process_group_helper(group_size, *arguments, **options):
        note_pipeline(c10d, arguments, options)
        given = signature.bind_partial(group_size, *arguments, **options).arguments
        # PyTorch passes an empty list for the group of all ranks.
        near = near_of(given.get("global_ranks_in_group") or range(group_size))
        if given.get("group_name") is not None:
            place(str(given["group_name"]).encode(errors="backslashreplace").replace(b"\0", b""), near)
        with announced(group_size, near):
            return make(group_size, *arguments, **options)

    c10d._new_process_group_helper = new_process_group_helper
    if hasattr(native.ProcessGroup, "split_group"):
        split = native.ProcessGroup.split_group

        def split_group(self, ranks, *arguments, **options):
            note_pipeline(c10d, (ranks, *arguments), options)
            with announced(len(ranks), near_of(ranks)):
                return split(self, ranks, *arguments, **options)

        native.ProcessGroup.split_group = split_group
    nccl = getattr(native, "ProcessGroupNCCL", None)
    if hasattr(nccl, "eager_connect_single_device"):
        connect = nccl.eager_connect_single_device

        def eager_connect_single_device(self, *arguments, **options):
            with announced(self.size()):
                return connect(self, *arguments, **options)

        nccl.eager_connect_single_device = eager_connect_single_device


def install_gloo(torch, c10d, native, waits):
    """Replaces gloo by PyTorch's fake backend, and writes the results that the fake backend leaves undone."""
    real_gloo = getattr(c10d, "ProcessGroupGloo", None)
    if real_gloo is None:
        return
    fake = native.FakeProcessGroup
    make_fake = getattr(fake, "_create_internal", fake)

    class Gloo(type):
        def __call__(cls, store, rank, size, *arguments, **options):
            return make_fake(rank, size)

        def __instancecheck__(cls, value):
            return isinstance(value, (fake, real_gloo))

        def __getattr__(cls, name):
            return getattr(real_gloo, name)

    # PyTorch asks a backend for the sequence number of its collectives. The fake backend raises an error
    # then. No rank compares the numbers here, so a constant is enough.
    fake._set_sequence_number_for_group = lambda self: None
    fake._get_sequence_number_for_group = lambda self: 0
    c10d.ProcessGroupGloo = Gloo("ProcessGroupGloo", (), {})
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL, PyTorch wraps each group to compare the ranks' collectives through
    # gloo. Stand-ins have nothing to compare, so the group stays unwrapped.
    c10d._create_process_group_wrapper = lambda wrapped_pg, *arguments, **options: wrapped_pg
    monitored_barrier = c10d.monitored_barrier

    def has_stand_ins(group):
        with contextlib.suppress(Exception):
            return isinstance(group._get_backend(torch.device("cpu")), fake)
        return False

    def checked_barrier(group=None, *arguments, **options):
        if not has_stand_ins(group or c10d.GroupMember.WORLD):
            monitored_barrier(group, *arguments, **options)

    c10d.monitored_barrier = checked_barrier

    def first_tensor(value):
        while isinstance(value, (list, tuple)) and value:
            value = value[0]
        return value if isinstance(value, torch.Tensor) else None

    def on_host(name, finish):
        """Wraps the collective `name`: for host tensors among stand-ins, `finish` writes its result."""
        real = getattr(native.ProcessGroup, name, None)
        if real is None:
            return

        def collective(self, *arguments, **options):
            if name == "recv":
                waits.repeated("`recv`", waiting.MESSAGES, "for a message that no rank sends")
            tensor = first_tensor(arguments)
            work = real(self, *arguments, **options)
            if tensor is not None and tensor.device.type == "cpu" and has_stand_ins(self):
                count_answer()
                with torch.no_grad():
                    finish(self, *arguments, **options)
            return work

        setattr(native.ProcessGroup, name, collective)

    for name, finish in sibling("host_results").RESULTS.items():
        on_host(name, finish)


def install_objects(torch, c10d):
    """Replaces the collectives for objects, so that each object from a stand-in is a copy of the object that
    this rank passed."""
    current = threading.local()
    read_object = c10d._tensor_to_object

    def tensor_to_object(*arguments, **options):
        passed = getattr(current, "objects", None)
        if passed is None:
            return read_object(*arguments, **options)
        own = next(passed, None)
        try:
            return read_object(*arguments, **options)
        except Exception:  # A tensor from a stand-in may hold no object.
            count_answer()
            return copy.deepcopy(own)

    c10d._tensor_to_object = tensor_to_object

    @contextlib.contextmanager
    def passing(objects):
        current.objects = iter(objects)
        try:
            yield
        finally:
            current.objects = None

    def copies_of(value):
        while True:
            yield value

    def is_root(group, root, group_root):
        group = group or c10d.GroupMember.WORLD
        if group_root is not None:
            return group.rank() == group_root
        return c10d.get_rank() == (0 if root is None else root)

    def on_host(group, device):
        device = device or c10d._get_object_coll_device(group)
        return torch.device(device).type == "cpu"

    def replaced(name):
        """Replaces a function of `torch.distributed` by one that takes the original as its first argument."""

        def decorate(function):
            real = getattr(c10d, name)

            def wrapper(*arguments, **options):
                return function(real, *arguments, **options)

            wrapper.__name__, wrapper.__doc__ = name, real.__doc__
            setattr(c10d, name, wrapper)

        return decorate

    @replaced("all_gather_object")
    def all_gather_object(real, object_list, obj, group=None):
        with passing(copies_of(obj)):
            return real(object_list, obj, group)

    @replaced("gather_object")
    def gather_object(real, obj, object_gather_list=None, dst=None, group=None, *rest, **options):
        with passing(copies_of(obj)):
            return real(obj, object_gather_list, dst, group, *rest, **options)

    @replaced("broadcast_object_list")
    def broadcast_object_list(real, object_list, src=None, group=None, device=None, **options):
        if is_root(group, src, options.get("group_src")):
            return real(object_list, src, group, device, **options)
        if on_host(group, device):
            # The tensors of this broadcast would be on the host, so skipping it changes no GPU memory.
            count_answer()
            return None
        with passing(list(object_list)):
            return real(object_list, src, group, device, **options)

    @replaced("scatter_object_list")
    def scatter_object_list(real, output_list, input_list=None, src=None, group=None, *rest, **options):
        if is_root(group, src, options.get("group_src")):
            return real(output_list, input_list, src, group, *rest, **options)
        if on_host(group, None):
            count_answer()
            return None
        with passing(list(output_list)):
            return real(output_list, input_list, src, group, *rest, **options)
