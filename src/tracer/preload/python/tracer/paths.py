"""Assigns module paths such as `GPT.h.0.attn`: the name of the root's class and the
names of the children below.

A module gets its path when its root is called for the first time, and keeps it until it is garbage-collected.
All tables are keyed by `id(module)`; a weak reference removes the entries before another object can have the
same id.
"""

from __future__ import annotations

import weakref

from .live_objects import outermost_module
from .native import assign_path, forget_module, hide, innermost_module
from .wrappers import class_name, join, unwrap

_references: dict[int, weakref.ref] = {}
_paths: dict[int, str] = {}
# The id of the root that gave the module its path.
_root_ids: dict[int, int] = {}
_tables: list[dict] = [_references, _paths, _root_ids]
# By root name: the live module that has it. No other live root gets the same name.
_root_names: dict[str, weakref.ref] = {}


def table_by_module() -> dict:
    """Returns a new table keyed by `id(module)`. An entry is removed when its module is garbage-collected."""
    table: dict = {}
    _tables.append(table)
    return table


def _forget(module_id: int) -> None:
    for table in _tables:
        table.pop(module_id, None)
    forget_module(module_id)


def has_path(module) -> bool:
    """Returns True if the module has a path."""
    return id(module) in _paths


def path_of(module) -> str:
    """Returns the path of a module, or an empty text if it has no path."""
    return _paths.get(id(module), "")


def root_id_of(module_id: int) -> int:
    """Returns the id of a module's root, or the module's own id if it has no path yet."""
    return _root_ids.get(module_id, module_id)


def root_of(module):
    """Returns the root that gave the module its path, or the module itself if that root is gone."""
    reference = _references.get(root_id_of(id(module)))
    root = reference() if reference is not None else None
    return root if root is not None else module


def _assign_path(module, path: str, root_id: int) -> None:
    module_id = id(module)
    if module_id not in _references:
        _references[module_id] = weakref.ref(module, hide(lambda _: _forget(module_id)))
    _paths[module_id], _root_ids[module_id] = path, root_id
    assign_path(module, path, class_name(type(module)))


def _root_name(root) -> str:
    """Returns the class name of the model, with a number from the second live model of that class on."""
    model, _ = unwrap(root)
    known = _paths.get(id(model))
    if known is not None and "." not in known:
        return known
    base = name = class_name(type(model))
    count = 1
    while True:
        reference = _root_names.get(name)
        holder = reference() if reference is not None else None
        if holder is None or holder is model:
            _root_names[name] = weakref.ref(model)
            return name
        count += 1
        name = f"{base}#{count}"


def assign_paths(root) -> None:
    """Assigns paths to the root and to the modules below it."""
    path, root_id = _root_name(root), id(root)
    inside = {id(module) for module in root.modules()}
    wrapper = ".".join(unwrap(root)[1])
    for name, module in root.named_modules():
        if wrapper and (name == wrapper or name.startswith(wrapper + ".") or wrapper.startswith(name + ".")):
            name = name[len(wrapper) + 1 :]
        # A module that is also below another root keeps its path there. A module whose old root is now below
        # this root gets a new path.
        known = _root_ids.get(id(module))
        if known is None or known in inside:
            _assign_path(module, join(path, name), root_id)


def assign_paths_on_call(module) -> None:
    """Assigns a path to a module that is called for the first time, below the module that
    calls it or as a root."""
    caller_id = innermost_module()
    reference = _references.get(caller_id)
    caller = reference() if reference is not None else None
    if caller is None:
        assign_paths(outermost_module(module))
        if not has_path(module):
            assign_paths(module)
        return
    name = _name_in(caller, module)
    path = join(_paths[caller_id], name if name is not None else class_name(type(module)))
    for inner_name, inner in module.named_modules():
        _assign_path(inner, join(path, inner_name), _root_ids[caller_id])


def _name_in(parent, module) -> str | None:
    name = next((name for name, child in parent._modules.items() if child is module), None)
    if name is None and next(module.parameters(), None) is not None:
        name = next((name for name, child in parent.named_modules() if child is module), None)
    return name
