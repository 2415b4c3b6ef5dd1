"""Installs the hooks in torch."""

from __future__ import annotations

import atexit
import sys
import time

from .failures import count
from .hooks import after_backward, after_forward, after_step, before_forward, before_step
from .known_objects import use_known_tensors
from .model_discovery import tag_everything_held, tag_registered
from .native import (
    FREE_THREADED,
    MEMORY_UNIT,
    MODULE_PATHS,
    RETAINED_MS,
    end_own_threads,
    hide,
    hook_vectorcall,
    leave_module,
)
from .overridden_calls import hook_overridden_calls
from .script_end import watch_script_end
from .steps import hook_steps
from .torch_api import Function, Module, is_compiling, nn_module, optim_optimizer, set_eval_frame, torch


def install() -> dict:
    """Installs the hooks. Returns the functions that the library calls from then on, by name."""
    # When the program ends right after a backward, autograd's thread may still wait for the interpreter, to
    # release a callback that Python queued (FSDP, MemTracker); pthread_exit in a C++ destructor then aborts
    # the process. This also happens without memtrace, but the hooks change the timing, so the sleep gives
    # waiting threads time to finish.
    atexit.register(time.sleep, 0.002)
    atexit.register(end_own_threads)
    watch_script_end()
    if MEMORY_UNIT and not is_compiling():
        use_known_tensors()
    if not MODULE_PATHS:
        return {}
    # Both functions are looked up before anything is installed, so that a torch without
    # them gets no hook at all.
    register_before = optim_optimizer.register_optimizer_step_pre_hook
    register_after = optim_optimizer.register_optimizer_step_post_hook
    if not hook_module_calls():
        hook_modules_globally(before_forward, is_compiling)
    if not hook_steps(before_step, after_step):
        register_before(lambda optimizer, args, kwargs, hook=before_step: hook(optimizer))
        register_after(lambda optimizer, args, kwargs, hook=after_step: hook(optimizer))
    callbacks = {
        "after_backward": after_backward,
        "out_of_memory": tag_everything_held,
        "track": tag_registered,
    }
    if RETAINED_MS:
        callbacks |= searches()
    return callbacks


def searches() -> dict:
    """Returns the functions that search for the holders of memory, by name. The dict is empty on Python
    before 3.10, on a free-threaded Python, with a torch whose base class of tensors has an unknown name, and
    if an import fails. The other hooks work without these functions."""
    has_base = hasattr(torch._C, "TensorBase") or hasattr(torch._C, "_TensorBase")
    if sys.version_info < (3, 10) or FREE_THREADED or not has_base:
        return {}
    try:
        # Imported here, because these modules read more of torch than the hooks do, and may fail.
        from .graphs import learn
        from .main_code import remember_main
        from .retained import (
            retained,
            retained_at_exit,
            retained_at_oom,
            retained_growth,
            retained_on_request,
        )
    except Exception as error:
        count("search for what is retained", error)
        return {}
    remember_main()
    learn()
    # Exit functions run in reverse order, so in most programs this one runs after all of the program's own.
    atexit.register(hide(retained_at_exit))
    return {
        "retained": retained,
        "retained_at_oom": retained_at_oom,
        "retained_growth": retained_growth,
        "retained_on_request": retained_on_request,
    }


def hook_module_calls() -> bool:
    """Hooks `Module._call_impl` through its vectorcall slot (see ../module_calls.rs). Returns False
    if that is not possible."""
    after = after_forward if MEMORY_UNIT else None

    def hook(call) -> bool:
        return type(call) is Function and hook_vectorcall(
            call, Function.__basicsize__, before_forward, after, set_eval_frame
        )

    if not hook(vars(Module).get("_call_impl")):
        return False
    hook_overridden_calls(hook)
    return True


def hook_modules_globally(before_forward, is_compiling) -> None:
    """Hooks module calls with torch's global hooks, if the vectorcall slot cannot be used. Global hooks cost
    more, and do not get the keyword arguments of a call, whose tensors stay without a tag. Both functions are
    passed as arguments, because dynamo traces the hooks and must find no global in them (see hooks.py)."""

    def before(module, args):
        before_forward(module, *args)

    def after(module, args, output):
        if is_compiling():
            return
        if MEMORY_UNIT:
            after_forward(module, output)
        leave_module(module)

    handles = [nn_module.register_module_forward_pre_hook(before)]
    try:
        handles.append(nn_module.register_module_forward_hook(after, always_call=True))
    except TypeError:  # torch 2.0 has no `always_call`.
        handles.append(nn_module.register_module_forward_hook(after))
    hide_global_hooks({handle.id for handle in handles})


def hide_global_hooks(own_ids: set) -> None:
    """Hides memtrace's global hooks from torch.compile, which warns about global hooks."""
    names = ("backward_pre_hooks", "backward_hooks", "forward_pre_hooks", "forward_hooks")
    tables = [getattr(nn_module, f"_global_{name}", None) for name in names]
    tables = [table for table in tables if table is not None]

    def has_any_global_hook():
        return any(key not in own_ids for table in tables for key in table)

    if hasattr(nn_module, "_has_any_global_hook"):
        nn_module._has_any_global_hook = has_any_global_hook
