"""The results of collectives of host tensors in a rank whose peers are stand-ins: as if all ranks had the
same data as this rank. Each function takes the group and the arguments of the collective.

`stand_ins.py` loads this module after PyTorch.
"""

import torch
import torch.distributed.distributed_c10d as c10d


def operation(arguments, options):
    for value in (*arguments, *options.values()):
        value = getattr(value, "reduceOp", value)
        if isinstance(value, (c10d.ReduceOp, c10d.ReduceOp.RedOpType)):
            return value
    return c10d.ReduceOp.SUM


def reduce_copies(tensor, size, reduction):
    """Replaces a tensor by the reduction of `size` equal copies. Only sums, products and XOR change it;
    of these, only XOR changes booleans."""
    if tensor.dtype == torch.bool and reduction != c10d.ReduceOp.BXOR:
        return
    if reduction == c10d.ReduceOp.SUM:
        tensor.mul_(size)
    elif reduction == c10d.ReduceOp.PRODUCT:
        tensor.pow_(size)
    elif reduction == c10d.ReduceOp.BXOR and size % 2 == 0:
        tensor.zero_()


def listed(value):
    return value if isinstance(value, (list, tuple)) else [value]


def all_reduce(group, tensors, *arguments, **options):
    for tensor in listed(tensors):
        reduce_copies(tensor, group.size(), operation(arguments, options))


def reduce(group, tensors, *arguments, **options):
    # The second argument is ReduceOptions, or the number of the root.
    root = arguments[0] if arguments else options.get("root", options.get("opts", group.rank()))
    root = getattr(root, "rootRank", root)
    if root == group.rank():
        all_reduce(group, tensors, *arguments, **options)


def gather(group, outputs, inputs, *arguments, **options):
    for parts, tensor in zip(outputs, inputs):
        for part in listed(parts):
            part.copy_(tensor)


def scatter(group, outputs, inputs, *arguments, **options):
    for output, parts in zip(outputs, inputs):
        output.copy_(parts[group.rank()])


def reduce_scatter(group, outputs, inputs, *arguments, **options):
    for output, parts in zip(listed(outputs), inputs):
        output.copy_(parts[group.rank()])
        reduce_copies(output, group.size(), operation(arguments, options))


def reduce_scatter_base(group, output, tensor, *arguments, **options):
    part = tensor.reshape(-1).chunk(group.size())[group.rank()]
    output.copy_(part.reshape(output.shape))
    reduce_copies(output, group.size(), operation(arguments, options))


def all_to_all(group, outputs, inputs, *arguments, **options):
    own = inputs[group.rank()]
    for output in outputs:
        if output.shape == own.shape:
            output.copy_(own)


def all_to_all_base(group, output, tensor, output_sizes=None, input_sizes=None, *rest, **options):
    size = group.size()
    inputs = tensor.split(list(input_sizes)) if input_sizes else tensor.chunk(size)
    outputs = output.split(list(output_sizes)) if output_sizes else output.chunk(size)
    all_to_all(group, outputs, inputs)


def nothing(group, *arguments, **options):
    """Does nothing, because the fake backend already writes the result."""


# The collectives by their name in `ProcessGroup`.
RESULTS = {
    "allgather": nothing,
    "_allgather_base": nothing,
    "broadcast": nothing,
    "send": nothing,
    "recv": nothing,
    "allreduce": all_reduce,
    "allreduce_coalesced": all_reduce,
    "reduce": reduce,
    "gather": gather,
    "scatter": scatter,
    "reduce_scatter": reduce_scatter,
    "_reduce_scatter_base": reduce_scatter_base,
    "alltoall": all_to_all,
    "alltoall_base": all_to_all_base,
}
