"""The C functions and values that the library gives the tracer: src/tracer/preload/python/injection.rs makes this
module."""

from typing import Any, Callable

# The settings of this run.

KEEP_WRAPPERS: bool
"""MEMTRACE_WRAPPERS: wrappers such as DistributedDataParallel stay in module paths."""
MODULE_PATHS: bool
"""MEMTRACE_MODULES: modules get paths and tensors get tags."""
MEMORY_UNIT: int
"""The multiple, in bytes, that the allocator rounds a tensor's memory up to; 0 unless MEMTRACE_OPS=io."""
FREE_THREADED: bool
"""This interpreter is a free-threaded build. Another thread may change any object at any time."""

RETAINED_MS: int
"""MEMTRACE_RETAINED: the milliseconds of one search for what holds memory; 0 when it is off."""

CATEGORIES: dict[str, int]
"""The ids of the categories that `record_tag` takes, by their names in the trace."""
APIS: dict[str, int]
"""The ids that `record_module_memory` takes, by their names in the trace."""

# Modules

ENTERED_INSIDE: int
ENTERED_OUTERMOST: int
NOT_ENTERED: int

def enter_module(module: object) -> int:
    """A module's forward begins: ENTERED_OUTERMOST when no other module is open on this thread,
    ENTERED_INSIDE otherwise. NOT_ENTERED when the module has no path; nothing is recorded then."""

def leave_module(module: object) -> None: ...
def innermost_module() -> int:
    """The `id` of the innermost open module on this thread; 0 when none is open."""

def assign_path(module: object, path: str, class_name: str) -> None: ...
def forget_module(module_id: int) -> None: ...
def hook_vectorcall(
    function: object,
    object_size: int,
    before: Callable[..., None],
    after: Callable[[Any, Any], None] | None,
    set_eval_frame: Callable[..., Any] | None,
) -> bool:
    """Calls `before` and `after` around each call of `function`, a Python function whose object takes
    `object_size` bytes. False when this interpreter does not allow it; nothing is changed then."""

def hook_step(
    function: object,
    object_size: int,
    before: Callable[[Any], None],
    after: Callable[[Any], None],
) -> bool:
    """Calls `before` and `after` around each call of `function`, with its first argument. False when this
    interpreter does not allow it or the function is hooked already; nothing is changed then."""

def forget_optimizer(optimizer_id: int) -> None:
    """Stops counting the steps of an optimizer that was garbage-collected."""

def has_fault_at_next_step() -> bool:
    """Returns True if the simulated GPU waits for the next step to inject an out-of-memory error."""

# The program's own tools

def end_own_threads() -> None:
    """Waits, when Python shuts down, for the library's own threads that call the tracer; starts no other."""

def hide(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """Returns a function for Python's C code to call (the callback of a weak reference, or at exit). It calls
    `function` unseen by the program's profilers and debuggers."""

def with_observed_ops(function: Callable[[], None]) -> None:
    """Calls a function whose ops the library sees, and the program's profilers do not. The nodes that it makes
    take none of autograd's sequence numbers."""

def find_objects(get_objects: Callable[[], list], *kinds: type) -> list:
    """The live objects of these types that the garbage collector tracks. `get_objects` is
    `gc.get_objects`."""

# The search for what holds memory

def find_referrers(
    get_objects: Callable[[], list], targets: list[int], excluded: list[int], milliseconds: int
) -> list | None:
    """The objects that refer to an object whose `id` is in `targets`, each followed by that id; None when the
    time is up. Objects in `excluded` are skipped."""

def learn_frame_values(frame: object, first: object, second: object, third: object) -> bool:
    """Learns from a running frame whose first three variables have these values where frames keep theirs."""

def frame_values(frame: object, count: int) -> list:
    """The values of a frame's first `count` variables, None for one without a value. The frame keeps
    nothing."""

def learn_saved_tensor(saved: object, tensor: int, storage: int, data: int) -> bool:
    """Learns from a `SavedTensor` and the addresses of its tensor, storage and data."""

def saved_storages(*saved: object) -> list[int]:
    """The data addresses of these `SavedTensor` objects, leaving out those without data."""

def block_step(pointer: int) -> int:
    """The step in which a live block of the GPU was allocated; -1 before training, -2 for no such block."""

def block_bytes(pointer: int) -> int:
    """The size of a live block of the GPU; 0 for no such block."""

def record_script_end(refused: str) -> None:
    """Records the end of the script. `refused` is the error by which the system refused it memory, or empty."""

def current_step() -> int: ...
def is_growing() -> bool:
    """Returns True if allocated memory has grown from step to step."""

def host_memory_left() -> int:
    """The bytes that this process can still allocate before the kernel kills a process of its control group
    or of the machine."""

def record_retained(text: str) -> None:
    """Records a row with a result of the search for what holds memory."""

# Tags

def text_id(text: str) -> int: ...
def record_tag(pointer: int, category: int, path_id: int, name_id: int, weak: int = 0) -> None:
    """Records what the block at `pointer` is for. 0 stands for an unknown path or name. A weak tag leaves a
    more specific use as it is."""

def record_gradients(
    owners: list[tuple[int, Any]], tensor: type, strided: object, category: int
) -> list[int]:
    """Tags the gradient of each parameter in `owners`, pairs whose second item is an `Owner`. Returns the
    indices of those that are not plain tensors, which remain to be tagged."""

def backward_count() -> int:
    """The number of backward functions that have run in this process."""

def bytes_outside_phases() -> int:
    """The bytes that torch's allocator has handed out in no phase or before the first forward."""

def nameable_communicators() -> int:
    """The communicators of NCCL that have had an operation so far; 0 while PyTorch could wait for one."""

def name_communicator(handle: int, text: str) -> None:
    """Records the name of the group of a communicator, once."""

def record_mark(text: str) -> None: ...
def forward_begins_step() -> None:
    """A forward of a program that trains nothing begins a step."""

def is_detailed() -> bool:
    """False outside the detailed steps of MEMTRACE_DETAIL: gradients, inputs and caches get no tags there."""

def call_after(module: object, function: Callable[[Any], None]) -> None:
    """Calls `function(module)` once the outermost call of `module` that is in progress has returned. The
    function is the same each time."""

# Memory of modules

def record_module_memory(api: int, device: int, size: int, rounded: int) -> None: ...

# Layouts of objects that the library reads without calling Python or torch

def learn_tensor(tensor: int, storage: int, data: int, size: int) -> None: ...
def finish_op_layout() -> bool: ...
def learn_frame_layout(*numbers: int) -> None: ...

# Failures

def count_failure(place: str, kind: str) -> bool:
    """Counts an exception of type `kind`. True when its text should be logged: the log is at debug and it is
    the first of this kind at this place."""

def log_failure(place: str, kind: str, text: str) -> None: ...
