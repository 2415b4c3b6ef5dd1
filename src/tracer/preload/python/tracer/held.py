"""Tags GPU tensors that objects keep as attributes: key-value caches, workspaces, quantized weights, an
engine's buffers. They are neither parameters nor buffers of a module.

A search reads only `__dict__`, lists, tuples and dicts, because an attribute of an arbitrary object may run
code of the program. The search is bounded in depth, in the size of one list and in the number of objects.
"""

from __future__ import annotations

import itertools
import sys

from .failures import count
from .live_objects import live_objects
from .native import CATEGORIES, record_server, text_id
from .storages import tag
from .torch_api import Module, Tensor

BUFFER = CATEGORIES["buffer"]
PARAMETER = CATEGORIES["parameter"]
GRADIENT = CATEGORIES["gradient"]
OPTIMIZER_STATE = CATEGORIES["optimizer_state"]
KV_CACHE = CATEGORIES["kv_cache"]
WORKSPACE = CATEGORIES["workspace"]

# Limits of a search: the depth of nested objects, the items of one list or dict, all items below one object,
# and the number of objects.
DEPTH = 5
ITEMS = 4096
ALL_ITEMS = 100_000
OBJECTS = 200_000

# Libraries whose plain objects are searched if a module or an engine keeps them.
PACKAGES = frozenset(
    ("vllm", "sglang", "lmdeploy", "tensorrt_llm", "transformers", "flashinfer", "bitsandbytes")
)
# By Python module: classes that own a server's memory and do not derive from torch's `Module`.
ENGINES = {
    "vllm.v1.worker.gpu_model_runner": "GPUModelRunner",
    "vllm.v1.worker.gpu.model_runner": "GPUModelRunner",
    "vllm.v1.worker.workspace": "WorkspaceManager",
    "sglang.srt.model_executor.model_runner": "ModelRunner",
    "transformers.cache_utils": "Cache",
}
CACHE_WORDS = (
    "kv_cache",
    "kv_buffer",
    "key_cache",
    "value_cache",
    "k_cache",
    "v_cache",
    "k_buffer",
    "v_buffer",
    "conv_state",
    "ssm_state",
    "past_key_values",
)
# The names that bitsandbytes, GPTQ, AWQ and compressed-tensors give to the tensors of quantized weights.
WEIGHT_NAMES = frozenset(
    ("CB", "SCB", "absmax", "code", "qweight", "qzeros", "scales", "g_idx")
    + ("weight_packed", "weight_scale", "weight_zero_point")
)
# The attributes in which DeepSpeed's optimizers keep this rank's part of the weights: the copies in float32
# that the optimizer steps, and the parameters themselves.
MASTER_WORDS = ("partition_of_fp32_groups", "fp32_partitioned_groups", "fp32_groups_flat_partition")
PARTITION_WORDS = ("fp16_partitioned_groups", "bit16_groups", "bf16_groups")
# The names of the attributes that every module has.
OWN_TABLES = frozenset(vars(Module()))
# The most common classes of attributes that hold no tensor.
PLAIN = frozenset((int, float, bool, str, bytes, complex, type(None), type, type(tag), type(len)))

# The texts that were recorded about a server's KV cache and its share of the card.
_recorded: set[str] = set()


def package_of(kind: type) -> str:
    """Returns the name of the package that defines a class."""
    name = kind.__module__
    return name.partition(".")[0] if isinstance(name, str) else ""


def is_of(kind: type, packages: frozenset) -> bool:
    """Returns True if one of these packages defines a class, or a class that it derives from."""
    return any(package_of(base) in packages for base in kind.__mro__)


def tensors_in(items, packages: frozenset, visited: set[int]):
    """Yields the name and the tensor for each tensor among these pairs of a name and an object, and inside
    the objects. `visited` has the ids of the objects that were searched, and gets new ones."""
    pending = [(str(name), value, DEPTH) for name, value in items if type(value) not in PLAIN]
    pending.reverse()
    left = ALL_ITEMS
    while pending and left > 0 and len(visited) < OBJECTS:
        name, value, depth = pending.pop()
        kind = type(value)
        if issubclass(kind, Tensor):
            yield name, value
            continue
        if not depth or id(value) in visited or issubclass(kind, (Module, type)):
            continue
        if issubclass(kind, dict):
            inside = list(itertools.islice(dict.items(value), ITEMS))
        elif issubclass(kind, list):
            inside = list(enumerate(itertools.islice(list.__iter__(value), ITEMS)))
        elif issubclass(kind, tuple):
            inside = list(enumerate(itertools.islice(tuple.__iter__(value), ITEMS)))
        elif kind.__dictoffset__ and is_of(kind, packages):
            inside = list(vars(value).items())
        else:
            continue
        visited.add(id(value))
        left -= len(inside) + 1
        # Keys of other types are replaced by their index, because a conversion to text may run the program's
        # code; for a tensor, it launches kernels.
        new = [
            (f"{name}.{key if type(key) in (str, int) else place}", item, depth - 1)
            for place, (key, item) in enumerate(inside)
            if type(item) not in PLAIN
        ]
        pending.extend(reversed(new))


def use_of(name: str) -> int:
    """Returns the category of a tensor that is kept under this name."""
    lowered = name.lower()
    if "workspace" in lowered:
        return WORKSPACE
    if any(word in lowered for word in CACHE_WORDS):
        return KV_CACHE
    if any(word in name for word in MASTER_WORDS):
        return OPTIMIZER_STATE
    if any(word in name for word in PARTITION_WORDS):
        return PARAMETER
    last = name.rpartition(".")[2]
    # Megatron keeps `main_grad` as an attribute of a parameter, and `grad_data` in its wrapper.
    if "grad" in last.lower():
        return GRADIENT
    return PARAMETER if last in WEIGHT_NAMES else BUFFER


def tag_attributes(module, path_id: int, seen: set[int], visited: set[int]) -> None:
    """Tags the tensors that are plain attributes of a module, or attributes of its parameters."""
    packages = PACKAGES | {package_of(type(module))}
    own = [item for item in vars(module).items() if type(item[1]) not in PLAIN and item[0] not in OWN_TABLES]
    for name, tensor in tensors_in(own, packages, visited):
        tag(tensor, use_of(name), path_id, text_id(name), seen, weak=1)
    for name, parameter in module._parameters.items():
        more = getattr(parameter, "__dict__", None)
        if more:
            for inner, tensor in tensors_in(list(more.items()), packages, visited):
                use = use_of(inner)
                use = PARAMETER if use == BUFFER else use
                tag(tensor, use, path_id, text_id(f"{name}.{inner}"), seen, weak=1)


def _mark_room(engine) -> None:
    """Records the number of blocks and tokens of a vLLM runner's KV cache, once for each pair of values."""
    config = vars(engine).get("kv_cache_config")
    cache = vars(engine).get("cache_config")
    blocks, groups = getattr(config, "num_blocks", 0), getattr(config, "kv_cache_groups", ())
    size = getattr(cache, "block_size", 0)
    if not (blocks and groups and isinstance(size, int)):
        return
    # A sequence takes a block from each group, so the blocks of one group give the number of tokens.
    text = f"kv_cache: blocks={blocks} tokens={blocks // len(groups) * size}"
    if text not in _recorded:
        _recorded.add(text)
        record_server(text)


def mark_share(has_ended: bool = False) -> None:
    """Records the share of a card's memory that vLLM may use, and the number of blocks in its KV cache (0 if
    the cache does not exist yet). `has_ended` marks the record at the end of the script."""
    kind = getattr(sys.modules.get("vllm.config"), "CacheConfig", None)
    if not isinstance(kind, type):
        return
    for config in live_objects(kind):
        values = vars(config)
        part, blocks = values.get("gpu_memory_utilization"), values.get("num_gpu_blocks")
        # If the size of the cache is configured, vLLM does not use the share.
        if type(part) is float and values.get("kv_cache_memory_bytes") is None:
            text = f"vllm: gpu_memory_utilization={part:g} blocks={blocks if type(blocks) is int else 0}"
            text += " ended" * has_ended
            if text not in _recorded:
                _recorded.add(text)
                record_server(text)


def tag_engines() -> None:
    """Finds servers' runners and caches among the live objects, and tags their tensors."""
    kinds = [getattr(sys.modules.get(module), name, None) for module, name in ENGINES.items()]
    kinds = [kind for kind in kinds if isinstance(kind, type)]
    if not kinds:
        return
    seen: set[int] = set()
    visited: set[int] = set()
    for engine in live_objects(*kinds):
        kind = type(engine)
        is_cache = kind.__name__.endswith("Cache")
        path_id = 0 if is_cache else text_id(kind.__name__)
        try:
            _mark_room(engine)
            for name, tensor in tensors_in(list(vars(engine).items()), PACKAGES, visited):
                use = KV_CACHE if is_cache else use_of(name)
                tag(tensor, use, path_id, text_id(name), seen, weak=1)
        except Exception as error:
            # A class may override `__dict__`.
            count("search of an engine", error)
