"""Holds tensors in objects whose methods all report that they ran, and in tensors of several kinds."""

import sys

import memtrace
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

ran = []
names = ("__eq__", "__hash__", "__repr__", "__str__", "__len__", "__iter__", "__getattr__", "__getitem__")
names += ("__bool__", "__contains__", "__getattribute__", "__instancecheck__", "__reduce__", "__dir__")
is_watching = False


def telling(name, real):
    def method(self, *args):
        if is_watching:
            ran.append(name)
        if real is None:
            raise AttributeError(name)
        return real(self, *args)

    return method


def hostile_class(base):
    space = {name: telling(name, getattr(base, name, None)) for name in names if name != "__hash__"}
    space["__hash__"] = telling("__hash__", object.__hash__)
    space["__class__"] = property(telling("__class__", lambda self: int))
    return type("Hostile", (base,), space)


class Wrapped(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if is_watching:
            ran.append("__torch_function__")
        return super().__torch_function__(function, types, args, kwargs or {})


class Packed(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        if is_watching:
            ran.append("__tensor_flatten__")
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if is_watching:
            ran.append("__torch_dispatch__")
        args = [arg.inner if type(arg) is Packed else arg for arg in args]
        return function(*args, **(kwargs or {}))


def unpack(tensor):
    if is_watching:
        ran.append("unpack")
    return tensor


hostile = hostile_class(object)()
object.__setattr__(hostile, "items", hostile_class(list)())
kept = hostile_class(dict)()
wrapped, packed, graphs = [], [], []
with FakeTensorMode():
    fake = torch.ones(1 << 18, device="cuda")
sparse = torch.eye(16, device="cuda").to_sparse()
broken = torch.nn.Module.__new__(torch.nn.Linear)
weight = torch.ones(1 << 18, device="cuda", requires_grad=True)
for step in range(6):
    memtrace.step(step)
    list.append(object.__getattribute__(hostile, "items"), torch.ones(1 << 18, device="cuda"))
    dict.__setitem__(kept, step, torch.ones(1 << 18, device="cuda"))
    wrapped.append(torch.ones(1 << 18, device="cuda").as_subclass(Wrapped))
    packed.append(Packed(torch.ones(1 << 18, device="cuda")))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        graphs.append((weight * 2).exp().sum())
is_watching = True
found = memtrace.retained()
is_watching = False
print("ran:", ran)
print(len(found), file=sys.stderr)
