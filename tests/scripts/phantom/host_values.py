"""Large CPU tensors without values (`--no-host-values`), and everything that must keep its values.

host_values.py plan        builds a Llama with the shapes of 70 billion parameters and moves it to the GPU
host_values.py on_gpu      builds it on the GPU
host_values.py true        what keeps its values, also in forked workers; prints the sums
host_values.py lost        the tensors that have none, and errors that must still be raised
host_values.py memory      writes 8 GiB of CPU tensors in ways that are not skipped
"""

import os
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy
import torch

MIB = 1 << 20


def host_kib(name):
    with open("/proc/self/status") as file:
        return int(next(line.split()[1] for line in file if line.startswith(name + ":")))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    # The sizes of Llama 3.1 70B.
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_theta=500000.0,
    )
    torch.set_default_dtype(torch.bfloat16)
    return LlamaForCausalLM(config)


def report(model):
    count = sum(parameter.numel() for parameter in model.parameters())
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    print(count, *peaks, host_kib("VmHWM"))


def plan():
    report(llama().to("cuda"))


def on_gpu():
    with torch.device("cuda"):
        model = llama()
    report(model)


class Samples(torch.utils.data.Dataset):
    """Large samples of integers, and small ones of floating-point numbers."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.full((MIB,), index, dtype=torch.int64), torch.full((1000,), float(index))


def true():
    torch.cuda.init()
    keep = torch.empty(MIB)  # a tensor without values, which the workers inherit
    words = torch.arange(4 * MIB)
    flags = words > 100
    small = torch.ones(MIB // 4 - 1)
    array = numpy.full(MIB, 2.5)
    shared = torch.from_numpy(array)
    shared[0] = 7.5
    assert array[0] == 7.5, array[0]
    print("integers", int(words.sum()), int(flags.sum()))
    print("small", float(small.sum()))
    print("numpy", float(array.sum()), float(shared.sum()), shared.numpy() is not None)
    words.resize_(8 * MIB)
    print("resized", int(words[: 4 * MIB].sum()))
    for integers, numbers in torch.utils.data.DataLoader(Samples(), batch_size=2, num_workers=2):
        print("workers", int(integers.sum()), float(numbers.sum()))
    with tempfile.TemporaryDirectory() as folder:
        name = os.path.join(folder, "numbers")
        array.tofile(name)
        mapped = torch.from_file(name, shared=True, size=MIB, dtype=torch.float64)
        print("file", float(mapped.sum()))
        torch.save({"words": words[:10].clone(), "small": small, "keep": keep}, os.path.join(folder, "saved"))
        loaded = torch.load(os.path.join(folder, "saved"))
        print("saved", int(loaded["words"].sum()), float(loaded["small"].sum()), tuple(loaded["keep"].shape))
    moments = torch.ones(MIB).to(torch.int64)
    print("converted", tuple(moments.shape), moments.dtype)


def lost():
    before = host_kib("VmRSS")
    tensors = [torch.randn(64 * MIB), torch.ones(64 * MIB), torch.nn.Linear(8192, 8192).weight]
    tensors += [torch.empty(8192, 8192).normal_().to(torch.bfloat16), tensors[0].clone()]
    tensors += [tensors[2].t().contiguous(), tensors[0].view(8192, -1) + 1, tensors[0].half()]
    grown = host_kib("VmRSS") - before
    assert grown < 64 << 10, f"{grown} KiB"
    on_device = tensors[0].cuda()
    back = on_device.cpu()
    assert back.shape == tensors[0].shape and host_kib("VmRSS") - before < 192 << 10
    assert float(tensors[1].sum()) == 0
    for error in (
        lambda: tensors[0].copy_(torch.ones(3)),
        lambda: torch.empty(MIB).normal_(0, -1),
        lambda: torch.empty(MIB).uniform_(2, 1),
        lambda: torch.empty(MIB).add_(torch.ones(7)),
    ):
        try:
            error()
        except RuntimeError:
            continue
        raise AssertionError("an error was lost")
    # Ops with a second output that has values, where the first has none.
    count = 4 * MIB
    for order in (tensors[1][:count].sort().indices, torch.rand(count).argsort()):
        assert torch.equal(order.sort().values, torch.arange(count))
    assert int(torch.rand(2, 2 * MIB).max(0).indices.max()) <= 1
    assert torch.frexp(torch.zeros(count)).exponent.abs().max() == 0
    # A part of a tensor, and a broadcast.
    tensors[0][:4].copy_(torch.ones(4))
    tensors[0].view(8192, -1).copy_(torch.ones(8192))
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        child = torch.ones(4 * MIB)
        os._exit(0 if child.shape == (4 * MIB,) and float(torch.ones(10).sum()) == 10 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    print("lost")


def memory():
    array = numpy.ones(32 * MIB, dtype=numpy.float32)
    tensors = []
    for _ in range(64):
        tensors.append(torch.empty(32 * MIB))
        tensors[-1].numpy()[:] = array
    with open("/proc/self/smaps_rollup") as file:
        print(next(line.split()[1] for line in file if line.startswith("Pss:")))


globals()[sys.argv[1]]()
