"""Makes tensors that io records must skip or unwrap; each printed line describes a step.

Marks contain the addresses that `checkers/odd_tensors.py` needs.
"""

import warnings

import torch
from torch.utils._pytree import tree_map

warnings.simplefilter("ignore")


def say(*words):
    print(*words, flush=True)


def mark(name, tensor):
    torch.cuda.nvtx.mark(
        f"odd:{name}:{tensor.untyped_storage().data_ptr()}:{tensor.untyped_storage().nbytes()}"
    )


class Wrapped(torch.Tensor):
    """A subclass whose own storage is empty."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map(lambda x: x.inner if isinstance(x, Wrapped) else x, (args, kwargs or {}))
        return tree_map(lambda x: Wrapped(x) if isinstance(x, torch.Tensor) else x, function(*args, **kwargs))


a, b = torch.ones(1000, device="cuda"), torch.ones(3000, device="cuda")
torch.cuda.nvtx.range_push("step 1")
mark("a", a), mark("b", b)
torch._foreach_add_([a, b], 1.0)
say("lists")
torch.add(a, a, out=b[:1000])
say("out", b.shape)
torch.nn.functional.layer_norm(a, (1000,), None, None)
say("optional")
a.view(10, 100)[3:5].t().mul_(2)
say("views")
torch.index_put(a, [None, torch.zeros(2, dtype=torch.long, device="cuda")][1:], b[:2])
say("optional lists")
sparse = torch.eye(64, device="cuda").to_sparse()
say("sparse", (sparse + sparse).shape, torch.eye(64, device="cuda").to_sparse_csr().layout)
with torch.inference_mode():
    made = torch.ones(100, device="cuda")
    made.add_(1)
    say("inference", made.is_inference())
say("subclass", type(Wrapped(a) + Wrapped(a)).__name__)
say("meta", (torch.empty(1 << 40, device="meta") + 1).device)
say("empty", torch.empty(0, device="cuda").add_(1).numel())
say(
    "undefined",
    torch.autograd.grad(
        torch.ones(3, requires_grad=True).sum(), torch.ones(1, requires_grad=True), allow_unused=True
    ),
)
host = torch.ones(5000)
mark("host", host)
host.add_(1)
say("host")
nested = torch.nested.nested_tensor([torch.ones(2, device="cuda"), torch.ones(3, device="cuda")])
say("nested", nested.is_nested)
say("quantized", torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8).is_quantized)
say("functional", torch.func.vmap(lambda x: x * 2)(a.view(10, 100)).shape)
say("mkldnn", torch.ones(2, 2).to_mkldnn().is_mkldnn if torch.backends.mkldnn.is_available() else True)
say("complex", torch.view_as_real(torch.ones(4, dtype=torch.cfloat, device="cuda")).shape)
say("resized", a.resize_(5000).numel())
torch.cuda.nvtx.range_pop()
