"""The functions and values that the library gives the tracer. src/tracer/preload/python/native.rs creates
this module."""

from typing import Any, Callable

# The settings of this run.

KEEP_WRAPPERS: bool
"""True if module paths contain wrappers such as DistributedDataParallel (MEMTRACE_WRAPPERS)."""
HOST_TENSORS: bool
"""True if CPU tensors are recorded (MEMTRACE_HOST_TENSORS)."""
MODULE_PATHS: bool
"""True if modules get paths and tensors get tags (MEMTRACE_MODULES)."""
MEMORY_UNIT: int
"""The unit in bytes to which the allocator rounds up a tensor's memory; 0 unless MEMTRACE_OPS=io is set."""
FREE_THREADED: bool
"""True if this interpreter is a free-threaded build. Another thread may then change any object at any
time."""

RETAINED_MS: int
"""The time limit of one search for the holders of memory, in ms; 0 if the search is off
(MEMTRACE_RETAINED)."""
RETAINED_IS_BOUNDED: bool
"""True if searches because memory grows take at most 1% of the run's time so far."""

CATEGORIES: dict[str, int]
"""The ids of the categories that `record_tag` takes, by their names in the trace."""
APIS: dict[str, int]
"""The ids that `record_module_memory` takes, by their names in the trace."""

VERDICTS: dict[str, int]
"""The verdicts of a search for holders: 1 if the memory is kept without need, and otherwise 0."""

# Modules

ENTERED_INSIDE: int
ENTERED_OUTERMOST: int
NOT_ENTERED: int

def enter_module(module: object) -> int:
    """Records that a module's forward begins. Returns ENTERED_OUTERMOST if no other module is open on this
    thread, and otherwise ENTERED_INSIDE. Returns NOT_ENTERED and records nothing if the module has no
    path."""

def leave_module(module: object) -> None: ...
def innermost_module() -> int:
    """Returns the `id` of the innermost open module on this thread, or 0 if no module is open."""

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
    `object_size` bytes. Returns False and changes nothing if this interpreter does not allow it."""

def hook_step(
    function: object,
    object_size: int,
    before: Callable[[Any], None],
    after: Callable[[Any], None],
) -> bool:
    """Calls `before` and `after`, with the first argument of the call, around each call of `function`.
    Returns False and changes nothing if this interpreter does not allow it or the function is hooked
    already."""

def hook_sharding(
    function: object,
    object_size: int,
    index: int,
    before: Callable[..., None] | None,
    after: Callable[..., None] | None,
) -> bool:
    """Calls `before` and `after` with the first two arguments of each call of `function`, before and after the
    call. `index` is below 4 and different for each function. Returns False and changes nothing if this
    interpreter does not allow it or the index is used already."""

def set_sharded_modules(path_id: int, next_path_id: int) -> None:
    """Sets the module whose parameters FSDP1 gathers or reduces next on this thread, and the module whose
    parameters it may gather meanwhile."""

def forget_optimizer(optimizer_id: int) -> None:
    """Stops counting the steps of an optimizer that was garbage-collected."""

def has_fault_at_next_step() -> bool:
    """Returns True if the simulated GPU waits for the next step to inject an out-of-memory error."""

# The program's own tools

def end_own_threads() -> None:
    """Waits for the library's own threads that call the tracer, and prevents new ones. Called when Python
    shuts down."""

def hide(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """Returns a function that calls `function` hidden from the program's profilers and debuggers. It is for
    calls that Python makes from C, such as the callback of a weak reference or an exit function."""

def with_observed_ops(function: Callable[[], None]) -> None:
    """Calls a function. The library sees its ops, but the program's profilers do not. The nodes of autograd
    that the function creates use up no sequence numbers."""

def find_objects(get_objects: Callable[[], list], *kinds: type) -> list:
    """Returns the live objects of these types that the garbage collector tracks. `get_objects` is
    `gc.get_objects`, which is used before Python 3.12."""

# The search for the holders of memory

def find_referrers(
    get_objects: Callable[[], list], targets: list[int], excluded: list[int], milliseconds: int
) -> list | None:
    """Returns the objects that refer to an object whose `id` is in `targets`, each followed by that id.
    Returns None if the search takes longer than `milliseconds`. Skips objects whose `id` is in `excluded`."""

def learn_frame_values(frame: object, first: object, second: object, third: object) -> bool:
    """Learns where frames keep the values of variables, from a running frame whose first three variables have
    these values. Returns whether this succeeded."""

def frame_values(frame: object, count: int) -> list:
    """Returns the values of a frame's first `count` variables, with None for a variable without a value.
    Unlike `f_locals`, this keeps no value alive."""

def learn_saved_tensor(saved: object, tensor: int, storage: int, data: int) -> bool:
    """Learns where a `SavedTensor` keeps its data, from one whose tensor, storage and data are at these
    addresses. Returns whether this succeeded."""

def saved_storages(*saved: object) -> list[int]:
    """Returns the data addresses of those of these `SavedTensor` objects that have data."""

def block_step(pointer: int) -> int:
    """Returns the step in which the live block at an address was allocated. Returns -1 for a block from
    before training, and -2 if no known block is at the address."""

def block_bytes(pointer: int) -> int:
    """Returns the size in bytes of the live block at an address, or 0 if no known block is there."""

def record_script_end(refused: str) -> None:
    """Records the end of the script. `refused` names the error with which the script ended because the system
    refused it memory; otherwise it is empty."""

def current_step() -> int: ...
def is_growing() -> bool:
    """Returns True if allocated memory has grown from step to step."""

def host_memory_left() -> int:
    """Returns the bytes of host memory that this process can still allocate before the kernel kills a process
    of its control group or of the machine."""

def record_model_fact(text: str) -> None:
    """Records a row with a fact about a model (see src/trace/model_fact.rs)."""

def record_retained(text: str) -> None:
    """Records a row with a result of the search for the holders of memory."""

# Tags

def text_id(text: str) -> int: ...
def record_tag(
    pointer: int, category: int, path_id: int, name_id: int, form_id: int, weak: int = 0
) -> None:
    """Records the category, module, name and form (type and shape) of the block at `pointer`. An id of 0 means
    that the path, name or form is unknown. A weak tag does not replace a more specific use."""

def record_gradients(
    owners: list[tuple[int, Any]], tensor: type, strided: object, category: int
) -> list[int]:
    """Tags the gradient of each parameter in `owners`, a list of pairs whose second item is an `Owner`.
    Returns the indices of the gradients that the caller must tag: those that are not plain tensors or share a
    storage."""

def backward_count() -> int:
    """Returns the number of backward functions that have begun in this process."""

def bytes_outside_phases() -> int:
    """Returns the bytes that torch's allocator has handed out in no phase or before the first forward. Freed
    bytes are not subtracted."""

def nameable_communicators() -> int:
    """Returns the number of NCCL's communicators that have had an operation. Returns 0 if a communicator is
    non-blocking, because PyTorch would wait for it when its name is queried."""

def name_communicator(handle: int, text: str) -> None:
    """Records the name of a communicator's process group. Only the first call for a communicator counts."""

def record_server(text: str) -> None: ...
def forward_begins_step() -> None:
    """Begins a step, because a program that trains nothing begins a forward."""

def is_detailed() -> bool:
    """Returns False outside the detailed steps of MEMTRACE_DETAIL, where gradients, inputs and caches get no
    tags."""

def call_after(module: object, function: Callable[[Any], None]) -> None:
    """Calls `function(module)` when the outermost call of `module` in progress on this thread has returned.
    Every caller must pass the same function."""

# Memory of modules

def record_module_memory(api: int, device: int, size: int, rounded: int) -> None: ...

# Layouts of objects that the library reads without calling Python or torch

def learn_tensor(tensor: int, storage: int, data: int, size: int) -> None: ...
def finish_op_layout() -> bool: ...
def learn_frame_layout(*numbers: int) -> None: ...

# Failures

def count_failure(place: str, kind: str) -> bool:
    """Counts an exception of type `kind`. Returns True if the caller must log it: the log level is debug, and
    the exception is the first of its type at this place."""

def log_failure(place: str, kind: str, text: str) -> None: ...
