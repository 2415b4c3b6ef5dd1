"""Calls modules of every kind in an interpreter without torch: any_python.py LIBC10_CUDA calls|hooks.

Torch is a stand-in (stand_in_torch.py), and the blocks come from the stand-in for torch's allocator. For each
block the script prints the module that allocated it, and the Python lines of the call, outermost first. With
`hooks`, module calls cannot be intercepted in C.
"""

import ctypes
import functools
import sys
import threading
import time

from stand_in_torch import Module, install

if sys.argv[2] == "hooks":
    Module._call_impl = functools.partialmethod(Module._call_impl)

interrupts = []


def is_scripting():
    if interrupts:
        raise interrupts.pop()
    return False


# Calls another function, as torch's `is_compiling` does: near the stack limit, this call fails where a
# module's forward would not.
install(is_compiling=lambda: is_scripting())

library = ctypes.CDLL(sys.argv[1])
library.torch_allocate.argtypes, library.torch_allocate.restype = [ctypes.c_size_t], ctypes.c_void_p


def block(module):
    lines, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == __file__:
            lines.append(f"{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    library.torch_allocate(512)
    print(module, *reversed(lines), "block", sep="|")


class Inner(Module):
    def forward(self, deeper):
        return block("Net.inner") if deeper == 0 else [self.again(deeper) for _ in (0,)]

    def again(self, deeper):
        numbers = (self.forward(deeper - 1) for _ in range(1))
        return list(numbers)


class Net(Module):
    def forward(self, deeper):
        block("Net")
        self._modules["inner"](deeper)


class Part(Module):
    def forward(self, takes):
        if takes:
            block("Every.part")


class Above(Module):
    """A module with its own `__call__`."""

    def __call__(self, takes):
        return super().__call__(takes)

    def forward(self, takes):
        if takes:
            block("Every.above")


class Raises(Module):
    def forward(self, error):
        raise error


class Endless(Module):
    def forward(self):
        self()


class Shallow(Module):
    def forward(self):
        return None


def reach():
    """Returns the lowest depth at which the first call of a module exceeds the stack limit."""

    def deep(further):
        return deep(further - 1) if further else Shallow()()

    further = sys.getrecursionlimit() - 100
    while True:
        try:
            deep(further)
        except RecursionError:
            return further
        further += 1


class Every(Module):
    """Calls its parts in every way that Python has."""

    def forward(self, takes):
        part = self._modules["part"]
        part(takes)
        part(takes=takes)
        part(*(takes,))
        part.__call__(takes)
        Module.__call__(part, takes)
        functools.partial(part, takes)()
        functools.partial(Module.__call__, part)(takes)
        self._modules["above"](takes)
        for name, error in (
            ("raises", KeyError()),
            ("raises", KeyboardInterrupt()),
            ("endless", RecursionError()),
        ):
            try:
                self._modules[name](*([error] if name == "raises" else []))
            except type(error):
                if takes:
                    block("Every")


every = Every(part=Part(), above=Above(), raises=Raises(), endless=Endless())
for _ in range(100):
    every(False)  # by now the interpreter has specialized each of these calls
reached = reach()
library.torch_allocate(512)  # from here on the hooks are installed
for _ in range(100):
    pass
assert bool(Module.before) == (sys.argv[2] == "hooks")
every(True)
if not Module.before:
    # If a hook raises KeyboardInterrupt, the program must get it; the program must get no other exception of
    # a hook.
    assert reach() == reached
    interrupts.append(KeyError())
    Shallow()()
    interrupts.append(KeyboardInterrupt())
    try:
        Shallow()()
    except KeyboardInterrupt:
        block("(none)")
    assert not interrupts
net = Net(inner=Inner())
for deeper in (0, 2):
    net(deeper)
block("(none)")
thread = threading.Thread(target=lambda: net(1))
thread.start()
thread.join()
eval(compile("net(0)\n", __file__, "exec"))


class Waits(Module):
    def forward(self):
        while True:
            time.sleep(0.0001)


class Late:
    """Is destroyed when Python ends, and releases the interpreter lock meanwhile."""

    def __init__(self, sleep=time.sleep):
        self.sleep = sleep

    def __del__(self):
        self.sleep(0.01)


late = Late()
# At exit, Python unwinds this daemon thread while it is inside the module.
threading.Thread(target=Waits(), daemon=True).start()
