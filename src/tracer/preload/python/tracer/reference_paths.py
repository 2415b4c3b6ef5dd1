"""Names the holders of an object: variables, attributes, closures and the containers between them.

So that no code of the program runs, types are read with `type`, attributes with the descriptors that a class
defines in C, and dicts and lists with the functions of `dict` and `list`.
"""

from __future__ import annotations

import collections
import sys
import types
from typing import NamedTuple

from .frames import LOCAL_SETS, OWN_FILES, Lines, Variable, place, variables_of
from .graphs import bases_of, namespace_of_type
from .paths import path_of
from .torch_api import Module, torch

# Containers whose items all have the same name, `[*]`, whatever their index.
SEQUENCES = (list, tuple, set, frozenset, collections.deque)
GLOBAL_SETS = ("STORE_NAME", "STORE_GLOBAL")
# The meaning of a holder's line: it puts something into the holder, it sets the holder's name, or the
# holder's function was running there.
FILLED, SET, RUNNING = "filled", "set", "running"
# The kinds of holders that have no name in the program: the traceback of an exception, an object that no name
# reaches, and an optimizer with parameters of a model that is gone. `Root` lists the other kinds.
TRACEBACK, UNNAMED, UNUSED = "traceback", "unnamed", "unused"
MAX_KEY = 40
# The maximum number of lines that are named for one holder.
MOST_LINES = 4
# The maximum number of items of a container among which a CUDA graph is searched for.
MOST_ITEMS = 64
CudaGraph = getattr(torch._C, "_CUDAGraph", ())
# A metaclass may override `kind.__name__`, so the descriptor of `type` is used.
name_of_type = type.__dict__["__name__"].__get__
qualified_name_of_type = type.__dict__["__qualname__"].__get__


class Root(NamedTuple):
    """A name of the program at which a chain of references begins."""

    # local, global, attribute, closure, class, function, namespace (of `exec`), or UNNAMED
    kind: str
    name: str
    # The function, the module or the class that has the name.
    owner: str
    file: str
    line: int
    # For a closure: the names of its variables, in order.
    names: tuple[str, ...] = ()
    # The code of functions or modules that may put something into the named object.
    codes: tuple[types.CodeType, ...] = ()


class HolderName(NamedTuple):
    """The description of a holder by its names in the program."""

    # Targets with the same group have the same holder.
    group: str
    # What the holder is and where it is, such as "list `losses` (train.py:41)".
    text: str
    # The kind of its root, TRACEBACK or UNUSED.
    kind: str
    name: str
    owner: str
    file: str
    # The line is 0 if it is unknown.
    line: int
    # FILLED, SET, RUNNING or an empty text.
    line_is: str
    # What needs the holder in addition to its tensors, or an empty text.
    needed_by: str


def dict_of(thing) -> dict | None:
    """Returns the namespace of an object, or None if objects of its class have none."""
    for base in bases_of(type(thing)):
        found = namespace_of_type(base).get("__dict__")
        if found is not None:
            if type(found) is not types.GetSetDescriptorType:
                return None
            try:
                namespace = found.__get__(thing)
            except Exception:
                return None
            return namespace if issubclass(type(namespace), dict) else None
    return None


def _codes_of(kind: type) -> list[types.CodeType]:
    """Returns the code of the functions that a class defines."""
    functions = list(namespace_of_type(kind).values())
    return [function.__code__ for function in functions if type(function) is types.FunctionType]


def slot_of(thing, child: int) -> str:
    """Returns the name of the slot of `thing` that holds the object with the id `child`, or an empty text."""
    for base in bases_of(type(thing)):
        for name, slot in list(namespace_of_type(base).items()):
            if type(slot) is types.MemberDescriptorType:
                try:
                    if id(slot.__get__(thing)) == child:
                        return name
                except Exception:
                    # The slot has no value.
                    continue
    return ""


class Names:
    """The program's names, as known during one search. This object keeps no value of the program alive."""

    def __init__(
        self,
        variables: dict[int, Variable],
        codes: dict[int, list[types.CodeType]],
        main_code: list,
        lines: Lines,
    ) -> None:
        self.variables = variables
        self._lines = lines
        # By id(class) and attribute: the file and line that set the attribute.
        self._places: dict[tuple[int, str], tuple[str, int]] = {}
        # By id(namespace): the name of the module, its file, and its code where that is known.
        self._modules: dict[int, tuple[str, str, list[types.CodeType]]] = {}
        for name, module in list(sys.modules.items()):
            if issubclass(type(module), types.ModuleType):
                namespace = types.ModuleType.__dict__["__dict__"].__get__(module)
                file = namespace.get("__file__")
                file = file if type(file) is str else ""
                known = [*codes.get(id(namespace), ()), *(main_code if name == "__main__" else ())]
                known = list({id(code): code for code in known}.values())
                self._modules.setdefault(id(namespace), (name, file, known))
        self._keys: dict[int, dict[int, object]] = {}

    def key_of(self, table: dict, child: int):
        """Returns the key under which `table` has the value with the id `child`, or None if there is no such
        value or its key is not a string."""
        keys = self._keys.get(id(table))
        if keys is None:
            keys = {id(value): key if type(key) is str else None for key, value in list(dict.items(table))}
            self._keys[id(table)] = keys
        return keys.get(child)

    def root(self, parent, child: int) -> Root | None:
        """Returns the name by which `parent` holds its child if `parent` is the namespace of a module, a
        function, a torch module or a class. Returns None for other parents, whose own holders are then
        searched for."""
        kind = type(parent)
        module = self._modules.get(id(parent)) if kind is dict else None
        if module is not None:
            name, file, codes = module
            key = self.key_of(parent, child) or "?"
            lines = ((code.co_filename, self._lines.setting(code, key, GLOBAL_SETS)) for code in codes)
            file, line = next((found for found in lines if found[1]), (file, 0))
            return Root("global", key, "" if name == "__main__" else name, file, line, (), tuple(codes))
        if kind is types.FunctionType:
            code = parent.__code__
            where = {id(parent.__closure__): "closure", id(parent.__globals__): "namespace"}
            use = where.get(child, "function")
            line = code.co_firstlineno
            return Root(use, "", parent.__qualname__, code.co_filename, line, code.co_freevars, (code,))
        if issubclass(kind, Module):
            name = path_of(parent) or name_of_type(kind)
            return Root("attribute", name, "", *self._class_place(kind, ""))
        if issubclass(kind, type):
            return Root("class", qualified_name_of_type(parent), "", *self._class_place(parent, ""))
        return None

    def variable(self, child: int) -> Root | None:
        """Returns the variable of a running function that holds the object with the id `child`, or None."""
        found = self.variables.get(child)
        if found is None:
            return None
        code = found.code
        owner = getattr(code, "co_qualname", code.co_name)
        return Root("local", found.name, owner, code.co_filename, found.line, (), (code,))

    def _class_place(self, kind: type, attribute: str) -> tuple[str, int]:
        """Returns the file of a class, and the line that sets an attribute of its objects (0 if unknown)."""
        found = self._places.get((id(kind), attribute))
        if found is None:
            found = self._places[id(kind), attribute] = self._find_class_place(kind, attribute)
        return found

    def _find_class_place(self, kind: type, attribute: str) -> tuple[str, int]:
        for base in bases_of(kind):
            first = ("", 0)
            for value in list(namespace_of_type(base).values()):
                if type(value) is types.FunctionType:
                    code = value.__code__
                    line = self._lines.setting(code, attribute, ("STORE_ATTR",)) if attribute else 0
                    if line:
                        return code.co_filename, line
                    first = first if first[0] else (code.co_filename, 0)
            if first[0] and not first[0].startswith("<") and not attribute:
                return first
        return self._class_place(kind, "") if attribute else ("", 0)

    def describe(self, root: Root, chain: list) -> HolderName:
        """Describes a holder by its names in the program. `chain` has the objects from the root's value, or
        from the root itself if it is a module or a class, down to the tensor."""
        if root.kind == "closure":
            root, chain = _closure_variable(root, chain)
        path = _Path(self, chain)
        name = root.name + path.text
        while name.endswith("[*]"):
            name = name[:-3]
        file, lines, meaning = self._place_of(root, name, path.attribute, chain)
        text = _name_as_text(root, name, path.container) + _place_as_text(file, lines, meaning)
        holder = path.with_frame(root, text)
        return HolderName(
            # All objects that one exception keeps are one holder.
            group=text if path.error else holder,
            text=holder,
            kind=TRACEBACK if path.error else root.kind,
            name=name,
            owner=root.owner,
            file=file,
            line=lines[0] if lines else 0,
            line_is=meaning,
            needed_by="a CUDA graph" if any(map(_has_graph, chain)) else "",
        )

    def _place_of(self, root: Root, name: str, attribute: str, chain: list) -> tuple[str, list[int], str]:
        """Returns a file, its lines and their meaning (FILLED, SET or RUNNING). Prefers the lines that fill
        the named object to the line that sets its name."""
        codes, filled = root.codes, root.name
        if attribute and name.endswith("." + attribute):
            kinds = [type(each) for each in chain[:2]] + (
                [chain[0]] if chain and root.kind == "class" else []
            )
            codes, filled = [*codes, *(code for kind in kinds for code in _codes_of(kind))], attribute
        elif name != root.name:
            # The name belongs to a key of a dict or to an attribute of another object.
            codes = ()
        found, numbers = self._lines.filling(codes, filled)
        if numbers:
            return found, numbers, FILLED
        file, line = root.file, root.line
        if root.kind in ("attribute", "class") and attribute and chain:
            kind = type(chain[0]) if root.kind == "attribute" else chain[0]
            file, line = self._class_place(kind, attribute)
        if root.kind != "local":
            return file, [line], SET if line else ""
        number = self._lines.setting(root.codes[0], root.name, LOCAL_SETS)
        return (file, [number], SET) if number else (file, [line], RUNNING)


class _Path:
    """The names of attributes, keys and items from a root's value down to a tensor."""

    def __init__(self, names: Names, chain: list) -> None:
        self._names = names
        # The names as in the program, such as `.cache[*]`.
        self.text = ""
        # The class of the first container whose items have no name of their own, or an empty text.
        self.container = ""
        # The last attribute on the path, or an empty text if a namespace or a frame follows it.
        self.attribute = ""
        # The class of the exception whose traceback is on the path, or an empty text.
        self.error = ""
        # The variable of a traceback's frame that is on the path, and the code of the frame.
        self._frame: tuple[Variable, types.CodeType] | None = None
        # True after an object whose namespace comes next. The keys of a namespace are attributes.
        self._in_namespace = False
        for upper, lower in zip(chain, chain[1:]):
            self._add(upper, lower)

    def _add(self, upper, lower) -> None:
        """Adds the name by which `upper` holds `lower`."""
        kind = type(upper)
        if kind is types.CellType or kind is types.MethodType or kind is types.TracebackType:
            return
        if issubclass(kind, BaseException) and type(lower) in (types.TracebackType, types.FrameType):
            self.error = name_of_type(kind)
        elif kind is types.FrameType:
            self._add_frame(upper, lower)
        elif self._frame is not None:
            # The path inside a variable of a traceback is not named.
            return
        elif issubclass(kind, SEQUENCES):
            self._add_item(kind)
        elif issubclass(kind, dict):
            self._add_key(kind, self._names.key_of(upper, id(lower)))
        elif dict_of(upper) is lower:
            self.attribute, self._in_namespace = "", True
        else:
            self._add_attribute(upper, lower)

    def _add_frame(self, frame: types.FrameType, lower) -> None:
        found = dict(variables_of(frame)).get(id(lower))
        if found is not None:
            self._frame, self.attribute, self.container = (found, frame.f_code), "", ""

    def _add_item(self, kind: type) -> None:
        self.container = self.container or name_of_type(kind)
        self.text += "[*]"

    def _add_key(self, kind: type, key) -> None:
        if self._in_namespace:
            self.text += f".{key or '?'}"
            self.attribute, self._in_namespace = key or "", False
        elif key is not None and len(key) <= MAX_KEY and not any(c.isdigit() for c in key):
            self.text += f"[{key!r}]"
        else:
            self._add_item(kind)

    def _add_attribute(self, upper, lower) -> None:
        namespace = dict_of(upper)
        key = self._names.key_of(namespace, id(lower)) if namespace is not None else None
        self.attribute = key or slot_of(upper, id(lower))
        self.text += f".{self.attribute}" if self.attribute else ""

    def with_frame(self, root: Root, holder: str) -> str:
        """Returns the text of a holder together with the frame of a traceback, if one is on the path."""
        if self._frame is None:
            return holder
        variable, code = self._frame
        inner = f"local `{variable.name}` of {getattr(code, 'co_qualname', code.co_name)}()"
        inner += f" ({place(code.co_filename, variable.line)})"
        if root.owner == "sys" and root.name.startswith("last_"):
            # The exception is the cause of the exception that ends the program.
            holder = "the exception that was handled"
        if self.error:
            return f"traceback of {self.error} in {holder}: {inner}"
        return f"{inner}, by {holder}"


def _closure_variable(root: Root, chain: list) -> tuple[Root, list]:
    """Returns a closure's root with the name of the variable that holds the tensor, and the chain below the
    tuple of cells. `chain` begins with that tuple, followed by one of its cells."""
    cells, chain = chain[0], chain[1:]
    at = {id(cell): index for index, cell in enumerate(cells)}.get(id(chain[0]), -1)
    return root._replace(name=root.names[at] if 0 <= at < len(root.names) else "?"), chain


def _name_as_text(root: Root, name: str, container: str) -> str:
    """Returns what a holder is and where its name belongs, such as "list `cache` of train()"."""
    if root.kind == "function":
        return f"defaults or attributes of function {root.owner}()"
    if root.kind == UNNAMED:
        return f"{root.owner}, which no name of the program reaches"
    what = container or ("attribute" if root.kind in ("attribute", "class") else "variable")
    text = f"{what} `{name}`" if name else what
    if root.kind == "local":
        text += f" of {root.owner}()"
    elif root.kind == "global" and root.owner:
        text += f" of module {root.owner}"
    elif root.kind == "closure":
        text += f" in the closure of {root.owner}()"
    elif root.kind == "namespace":
        text += f" in the namespace of {root.owner}()"
    return text


def _place_as_text(file: str, lines: list[int], meaning: str) -> str:
    """Returns the lines of a holder in parentheses, after a space. Returns an empty text without a file."""
    if not file:
        return ""
    more = "".join(f", {other}" for other in lines[1:MOST_LINES])
    more += f" and {len(lines) - MOST_LINES} more" if len(lines) > MOST_LINES else ""
    more += ", where the function was" if meaning == RUNNING else ""
    return f" ({place(file, lines[0] if lines else 0)}{more})"


def _has_graph(thing) -> bool:
    """Returns True if a container has a captured CUDA graph among its first items. The graph reads and writes
    the tensors beside it, so they must stay."""
    kind = type(thing)
    if issubclass(kind, dict):
        items = list(dict.values(thing))[:MOST_ITEMS]
    elif issubclass(kind, list):
        items = list.__getitem__(thing, slice(MOST_ITEMS))
    elif issubclass(kind, tuple):
        items = tuple.__getitem__(thing, slice(MOST_ITEMS))
    else:
        return False
    return any(issubclass(type(item), CudaGraph) for item in items)


def is_own(thing) -> bool:
    """Returns True for a frame of the tracer."""
    return type(thing) is types.FrameType and thing.f_code.co_filename.startswith(OWN_FILES)
