"""Defines the hooks that torch and the library call before and after a module's forward and an optimizer's
step, and after a backward.

Each hook first checks whether dynamo is tracing, with a function in its closure. The function is not a
global, because dynamo guards the length of the namespace of each global that it reads and recompiles when the
namespace grows.

The hooks read models and tensors of the program, whose classes may override the attributes that are read
(`parameters`, `_parameters`, `state`, attributes of a tensor) and raise any exception. So each hook catches
every `Exception` and counts it. After a failure, tags are missing, but the program continues.
"""

from __future__ import annotations

import weakref
from _thread import get_ident
from typing import NamedTuple

from .caches import caches_are_given
from .communicators import name_groups
from .deepspeed import engine_is_called, tag_buckets
from .failures import count
from .forwards import has_optimizer, module_is_called, root_was_called
from .held import tag_engines
from .model_discovery import add_groups, is_due, is_time_to_search, name_parameters, name_uncalled_models
from .model_facts import note_call, note_input
from .module_memory import measure_call, measure_result
from .native import (
    ENTERED_INSIDE,
    ENTERED_OUTERMOST,
    MEMORY_UNIT,
    NOT_ENTERED,
    bytes_outside_phases,
    enter_module,
    forget_optimizer,
    has_fault_at_next_step,
    hide,
    innermost_module,
    is_detailed,
)
from .overridden_calls import hook_new_overridden_calls
from .paths import assign_paths_on_call, has_path, path_of, root_id_of, root_of, table_by_module
from .sharding import hook_sharding_libraries
from .steps import hook_new_classes
from .tags import (
    MAIN_THREAD,
    add_parameters,
    gone_parameters,
    has_moved,
    has_new_gradients,
    model_is_called,
    parameters_of,
    state_holder,
    tag_gradients,
    tag_gradients_of,
    tag_inputs,
    tag_model,
    tag_state_of,
)
from .torch_api import empty_cache, is_compiling, tracing_state, without_torch_function

# Parameters rarely move and optimizer state is rarely recreated once training runs. So after the first FIRST
# calls and steps, a model is tagged again at one in EVERY calls, and optimizer state at one in EVERY steps or
# when its number of entries changes.
FIRST = 3
EVERY = 50
# Any call searches for engines if the memory outside phases has grown by half and by this many bytes more,
# because a server has then probably allocated its cache.
MUCH = 64 << 20


class SteppedOptimizer(NamedTuple):
    """What is known about an optimizer since its last step."""

    reference: weakref.ref
    # The number of its steps since its parameters changed last.
    steps: int
    # The number of parameters that had state after the last step.
    states: int
    # The value of `gone_parameters` and the ids of the optimizer's parameters at the last step.
    stepped: tuple[int, list[int]]


# By id(root): the number of calls of the root as the outermost module.
_calls: dict[int, int] = table_by_module()
# The number of calls of outermost modules. A program may call many, such as each layer of a model by itself.
_outermost_calls = 0
# The value of `bytes_outside_phases` at the last search for engines.
_searched_bytes = 0
# By id(optimizer).
_optimizers: dict[int, SteppedOptimizer] = {}


def _make_before_forward(is_compiling):
    def before_forward(module, /, *args, **kwargs) -> None:
        """Called by the library before outermost modules and modules that have no path yet, and before all
        modules if their memory is recorded."""
        if is_compiling():
            return
        if not (MEMORY_UNIT and innermost_module()):
            try:
                module_is_called(module)
            except Exception as error:
                count("step of a program without training", error)
        # What reads a tensor's size adds an op to a graph that is being traced.
        reads_tensors = not tracing_state()
        has_detail = is_detailed()
        entered = enter_module(module) if has_detail else ENTERED_INSIDE
        if not reads_tensors:
            return
        try:
            if not has_detail:
                _root_is_called_without_detail(module, args, kwargs)
            elif entered != ENTERED_INSIDE:
                _root_or_new_module_is_called(module, entered, args, kwargs)
        except Exception as error:
            count("call of a model", error)
        if MEMORY_UNIT and has_detail:
            try:
                measure_call(module, args)
            except Exception as error:
                count("memory of a module", error)

    return before_forward


before_forward = _make_before_forward(is_compiling)


def _count_call(root) -> int:
    """Counts a call of an outermost module. Returns the number of its calls."""
    global _outermost_calls
    _outermost_calls += 1
    calls = _calls[id(root)] = _calls.get(id(root), 0) + 1
    root_was_called(root, calls)
    return calls


def _is_model_due(calls: int) -> bool:
    """Returns True if the call of a model with this number tags the model again."""
    return calls <= FIRST or calls % EVERY == 0


def _root_or_new_module_is_called(module, entered: int, args: tuple, kwargs: dict) -> None:
    """Handles the call of an outermost module or of a module without a path, in a detailed step. `entered` is
    the result of `enter_module`."""
    if entered == NOT_ENTERED:
        assign_paths_on_call(module)
        entered = enter_module(module)
        if entered != ENTERED_OUTERMOST:
            # The module was added to the model after the model's first call.
            with without_torch_function():
                tag_model(module)
    if entered == ENTERED_OUTERMOST:
        _root_is_called(module, args, kwargs)


def _root_is_called(root, args: tuple, kwargs: dict) -> None:
    """Handles the call of an outermost module in a detailed step. Tags the model, the inputs and the caches,
    and searches for models and engines that were never called."""
    calls = _count_call(root)
    model_is_called(root_id_of(id(root)))
    is_main = get_ident() == MAIN_THREAD
    hook_sharding_libraries()
    with without_torch_function():
        # The library calls `after_backward` on the main thread only.
        if not is_main and has_new_gradients():
            hook_new_classes()
            hook_new_overridden_calls()
            tag_gradients()
        name_groups()
        model = root_of(root)
        if _is_model_due(calls) or has_moved(model):
            tag_model(model)
        engine_is_called(root)
        if is_main and is_time_to_search(calls):
            name_uncalled_models()
        if is_main and _is_engine_due():
            tag_engines()
        caches_are_given(root, args, kwargs)
        seen: set[int] = set()
        tag_inputs(args, seen)
        tag_inputs(kwargs, seen)
        note_call(root, path_of(root), args, kwargs)
        note_input(path_of(root), args, kwargs)


def _root_is_called_without_detail(root, args: tuple, kwargs: dict) -> None:
    """Handles the call of an outermost module outside the detailed steps. Records the shape of its input.
    Tags the model in the first calls and then in one of EVERY, but no inputs and caches."""
    calls = _count_call(root)
    is_main = get_ident() == MAIN_THREAD
    is_engine_due = is_main and _is_engine_due()
    if _is_model_due(calls) or is_engine_due:
        with without_torch_function():
            if not has_path(root):
                assign_paths_on_call(root)
            tag_model(root_of(root))
            if is_main and is_time_to_search(calls):
                name_uncalled_models()
            if is_engine_due:
                tag_engines()
    with without_torch_function():
        note_input(path_of(root), args, kwargs)


def _is_engine_due() -> bool:
    """Returns True if this outermost call should search for servers' runners and caches. The first calls and
    calls 10, 30, 100, ... search if memory was allocated outside of all phases since the last search. Any
    call searches if that memory is large (see MUCH)."""
    global _searched_bytes
    size = bytes_outside_phases()
    if size > _searched_bytes * 1.5 + MUCH or is_due(_outermost_calls) and size > _searched_bytes:
        _searched_bytes = size
        return True
    return False


def after_forward(module, output) -> None:
    """Records the memory of a call's result. Called when the call returns. Installed only if the memory of
    modules is recorded."""
    try:
        if not tracing_state():
            measure_result(output)
    except Exception as error:
        count("memory of a result", error)


def _reference_to(optimizer) -> weakref.ref:
    """Returns a weak reference to an optimizer. When the optimizer is freed, its entries are removed."""
    key = id(optimizer)

    def forget(_) -> None:
        _optimizers.pop(key, None)
        forget_optimizer(key)

    return weakref.ref(optimizer, hide(forget))


def _make_before_step(is_compiling):
    def before_step(optimizer) -> None:
        """Names and tags the parameters of an optimizer if they have changed since its last step, and tags
        their gradients if these may be new. Called before each step."""
        if is_compiling():
            return
        try:
            with without_torch_function():
                known = _optimizers.get(id(optimizer))
                parameters = parameters_of(optimizer)
                stepped = (gone_parameters(), [id(parameter) for parameter in parameters])
                if known is None or known.stepped != stepped or known.reference() is not optimizer:
                    _optimizers[id(optimizer)] = SteppedOptimizer(_reference_to(optimizer), 0, 0, stepped)
                    name_parameters(parameters)
                    add_parameters(parameters)
                    tag_gradients_of(parameters)
                elif has_new_gradients() and is_detailed():
                    tag_gradients_of(parameters)
        except Exception as error:
            count("step of an optimizer", error)

    return before_step


before_step = _make_before_step(is_compiling)


def _make_after_step(is_compiling):
    def after_step(optimizer) -> None:
        """Tags the optimizer's state in its first FIRST steps, and then at one in EVERY steps or when the
        number of entries changes. Called after each step."""
        if is_compiling():
            return
        try:
            known = _optimizers.get(id(optimizer))
            if known is None:
                known = SteppedOptimizer(_reference_to(optimizer), 0, 0, (0, []))
            holder = state_holder(optimizer)
            states = len(holder.state)
            _optimizers[id(optimizer)] = known._replace(steps=known.steps + 1, states=states)
            name_groups()
            if known.steps < FIRST or known.states != states or known.steps % EVERY == 0:
                with without_torch_function():
                    tag_state_of(holder)
            if has_fault_at_next_step():
                # The simulated GPU injects the error into a call of the driver. With free memory in torch's
                # cache, the next step might make no such call.
                empty_cache()
        except Exception as error:
            count("state of an optimizer", error)

    return after_step


after_step = _make_after_step(is_compiling)


def after_backward() -> None:
    """Tags the gradients, and hooks optimizer and module classes that were created since the last call.
    Called on the main thread after a backward."""
    try:
        hook_new_classes()
        hook_new_overridden_calls()
        with without_torch_function():
            if not has_optimizer():
                add_groups()
            tag_gradients()
            tag_buckets()
    except Exception as error:
        count("gradients after a backward", error)
