"""Programs that run out of host memory for a known cause, each with its remedy, for scripts/host-corpus.

    python threads.py NAME            # holds too much memory
    python threads.py NAME --remedied # the same work, with the remedy in `THREAD_CASES` of that script

The first six are threads that people wrote about host memory, rebuilt small. The others are programs that an
outsider would bring. Each ends by itself if its memory suffices. All run on a simulated GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import io
import multiprocessing
import os
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

MIB = 1 << 20
args = argparse.Namespace(remedied=False)
kept: list[torch.Tensor] = []


def model(width: int = 2048, depth: int = 6) -> nn.Module:
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])


class Trainer:
    """A small training, so that the trace has steps."""

    def __init__(self) -> None:
        self.net = nn.Linear(256, 256, device="cuda")
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def step(self, seconds: float = 0.0) -> None:
        self.net(torch.ones(32, 256, device="cuda")).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        time.sleep(seconds)


# Threads.


def serves(requests: int) -> None:
    """A worker of an inference server. A native op on its path allocates and never frees."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    trainer = Trainer()
    for _ in range(requests):
        for _ in range(64):
            block = libc.malloc(60_000)
            ctypes.memset(block, 1, 60_000)
            if args.remedied:
                libc.free(block)
        trainer.step(0.05)


def native_leak() -> None:
    """vllm#50150: the RSS of a worker process grows until the limit of its pod."""
    worker = multiprocessing.get_context("fork").Process(target=serves, args=(400,))
    worker.start()
    worker.join()


def zero_offload() -> None:
    """LlamaFactory#6755: ZeRO-3 with offload. The optimizer, the master weights and the gradients are on the
    host, 16 bytes a parameter, in pinned memory that is rounded up. The remedy trains low-rank adapters."""
    import deepspeed

    if args.remedied:
        net = model(2048, 12).half()
        for layer in net:
            layer.requires_grad_(False)
        net = nn.Sequential(*[Adapted(layer) for layer in net])
    else:
        net = model(2048, 12).half()
    on_host = {"device": "cpu", "pin_memory": not args.remedied}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3, "offload_optimizer": on_host, "offload_param": on_host},
    }
    for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("MASTER_PORT", 29517)):
        os.environ[name] = str(value)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    engine, *_ = deepspeed.initialize(
        model=net, config=config, model_parameters=[p for p in net.parameters() if p.requires_grad]
    )
    for _ in range(3):
        engine.backward(engine(torch.randn(1, 2048, device="cuda", dtype=torch.half)).sum())
        engine.step()


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 8, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(8, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def offloaded_models() -> None:
    """ComfyUI#9456: a workflow loads one model after the other. A cache keeps each, offloaded to the host.
    The remedy is that of --cache-none: drop the model and load it again when it is needed."""
    from safetensors.torch import load_file, save_file

    trainer, cache = Trainer(), {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        save_file(model(2048, 12).state_dict(), file)
        for number in range(6):
            net = model(2048, 12)
            net.load_state_dict(load_file(file))
            net.cuda()
            with torch.no_grad():
                net(torch.randn(4, 2048, device="cuda"))
            if not args.remedied:
                cache[number] = net.cpu()
            del net
            trainer.step(0.4)


def saves(file: str, rank: int, ranks: int) -> None:
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", init_method=f"file://{file}", rank=rank, world_size=ranks)
    with torch.device("cuda"):
        net = FullyShardedDataParallel(model(2048, 12), device_id=rank)
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(6):
        net(torch.randn(4, 2048, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.3)
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=args.remedied)
    with (
        torch.cuda.nvtx.range("phase:checkpoint"),
        FullyShardedDataParallel.state_dict_type(net, StateDictType.FULL_STATE_DICT, config),
    ):
        state = net.state_dict()
        time.sleep(1)
        if rank == 0:
            torch.save(state, io.BytesIO())
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def gathered_on_every_rank() -> None:
    """pytorch#118520: saving a checkpoint of FSDP takes world size times the state on the host."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [spawn.Process(target=started, args=(f"{folder}/ranks", rank)) for rank in range(4)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()


def started(file: str, rank: int) -> None:
    args.remedied = os.environ["REMEDIED"] == "1"
    saves(file, rank, 4)


class Records(Dataset):
    """A data set of Python objects. Each access changes their reference counts, so a worker copies them."""

    def __init__(self) -> None:
        count = 3_000_000
        if args.remedied:
            self.labels = np.arange(count)
        else:
            self.labels = list(range(1000, count + 1000))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(int(self.labels[index]))


def copied_by_workers() -> None:
    """pytorch#122935: each worker of a DataLoader takes as much memory as the data set."""
    trainer = Trainer()
    for number, _ in enumerate(DataLoader(Records(), batch_size=4000, num_workers=6, shuffle=True)):
        if number % 50 == 0:
            trainer.step()
        if number == 200:
            return


def pinned_twice() -> None:
    """pytorch#95823: pinned memory takes twice what was asked for. The remedy pins one buffer whose size is a
    power of two, and slices it."""
    trainer, size = Trainer(), 66 * MIB
    buffer = torch.empty(1024 * MIB, dtype=torch.uint8, pin_memory=True) if args.remedied else None
    for number in range(15):
        if buffer is None:
            kept.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))
        else:
            kept.append(buffer[number * size : (number + 1) * size])
        kept[-1].fill_(1)
        trainer.step(0.3)


# Programs of outsiders.


class Decoded(Dataset):
    """Decodes images and caches them, in float64. The remedy caches what the file has, in uint8."""

    def __init__(self) -> None:
        self.cache: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return 800

    def __getitem__(self, index: int) -> torch.Tensor:
        if index not in self.cache:
            image = np.random.default_rng(index).integers(0, 255, (256, 256, 3), dtype=np.uint8)
            self.cache[index] = image if args.remedied else image / 255.0
        return torch.as_tensor(self.cache[index], dtype=torch.float32)


def numpy_cache() -> None:
    trainer = Trainer()
    for batch in DataLoader(Decoded(), batch_size=8):
        batch.cuda()
        trainer.step()


def tokens_in_memory() -> None:
    """Tokenises a data set into lists of integers. The remedy has arrays of int32."""
    trainer, rows = Trainer(), []
    rng = np.random.default_rng(0)
    for number in range(8_000):
        row = rng.integers(1000, 150_000, 4096).tolist()
        rows.append(np.array(row, dtype=np.int32) if args.remedied else row)
        if number % 50 == 0:
            trainer.step()


def offloaded_twice() -> None:
    """accelerate's cpu_offload of a model, with a copy of its state dict. The remedy makes no copy."""
    from accelerate import cpu_offload

    trainer = Trainer()
    net = model(4096, 8)
    state = None
    if not args.remedied:
        state = {name: value.clone() for name, value in net.state_dict().items()}
    trainer.step(0.5)
    cpu_offload(net, execution_device=torch.device("cuda"), state_dict=state)
    for _ in range(10):
        with torch.no_grad():
            net(torch.randn(4, 4096, device="cuda"))
        trainer.step(0.3)


def saves_in_thread() -> None:
    """Copies the state to the host and saves it in a thread, faster than the disk takes it. The remedy waits
    for the save before."""
    trainer, net = Trainer(), model().cuda()
    running: list[threading.Thread] = []

    def save(state: dict[str, torch.Tensor]) -> None:
        time.sleep(1.5)  # a slow disk
        torch.save(state, io.BytesIO())

    for number in range(60):
        trainer.step(0.05)
        if number % 4 == 0:
            if args.remedied and running:
                running[-1].join()
            state = {name: value.cpu() for name, value in net.state_dict().items()}
            running.append(threading.Thread(target=save, args=(state,)))
            running[-1].start()
            del state
    for thread in running:
        thread.join()


class Rows(Dataset):
    """A table with a column of strings, which each worker reads. The remedy has an array of fixed length."""

    def __init__(self, count: int) -> None:
        texts = [f"/data/train/{number:012d}.jpg" for number in range(count)]
        self.names = np.array(texts, dtype="S32")
        if not args.remedied:
            import pandas as pd

            self.names = pd.DataFrame({"name": pd.Series(texts, dtype=object)})

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> int:
        return len(self.names[index] if args.remedied else self.names["name"].iloc[index])


def pandas_workers() -> None:
    trainer = Trainer()
    data = DataLoader(Rows(3_000_000), batch_size=20_000, num_workers=6, shuffle=True)
    for _ in data:
        trainer.step()


PROGRAMS = [
    native_leak, zero_offload, offloaded_models, gathered_on_every_rank, copied_by_workers, pinned_twice,
    numpy_cache, tokens_in_memory, offloaded_twice, saves_in_thread, pandas_workers,
]  # fmt: skip

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--remedied", action="store_true")
    parser.parse_args(namespace=args)
    os.environ["REMEDIED"] = str(int(args.remedied))
    next(program for program in PROGRAMS if program.__name__ == args.name)()
